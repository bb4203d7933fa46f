"""The loop over windows: when to log, evaluate, save and stop. What a step does is step.py's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from isobatch.audit.chain import Chain
from isobatch.checkpoint import Checkpointer
from isobatch.checkpoint.saving import SAVE_NOW
from isobatch.console import Console
from isobatch.data.feed import Feed, WindowData
from isobatch.errors import JobFailed, Stopped
from isobatch.evaluate.evaluator import Evaluator
from isobatch.logger import Logger
from isobatch.profile.profiler import Profiler
from isobatch.run_folder.files import RunFiles
from isobatch.runtime import accelerator, device_use, machine_load
from isobatch.runtime.distributed import Ranks
from isobatch.runtime.dtensor import whole
from isobatch.stop import TIME_UP, Ending, Stopping
from isobatch.train.nonfinite import LossWatch
from isobatch.train.pace import Pace
from isobatch.train.polling import StopPoll
from isobatch.train.state import TrainState
from isobatch.train.step import Parts, train_step

if TYPE_CHECKING:
    from isobatch.train.lanes import LaneSteps


@dataclass
class Clock:
    """Seconds of training without evaluation and saving; `first_step` is None until the first step has ended."""

    train_s: float = 0.0
    first_step: float | None = None
    _since: float = field(default_factory=time.perf_counter)

    def lap(self) -> float:
        """Add the time since the last lap or restart; returns the total."""
        now = time.perf_counter()
        self.train_s += now - self._since
        self._since = now
        return self.train_s

    def restart(self) -> None:
        self._since = time.perf_counter()

    def forget(self) -> None:
        """Begin anew: what was timed so far was warm-up."""
        self.train_s = 0.0
        self.restart()


@dataclass
class Loop:
    state: TrainState
    parts: Parts
    feed: Feed
    evaluator: Evaluator
    schedule: Callable[[int], float]
    stopping: Stopping
    checkpointer: Checkpointer
    logger: Logger
    console: Console
    files: RunFiles
    ranks: Ranks
    total_steps: int
    log_every: int
    eval_every: int
    stop_requested: Callable[[], int]
    log_weights: int = 0
    warmup: int = 0
    ahead: int = 0  # of the steps that evaluations are counted by (BatchPlan.ahead)
    evaluated: Callable[[], None] = lambda: None  # what follows an evaluation while training
    profiler: Profiler = field(default_factory=Profiler)
    audit: Callable[[TrainState, Parts, Iterator[WindowData]], Iterator[WindowData]] | None = None
    chain: Chain = field(default_factory=Chain)
    use: device_use.DeviceUse = field(default_factory=device_use.DeviceUse)
    ending: Ending | None = None  # how a rule has ended the run before its length was up
    pace: Pace | None = None
    lane_steps: LaneSteps | None = None  # the micro step in `parts`, where shards run at the same time
    clock: Clock = field(default_factory=Clock)
    trained_samples: int = 0
    watch: LossWatch = field(default_factory=LossWatch)
    late: tuple[dict[str, Any], accelerator.Fetched] | None = None  # a row whose numbers are on their way
    last_eval: dict[str, float] = field(default_factory=dict)
    last_train: dict[str, float] = field(default_factory=dict)

    def samples_per_s(self) -> float | None:
        """Over the whole training, without evaluation and saving."""
        return self.trained_samples / self.clock.train_s if self.clock.train_s else None

    def train(self) -> None:
        """Train until `total_steps`, or until a rule ends it (see `ending`).

        Raises:
            Stopped: on a signal, after a complete checkpoint. JobFailed: the loss is not finite.
        """
        try:
            self._train()
        except BaseException:
            with suppress(Exception):  # the device may be what failed: nobody waits for it
                if self.late is not None and self.late[1].arrived():
                    self._log(self._read(*self.late))
            raise

    def _train(self) -> None:
        state = self.state
        poll = StopPoll(self.ranks, self._requested)
        self.console.begin(state.step)
        self.clock.restart()
        if 0 < state.step != state.evaluated and self._evaluates(state.step):
            self._between_steps(0)  # a stop came between this step and its evaluation
        if self.ending is not None:
            return
        windows = self.feed.windows(state.step, self.total_steps)
        if self.audit is not None:
            windows = self.audit(state, self.parts, windows)
            self.clock.restart()
        windows = self.profiler.windows(windows, state, self.parts)
        logged_samples = state.samples
        logged_s = self.clock.train_s
        timed_from = state.step + self.warmup
        pause = self._next_pause()
        for data in windows:
            lr = self._set_lr()
            chained = self.chain.due(state.step + 1)
            log_now = chained or (state.step + 1) % self.log_every == 0 or state.step + 1 == self.total_steps
            applied, norm = train_step(state, self.parts, data, want_norm=log_now)
            if self.pace is not None:
                self.pace = self.pace.step(self.feed.waited)
            self.watch.saw(data.window, self.parts.reducer)
            size = data.window.size
            state.step += 1
            state.samples += size
            self.trained_samples += size
            state.update += applied
            state.skipped_steps += not applied
            if log_now or state.step == 1:
                self.flush()
                row, numbers = self._row(data, lr, norm)
                row |= self.chain.link(state) if chained else {}
                if at_once := self.parts.device.type == "cpu" or state.step == 1 or self._pauses(state.step):
                    accelerator.wait(self.parts.device)  # what comes next needs the row, or a clock that is right
                seconds = self.clock.lap()
                row |= self.profiler.row()
                row["perf/samples_per_s"] = (state.samples - logged_samples) / max(seconds - logged_s, 1e-9)
                if state.step > timed_from:
                    row["time_s"] = seconds
                logged_samples, logged_s = state.samples, seconds
                self.late = row, numbers
                if at_once:
                    self.flush()
                self.logger.watch(row, state.model)
            if self.warmup and state.step == timed_from:
                accelerator.wait(self.parts.device)
                self.clock.forget()
                self.trained_samples, logged_samples, logged_s = 0, state.samples, 0.0
            self.console.advance(state.step, data.window.epoch)
            if self.clock.first_step is None:
                self.clock.first_step = time.time()
            signum = poll.due(state.step)
            if signum or state.step >= pause:
                self._between_steps(signum)
                if self.ending is not None:
                    break
                pause = self._next_pause()

    def _requested(self) -> int:
        return self.stop_requested() or self.stopping.request() or self.checkpointer.request()

    def _next_pause(self) -> int:
        """The first step from here on that an evaluation or a save is known to follow: a step asks no more than that."""
        after = self.state.step + 1
        evaluation = after + (self.ahead - after) % self.eval_every
        return min(self.total_steps, evaluation, self.checkpointer.next_due(after) or evaluation)

    def _evaluates(self, step: int) -> bool:
        return step == self.total_steps or (step - self.ahead) % self.eval_every == 0

    def _pauses(self, step: int) -> bool:
        """Whether an evaluation or a save that is known beforehand follows `step`."""
        return self._evaluates(step) or self.checkpointer.due(step)

    def _between_steps(self, signum: int) -> None:
        """Evaluation and saving, outside the training clock."""
        state = self.state
        last = state.step == self.total_steps
        evaluates = self._evaluates(state.step)
        time_is_up = signum == TIME_UP
        if signum in (SAVE_NOW, TIME_UP):
            saves, signum = True, 0
        else:
            saves = last or self.checkpointer.due(state.step)
        if not (evaluates or saves or signum):
            return
        self.flush()
        if self.pace is not None:
            self.pace.drained()
        self.clock.lap()
        is_best = is_leader = False
        if evaluates and not signum:
            is_best = self.evaluate(both=True)
            state.follow({**self.last_eval, "step": state.step})
            self.evaluated()
            is_leader = self.checkpointer.leaders.entered
        if not last and not signum:
            self.ending = self.stopping.out_of_time() if time_is_up else self.stopping.ending
        if signum or saves or is_best or is_leader or self.ending:
            self.checkpointer.save(state, is_best)
        if signum:
            self.checkpointer.wait()
            raise Stopped(signum)
        self.clock.restart()

    def evaluate(self, both: bool = False) -> bool:
        """Evaluate the model (its EMA, where there is one); returns whether what `best` follows is now better than ever.

        `both`: the weights as trained too, as `eval/raw_*`; then `best` is the better of the two.
        """
        state, options = self.state, self.checkpointer.options
        model = state.evaluated_model(self.parts.device)
        result = self.evaluator(model, state.step)
        if both and state.ema is not None:
            raw = self.evaluator(state.model, state.step)
            result |= {key.replace("eval/", "eval/raw_"): value for key, value in raw.items() if key != "eval/samples"}
        row: dict[str, Any] = {"step": state.step, "update": state.update, "samples": state.samples, **result}
        self.last_eval, state.evaluated = result, state.step
        better = options.better(state.best, result)
        state.better = better or state.better
        improved = options.improved(state.best, result, state.step)
        told = self.ranks.gather_objects((self.use.since(), machine_load.here(self.ranks))) or []
        logged = {**row, **{f"best/{metric}": best["value"] for metric, best in state.best.items()},
                  **{f"memory/rank{rank}{key}": value for rank, (use, _) in enumerate(told) for key, value in use.items()},
                  **machine_load.rows([load for _, load in told])}  # fmt: skip
        if self.log_weights:
            flat = torch.cat([whole(p).detach().reshape(-1) for p in state.parameters])
            row["weights"] = [round(w, 6) for w in flat[: self.log_weights].tolist()]
        if both and self.chain.evaluations:
            row |= self.chain.link(state)
        self.files.row(row)  # first: what a logger has that this file lacks would be logged twice after a kill
        self.logger.log(logged)
        self.console.evaluation(row, improved)
        return better is not None

    def _set_lr(self) -> float:
        factor = self.schedule(self.state.update)
        lr = 0.0
        for group in self.state.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
            lr = max(lr, group["lr"])
        return lr

    def _row(self, data: WindowData, lr: float, norm: torch.Tensor | None) -> tuple[dict[str, Any], accelerator.Fetched]:
        """The row of a logged step, and what of it is still on its way from the device: the loss, and the norm if any."""
        state = self.state
        self.use.look()
        row = {"step": state.step, "update": state.update, "epoch": data.window.epoch, "samples": state.samples,
               "train/loss": None, "train/lr": lr}  # fmt: skip
        if norm is not None:
            row["train/grad_norm"] = None
        row |= {f"train/{name}": value for name, value in self.parts.reducer.named().items()}
        row["train/loss_scale"] = state.scaler.get_scale()
        row["train/skipped_steps"] = state.skipped_steps
        loss = self.parts.reducer.window_loss()
        return row, accelerator.Fetched([loss] if norm is None else [loss, norm])

    def _read(self, row: dict[str, Any], numbers: accelerator.Fetched) -> dict[str, Any]:
        return row | dict(zip((key for key in ("train/loss", "train/grad_norm") if key in row), numbers.read(), strict=True))

    def flush(self) -> None:
        """Write the row of the latest logged step. On a device it has waited for its numbers, so that the host need not.

        Raises:
            JobFailed: its loss is not finite (on all ranks; a collective).
        """
        if self.late is None:
            return
        late, self.late = self.late, None
        row = self._read(*late)
        loss = row["train/loss"]
        if not math.isfinite(loss) and not self.state.scaler.is_enabled() and not self.parts.skip_nonfinite:
            self.checkpointer.forbid()
            raise JobFailed(self.watch.story(self.ranks, self.feed, loss, row["step"]))
        self.watch.clear(row["step"])
        self._log(row)

    def _log(self, row: dict[str, Any]) -> None:
        self.last_train = row
        self.files.row(row)
        self.logger.log({key: value for key, value in row.items() if not key.startswith("audit/")})
        self.console.step(row)
