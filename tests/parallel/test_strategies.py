"""`experiment=strategies`: what cannot run is listed, warm-up is not timed, and every row of the comparison composes."""

from __future__ import annotations

import json
import time
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from harness import plain, rows, summary, train
from precision_probes import QUIET

from isobatch import config, sweeps
from isobatch.errors import ConfigError
from isobatch.runtime.distributed import device_name
from isobatch.train import loop

SWEPT = {"plan": "one,dp2,ddp2", "precision": "O0,O1,O2,O3"}


def test_every_row_of_the_comparison_composes() -> None:
    recipe = yaml.safe_load((config.conf_folder() / "experiment" / "strategies.yaml").read_text())
    assert recipe["hydra"]["sweeper"]["params"] == SWEPT
    plans, levels = SWEPT["plan"].split(","), SWEPT["precision"].split(",")
    for plan, level in {*product(plans[:1], levels), *product(plans, levels[-1:])}:  # every plan and every level
        words = "experiment=strategies", f"plan={plan}", f"precision={level}"
        assert config.load(plain(*words)).batch.effective == 16


def test_what_the_machine_cannot_run_is_skipped_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        device_name(0, 2, 1)  # two processes, one device
    asked = {"sweep": {"skip_unavailable": True}}
    assert sweeps.skipped(asked, refusal.value, tmp_path)
    told = json.loads((tmp_path / "summary.json").read_text())
    assert told["state"] == "skipped" and "share 1 visible device" in told["error"]
    assert not sweeps.skipped({"sweep": {"skip_unavailable": False}}, refusal.value, tmp_path)
    assert not sweeps.skipped(asked, ConfigError("optimizer.lr", -1, "is wrong", "set it"), tmp_path)


def test_warm_up_is_left_out_of_all_timing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)), time=time.time)
    monkeypatch.setattr(loop, "time", clock)  # a second passes from each look at it to the next
    train(tmp_path, *QUIET, "model=mlp", "data=digits", "steps=6", "warmup=3", "eval_every=6", "batch.effective=32")
    times = rows(tmp_path, "time_s")
    assert len(times) == 3 and times == sorted(times)  # steps 4, 5 and 6
    done = summary(tmp_path)
    assert times[-1] <= done["time"]["train_s"] <= times[-1] + 1
    assert done["perf"]["samples_per_s"] == pytest.approx(3 * 32 / done["time"]["train_s"], rel=1e-6)
