"""A mkdocs hook that fails the build if a page makes browsers fetch from another server."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "object": "data"}
NEEDED = {"stylesheet", "icon", "preload", "preconnect", "prefetch", "dns-prefetch", "modulepreload"}  # rel of <link>
FOREIGN = re.compile(r"\s*(?:https?:)?//")


class Page(HTMLParser):
    """A parser that collects in `foreign` the URLs of other servers that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        url = attributes.get(FETCHED.get(tag, "")) or ""
        if tag == "link" and NEEDED & set((attributes.get("rel") or "").split()):
            url = attributes.get("href") or ""
        if FOREIGN.match(url):
            self.foreign.append(url)


def on_post_build(config: Any, **_: Any) -> None:
    """Raise SystemExit with page and URL if a page or stylesheet fetches from another server."""
    site = Path(config["site_dir"])
    found = [f"{path.relative_to(site)}: {url}" for path in site.rglob("*.html") for url in foreign(path.read_text())]
    for path in site.rglob("*.css"):
        urls = re.findall(r"(?:url\(|@import\s*)[\"']?([^\"')\s]+)", path.read_text())
        found += [f"{path.relative_to(site)}: {url}" for url in urls if FOREIGN.match(url)]
    if found:
        raise SystemExit("pages must not fetch from other servers:\n" + "\n".join(found))


def foreign(html: str) -> list[str]:
    page = Page()
    page.feed(html)
    return page.foreign
