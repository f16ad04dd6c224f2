"""What `CacheConfig` decides elsewhere: the options that type checkers see, and the table of the docs.

`make options` writes both after a change of its fields or their documentation.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from dataload.cache import config

ROOT = Path(__file__).resolve().parent.parent.parent
OPTIONS, GUIDE = ROOT / "cache" / "options.py", ROOT / "docs" / "guides" / "filesystem.md"
TABLE = re.compile(r"^\| setting \|.*?(?=\n\n|\n\Z)", re.MULTILINE | re.DOTALL)
HEAD = '''"""The settings of `CacheConfig` as keyword arguments, for type checkers. `make options` writes this file."""

from __future__ import annotations

import os
from typing import TypedDict


class CacheOptions(TypedDict, total=False):
    """Arguments of functions that take `**options: Unpack[CacheOptions]`."""

'''


def typed() -> str:
    """Return the text of `cache/options.py`."""
    return HEAD + "".join(f"    {each.name}: {each.type}\n" for each in fields(config.CacheConfig))


def table() -> str:
    """Return the table of the settings, with the defaults that are values."""
    texts = config.described()
    rows = ["| setting | default | what it does |", "|---|---|---|"]
    for each in fields(config.CacheConfig):
        default = "" if each.default is None else f"`{each.default!r}`"
        rows.append(f"| `{each.name}` | {default} | {texts[each.name]} |")
    return "\n".join(rows)


if __name__ == "__main__":
    OPTIONS.write_text(typed())
    GUIDE.write_text(TABLE.sub(lambda _: table(), GUIDE.read_text()))
