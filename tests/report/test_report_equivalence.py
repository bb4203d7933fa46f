"""Where losses part, how far weights lie apart, and the verdict that `experiment=equivalence` ends with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from report_runs import write_run
from rich.console import Console
from safetensors.numpy import save_file

from isobatch.report import compare, print_verdicts, read_runs
from isobatch.report.distance import Distance, weight_distance

NAN = float("nan")


def write_weighed(folder: Path, losses: list[float], weight: float, digest: str, **summary: object) -> Path:
    """A run that also saved its weights."""
    write_run(folder, losses, summary={"weights_sha256": digest, **summary})
    file = folder / "checkpoints" / "last" / "model.safetensors"
    file.parent.mkdir(parents=True)
    save_file({"w": np.full((3, 2), weight, np.float32), "steps": np.array([7])}, file)
    return folder


def differences(folder: Path) -> list[Distance]:
    return [run.difference for run in read_runs([folder])]


def test_the_first_step_that_differs_is_found_to_the_bit(tmp_path: Path) -> None:
    losses = [3.0, 2.0, 1.0]
    for job, other in enumerate((losses, losses, [3.0, np.nextafter(2.0, 3.0), 0.5])):
        write_run(tmp_path / str(job), other)
    first, same, parted = differences(tmp_path)
    assert first.identical and same.identical and first.reference == parted.reference == "0"
    assert parted.parted == 2 and parted.loss == 0.5 and not parted.identical


@pytest.mark.parametrize(("ours", "parted", "loss"), [([1.0, NAN], None, 0.0), ([NAN, NAN], 1, math.inf)])
def test_nan_equals_nan_only(tmp_path: Path, ours: list[float], parted: int | None, loss: float) -> None:
    write_run(tmp_path / "0", [1.0, NAN])
    write_run(tmp_path / "1", ours)
    found = differences(tmp_path)[1]
    assert (found.parted, found.loss) == (parted, loss)


def test_other_steps_are_counted_and_the_common_ones_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "0", summary={"state": "refused", "error": "x"})  # logged nothing: cannot be the reference
    write_run(tmp_path / "1", [3.0, 2.0, 1.0])
    write_run(tmp_path / "2", [3.0, 2.0])
    none, _, shorter = differences(tmp_path)
    assert none.reference is None and none.common_steps == 0
    assert (shorter.reference, shorter.common_steps, shorter.only_here, shorter.only_there) == ("1", 2, 0, 1)
    assert [v.passed for v in compare(read_runs([tmp_path]), 1.0)] == [False, True, False]


def test_weight_distance_is_the_largest_over_all_tensors(tmp_path: Path) -> None:
    def save(name: str, tensors: Mapping[str, np.ndarray]) -> Path:
        save_file(dict(tensors), tmp_path / name)
        return tmp_path / name

    a = save("a", {"w": np.array([1.0, 2.0], np.float32), "b": np.array([0.0])})
    b = save("b", {"w": np.array([1.0, 2.25], np.float32), "b": np.array([-0.125])})
    assert weight_distance(a, b) == 0.25
    assert weight_distance(a, a) == 0.0
    assert weight_distance(a, save("c", {"w": np.array([1.0, 2.0], np.float32)})) == math.inf
    assert weight_distance(a, save("d", {"w": np.array([1.0, NAN], np.float32), "b": np.array([0.0])})) == math.inf
    (tmp_path / "torn").write_bytes(a.read_bytes()[:20])
    assert weight_distance(a, tmp_path / "torn") is None
    assert weight_distance(a, None) is None


def test_weights_outside_the_run_folder_are_not_read(tmp_path: Path) -> None:
    write_weighed(tmp_path / "0", [1.0], 1.0, "aa")
    write_weighed(tmp_path / "1", [1.0], 1.5, "bb")
    write_weighed(tmp_path / "2", [1.0], 1.5, "bb", weights_file="../0/checkpoints/last/model.safetensors")
    assert [d.weights for d in differences(tmp_path)] == [0.0, 0.5, None]


def test_verdicts(tmp_path: Path) -> None:
    losses = [3.0, 2.0]
    write_weighed(tmp_path / "0", losses, 1.0, "aa")
    write_weighed(tmp_path / "1", losses, 1.0, "aa")  # the same to the bit
    write_weighed(tmp_path / "2", [3.0, 2.0001], 1.0001, "bb")  # within 1e-3
    write_weighed(tmp_path / "3", losses, 1.5, "cc")  # the losses agree, the weights do not
    write_weighed(tmp_path / "4", [3.0, 2.5], 1.0, "aa")
    write_weighed(tmp_path / "5", losses, 1.0, "aa", state="failed", error="RuntimeError: x")
    write_run(tmp_path / "6", losses, summary={"weights_sha256": "dd"})  # saved no weights
    verdicts = compare(read_runs([tmp_path]), 1e-3)
    by_job = {verdict.job: verdict for verdict in verdicts}
    assert [job for job, v in sorted(by_job.items()) if v.passed] == ["0", "1", "2"]
    assert [job for job, v in sorted(by_job.items()) if v.bitwise] == ["0", "1", "5"]
    assert by_job["2"].parted == 2 and by_job["2"].weight_distance == pytest.approx(1e-4, rel=1e-2)
    assert by_job["3"].reason.startswith("weights differ by 0.5")
    assert by_job["4"].reason.startswith("losses differ by 0.5")
    assert by_job["5"].reason == "failed: RuntimeError: x"
    assert by_job["6"].reason == "no saved weights to compare"
    exact = {v.job: v.passed for v in compare(read_runs([tmp_path]), 0.0)}
    assert [job for job, passed in sorted(exact.items()) if passed] == ["0", "1"]
    console = Console(file=StringIO(), width=140)
    print_verdicts(verdicts, 1e-3, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("PASS") == 3 and text.count("FAIL") == 4 and "within 0.001" in text
    assert text.count("identical") == 5  # losses of all but 2 and 4


def test_two_runs_that_end_in_nan_are_not_called_equivalent(tmp_path: Path) -> None:
    for job in ("0", "1"):
        write_weighed(tmp_path / job, [1.0, NAN], 1.0, "aa")
    assert [v.passed for v in compare(read_runs([tmp_path]), 1.0)] == [False, False]


def test_an_evaluation_between_train_rows_does_not_shift_them(tmp_path: Path) -> None:
    accuracy = {1: 0.1, 2: 0.5, 4: 0.7}
    write_run(tmp_path / "0", [4.0, 3.0, 2.0, 1.0], accuracy)
    write_run(tmp_path / "1", [4.0, 3.0, 2.0, 1.0])
    with_evals, without = read_runs([tmp_path])
    assert without.difference.identical and without.difference.common_steps == 4
    assert list(with_evals.metrics.evals["eval/accuracy"]) == [0.1, 0.5, 0.7]
    assert list(with_evals.metrics.evals["samples"]) == [48, 96, 192]
    assert list(with_evals.metrics.evals["time_s"]) == [0.5, 1.0, 2.0]
