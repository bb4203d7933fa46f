"""How one job ended on one rank, and what the run folder has to say about it."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from isobatch.errors import ConfigError, JobFailed, Stopped
from isobatch.run_folder import layout
from isobatch.run_folder.reading import usable

log = logging.getLogger(__name__)

EARLY = "stopped before training began"

# The keys of design's summary.json; a run that trained fills them itself.
KEYS = ("state", "steps", "updates", "skipped_steps", "samples", "plan", "final", "best", "weights_sha256", "time")
BLANK: dict[str, Any] = dict.fromkeys((*KEYS, "perf", "ranks", "error"))


# what gloo, nccl and the store say on a rank whose peer is gone
FALLOUT = re.compile(r"by peer|Read error|Broken pipe|timed out|timeout|connection (was )?(closed|refused|lost)", re.IGNORECASE)


class RankFailed(JobFailed):
    """A job that failed, with the `trace` of the rank that failed first."""

    def __init__(self, line: str, trace: str):
        self.trace = trace
        super().__init__(line)


@dataclass(frozen=True)
class Outcome:
    """Plain data, so that a rank can hand it to the one that reports.

    Attributes:
        kind: done, refused, failed or stopped.
        value: what run_job returned (done only).
        line: the one line for a person, without the program's name (refused, failed and stopped).
        trace: the traceback, or what stands in for it when the process had no time to write one (failed only).
        signum: the signal that stopped it (stopped only).
        at: wall clock; of several failures the earliest is the cause and the others are its fallout.
    """

    kind: str
    value: float | None = None
    line: str = ""
    trace: str = ""
    signum: int = 0
    rank: int = 0
    refusal: tuple[str, str, str, str] | None = None
    at: float = field(default_factory=time.time)

    @staticmethod
    def of(error: BaseException, rank: int = 0) -> Outcome:
        """The outcome that leaving the job with `error` means."""
        if isinstance(error, ConfigError):
            value = "null" if error.value is None else str(error.value)
            return Outcome("refused", line=str(error), rank=rank,
                           refusal=(error.key, value, error.problem, error.way_out))  # fmt: skip
        if isinstance(error, Stopped):
            return Outcome("stopped", line=str(error), signum=error.signum, rank=rank)
        text = " ".join(str(error).split())
        if isinstance(error, JobFailed):  # understood already: its text says more than a stack would
            return Outcome("failed", line=text, rank=rank, trace=f"isobatch: {text}")
        line = f"{type(error).__name__}: {text}".rstrip(": ")
        frames = error.__traceback__
        while frames is not None and Path(frames.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
            frames = frames.tb_next  # how the launcher came to call it is no news
        trace = "".join(traceback.format_exception(error.with_traceback(frames) if frames else error))
        if rank:
            line, trace = f"rank {rank}: {line}", f"rank {rank} failed:\n{trace}"
        return Outcome("failed", line=line, rank=rank, trace=trace)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Outcome:
        data = json.loads(text)
        data["refusal"] = tuple(data["refusal"]) if data["refusal"] else None
        return Outcome(**data)

    def raise_unless_done(self) -> float | None:
        """The value, or ConfigError, Stopped or RankFailed."""
        if self.kind == "refused" and self.refusal:
            raise ConfigError(*self.refusal)
        if self.kind == "stopped":
            raise Stopped(self.signum)
        if self.kind == "failed":
            raise RankFailed(self.line, self.trace)
        return self.value


def cause(outcomes: list[Outcome]) -> Outcome:
    """The outcome to report for a job: the earliest that is not done, else the first.

    That the connection to another rank was lost is never a cause while any rank says something else.
    """
    bad = [o for o in outcomes if o.kind != "done"]
    own = [o for o in bad if o.kind != "failed" or not FALLOUT.search(o.line)]
    return min(own or bad, key=lambda o: o.at) if bad else outcomes[0]


def hung(outcome: Outcome, names: str, timeout_s: float) -> Outcome | None:
    """What `outcome` means if it is a collective's time limit, and the ranks `names` never came out of the job."""
    if outcome.kind != "failed" or not ("timed out" in outcome.line.lower() or "timeout" in outcome.line.lower()):
        return None
    line = f"{names} hung: the others waited parallel.timeout_s={timeout_s:g} s for a collective"
    return Outcome("failed", line=line, trace=f"isobatch: {line}", rank=-1)  # no rank's own words


class RunFolder:
    """A run folder as the launcher sees it: it writes only what the ranks could not write themselves."""

    def __init__(self, path: Path):
        self.path = path
        self.summary = path / layout.SUMMARY
        self._before = self._stamp()  # a folder can be used again, by a restart or a resumed sweep

    def _stamp(self) -> int | None:
        return self.summary.stat().st_mtime_ns if self.summary.exists() else None

    def settle(self, outcome: Outcome) -> None:
        """Leave the reason in train.log and summary.json, whoever died before writing it.

        A folder that is full, gone or read-only is one warning: the reason itself still has to reach the terminal.
        """
        if outcome.kind == "done":
            with suppress(OSError):
                if not self.summary.exists():  # a task that trains nothing, as plan and export
                    self._write({**BLANK, "state": "completed"})
            return
        if outcome.kind != "stopped":
            try:
                self._log(outcome)
            except OSError as error:
                log.warning("%s cannot be written (%s)", self.path, error.strerror)
        with suppress(OSError):
            self._settle_summary(outcome)

    def _settle_summary(self, outcome: Outcome) -> None:
        written = self._stamp() != self._before
        if not written:
            nothing_done = outcome.kind == "refused" or outcome.line == EARLY
            if not nothing_done or self._read().get("state") not in layout.DONE:
                self._write({**BLANK, "state": "stopped" if outcome.kind == "stopped" else "failed",
                             "error": outcome.line})  # fmt: skip
            return
        summary = self._read()
        if summary.get("state") == "failed" and (outcome.rank != 0 or outcome.kind != "failed"):
            # the main rank saw only the fallout ("connection closed by peer") of what happened elsewhere
            state = "stopped" if outcome.kind == "stopped" else "failed"
            self._write({**summary, "state": state, "error": outcome.line})

    def _log(self, outcome: Outcome) -> None:
        text = outcome.trace if outcome.kind == "failed" and outcome.trace else ""
        line = f"isobatch: {outcome.line}"
        with (self.path / layout.LOG).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n" if text.strip() in ("", line) else f"{text.rstrip()}\n{line}\n")

    def _read(self) -> dict[str, Any]:
        return usable(self.path, self.summary.name) or {}

    def _write(self, data: dict[str, Any]) -> None:
        part = self.summary.with_suffix(".json.part")
        part.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        os.replace(part, self.summary)


def give_up(run_dir: Path, rank: int) -> Callable[[str, int], None]:
    """Ends this process from another thread, where the main one does not come out: (line, signal that asked for it or 0)."""
    folder = RunFolder(run_dir)

    def end(line: str, signum: int) -> None:
        folder.settle(Outcome("stopped" if signum else "failed", line=line, rank=rank, signum=signum))
        print(f"isobatch: {line}", file=sys.stderr, flush=True)
        os._exit(128 + signum if signum else 1)

    return end
