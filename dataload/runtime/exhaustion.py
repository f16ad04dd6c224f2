"""Exceptions that say that memory, open files or a disk ran out."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

_ERRNOS = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT)
# torch, OpenCV and the codecs of Pillow tell only by the text that memory is short.
_TEXT = re.compile("out of memory|(allocate|enough|insufficient) memory", re.IGNORECASE)


def is_exhaustion(error: BaseException) -> bool:
    """Return whether a resource of the process ran out, according to an exception or one of its causes."""
    return any(_says_so(each) for each in with_causes(error))


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its `__cause__`, the cause of that one, and so on."""
    cause, seen = error.__cause__, {id(error)}
    yield error
    while cause is not None and id(cause) not in seen:  # `raise error from error` makes a cycle.
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def _says_so(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _ERRNOS
    # The text of other types, such as ValueError, may quote data.
    tells_by_text = isinstance(error, OSError | RuntimeError) or type(error).__module__ == "cv2"
    return isinstance(error, MemoryError) or (tells_by_text and _TEXT.search(str(error)) is not None)
