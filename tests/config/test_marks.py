"""Every option says what it is (marks.py): part of the contract, of what decides bits, or free; a path or not."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import plain, train

from isobatch import marks
from isobatch.batch_plan import resolve_batch
from isobatch.config import Settings, load, marked, plain_config
from isobatch.config.tables import GROUPS, MARKS, TABLES
from isobatch.resume.contract import differences
from isobatch.runtime import hardware, machine

BELOW_ROOT = {"data.train_dir", "data.eval_dir", "data.test_dir"}  # names inside another path
OWN = [(group, name, cls) for group in GROUPS for name, cls in TABLES[group].items() if cls.__module__.startswith("isobatch.")]


def test_every_option_has_a_mark() -> None:
    for field in dataclasses.fields(Settings):
        assert "resume" in field.metadata.get(marks.KEY, {}), f"say what a changed {field.name} means to a resumed run"
    assert set(MARKS) == set(TABLES)
    for group, name, cls in OWN:
        for option, own in marks.options(cls, MARKS[group]):
            assert own.resume in ("contract", "identity", "free"), f"{group}={name}: {option}"


def test_what_sounds_like_a_path_is_one() -> None:
    """A path that does not say so is looked for in another folder after hydra.job.chdir, and from a resume typed elsewhere."""
    known = marked.paths()
    for group, name, cls in OWN:
        for field in dataclasses.fields(cls):
            if re.search(r"(^|_)(root|path|dir|folder|file|checkpoint)$", field.name):
                assert f"{group}.{field.name}" in {*known, *BELOW_ROOT}, f"{group}={name}: {field.name}"
    assert {"data.root", "data.path", "data.cache_dir", "resume", "model.checkpoint_path",
            "loss.teacher.checkpoint"} <= set(known)  # fmt: skip


def test_a_mark_that_there_is_not_is_no_mark() -> None:
    with pytest.raises(TypeError):
        marks.option(3, resum="free")


def test_paths_are_those_of_the_folder_they_are_typed_in(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    made = {"data": {"path": "local", "cache_dir": "cache"}, "loss": {"teacher": {"checkpoint": "run"}}, "resume": "old"}
    found = plain_config(made_config(made), tmp_path)
    assert found["data"] == {"path": str(tmp_path / "local"), "cache_dir": str(tmp_path / "cache")}
    assert found["loss"]["teacher"]["checkpoint"] == str(tmp_path / "run") and found["resume"] == str(tmp_path / "old")
    hub = plain_config(made_config({"data": {"path": "uoft-cs/cifar10"}}), tmp_path)
    assert hub["data"]["path"] == "uoft-cs/cifar10", "a name on the hub is no path"


def made_config(made: dict[str, Any]) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create(made)


def identity(*words: str) -> dict[str, Any]:
    config = load(plain(*words))
    return hardware.identity(config, torch.device("cpu"), 1, resolve_batch(48, None, None, 1))


def other(value: Any) -> Any:
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else f"not {value}"


@pytest.mark.parametrize("words", [(), ("precision=amp",), ("precision=O2",), ("reduction=exact",), ("ema=ema",)])
def test_an_option_is_compared_as_contract_or_as_identity_or_is_free(words: tuple[str, ...]) -> None:
    """None can fall between the lists: whatever is changed shows exactly where its mark says."""
    base = plain(*words)
    whole = hardware_options(base)
    for key, value, own in marked.options(base):
        changed, *groups = key.split(".")[::-1]
        now = {k: dict(v) if isinstance(v, dict) else v for k, v in base.items()}
        (now[groups[0]] if groups else now)[changed] = other(value)
        named = [d.key for d in differences(base, now)]
        assert named == ([key] if own.resume == "contract" else []), key
        moved = {k for k, v in hardware_options(now).items() if v != whole.get(k)}
        assert moved == ({key} if own.resume == "identity" else set()), key


def hardware_options(made: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value, own in marked.options(made) if own.resume == "identity"}


def test_the_identity_holds_every_option_that_is_marked_so_and_the_machine() -> None:
    found = identity("precision=amp")
    assert {"optimizer.fused", "deterministic", "compile", "precision.dtype", "reduction", "threads", "torch"} <= set(found)
    for key, _, own in marked.options(plain("precision=amp")):
        if own.resume == "identity":
            assert key in found, key
    assert found["cpu"] and re.search(r"\d", found["libraries"] or "0")


def test_what_limits_the_kernels_is_part_of_the_identity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in machine.CAPS:
        monkeypatch.delenv(name, raising=False)
    before = machine.facts(torch.device("cpu"))
    assert before["kernel_limits"] == ""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert machine.facts(torch.device("cpu")) == {**before, "kernel_limits": "ONEDNN_MAX_CPU_ISA=AVX2"}
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\n")
    caches = ("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2048K")
    for number, (level, kind, size) in enumerate(caches):
        index = tmp_path / "cache" / f"index{number}"
        index.mkdir(parents=True)
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (index / name).write_text(text + "\n")
    assert machine.cpu(tmp_path / "cpuinfo", tmp_path / "cache") == "Some CPU @ 3 GHz, L1 48K, L2 2048K"
    assert machine.cpu(tmp_path / "none", tmp_path / "none")


def test_a_resume_with_another_kernel_says_that_the_promise_drops(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)  # the suite itself may run under one
    words = ("logger=none", "model=mlp", "model.width=8", "model.depth=1", "epochs=null", "batch.micro=12",
             "batch.shard=null", "reduction=exact",
             "scheduler=constant")  # fmt: skip
    train(tmp_path / "first", *words, "steps=1")
    again = (*words, "steps=2", f"resume={tmp_path / 'first'}")
    capsys.readouterr()
    train(tmp_path / "same", *again)
    assert "promise drops" not in capsys.readouterr().out
    train(tmp_path / "other", *again, "optimizer.fused=false")
    assert "optimizer.fused null -> false" in capsys.readouterr().out
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    train(tmp_path / "limited", *again)
    assert "promise drops" in (said := capsys.readouterr().out) and "ONEDNN_MAX_CPU_ISA=AVX2" in said


def test_what_is_contract_and_what_decides_bits_stands_here_once_more() -> None:
    """A mark that slips makes another training of a resumed one, without a word: whoever moves one moves it here too."""
    of_groups = {group: mark.resume for group, mark in MARKS.items()}
    assert of_groups == {
        **dict.fromkeys(("sampler", "data", "augment", "model", "loss", "optimizer", "scheduler", "ema", "clip"), "contract"),
        **dict.fromkeys(("precision", "reduction"), "identity"),
        **dict.fromkeys(
            ("parallel", "accumulation", "stop", "metrics", "checkpoint", "audit", "logger", "writer", "debug", "profile"),
            "free",
        ),
    }
    top = {key: mark.resume for key, mark in marked.top_level().items()}
    assert {key for key, kind in top.items() if kind == "contract"} == {"seed", "max_grad_norm"}
    assert {key for key, kind in top.items() if kind == "identity"} == {
        "deterministic", "threads", "device", "compile", "channels_last", "cuda_graph"}  # fmt: skip
