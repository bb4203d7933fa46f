"""Group `audit`: what a run does to find out whether its numbers are right; and, always, whether a shard gives them twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from isobatch.checks import choice, positive
from isobatch.errors import ConfigError
from isobatch.marks import Marks

if TYPE_CHECKING:
    from isobatch.audit.chain import Chain
    from isobatch.audit.watched import Hook, Node, Training

ON_MISMATCH = ("stop", "warn", "exclude")


class Audited(Protocol):
    """The choices of the other groups (the config), as far as an audit may refuse them."""

    @property
    def reduction(self) -> Any: ...


@dataclass(frozen=True)
class NoAudit:
    """Trust the hardware.

    Args:
        state: steps from one digest of the training state to the next, in metrics.jsonl; `auto`: under reduction=exact, at
            evaluations; null: none.
    """

    name: str = "none"
    state: int | str | None = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.state, str):
            choice("audit.state", self.state, ("auto",))
        elif self.state is not None:
            positive("audit.state", self.state)

    def chain(self, exact: bool) -> Chain:
        """The digests of a training that `exact` is promised of, or not."""
        from isobatch.audit.chain import Chain

        return Chain(self.state) if isinstance(self.state, int) else Chain(evaluations=exact and self.state is not None)

    def check_with(self, config: Audited) -> None:
        """Refuse what cannot be done together with the choices of other groups.

        Raises:
            ConfigError: with a way out.
        """

    def note(self, steps: int) -> str | None:
        """What a person should know of it in a run of so many steps."""
        return None

    def build(self, training: Training, generators: list[Any], node: Node) -> Hook | None:
        """What a training's windows go through; None = nothing."""
        return None


@dataclass(frozen=True)
class ReplayAudit(NoAudit):
    """Every `every` steps each rank computes a shard of another one again, and all compare digests of their state.

    Args:
        every: steps from one audit to the next.
        on_mismatch: `stop` the run; `warn` and go on; `exclude`: save a checkpoint, then end so that an elastic launch
            goes on without the node whose bits are off.
    """

    name: str = "replay"
    every: int = 100
    on_mismatch: str = "stop"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("audit.every", self.every)
        choice("audit.on_mismatch", self.on_mismatch, ON_MISMATCH)

    def check_with(self, config: Audited) -> None:
        if not config.reduction.exact:
            raise ConfigError("audit.name", self.name, "compares shards by their bits, and reduction="
                              f"{config.reduction.name} adds them up before anybody can look",
                              "set reduction=exact, or audit=none")  # fmt: skip

    def note(self, steps: int) -> str | None:
        return f"audit.every={self.every} of {steps} steps: no shard is looked at" if self.every > steps else None

    def build(self, training: Training, generators: list[Any], node: Node) -> Hook | None:
        from isobatch.audit.replay import Audit

        return Audit(self.every, self.on_mismatch, training, generators, node)


TABLE: dict[str, Any] = {"none": NoAudit, "replay": ReplayAudit}
MARKS = Marks(resume="free")
