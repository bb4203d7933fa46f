"""Every part of a training that could let the shards of a forward meet: one shard a forward against six."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import plain, train
from plans import ONE, traces
from several import MAKERS, Drawing, apart, job
from torch import Tensor, nn
from torch.nn import functional

from isobatch import loss as losses
from isobatch.config import load
from isobatch.errors import JobFailed
from isobatch.loss import Loss
from isobatch.planner import sharing

LABELS = ("augment.mixup=0", "augment.cutmix=0", "steps=3", "eval_every=3")  # int64, as these losses want them


class Checkpointed(Drawing):
    """Runs batch norm, dropout and draws once more in its backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.utils.checkpoint.checkpoint(self.drawn, x, use_reentrant=False)
        return self.head(functional.dropout(x, 0.2, self.training))

    def drawn(self, x: Tensor) -> Tensor:
        x = functional.dropout(self.body(x + 0.1 * torch.randn_like(x)), 0.2, self.training)
        return self.norm(x.mean((2, 3))) * torch.rand(len(x), 1, dtype=x.dtype)


class Deciding(Drawing):
    """Skips a layer for all samples of a forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 if random.random() < 0.5 else 1.0)


class Late(nn.Module):
    """Begins to draw in its fourth forward and backward."""

    def __init__(self, chans: int, classes: int):
        super().__init__()
        self.head, self.calls = nn.Linear(chans * 256, classes), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training and torch.is_grad_enabled()
        return functional.dropout(self.head(x.flatten(1)), 0.1 if self.calls > 16 else 0.0, self.training)


MAKERS |= {"checkpointed": Checkpointed, "deciding": Deciding, "late": Late}


class Pairs(nn.Module):
    """Every sample against the others of its shard."""

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        alike = (targets[:, None] == targets[None]).to(output.dtype)
        return functional.mse_loss(torch.tanh(output @ output.T), alike) + functional.cross_entropy(output, targets)


@dataclass(frozen=True)
class PairLoss(Loss):
    name: str = "shards_pairs"
    meets: bool = True

    def couples(self, criterion: Any) -> bool:
        return self.meets

    def build(self) -> nn.Module:
        return Pairs()


losses.TABLE[PairLoss.name] = PairLoss


def distance(folder: Path, of: str, *words: str, loss: dict[str, Any] | None = None, micro: tuple[int, int] = (8, 48),
             **options: Any) -> float:  # fmt: skip
    found = []
    for size in micro:
        made = job(of, size, *words, **options)
        if loss is not None:
            made["loss"] = loss
        found.append(traces(folder / str(size), ONE, {"it": made})["it"])
    return apart(found[0][0], found[1])


def loss_of(*words: str) -> dict[str, Any]:
    return plain(*words)["loss"]


def test_views_are_made_within_a_shard(tmp_path: Path) -> None:
    assert distance(tmp_path, "own", *LABELS, loss=loss_of("loss=jsd")) <= 1e-12


def test_a_teacher_answers_for_several_shards(tmp_path: Path) -> None:
    taught = loss_of("loss=distill", "loss.teacher.arch=test_resnet")
    assert distance(tmp_path, "own", *LABELS, loss=taught) <= 1e-6  # in fp32


def test_a_loss_in_which_samples_meet_is_asked_for_each_shard(tmp_path: Path) -> None:
    assert distance(tmp_path / "meets", "own", *LABELS, loss={"name": PairLoss.name}) <= 1e-12
    assert distance(tmp_path / "not", "own", *LABELS, loss={"name": PairLoss.name, "meets": False}) > 1e-4


def test_what_runs_again_in_the_backward_draws_the_same(tmp_path: Path) -> None:
    assert distance(tmp_path, "checkpointed", "steps=3", "eval_every=3") <= 1e-12


def test_channels_last_lies_in_another_order(tmp_path: Path) -> None:
    assert distance(tmp_path, "own", "steps=3", "eval_every=3", "channels_last=true") <= 1e-12


def test_a_model_that_decides_for_all_gets_one_shard_a_forward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert distance(tmp_path, "deciding", "steps=3", "eval_every=3") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "one shard a forward, whatever batch.micro says: the model draws from Python's or NumPy's generator" in said


def test_a_draw_that_begins_late_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match=r"step 17: .* began to draw random numbers.* batch\.micro=8"):
        train(tmp_path, made=job("late", 48, steps=20))


@pytest.mark.parametrize(("words", "of", "said"), [
    (("reduction=exact", "threads=2"), "own", "as threads=2 says"),
    (("reduction=exact", "compile=true"), "own", "compile=true is for one at a time"),
    (("compile=true",), "own", "compile=true"),
    (("compile=true",), "quiet", None), ((), "own", None), (("batch.shard=null",), "own", None),
])  # fmt: skip
def test_what_may_share_a_forward(words: tuple[str, ...], of: str, said: str | None, monkeypatch) -> None:
    """`decide` with the trial's answer given."""
    from isobatch.batch_plan import BatchPlan, resolve_batch
    from isobatch.runtime.distributed import Ranks
    from isobatch.shards.trial import Findings

    config = load(job(of, 48, *words))
    batch = resolve_batch(config.batch.effective, config.batch.micro, None, 1, config.batch.shard)
    monkeypatch.setattr(sharing, "_tried", lambda *_: Findings(None, of != "quiet"))
    found = sharing.decide(config, Drawing(1, 10), None, BatchPlan(batch, 77), Ranks(), torch.device("cpu"))
    assert (said in found.note) if said else found.note is None
    assert found.at_once == (1 if said or "batch.shard=null" in words else 6)
    assert found.apart == (of == "own" and found.at_once > 1)
