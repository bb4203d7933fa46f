"""`resume=RUN` begins with the settings of RUN's config.yaml: filtered, under what is typed, without its author's conf/."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir

from isobatch import hydra_patches
from isobatch.config import conf_folder, load, resolved, to_yaml
from isobatch.errors import ConfigError
from isobatch.hydra_patches.refusals import Refusal
from isobatch.resume import saved_settings
from isobatch.resume.saved_settings import check_folder, read
from isobatch.run_folder.reading import SIZE


def composed(*words: str) -> dict[str, Any]:
    if any(word.startswith("resume=") for word in words):  # whose folder may have changed since
        return _plain.__wrapped__(*words)
    return copy.deepcopy(_plain(*words))


@functools.cache
def _plain(*words: str) -> dict[str, Any]:
    with hydra_patches.active(), initialize_config_dir(str(conf_folder()), version_base="1.3"):
        return resolved(compose("config", list(words)))


def made(run: Path, *words: str, **changes: Any) -> dict[str, Any]:
    """A run folder as `python train.py WORDS` leaves it; returns its config."""
    config = composed(*words) | changes
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(config))
    return config


def test_a_run_goes_on_with_its_own_settings(tmp_path: Path) -> None:
    before = made(tmp_path / "run", "experiment=digits", "model=mlp", "model.width=8", "parallel=ddp", "parallel.nproc=2",
                  "optimizer.lr=0.5", "batch.micro=24", "steps=9", "logger=none", "task=plan",
                  "sweep.parallel_jobs=2")  # fmt: skip
    now = composed(f"resume={tmp_path / 'run'}")
    assert now == {**before, "resume": str(tmp_path / "run"), "task": "train", "sweep": composed()["sweep"]}
    now = composed("parallel.nproc=3", f"resume={tmp_path / 'run'}", "optimizer.lr=1", "epochs=2")
    assert (now["parallel"]["nproc"], now["optimizer"]["lr"], now["model"]["width"]) == (3, 1, 8)
    assert (now["epochs"], now["steps"]) == (2, None)


def test_a_choice_that_is_typed_anew_takes_its_old_options_along(tmp_path: Path) -> None:
    made(tmp_path / "run", "parallel=ddp", "parallel.nproc=2", "accumulation=2", "batch.micro=24", "ema=ema", "ema.decay=0.5")
    resume = f"resume={tmp_path / 'run'}"
    single = composed(resume, "parallel=single")
    assert single["parallel"] == {"name": "single"} and single["accumulation"]["steps"] == 2 and single["ema"]["decay"] == 0.5
    assert composed(resume, "parallel=ddp")["parallel"]["nproc"] is None
    planned = composed(resume, "plan=one")
    assert planned["parallel"] == {"name": "single"} and planned["accumulation"]["steps"] is None
    assert planned["batch"]["micro"] == 24
    assert composed(resume, "experiment=digits")["ema"]["decay"] == 0.99  # the recipe is typed now, on top


def test_nothing_of_its_authors_conf_is_needed(tmp_path: Path) -> None:
    for folder, file, text in (("experiment", "fruit", "# @package _global_\ndefaults: [{override /model: pear}]\nseed: 7\n"),
                               ("model", "pear", "name: mlp\nwidth: 5\ndepth: 1\n")):  # fmt: skip
        (tmp_path / "conf" / folder).mkdir(parents=True)
        (tmp_path / "conf" / folder / f"{file}.yaml").write_text(text)
    before = made(tmp_path / "run", f"hydra.searchpath=[file://{tmp_path / 'conf'}]", "experiment=fruit")
    assert before["model"]["width"] == 5
    now = composed("task=evaluate", f"resume={tmp_path / 'run'}")
    assert now["seed"] == 7 and now["model"]["width"] == 5 and load(now).model.width == 5


def test_options_that_are_younger_or_older_than_the_run(tmp_path: Path) -> None:
    config = made(tmp_path / "run", "model=mlp")
    del config["model"]["depth"], config["max_grad_norm"]
    config["model"]["gone"] = config["gone"] = config["batch"]["gone"] = 3
    (tmp_path / "run/config.yaml").write_text(to_yaml(config))
    now = composed(f"resume={tmp_path / 'run'}", "model.depth=4")
    assert "gone" not in {*now, *now["model"], *now["batch"]} and now["model"]["depth"] == 4 and now["max_grad_norm"] is None


def test_a_default_that_changed_since_stays_as_the_run_had_it(tmp_path: Path) -> None:
    config = made(tmp_path / "run", "data=image_folder", "data.root=x")
    assert composed(f"resume={tmp_path / 'run'}")["data"]["exif"] == "apply"
    del config["data"]["exif"]
    (tmp_path / "run/config.yaml").write_text(to_yaml(config))
    assert composed(f"resume={tmp_path / 'run'}")["data"]["exif"] == "ignore"
    assert composed(f"resume={tmp_path / 'run'}", "data.exif=apply")["data"]["exif"] == "apply"
    assert "exif" not in composed(f"resume={tmp_path / 'run'}", "data=digits")["data"]


def test_a_model_of_ones_own_keeps_all_it_has(tmp_path: Path) -> None:
    model = {"name": "pear", "kwargs": {"width": 3}, "batch_norm": "shard", "freeze": []}
    made(tmp_path / "run", model=model, imports=["fruit"])
    now = composed(f"resume={tmp_path / 'run'}", "+model.kwargs.depth=2")
    assert now["model"] == model | {"kwargs": {"width": 3, "depth": 2}} and now["imports"] == []
    told = read(tmp_path / "run").left_out
    assert list(told) == ["imports"] and "type it again if you trust it" in told["imports"]


def test_a_checkpoint_folder_leads_to_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "run", "seed=7")
    (tmp_path / "run/checkpoints/step-2").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step-2/manifest.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert composed("resume=run/checkpoints/step-2")["seed"] == 7
    assert composed("resume='run'")["seed"] == 7


REFERS = ["${oc.env:HOME}", "${seed}", "???", ["${oc.env:HOME}"], {"a": {"b": "x${oc.env:HOME}"}}, {"${oc.env:HOME}": 1}]
REFERRING = [(key, value) for key in ("data.num_workers", "optimizer.kwargs", "max_grad_norm", "batch.effective", "data.name")
             for value in REFERS]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), [  # every value and every key; each with each in make test-all
    pytest.param(key, value, marks=() if i % 5 == 0 else pytest.mark.slow) for i, (key, value) in enumerate(REFERRING)
])  # fmt: skip
def test_nothing_that_refers_is_taken_over(tmp_path: Path, key: str, value: Any) -> None:
    config = made(tmp_path / "run", "seed=7")
    group, _, option = key.rpartition(".")
    (config[group] if group else config)[option] = value
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(config))
    now = composed(f"resume={tmp_path / 'run'}")
    assert now == {**composed("seed=7"), "resume": str(tmp_path / "run")}
    assert list(read(tmp_path / "run").left_out) == ([key] if key != "data.name" or isinstance(value, str) else [])


@pytest.mark.parametrize("key", ["hydra", "imports", "task", "allow_contract_change", "experiment", "evil", "model@optimizer",
                                 "defaults", "_target_"])  # fmt: skip
def test_a_hostile_run_folder_adds_nothing(tmp_path: Path, key: str) -> None:
    made(tmp_path / "run", **{key: {"launcher": {"_target_": "os.system"}}})
    assert composed(f"resume={tmp_path / 'run'}") == {**composed(), "resume": str(tmp_path / "run")}


@pytest.mark.parametrize("text", ["", "a: 1", "1", "[1, 2]", "model: 3", "model: {name: [1]}", "model: {}", "batch: []",
                                  "!!python/object/apply:os.mkdir [owned]", "[" * 5000, "\x00", "- 'a",
                                  "a: " + "x" * (2 * SIZE), "{1: 2}", "model: {name: mlp, 3: 4}",
                                  "model: {name: mlp, kwargs: {null: 1}}",
                                  "a: &a [x]\nmodel: {name: mlp, kwargs: *a}"])  # fmt: skip
def test_an_unreadable_config_is_one_line_or_nothing(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(text)
    line = ""
    try:
        composed("resume=run")
    except Refusal as refusal:
        line = str(refusal)
    assert line == "" or (line.startswith("isobatch: resume=") and "config.yaml" in line and "\n" not in line)
    assert not (tmp_path / "owned").exists()


def test_a_run_that_is_not_there_is_refused_before_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="resume=nowhere: no such folder"):
        check_folder("nowhere")
    for word in (None, "null", "", "a,b", "."):
        check_folder(word)
    assert saved_settings.SavedSettings.named("a,b") is None
