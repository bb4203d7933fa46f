"""Reported faults of Hydra with several processes (cases 1 to 3): one folder, one config, one sweep, inputs where they are."""

from __future__ import annotations

from pathlib import Path

import launching
import pytest
from harness import BASE, train, train_ranks
from launching import COMMAND, ROOT, TORCHRUN, run, summary

NO_REPORT = "hydra.callbacks.report.enabled=false"


def files(folder: Path) -> set[str]:
    """All files below `folder`."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.case(1)
def test_case_1_ranks_that_come_late_share_one_folder_and_one_config(tmp_path: Path) -> None:
    three = [word.replace("=2", "=3") if "nproc" in word else word for word in TORCHRUN]
    ended = run([*three, "parallel=ddp", "logger.run_name=${now:%H-%M-%S-%f}"], tmp_path, STANDIN_LATE="1.2")
    assert ended.code == 0, ended.err
    (path,) = tmp_path.rglob("summary.json")
    job = summary(path.parent)
    assert [rank for rank, _, _ in job["seen"]] == [0, 1, 2]
    assert job["told"] == [job["told"][0]] * 3 and job["told"][0][0] == str(path.parent)
    assert len(job["run_name"].split("-")) == 4, "the time is not in the name, so this shows nothing"
    assert len(list(tmp_path.glob("outputs/*/*"))) == 1 and len(list(tmp_path.rglob("config.yaml"))) <= 1


@pytest.mark.slow
@pytest.mark.case(2)
def test_case_2_a_sweep_under_torchrun_trains_each_job_as_alone(tmp_path: Path) -> None:
    words = (*BASE, "data=synthetic", "data.samples=12", "data.eval_samples=4", "data.image_size=8", "epochs=2",
             "batch.effective=null", "batch.micro=1", "batch.shard=null", "reduction=exact", "log_every=1")  # fmt: skip
    command = [*TORCHRUN[:-1], str(ROOT / "train.py"), "-m"]
    ended = run([*command, "parallel=ddp", *words, "accumulation=1,2,3", NO_REPORT], tmp_path)
    assert ended.code == 0, ended.err
    (sweep,) = tmp_path.glob("multirun/*/*")
    assert sorted(path.parent.name for path in tmp_path.rglob("summary.json")) == ["0", "1", "2"]
    for job, (accumulation, updates) in enumerate([(1, 12), (2, 6), (3, 4)]):
        done = summary(sweep / str(job))
        assert (done["updates"], done["plan"]["world_size"]) == (updates, 2)
        alone = train_ranks(2, tmp_path / f"alone{job}", *words, f"accumulation={accumulation}")
        assert len(alone[0].weights) == updates and alone[0].weights == alone[1].weights
        assert done["weights_sha256"] == summary(tmp_path / f"alone{job}")["weights_sha256"]


@pytest.mark.parametrize(("mode", "chdir"), [
    ((), "true"), (("-m",), "false"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (((), "false"), (("-m",), "true"))),
])  # fmt: skip
@pytest.mark.case(3)
def test_case_3_inputs_are_where_they_were_typed_and_outputs_in_the_jobs_folder(tmp_path: Path, chdir: str,
                                                                                mode: tuple[str, ...]) -> None:  # fmt: skip
    typed_in = tmp_path / "typed_in"
    (typed_in / "data").mkdir(parents=True)
    for file in ("train/cat/a.jpg", "train/dog/b.jpg", "val/cat/c.jpg", "val/dog/d.jpg"):
        (typed_in / "data" / file).parent.mkdir(parents=True)
        (typed_in / "data" / file).touch()
    train(typed_in / "before", *BASE, "epochs=null", "steps=1")
    there = files(typed_in)
    ended = run([*COMMAND, *mode, "resume=before", "data=image_folder", "data.root=./data",
                 f"hydra.job.chdir={chdir}"], typed_in)  # fmt: skip
    assert ended.code == 0, ended.err
    (folder,) = typed_in.glob("multirun/*/*/0" if mode else "outputs/*/*")
    job = summary(folder)
    assert (job["data_root"], job["resume"]) == (str(typed_in / "data"), str(typed_in / "before"))
    assert job["cwd"] == str(folder if chdir == "true" else typed_in)
    new = files(typed_in) - there
    launch = folder.relative_to(typed_in).parts[:3]
    assert new and all(Path(path).parts[:3] == launch for path in new), new
    assert launching.left_over(tmp_path) == []
