"""Batches of any form through the training path: tuples, dicts, ragged samples, outputs that are trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import plain
from test_elements import on_ranks, register, trained
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from isobatch import config, data, loss, model, run
from isobatch.data.samples import stacked
from isobatch.errors import ConfigError, JobFailed
from isobatch.extend import custom
from isobatch.runtime import trees
from isobatch.runtime.distributed import Ranks

WORDS = ("logger=none", "threads=1", "scheduler=constant", "data=custom", "data.name=test_trees", "data.num_workers=0",
         "model=custom", "model.name=test_tree", "loss=custom", "loss.name=test_tree", "optimizer=sgd", "optimizer.lr=0.1",
         "epochs=null", "steps=3", "eval_every=3", "log_every=1", "batch.effective=9", "batch.micro=3",
         "batch.shard=null", "checkpoint=none", "sampler=sequential")  # fmt: skip


class Samples(Dataset[tuple[Any, Any]]):
    """int32 tokens, float64 numbers and a bool; targets are a dict with text among it."""

    def __init__(self, form: str = "dict"):
        draw = torch.Generator().manual_seed(1)
        self.form = form
        self.tokens = torch.randint(0, 7, (22, 4), generator=draw, dtype=torch.int32)
        self.numbers = torch.randn(22, 3, generator=draw, dtype=torch.float64)

    def __len__(self) -> int:
        return 22

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        parts = {"tokens": self.tokens[i], "numbers": self.numbers[i], "flag": torch.tensor(i % 2 == 0)}
        if self.form == "ragged":
            parts["tokens"] = self.tokens[i, : 1 + i % 4]
        value = parts if self.form in ("dict", "ragged") else tuple(parts.values())
        return value, {"label": i % 5, "score": float(i), "name": f"s{i}"}


def padded(samples: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    inputs = stacked([{**x, "tokens": functional.pad(x["tokens"], (0, 4 - len(x["tokens"])))} for x, _ in samples])
    return inputs, stacked([y for _, y in samples])


SEEN: list[Any] = []


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.linear = nn.Embedding(7, 3), nn.Linear(6, 5)

    def forward(self, tokens: Tensor, numbers: Tensor, flag: Tensor) -> dict[str, Tensor]:
        SEEN.append((tokens.dtype, numbers.dtype, flag.dtype))
        dtype = self.linear.weight.dtype
        mixed = torch.cat([self.embedding(tokens).mean(1), numbers.to(dtype)], 1) * (1 + flag.to(dtype))[:, None]
        return {"logits": self.linear(mixed), "sum": mixed.sum(1)}


def criterion() -> Any:
    def both(output: dict[str, Tensor], targets: dict[str, Any]) -> Tensor:
        assert targets["name"] == [f"s{round(i)}" for i in targets["score"].tolist()]
        entropy = functional.cross_entropy(output["logits"], targets["label"])
        return entropy + 1e-3 * (output["sum"] - targets["score"]).abs().mean()

    return both


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    register(data, "test_trees", lambda split, form="dict": Samples(form), monkeypatch)
    register(model, "test_tree", lambda num_classes, in_chans: Network(), monkeypatch)
    register(loss, "test_tree", criterion, monkeypatch)
    monkeypatch.setitem(custom.COLLATES, "test_padded", padded)
    SEEN.clear()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    return {}


def reference(tmp_path: Path, expected: dict[str, list[float]]) -> list[float]:
    if not expected:
        expected["dict"] = trained(tmp_path / "reference", (), made=plain(*WORDS, "batch.micro=9", "batch.shard=3"))[0]
    return expected["dict"]


PLANS = {"micro": (), "tuple": ("+data.kwargs.form=tuple",), "exact": ("reduction=exact",),
         "bin64": ("reduction=exact", "reduction.method=bin64"), "together": ("batch.shard=1", "batch.micro=9"),
         "auto": ("batch.micro=auto", "batch.shard=3"), "dp": ("parallel=dp", "parallel.replicas=2"),
         "O2": ("precision=O2", "precision.dtype=bfloat16"),
         "workers": ("data.num_workers=1",)}  # fmt: skip


@pytest.mark.parametrize("plan", [*list(PLANS)[:7], *(pytest.param(p, marks=pytest.mark.slow) for p in list(PLANS)[7:])])
def test_every_plan_trains_the_same(tmp_path: Path, expected: dict[str, list[float]], plan: str) -> None:
    found, rows, _ = trained(tmp_path / plan, (), made=plain(*WORDS, *PLANS[plan]))
    wide = plan == "O2"
    assert found == pytest.approx(reference(tmp_path, expected), rel=1e-4, abs=2e-2 if wide else 1e-6)
    assert any("eval/loss" in row for row in rows)
    if not wide:
        assert set(SEEN) == {(torch.int32, torch.float64, torch.bool)}


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_ranks_train_the_same(tmp_path: Path, expected: dict[str, list[float]], strategy: str) -> None:
    made = plain(*WORDS, f"parallel={strategy}", "batch.micro=1")

    def work(ranks: Ranks) -> Any:
        return trained(tmp_path / "run", (), ranks, made)[1]

    (rows, *_) = on_ranks(2, tmp_path, work)
    alone = trained(tmp_path / "alone", (), made=plain(*WORDS))[1]
    for key in ("train/loss", "eval/loss"):
        mine, theirs = ([row[key] for row in found if key in row] for found in (rows, alone))
        assert mine == pytest.approx(theirs, rel=1e-5)


def test_a_plan_is_made_of_any_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory, layers and the cost model of inputs that are a dict."""
    made = plain(*WORDS, "task=plan", "cost.bandwidth_gb_s=10", "parallel=ddp", "parallel.nproc=2")
    run.run_job(made, tmp_path, Ranks())
    said = capsys.readouterr().out
    assert "activations 0." in said and "replicas  micro batch" in said


def test_ragged_samples_have_a_collate(tmp_path: Path) -> None:
    ragged = "+data.kwargs.form=ragged"
    with pytest.raises(ConfigError, match=r"data\.collate=nobody: is not registered"):
        config.load(plain(*WORDS, "data.collate=nobody"))
    _, rows, _ = trained(tmp_path / "b", (), made=plain(*WORDS, ragged, "data.collate=test_padded"))
    assert [row["train/loss"] < 5 for row in rows if "train/loss" in row] == [True] * 3
    with pytest.raises(JobFailed, match=r"different shapes, \(1,\), \(2,\).*data\.collate"):
        trained(tmp_path / "a", (), made=plain(*WORDS, ragged))


def test_samples_are_stacked_leaf_by_leaf() -> None:
    found = stacked([({"a": 1, "b": [torch.zeros(2), "x"]}, 2.5), ({"a": 3, "b": [torch.ones(2), "y"]}, 0.5)])
    assert isinstance(found, tuple) and torch.equal(found[0]["a"], torch.tensor([1, 3]))
    assert torch.equal(found[1], torch.tensor([2.5, 0.5])) and found[0]["b"][1] == ["x", "y"]
    assert torch.equal(stacked([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))  # a row of numbers is a row
    with pytest.raises(ValueError, match="different lengths"):
        stacked([[torch.zeros(1)], [torch.zeros(1), torch.zeros(1)]])
    with pytest.raises(ValueError, match="different keys"):
        stacked([{"a": 1}, {"b": 1}])


def test_a_model_is_called_as_its_inputs_are() -> None:
    told = lambda *args, **named: (args, named)  # noqa: E731
    one, two = torch.zeros(1), torch.ones(1)
    assert trees.call(told, one) == ((one,), {}) and trees.call(told, (one, two)) == ((one, two), {})
    assert trees.call(told, {"a": one}) == ((), {"a": one}) and trees.call(told, [one, two]) == (([one, two],), {})
