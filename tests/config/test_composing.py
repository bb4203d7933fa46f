"""What hydra_patches/composing.py leaves out of a composition is what nobody looks at."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.plugins.sweeper import Sweeper
from hydra.types import RunMode
from omegaconf import OmegaConf

from isobatch import hydra_patches
from isobatch.config import conf_folder
from isobatch.hydra_patches import composing, kept, layers, refusals
from isobatch.runtime import garbage


@pytest.fixture
def conf(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "conf"
    (folder / "a").mkdir(parents=True)
    (folder / "b").mkdir()
    (folder / "config.yaml").write_text("defaults: [a: one, b: '${a}', _self_]\nown: ${a.x}\n")
    for group in "ab":
        for k, name in enumerate(("one", "two")):
            (folder / group / f"{name}.yaml").write_text(f"# {group}\nx: {k}\nwhere: {group}\n")
    with hydra_patches.active(), initialize_config_dir(str(folder), version_base="1.3"):
        yield folder


def test_a_file_is_parsed_anew_when_it_has_changed_and_nobody_shares_what_was_parsed(conf: Path) -> None:
    first = compose("config")
    first.a.x = 5
    assert compose("config") == {"a": {"x": 0, "where": "a"}, "b": {"x": 0, "where": "b"}, "own": 0}
    before = composing.parsed.cache_info().misses
    compose("config")
    assert composing.parsed.cache_info().misses == before
    (conf / "a/one.yaml").write_text("# @package _global_\nx: 7\n")
    found = compose("config", overrides=["own=1"])
    assert found.x == 7 and "a" not in found
    (conf / "a/one.yaml").write_text("x: [1\n")
    with pytest.raises((Exception, SystemExit), match=r"one\.yaml|flow sequence"):
        compose("config")


def test_the_class_that_is_taught_is_the_one_that_hydra_uses() -> None:
    """Hydra runs its plugins' modules when it first looks for plugins, and a class from before that is nobody's: in a process
    of its own, as here somebody has looked."""
    look = ("from isobatch import hydra_patches; from isobatch.hydra_patches import composing; hydra_patches.install(['run']); "
            "from hydra._internal.sources_registry import SourcesRegistry; "
            "assert SourcesRegistry.instance().resolve('file').load_config is composing.load_config")  # fmt: skip
    subprocess.run([sys.executable, "-c", look], check=True)


def test_configs_of_a_large_sweep_are_let_go_while_the_search_is_off(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "AT_ONCE", 4)
    garbage.off()
    try:
        made = [weakref.ref(compose("config")) for _ in range(2 * garbage.AT_ONCE)]
        assert sum(config() is not None for config in made) <= garbage.AT_ONCE + 1
    finally:
        garbage.on()


def test_defaults_may_name_other_choices(conf: Path) -> None:
    found = compose("config", overrides=["a=two"])
    assert (found.a.x, found.b.x, found.own) == (1, 1, 1)


def asked(*words: str, name: str = "config", folder: Path | None = None) -> bool:
    """Whether all is composed to learn of hydra.mode."""
    loader = ConfigLoaderImpl(create_config_search_path(str(folder or conf_folder())))
    hydra: Any = SimpleNamespace(config_loader=loader)
    return composing.may_be_set(hydra, name, list(words))


def test_the_mode_is_looked_for_where_somebody_can_have_set_it(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not asked("epochs=3", "hydra.run.dir=runs/x", "optimizer=sgd"), "none of our own files sets it"
    assert asked("hydra.mode=MULTIRUN") and asked("+hydra.mode=RUN") and asked("hydra.searchpath=[file:///x]")
    assert asked("experiment=digits") and asked("+plan=x") and asked("plan@_global_=x")
    assert asked("hydra/launcher=local") and asked(name="other") and asked(folder=conf)
    monkeypatch.setattr(composing, "conf_folder", lambda: conf)
    assert not asked(folder=conf)
    for line in ("hydra: {mode: MULTIRUN}", "hydra:\n  mode: ${oc.env:MODE}", "hydra:\n  'mode' : 'RUN'"):
        (conf / "a/two.yaml").write_text(f"# @package _global_\n{line}\n")
        assert asked(folder=conf)
    (conf / "a/two.yaml").write_text("defaults:\n  - override /experiment: mine\n")
    assert asked(folder=conf)
    (conf / "a/two.yaml").write_text("defaults:\n  - experiment: null\n")
    (conf / "experiment").mkdir()
    (conf / "experiment/mine.yaml").write_text("# @package _global_\nhydra: {mode: MULTIRUN}\n")
    assert not asked(folder=conf), "nobody names it"


def test_a_loader_of_yaml_is_made_once() -> None:
    with hydra_patches.active():
        loaders = {composing.omegaconf_s.get_yaml_loader() for _ in range(2)}
    assert len(loaders) == 1 and composing.omegaconf_s.get_yaml_loader() not in loaders


def test_a_job_of_a_sweep_is_composed_once(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "AT_ONCE", 2)
    loader = GlobalHydra.instance().config_loader()
    (conf / "a/one.yaml").write_text("x: ${oc.env:ISOBATCH_X}\nwhere: a\n")
    words = ["a=one,two", "b=one,two", "hydra.sweep.subdir=j_${hydra.job.num}_${a.x}"]  # which the sweep itself cannot resolve
    master = loader.load_configuration("config", words, RunMode.MULTIRUN)
    jobs = [["a=one", "b=one"], ["a=one", "b=two"], ["a=two", "b=one"]]
    fresh = [loader.load_sweep_config(master, job) for job in jobs]
    sweeper: Any = SimpleNamespace(config=master, hydra_context=SimpleNamespace(config_loader=loader))
    Sweeper.validate_batch_is_legal(sweeper, jobs)
    layers.LEFT_OUT[:] = ["of another"]
    OmegaConf.set_cache(master, {"stamp": {("outputs",): "the sweep's"}})  # resolved since
    with monkeypatch.context() as patched:
        patched.setattr(kept, "_load", None)
        again = [loader.load_sweep_config(master, job) for job in jobs[:2]]
    assert again == fresh[:2] and layers.LEFT_OUT == [] and not kept._kept, "the third was too many to keep"
    assert OmegaConf.get_cache(again[0]) == OmegaConf.get_cache(master)
    monkeypatch.setenv("ISOBATCH_X", "7")  # what is read when the job begins still is
    assert again[1].a.x == "7" and again[1].b.x == 1
    OmegaConf.set_readonly(again[0], True)  # as Hydra leaves it after a job: the next one of the same words gets its own
    assert not OmegaConf.is_readonly(loader.load_sweep_config(master, jobs[0]))


def test_yaml_is_parsed_in_c_as_omegaconf_reads_it() -> None:
    texts = [path.read_text() for path in sorted(conf_folder().rglob("*.yaml"))]
    texts += ["a: 1e-3\nb: 2020-01-01\nc: 1_0\nd: [.inf, off, 0x1F, ~]\ne: 'ü \\n'\nf: |\n  a\n   b\n", "", "# nothing\n"]
    loader = composing.yaml_loader()
    assert issubclass(loader, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    for text in texts:
        assert yaml.load(text, loader) == yaml.load(text, composing._yaml_loader())
    for wrong in ("a: 1\na: 2\n", "a: !!python/object:os.system {}\n", "a: [1\n"):
        with pytest.raises(yaml.YAMLError):
            yaml.load(wrong, loader)


@pytest.mark.parametrize("text", ["x: 1\nx: 2\n", "x: 1\n\ty: 2\n", "x: [1\n", "x: !!python/object:os.system {}\n", "7\n"])
def test_a_file_that_is_no_yaml_is_one_line_that_names_it(conf: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    (conf / "a/one.yaml").write_text(text)
    with pytest.raises(refusals.Refusal) as refusal:
        GlobalHydra.instance().config_loader().load_configuration("config", ["a=one"], RunMode.RUN)
    line = str(refusal.value.code)
    assert line.startswith("isobatch: ") and str(conf / "a/one.yaml") in line and "\n" not in line
