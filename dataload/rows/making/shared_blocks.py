"""The cached blocks of files that row groups share, discarded once all of these row groups are cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.tier import BlobKey, Span
from dataload.catalog.manifest import Manifest
from dataload.errors import DataloadError
from dataload.runtime.cached_property import cached_property

Spans = Callable[[Sequence[int]], list[list[Span]] | None]


class SharedBlocks:
    """The cached blocks of small row groups, which their files' neighbours share.

    Args:
        manifest: The dataset.
        blocks: Reader of the dataset's files, and the cache.
    """

    def __init__(self, manifest: Manifest, blocks: Blocks) -> None:
        self._manifest = manifest
        self._blocks = blocks
        self._blocks_of: dict[int, set[int]] = {}  # by row group
        self._users: dict[tuple[Object, int], list[int]] = {}  # the row groups of a block

    def discard(self, number: int, keys: Callable[[int], list[BlobKey]], spans: Spans) -> None:
        """Discard each block of a row group that was made if the blobs of all row groups in the block are cached.

        Args:
            number: The row group.
            keys: Returns the keys of the blobs of a row group.
            spans: Returns the byte ranges that each of these row groups of one file shares with its neighbours, or
                None if they are not all of the file.
        """
        file = self._manifest.row_groups[number].file
        if not self._blocks.retains_blocks or len(self._numbers[file]) == 1:
            return
        if number not in self._blocks_of:
            with suppress(DataloadError):  # A footer that was evicted may have to be fetched.
                self._look_up(file, spans)
        for block in self._blocks_of.get(number, ()):
            # The last one first: it is usually made last.
            made = (key for user in reversed(self._users[file, block]) for key in keys(user))
            self._blocks.discard(file, block, made)

    @cached_property
    def _numbers(self) -> dict[Object, list[int]]:
        """The row groups of each file."""
        numbers: dict[Object, list[int]] = {}
        for number, group in enumerate(self._manifest.row_groups):
            numbers.setdefault(group.file, []).append(number)
        return numbers

    def _look_up(self, file: Object, spans: Spans) -> None:
        """Look up the blocks of a file's row groups. A file of which the dataset lacks row groups keeps its blocks."""
        users: dict[tuple[Object, int], list[int]] = {}
        blocks_of: dict[int, set[int]] = {}
        numbers = self._numbers[file]
        for number, shared in zip(numbers, spans(numbers) or [[]] * len(numbers), strict=True):
            # Nothing loads a row group without rows.
            blocks_of[number] = self._blocks.numbers(shared if self._manifest.row_groups[number].rows else [])
            for block in blocks_of[number]:
                users.setdefault((file, block), []).append(number)
        self._users.update(users)
        self._blocks_of.update(blocks_of)  # last: other threads look here first
