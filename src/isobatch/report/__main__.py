"""`python -m isobatch.report DIR... [--out DIR]`: the comparison of any runs, whenever you want it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from isobatch.report import ReportError, usable_cores, write_report


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 the report could not be written, 2 refused (one line on standard error)."""
    parser = argparse.ArgumentParser(prog="python -m isobatch.report", description="Compare the runs below folders.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folder of a run, a sweep or several sweeps")
    parser.add_argument("--out", type=Path, help="where report.html and the rest go (default: the first DIR)")
    options = parser.parse_args(argv)
    out = options.out or options.folders[0]
    try:
        write_report(options.folders, out, processes=usable_cores())
    except ReportError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"the report could not be written: {error}", file=sys.stderr)
        return 1
    print(f"wrote {out / 'report.html'}, {out / 'report.csv'} and {out / 'report'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
