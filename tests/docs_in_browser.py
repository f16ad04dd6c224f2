"""Check the documentation in a real browser: no message, no failed request, no wide page, a search that finds.

make browser
"""

from __future__ import annotations

import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

from browser import WIDTHS, Screen, chromium
from http_servers import serving

TERMS = (
    *("resume", "S3", "NVMe", "DDP", "stall", "checkpoint", "shuffle", "cache_bytes", "num_workers", "torchrun"),
    *("packing", "tokenizer", "Delta", "Iceberg", "Slurm", "preemption", "JPEG", "Azure", "convert", "ObjectChanged"),
)


def main() -> None:
    site, shots = Path(sys.argv[1]), Path(sys.argv[2])
    pages = sorted(page.relative_to(site) for page in site.rglob("*.html"))
    assert pages, f"{site} has no pages: make docs"
    with chromium() as browser, serving(partial(QuietHandler, directory=str(site))) as address:
        for width in WIDTHS:
            screen = Screen(browser, width)
            for page in pages:
                screen.look_at(f"{address}/{page}")
                shot = shots / "docs" / str(width) / page.with_suffix(".png")
                shot.parent.mkdir(parents=True, exist_ok=True)
                screen.page.screenshot(path=shot)
            assert not screen.trouble, screen.trouble  # after the last page
            assert all(url.startswith(address) for url in screen.fetched), screen.fetched
        print(f"{len(pages)} pages of the documentation, {' and '.join(map(str, WIDTHS))} pixels wide: {shots}/docs")
        for term in TERMS:
            print(f"search for {term}: {search(Screen(browser, WIDTHS[0]), address, term)}")


def search(screen: Screen, address: str, term: str) -> str:
    """Return what the site says of its results. It fails if there is none within Playwright's time."""
    screen.look_at(f"{address}/index.html?q={term}")
    screen.page.locator(".md-search-result__item").first.wait_for()
    assert not screen.trouble, screen.trouble
    return screen.page.locator(".md-search-result__meta").inner_text()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing: the browser says which requests failed."""


if __name__ == "__main__":
    main()
