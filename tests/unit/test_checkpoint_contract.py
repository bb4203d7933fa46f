"""Which differences between two configs are named, and what `resume=RUN` adds to the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import plain

from isobatch.cli.saved_overrides import KNOWN, NEVER, expand, quoted
from isobatch.config import Settings
from isobatch.errors import ConfigError
from isobatch.resume.contract import FREE, differences, shown


def changed(*words: str, base: tuple[str, ...] = ()) -> list[str]:
    return [str(d) for d in differences(plain(*base), plain(*base, *words))]


@pytest.mark.parametrize("words", [
    "parallel=ddp", "parallel=dp", "accumulation=6", "precision=amp", "reduction=exact", "logger=none", "threads=3",
    "checkpoint.every=5", "epochs=99", "compile=true", "log_every=1", "data.num_workers=2", "on_nonfinite=skip",
    "batch.micro=16", "deterministic=true", "model.grad_checkpointing=true", "optimizer.fused=false",
])  # fmt: skip
def test_the_plan_may_change(words) -> None:
    assert changed(words) == []


@pytest.mark.parametrize(("words", "named"), [
    ("seed=1", "seed 0 -> 1"), ("data=synthetic", "data.name digits -> synthetic"),
    ("model=linear", "model.name timm -> linear"),
    ("ema=ema", "ema.name none -> ema"), ("loss.label_smoothing=0.1", "loss.label_smoothing 0.0 -> 0.1"),
    ("sampler.tail=drop", "sampler.tail keep -> drop"), ("optimizer.lr=3", "optimizer.lr 0.002 -> 3"),
    ("max_grad_norm=1", "max_grad_norm null -> 1"), ("model.drop_rate=0.5", "model.drop_rate 0.0 -> 0.5"),
])  # fmt: skip
def test_the_contract_is_named(words, named) -> None:
    found = changed(words)
    assert len(found) == 1 and found[0].split(" -> ")[1] == named.split(" -> ")[1] and found[0].split()[0] == named.split()[0]


def test_an_option_that_one_side_does_not_know_says_nothing() -> None:
    now, before = plain(), plain()
    del before["model"]["drop_rate"], before["max_grad_norm"]
    before["model"]["gone"] = 1
    assert differences(before, now) == []


def test_every_top_level_setting_is_either_free_or_compared() -> None:
    assert {"seed", "max_grad_norm"} <= set(Settings.__dataclass_fields__) - FREE
    assert NEVER.isdisjoint(KNOWN) and "imports" in NEVER
    assert shown(None) == "null" and shown(True) == "true" and len(shown("x" * 100)) == 60


def saved(run: Path, *words: str, config: str = "") -> Path:
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra/overrides.yaml").write_text("".join(f"- {word!r}\n" for word in words) or "[]\n")
    if config:
        (run / "config.yaml").write_text(config)
    return run


def test_saved_settings_come_before_what_is_typed(tmp_path: Path) -> None:
    saved(tmp_path / "run", "model=mlp", "model.width=8", "parallel=ddp", "parallel.nproc=2", "optimizer.lr=0.5", "task=train")
    words, told = expand(["-m", "resume=run", "optimizer.lr=1", "seed=2"], tmp_path)
    assert words == ["-m", "model=mlp", "model.width=8", "parallel=ddp", "parallel.nproc=2", "resume=run", "optimizer.lr=1",
                     "seed=2"]  # fmt: skip
    assert told == []
    words = expand(["parallel.nproc=3", "resume=run"], tmp_path)[0]
    assert words == ["parallel.nproc=3", "model=mlp", "model.width=8", "parallel=ddp", "optimizer.lr=0.5", "resume=run"]


def test_a_choice_that_is_typed_anew_takes_its_old_options_along(tmp_path: Path) -> None:
    saved(tmp_path / "run", "parallel=ddp", "parallel.nproc=2", "accumulation=2", "steps=9", "epochs=null", "seed=1")
    assert expand(["resume=run", "parallel=single"], tmp_path)[0][:-2] == ["accumulation=2", "steps=9", "epochs=null", "seed=1"]
    assert expand(["resume=run", "plan=cpu"], tmp_path)[0][:-2] == ["steps=9", "epochs=null", "seed=1"]
    words = expand(["resume=run", "epochs=3"], tmp_path)[0]
    assert words[:-2] == ["parallel=ddp", "parallel.nproc=2", "accumulation=2", "seed=1"]
    assert expand(["resume=run", "steps=20"], tmp_path)[0][-4:-2] == ["epochs=null", "seed=1"]


def test_input_paths_are_those_that_the_run_read(tmp_path: Path) -> None:
    saved(tmp_path / "run", "data=image_folder", "data.root=./photos", config="data:\n  root: /far/my photos\n")
    assert expand(["resume=run"], tmp_path)[0][1] == "data.root='/far/my photos'"
    assert quoted("/a/b") == "/a/b" and quoted("it's") == "'it\\'s'"


def test_a_checkpoint_folder_leads_to_its_run(tmp_path: Path) -> None:
    saved(tmp_path / "run", "seed=7")
    (tmp_path / "run/checkpoints/step-2").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step-2/manifest.json").write_text("{}")
    assert expand(["resume=run/checkpoints/step-2"], tmp_path)[0][0] == "seed=7"


@pytest.mark.parametrize("word", [
    "imports=[evil]", "+imports=[evil]", "++imports=[evil]", "imports.0=evil", "hydra.launcher._target_=os.system",
    "hydra/launcher=evil", "task=evaluate", "resume=other", "allow_contract_change=true", "model=../../evil", "model=/evil",
    "+experiment=../evil", "experiment=a/../../evil", "logger.project=${oc.env:HOME}", "seed=${oc.decode:${oc.env:HOME}}",
    "--config-dir=/evil", "-cd=/evil", "~model", "model@optimizer=evil", "evil=1", "+evil=1", "model.name", "",
])  # fmt: skip
def test_a_hostile_run_folder_adds_nothing(tmp_path: Path, word) -> None:
    saved(tmp_path / "run", "seed=7", word)
    words, told = expand(["resume=run"], tmp_path)
    assert words == ["seed=7", "resume=run"]
    if "imports" in word:
        assert "type it again if you trust it" in told[0]


@pytest.mark.parametrize("text", ["{}", "a: 1", "[1, 2]", "[[]]", "!!python/object/apply:os.mkdir [owned]", "[" * 5000, "\x00",
                                  "- 'a", "- " + "x" * (2 << 20)])  # fmt: skip
def test_an_unreadable_list_of_settings_is_one_line(tmp_path: Path, text) -> None:
    saved(tmp_path / "run")
    (tmp_path / "run/.hydra/overrides.yaml").write_text(text)
    try:
        line = ""
        assert expand(["resume=run"], tmp_path)[0] == ["resume=run"]
    except ConfigError as error:
        line = str(error)
    assert line == "" or (line.startswith("resume=") and "overrides.yaml" in line and "\n" not in line)
    assert not (tmp_path / "owned").exists()


def test_a_run_that_is_not_there_is_refused_before_anything_is_composed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="resume=nowhere: no such folder"):
        expand(["resume=nowhere", "seed=1"], tmp_path)


def test_without_resume_nothing_changes(tmp_path: Path) -> None:
    for words in ([], ["seed=1"], ["resume=null"], ["resume="], ["resume=a,b", "seed=1"], ["-m", "seed=1,2"]):
        assert expand(words, tmp_path) == (words, [])


def test_a_default_that_changed_since_stays_as_the_run_had_it(tmp_path: Path) -> None:
    def earlier(data: str, *typed: str) -> list[str]:
        run = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        saved(run, "data=image_folder", config=f"data: {data}\n")
        return [word for word in expand([f"resume={run}", *typed], tmp_path)[0] if "exif" in word]

    assert earlier("{name: image_folder}") == ["++data.exif=ignore"]  # older than the option
    assert earlier("{name: image_folder, exif: apply}") == ["++data.exif=apply"]
    assert earlier("{name: digits}") == [] == earlier("{name: nope}") == earlier("[1]") == earlier("{name: csv, exif: [1]}")
    assert earlier("{name: image_folder}", "data.exif=apply") == ["data.exif=apply"]
    before = plain("data=image_folder", "data.root=x")
    del before["data"]["exif"]
    assert [str(d) for d in differences(before, plain("data=image_folder", "data.root=x"))] == ["data.exif ignore -> apply"]
