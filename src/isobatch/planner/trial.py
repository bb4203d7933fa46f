"""Micro batches of any size on a copy of the model: whether they fit, what they keep in memory, how long they take.

The model itself, its running statistics and the generators never notice.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from isobatch.config import Config
from isobatch.data import Split, Splits
from isobatch.data.device import ToDevice
from isobatch.data.loader import WorkerSource
from isobatch.data.samples import Request, Samples
from isobatch.errors import ConfigError, JobFailed, kind_and_reason
from isobatch.given import mean_of
from isobatch.planner.cost import Measured
from isobatch.planner.estimate import SavedTensor, saved_tensors
from isobatch.precision.forward import forward
from isobatch.resume import teacher
from isobatch.runtime import accelerator, hardware
from isobatch.runtime.randomness import isolated_generators
from isobatch.runtime.trees import Tree, mapped, repeated, tensors
from isobatch.shards.layout import Lanes
from isobatch.train import batch_norm

# torch and the libraries below it say it in several ways
NO_MEMORY = ("out of memory", "can't allocate", "not enough memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


def explained(error: BaseException, rank: int) -> BaseException:
    """An error of memory as one line with a way out, which names every rank but the main one; any other as it is."""
    where = f"rank {rank}: " if rank else ""
    if isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error):
        return JobFailed(f"{where}the device failed, now or in an earlier operation: {str(error).splitlines()[0]}; most often "
                         "a label or an index is out of range: see num_classes, and run a step with device=cpu, or with "
                         "CUDA_LAUNCH_BLOCKING=1, to see the place")  # fmt: skip
    if not is_out_of_memory(error):
        return error
    wanted = re.search(r"tried to allocate ([\d.]+) ?(\w+)", str(error), re.IGNORECASE)
    more = ""
    if wanted:  # CUDA says it in MiB or GiB, the CPU in bytes
        more = f" ({int(wanted[1]) / 2**30:,.1f} GiB" if wanted[2] == "bytes" else f" ({wanted[1]} {wanted[2]}"
        more += " more were wanted)"
    return JobFailed(f"{where}out of memory{more}; set batch.micro=auto or to fewer samples, or make the model, its images or "
                     "the data smaller")  # fmt: skip


def unfit_output(loss: str, whose: str, split: Split, output: Tree, targets: Tree, error: Exception) -> Exception:
    """What is raised where the criterion `loss` fails at a model's output: one line, but for want of memory."""
    if is_out_of_memory(error):
        return error
    return ConfigError("loss.name", loss, f"{whose} cannot take the model's output, {form(output)}, with targets "
                       f"{form(targets)}, as of {split.describe(0)} ({kind_and_reason(error, 160)})",
                       "return one tensor of class scores and class numbers (int64), or set a loss for them")  # fmt: skip


def form(value: Any) -> str:
    """The types and shapes of a tree of tensors, for a person."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    inner = ", ".join(form(v) for v in (value.values() if isinstance(value, dict) else value)) if isinstance(
        value, dict | list | tuple) else ""  # fmt: skip
    name = "list" if isinstance(value, list) else type(value).__name__
    return f"a {name}" + (f" of {inner}" if inner else "")


class Trial:
    """
    Args:
        model: as built, before any wrapper; it is copied.
        ballast: bytes that a training holds beside weights, gradients and activations (optimizer, average).
    """

    def __init__(self, config: Config, model: nn.Module, splits: Splits, device: torch.device, ballast: int = 0):
        channels_last = hardware.wants_channels_last(config, device)
        self.config, self.device, self.ballast = config, device, ballast
        with self._unnoticed():
            replica = copy.deepcopy(model)
            if config.model.batch_norm == "frozen":
                batch_norm.freeze(replica)
            replica.to(device, memory_format=torch.channels_last if channels_last else torch.preserve_format)  # type: ignore[call-overload]
            self.working = config.precision.working_copy(replica)
            self.scaler, self.criterion = config.precision.scaler(device), config.loss.build()
            self.prepare = config.loss.prepare(
                config.augment.batch_transform(splits.info, config.seed),
                lambda chosen: teacher.build(chosen, splits.info, device, channels_last), config.precision, device,
                config.seed,
            )  # fmt: skip
            self.splits, self.to_device = splits, ToDevice(device, splits.train.info, channels_last)
            self.one = self._read([0])

    def _read(self, indices: list[int]) -> tuple[Tree, Tree]:
        source = WorkerSource(Samples(self.splits.train, self.config.seed), self.to_device)
        epoch = getattr(self.splits.train.dataset, "largest_epoch", 0)
        return next(source.batches(iter([Request(epoch, torch.tensor(indices))])))

    def samples(self, count: int) -> Tree:
        """Inputs (n, ...) of the first `count` samples, fewer where there are fewer."""
        with self._unnoticed():
            return self._read(list(range(min(count, len(self.splits.train)))))[0]

    def precision(self) -> AbstractContextManager[Any]:
        """Around a training forward."""
        return self.config.precision.autocast(self.device)

    def fits(self, samples: int, steps: int) -> bool:
        """Whether `steps` micro steps (two: gradients are there already in the second) of `samples` samples run."""
        try:
            with self._unnoticed():
                held = torch.empty(self.ballast, dtype=torch.uint8, device=self.device)
                for _ in range(steps):
                    self._step(samples)
                del held
            return True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        finally:
            self._clear()
        return False

    def saved(self, samples: int) -> list[SavedTensor]:
        """What the forward of `samples` samples keeps for the backward, in order."""
        try:
            with self._unnoticed():
                inputs, targets = self._batch(samples)
                return saved_tensors(self.working.module, tensors((inputs, targets)), lambda: self._loss(inputs, targets))
        finally:
            self._clear()

    def forward(self, samples: int) -> None:
        """A training forward, for what watches it."""
        with self._unnoticed(), torch.no_grad():
            self._loss(*self._batch(samples))

    def timed(self, samples: int) -> Measured:
        """The faster of two runs, after one to warm up."""
        try:
            with self._unnoticed():
                self._step(samples)
                runs = [self._timed_step(samples) for _ in range(2)]
        finally:
            self._clear()
        forward, backward = min(runs, key=sum)
        return Measured(samples, forward, backward)

    def _timed_step(self, samples: int) -> tuple[float, float]:
        inputs, targets = self._batch(samples)
        start = self._now()
        loss = self._loss(inputs, targets)
        middle = self._now()
        loss.backward()
        return middle - start, self._now() - middle

    def _now(self) -> float:
        accelerator.wait(self.device)
        return time.perf_counter()

    def _step(self, samples: int) -> None:
        self._loss(*self._batch(samples)).backward()

    def _batch(self, samples: int) -> tuple[Tree, Tree]:
        """The first sample, so many times: memory depends on shapes alone."""
        if self.splits.train.collate is not None:  # which knows alone what a row is
            inputs, targets = self._read([0] * samples)
        else:
            inputs, targets = (repeated(part, samples) for part in self.one)
        if hardware.wants_channels_last(self.config, self.device):
            inputs = mapped(lambda t: t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t, inputs)
        return self.prepare(inputs, targets, 0, (0,), Lanes.alone((samples,))) if self.prepare else (inputs, targets)

    def _loss(self, inputs: Tree, targets: Tree) -> Tensor:
        output = forward(self.working.module, inputs, self.precision())
        try:
            found = mean_of(self.criterion(output, targets))
        except (ConfigError, JobFailed):
            raise
        except Exception as error:
            loss: Any = self.config.loss
            raise unfit_output(loss.name, "the loss", self.splits.train, output, targets, error) from error
        scaled: Tensor = self.scaler.scale(found)
        return scaled

    def _clear(self) -> None:
        for parameter in self.working.module.parameters():
            parameter.grad = None
        accelerator.empty_cache(self.device)

    @contextmanager
    def _unnoticed(self) -> Iterator[None]:
        with isolated_generators(), accelerator.kept_generators([self.device]):
            yield
