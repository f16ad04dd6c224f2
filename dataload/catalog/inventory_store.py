"""Where inventories are kept for states that outlive the datasets: this process, the cache, checkpoints, ledgers.

Those of all sources of a loader are kept together, under the digest of their order.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from dataload.cache.blocks.reader import Blocks, Object
from dataload.catalog.footer_cache import Metadata
from dataload.catalog.inventory import Inventory
from dataload.catalog.selection import Selection
from dataload.errors import ConfigError
from dataload.runtime.decompression import decompressed

VERSION: Final = 3  # of cached inventories
KEPT: Final = 64  # of this process
MOST_BYTES: Final = 1 << 30  # those of a billion rows have a bit for each
MOST_TEXT: Final = 1 << 28  # of the names of their files
MOST_ROWS: Final = 1 << 36
KINDS: Final = (str, int, str, int, int)  # of a key, and of a number of rows

_kept: OrderedDict[str, bytes] = OrderedDict()  # by digest, the latest last


def keep(digest: str, inventories: Iterable[Inventory], blocks: Blocks) -> None:
    """Keep inventories, by the cache also for later processes of this host."""
    data = to_bytes(inventories)
    _cached(digest, blocks).put(lambda: data)
    _keep(digest, data)


def is_kept(digest: str) -> bool:
    """Return whether this process has inventories. It then keeps them for longer than others."""
    if digest in _kept:
        _kept.move_to_end(digest)
    return digest in _kept


def recorded(digest: str, blocks: Blocks) -> Iterator[list[Inventory]]:
    """Yield the inventories that this process has, and those of the cache. Their digest is not checked."""
    if digest in _kept:
        yield from_bytes(_kept[digest])
    if (cached := _cached(digest, blocks).get()) is not None:
        yield cached


def forget(digest: str) -> None:
    """Forget inventories in this process, which have another digest."""
    _kept.pop(digest, None)


def as_text(digests: Iterable[str]) -> dict[str, str]:
    """Return the inventories that this process has as text, for checkpoints."""
    return {each: base64.b64encode(_kept[each]).decode() for each in digests if each in _kept}


def learn(texts: Mapping[str, str]) -> None:
    """Keep the inventories that `as_text` returned in this process. Raise ConfigError for others."""
    for digest, text in texts.items():
        try:
            data = base64.b64decode(text, validate=True)
            from_bytes(data)
        except ValueError as error:
            raise ConfigError(f"the inventory of {digest} cannot be read: {error}") from error
        _keep(digest, data)


def _keep(digest: str, data: bytes) -> None:
    _kept[digest] = data
    _kept.move_to_end(digest)
    while len(_kept) > KEPT:
        _kept.popitem(last=False)


def _cached(digest: str, blocks: Blocks) -> Metadata[list[Inventory]]:
    return Metadata(blocks, Object("inventories", 0, digest), f"inventory {VERSION}", from_bytes)


def to_bytes(inventories: Iterable[Inventory]) -> bytes:
    """Return the inventories of all sources of a loader as bytes, without credentials.

    They are compressed: a line of JSON, which has the row groups of each source and the bytes of its selection, and
    then the selections.
    """
    sources, selections = [], []
    for each in inventories:
        files: dict[tuple[str, int, str], list[list[int]]] = {}
        for (path, size, version, number), rows in zip(each.keys, each.lengths.tolist(), strict=True):
            files.setdefault((path, size, version), []).append([number, rows])
        selections.append(b"" if each.selection is None else each.selection.to_bytes())
        sources.append(
            [each.order_key, each.window, [[*file, groups] for file, groups in files.items()], len(selections[-1])]
        )
    return zlib.compress(b"\n".join([json.dumps(sources, separators=(",", ":")).encode(), b"".join(selections)]))


def from_bytes(data: bytes | memoryview) -> list[Inventory]:
    """Return what `to_bytes` wrote. Raise ValueError for other bytes."""
    try:
        content = decompressed(data, MOST_BYTES)
        end = content.find(b"\n", 0, MOST_TEXT)
        if end < 0:
            raise ValueError(f"no line of JSON in {MOST_TEXT:,} bytes")
        found, start = [], end + 1
        for order_key, window, files, size in json.loads(content[:end]):
            if [type(order_key), type(window), type(size)] != [str, int, int]:
                raise ValueError("a source with other values than its key, its window and the bytes of its selection")
            if not 0 <= size <= len(content) - start:
                raise ValueError("a selection that is cut short")
            inventory = _inventory(order_key, files, memoryview(content)[start : start + size])
            found.append(replace(inventory, window=window))
            start += size
    except (TypeError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"no inventories ({error})") from error
    return found


def _inventory(order_key: str, files: Any, chosen: memoryview) -> Inventory:
    """Return the inventory of these files. chosen: the selection of their rows; b"": all."""
    groups = [(path, size, version, number, rows) for path, size, version, of in files for number, rows in of]
    columns = list(zip(*groups, strict=True)) or [()] * len(KINDS)
    if any(type(value) is not kind for kind, column in zip(KINDS, columns, strict=True) for value in column):
        raise ValueError("a file with other values than its name, size and version")
    lengths = np.array(columns[-1], np.int64)
    if lengths.min(initial=0) < 0 or sum(columns[-1]) > MOST_ROWS:
        raise ValueError(f"row groups of a negative number of rows, or of more than {MOST_ROWS:,}")
    selection = Selection.from_bytes(chosen, lengths.tolist()) if chosen else None
    return Inventory(order_key, tuple(group[:4] for group in groups), lengths, selection)
