"""Check a report in a real browser: an empty console, no requests, all plots, and no text off the screen.

make browser
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from browser import WIDTHS, Screen, chromium
from runs import write_run

from dataload.reporting.html import write
from dataload.telemetry.stats_log import read

LETTERS = 8.0  # least pixels of a plot's smallest text, on any screen
SMALLEST = 8.5  # points, of that text


def main() -> None:
    shots = Path(sys.argv[1])
    shots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        write_run(Path(folder))
        report = Path(folder) / "report.html"
        write(read(Path(folder)), report, "digits: where the time went")
        for width in WIDTHS:
            look(Screen(browser, width), report.as_uri(), shots / f"report-{width}.png")
    print(f"the report, {' and '.join(map(str, WIDTHS))} pixels wide: {shots}")


def look(screen: Screen, report: str, shot: Path) -> None:
    screen.look_at(report)
    screen.page.screenshot(path=shot, full_page=True)
    assert screen.fetched == [report], screen.fetched
    plots = screen.page.evaluate(
        "[...document.images].map(i => ({done: i.complete, own: i.naturalWidth, shown: i.clientWidth}))"
    )
    assert len(plots) == 7
    points = 4 / 3  # a point of an SVG is so many pixels of its own width
    for plot in plots:
        assert plot["done"]
        assert plot["own"] > 0
        assert SMALLEST * points * plot["shown"] / plot["own"] >= LETTERS, plot


if __name__ == "__main__":
    main()
