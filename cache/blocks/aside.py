"""A reader of blocks that caches none."""

from __future__ import annotations

from dataload.cache.blocks.reader import Blocks


class Aside(Blocks):
    """A reader that uses cached blocks and caches no others, for data that is not needed again soon."""

    @property
    def retains_blocks(self) -> bool:
        return False
