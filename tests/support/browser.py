"""Look at pages in the Chromium of this machine."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

WIDTHS = (1400, 420)  # pixels of a laptop's window and of a phone's screen
NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """Start Chromium, or end this process with the reason if there is none."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.exit("skipped: playwright is not installed: pip install --group browser")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        print(f"skipped: none of {', '.join(NAMES)} is installed")
        sys.exit()
    with sync_playwright() as tools, tools.chromium.launch(executable_path=program, args=["--no-sandbox"]) as browser:
        yield browser


class Screen:
    """A page of one width. Its console, its errors and its requests are kept.

    Args:
        browser: What `chromium` gives.
        width: Pixels.

    Attributes:
        page: Playwright's page.
        trouble: Messages of the console, errors of scripts, and requests that failed.
        fetched: URLs, without those that hold their own data.
    """

    def __init__(self, browser: Any, width: int) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900})
        self.trouble: list[str] = []
        self.fetched: list[str] = []
        self.page.on("console", lambda message: self.trouble.append(message.text))
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("request", lambda request: self._count(request.url))
        self.page.on("requestfailed", lambda request: self.trouble.append(f"{request.url}: {request.failure}"))
        self.page.on("response", lambda response: self._check(response))

    def look_at(self, url: str) -> None:
        """Open a page, and fail if it is in trouble or wider than the screen."""
        self.page.goto(url)
        assert not self.trouble, f"{url}: {self.trouble}"
        wide, screen = self.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide <= screen, f"{url}: {wide} pixels on a screen of {screen}"

    def _count(self, url: str) -> None:
        if not url.startswith("data:"):
            self.fetched.append(url)

    def _check(self, response: Any) -> None:
        if response.status >= 400:
            self.trouble.append(f"{response.url}: {response.status}")
