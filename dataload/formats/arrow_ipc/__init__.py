"""Arrow IPC through the cache, files (Feather too) and streams: each record batch is a row group.

Notes: the formats are defined in
https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
and its Message.fbs and File.fbs.
"""

from __future__ import annotations

from dataload.formats.arrow_ipc.messages import (
    CONTINUATION,
    FEATHER_1,
    MAGIC,
    PREFIX_BYTES,
    TRAILER_BYTES,
    Message,
    index_of_file,
    index_of_stream,
    message_bytes,
)
from dataload.formats.arrow_ipc.reader import ArrowFooter

__all__ = [
    "CONTINUATION",
    "FEATHER_1",
    "MAGIC",
    "PREFIX_BYTES",
    "TRAILER_BYTES",
    "ArrowFooter",
    "Message",
    "index_of_file",
    "index_of_stream",
    "message_bytes",
]
