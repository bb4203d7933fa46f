"""report.html: escaped, self-contained, and opened in a real browser where there is one."""

from __future__ import annotations

import html.parser
import re
import shutil
import subprocess
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from report_runs import write_run
from rich.console import Console

from isobatch.report import write_report
from isobatch.report.curves import Scale, path, tick_text

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\"'"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """The report of a hostile sweep: 12 jobs, so that natural order and order as text differ."""
    for job in range(12):
        losses = [3 / (k + 1) + job / 10 for k in range(60)]
        error = {"state": "failed", "error": HOSTILE} if job == 3 else {"perf": {"samples_per_s": 100.0 + job}}
        config = {"note": HOSTILE if job == 1 else f"n{job}", "optimizer": {"lr": 10.0 ** -(job % 3)}}
        write_run(tmp_path / "sweep" / str(job), losses, {30: 0.5, 60: 0.6 + job / 100}, config, summary=error)
    write_report([tmp_path / "sweep"], tmp_path, Console(file=StringIO()))
    return tmp_path / "report.html"


class Elements(html.parser.HTMLParser):
    """Names and attributes of all start tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_is_self_contained_and_escaped(page: Path) -> None:
    text = page.read_text()
    elements = Elements(text).found
    tags = [tag for tag, _ in elements]
    assert tags.count("script") == 1 and "img" not in tags and "link" not in tags and "iframe" not in tags
    assert not [a for _, attrs in elements for a in attrs if a in ("src", "href") or a.startswith("on")]
    assert "url(" not in text and "@import" not in text and not re.search(r"https?://", text)
    assert "&lt;script&gt;" in text
    assert "prefers-color-scheme: dark" in text and "default-src 'none'" in text


def test_every_job_and_every_curve_is_on_the_page(page: Path) -> None:
    elements = Elements(page.read_text()).found
    curves = [attrs for tag, attrs in elements if tag == "path" and attrs.get("class") == "curve"]
    assert len(curves) == 12 * 3 * 2  # jobs x metrics x axes
    assert all(len(attrs["d"] or "") > 10 for attrs in curves)
    assert sum(tag == "tr" and "data-j" in attrs for tag, attrs in elements) == 12
    assert sum(attrs.get("class") == "row" for _, attrs in elements) == 24  # two devices each


def test_paths_lift_the_pen_at_nan_and_axes_have_round_ticks() -> None:
    drawn = path(np.array([0.0, 1, 2, 3, 4]), np.array([0.0, 5, np.nan, 5, 2]))
    assert drawn == "M0 0h0l10 50M30 50h0l10-30"
    assert Scale(0.0, 1.04).ticks() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert Scale.of(np.array([0.001, 2.0]), log_allowed=True).log
    flat = Scale.of(np.array([0.5, 0.5]), log_allowed=True)
    assert 0 < float(flat(np.array([0.5]))[0]) < 1
    assert [tick_text(v) for v in (0, 0.25, 2.5e-4, 1.2e6, 96_000)] == ["0", "0.25", "2.5e-4", "1.2M", "96k"]


def chromium(profile: Path, url: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Opens a page in a headless browser that asks the network for nothing."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={profile}", "--enable-logging=stderr", "--window-size=1400,1200", *options, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def console_lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def column(dom: str, heading: str) -> list[str]:
    """The texts of one column of the leaderboard, as the browser has it."""
    table = dom[dom.index('id="jobs"') : dom.index("</table>")]
    heads = [re.sub("<[^>]+>", "", cell) for cell in re.findall(r"<button>(.*?)</button>", table)]
    rows = re.findall(r"<tr data-j.*?</tr>", table)
    return [re.sub("<[^>]+>", "", re.findall(r"<t[hd].*?</t[hd]>", row)[heads.index(heading)]) for row in rows]


browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")


@pytest.mark.slow
@pytest.mark.browser
@browser
def test_a_browser_draws_it_without_an_error(page: Path, tmp_path: Path) -> None:
    shot = tmp_path / "shot.png"
    done = chromium(tmp_path / "profile", page.as_uri(), f"--screenshot={shot}")
    assert done.returncode == 0 and not console_lines(done), done.stderr
    with Image.open(shot) as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    colours, counts = np.unique(pixels, axis=0, return_counts=True)
    assert len(colours) > 100 and counts.max() < 0.9 * len(pixels)  # text, curves and badges, not one flat colour


@pytest.mark.slow
@pytest.mark.browser
@browser
def test_a_browser_sorts_it_by_link_and_by_click(page: Path, tmp_path: Path) -> None:
    dom = chromium(tmp_path / "p1", page.as_uri() + "#sort=-samples/s", "--dump-dom").stdout
    assert column(dom, "job") == ["11", "10", "9", "8", "7", "6", "5", "4", "2", "1", "0", "3"]  # 3 did not complete
    assert "owned" not in re.findall("<title>(.*?)</title>", dom)[0]
    # The page lets no other script run, so the copy that clicks goes without that policy.
    click = "<script>for (const b of document.querySelectorAll('thead button')) if (b.textContent === 'job') b.click()"
    text = re.sub(r"<meta http-equiv=[^>]+>", "", page.read_text())
    (page.parent / "click.html").write_text(text.replace("</body>", f"{click}</script></body>"))
    done = chromium(tmp_path / "p2", (page.parent / "click.html").as_uri(), "--dump-dom")
    assert column(done.stdout, "job") == [str(job) for job in range(12)]  # 10 after 9: numbers, not texts
    assert 'aria-sort="ascending"' in done.stdout and not console_lines(done)


@pytest.mark.slow
@pytest.mark.browser
@browser
def test_the_policy_keeps_foreign_scripts_out(page: Path, tmp_path: Path) -> None:
    bad = page.parent / "bad.html"
    bad.write_text(page.read_text().replace("</body>", "<script>document.title = 'owned'</script></body>"))
    done = chromium(tmp_path / "profile", bad.as_uri(), "--dump-dom")
    assert "<title>12 jobs compared</title>" in done.stdout and console_lines(done)
