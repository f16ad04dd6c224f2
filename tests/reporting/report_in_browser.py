"""Check a report in a real browser: an empty console, no requests, all plots, and no text off the screen.

make browser
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from runs import write_run

from dataload.reporting.html import write
from dataload.telemetry.stats_log import read

WIDTHS = (1280, 390)
NAMES = ("chromium", "chromium-browser", "google-chrome")
LETTERS = 8.0  # least pixels of a plot's smallest text, on any screen
SMALLEST = 8.5  # points, of that text


def main() -> None:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.exit("skipped: playwright is not installed: pip install --group browser")
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        print(f"skipped: none of {', '.join(NAMES)} is installed")
        return
    shots = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    shots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder))
        page_file = Path(folder) / "report.html"
        write(read(Path(folder)), page_file, "digits: where the time went")
        with (
            sync_playwright() as tools,
            tools.chromium.launch(executable_path=browser, args=["--no-sandbox"]) as chrome,
        ):
            for width in WIDTHS:
                look(
                    chrome.new_page(viewport={"width": width, "height": 900}), page_file, shots / f"report-{width}.png"
                )
    print(f"looked at {' and '.join(map(str, WIDTHS))} pixels wide: {shots}")


def look(page, file: Path, shot: Path) -> None:
    trouble, fetched = [], []
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("request", lambda request: fetched.append(request.url))
    page.goto(file.as_uri())
    page.screenshot(path=shot, full_page=True)
    assert not trouble, trouble
    assert [url for url in fetched if not url.startswith("data:")] == [file.as_uri()], fetched
    plots = page.evaluate(
        "[...document.images].map(i => ({done: i.complete, own: i.naturalWidth, shown: i.clientWidth}))"
    )
    assert len(plots) == 6
    points = 4 / 3  # a point of an SVG is so many pixels of its own width
    for plot in plots:
        assert plot["done"]
        assert plot["own"] > 0
        assert SMALLEST * points * plot["shown"] / plot["own"] >= LETTERS, plot
    wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1], f"{wide[0]} pixels on a screen of {wide[1]}"


if __name__ == "__main__":
    main()
