"""Where a run starts: at step 0, or at a checkpoint of its own folder or of the run that `resume` names."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch import config as configuration
from isobatch import tasks
from isobatch.checkpoint import reading
from isobatch.checkpoint.folder import CheckpointFolder
from isobatch.checkpoint.reading import Saved
from isobatch.errors import ConfigError, reason
from isobatch.resume import contract, cut, image_settings, rebuild, signature, weights_know
from isobatch.resume.contract import ContractChange
from isobatch.run_folder import layout
from isobatch.run_folder.reading import Unreadable, read_mapping, usable
from isobatch.run_folder.rows import Standing, beyond

if TYPE_CHECKING:
    import torch

    from isobatch.batch_plan import BatchPlan
    from isobatch.checkpoint import Checkpointer
    from isobatch.config import Config
    from isobatch.data import DataInfo
    from isobatch.data.base import DataOptions
    from isobatch.model import Model
    from isobatch.runtime.distributed import Ranks
    from isobatch.stop import Ending
    from isobatch.train.state import TrainState

log = logging.getLogger("isobatch")

# facts of the plan that belong to the contract -> the setting to name
DATA_FACTS = {"train_samples": "data", "eval_samples": "data", "num_classes": "data", "input_shape": "data",
              "samples_per_epoch": "sampler"}  # fmt: skip


class Resume:
    """
    Args:
        run_dir: this run's folder. Its own checkpoints come before `resume`: they are the same run, further on.

    Raises:
        ConfigError: nothing to resume from, or a setting of the contract has changed without allow_contract_change.
    """

    def __init__(self, config: Config, run_dir: Path, ranks: Ranks):
        self.config, self.run_dir, self.ranks, self.task = config, run_dir, ranks, tasks.of(config)
        self.notes: list[str] = []
        self.finished = False
        reading.check_use(config, self.task.trains)
        self.logged: frozenset[tuple[int, str]] = frozenset()  # rows that a logger has from beyond the checkpoint
        self.saved: Saved | None = on_main(ranks, lambda: self._find())
        self.begun: Saved | None = None  # what an attempt that left no checkpoint was, as far as its files tell
        if self.saved is None:
            self.begun = on_main(ranks, lambda: self._find_begun())
            return
        self.notes.append(f"goes on from {self.saved.path}, step {self.saved.step}")
        if self.task.trains:
            self._refuse(contract.differences(self.saved.state["config"], config.plain))

    def _find(self) -> Saved | None:
        config, own = self.config, self.run_dir
        named = Path(config.resume) if config.resume is not None else None
        in_place = named is not None and named.resolve() == own.resolve()
        if self.task.trains and reading.exists(own) and not in_place:
            if config.checkpoint.resume == "auto":
                return reading.read(own)
            aside = CheckpointFolder(own / layout.CHECKPOINTS).put_aside()
            log.warning("checkpoint.resume=never: this run starts over, its earlier checkpoints are in %s", aside)
        # step 0 is the seed's: no checkpoint says more about it than the settings do
        return None if named is None or config.checkpoint.load == "step-0" else reading.read(named, config.checkpoint.load)

    def _find_begun(self) -> Saved | None:
        """An attempt of this very run in this folder that was killed before its first checkpoint."""
        before, options = usable(self.run_dir, layout.CONFIG), self.config.checkpoint
        if before is None or not self.task.trains or before.get("task") != self.task.name or options.resume != "auto":
            return None
        try:
            plan = read_mapping(self.run_dir, layout.PLAN)
            as_begun = {**dataclasses.asdict(configuration.BatchOptions()), **contract.EARLIER["batch"], **before["batch"]}
            same = as_begun == self.config.plain["batch"] and not contract.differences(before, self.config.plain)
        except (Unreadable, KeyError, TypeError):
            return None
        return Saved(self.run_dir, 0, {"plan": plan, "config": before}) if same else None

    @property
    def uses_weights(self) -> bool:
        """Whether the checkpoint's weights are what the task is about, and no training follows."""
        return self.task.built in ("loop", "model") and not self.task.trains

    @property
    def threads(self) -> int:
        """Of a kernel under reduction=exact: one, unless the run that goes on began with more, which decide its bits."""
        state = self.saved.state if self.saved is not None else {}
        reduction = state.get("config", {}).get("reduction") or {}
        if reduction.get("name") != self.config.reduction.name or not self.config.reduction.exact:
            return 1
        found = state.get("identity", {}).get("threads")
        return found if type(found) is int and found > 0 else 1

    @property
    def in_place(self) -> bool:
        """Whether the run goes on in the folder that it was in."""
        return self.saved is not None and self.saved.run.resolve() == self.run_dir.resolve()

    def data(self) -> DataOptions:
        """The data's options; what they leave open of images is as the weights know them, and a note says so."""
        options, told = image_settings.settled(self.config, self.saved or self.begun, self.uses_weights,
                                               lambda look: on_main(self.ranks, look))  # fmt: skip
        self.notes += told
        return options

    def model(self, info: DataInfo) -> Model:
        """The model's options; where a checkpoint has all its weights, none are fetched or read from elsewhere.

        Raises:
            ConfigError: the first weights are what the task is about, and they do not know the classes of the data.
        """
        options = self.config.model
        if self.saved is None:
            if self.uses_weights:
                self.notes += weights_know.check_answers(options, info)
            return options
        return rebuild.without_first_weights(options)

    def precision(self, device: torch.device) -> Any:
        """The level's options; what is left to the machine stays as the run began with it, where the default was another."""
        options = self.config.precision
        was = self.saved.state["config"].get("precision") if self.saved is not None else None
        if not isinstance(was, Mapping) or was.get("name") != options.name:
            return options
        begun = options.as_begun(bool(self.saved.state["scaler"]), device)  # type: ignore[union-attr]
        self.notes += [f"goes on with precision.{key}={contract.shown(value)}, as the run began; a new run would have "
                       f"{contract.shown(getattr(options, key))}" for key, value in begun.items()]  # fmt: skip
        return dataclasses.replace(options, **begun)

    def batch(self) -> cut.Cut:
        """For batch_plan.resolve_batch: as typed, but what is not typed anew stays as the run that goes on had it."""
        saved, typed = self.saved or self.begun, cut.typed(self.config)
        if saved is None or (not self.task.trains and typed.micro != "auto"):
            return typed
        try:
            return cut.continued(self.config, saved)
        except cut.DAMAGED:
            if self.saved is None:  # a file that a kill or somebody's hand damaged: the run begins as any other
                return typed
            raise self._unfit("its plan is incomplete") from None

    def check(self, plan: Mapping[str, Any], identity: Mapping[str, Any], exact: bool,
              batch_norm: Mapping[str, str], windows: BatchPlan) -> list[str]:  # fmt: skip
        """Compare the numbers of this plan with the saved ones; returns lines for a person.

        Args:
            plan: as saved (see Run.about). exact: reduction=exact. batch_norm: numbers of the plan that
                decide its statistics -> the setting to name. windows: as `placed` gave them.
        Raises:
            ConfigError: the contract has changed, or the run is further than its new end.
        """
        if self.saved is None:
            return self.notes
        before, step, allow = self.saved.state["plan"], self.saved.step, self.config.allow_contract_change
        self.notes += signature.compare(before, plan, self.config.data, self.saved.run, allow, self.uses_weights)
        if not self.task.trains:
            return self.notes
        changed = contract.facts_changed(before, plan, {"effective_batch": "batch.effective", **DATA_FACTS})
        before = {**before, "shard": cut.shard_of(before)}
        cut_by = {"shard": cut.key(self.config, self.saved.state["config"])}
        anew = contract.facts_changed(before, plan, cut_by)
        if exact or batch_norm:
            changed += contract.facts_changed(before, plan, {**batch_norm, **cut_by})
        elif anew:
            self.notes.append(f"{anew[0]}: the shards are cut anew, so dropout draws anew and sums round anew")
        self._refuse(changed)
        self.notes += cut.place_notes(windows, step)
        other = {k: (v, identity[k]) for k, v in self.saved.state["identity"].items()
                 if k in identity and k not in cut.CUT and identity[k] != v}  # fmt: skip
        if other:
            listed = ", ".join(f"{k} {contract.shown(a)} -> {contract.shown(b)}" for k, (a, b) in other.items())
            self.notes.append(f'the promise drops from "to the bit" to "same effective batch": {listed}')
        elif not exact and before.get("num_replicas") != plan["num_replicas"]:
            self.notes.append("reduction=fast on another number of replicas: the rest is equal up to rounding")
        elif not exact and not anew and before.get("micro_batch") != plan["micro_batch"]:
            self.notes.append("reduction=fast with another micro batch: the rest is equal up to rounding")
        total = plan["steps"]
        if step > total:
            key = "epochs" if self.config.epochs is not None else "steps"
            problem = f"{self.saved.run} is at step {step} already, past {total}"
            raise ConfigError(key, getattr(self.config, key), problem,
                              f"set {key} higher, or checkpoint.load to an earlier checkpoint")  # fmt: skip
        self.finished = step == total == self.saved.state["counters"]["evaluated"]
        if self.finished:
            self.notes.append(f"{self.saved.run} is complete at step {step}: nothing to do; raise epochs to go on")
        if not self.finished:
            self.notes += cut.schedule_notes(self.config, self.saved, plan["steps"], windows)
        return self.notes

    def placed(self, plan: BatchPlan) -> BatchPlan:
        """`plan`, going on where the data of the checkpoint stopped: see cut.placed."""
        if self.saved is None or not self.task.trains:
            return plan
        try:
            return cut.placed(plan, self.saved)
        except cut.DAMAGED:
            raise self._unfit("its plan is incomplete") from None

    def restore(self, state: TrainState) -> None:
        """Put the saved state into `state`, in place: views stay views.

        Raises:
            ConfigError: it does not fit the model or the optimizer.
        """
        if self.saved is None:
            return
        from isobatch.checkpoint.fitting import fitted

        told = len(self.notes)  # with the plan
        try:
            state.load_state_dict(fitted(state, self.saved.state, self.notes, self.task.trains))
        except reading.Damaged as problem:
            raise self._unfit(str(problem)) from None
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
            raise self._unfit(reason(error)) from None
        for note in self.notes[told:]:
            log.info("resume: %s", note)
        if self.task.trains and not self.config.allow_contract_change:
            self.logged = beyond(self.saved.run, Standing(state.step, state.evaluated, state.samples))

    def ended(self, ending: Ending | None) -> Ending | None:
        """`ending`, by which a rule of `stop` has ended the run that is resumed, if it still holds."""
        if ending is not None and self.task.trains and self.saved is not None and not self.finished:
            self.finished = True
            log.info("resume: nothing to do, %s; loosen the rule or set stop=none to go on", ending.reason)
            return ending
        return None

    def choose_weights(self, state: TrainState) -> None:
        """Bring `checkpoint.weights` about, for an evaluation: without its average a state is evaluated as trained.

        Raises:
            ConfigError: `ema`, and there is no average.
        """
        if not self.uses_weights or self.saved is None:
            return
        if self.config.checkpoint.weights == "ema" and (state.ema is None or not self.saved.state["ema"]):
            raise reading.no_ema(self.saved)
        if reading.chosen(self.saved, self.config.checkpoint) == "raw":
            state.ema = None

    def adopt(self, checkpointer: Checkpointer) -> None:
        """Take the other run's `best` along, while its metric is what this run has to beat."""
        if self.saved is not None and not self.in_place and (self.saved.path.parent / "best").is_dir():
            steps = {entry["step"] for entry in self.saved.state["counters"]["best"].values()}
            checkpointer.adopt_best(self.saved.path.parent / "best", steps)

    def earlier_result(self) -> dict[str, float]:
        """`final` of the run's summary: what a finished run that is resumed still has to say."""
        try:
            final = read_mapping(self.saved.run, layout.SUMMARY)["final"]  # type: ignore[union-attr]
            return {str(k): float(v) for k, v in final.items()}
        except (Unreadable, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return {}

    def _refuse(self, changed: list[ContractChange]) -> None:
        if not changed:
            return
        assert self.saved is not None
        first, others = changed[0], changed[1:]
        if self.config.allow_contract_change:
            self.notes.append(f"contract changed: {', '.join(map(str, changed))}")
            return
        also = f" (and {', '.join(map(str, others))})" if others else ""
        raise ConfigError(first.key, contract.shown(first.now),
                          f"{self.saved.run} was trained with {first.key}={contract.shown(first.before)}{also}",
                          "keep it, or set allow_contract_change=true"
                          + (", or checkpoint.resume=never to start over" if self.in_place else ""))  # fmt: skip

    def _unfit(self, problem: str) -> ConfigError:
        assert self.saved is not None
        return ConfigError("resume", self.saved.path, f"does not fit this run: {problem}",
                           "resume with the settings that the run was made with")  # fmt: skip


def on_main(ranks: Ranks, look: Any) -> Any:
    """What `look()` finds on the main rank, on every rank; its refusal is everybody's."""
    found: Any = None
    if ranks.is_main:
        try:
            found = look()
        except ConfigError as refusal:
            found = refusal
    found = ranks.broadcast_object(found)
    if isinstance(found, ConfigError):
        raise found
    return found
