"""parallel=fsdp with frozen parts: what is trained is trained as in one process, the rest stays as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import on_ranks, summary, train
from precision_probes import model_of
from torch import Tensor, nn

from isobatch import checkpoint
from isobatch.runtime.distributed import Ranks

# five shards on two ranks: 3, 2; two batches of an evaluation
SHORT = ("logger=none", "threads=1", "data=synthetic", "data.samples=29", "data.eval_samples=5", "data.image_size=8",
         "data.in_chans=1", "epochs=null", "steps=2", "eval_every=2", "batch.effective=20", "batch.micro=4",
         "batch.shard=null", "optimizer=sgd",
         "optimizer.lr=0.05", "scheduler=constant", "max_grad_norm=0.1", "log_every=1", "sampler.tail=drop")  # fmt: skip
CHOICES = {
    "probe": ("model.freeze=[backbone]",),
    "start": ("model.freeze=[stem,blocks.0]", "parallel.blocks=[blocks.*]"),
    "middle": ("model.freeze=[blocks.1]", "parallel.reshard_after_forward=false"),
    "end": ("model.freeze=[head,blocks.2]", "parallel.reduce_between_micro_steps=false"),
    "parts": ("model.freeze=['*.bias','blocks.?.1']", "parallel.find_unused_parameters=true"),
}


class Net(nn.Module):
    """(N, 1, 8, 8) -> (N, 10): a stem with batch norm, three blocks that are gathered one at a time, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.BatchNorm2d(4))
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)) for _ in range(3)))
        self.head = nn.Linear(4 * 9, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images).relu()).flatten(1))


@pytest.mark.parametrize("names", [
    ("probe", "middle"), pytest.param(("start", "end", "parts"), marks=pytest.mark.slow),
], ids="_".join)  # fmt: skip
def test_what_is_trained_is_trained_as_in_one_process(tmp_path: Path, names: tuple[str, ...]) -> None:
    choices = {name: CHOICES[name] for name in names}
    short = (*SHORT, *model_of("frozen_parts", lambda info: Net()))

    def work(ranks: Ranks) -> dict[str, Any]:
        return {name: train(tmp_path / "two" / name, *short, "parallel=fsdp", *words, ranks=ranks)
                for name, words in choices.items()}  # fmt: skip

    alone = {name: train(tmp_path / "one" / name, *short, words[0]) for name, words in choices.items()}
    two = on_ranks(2, tmp_path / "ranks", work)
    train(tmp_path / "start", *short, "optimizer.lr=0", "steps=1")
    first = checkpoint.load(tmp_path / "start")["model"]
    for name, one in alone.items():
        for record in (found[name] for found in two):
            assert record.norms == pytest.approx(one.norms, rel=1e-4), name
            assert record.weights[-1] == pytest.approx(one.weights[-1], abs=1e-6), name
        ours, theirs = checkpoint.load(tmp_path / "two" / name), checkpoint.load(tmp_path / "one" / name)
        moved = {key for key in first if not torch.equal(ours["model"][key], first[key])}
        assert moved == {key for key in first if not torch.equal(theirs["model"][key], first[key])} != set(), name
        assert len(ours["optimizer"]["state"]) == len(theirs["optimizer"]["state"])
        assert all(torch.allclose(ours["model"][key], theirs["model"][key], atol=1e-6) for key in first), name
        final = [summary(tmp_path / run / name)["final"]["eval/loss"] for run in ("one", "two")]
        assert final[0] == pytest.approx(final[1], abs=1e-5)
