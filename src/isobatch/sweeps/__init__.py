"""Jobs of a sweep: what an earlier launch into the same folder left of them. launchers.py is how they get run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isobatch import better
from isobatch.config import flat
from isobatch.errors import ConfigError
from isobatch.resume.contract import EARLIER
from isobatch.run_folder import layout
from isobatch.run_folder.files import write_json
from isobatch.run_folder.reading import usable

IGNORED = ("sweep.",)  # what may differ between two launches of one sweep


def earlier(plain: Mapping[str, Any], run_dir: Path) -> tuple[str, float | None]:
    """What is to be done with a job whose folder may have been used before: (word, objective).

    The word is `new`, `skip` (complete, with its objective), `again` (failed before its first checkpoint) or `go on`.

    Raises:
        ConfigError: the folder holds a job of another config; its first differing key is named.
    """
    summary, before = usable(run_dir, layout.SUMMARY) or {}, usable(run_dir, layout.CONFIG)
    if before is None:
        return "new" if not summary else "again", None
    done = summary.get("state") in layout.DONE
    then, now = flat(before), flat(plain)
    changed = [k for k in sorted({*then, *now}) if then.get(k) != now.get(k) and not k.startswith(IGNORED)
               and _has(before, k) and _has(plain, k)]  # fmt: skip
    if not done:  # it would go on as an earlier release did it, and the jobs beside it as today's does
        older = {f"{group}.{key}": value for group, options in EARLIER.items() for key, value in options.items()
                 if not _has(before, f"{group}.{key}")}  # fmt: skip
        changed += [k for k, value in older.items() if k in now and now[k] != value]
        then |= older
    if changed:
        key = changed[0]
        raise ConfigError(key, now.get(key), f"{run_dir} holds a job with {key}={then.get(key)}",
                          "use another hydra.sweep.dir, or remove that folder")  # fmt: skip
    if done:
        final, metric = summary.get("final"), (plain.get("sweep") or {}).get("objective")
        found = final if isinstance(final, dict) else {}
        value = found.get(metric) if metric else better.objective(found, None)
        return "skip", float(value) if isinstance(value, int | float) else None
    return ("go on" if (run_dir / layout.CHECKPOINTS).is_dir() else "again"), None


def _has(plain: Mapping[str, Any], key: str) -> bool:
    """Whether the release that `plain` is of knows the option that `key` is, or lies in."""
    group, _, rest = key.partition(".")
    options = plain.get(group)
    return group in plain and (not rest or not isinstance(options, Mapping) or rest.partition(".")[0] in options)


def check_alone(plain: Mapping[str, Any]) -> None:
    """Refuse to train where a person asked what a sweep would do.

    Raises:
        ConfigError: sweep.dry_run without a sweep.
    """
    if (plain.get("sweep") or {}).get("dry_run"):
        raise ConfigError("sweep.dry_run", True, "there is no sweep to list",
                          "add -m, or set task=plan for the plan of one run")  # fmt: skip


MACHINE = ("parallel", "precision")  # groups whose refusals may be this machine's fault


def skipped(plain: Mapping[str, Any], refusal: ConfigError, run_dir: Path) -> bool:
    """Whether `sweep.skip_unavailable` takes `refusal` for a skipped job; then its summary says so."""
    asked = (plain.get("sweep") or {}).get("skip_unavailable")
    if not asked or refusal.key.partition(".")[0] not in MACHINE:
        return False
    summary = usable(run_dir, layout.SUMMARY) or {"error": str(refusal)}
    write_json(run_dir / layout.SUMMARY, {**summary, "state": "skipped"})
    return True


def line_of(word: str, number: int, run_dir: Path) -> str:
    """One line for a person; empty for a new job."""
    return {
        "new": "",
        "skip": f"job {number} is complete in {run_dir}: skipped",
        "go on": f"job {number} goes on from its last checkpoint in {run_dir}",
        "again": f"job {number} did not get far in {run_dir}: runs again",
    }[word]
