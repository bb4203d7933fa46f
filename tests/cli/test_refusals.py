"""What Hydra refuses, as a person sees it; and a run that needs no conf/ of its author."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from isobatch import hydra_patches
from isobatch.config import conf_folder
from isobatch.hydra_patches.refusals import Refusal

TRAIN = Path(__file__).parents[2] / "train.py"
REFUSALS = [
    ("batch.effectiv=3", "batch.effectiv=3: no such setting; did you mean batch.effective"),
    ("model=resnet19", "model=resnet19: no such choice; did you mean resnet18, "),
    ("modle=resnet18", "modle=resnet18: no such setting; did you mean model"),
    ("lr=3", "did you mean optimizer.lr"),
    ("model.kwargs.norm_layer=x", "takes entries that are not there yet with a plus sign; write +model.kwargs.norm_layer=x"),
    ("optimizer.kwargs={eps:0.1}", "with a plus sign; write +optimizer.kwargs.<name>=<value> for each of them"),
    ("parallel.nproc=2", "parallel=single has no such option; leave it out, or set parallel=apex_ddp or ddp or fsdp, which"),
    ("data.root=x", "or set data=cifar10 or cifar100 or csv or"),
    ("optimizer.lrr=1", "did you mean optimizer.lr"),
    ("model=custom model.width=3", "hand it to your own model with +model.kwargs.width=3"),
    ("loss=distill loss.teacher.kwargs.img_size=8", "with a plus sign; write +loss.teacher.kwargs.img_size=8"),
    ("experiment=[digits,nope]", "experiment=nope: no such choice; choose one of article, article_pitfall, "),
    ("hydra/launcher=nope", "choose one of basic, local, slurm, "),
    ("accumulation=1,3", "is several values; add -m to run a job for each"),
    ("optimizer.lr=range(1,3)", "is several values; add -m"),
    ("+optimizer.lr=1", "+optimizer.lr=1: is there already; write optimizer.lr=1"),
    ("+model=resnet18", "+model=resnet18: the group is there already; write model=resnet18"),
    ("optimizer=3", "optimizer=3: is a group, whose choices are names; --help lists them"),
    ("~foo", "~foo: there is nothing to take away; "),
    ("foo", "foo: is no setting, which is key=value; write foo=..."),
    ("model.kwargs={a:1", "model.kwargs={a:1: Hydra cannot read it; quote the value: 'model.kwargs=\"{a:1\"'"),
    ("x=y=z", "x=y=z: Hydra cannot read it; quote the value"),
    ("learning_rate=3", "learning_rate=3: no such setting; --cfg job shows all settings"),
    ("loss=distill loss.teacher.arc=x", "did you mean loss.teacher.arch"),
    ("hydra.jobb=1", "did you mean hydra.job"),
    ("++model=resnet18", "++model=resnet18"),
    ("model@foo=resnet18", "Did you mean to override model?"),
    ("batch.effective.x=1", "did you mean batch.effective"),
]


@pytest.mark.parametrize(("words", "says"), REFUSALS, ids=lambda v: v if len(v) < 30 else "")
def test_what_hydra_refuses_is_one_line_with_a_way_out(words: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    folder = str(conf_folder())
    with hydra_patches.active(), initialize_config_dir(folder, version_base="1.3"), pytest.raises(Refusal) as refusal:
        GlobalHydra.instance().config_loader().load_configuration("config", words.split(), RunMode.RUN)
    line = str(refusal.value.code)
    assert line.startswith("isobatch: ") and says in line and "\n" not in line


def test_the_stack_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    from hydra.errors import ConfigCompositionException

    with hydra_patches.active(), initialize_config_dir(str(conf_folder()), version_base="1.3"):
        for words in (["batch.effectiv=3"], ["model=resnet19"]):
            with pytest.raises(ConfigCompositionException):
                GlobalHydra.instance().config_loader().load_configuration("config", words, RunMode.RUN)


def isobatch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    environ.pop("HYDRA_FULL_ERROR", None)
    return warm.run([sys.executable, str(TRAIN), *words], cwd=folder, capture_output=True, env=environ)


@pytest.mark.parametrize("words", [["batch.effectiv=3"], ["-m", "model=small,resnet19"], ["--config-dir", "nowhere"]])
def test_the_command_prints_that_line_alone_and_ends_with_1(tmp_path: Path, words: list[str]) -> None:
    done = isobatch(tmp_path, *words)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("isobatch: ") and not list(tmp_path.iterdir())


@pytest.mark.timeout(500)
def test_a_run_is_evaluated_without_the_conf_of_its_author(tmp_path: Path) -> None:
    (tmp_path / "own/experiment").mkdir(parents=True)
    (tmp_path / "own/experiment/fruit.yaml").write_text(
        "# @package _global_\ndefaults: [{override /model: mlp}, {override /logger: none}, {override /ema: ema}]\n"
        "model: {width: 5, depth: 1}\nepochs: 40\nthreads: 1\nema: {decay: 0.5}\n"
    )
    words = ("experiment=fruit", "steps=2", "ema=none", "hydra.run.dir=run")
    first = isobatch(tmp_path, "--config-dir", "own", *words)
    assert first.returncode == 0, first.stderr
    assert "experiment/fruit sets ema.decay for ema=ema: left out with ema=none" in " ".join(first.stdout.split())
    (tmp_path / "elsewhere").mkdir()
    second = isobatch(tmp_path / "elsewhere", "task=evaluate", "resume=../run", "hydra.run.dir=seen")
    assert second.returncode == 0, second.stderr
    results = [json.loads((tmp_path / name / "summary.json").read_text())["final"] for name in ("run", "elsewhere/seen")]
    assert results[0]["eval/loss"] == results[1]["eval/loss"]
