"""The encrypted columns of a Parquet file whose footer is in plain text.

pyarrow does not tell them: asked for the metadata of one, it aborts the process.

Notes: https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift and
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md define what is read here.
"""

from __future__ import annotations

from collections.abc import Iterator

ROW_GROUPS, COLUMNS, CRYPTO_METADATA = 4, 1, 8  # fields of FileMetaData, RowGroup and ColumnChunk
BOOLEANS, BYTE, INTEGERS, DOUBLE, BINARY, LISTS, STRUCT = {1, 2}, 3, {4, 5, 6}, 7, 8, {9, 10}, 12  # types
FIXED_BYTES = {BYTE: 1, DOUBLE: 8}


def encrypted_leaves(footer: memoryview) -> frozenset[int]:
    """Return the numbers of the leaf columns that are encrypted in a row group of a file.

    Raises:
        ValueError: The bytes are no footer.
        IndexError: They are cut short.
    """
    thrift, found = _Thrift(footer), set[int]()
    for _ in thrift.members(ROW_GROUPS):
        for leaf, _ in enumerate(thrift.members(COLUMNS)):
            for field, kind in thrift.fields():
                if field == CRYPTO_METADATA:
                    found.add(leaf)
                thrift.skip(kind)
    return frozenset(found)


class _Thrift:
    """A reader of Thrift's compact protocol, which skips what nobody asks for."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def fields(self) -> Iterator[tuple[int, int]]:
        """Yield the number and the type of each field of a struct. The caller reads or skips each."""
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._zigzag()
            yield number, head & 15

    def members(self, wanted: int) -> Iterator[None]:
        """Yield once for each struct of the list in the field `wanted` of a struct. The caller reads each."""
        for number, kind in self.fields():
            if number == wanted and kind in LISTS:
                for _ in range(self._list()[0]):
                    yield
            else:
                self.skip(kind)

    def skip(self, kind: int) -> None:
        """Skip the value of a field."""
        if kind in BOOLEANS:
            return  # The type is the value.
        if kind in INTEGERS:
            self._varint()
        elif kind in FIXED_BYTES:
            self._position += FIXED_BYTES[kind]
        elif kind == BINARY:
            size = self._varint()
            self._position += size
        elif kind in LISTS:
            size, element = self._list()
            for _ in range(size):
                self.skip(BYTE if element in BOOLEANS else element)
        elif kind == STRUCT:
            for _, member in self.fields():
                self.skip(member)
        else:
            raise ValueError(f"a field of Thrift's type {kind}")  # No part of a footer has a map.

    def _list(self) -> tuple[int, int]:
        """Return the size of a list and the type of its elements."""
        head = self._byte()
        return (self._varint() if head >> 4 == 15 else head >> 4), head & 15

    def _byte(self) -> int:
        self._position += 1
        return self._data[self._position - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
