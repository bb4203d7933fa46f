"""A report without pictures, which take nine tenths of its time; a test that is about them asks for them."""

from __future__ import annotations

import pytest


@pytest.fixture
def pictures() -> None:
    """They are drawn."""


@pytest.fixture(autouse=True)
def _no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("isobatch.report.write_images", lambda *_: [])
