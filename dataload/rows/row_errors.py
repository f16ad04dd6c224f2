"""Which errors are of a row, so that other rows may work."""

from __future__ import annotations

import torch

from dataload.errors import ConfigError, DataError
from dataload.runtime.exhaustion import is_exhaustion, with_causes


class UnmappedError(DataError):
    """A function of `map` failed with a row, whose error is stored in its place. The message is that error."""


def is_of_a_row(error: BaseException) -> bool:
    """Return whether other rows may work.

    They do not if memory, files or a disk ran out, if an accelerator failed, or if an argument is wrong.
    """
    accelerator = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)  # Older releases lack it.
    failed = (ConfigError, torch.OutOfMemoryError, accelerator)
    return not (is_exhaustion(error) or any(isinstance(each, failed) for each in with_causes(error)))
