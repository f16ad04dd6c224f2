"""The errors of this library. Each is a `DataloadError` and also the closest standard exception type."""

from __future__ import annotations

import pickle


class DataloadError(Exception):
    """The base class of every error that this library raises on purpose."""


class OriginError(DataloadError, OSError):
    """The origin (S3, HTTP, …) failed after retries. The message names the URL and the byte range."""


class OriginNotFound(OriginError, FileNotFoundError):
    """The origin answered that the bucket, prefix or object does not exist."""


class ObjectChanged(OriginError):
    """An object was replaced while it was being read. Bytes of two versions are never mixed."""


class CorruptEntry(DataloadError, OSError):
    """A cached blob does not match its checksum."""


class ConfigError(DataloadError, ValueError):
    """An argument or a setting cannot work. The message names it and says what to use instead."""


class DataError(DataloadError, ValueError):
    """The data cannot be delivered as requested. The message names the file, row group and column."""


class DamagedError(DataError):
    """The bytes of a row group or footer are no such data. The store may have sent others than it holds."""


class RowError(DataError):
    """A value of a column cannot be used.

    A DataLoader of torch makes the exception of a worker again from its message alone.

    Args:
        message: The message.
        without_row: The message without the number of the row, which means nothing outside of the column.
        row: The number of the row in the column, if the message has it.
        rows: The length of the column.

    Attributes:
        without_row: As above.
        row: As above.
        rows: As above.
    """

    def __init__(
        self, message: str, without_row: str | None = None, row: int | None = None, rows: int | None = None
    ) -> None:
        super().__init__(message)
        self.without_row = message if without_row is None else without_row
        self.row = row
        self.rows = rows

    @classmethod
    def of(cls, column: str, row: int, rows: int, reason: str) -> RowError:
        """Return the error of a row of a column of `rows` rows. reason: says what is wrong, after the row's name."""
        return cls(f"{column}: row {row} {reason}", f"{column} {reason}", row, rows)


class NonFiniteLoss(DataloadError, FloatingPointError):
    """A loss, or a parameter after a step, is NaN or infinite. The message names the step and the rank."""


class LossSpike(DataloadError, ArithmeticError):
    """A loss is far above those before it, and `fit` was told to raise. The message names the step and the rank."""


def as_sent(error: Exception) -> Exception | None:
    """Return the error as another process receives it, or None if it cannot be pickled."""
    try:
        received: Exception = pickle.loads(pickle.dumps(error))  # noqa: S301 (ours)
    except Exception:  # noqa: BLE001 (pickling an arbitrary class may raise anything)
        return None
    return received
