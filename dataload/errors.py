"""What can go wrong. Every error is a `DataloadError`, and also the standard type that it is a case of."""


class DataloadError(Exception):
    """The root of every error raised on purpose by this library."""


class OriginError(DataloadError, OSError):
    """The origin (S3, HTTP, …) failed after retries. The message names the URL and the byte range."""


class OriginNotFound(OriginError, FileNotFoundError):
    """The origin answered that the bucket, prefix or object does not exist."""


class ObjectChanged(OriginError):
    """An object was replaced while it was being read; bytes of two versions are never mixed."""


class CorruptEntry(DataloadError, OSError):
    """A cached blob does not match its checksum."""


class ConfigError(DataloadError, ValueError):
    """An argument or a setting cannot work. The message says which one and what to use instead."""


class DataError(DataloadError, ValueError):
    """The data cannot be delivered as asked. The message names the file, row group and column."""


class NonFiniteLoss(DataloadError, FloatingPointError):
    """A loss, or a parameter after a step, is NaN or infinite. The message says at which step and on which rank."""
