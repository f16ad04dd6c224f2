"""How the values of a dataset are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dataload.formats.text import TextErrors


@dataclass(frozen=True)
class ReadOptions:
    """What `make_dataset` was given about values.

    Args:
        fill_null: Replacement of nulls, for all columns or, as a mapping, by column; None: there is none.
        null_masks: Whether nulls that batches cannot hold are zeros, and columns mark them.
        errors: What to do about text that is not UTF-8.
    """

    fill_null: Any = None
    null_masks: bool = False
    errors: TextErrors = "raise"


USUAL = ReadOptions()
