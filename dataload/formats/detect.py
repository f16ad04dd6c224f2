"""The registry of file formats, and detection of a file's format by its first and last bytes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import NamedTuple

from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.origin.explanation import amazon_hint
from dataload.errors import DamagedError, DataError
from dataload.formats import parquet
from dataload.formats.arrow_ipc import messages
from dataload.formats.arrow_ipc.reader import ArrowFooter
from dataload.formats.base import Footer
from dataload.formats.table_columns import TableFile, with_table_names

# The part of a file that is fetched for its footer: a 64th of it, so that small files are not fetched whole.
LEAST_TAIL_BYTES, MOST_TAIL_BYTES, TAIL_SHARE = 8 << 10, 64 << 10, 64
FIRST_BYTES = 64  # by which files without a footer are recognised
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype|html|\?xml|head)", re.IGNORECASE)
CONVERT = "convert images, JSON lines, CSV, MDS, LitData or tar by dataload convert"
LENGTH_BYTES = 4  # of the length before the magic
MARK_BYTES = 8


class Format(NamedTuple):
    """A format whose files end in a footer, its length (u32, little-endian) and a magic.

    Attributes:
        magic: The last bytes of a file, and of the bytes that `pack` returns.
        parse: parse(packed, obj) returns the footer in these bytes. It raises DataError if they cannot be read.
        pack: pack(obj, blocks, footer) returns the bytes to cache for a file that ends in `footer`.
        requests: requests(obj, packed, tail) returns the bytes of each request beside that for the last `tail` bytes.
        keeps_files: Whether a small file of a store is cached whole in place of its footer, so that its rows need no
            request.
    """

    magic: bytes
    parse: Callable[[memoryview, Object], Footer]
    pack: Callable[[Object, Blocks, bytes], bytes] = lambda _obj, _blocks, footer: footer
    requests: Callable[[Object, memoryview, int], list[int]] = lambda _, packed, tail: [len(packed) - tail]
    keeps_files: bool = False


FORMATS = (
    Format(parquet.MAGIC, parquet.ParquetFooter.from_bytes, keeps_files=True),
    Format(messages.MAGIC, ArrowFooter.from_bytes, messages.index_of_file, messages.requests),
)


def format_of(packed: memoryview) -> Format | None:
    """Return the format of the bytes that `fetch_footer` returned; None for other bytes."""
    return next((known for known in FORMATS if bytes(packed[-len(known.magic) :]) == known.magic), None)


def parse_footer(packed: memoryview, obj: Object) -> Footer:
    """Return the footer in the bytes that `fetch_footer` returned. Raise DataError if they cannot be read."""
    found = format_of(packed)
    if found is None:
        raise DataError(f"{obj.name} has a footer of no known format")
    if found.keeps_files and len(packed) == obj.size:
        packed = memoryview(bytes(packed))  # A blob that is cut short under its mapping would end the process later.
        footer = _parsed(packed[-_footer_bytes(packed, found) :], obj, found)
        footer.file = packed
    else:
        footer = _parsed(packed, obj, found)
    footer.mark = hashlib.blake2b(packed, digest_size=MARK_BYTES).hexdigest()
    return footer


def _footer_bytes(end: bytes | memoryview, found: Format) -> int:
    """Return the size of a file's footer with its length and magic, given the last bytes of the file."""
    trailer = LENGTH_BYTES + len(found.magic)
    return int.from_bytes(end[-trailer:][:LENGTH_BYTES], "little") + trailer


def _parsed(packed: memoryview, obj: Object, found: Format) -> Footer:
    if not isinstance(obj, TableFile):
        return found.parse(packed, obj)
    if found.magic != parquet.MAGIC:
        raise DataError(f"{obj.name} is an Arrow file of a table: only Parquet files of tables are read")
    packed, renamed = with_table_names(packed, obj)
    footer = parquet.ParquetFooter.from_bytes(packed, obj)
    footer.renamed = renamed
    return footer


def tail_bytes(obj: Object) -> int:
    """Return how many bytes at a file's end the first request for its footer fetches."""
    return min(obj.size, MOST_TAIL_BYTES, max(LEAST_TAIL_BYTES, obj.size // TAIL_SHARE))


def fetched_beside_tail(obj: Object, packed: memoryview) -> list[int]:
    """Return the bytes of each further request that a file's footer took."""
    found = format_of(packed)
    return [] if found is None else [size for size in found.requests(obj, packed, tail_bytes(obj)) if size > 0]


def fetch_footer(obj: Object, blocks: Blocks) -> bytes:
    """Return the bytes of a file's footer: Parquet's own, or the packed metadata of Arrow messages.

    A small Parquet file of a store, which the first request fetches whole, is returned whole.

    Raises:
        DataError: The file is empty, or neither Parquet nor Arrow IPC.
        OriginError: The origin failed.
    """
    if not obj.size:
        raise DataError(f"{obj.name} is empty, or a link to a missing file: remove it, or write it again")
    start = max(0, obj.size - tail_bytes(obj))
    tail = bytes(blocks.origin.read(obj.path, start, obj.size, obj.version))
    for known in FORMATS:
        if tail.endswith(known.magic) and len(tail) >= LENGTH_BYTES + len(known.magic):
            size = _footer_bytes(tail, known)
            if size > obj.size:
                raise DamagedError(
                    f"{obj.name} is cut short: its footer says {size} bytes, and the object has {obj.size}: write it "
                    "again"
                )
            if size > len(tail):
                tail = bytes(blocks.origin.read(obj.path, obj.size - size, start, obj.version)) + tail
            is_kept = known.keeps_files and len(tail) == obj.size and not blocks.origin.is_local
            return tail if is_kept else known.pack(obj, blocks, tail[-size:])
    if tail.endswith(parquet.ENCRYPTED_MAGIC):
        raise DataError(f"{obj.name} {parquet.ENCRYPTED}")
    if tail.endswith(messages.FEATHER_1):
        raise DataError(f"{obj.name} is Feather of version 1: rewrite it with pyarrow.feather.write_feather")
    first = bytes(blocks.read(obj, 0, min(obj.size, FIRST_BYTES)))
    is_stream = first.startswith(messages.CONTINUATION) and len(first) >= messages.PREFIX_BYTES
    if is_stream or messages.is_old_stream(obj, blocks):
        return messages.index_of_stream(obj, blocks)
    raise _foreign(obj, first)


def _foreign(obj: Object, first: bytes) -> DataError:
    """Return the error of a file without a footer, given its first bytes. The store may have sent wrong ones."""
    for kind, magic in (("a Parquet", parquet.MAGIC), ("an Arrow", messages.MAGIC)):
        if first.startswith(magic):
            return DamagedError(f"{obj.name} begins as {kind} file, and its end is missing: write it again")
    if first.startswith(LFS_POINTER):
        return DataError(f"{obj.name} is a pointer of Git LFS, not the file: fetch the files by git lfs pull")
    if PAGE.match(first):
        return DamagedError(
            f"{obj.name} is a web page or an answer in XML, no data file: open its URL, and name the file itself"
            f"{amazon_hint(obj.name)}"
        )
    return DamagedError(f"{obj.name} is not a Parquet file, nor Arrow IPC: name the files with a glob, or {CONVERT}")
