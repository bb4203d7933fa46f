"""`task=lr_range`: the rates that are gone through, where it ends, what it suggests."""

from __future__ import annotations

import csv
import itertools
import json
import logging
import math
from pathlib import Path

import pytest
from harness import BASE, plain, summary, train, train_ranks

from isobatch import tasks
from isobatch.config import load
from isobatch.errors import ConfigError
from isobatch.tasks.lr_ranging import smoothed, suggested

WORDS = ("task=lr_range", "data=digits", "batch.effective=24", "batch.shard=6", "reduction=exact", "lr_range.start=1e-4", *BASE)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "lr_range.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_rate_grows_by_the_same_factor_on_every_plan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = (*WORDS, "lr_range.end=0.1", "lr_range.steps=16", "lr_range.diverged=1e9")
    with caplog.at_level(logging.INFO, "isobatch"):
        one = train(tmp_path / "one", *words)
    rates = [float(row["lr"]) for row in rows(tmp_path / "one")]
    assert rates[0] == pytest.approx(1e-4) and rates[-1] == pytest.approx(0.1) and len(rates) == 16
    assert [b / a for a, b in itertools.pairwise(rates)] == pytest.approx([1000 ** (1 / 15)] * 15)
    assert (tmp_path / "one" / "lr_range.png").read_bytes()[:4] == b"\x89PNG" and not (
        tmp_path / "one" / "checkpoints"
    ).exists()
    assert "try optimizer.lr=" in caplog.text and summary(tmp_path / "one")["state"] == "completed"
    assert train_ranks(2, tmp_path / "two", *words)[0].weights == one.weights
    assert rows(tmp_path / "two") == rows(tmp_path / "one")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_it_ends_where_the_loss_diverges(tmp_path: Path) -> None:
    train(tmp_path, *WORDS, "lr_range.end=1e8", "lr_range.steps=60", "optimizer=sgd", "optimizer.momentum=0")
    assert 10 <= len(rows(tmp_path)) < 60
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(logged) == len(rows(tmp_path)) and summary(tmp_path)["state"] == "completed"


def test_the_suggestion_is_where_the_loss_falls_fastest() -> None:
    rates = [10 ** (-5 + i / 10) for i in range(50)]
    losses = [3 - 2 / (1 + math.exp(-3 * math.log10(rate / 1e-2))) + max(0.0, 5 * (rate - 0.3)) for rate in rates]
    lowest, steepest = suggested(rates, losses)
    assert steepest == pytest.approx(1e-2, rel=0.3) and 0.1 < lowest < 0.5
    assert smoothed([2.0] * 5) == pytest.approx([2.0] * 5)
    assert suggested(rates[:10], [1.0 + i for i in range(10)])[1] == rates[2], "a loss that only rises"


def test_what_is_no_range_is_refused(tmp_path: Path) -> None:
    for words, key in (("lr_range.end=1e-9", "lr_range.end"), ("lr_range.start=0", "lr_range.start")):
        with pytest.raises(ConfigError) as refusal:
            load(plain(words))
        assert refusal.value.key == key
    with pytest.raises(ConfigError, match="a range begins with new weights"):
        tasks.of(load({**plain("task=lr_range"), "resume": "somewhere"}))
    with pytest.raises(ConfigError, match=r"lr_range\.steps=3: 3 steps are too few"):
        train(tmp_path, *WORDS, "lr_range.steps=3")
