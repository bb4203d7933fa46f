"""timm's own schedulers by name, as a factor: a scheduler over a rate of 1, asked for each update anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

from isobatch import amounts
from isobatch.checks import choice, within
from isobatch.errors import ConfigError

# an option that is a length -> what timm calls it; there it is in epochs, and here an update stands for one
LENGTHS = {"length": "num_epochs", "every": "decay_epochs", "at": "decay_milestones", "warmup": "warmup_epochs",
           "cooldown": "cooldown_epochs", "timescale": "stable_timescale"}  # fmt: skip
# what only some of them read -> these; anywhere else timm leaves it out without a word
CYCLES, STEADY = ("cosine", "tanh", "poly"), ("wsd", "rsqrt")
READ_BY = {
    "length": (*CYCLES, *STEADY), "every": ("step", *STEADY), "at": ("multistep",), "timescale": ("rsqrt",),
    "final": (*CYCLES, *STEADY), "decay_rate": ("step", "multistep", "poly"), "decay_fn": STEADY, "k_decay": ("cosine", "poly"),
    **dict.fromkeys(("cycle_mul", "cycle_decay", "cycle_limit"), CYCLES),
    **dict.fromkeys(("patience_epochs", "plateau_mode"), ()),
}  # fmt: skip
OWN = {*LENGTHS.values(), "min_lr", "warmup_lr", "step_on_epochs", "updates_per_epoch", "optimizer", "sched"}


@dataclass(frozen=True)
class TimmScheduler:
    """timm.scheduler.create_scheduler_v2. What it calls a rate is a factor here: of the rate that the optimizer's group has.

    Args:
        sched: timm's name.
        length: of the schedule, of its first cycle where there are several; null: of the run.
        every, at: decay_epochs and decay_milestones. warmup, cooldown, timescale: of the same names there.
        warmup_start: warmup_lr. final: min_lr.
        kwargs: the others by timm's names: decay_rate, cycle_mul, cycle_decay, cycle_limit, k_decay, noise, noise_pct,
            noise_std, noise_seed, warmup_prefix, decay_fn.
        per_epoch: hold the factor within an epoch.
    """

    amounts: ClassVar[tuple[str, ...]] = tuple(LENGTHS)

    name: str = "timm"
    sched: str = "cosine"
    length: Any = None
    every: Any = None
    at: list[Any] = field(default_factory=lambda: [0.3, 0.6, 0.9])
    warmup: Any = 0
    cooldown: Any = 0
    timescale: Any = None
    warmup_start: float = 1e-5
    final: float = 0.0
    per_epoch: bool = False
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choice("scheduler.sched", self.sched, ("cosine", "tanh", "step", "multistep", "poly", "wsd", "rsqrt", "constant"))
        amounts.read(self, "scheduler", ("at",))
        within("scheduler.warmup_start", self.warmup_start, 0, 1)
        within("scheduler.final", self.final, 0, 1)
        for key in self.kwargs:
            if key in OWN:
                own = next((ours for ours, theirs in LENGTHS.items() if theirs == key), None)
                raise ConfigError(
                    f"scheduler.kwargs.{key}",
                    self.kwargs[key],
                    "is an option of its own here",
                    f"set scheduler.{own or {'min_lr': 'final', 'warmup_lr': 'warmup_start'}.get(key, 'sched')}",
                )

    def check_with(self, config: Any) -> None:
        """Refuse what timm's `sched` does not read and would leave out without a word. As typed: lengths are no updates yet.

        Raises:
            ConfigError: see above.
        """
        defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(self)}
        given = {key: getattr(self, key) for key in (*LENGTHS, "final") if getattr(self, key) != defaults[key]}
        for key, value in (given | self.kwargs).items():
            by = READ_BY.get(key, (self.sched,))
            if self.sched not in by:
                option = f"scheduler.{key}" if key in given else f"scheduler.kwargs.{key}"
                instead = f", or set scheduler.sched={' or '.join(by)}" if by else ""
                raise ConfigError(option, value, f"says nothing to scheduler.sched={self.sched}", f"leave it out{instead}")

    def built(self, total: int) -> Callable[[int], float]:
        """update -> factor. Lengths are in updates by now.

        Raises:
            ConfigError: timm takes none of it.
        """
        from torch import nn, optim

        from isobatch.runtime.timm_import import timm

        given = {theirs: getattr(self, ours) for ours, theirs in LENGTHS.items() if getattr(self, ours) is not None}
        given.setdefault("num_epochs", max(1, total - self.cooldown))
        rate = optim.SGD([nn.Parameter()], lr=1.0)
        try:
            scheduler, _ = timm.scheduler.create_scheduler_v2(
                rate, self.sched, min_lr=self.final, warmup_lr=self.warmup_start, step_on_epochs=True,
                **{**given, **self.kwargs},
            )  # fmt: skip
            scheduler.step(0)
        except (TypeError, ValueError, AssertionError, ZeroDivisionError) as error:
            raise ConfigError("scheduler.sched", self.sched, f"timm could not build it ({error})",
                              "check scheduler.kwargs and the lengths") from None  # fmt: skip

        def factor(update: int) -> float:
            scheduler.step(update)
            return float(rate.param_groups[0]["lr"])

        return factor
