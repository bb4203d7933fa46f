"""`python -m isobatch.compare RUN RUN... [--json FILE]`: where runs part first, as text and as JSON."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from isobatch.compare.runs import Change, Comparison, compare_runs
from isobatch.report.read import ReportError, one_line
from isobatch.run_folder.files import finite

SHOWN = 20  # lines of one section


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 all the same to the bit, 1 some run parts from the first, 2 refused (one line on standard error)."""
    parser = argparse.ArgumentParser(prog="python -m isobatch.compare", description="Where do runs part first?")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, or one sweep's folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole comparison there too")
    options = parser.parse_args(argv)
    try:
        comparisons = compare_runs(options.runs)
    except ReportError as refusal:
        print(refusal, file=sys.stderr)
        return refusal.exit_code
    for comparison in comparisons:
        print(as_text(comparison))
    if options.json is not None:
        try:
            options.json.write_text(json.dumps(finite([c.as_dict() for c in comparisons]), indent=2) + "\n")
        except OSError as error:
            print(f"{options.json} cannot be written ({error.strerror})", file=sys.stderr)
            return 2
    return 0 if all(comparison.same for comparison in comparisons) else 1


def as_text(comparison: Comparison) -> str:
    """The verdict first, then what differs, in the order in which one follows from another."""
    lines = [f"{comparison.other} against {comparison.first}: {comparison.verdict}"]
    sections = (("contract", comparison.contract), ("data", comparison.data), ("identity", comparison.identity),
                ("plan and bookkeeping", comparison.plan))  # fmt: skip
    for title, changes in sections:
        lines += _section(title, changes)
    lines += [f"  not compared: {one_line(problem)}" for problem in comparison.unread]
    apart = sorted(comparison.rows.largest.items(), key=lambda item: -item[1])
    lines += [f"  {key}: at most {far:.3g} apart (relative)" for key, far in apart[:SHOWN]]
    lines += [f"  weights {name}: {_apart(far)}" for name, far in comparison.tensors.items()]
    return "\n".join(lines)


def _apart(far: float) -> str:
    return f"at most {far:.3g} apart" if math.isfinite(far) else "of another shape, not finite, or in one of them alone"


def _section(title: str, changes: list[Change]) -> list[str]:
    lines = [f"  {title}: {one_line(c.key)} {_shown(c.here)} -> {_shown(c.there)}" for c in changes[:SHOWN]]
    more = len(changes) - SHOWN
    return [*lines, f"  {title}: and {more} more"] if more > 0 else lines


def _shown(value: object) -> str:
    text = "null" if value is None else one_line(value)
    return text if len(text) <= 60 else text[:57] + "..."


if __name__ == "__main__":
    sys.exit(main())
