"""A lane on a CUDA device: a stream, and module objects whose gradients and statistics are written there (see crews.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isobatch.given import Sum, taken_apart
from isobatch.runtime.trees import tensors
from isobatch.train.lane import Lane, Shard

if TYPE_CHECKING:
    from isobatch.data.feed import MicroBatch
    from isobatch.train.state import TrainState
    from isobatch.train.step import Parts


class StreamLane(Lane):
    """
    Args:
        stream: its own, in all its life.
    """

    def __init__(self, parts: Parts, seed: int, stream: torch.cuda.Stream):
        super().__init__(parts, seed)
        self.stream, self.device = stream, parts.device
        self.held: Shard | None = None

    def run(self, state: TrainState, parts: Parts, step: int, micro: MicroBatch) -> Shard:
        """Queue forward and backward of one shard. The one before has landed; its memory is used again from here on."""
        self.let_go()
        for tensor in tensors((micro.inputs, micro.targets)):
            tensor.record_stream(self.stream)  # of batches that were copied on a stream of theirs
        self.reads = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.stream):
            shard = super().run(state, parts, step, micro)
            self.held = shard._replace(done=self.stream.record_event())
        return self.held

    def let_go(self) -> None:
        """Wait, on the device, for what the training's stream has been given so far: weights, statistics and the batch that
        come from there, and its reading of the last shard, whose memory this stream may then have again."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        self.held = None

    def _parts(self, parts: Parts) -> dict[str, Any]:
        return {"weigh": self._weigh(parts)}

    def _weigh(self, parts: Parts) -> Any:
        """What comes beside a loss is kept by the reducer, for as long as it likes."""

        def weigh(result: Any, weight: float, shard: int) -> Tensor:
            _, count, named = taken_apart(result)
            for value in (count, *named.values()):
                for tensor in (value.total, value.count) if isinstance(value, Sum) else (value,):
                    if isinstance(tensor, Tensor) and tensor.device == self.device:
                        tensor.record_stream(self.reads)
            return parts.weigh(result, weight, shard)

        return weigh


def landed(shard: Shard) -> Shard:
    """`shard` for the stream that trains: behind the one that made it, its gradients in memory of their own.

    They are copied, which costs a thousandth of a backward: handed on as they are (`record_stream`), their memory would be free
    only when the host sees that they have been added, which is far ahead of the device, and a window's shards would pile up.
    """
    if shard.done is None:
        return shard
    torch.cuda.current_stream(shard.loss.device).wait_event(shard.done)
    mine = [gradient if gradient is None else torch.empty_like(gradient) for gradient in shard.gradients]
    if given := [gradient for gradient in shard.gradients if gradient is not None]:
        torch._foreach_copy_([own for own in mine if own is not None], given)
    return shard._replace(gradients=mine)
