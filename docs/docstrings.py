"""Our docstrings as Markdown: lines of `name: what it is` are a list."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ITEM = re.compile(r"([`*\w]+(?:[(][^)]*[)])?(?:, [`*\w]+)*): ")


class Docstrings(Extension):
    def on_instance(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    lines: list[str] = []
    in_item = False
    for line in text.splitlines():
        item = ITEM.match(line)
        if item and item[1] not in ("Notes", "Attributes"):
            lines += [] if in_item else [""]
            lines.append(f"- **{item[1]}**: {line[item.end() :]}")
            in_item = True
            continue
        if in_item and line and not line.startswith("    "):
            lines.append("")
            in_item = False
        in_item = in_item and bool(line)
        lines.append(line)
    return "\n".join(lines)
