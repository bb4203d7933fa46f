"""What is on disk when a save is killed at any moment, fails, or is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_tools import cut, digest, reseal

from isobatch.checkpoint import Checkpoint, NoCheckpoint, load, read
from isobatch.checkpoint import folder as layout
from isobatch.checkpoint.saving import SAVE_NOW, Checkpointer
from isobatch.checkpoint.snapshot import Snapshot
from isobatch.errors import ConfigError, JobFailed
from isobatch.runtime.distributed import Ranks

ABOUT: dict[str, Any] = {"config": {"seed": 0}, "plan": {"steps": 8}, "identity": {"torch": torch.__version__}}


class State:
    """The smallest thing that can be saved: one weight, whose value is the step."""

    better = ""  # nothing is averaged

    def __init__(self, step: int, value: float | None = None):
        self.step, self.weight = step, torch.full((3,), float(step) if value is None else value)

    def state_dict(self) -> dict[str, Any]:
        counters = {"step": self.step, "update": self.step, "skipped_steps": 0, "samples": self.step, "evaluated": 0,
                    "best": {}, "logger_run_id": None}  # fmt: skip
        return {"model": {"w": self.weight}, "optimizer": {"state": {}, "param_groups": []}, "scaler": {}, "ema": None,
                "reducer": {}, "counters": counters}  # fmt: skip


def checkpointer(run: Path, **options: Any) -> Checkpointer:
    return Checkpoint(**options).build(run, Ranks(), ABOUT)


def save(saver: Checkpointer, *steps: int, best: int = 0) -> None:
    for step in steps:
        saver.save(State(step), step == best)
    saver.wait()


def names(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").iterdir())


def test_last_best_and_the_newest_numbers_stay(tmp_path: Path) -> None:
    save(checkpointer(tmp_path, keep=2), 2, 4, 6, 8, best=4)
    assert names(tmp_path) == ["best", "last", "step-6", "step-8"]
    assert [read(tmp_path, name).step for name in ("last", "best", "step-6")] == [8, 4, 6]
    assert os.path.samefile(tmp_path / "checkpoints/last/state.pt", tmp_path / "checkpoints/step-8/state.pt")


def test_files_are_copied_where_there_are_no_hard_links(tmp_path: Path, monkeypatch) -> None:
    def refused(*args: Any) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refused)
    save(checkpointer(tmp_path), 2, 4, best=4)
    assert [read(tmp_path, name).step for name in ("last", "best", "step-4")] == [4, 4, 4]


def die_at(k: int) -> None:
    """Let this process kill itself at its k-th operation on the file system."""
    count = 0

    def dying(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if count == k:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return original(*args, **kwargs)

        return call

    for name in ("replace", "link", "fsync", "mkdir", "rmdir", "unlink"):
        setattr(os, name, dying(getattr(os, name)))


def test_a_kill_at_any_moment_of_a_save_loses_nothing(tmp_path: Path) -> None:
    """The child dies at its k-th operation on the file system, for every k until it gets through."""
    save(checkpointer(tmp_path / "base", keep=2), 1, 2, best=1)
    for k in range(200):
        run = tmp_path / str(k)
        shutil.copytree(tmp_path / "base", run)
        pid = os.fork()
        if pid == 0:
            die_at(k)
            save(checkpointer(run, keep=2), 4, best=4)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        step = read(run).step
        assert step in (2, 4), f"killed at operation {k}"
        assert float(load(run)["model"]["w"][0]) == step
        assert len([n for n in names(run) if n not in ("last", "best") and not n.startswith("step-")]) <= 1
        save(checkpointer(run, keep=2), 6)  # the restarted run
        assert "tmp" not in names(run) and read(run).step == 6
        assert read(run, "best").step in (1, 4), f"best is lost after a kill at operation {k}"
        shutil.rmtree(run)
        if status == 0:
            break
    assert k > 15, "the child was never killed"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_failing_disk_is_one_warning_per_save_and_the_end_says_so(tmp_path: Path, monkeypatch, caplog, number) -> None:
    saver = checkpointer(tmp_path)
    save(saver, 2)
    before = digest(tmp_path / "checkpoints/last")
    original = layout.HashedFile.write

    def full(self: Any, data: Any) -> int:
        original(self, bytes(memoryview(data).cast("B")[:10]))
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(layout.HashedFile, "write", full)
    saver.save(State(4))
    saver.join()
    warnings = [r.getMessage() for r in caplog.records]
    assert len(warnings) == 1, warnings
    assert f"checkpoint of step 4 is not saved: {os.strerror(number)}" in warnings[0]
    assert "training goes on, the one of step 2 stays" in warnings[0]
    assert digest(tmp_path / "checkpoints/last") == before and read(tmp_path).step == 2
    with pytest.raises(JobFailed, match="step 4 is not saved"):
        saver.wait()
    monkeypatch.undo()
    save(saver, 6)  # there is room again: the run ends well
    assert read(tmp_path).step == 6 and "tmp" not in names(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a disk that is always full, on Linux")
def test_a_full_disk_is_called_so_although_torch_does_not_say_it() -> None:
    with pytest.raises(OSError, match="No space left"), layout.HashedFile(Path("/dev/full")) as file:
        torch.save({"w": torch.zeros(10**6)}, file)  # type: ignore[arg-type]


def test_a_folder_deleted_in_mid_run_is_made_anew_with_a_warning(tmp_path: Path, caplog) -> None:
    saver = checkpointer(tmp_path / "run")
    save(saver, 2)
    shutil.rmtree(tmp_path / "run")
    save(saver, 4)
    assert [r.getMessage().split(" ", 1)[1] for r in caplog.records] == ["was deleted while training; it is made anew"]
    assert read(tmp_path / "run").step == 4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path, caplog, value) -> None:
    saver = checkpointer(tmp_path)
    save(saver, 2)
    saver.save(State(4, value), is_best=True)
    with pytest.raises(JobFailed, match="model w is not finite"):
        saver.wait()
    assert names(tmp_path) == ["last", "step-2"] and read(tmp_path).step == 2


def test_a_forbidden_state_is_not_saved(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path)
    save(saver, 2)
    saver.forbid()
    save(saver, 4)
    assert read(tmp_path).step == 2


def test_training_waits_for_the_copy_and_not_for_the_disk(tmp_path: Path, monkeypatch) -> None:
    release = threading.Event()
    original = Checkpointer._write_files

    def slow(self: Any, *args: Any) -> None:
        assert release.wait(30)
        original(self, *args)

    monkeypatch.setattr(Checkpointer, "_write_files", slow)
    saver, state = checkpointer(tmp_path), State(2)
    saver.save(state)
    state.weight.fill_(99.0)  # training goes on
    assert not (tmp_path / "checkpoints").exists()
    release.set()
    saver.wait()
    assert float(load(tmp_path)["model"]["w"][0]) == 2.0


def test_saving_by_the_clock_is_the_main_ranks_request(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path, every_minutes=5)
    assert saver.request() == 0
    saver.saved_at -= 301  # seconds
    assert saver.request() == SAVE_NOW
    other = Checkpointer(Checkpoint(every_minutes=1e-9), tmp_path, Ranks(1, 2, 1, 2), ABOUT)
    assert other.request() == 0
    save(saver, 2)
    assert saver.request() == 0


def test_checkpoint_none_saves_nothing(tmp_path: Path) -> None:
    saver = NoCheckpoint().build(tmp_path, Ranks(), ABOUT)
    save(saver, 2)
    assert not saver.due(2) and saver.request() == 0 and not (tmp_path / "checkpoints").exists()


def test_a_view_is_saved_without_its_storage(tmp_path: Path) -> None:
    flat = torch.arange(100_000, dtype=torch.float32)
    tree = Snapshot({"a": flat[:3], "b": {"c": (flat[3:5], 1, None)}, "drop": len, "version": torch.__version__}).ready()
    assert tree["a"].untyped_storage().nbytes() == 12
    assert tree["b"]["c"][1:] == [1, None] and "drop" not in tree and type(tree["version"]) is str


def damage(run: Path, what: str) -> None:
    path = run / "checkpoints/last"
    manifest = json.loads((path / "manifest.json").read_text())
    if what == "cut state":
        cut(path / "state.pt")
    elif what == "empty weights":
        cut(path / "model.safetensors", 0)
    elif what == "flipped bit":
        data = bytearray((path / "state.pt").read_bytes())
        data[len(data) // 2] ^= 1
        (path / "state.pt").unlink()
        (path / "state.pt").write_bytes(bytes(data))
    elif what == "no state":
        (path / "state.pt").unlink()
    elif what == "no manifest":
        (path / "manifest.json").unlink()
    elif what == "cut manifest":
        cut(path / "manifest.json")
    elif what == "path in manifest":
        manifest["files"]["../../../secret"] = manifest["files"].pop("model.safetensors")
    elif what == "additional path":
        manifest["files"]["/etc/passwd"] = manifest["files"]["model.safetensors"]
    elif what == "pipe":
        (path / "state.pt").unlink()
        os.mkfifo(path / "state.pt")
    elif what == "other run":
        save(checkpointer(run.parent / "other"), 7)
        (path / "state.pt").unlink()
        shutil.copy(run.parent / "other/checkpoints/last/state.pt", path / "state.pt")
    elif what == "other step":
        manifest["step"] = 3
    elif what == "deep":
        (path / "manifest.json").unlink()
        (path / "manifest.json").write_text("[" * 100_000)
    elif what == "huge number":
        manifest["step"] = "4" * 9
    elif what == "code":
        import pickle

        class Evil:
            def __reduce__(self) -> Any:
                return os.mkdir, (str(run.parent / "owned"),)

        (path / "state.pt").unlink()
        (path / "state.pt").write_bytes(pickle.dumps(Evil()))
        return reseal(path)
    elif what == "code in archive":

        class Mine:
            def __reduce__(self) -> Any:
                return os.mkdir, (str(run.parent / "owned"),)

        torch.save({"model": Mine()}, path / "new")
        (path / "new").replace(path / "state.pt")
        return reseal(path)
    if what in ("path in manifest", "additional path", "other step", "huge number"):
        (path / "manifest.json").unlink()
        (path / "manifest.json").write_text(json.dumps(manifest))


DAMAGE = ["cut state", "empty weights", "flipped bit", "no state", "no manifest", "cut manifest", "path in manifest",
          "additional path", "pipe", "other run", "other step", "deep", "huge number", "code", "code in archive"]  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, caplog, what) -> None:
    run = tmp_path / "run"
    save(checkpointer(run), 2, 4)
    shutil.rmtree(run / "checkpoints/step-4")  # the other name of the same files
    damage(run, what)
    found = read(run)
    assert found.step == 2 and found.path.name == "step-2"
    named = [r.getMessage() for r in caplog.records if "is damaged (" in r.getMessage()]
    assert len(named) == 1 and str(run / "checkpoints/last") in named[0]
    shutil.rmtree(run / "checkpoints/step-2")
    with pytest.raises(ConfigError, match="none of its checkpoints is whole"):
        read(run)
    assert not (tmp_path / "owned").exists(), "code from the checkpoint was run"


def test_a_checkpoint_that_was_asked_for_by_name_is_not_replaced_by_another(tmp_path: Path) -> None:
    save(checkpointer(tmp_path), 2, 4)
    cut(tmp_path / "checkpoints/step-4/state.pt")
    with pytest.raises(ConfigError, match=r"checkpoint\.load=step-4: .* is damaged"):
        read(tmp_path, "step-4")
    with pytest.raises(ConfigError, match="holds no checkpoint best; there are last, step-4, step-2"):
        read(tmp_path, "best")
    with pytest.raises(ConfigError, match=r"resume=.*holds no checkpoint"):
        read(tmp_path / "nowhere")
    assert read(tmp_path / "checkpoints/step-2").step == 2  # a checkpoint's own folder will do


def test_options_refuse_what_they_cannot_mean() -> None:
    for options in ({"every": 0}, {"every_minutes": float("nan")}, {"keep": 0}, {"mode": "up"}, {"resume": "maybe"},
                    {"load": "../../etc"}, {"load": "step-"}, {"best": "eval/rank"}, {"mode": "max"}):  # fmt: skip
        with pytest.raises(ConfigError, match=r"^checkpoint\."):
            Checkpoint(**options)
    assert Checkpoint(best="eval/rank", mode="min").direction("eval/rank") == "min"
    assert Checkpoint().direction("eval/loss") == "min" and Checkpoint().direction("eval/samples") is None


def test_a_metric_improves_in_the_stated_direction_and_never_with_nan() -> None:
    options, best = Checkpoint(best="eval/rank", mode="min"), {}
    nan = float("nan")
    assert options.improved(best, {"eval/loss": 1.0, "eval/rank": 5.0}, 1) == ["eval/loss", "eval/rank"]
    assert options.improved(best, {"eval/loss": nan, "eval/rank": 4.0, "eval/accuracy": 1.0}, 2) == []
    assert options.improved(best, {"eval/loss": 1.0, "eval/rank": nan}, 3) == []
    assert options.improved(best, {"eval/loss": 2.0, "eval/rank": 4.0}, 4) == ["eval/rank"]
    assert best == {"eval/loss": {"value": 1.0, "step": 1}, "eval/rank": {"value": 4.0, "step": 4}}
    assert options.followed({"eval/loss": 1.0}) == "eval/rank"
    assert Checkpoint().followed({"eval/loss": 1.0}) == "eval/loss"
    assert Checkpoint().followed({"eval/loss": 1.0, "eval/accuracy": 0.5}) == "eval/accuracy"


def test_the_best_evaluations_keep_their_checkpoints(tmp_path: Path) -> None:
    """By the metric of `best`, over a resume too; and the newest ones besides."""
    from harness import BASE, rows, train

    words = (*BASE, "epochs=null", "steps=8", "eval_every=1", "batch.effective=48", "checkpoint.keep=1",
             "checkpoint.keep_best=2", "checkpoint.best=eval/loss", "optimizer=sgd", "optimizer.lr=4.0")  # fmt: skip
    train(tmp_path / "whole", *words)
    losses = dict(enumerate(rows(tmp_path / "whole", "eval/loss"), 1))
    best = sorted(losses, key=lambda step: losses[step])[:2]
    assert best != [8, 7], "this training has to part from its best for the test to say anything"
    kept = {int(name[5:]) for name in os.listdir(tmp_path / "whole/checkpoints") if name.startswith("step-")}
    assert kept == {*best, 8}
    train(tmp_path / "parts", *words[:-1], "optimizer.lr=4.0", "steps=4")
    train(tmp_path / "parts", f"resume={tmp_path / 'parts'}", "steps=8")
    assert {int(name[5:]) for name in os.listdir(tmp_path / "parts/checkpoints") if name.startswith("step-")} == kept
