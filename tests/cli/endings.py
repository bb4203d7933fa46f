"""Every ending as data: what happens, how the command was started, and what a person and a program are told.

`test_every_ending.py` makes the cases of these rows; docs/endings.md is this table.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

FORMS = ("alone", "job of a sweep", "own ranks", "torchrun")


@dataclass(frozen=True)
class Ending:
    """
    Args:
        what: happens, for a person.
        codes: of the command in each of FORMS; None = it cannot happen there, or is nobody's to say.
        state: in summary.json; "" = there is no folder yet.
        line: what standard error holds; "" = nothing. As a regular expression, and for a person.
        words, standin, signum: how it is brought about (see standin.py): overrides, behaviour, a signal once all
            ranks are ready.
        early: where the signal comes instead, before training began (module:function that is about to be called).
        held_by: tests of cases that take more than a stand-in; then nothing is generated.
    """

    what: str
    codes: tuple[int | None, int | None, int | None, int | None]
    state: str
    line: tuple[str, str] = ("", "")
    words: tuple[str, ...] = ()
    standin: str = ""
    signum: int = 0
    early: str = ""
    reader_leaves: bool = False
    held_by: str = ""


BEFORE = "isobatch: stopped before training began"
STOPPING = (r"isobatch: stopping after this step and a checkpoint", "`stopping after this step and a checkpoint`")
EARLY = (BEFORE, "`stopped before training began`")
SIGNALS = {
    "Ctrl-C": (signal.SIGINT, 130),
    "SIGTERM": (signal.SIGTERM, 143),
    "SIGHUP, unless under `nohup`": (signal.SIGHUP, 129),
    "SIGUSR1": (signal.SIGUSR1, 138),
}

ENDINGS = (
    Ending("done", (0, 0, 0, 0), "completed"),
    Ending("whoever reads the output leaves (`| head`)", (0, 0, 0, None), "completed", reader_leaves=True),
    Ending(
        "a setting, choice or value that Hydra refuses",
        (1, 1, 1, 1),
        "",
        ("isobatch: modle=x: no such setting", "`key=value: problem; way out`"),
        words=("modle=x",),
    ),
    Ending(
        "a setting that is refused before anything starts",
        (2, 1, 2, 1),
        "failed",
        (r"isobatch: (job 0: )?optimizer\.lr=-1", "`key=value: problem; way out`"),
        words=("optimizer.lr=-1",),
    ),
    Ending(
        "data, a model, a run or a machine that does not fit",
        (2, 1, 2, 1),
        "failed",
        (r"isobatch: (job 0: )?model\.arch=resnet5O: no such model; try resnet50", "`key=value: problem; way out`"),
        standin="refuse",
    ),
    Ending(
        "user code raises",
        (1, 1, 1, 1),
        "failed",
        ("RuntimeError: asked to fail on rank 0", "its traceback, once"),
        standin="fail0",
    ),
    Ending(
        "user code raises on another rank",
        (None, None, 1, 1),
        "failed",
        ("RuntimeError: asked to fail on rank 1", "its traceback, once, and the rank"),
        standin="fail1",
    ),
    Ending(
        "a rank is killed",
        (None, None, 1, None),
        "failed",
        (r"isobatch: rank 1 was (killed by SIGKILL|lost without a word)", "the rank and the signal"),
        standin="kill1",
    ),
    Ending(
        "a rank exits",
        (None, None, 1, 1),
        "failed",
        (r"isobatch: rank 1 (exited with code 0|was lost)", "the rank and the code"),
        standin="leave1",
    ),
    *(
        Ending(
            f"{name}, while training",
            (code, code, code, 1 if name == "SIGTERM" else None),
            "stopped",
            STOPPING,
            standin="sleep",
            signum=signum,
        )
        for name, (signum, code) in SIGNALS.items()
    ),
    *(
        Ending(f"{name}, while {doing}", (code, code, code, None), state, EARLY, signum=signum, early=place)
        for name, (signum, code) in SIGNALS.items()
        if name in ("Ctrl-C", "SIGTERM")
        for doing, place, state in (
            ("the command line is read", "isobatch.cli.command:without_local_rank", ""),
            ("its folder is made", "isobatch.cli.command:record", "stopped"),
            ("the job is prepared", "isobatch.config:check_inputs", "stopped"),
        )
    ),
    Ending(
        "a rank is killed, and no restart is left",
        (None, None, None, 1),
        "failed or stopped",
        ("", "torchrun's own lines name the rank and the signal; it tells the others to stop"),
        held_by="tests/chaos/test_chaos.py::test_a_kill_in_the_middle_of_a_save_loses_nothing",
    ),
    Ending(
        "a second command in the same folder",
        (2, None, 2, 2),
        "as the first has it",
        ("", "names its pid and host"),
        held_by="tests/cli/test_one_writer.py::test_a_second_command_in_a_folder_is_refused_and_changes_nothing",
    ),
    Ending(
        "a folder that cannot be made or written",
        (2, 1, 2, 1),
        "",
        ("", "`hydra.run.dir=...`"),
        held_by="tests/cli/test_endings.py::test_a_folder_that_cannot_be_made_is_one_line_and_takes_no_other_job_down",
    ),
    Ending(
        "a rank hangs",
        (None, None, 1, 1),
        "failed",
        ("", "the rank, after `parallel.timeout_s`"),
        held_by="tests/cli/test_launch.py::test_a_rank_that_hangs_is_ended_by_the_time_limit_and_named",
    ),
    Ending(
        "ranks that never arrive",
        (None, None, None, 1),
        "failed",
        ("", "names them, after `parallel.timeout_s` where it is typed (600 s)"),
        held_by="tests/cli/test_endings.py::test_ranks_that_never_arrive_are_named",
    ),
    Ending(
        "SIGKILL of the command",
        (-9, -9, -9, None),
        "failed",
        ("", "in train.log; no process is left"),
        held_by="tests/cli/test_launch.py::test_sigkill_leaves_a_summary_and_no_process",
    ),
    Ending(
        "SIGKILL of torchrun's agent",
        (None, None, None, -9),
        "failed",
        ("", "in train.log; no process is left"),
        held_by="tests/cli/test_endings.py::test_ranks_end_with_the_agent_that_started_them",
    ),
    Ending(
        "a data worker is killed or exits",
        (1, 1, 1, 1),
        "failed",
        ("", "pid and signal"),
        held_by="tests/console/test_streams_and_tasks.py::test_a_worker_that_is_lost_is_one_line",
    ),
    Ending(
        "a device dies",
        (1, 1, 1, 1),
        "failed",
        ("", "what the device said; the checkpoint before stays"),
        held_by="tests/gpu/test_faults.py::test_a_device_that_dies_in_mid_run_leaves_the_checkpoint_before",
    ),
    Ending(
        "the loss is not finite",
        (1, 1, 1, 1),
        "failed",
        ("", "the loss, step and samples"),
        held_by="tests/gpu/test_logged_rows.py::test_a_loss_that_is_not_finite_ends_the_run_before_anything_is_saved",
    ),
    Ending(
        "out of memory",
        (1, 1, 1, 1),
        "failed",
        ("", "how much more was wanted, and `batch.micro`"),
        held_by="tests/launch/test_outcome.py::test_a_run_that_needs_more_memory_than_there_is_fails_in_one_line",
    ),
    Ending(
        "a full disk while saving",
        (0, 0, 0, 0),
        "completed",
        ("", "a warning for each save; 1 and `failed` if the last one is lost"),
        held_by="tests/checkpoint/test_checkpoint_saving.py::test_a_failing_disk_is_one_warning_per_save_and_the_end_says_so",
    ),
    Ending("a rule of `stop` or a search ends it", (0, 0, 0, 0), "early_stopped, ...", held_by="tests/test_stop.py::"),
)


def table() -> str:
    """The rows as docs/endings.md has them."""
    lines = ["| what happens | " + " | ".join(FORMS) + " | `state` | standard error |", "|---|" + "---|" * (len(FORMS) + 2)]
    for ending in ENDINGS:
        codes = ["" if code is None else "killed" if code < 0 else str(code) for code in ending.codes]
        what = ending.what.replace("|", "\\|")  # a bar ends a cell, in code too
        lines.append(f"| {what} | {' | '.join(codes)} | {ending.state} | {ending.line[1]} |")
    return "\n".join(lines) + "\n"
