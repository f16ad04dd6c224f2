"""Values of rows as commands show them."""

from __future__ import annotations

import math
from typing import Any

SHOWN_BYTES = 16  # of a binary value
SHOWN_CHARACTERS = 60  # of a value in text


def plain_value(value: Any) -> Any:
    """Return a value of a row as JSON can hold it."""
    if hasattr(value, "tolist") and not isinstance(value, memoryview):  # tensors and arrays
        value = value.tolist()
    if isinstance(value, (bytes, memoryview)):
        start = bytes(value[:SHOWN_BYTES]).hex()
        return f"<{len(value)} bytes: {start}{'…' * (len(value) > SHOWN_BYTES)}>"
    if isinstance(value, dict):
        return {str(name): plain_value(member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(member) for member in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)


def row_text(row: dict[str, Any]) -> str:
    """Return a row of such values in one line, long ones cut off."""
    texts = []
    for name, value in row.items():
        text = value if isinstance(value, str) else repr(value)
        texts.append(f"{name}={text[:SHOWN_CHARACTERS]}{'…' * (len(text) > SHOWN_CHARACTERS)}")
    return ", ".join(texts)
