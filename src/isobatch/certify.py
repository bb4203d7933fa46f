"""`isobatch certify RUN`: evaluate a run and train some of its steps again, here, and write down what came out.

    isobatch certify RUN [--steps K] [--out FILE] [parallel=ddp parallel.nproc=2 ...]
    isobatch certify --check FILE RUN

certificate.json says which run it is about (digests of its settings, rows and weights), what was replayed, where, and with
which result. `--check` tells whether FILE is as it was written, and whether RUN is that run, its checkpoints whole. The seal
is a checksum: it shows what was changed by accident, and is no signature of a person.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from isobatch.checkpoint.folder import MANIFEST, Damaged, names, verify
from isobatch.report.read import one_line
from isobatch.run_folder import layout
from isobatch.run_folder.files import finite, write_json
from isobatch.run_folder.reading import Unreadable, read_mapping, usable

STEPS = 10
FILES = (layout.CONFIG, layout.PLAN, layout.METRICS, f"{layout.CHECKPOINTS}/last/model.safetensors",
         f"{layout.CHECKPOINTS}/last/{MANIFEST}")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 it comes out again (or the certificate holds), 1 it does not, 2 refused (one line on standard error)."""
    parser = argparse.ArgumentParser(prog="isobatch certify", description="Does a run come out again? In a file to hand on.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="where to replay it: parallel=ddp parallel.nproc=2")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="K", help=f"steps to train again ({STEPS})")
    parser.add_argument("--out", type=Path, default=Path("certificate.json"), metavar="FILE")
    parser.add_argument("--check", type=Path, metavar="FILE", help="whether this certificate is whole and of this run")
    options = parser.parse_args(argv)
    if not (options.run / layout.METRICS).is_file():
        print(f"{options.run} is no run folder: it holds no {layout.METRICS}", file=sys.stderr)
        return 2
    try:
        holds, said = check(options.check, options.run) if options.check else certify(
            options.run, options.settings, options.steps, options.out)  # fmt: skip
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 2
    print(said)
    return 0 if holds else 1


class Refused(Exception):
    """One line."""


def certify(run: Path, settings: list[str], steps: int, out: Path) -> tuple[bool, str]:
    """Whether `run` comes out again, and the line for a person.

    Raises:
        Refused: it cannot be evaluated or replayed.
    """
    from isobatch import __version__

    if damaged := damage(run):
        raise Refused(f"{damaged}: remove it, or certify a whole copy")
    with tempfile.TemporaryDirectory() as folder:
        evaluation = evaluated(run, settings, Path(folder) / "evaluate")
        replay = replayed(run, settings, steps, Path(folder) / "replay")
    apart = unlike(evaluation, replay)
    holds, verdict = bool(replay["reproduces"]) and not apart, replay["verdict"]
    if evaluation["differ"]:
        what = f"gives another {apart[0]}" if apart else "comes out up to rounding"
        verdict += f"; the evaluation of step {evaluation['step']} {what}"
    certificate = finite({
        "format": layout.FORMAT, "isobatch": __version__, "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "run": facts(run, replay["from"]), "settings": settings,
        "replay": replay, "evaluation": evaluation, "holds": holds, "verdict": verdict,
    })  # fmt: skip
    try:
        write_json(out, {**certificate, "seal": seal(certificate)})
    except OSError as error:
        raise Refused(f"{out} cannot be written ({error.strerror})") from None
    return holds, f"{'certified' if holds else 'not certified'}: {verdict} ({out})"


def evaluated(run: Path, settings: list[str], folder: Path) -> dict[str, Any]:
    """The numbers of `task=evaluate`, beside those that the run recorded of the same step."""
    from isobatch.api import read
    from isobatch.compare.rows import same

    summary = trained("evaluate", run, settings, folder)
    step, now = summary["steps"], {k: v for k, v in summary["final"].items() if k.startswith("eval/")}
    rows = [row for row in read(run) if row.get("step") == step and any(key.startswith("eval/") for key in row)]
    recorded = {key: rows[-1][key] for key in now if key in rows[-1]} if rows else {}
    differ = [key for key, value in recorded.items() if not same(value, now[key])]
    return {"step": step, "here": now, "recorded": recorded, "differ": differ}


def unlike(evaluation: dict[str, Any], replay: dict[str, Any]) -> list[str]:
    """Numbers of an evaluation that are not as recorded: not to the bit, or, where bits cannot be compared (see the verdict of
    the replay), losses beyond rounding."""
    from isobatch.compare.rows import distance
    from isobatch.tasks.replaying import ROUNDING

    differ: list[str] = evaluation["differ"]
    if replay["to_the_bit"] and not replay["identity"]:
        return differ
    here, recorded = evaluation["here"], evaluation["recorded"]
    return [key for key in differ if key.endswith("loss") and distance(recorded[key], here[key]) > ROUNDING]


def replayed(run: Path, settings: list[str], steps: int, folder: Path) -> dict[str, Any]:
    """The verdict of `task=replay`, without where it happened to lie."""
    from isobatch.errors import JobFailed

    try:
        trained("replay", run, [*settings, f"replay.steps={steps}"], folder)
    except JobFailed as failed:
        if not (folder / "replay.json").is_file():
            raise Refused(str(failed)) from None
    found = dict(read_mapping(folder, "replay.json"))
    return {key: value for key, value in found.items() if key != "run"}


def trained(task: str, run: Path, settings: list[str], folder: Path) -> dict[str, Any]:
    """summary.json of a task on `run`."""
    from isobatch.api import train
    from isobatch.errors import ConfigError, JobFailed

    words = [f"task={task}", f"resume={run}", "logger=none", *settings, f"hydra.run.dir={folder}"]
    try:
        return train(words).summary
    except (ConfigError, ValueError) as refusal:
        raise Refused(str(refusal)) from None
    except JobFailed as failed:
        if task == "replay":
            raise
        raise Refused(str(failed)) from None


def facts(run: Path, start: int = 0) -> dict[str, Any]:
    """What tells a run from any other: digests of its files, and what its summary says of its weights.

    Args:
        start: the step whose checkpoint its replay began with; 0 = none.
    """
    summary = usable(run, layout.SUMMARY) or {}
    found: dict[str, Any] = {key: summary.get(key) for key in ("state", "steps", "weights_sha256", "audit")}
    begun = [f"{layout.CHECKPOINTS}/step-{start}/{MANIFEST}"] if start else []  # which has digests of all that lies there
    for name in (*FILES, *begun):
        if (run / name).is_file():
            with (run / name).open("rb") as file:
                found[name] = file_digest(file, "sha256").hexdigest()
    return found


def damage(run: Path) -> str:
    """The first checkpoint that is not whole, in words; "" = all are."""
    for name in names(run / layout.CHECKPOINTS):
        try:
            verify(run / layout.CHECKPOINTS / name)
        except Damaged as problem:
            return f"{run / layout.CHECKPOINTS / name} is damaged ({problem})"
    return ""


def seal(certificate: dict[str, Any]) -> str:
    return sha256(json.dumps(certificate, sort_keys=True).encode()).hexdigest()


def check(file: Path, run: Path) -> tuple[bool, str]:
    """Whether the certificate holds of `run`, and the line for a person.

    Raises:
        Refused: it is none.
    """
    try:
        certificate = dict(read_mapping(file.parent, file.name))
    except Unreadable as problem:
        raise Refused(f"{file} {problem}") from None
    about, sealed = certificate.get("run"), certificate.pop("seal", None)
    holds, verdict = certificate.get("holds"), certificate.get("verdict")
    if not (isinstance(about, dict) and layout.METRICS in about and isinstance(holds, bool) and isinstance(verdict, str)) or (
            sealed is None):  # fmt: skip
        raise Refused(f"{file} is no certificate")
    if sealed != seal(certificate):
        return False, f"{file} is not as it was written: its seal is of something else"
    replay = certificate.get("replay")
    start = replay.get("from") if isinstance(replay, dict) else 0
    now = facts(run, start if isinstance(start, int) else 0)
    unlike = [key for key in about if about[key] != now.get(key)]  # an older release knew fewer
    if unlike:
        return False, f"{file} is of another run, or {run} has changed since: {', '.join(sorted(unlike)[:4])}"
    if damaged := damage(run):
        return False, f"{file} is of {run}, and {damaged}"
    return holds, f"{file} is of {run}: {one_line(verdict)}"
