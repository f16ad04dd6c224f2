"""What made a dataset, as data: the calls of `make_dataset` and of the methods of datasets, for the ledger of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dataload.runtime.redact import without_credentials

Recipe = tuple[Mapping[str, Any], ...]
"""The calls, in order: each a mapping with the name of the function and what a second call needs, as JSON has it."""

UNRECORDED: Final = "unrecorded"  # the key of what a recipe says of a value that it cannot hold
MOST_CHARACTERS = 2000  # of the row numbers of a call
MOST_ROWS = 1 << 24  # that a call names, to be recorded: a look at more takes long


def plain(value: Any) -> Any:
    """Return a value as JSON has it; a text about it under `UNRECORDED` if it cannot."""
    try:
        found = json.loads(json.dumps(value, default=_plain, allow_nan=False))
    except (TypeError, ValueError):
        return {UNRECORDED: without_credentials(" ".join(str(value).split()))[:200]}
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(type(value).__name__)


def public_name(path: str) -> str:
    """Return a URL without credentials, or a local path that holds in any folder."""
    return without_credentials(path) if "://" in path or "::" in path else os.path.abspath(path)  # noqa: PTH100 (a link stays)


def changed_from(usual: Mapping[str, Any], how: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are not the usual ones; None, where there is none."""
    return {name: value for name, value in how.items() if value != usual.get(name)}


def rows_text(rows: npt.NDArray[Any], total: int) -> Any:
    """Return the numbers of rows, or those of a mask, as text; a text about them if there are too many."""
    is_mask = rows.dtype == np.bool_
    # The borders of a mask are counted first, which takes no time.
    parts, most = (np.count_nonzero(rows[1:] != rows[:-1]), MOST_CHARACTERS) if is_mask else (rows.size, MOST_ROWS)
    if parts <= most:
        numbers = np.flatnonzero(rows) if is_mask else rows.astype(np.int64) % total
        text = ranges(numbers, MOST_CHARACTERS)
        if not text.endswith("…"):
            return text
    return {UNRECORDED: f"{np.count_nonzero(rows) if is_mask else rows.size:,} rows"}


def rows_of(text: str) -> npt.NDArray[np.int64]:
    """Return the numbers that `rows_text` has written, ascending.

    Raises:
        ValueError: It is no such text.
    """
    parts = [np.empty(0, np.int64)]
    for part in filter(None, text.split(", ")):
        start, _, end = part.partition("-")
        if int(end or start) - int(start) > MOST_ROWS:
            raise ValueError(f"{part} has too many rows")
        parts.append(np.arange(int(start), int(end or start) + 1))
    return np.concatenate(parts)


def ranges(numbers: Sequence[int] | npt.NDArray[Any], most: int = 4000) -> str:
    """Return the numbers in ascending order as text of at most `most` characters, such as "0-3, 7, 9-12"."""
    ordered = np.asarray(numbers)
    if not len(ordered):
        return ""
    if (ordered[1:] < ordered[:-1]).any():
        ordered = np.sort(ordered)
    ends = np.append(np.flatnonzero(np.diff(ordered) > 1), len(ordered) - 1)[:most]
    texts, left = list[str](), most
    for start, end in zip(ordered[np.append(0, ends[:-1] + 1)], ordered[ends], strict=True):
        text = f"{start}" if start == end else f"{start}-{end}"
        left -= len(text) + len(", ")
        if left < len("…"):
            return ", ".join([*texts, "…"])
        texts.append(text)
    return ", ".join(texts)
