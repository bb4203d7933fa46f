"""Two small forwards before the first step, as in training and as in an evaluation: what cannot work is one line, at once.

Without it a wrong image size ends a run after its first epoch, in the first evaluation, and a label outside the classes in the
middle of an epoch, with an assertion of somebody else. Nothing of it is noticed: generators, buffers and gradients stay.

A dataset or a model that never comes back ends the run too, when the limit is over; signals are heard meanwhile.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from isobatch.data import Split, Splits
from isobatch.data.device import ToDevice
from isobatch.data.feed import Request
from isobatch.data.loader import WorkerSource
from isobatch.data.samples import IGNORED, Samples, ignored_by
from isobatch.errors import ConfigError, JobFailed, Stopped, kind_and_reason
from isobatch.evaluate.views import averaged
from isobatch.given import Given, Sum, taken_apart
from isobatch.metrics.base import Metric
from isobatch.parallel.unused import unnoticed
from isobatch.planner.trial import form, is_out_of_memory, unfit_output
from isobatch.precision.forward import forward
from isobatch.runtime import modes
from isobatch.runtime.randomness import isolated_generators
from isobatch.runtime.trees import first
from isobatch.runtime.waiting import TooLong, limited
from isobatch.shards.layout import Lanes

log = logging.getLogger("isobatch")

SAMPLES = 2  # of a forward; the same for both, so that they share their kernels
SLOW_S = 60.0  # what takes longer is said, so that nobody takes it for a hang
LIMIT_S = 480.0  # for all of it; below the 600 s that other ranks wait for this one
GRACE_S = 10.0  # to end by itself once a stop is asked for


class Rehearsal:
    """
    Args:
        module: what the forward runs on, on its device.
        config: of the run. device, channels_last: as the training has them.
        average: of weights that it keeps in another type than the model's; an evaluation runs on it.
    Attributes:
        given: what the training's loss gave for SAMPLES samples; None = there was none.
        evaluated: output and targets of the evaluation's forward.
    """

    given: Given | None = None
    evaluated: tuple[Any, Any] = (None, None)

    def __init__(self, module: nn.Module, config: Any, splits: Splits, device: torch.device, channels_last: bool,
                 average: nn.Module | None = None):  # fmt: skip
        self.module, self.model, self.splits, self.precision = module, config.model, splits, config.precision
        self.average, self.ema, self.views = average, config.ema, config.evaluate.views
        self.loss, self.device, self.channels_last, self.seed = config.loss, device, channels_last, config.seed
        self.doing = "it"

    def run(self, prepare: Callable[..., Any] | None, trains: bool, stop: Callable[[], int],
            give_up: Callable[[str, int], None]) -> list[str]:  # fmt: skip
        """Both forwards, without `trains` the evaluation's alone. Returns lines for a person.

        Args:
            stop: the signal that asks for an end, or 0. give_up: ends the process with a line.
        Raises:
            ConfigError: one cannot be done, or its output or the labels do not fit the loss.
            JobFailed: it takes longer than any does. Stopped: by a signal, while it took long.
        """
        try:
            return limited(lambda: self._both(prepare, trains), LIMIT_S, stop, GRACE_S,
                           lambda: give_up(self._hangs(stop()), stop()))  # fmt: skip
        except TooLong:
            raise Stopped(stop()) if stop() else JobFailed(self._hangs(0)) from None

    def _hangs(self, signum: int) -> str:
        if signum:
            return f"stopped by {signal.Signals(signum).name}, during {self.doing}, before the first step"
        return f"{self.doing} has not ended within {LIMIT_S:.0f} s, before the first step: it hangs"

    def _both(self, prepare: Callable[..., Any] | None, trains: bool) -> list[str]:
        criterion, evaluation = self.loss.build(), self.loss.evaluation()
        started = time.monotonic()
        if self.splits.info.labels == "several" and not self.loss.several:
            raise ConfigError("loss.name", self.loss.name, "is about one class of a sample, and "
                              f"data={self.splits.info.name} has several labels", "set loss=bce")  # fmt: skip
        for which, split in (("training", self.splits.train), ("evaluation", self.splits.eval)):
            self._labels(which, split, getattr(criterion, "ignore_index", IGNORED))
        with modes.kept(self.module):
            if trains:
                self._forward("training", self.splits.train, self.precision.autocast, criterion, prepare)
            self.module.eval()
            drew = self._forward("evaluation", self.splits.eval, self.precision.evaluation, evaluation, None)
            if self.average is not None:
                self._averaged(self.average, evaluation)
        if (seconds := time.monotonic() - started) > SLOW_S:
            log.info("the two forwards before training took %.0f s", seconds)
        return ["the model draws random numbers in evaluation: they come from (seed, step, batch)"] if drew else []

    def _averaged(self, average: nn.Module, criterion: Any) -> None:
        seen, module, self.module = self.evaluated, self.module, average
        try:
            self._forward("evaluation", self.splits.eval, self.precision.evaluation, criterion, None)
        except ConfigError as refusal:
            raise ConfigError("ema.name", self.ema.name, "keeps the average of half weights in float32, in which the model "
                              f"cannot be evaluated ({refusal.problem})",
                              "let its forward cast to its weights' type, or set ema=none") from refusal  # fmt: skip
        finally:
            self.module, self.evaluated = module, seen

    def _labels(self, which: str, split: Split, ignored: int | None) -> None:
        """All labels at once, where a data set has them at hand. `ignored`: the one that the loss leaves out."""
        classes = self.splits.info.num_classes
        if not classes or (split.tensors is None and split.targets == split._scan_targets):
            return
        labels = split.targets()
        if labels.ndim != 1 or labels.is_floating_point() or not len(labels):
            return
        wrong = (labels < 0) | (labels >= classes)
        if ignored is not None:
            wrong &= labels != ignored
        if bool(wrong.any()):
            index = int(wrong.nonzero()[0, 0])
            self._refuse_label(which, split, index, int(labels[index]))

    def _refuse_label(self, which: str, split: Split, index: int, label: int) -> None:
        classes = self.splits.info.num_classes
        if label == IGNORED:
            raise ConfigError("loss.ignore_index", None, f"{split.describe(index)} of the {which} split has the label {label}",
                              f"set loss.ignore_index={label} to leave such samples out")  # fmt: skip
        raise ConfigError("data.name", self.splits.info.name, f"{split.describe(index)} of the {which} split has the label "
                          f"{label}, and the classes are 0 to {classes - 1}",
                          "number the classes from 0, or set data.num_classes")  # fmt: skip

    def _forward(self, which: str, split: Split, autocast: Any, criterion: Any, prepare: Any) -> bool:
        """Whether the model drew random numbers."""
        with isolated_generators():
            samples = Samples(split, self.seed, replaces=which == "training", ignored=ignored_by(criterion))
            source = WorkerSource(samples, ToDevice(self.device, split.info, self.channels_last))
            self.doing = f"reading {split.describe(0)} of the {which} split"
            inputs, targets = self._read(which, source, Request(0, torch.tensor([0, min(1, len(split) - 1)])))
            self.doing = f"the {which}'s forward"
            if prepare is not None:
                inputs, targets = prepare(inputs, targets, 0, (0,), Lanes.alone((SAMPLES,)))
            with unnoticed(self.module, inputs), torch.set_grad_enabled(which == "training"):
                before = torch.get_rng_state()
                try:
                    output = averaged(lambda view: forward(self.module, view, autocast(self.device)), inputs,
                                      "one" if which == "training" else self.views, self.splits.info.shape)  # fmt: skip
                except ConfigError:
                    raise
                except Exception as error:
                    raise self._unfit_input(which, split, inputs, error) from error
                drew = not torch.equal(before, torch.get_rng_state())
                try:
                    given = taken_apart(criterion(output, targets))
                except ConfigError:
                    raise
                except Exception as error:
                    raise unfit_output(self.loss.name, f"the {which}'s loss", split, output, targets, error) from error
        self._check(given)
        if which == "training" and not given.value.requires_grad:
            raise ConfigError("model.name", self.model.name, f"no trainable weight has a part in its output, {form(output)}, "
                              "or the loss lets no gradient through", "leave out detach(), item() and argmax")  # fmt: skip
        if which == "training":
            self.given = given
        else:
            self.evaluated = output, targets
        return drew

    def _read(self, which: str, source: WorkerSource, request: Request) -> Any:
        try:
            return next(source.batches(iter([request])))
        except (ConfigError, JobFailed):
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise ConfigError("data.name", self.splits.info.name, f"the {which} split's inputs cannot be brought to the device "
                              f"({_told(error)})", "return dense tensors, arrays, numbers or images") from error  # fmt: skip

    def _check(self, given: Given) -> None:
        """What a criterion gives are single numbers, and a count counts."""
        name = self.loss.name
        if not isinstance(given.value, Tensor) or given.value.ndim:
            raise ConfigError("loss.name", name, f"gives {form(given.value)}, and a loss is one number",
                              "return the mean over the samples, or isobatch.Sum(total, count)")  # fmt: skip
        for key, value in (("count", given.elements), *given.named.items()):
            for part in (value.total, value.count) if isinstance(value, Sum) else (value,):
                single = part.ndim == 0 if isinstance(part, Tensor) else isinstance(part, int | float)
                if part is not None and not single:
                    raise ConfigError("loss.name", name, f"gives {form(part)} as {key}, which is no single number",
                                      "return numbers, or tensors without a dimension")  # fmt: skip
        if given.elements is not None and not float(given.elements) >= 0:
            raise ConfigError("loss.name", name, f"gives a Sum over {float(given.elements):g} elements", "count them from 0 on")

    def _unfit_input(self, which: str, split: Split, inputs: Any, error: Exception) -> Exception:
        if is_out_of_memory(error):
            return error
        shapes = [tuple(first(inputs).shape[1:]), self.splits.info.shape]
        size = str(shapes[0][-1] if shapes[0][-1] == shapes[0][-2] else list(shapes[0][-2:])) if len(shapes[0]) == 3 else "null"
        key, value, way_out = "model.name", self.model.name, "choose a model for such inputs"
        if which == "evaluation" and shapes[0] != shapes[1]:
            key, value = "data.eval_size", size
            way_out = "set data.eval_size=null, or let the model take any size (+model.kwargs.dynamic_img_size=true)"
        elif hasattr(self.model, "arch"):
            key, value = "model.arch", self.model.arch
            way_out = f"set +model.kwargs.img_size={size}, or data.image_size to what it takes"
        if isinstance(inputs, Tensor) and inputs.dtype != torch.float32:
            way_out = "let the dataset return float32 (images: uint8), or choose a model for such inputs"
        return ConfigError(key, value, f"the model cannot take the {which}'s inputs, {form(inputs)}, as of "
                           f"{split.describe(0)} ({_told(error)})", way_out)  # fmt: skip


def kept_wider(average: Any, model: nn.Module) -> nn.Module | None:
    """The averaged model, where its weights have another type than those that it averages, and the same device."""
    if average is None or [p.dtype for p in average.module.parameters()] == [p.dtype for p in model.parameters()]:
        return None
    same = next(average.module.parameters()).device == next(model.parameters()).device
    return average.module if same else None  # type: ignore[no-any-return]


def rehearse(config: Any, module: nn.Module, splits: Splits, device: torch.device, channels_last: bool,
             prepare: Callable[..., Any] | None, trains: bool, stop: Callable[[], int],
             give_up: Callable[[str, int], None],
             average: nn.Module | None = None) -> tuple[Given | None, Any, list[Metric]]:  # fmt: skip
    """Both forwards of `config`'s model and loss (see Rehearsal): what the training's loss gave, output and targets of the
    evaluation's, and the metrics of such.

    While the weights are whole: where they are spread over ranks, a forward is a collective.
    """
    rehearsal = Rehearsal(module, config, splits, device, channels_last, average)
    for line in rehearsal.run(prepare, trains, stop, give_up):
        log.info("%s", line)
    given, seen = tree_map_only(Tensor, Tensor.detach, (rehearsal.given, rehearsal.evaluated))
    ignored = getattr(config.loss.evaluation(), "ignore_index", None)
    return given, seen, config.metrics.build(*seen, splits.info.num_classes, ignored)


def _told(error: Exception) -> str:
    return kind_and_reason(error, 160)
