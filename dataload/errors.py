"""The errors of this library. Each is a `DataloadError` and also the closest standard exception type."""


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


class RowError(DataError):
    """A value of a column cannot be used.

    Args:
        column: Name of the column.
        row: Number of the row in the column.
        reason: Says what is wrong, after the name of the row.

    Attributes:
        without_row: The message without the number of the row, which means nothing outside of the column.
    """

    def __init__(self, column: str, row: int, reason: str) -> None:
        super().__init__(column, row, reason)
        self.without_row = f"{column} {reason}"
        self._message = f"{column}: row {row} {reason}"

    def __str__(self) -> str:
        return self._message


class NonFiniteLoss(DataloadError, FloatingPointError):
    """A loss, or a parameter after a step, is NaN or infinite. The message names the step and the rank."""
