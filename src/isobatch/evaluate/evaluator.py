"""Exact evaluation: every sample once at any number of ranks, as sums and counts, never as means of means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isobatch.data import Split, Splits
from isobatch.data.feed import Source
from isobatch.data.samples import Request
from isobatch.errors import ConfigError
from isobatch.evaluate.answers import Answers
from isobatch.evaluate.views import COUNT, averaged
from isobatch.given import taken_apart
from isobatch.metrics.auto import TOP, Classes
from isobatch.metrics.base import Metric, kind
from isobatch.precision.forward import forward
from isobatch.runtime import accelerator, modes
from isobatch.runtime.distributed import Ranks
from isobatch.runtime.trees import mapped

OWN = 3  # columns of the sums that are not a metric's


@dataclass
class Evaluator:
    """Evaluates a split in batches of `batch_size`; batch i goes to rank i mod world size, there to its devices in turn.

    The batches are the same whatever the number of ranks, and each has a slot of its own in the sums, so the result is the
    same to the bit.

    Args:
        unit: samples that a loss which sums is stated for, whatever the size of the batches (0: that size).
        after: called with the model and the number of forwards that other ranks had more, after this rank's last one: a
            strategy whose forwards are collectives takes part in them.
        seed: called with the step and the number of a batch before its forward, for models that draw in evaluation too.
        answers: gets what the model says of every sample (task=evaluate), for data with classes; None: nobody asks.
        example: output and targets of a sample, by which its kind is told.
        metrics: None = those of one label per sample, where there are classes.
        lanes: devices of this process, `device` first (none: that alone); the model is copied to the others each time.
        views: of each image, whose outputs are averaged (see views.py).
    """

    split: Split
    source: Source
    criterion: Any
    precision: Any
    ranks: Ranks
    device: torch.device
    batch_size: int
    num_classes: int
    averages: bool = True
    unit: int = 0
    after: Callable[[nn.Module, int], None] = lambda model, behind: None
    answers: Answers | None = None
    seed: Callable[[int, int], None] = lambda step, batch: None
    lanes: Sequence[torch.device] = ()
    metrics: list[Metric] = None  # type: ignore[assignment]
    example: tuple[Any, Any] | None = None
    views: str = "one"

    def __post_init__(self) -> None:
        if self.metrics is None:
            self.metrics = [Classes(self.num_classes)] if self.num_classes else []

    @property
    def one_label(self) -> bool:
        """Whether the evaluation's forward gave class scores for one label of each sample, as far as anybody has looked."""
        return self.example is None or kind(*self.example, self.num_classes) == "classes"

    def batches(self) -> int:
        return -(-len(self.split) // self.batch_size)

    def requests(self) -> Iterator[Request]:
        n = len(self.split)
        for i in range(self.ranks.rank, self.batches(), self.ranks.world_size):
            yield Request(0, torch.arange(i * self.batch_size, min((i + 1) * self.batch_size, n)))

    @torch.no_grad()
    def __call__(self, model: nn.Module, step: int = 0) -> dict[str, float]:
        """`eval/loss`, `eval/samples`, and what the metrics say as `eval/<name>`: for classes `eval/accuracy` and, of more than
        five, `eval/accuracy_top5` (0 .. 1).

        The model is the unwrapped one, so no rank waits for another before the one reduction at the end; its training
        mode is put back module by module.
        """
        for metric in self.metrics:
            metric.begin()
        with modes.kept(model):
            model.eval()
            slots = self._slots(model, step)
        total = self.ranks.all_reduce(slots).cpu().double().sum(0).tolist()
        samples = int(total[1])
        units = total[2] if self.averages else -(-samples // (self.unit or self.batch_size))
        result = {"eval/loss": total[0] / units if units else 0.0, "eval/samples": samples}
        start = OWN
        for metric in self.metrics:
            found = metric.values(total[start : start + metric.columns], self.ranks)
            result |= {f"eval/{name}": value for name, value in found.items()}
            start += metric.columns
        return result

    @torch.no_grad()
    def first(self, model: nn.Module, count: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """(inputs, class probabilities, targets) of the first `count` samples, on the CPU; all ranks alike. None where a
        sample is not one tensor with one label."""
        with modes.kept(model):
            model.eval()
            request = Request(0, torch.arange(min(count, len(self.split))))
            ((inputs, targets),) = self.source.batches(iter([request]))  # to its end: the source is used again
            self.seed(0, 0)
            output = self._output(model, inputs)
            self.after(model, 0)
        if not isinstance(inputs, Tensor) or kind(output, targets, self.num_classes) != "classes":
            return None
        return inputs.float().cpu(), output.softmax(1).cpu(), targets.cpu()

    def _slots(self, model: nn.Module, step: int) -> Tensor:
        """(batches, OWN + the metrics' columns) in the widest type: summed loss, samples, what the loss is summed over
        (samples, or the elements that it counts), then what the metrics sum up."""
        lanes, dtype = list(self.lanes) if len(self.lanes) > 1 else [self.device], accelerator.widest(self.device)
        columns = OWN + sum(metric.columns for metric in self.metrics)
        slots = [torch.zeros(self.batches(), columns, dtype=dtype, device=device) for device in lanes]
        models = nn.parallel.replicate(model, lanes, detach=True) if len(lanes) > 1 else [model]
        mine = range(self.ranks.rank, self.batches(), self.ranks.world_size)
        for k, (i, (inputs, targets)) in enumerate(zip(mine, self.source.batches(self.requests()), strict=True)):
            lane = k % len(lanes)  # nothing waits for a device, so the next one starts beside it
            if lane:
                inputs, targets = mapped(partial(_to, lanes[lane]), (inputs, targets))
            self.seed(step, i)
            output = self._output(models[lane], inputs)
            self._count(i, slots[lane][i], output, targets)
        behind = -(-self.batches() // self.ranks.world_size) - len(mine)
        self.after(model, COUNT[self.views] * behind)
        return sum((part.to(self.device, non_blocking=True) for part in slots[1:]), slots[0])  # each filled in one of them

    def _output(self, model: nn.Module, inputs: Any) -> Any:
        info = self.split.info
        return averaged(lambda view: forward(model, view, self.precision.evaluation(self.device)), inputs, self.views,
                        info.shape if info is not None else ())  # fmt: skip

    def _count(self, i: int, slot: Tensor, output: Any, targets: Any) -> None:
        """Fill the slot of batch i."""
        loss, count, _ = taken_apart(self.criterion(output, targets))
        n, loss = min(self.batch_size, len(self.split) - i * self.batch_size), loss.to(slot.dtype)
        slot[0] = loss * n if self.averages and count is None else loss
        slot[1] = n
        slot[2] = n if count is None else count
        start = OWN
        for metric in self.metrics:
            metric.fill(slot[start : start + metric.columns], i, output, targets)
            start += metric.columns
        if self.answers is not None:
            top = output.topk(min(TOP, output.shape[1]), dim=1).indices  # as the accuracy is counted, equal scores too
            self.answers.take(i * self.batch_size, output, top[:, 0], targets)


def _to(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(device, non_blocking=True)


def chosen_split(options: Any, splits: Splits) -> Split:
    """What the options `evaluate` look at.

    Raises:
        ConfigError: there is no third split.
    """
    if options.split == "eval":
        return splits.eval
    if splits.test is None:
        raise ConfigError("evaluate.split", options.split, f"data={splits.info.name} has no third split here",
                          "name one (data.test_dir, test_csv, test_tars, test_split), or set evaluate.split=eval")  # fmt: skip
    return splits.test
