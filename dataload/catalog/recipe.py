"""What a ledger writes of the calls that made a dataset, as JSON. See `dataload.lineage`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dataload.runtime.redact import without_credentials

Int64 = npt.NDArray[np.int64]

UNRECORDED: Final = "unrecorded"  # the key of what a ledger says of a value that it cannot hold
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
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(type(value).__name__)


def public_name(path: str) -> str:
    """Return a URL without credentials, or a local path that holds in any folder."""
    return without_credentials(path) if "://" in path or "::" in path else os.path.abspath(path)  # noqa: PTH100 (a link stays)


def rows_as_json(rows: npt.NDArray[Any], total: int) -> Any:
    """Return the rows of a call as text, such as "0-3, 7, 9-12"; a text about them under `UNRECORDED` if it is long.

    Args:
        rows: Numbers, negative ones from the end, or a mask.
        total: How many rows there were.
    """
    if rows.dtype == np.bool_:  # The borders of a mask are counted first, which takes no time.
        count, few = int(np.count_nonzero(rows)), np.count_nonzero(rows[1:] != rows[:-1]) <= MOST_CHARACTERS
        ascending = np.flatnonzero(rows) if few and count <= MOST_ROWS else None
    else:
        count = rows.size
        ascending = np.sort(rows.astype(np.int64) % total) if count <= MOST_ROWS else None
    text = "…" if ascending is None else _text(_runs(ascending), MOST_CHARACTERS)
    return {UNRECORDED: f"{count:,} rows"} if text.endswith("…") else text


def rows_of(text: str) -> Int64:
    """Return the numbers that `rows_as_json` has written, ascending.

    Raises:
        ValueError: It is no such text.
    """
    parts = [part.partition("-") for part in text.split(", ") if part]
    runs = [range(int(start), int(end or start) + 1) for start, _, end in parts]
    if sum(map(len, runs)) > MOST_ROWS:
        raise ValueError(f"more than {MOST_ROWS:,} rows")
    return np.concatenate([np.empty(0, np.int64), *(np.arange(run.start, run.stop) for run in runs)])


def ranges(numbers: Sequence[int] | npt.NDArray[Any], most: int = 4000) -> str:
    """Return the numbers in ascending order as text of at most `most` characters, such as "0-3, 7, 9-12"."""
    return _text(_runs(np.sort(np.asarray(numbers, np.int64))), most)


def _runs(ascending: Int64) -> Int64:
    """Return the first and the last of each run of consecutive numbers: int64 [runs, 2]."""
    cuts = np.flatnonzero(np.diff(ascending) > 1)
    firsts, lasts = np.append(0, cuts + 1), np.append(cuts, len(ascending) - 1)
    return np.stack((ascending[firsts], ascending[lasts]), axis=1) if len(ascending) else np.empty((0, 2), np.int64)


def _text(runs: Int64, most: int) -> str:
    texts, left = list[str](), most
    for start, end in runs[:most].tolist():
        text = f"{start}" if start == end else f"{start}-{end}"
        left -= len(text) + len(", ")
        if left < len("…"):
            return ", ".join([*texts, "…"])
        texts.append(text)
    return ", ".join(texts)
