"""`python -m isobatch.compare`: the first place where two runs part, and what differs before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import BASE, train, train_ranks
from report_runs import write_run
from safetensors.numpy import save_file

from isobatch.compare.__main__ import as_text, main
from isobatch.compare.rows import compare_rows, distance
from isobatch.compare.runs import compare_runs

RUN = (*BASE, "epochs=null", "steps=4", "log_every=1", "checkpoint.every=4", "batch.micro=12", "batch.shard=null")


def rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_two_plans_of_one_training_are_the_same_and_another_lr_is_named(tmp_path: Path, capsys) -> None:
    train(tmp_path / "a", *RUN, "reduction=exact")
    train_ranks(2, tmp_path / "b", *RUN, "reduction=exact")
    train(tmp_path / "c", *RUN, "reduction=exact", "optimizer.lr=0.02")
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "the same to the bit" in capsys.readouterr().out
    out = tmp_path / "compared.json"
    assert main([str(tmp_path), "--json", str(out)]) == 1
    said = capsys.readouterr().out
    assert "b against a: the same to the bit" in said and "c against a: parts at step 1: train/lr" in said
    assert "contract: optimizer.lr" in said and "weights " in said
    _, c = json.loads(out.read_text())
    assert c["same"] is False and c["rows"]["first"]["key"] == "train/lr" and c["weights"] is False and c["tensors"]


def test_rows_are_matched_by_step_and_kind_and_clocks_do_not_count(tmp_path: Path) -> None:
    a = rows(tmp_path / "a", {"step": 1, "train/loss": 2.0, "time_s": 1}, {"step": 2, "train/loss": 1.0},
             {"step": 2, "eval/loss": 1.0}, {"step": 3, "train/loss": "nan"})  # fmt: skip
    b = rows(tmp_path / "b", {"step": 1, "train/loss": 2.0, "time_s": 9, "perf/samples_per_s": 3},
             {"step": 2, "eval/loss": 1.5}, {"step": 3, "train/loss": "nan"}, {"step": 4, "train/loss": 0.5})  # fmt: skip
    result = compare_rows(a, b)
    assert (result.common, result.only_first, result.only_other) == (3, 1, 1)
    assert result.first is not None and (result.first.step, result.first.key) == (2, "eval/loss")
    assert result.largest == {"eval/loss": pytest.approx(1 / 3)}


def test_rows_that_say_nothing_in_common_are_no_rows_in_common(tmp_path: Path) -> None:
    a = rows(tmp_path / "a", {"step": 1}, {"step": 2, "train/loss": 1.0, "time_s": 3.0})
    b = rows(tmp_path / "b", {"step": 1, "train/loss": 2.0}, {"step": 2, "time_s": 3.0})
    assert compare_rows(a, b).common == 0


def test_what_is_no_row_is_passed_over(tmp_path: Path) -> None:
    good = {"step": 1, "train/loss": 2.0}
    path = tmp_path / "a"
    lines = '{"step": 1, "train/loss": 2.0}\n[]\n{"step": "x"}\n' + "[" * 5000 + '\n{"step": 1, "train/loss": 3.0}\n{"st'
    path.write_text(lines)
    result = compare_rows(path, rows(tmp_path / "b", good))
    assert (result.common, result.only_first, result.only_other, result.first) == (1, 0, 0, None)


@pytest.mark.parametrize(
    ("here", "there", "far"),
    [(1.0, 1.0, 0), (1.0, 0.5, 0.5), ("nan", "nan", 0), ("nan", 1.0, float("inf")), (None, 1, float("inf")),
     ([1], [2], float("inf"))],
)  # fmt: skip
def test_distances(here: object, there: object, far: float) -> None:
    assert distance(here, there) == far


def test_identity_data_and_plan_are_told_apart(tmp_path: Path, capsys) -> None:
    for name, threads, digest in (("a", 1, "d0"), ("b", 2, "d1")):
        write_run(tmp_path / name, [3.0, 2.0], config={"parallel": {"name": "single"}, "log_every": threads})
        plan = {"effective_batch": 48, "identity": {"threads": threads}, "data_fingerprint": {"train": digest},
                "num_replicas": threads}  # fmt: skip
        (tmp_path / name / "plan.json").write_text(json.dumps(plan))
    (comparison,) = compare_runs([tmp_path])
    assert [c.key for c in comparison.identity] == ["threads"] and [c.key for c in comparison.data] == ["train"]
    assert [c.key for c in comparison.plan] == ["log_every", "num_replicas"] and not comparison.contract
    assert not comparison.same and "from other data: train" in comparison.verdict
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "identity: threads 1 -> 2" in capsys.readouterr().out


def test_what_is_damaged_and_not_compared_is_said(tmp_path: Path, capsys) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, [3.0, 2.0])
    (tmp_path / "b" / "config.yaml").write_text("- 1")
    assert main([str(tmp_path)]) == 0
    assert f"not compared: {tmp_path / 'b' / 'config.yaml'}: not a mapping" in capsys.readouterr().out


def test_equal_rows_with_other_weights_name_the_first_tensor(tmp_path: Path) -> None:
    for name, value in (("a", 0.0), ("b", 0.25)):
        folder = write_run(tmp_path / name, [1.0], summary={"weights_sha256": name})
        (folder / "checkpoints" / "last").mkdir(parents=True)
        weights = {"body": np.zeros(3, np.float32), "head": np.full(2, value, np.float32)}
        save_file(weights, folder / "checkpoints" / "last" / "model.safetensors")
    (comparison,) = compare_runs([tmp_path / "a", tmp_path / "b"])
    assert comparison.tensors == {"head": 0.25} and "first in head" in comparison.verdict and not comparison.same
    assert "weights head: at most 0.25 apart" in as_text(comparison)
    save_file({"other": np.zeros(3, np.float32)}, tmp_path / "b/checkpoints/last/model.safetensors")
    (comparison,) = compare_runs([tmp_path / "a", tmp_path / "b"])
    assert "weights body: of another shape, not finite, or in one of them alone" in as_text(comparison)


def test_refusals_are_one_line(tmp_path: Path, capsys) -> None:
    write_run(tmp_path / "a", [1.0])
    for words in ([str(tmp_path / "nope")], [str(tmp_path / "a")]):
        assert main(words) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
