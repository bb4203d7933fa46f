"""docs/cases.md and the marks `case(number)` of the tests name the same cases and the same files."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs/cases.md"


def marked() -> dict[int, set[str]]:
    found: dict[int, set[str]] = defaultdict(set)
    for file in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.case":
                for number in node.args:
                    assert isinstance(number, ast.Constant)
                    found[number.value].add(file.relative_to(TESTS).as_posix())
    return dict(found)


def test_every_case_is_tested_where_the_page_says() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", PAGE.read_text(), flags=re.MULTILINE)
    told = {int(number): set(re.findall(r"\]\(\.\./tests/([^)]+)\)", tests)) for number, tests in rows}
    assert set(told) == set(range(1, 36))
    assert told == marked()
