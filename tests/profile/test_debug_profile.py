"""Groups debug and profile, and the table of layers: small trainings, and where time and memory go."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import BASE, plain, summary, train, train_ranks

from isobatch.config import load, options
from isobatch.data import Split
from isobatch.debug import SameAgain
from isobatch.errors import ConfigError
from isobatch.profile import Memory
from isobatch.profile.trace import MemoryHistory
from isobatch.sampler import Shuffle


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


WORDS = ("data=digits", "batch.effective=24", "batch.shard=6", "reduction=exact", "log_every=1", *BASE)


def test_one_window_again_and_again_on_every_plan(tmp_path: Path) -> None:
    words = (*WORDS, "debug=overfit", "epochs=null", "steps=40", "optimizer.lr=0.01")
    one = train(tmp_path / "one", *words)
    assert len({tuple(ids) for ids in one.ids}) == 1 and len(one.ids) == 40, "another window"
    losses = [row["train/loss"] for row in rows(tmp_path / "one") if "train/loss" in row]
    assert losses[-1] < 0.3 * losses[0]
    assert len([row for row in rows(tmp_path / "one") if "eval/loss" in row]) == 1
    assert train_ranks(2, tmp_path / "two", *words)[0].weights == one.weights
    with pytest.raises(ConfigError, match=r"sampler"):  # what was overfitted is no beginning of a training
        train(tmp_path / "on", *WORDS, "steps=60", "epochs=null", f"resume={tmp_path / 'one'}", "debug=none")


def test_several_windows_are_an_epoch() -> None:
    config = SimpleNamespace(sampler=Shuffle(), eval_every=7)
    found = SameAgain(config.sampler, 20)
    first = found.order(0, 100, 3, lambda: torch.zeros(0))
    assert first.equal(found.order(5, 100, 3, lambda: torch.zeros(0))) and found.order_size(100) == len(first) == 20
    assert found.order_size(8) == 8 and first.equal(Shuffle().order(0, 100, 3, lambda: torch.zeros(0))[:20])


def test_a_short_run_goes_through_everything_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: Any) -> None:
    with caplog.at_level("INFO", logger="isobatch"):
        train(tmp_path, *WORDS, "debug=short")
    assert summary(tmp_path)["steps"] == 3 and summary(tmp_path)["state"] == "completed"
    (evaluation,) = [row for row in rows(tmp_path) if "eval/loss" in row]
    assert evaluation["eval/samples"] == 3 * 24 and (tmp_path / "checkpoints").is_dir()
    assert "debug=short: the evaluation is of 72 of 359 samples" in caplog.text + capsys.readouterr().out
    train(tmp_path / "whole", *WORDS, "debug=short", "task=evaluate", f"resume={tmp_path}")
    assert summary(tmp_path / "whole")["final"]["eval/samples"] == 359  # what is asked for by itself is of all


def test_some_samples_are_of_all_of_a_split() -> None:
    inputs, targets = torch.arange(10.0).view(10, 1), torch.arange(10)
    for tensors in (None, (inputs, targets)):
        split = Split([(inputs[i], i) for i in range(10)], tensors)
        some = split.some(4)
        assert some.targets().tolist() == [some.dataset[i][1] for i in range(4)] == [0, 2, 5, 7] and len(some) == 4
        assert tensors is None or some.tensors[0].flatten().tolist() == [0, 2, 5, 7]
        assert split.some(10) is split


def test_some_samples_of_data_without_a_class_each() -> None:
    masks = Split([(torch.zeros(1), torch.zeros(2)) for _ in range(10)], targets=lambda: torch.empty(0, 0))
    assert masks.some(4).targets().numel() == 0
    lines = Split([(torch.zeros(1), torch.arange(3)) for _ in range(10)]).some(4)
    assert lines.targets == lines._scan_targets  # what only reading every sample tells is not asked for


class Rotten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * float("nan")


def test_an_anomaly_names_the_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import nn

    inner = nn.Flatten.forward
    monkeypatch.setattr(nn.Flatten, "forward", lambda self, x: Rotten.apply(inner(self, x).requires_grad_()))
    with pytest.raises(Exception, match="RottenBackward"), pytest.warns(UserWarning, match="Rotten|Anomaly"):
        train(tmp_path, *WORDS, "debug=anomaly", "steps=2", "epochs=null")
    assert not torch.is_anomaly_enabled()
    with pytest.raises(ConfigError, match=r"compile=True: hides what debug=anomaly watches"):
        load(plain("debug=anomaly", "compile=true"))


def test_the_time_of_a_step_is_parted_and_changes_nothing(tmp_path: Path) -> None:
    words = (*WORDS, "epochs=null", "steps=4", "batch.micro=6")
    bare = train(tmp_path / "bare", *words)
    timed = train(tmp_path / "timed", *words, "profile=time", "profile.peak_tflops=0.001")
    assert timed.weights == bare.weights
    assert not any(key.startswith("time/") for row in rows(tmp_path / "bare") for key in row)
    logged = [row for row in rows(tmp_path / "timed") if "train/loss" in row]
    parts = [f"time/{part}_ms" for part in ("data", "forward", "backward", "reduction", "update")]
    for row in logged:
        assert all(row[part] >= 0 for part in parts) and row["time/forward_ms"] > 0 < row["time/update_ms"]
        assert row["perf/mfu"] == pytest.approx(1000 * row["perf/tflops"]) and row["perf/mfu"] > 0
    found = options("profile", {"name": "time"}).build(tmp_path, SimpleNamespace(rank=0), torch.device("cpu"))
    assert found.row.__self__.flops is None
    with pytest.raises(ConfigError, match=r"cuda_graph=True: replays"):
        load(plain("profile=time", "cuda_graph=true"))


def test_the_operations_are_those_of_forward_and_backward() -> None:
    from torch import nn

    from isobatch.profile.stopwatch import flops_of

    class Precision:
        def autocast(self, device: Any) -> Any:
            import contextlib

            return contextlib.nullcontext()

    network = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    parts = SimpleNamespace(working=SimpleNamespace(module=network), device=torch.device("cpu"),
                            precision=SimpleNamespace(_precision=Precision()))  # fmt: skip
    inputs = torch.rand(6, 8)
    before = torch.get_rng_state()
    # forward 2*(32+8); backward: weights as much, inputs of the second layer alone
    assert flops_of(parts, SimpleNamespace(inputs=inputs)) == 2 * (32 + 8) * 2 + 2 * 8
    assert torch.get_rng_state().equal(before) and network[0].weight.grad is None


def test_a_trace_holds_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    words = (*WORDS, "epochs=null", "steps=5")
    traced = train(tmp_path / "traced", *words, "profile=trace", "profile.start=1", "profile.steps=2")
    assert traced.weights == train(tmp_path / "bare", *words).weights
    with gzip.open(tmp_path / "traced" / "profile" / "trace-rank0.json.gz", "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"step 2", "step 3"} <= names and not {"step 1", "step 4"} & names and "aten::addmm" in names
    assert not (tmp_path / "bare" / "profile").exists()


def test_the_memory_history_is_written_when_memory_runs_out_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"profile\.name=memory: is CUDA's own history, and this run works on cpu"):
        Memory().build(tmp_path, SimpleNamespace(rank=0), torch.device("cpu"))
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **given: calls.append(given))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(Path(path).name))

    def run(length: int, fails: bool) -> list[Any]:
        calls.clear()
        history = MemoryHistory(tmp_path / "deep" / "memory-rank0.pickle", 2, 9)
        with pytest.raises(torch.OutOfMemoryError) if fails else history, history:
            for _ in history.windows(iter(range(length)), None, None):
                pass
            if fails:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return calls.copy()

    written = [{"max_entries": 9}, "memory-rank0.pickle", {"enabled": None}]
    assert run(5, False)[-2:] == written[-2:] and run(1, True) == written


def test_the_layers_are_shown_with_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, *WORDS, "task=plan", "model.table=true")
    layers = json.loads((tmp_path / "plan.json").read_text())["layers"]
    assert [row["kind"] for row in layers] == ["Flatten", "Linear", "ReLU", "Linear", "Sequential"]
    assert layers[1] == {
        "layer": "1",
        "kind": "Linear",
        "output": "16",
        "weights": "1,040",
        "trained": "1,040",
        "MFLOP": "0.002",
    }
    assert layers[-1]["weights"] == "1,210" and "MFLOP" in capsys.readouterr().out
