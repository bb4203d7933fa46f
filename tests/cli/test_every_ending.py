"""The rows of endings.py, brought about: exit code, what is said, what stands in the folder; and nothing is left running."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from endings import ENDINGS, FORMS, Ending, table
from launching import COMMAND, ROOT, TORCHRUN, Started, left_over, summary

pytestmark = pytest.mark.timeout(200)
TWO_RANKS = ("parallel=ddp", "parallel.nproc=2")
QUICK = {
    "whoever reads the output leaves (`| head`)",
    "a setting that is refused before anything starts",
    "data, a model, a run or a machine that does not fit",
    "user code raises",
    "Ctrl-C, while training",
    "SIGTERM, while training",
    "SIGHUP, unless under `nohup`, while training",
    "Ctrl-C, while its folder is made",
    "SIGTERM, while the command line is read",
}  # in make test, alone; the others in make test-all


def quick(ending: Ending, form: str) -> bool:
    return form == "alone" and ending.what in QUICK


def cases() -> list[object]:
    return [pytest.param(ending, form, id=f"{ending.what} ({form})", marks=[] if quick(ending, form) else [pytest.mark.slow])
            for ending in ENDINGS if not ending.held_by
            for form, code in zip(FORMS, ending.codes, strict=True) if code is not None]  # fmt: skip


def start(ending: Ending, form: str, folder: Path) -> Started:
    words = {"alone": COMMAND, "own ranks": [*COMMAND, *TWO_RANKS], "torchrun": [*TORCHRUN, "parallel=ddp"],
             "job of a sweep": [*COMMAND, "-m", "accumulation=1,2", "hydra.sweep.dir=sweep"]}[form]  # fmt: skip
    environ = {"STANDIN": ending.standin, "STANDIN_AT": "1"} if form == "job of a sweep" else {"STANDIN": ending.standin}
    if ending.early:
        environ["STANDIN_EARLY"] = f"{ending.signum} {ending.early}"
    return Started([*words, "hydra.run.dir=run", *ending.words], folder, **environ)


@pytest.mark.parametrize(("ending", "form"), cases())
def test_an_ending(tmp_path: Path, ending: Ending, form: str) -> None:
    run = tmp_path / ("sweep/0" if form == "job of a sweep" else "run")
    started = start(ending, form, tmp_path)
    if ending.reader_leaves:
        started.process.stdout.close()
        started.process.stdout = None
    if ending.standin == "sleep":
        started.wait_for(run / "ready0", *([run / "ready1"] if form in ("own ranks", "torchrun") else []))
        if ending.signum == signal.SIGINT:
            started.press_ctrl_c()
        else:
            started.process.send_signal(ending.signum)
    ended = started.ended()
    assert ended.code == ending.codes[FORMS.index(form)], ended.err
    assert re.search(ending.line[0], ended.err), ended.err
    if form != "torchrun":  # which shows its own
        assert ended.tracebacks() <= ("traceback" in ending.line[1]), ended.err
    if not ending.line[0]:
        assert not ended.own_lines()
    if ending.state:
        told = summary(run)
        assert told["state"] == ending.state and bool(told["error"]) == (ending.state != "completed"), told
    else:
        assert not (run / "summary.json").exists()
    assert (run / "saved").exists() == (ending.standin == "sleep"), "a checkpoint"
    if form == "job of a sweep" and ending.state:  # the others go on, but after a stop
        assert (tmp_path / "sweep/1/summary.json").exists() == (ending.state != "stopped")
    assert left_over(tmp_path) == []


def test_the_page_is_this_table() -> None:
    assert table() in (ROOT / "docs/endings.md").read_text(), (
        "write it anew: python -c 'import endings; print(endings.table())'"
    )


def test_what_is_held_by_other_tests_is_there() -> None:
    for ending in ENDINGS:
        file, _, name = ending.held_by.partition("::")
        assert not file or f"def {name}" in (ROOT / file).read_text(), ending.held_by
