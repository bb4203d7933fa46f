"""Recipes are layers: their options go with the choices they were written for, and what is typed always wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import plain
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf

from isobatch import hydra_patches
from isobatch.config import TABLES, conf_folder, load, resolved, to_yaml
from isobatch.errors import ConfigError
from isobatch.hydra_patches.refusals import Refusal

CONF = conf_folder()
RECIPES = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
CHOICES = [(group, path.stem) for group in TABLES for path in sorted((CONF / group).glob("*.yaml")) if path.stem != "custom"]


def file(group: str, choice: str) -> dict[str, Any]:
    return yaml.safe_load((CONF / group / f"{choice}.yaml").read_text()) or {}


def own(folder: Path, *words: str) -> dict[str, Any]:
    """Composed with the recipes of `folder`."""
    with hydra_patches.active(), initialize_config_dir(str(CONF), version_base="1.3"):
        return resolved(compose("config", [f"hydra.searchpath=[file://{folder}]", *words]))


def test_a_choice_that_is_typed_drops_the_recipes_options_for_the_other() -> None:
    assert plain("experiment=digits")["ema"] == {**file("ema", "ema"), "decay": 0.99}
    assert plain("experiment=digits", "ema=none")["ema"] == {"name": "none"}
    assert plain("experiment=digits", "ema=ema")["ema"]["decay"] == 0.99  # the same choice: nothing is replaced
    changed = plain("experiment=digits", "optimizer=lamb")
    assert changed["optimizer"] == file("optimizer", "lamb") and changed["epochs"] == 40 and changed["ema"]["decay"] == 0.99
    assert plain("experiment=strategies", "model=resnet101")["model"]["arch"] == "resnet101"
    assert plain("experiment=cifar10_resnet18", "model=small")["model"] == file("model", "small")


def test_what_is_left_out_is_told() -> None:
    with hydra_patches.active(), initialize_config_dir(str(CONF), version_base="1.3"):
        compose("config", ["experiment=digits", "ema=none"])
        assert hydra_patches.left_out() == ["experiment/digits sets ema.decay for ema=ema: left out with ema=none"]
        compose("config", ["experiment=digits"])
        assert hydra_patches.left_out() == []


def test_what_is_typed_always_wins() -> None:
    assert plain("experiment=digits", "ema.decay=0.5")["ema"]["decay"] == 0.5
    assert plain("experiment=digits", "optimizer=lamb", "optimizer.lr=3")["optimizer"]["lr"] == 3
    assert plain("plan=ddp3", "parallel=dp")["parallel"] == file("parallel", "dp")
    assert plain("plan=ddp3", "parallel.nproc=5")["parallel"]["nproc"] == 5


@pytest.mark.parametrize(
    ("words", "epochs", "steps"),
    [((), 15, None), (("steps=20",), None, 20), (("epochs=3",), 3, None), (("steps=20", "epochs=null"), None, 20),
     (("epochs=null", "steps=20"), None, 20), (("experiment=digits", "steps=20"), None, 20), (("experiment=digits",), 40, None),
     (("experiment=equivalence",), None, 6), (("experiment=equivalence", "epochs=2"), 2, None),
     (("experiment=[digits,equivalence]",), None, 6), (("steps=null",), 15, None), (("++steps=7",), None, 7),
     (("steps=20", "steps=null", "epochs=4"), 4, None)],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else None,
)  # fmt: skip
def test_of_epochs_and_steps_the_last_layer_decides(words: tuple[str, ...], epochs: int | None, steps: int | None) -> None:
    config = load(plain(*words))
    assert (config.epochs, config.steps) == (epochs, steps)


def test_both_typed_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^steps=20: .*epochs=3"):
        load(plain("steps=20", "epochs=3"))


def test_recipes_on_top_of_each_other(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    write = (tmp_path / "experiment").joinpath
    write("heavy.yaml").write_text("# @package _global_\ndefaults: [{override /ema: ema}]\nema: {decay: 0.5}\nsteps: 9")
    write("tweak.yaml").write_text("# @package _global_\nema: {decay: 0.25}\noptimizer: {lr: 7.0}")
    write("without.yaml").write_text("# @package _global_\ndefaults: [{override /ema: none}]\nepochs: 2")
    write("above.yaml").write_text("# @package _global_\ndefaults: [heavy, {override /optimizer: lamb}, _self_]\n"
                                   "optimizer: {lr: 0.75}")  # fmt: skip
    assert own(tmp_path, "experiment=[heavy,tweak]")["ema"]["decay"] == 0.25
    assert own(tmp_path, "experiment=[heavy,tweak]", "ema=none")["ema"] == {"name": "none"}
    last = own(tmp_path, "experiment=[heavy,without]")
    assert last["ema"] == {"name": "none"} and (last["epochs"], last["steps"]) == (2, None)
    above = own(tmp_path, "experiment=above")
    assert (above["optimizer"]["lr"], above["optimizer"]["opt"], above["ema"]["decay"]) == (0.75, "lamb", 0.5)
    assert own(tmp_path, "experiment=above", "optimizer=sgd")["optimizer"] == file("optimizer", "sgd")


def test_a_machines_own_settings_are_under_recipes_runs_and_words(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local/default.yaml").write_text(
        "# @package _global_\ndefaults: [{override /logger: csv}, {override /optimizer: sgd}]\noptimizer: {lr: 7.0}\n"
        "log_every: 7\nsteps: 9"
    )
    assert own(tmp_path)["logger"]["name"] == "csv" and own(tmp_path)["optimizer"]["lr"] == 7.0
    found = own(tmp_path, "experiment=digits", "logger=none", "optimizer=adamw")
    assert (found["epochs"], found["steps"], found["log_every"], found["logger"]) == (40, None, 7, {"name": "none"})
    assert found["optimizer"]["lr"] != 7.0  # which is of sgd
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(to_yaml(plain("optimizer=lamb", "epochs=3")))
    resumed = own(tmp_path, f"resume={tmp_path / 'run'}")
    assert resumed["optimizer"]["opt"] == "lamb" and resumed["log_every"] == 10
    assert (resumed["epochs"], resumed["steps"]) == (3, None)


def test_a_recipe_without_its_first_line_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/fruit.yaml").write_text("optimizer: {lr: 7.0}")
    with pytest.raises(Refusal, match=r"experiment=fruit: .*; begin it with the line `# @package _global_`"):
        own(tmp_path, "experiment=fruit")


def test_a_sweep_composes_every_job_in_layers() -> None:
    with hydra_patches.active(["-m"]), initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        master = loader.load_configuration("config", ["experiment=digits", "ema=ema,none", "steps=10,20"], RunMode.MULTIRUN)
        jobs = [loader.load_sweep_config(master, ["experiment=digits", f"ema={ema}", "steps=20"]) for ema in ("ema", "none")]
    assert [job.ema.name for job in jobs] == ["ema", "none"] and jobs[0].ema.decay == 0.99
    assert all((job.steps, job.epochs) == (20, None) for job in jobs)


# a choice that cannot stand alone, or not with some recipe, says this, and it is true
SENSE = ("micro steps, not", "are no images", "teacher", "needs one target per sample", "unknown", "images are", "sum",
         "reduction=fast adds them up", "names no metric")  # fmt: skip
PAIRS = [(recipe, *choice) for recipe in RECIPES for choice in CHOICES]


def whole(recipe: str) -> dict[str, Any]:
    """A recipe with the one that it begins from."""
    own = file("experiment", recipe)
    defaults = own.get("defaults", [])
    for start in (whole(name) for name in defaults if isinstance(name, str) and name != "_self_"):
        own = OmegaConf.to_container(OmegaConf.merge(start, own)) | {"defaults": [*start.get("defaults", []), *defaults]}
    return own


def composes(recipe: str, group: str, choice: str) -> None:
    composed = plain(f"experiment={recipe}", f"{group}={choice}")
    written = whole(recipe)
    theirs = next((entry[f"override /{group}"] for entry in written.get("defaults", []) if f"override /{group}" in entry), None)
    default = next(e[group] for e in yaml.safe_load((CONF / "config.yaml").read_text())["defaults"] if group in e)
    same = choice == (theirs or default)
    expected = OmegaConf.merge(file(group, choice), (written.get(group) or {}) if same else {})
    assert composed[group] == OmegaConf.to_container(expected)
    said = ""
    try:
        load(composed)
    except ConfigError as refusal:
        said = str(refusal)
    assert "no such option" not in said and (not said or any(word in said for word in SENSE)), said


@pytest.mark.parametrize(("recipe", "group", "choice"), PAIRS[::199], ids=lambda part: part)
def test_every_hundred_and_ninety_ninth_recipe_with_choice_composes(recipe: str, group: str, choice: str) -> None:
    composes(recipe, group, choice)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_with_every_choice_composes(recipe: str) -> None:
    for group, choice in CHOICES:
        composes(recipe, group, choice)
