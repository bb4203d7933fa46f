"""Several shards of an exact sum at the same time on a GPU: a stream each, with the bits of one after another."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import on_ranks, plain, train
from jobs import Network, apart, job, on_gpus
from pretended import pretend, strictly
from torch import Tensor
from torch.nn import functional as F

import isobatch
from isobatch import loss, run
from isobatch.runtime.distributed import Ranks
from isobatch.train import crews

pretended = pytest.mark.gpu_pretended
# six shards of four a window, and a tail of three and two samples a shard
EXACT = ("reduction=exact", "batch.shard=4", "batch.micro=null", "batch.effective=24", "data.samples=63", "steps=3",
         "eval_every=3")  # fmt: skip


def counted() -> Any:
    """A sum over elements, with a number beside it."""

    def criterion(output: Tensor, labels: Tensor) -> Any:
        valid = (labels > 0).sum()
        total = (F.cross_entropy(output, labels, reduction="none") * (labels > 0)).sum()
        right = (output.argmax(1) == labels).sum()
        return {"loss": isobatch.Sum(total, valid), "right": isobatch.Sum(right, valid), "size": output.detach().abs().mean()}

    return criterion


@pytest.fixture(autouse=True)
def _own_loss() -> Iterator[None]:
    isobatch.register("loss", "gpu_counted", counted)
    yield
    del loss.TABLE["gpu_counted"]


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "counted, read meanwhile": ("loss=custom loss.name=gpu_counted data.num_workers=0 augment=simple precision=amp "
                                "precision.dtype=float16", {}),
    "bin64": ("reduction.method=bin64 max_grad_norm=0.5 precision=bf16", {}),
    "masters": ("precision=O2 ema=ema ema.decay=0.5 channels_last=true", {}),
    "workers": ("data.num_workers=1 augment=mixup augment.mix_mode=elem", {}),
    "jsd": ("loss=jsd", {}), "distill": ("loss=distill loss.teacher.arch=resnet10t", {}),
    "sharpness": ("optimizer.sam=0.05", {}), "audited": ("audit=replay audit.every=1", {}),
    "checkpointed": ("", {"grad_checkpointing": True}), "frozen": ("", {"freeze": ("stem",)}),
}  # fmt: skip


@pretended
@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k.startswith("counted") else pytest.mark.slow) for k in KINDS])
def test_a_training_is_the_same_with_several_streams(tmp_path: Path, kind: str) -> None:
    """on_gpus: no wait is missing, and no memory is given back too early."""
    words, more = KINDS[kind]
    one = on_gpus(tmp_path / "1", job(*EXACT, *words.split(), "threads=1", **more))
    for count in (3, 2) if kind == "bin64" else (3,):
        several = on_gpus(tmp_path / str(count), job(*EXACT, *words.split(), f"threads={count}", **more))
        assert one.machine is not None and several.machine is not None
        assert several.machine.streams == one.machine.streams + count
        assert apart(one, several) == 0


@pretended
def test_what_fails_on_a_stream_ends_the_run_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, calls = Network.forward, []

    def failing(self: Any, images: Tensor) -> Tensor:
        calls.append(torch.cuda.current_stream())
        if len(calls) == 8:  # a forward of the first window: two of the plan, two of the question, two lanes come before
            raise ValueError("not this one")
        return forward(self, images)

    monkeypatch.setattr(Network, "forward", failing)
    with strictly(), pytest.raises(ValueError, match=r"^not this one$"):
        run.run_job(job(*EXACT, "threads=2"), tmp_path, Ranks())
    assert len({*calls}) == 3


@pretended
def test_streams_that_nobody_asked_for_have_to_be_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                         caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    took = iter([0.004, 0.002, 0.004, 0.004])
    monkeypatch.setattr(crews.StreamCrew, "seconds", lambda *_: next(took))
    with pretend(), caplog.at_level(logging.INFO, "isobatch"):
        streams = crews.StreamCrew(4, torch.device("cuda", 0))
        assert streams.in_vain(lambda lane: None, [None]) is None  # type: ignore[arg-type,return-value,list-item]
        run.run_job(job(*EXACT, "threads=null", "steps=1", "eval_every=1", probe=False), tmp_path, Ranks())
    assert "one shard at a time: 4 take 4.0 ms one after another and 4.0 ms side by side (threads=4: 4 at a time" in caplog.text
    assert "exact (tree), 4 shards at a time" in caplog.text
    assert "4 shards at a time, of 6 that a micro batch has room for, a stream each; memory is that of 4 shards" in caplog.text


@pretended
@pytest.mark.slow
def test_ranks_have_streams_of_their_own(tmp_path: Path) -> None:
    one = on_gpus(tmp_path / "one", job(*EXACT, "threads=1"))

    def work(ranks: Ranks) -> list[list[float]]:
        with pretend(2):
            return train(tmp_path / "two", made=job(*EXACT, "threads=2", "parallel=ddp"), ranks=ranks).weights

    assert all(found == one.record.weights for found in on_ranks(2, tmp_path / "ranks", work))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("level", ["precision=fp32", "precision=bf16", "precision=amp precision.dtype=float16"])
def test_streams_on_cuda(tmp_path: Path, level: str) -> None:
    """The bits, and the time of one at a time over that of several, for people to read."""
    took, found = {}, {}
    words = ("logger=none", "model=resnet18", "data=synthetic", "data.image_size=64", "data.samples=192", "data.eval_samples=4",
             "batch.effective=96", "batch.shard=8", "epochs=null", "steps=6", "eval_every=6", "log_every=1", "checkpoint=none",
             "reduction=exact", *level.split())  # fmt: skip
    for count in (1, 2, 4):
        began = time.perf_counter()
        found[count] = train(tmp_path / str(count), made=plain(*words, f"threads={count}")).weights
        took[count] = time.perf_counter() - began
    assert found[1] == found[2] == found[4]
    print({count: round(took[1] / seconds, 2) for count, seconds in took.items()})
