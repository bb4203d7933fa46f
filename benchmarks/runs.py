"""Scale of runs: the report of a large sweep, and what a resume reads of a run of a million steps.

    python benchmarks/runs.py                 # 500 jobs of 10,000 rows (1.4 GB, removed afterwards), then one run of 100,000
    python benchmarks/runs.py 1000 100        # jobs, rows

Folders are made with the rows that a training writes. Given are CPU time, of the report in a process of its own with its peak
memory, beside that of `json.loads` over rows of the same kind in this process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from isobatch.run_folder.files import RunFiles
from isobatch.run_folder.rows import Standing, beyond

EVERY, EVALUATED = 10, 1000  # steps between logged rows, and between evaluations
RANK = {"rank": 0, "local_rank": 0, "pid": 1, "host": "machine", "device": "cpu", "peak_memory_mb": 789.9}


def write_rows(path: Path, rows: int, bent: float = 0.0) -> None:
    """A metrics.jsonl as a training writes it. bent: how far this job's losses are from the others'."""
    with path.open("w") as file:
        for k in range(rows):
            step = max(1, EVERY * k)
            at = {"step": step, "update": step, "epoch": step // 30, "samples": 48 * step}
            file.write(json.dumps({**at, "train/loss": 2 / (1 + step / 900) + bent, "train/lr": 0.002 / (1 + step / 1e5),
                                   "train/grad_norm": 2.4320244789123535 / (1 + k % 7), "train/loss_scale": 1.0,
                                   "train/skipped_steps": 0, "perf/samples_per_s": 2672.9188 + k % 11,
                                   "time_s": 0.018680364 * step}) + "\n")  # fmt: skip
            if step % EVALUATED == 0:
                file.write(json.dumps({"step": step, "update": step, "samples": 48 * step, "eval/loss": 1 / (1 + step / 900),
                                       "eval/samples": 359, "eval/accuracy": 1 - 1 / (2 + step / 900)}) + "\n")  # fmt: skip


def write_sweep(root: Path, jobs: int, rows: int) -> None:
    """Folders as a sweep leaves them, each with another learning rate."""
    settings = "".join(f"group{g}:\n  name: choice\n" + "".join(f"  option{k}: {k}\n" for k in range(6)) for g in range(18))
    for job in range(jobs):
        folder = root / str(job)
        (folder / ".hydra").mkdir(parents=True)
        (folder / ".hydra" / "overrides.yaml").write_text(f"- optimizer.lr={0.001 * (job + 1):g}\n")
        (folder / "config.yaml").write_text(f"seed: 0\noptimizer:\n  lr: {0.001 * (job + 1):g}\n{settings}")
        write_rows(folder / "metrics.jsonl", rows, bent=job * 1e-5)
        last = {"eval/loss": 0.1 + job * 1e-5, "eval/accuracy": 0.9 + job * 1e-5}
        summary = {"state": "completed", "steps": EVERY * rows, "updates": EVERY * rows, "skipped_steps": 0, "final": last,
                   "plan": {"effective_batch": 48, "shard": 8, "micro_batch": 48, "num_replicas": 1, "accumulation_steps": 1},
                   "best": last, "weights_sha256": f"{job:064x}", "time": {"train_s": 9.1}, "perf": {"samples_per_s": 2e3},
                   "ranks": [RANK], "error": None}  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(summary, indent=2))


def json_seconds(rows: int = 20_000) -> float:
    """CPU seconds that json.loads takes for one row."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        write_rows(path, rows)
        start = time.process_time()
        with path.open("rb") as file:
            for line in file:
                json.loads(line)
        return (time.process_time() - start) / rows


def report(folder: Path) -> tuple[float, float]:
    """(CPU seconds, peak MB) of `python -m isobatch.report` in one process."""
    command = [sys.executable, "-c", "import sys; from isobatch.report import write_report; from pathlib import Path; "
               "write_report([Path(sys.argv[1])], Path(sys.argv[1]))", str(folder)]  # fmt: skip
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def rows(jobs: int = 100, of_each: int = 2000, long: int = 100_000) -> Iterator[tuple[str, str, str]]:
    """(what, figure, compared with)."""
    per_row = json_seconds()
    with tempfile.TemporaryDirectory() as folder:
        write_sweep(Path(folder, "sweep"), jobs, of_each)
        seconds, memory = report(Path(folder, "sweep"))
        yield (f"report of {jobs} jobs x {of_each:,} rows: CPU; peak", f"{seconds:.1f} s; {memory:.0f} MB",
               f"json.loads of every row: {per_row * jobs * of_each:.1f} s")  # fmt: skip
        run = Path(folder, "long")
        run.mkdir()
        write_rows(run / "metrics.jsonl", long)
        start, at = time.process_time(), Standing(*[EVERY * long * 9 // 10] * 2, 48 * EVERY * long * 9 // 10)
        RunFiles(run, True).resume_metrics(at, beyond(run, at))
        yield (f"resume of {EVERY * long:,} steps, {long:,} rows: CPU", f"{time.process_time() - start:.1f} s",
               f"json.loads of every row: {per_row * long:.1f} s")  # fmt: skip


if __name__ == "__main__":
    asked = [int(word) for word in sys.argv[1:]] or [500, 10_000]
    for row in rows(*asked):
        print("{:<56} {:>16}   {}".format(*row), flush=True)
