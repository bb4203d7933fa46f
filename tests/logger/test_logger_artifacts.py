"""`wandb-artifact://` in place of a path, and what a run leaves at W&B beside its rows: code, checkpoints, predictions."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness import BASE, summary, train
from test_logger import PLAN, SUMMARY, environ  # noqa: F401
from wandb_standin import StandIn, offline_files, read_offline

import isobatch
from isobatch.config import options
from isobatch.errors import ConfigError
from isobatch.logger import artifacts, wandb_download, wandb_process

SHORT = ("logger=none", "scheduler=constant", "model=mlp", "model.width=8", "threads=1", "checkpoint.every_minutes=null")
ADDRESS = "wandb-artifact://tester/digits/checkpoint-abc:best"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def of_folder(*parts: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for part in parts for path in ([part] if part.is_file() else part.iterdir())}


class Fake:
    """An artifact of W&B, as far as a download asks."""

    entity, project, name, version = "tester", "digits", "checkpoint-abc:v3", "v3"

    def __init__(self, files: dict[str, bytes]):
        self.files = files

    @property
    def manifest(self) -> Fake:
        return self

    @property
    def entries(self) -> list[str]:
        return list(self.files)

    def download(self, root: str) -> None:
        for name, data in self.files.items():
            (Path(root) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(root) / name).write_bytes(data)


def test_what_a_download_leaves(here: Path) -> None:
    fetch = partial(wandb_download.fetch, checkpoints="checkpoints", beside=artifacts.OF_THE_RUN)
    checkpoint = {"manifest.json": b"{}", "state.pt": b"", "config.yaml": b"seed: 1"}
    assert fetch(Fake(checkpoint), here / "a") == "v3"
    assert sorted(str(p.relative_to(here)) for p in (here / "a/v3").rglob("*") if p.is_file()) == [
        "a/v3/artifact.json", "a/v3/checkpoints/last/manifest.json", "a/v3/checkpoints/last/state.pt",
        "a/v3/config.yaml"]  # fmt: skip
    fetch(Fake({"train/1.png": b"1"}), here / "b")
    assert (here / "b/v3/train/1.png").is_file()
    assert artifacts.used({"data": {"root": str(here / "b/v3/train")}}) == {"data.root": "tester/digits/checkpoint-abc:v3"}
    fetch(Fake({"other.png": b"1"}), here / "b")  # it is there, complete
    assert not (here / "b/v3/other.png").exists()
    for name in ("../../evil.py", "/evil.py", "a\\..\\evil.py"):
        with pytest.raises(ValueError, match="leads out of it"):
            fetch(Fake({name: b""}), here / "c/d")
    broken = Fake({"a": b"1"})
    broken.files = {"a": b"1", "a/b": b"2"}  # a folder and a file at once
    with pytest.raises(OSError):
        fetch(broken, here / "c/d")
    assert not list((here / "c/d").iterdir())
    broken.version = "../v3"
    with pytest.raises(ValueError, match="its version is"):
        fetch(broken, here / "c/d")


@pytest.mark.slow
def test_a_run_goes_on_from_an_artifact(here: Path, environ: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Fetched once, and from then on a run folder: its settings, its checks, its weights, and the run says what it used."""
    first = isobatch.train([*SHORT, "epochs=null", "steps=2", "hydra.run.dir=first"]).folder
    whole = isobatch.train([*SHORT, "epochs=null", "steps=3", "hydra.run.dir=whole"]).summary
    with StandIn() as server:
        monkeypatch.setattr(sys, "argv", ["train.py"])
        environ(**server.environ(here))
        server.artifacts["checkpoint-abc:best"] = of_folder(first / "checkpoints/last", first / "config.yaml")
        server.artifacts["bad:v0"] = of_folder(first / "checkpoints/last") | {"state.pt": b"no checkpoint"}
        server.artifacts["worse:v0"] = {"../../evil.py": b"print()"}
        online = ["logger=wandb", "logger.mode=online", "logger.system_metrics=false"]
        more = isobatch.train([f"resume={ADDRESS}", "steps=3", "hydra.run.dir=second", *online])
        folder = here / "artifacts/tester/digits/checkpoint-abc/v3"
        assert more.config["resume"] == str(folder) and more.config["model"]["width"] == 8
        assert more.summary["weights_sha256"] == whole["weights_sha256"]
        (run,) = server.runs.values()
        assert run.config["artifact/resume"] == "tester/digits/checkpoint-abc:v3"
        assert [use["artifactID"] for use in server.used] == ["checkpoint-abc:best"]
        with pytest.raises(ConfigError, match=r"^resume=.*bad/v3.*none of its checkpoints is whole"):
            isobatch.train([f"resume={ADDRESS.replace('checkpoint-abc:best', 'bad:v0')}", "steps=3", "hydra.run.dir=third"])
        for name, problem in (("worse:v0", "leads out of it"), ("none:v0", "not found")):
            address = ADDRESS.replace("checkpoint-abc:best", name)
            with pytest.raises(ConfigError, match=rf"^model\.checkpoint_path={address}: cannot be fetched \(.*{problem}"):
                isobatch.train(["logger=none", "model=resnet18", f"model.checkpoint_path={address}", "hydra.run.dir=fourth"])
        assert not list(here.rglob("evil.py"))
        assert sorted(p.name for p in folder.parents[1].iterdir()) == ["bad", "checkpoint-abc"]
    assert artifacts.local("resume", ADDRESS.replace(":best", ":v3"), here) == str(folder)  # it is there: nobody is asked
    with pytest.raises(ConfigError, match=r"^resume=.*does not answer.*or set resume to a folder"):
        artifacts.local("resume", ADDRESS, here)


def test_what_is_no_address_or_has_no_key(here: Path, environ: Any) -> None:  # noqa: F811
    for address in ("wandb-artifact://a/b", "wandb-artifact://a/b/c", "wandb-artifact://../../b:v0", "wandb-artifact://a/../b:v0",
                    "wandb-artifact://a/b/c:.."):  # fmt: skip
        with pytest.raises(ConfigError, match=r"is no address of an artifact; write data\.root=wandb-artifact://ENTITY"):
            artifacts.local("data.root", address, here)
    with pytest.raises(ConfigError, match="no W&B key was found; set WANDB_API_KEY"):
        isobatch.train(["logger=none", "model=resnet18", f"model.checkpoint_path={ADDRESS}", "hydra.run.dir=a"])
    assert artifacts.fetched(["epochs=2", "resume=runs/a"], here) == ["epochs=2", "resume=runs/a"]
    (here / "v3/sub").mkdir(parents=True)
    for label, expected in (('{"artifact": "a/b/c:v3"}', {"data.root": "a/b/c:v3"}), ('{"artifact": "$(x)"}', {}), ("[", {})):
        (here / "v3/artifact.json").write_text(label)
        assert artifacts.used({"data": {"root": str(here / "v3/sub"), "name": "x"}, "resume": None}) == expected


def test_predictions_of_each_evaluation_change_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from isobatch.logger.csv_rows import CsvLogger

    shown: list[Any] = []
    train(here / "plain", *BASE, "epochs=null", "steps=4", "eval_every=2", "logger=csv")
    monkeypatch.setattr(CsvLogger, "predictions", lambda self, row, found: shown.append((row["step"], len(found.images))))
    monkeypatch.setattr(CsvLogger, "wants_predictions", 3)
    for each, steps in ((True, [2, 4]), (False, [4])):
        shown.clear()
        monkeypatch.setattr(CsvLogger, "wants_each", each)
        train(here / str(each), *BASE, "epochs=null", "steps=4", "eval_every=2", "logger=csv")
        assert shown == [(step, 3) for step in steps]
        assert summary(here / str(each))["weights_sha256"] == summary(here / "plain")["weights_sha256"]


@pytest.mark.slow
def test_code_and_checkpoint_are_artifacts(here: Path, environ: Any) -> None:  # noqa: F811
    environ(WANDB_MODE="offline")
    (here / "src/.hidden").mkdir(parents=True)
    (here / "src/outputs").mkdir()
    for name in ("a.py", "conf.yaml", "photo.jpg", ".hidden/b.py", "outputs/c.py"):
        (here / "src" / name).write_text("x")
    train(here / "run", *BASE, "epochs=null", "steps=4", "eval_every=2", "logger=wandb", "logger.predictions=3",
          "logger.predictions_at=evaluations", f"logger.code={here / 'src'}", "logger.log_checkpoints=last",
          "logger.system_metrics=false", "logger.registry=wandb-registry-model/digits")  # fmt: skip
    (file,) = offline_files(here)
    run = read_offline(file)
    shown = [row for row in run.history if "predictions" in row]
    assert [row["step"] for row in shown] == [2, 4] and all(row["predictions"]["nrows"] == 3 for row in shown)
    (code,) = (files for name, files in run.artifacts.items() if name.startswith("code/"))
    assert sorted(code) == ["a.py", "conf.yaml"]
    (checkpoint,) = (files for name, files in run.artifacts.items() if name.startswith("model/checkpoint-"))
    assert {"state.pt", "model.safetensors", "manifest.json", "config.yaml", "plan.json"} <= set(checkpoint)


def test_a_checkpoint_is_linked_when_it_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As wandb would be called; its own server side is W&B's."""
    calls: list[Any] = []

    class Fake:
        offline = False

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **given: (calls.append((name, *[a for a in args if a is not self])), self)[1]

    said: list[str] = []
    monkeypatch.setattr(wandb_process, "send", lambda kind, text: said.append(text))
    does = wandb_process.Messages(Fake(), Fake())
    given: dict[str, Any] = {"folder": "f", "beside": ["x/config.yaml"], "name": "n", "aliases": ["best"], "metadata": {},
                             "limit_s": 15.0}  # fmt: skip
    does.checkpoint(**given, registry="wandb-registry-model/digits")
    assert [call[0] for call in calls][-3:] == ["log_artifact", "wait", "link_artifact"]
    assert calls[-1][-1] == "wandb-registry-model/digits" and not said
    does.run.offline = True
    calls.clear()
    does.checkpoint(**given, registry="wandb-registry-model/digits")
    assert calls[-1][0] == "log_artifact" and "offline" in said[0]
    for bad, problem in (({"registry": "a/b"}, "log_checkpoints=best too"), ({"predictions_at": "evaluations"}, "=32"),
                         ({"registry": "x", "log_checkpoints": "best"}, "no collection")):  # fmt: skip
        with pytest.raises(ConfigError, match=problem):
            options("logger", {"name": "wandb", **bad})
    with pytest.raises(ConfigError, match=r"logger\.code=.* is no folder"):
        options("logger", {"name": "wandb", "mode": "offline", "code": str(tmp_path / "none")}).check()
