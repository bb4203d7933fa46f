"""Which differences between two configs are named."""

from __future__ import annotations

import pytest
from harness import plain

from isobatch.config import marked
from isobatch.resume.contract import differences, shown
from isobatch.resume.saved_settings import KNOWN, NEVER


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
    held = {key for key, own in marked.top_level().items() if own.resume == "contract"}
    assert held == {"seed", "max_grad_norm"}
    assert NEVER.isdisjoint(KNOWN) and "imports" in NEVER
    assert shown(None) == "null" and shown(True) == "true" and len(shown("x" * 100)) == 60


def test_an_option_that_is_younger_than_the_run_is_compared_with_what_the_run_did() -> None:
    before = plain("data=image_folder", "data.root=x")
    del before["data"]["exif"]
    assert [str(d) for d in differences(before, plain("data=image_folder", "data.root=x"))] == ["data.exif ignore -> apply"]


def test_a_number_that_came_as_text_is_a_number_everywhere() -> None:
    from isobatch.config import load

    typed = plain()
    typed["optimizer"]["lr"], typed["seed"], typed["sampler"]["tail"] = "0.003", "7", "drop"
    found = load(typed).plain
    assert found["optimizer"]["lr"] == 0.003 and found["seed"] == 7 and found["sampler"]["tail"] == "drop"
    assert typed["optimizer"]["lr"] == "0.003", "what came in stays"
    now = plain("optimizer.lr=0.003", "seed=7", "sampler.tail=drop")
    assert differences(typed, now) == [] == differences(found, now)
    typed["optimizer"]["lr"] = "0.004"
    assert [d.key for d in differences(typed, now)] == ["optimizer.lr"]
