"""Thrift's compact protocol, to plant in a Parquet footer what no writer puts there.

A struct is a dict: by number, the type and value of each field. A list is the type of its elements, and these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BOOLEANS, BYTE, INTEGERS, DOUBLE, BINARY, LISTS = {1, 2}, 3, {4, 5, 6}, 7, 8, {9, 10}
Struct = dict[int, tuple[int, Any]]


def with_footer(data: bytes, change: Callable[[Struct], None]) -> bytes:
    """Return a Parquet file whose footer was changed in place."""
    size = int.from_bytes(data[-8:-4], "little")
    footer = fields_of(data[-8 - size : -8])
    change(footer)
    return data[: -8 - size] + with_length(written(footer))


def with_length(footer: bytes) -> bytes:
    """Return the end of a Parquet file: its footer and what follows."""
    return footer + len(footer).to_bytes(4, "little") + b"PAR1"


def fields_of(footer: bytes) -> Struct:
    """Return the fields of a footer."""
    return _Reader(footer).struct()


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._bytes = iter(data)

    def struct(self) -> Struct:
        found: Struct = {}
        number = 0
        while head := next(self._bytes):
            number = number + (head >> 4) if head >> 4 else self._varint() >> 1
            found[number] = head & 15, self._value(head & 15)
        return found

    def _value(self, kind: int) -> Any:
        if kind in BOOLEANS:
            return None
        if kind in (BYTE, DOUBLE):
            return self._take(1 if kind == BYTE else 8)
        if kind in INTEGERS:
            return self._varint()
        if kind == BINARY:
            return self._take(self._varint())
        if kind in LISTS:
            head = next(self._bytes)
            size = self._varint() if head >> 4 == 15 else head >> 4
            element = head & 15
            return element, [self._value(BYTE if element in BOOLEANS else element) for _ in range(size)]
        return self.struct()

    def _take(self, size: int) -> bytes:
        return bytes(next(self._bytes) for _ in range(size))

    def _varint(self) -> int:
        byte = next(self._bytes)
        return byte if byte < 128 else (byte & 127) | self._varint() << 7


def written(fields: Struct, *, short: bool = False) -> bytes:
    """Return a footer. short: whether heads of fields have one byte, as writers write them."""
    parts, last = list[bytes](), 0
    for number, (kind, value) in sorted(fields.items()):
        step = number - last if short else 0
        parts += [bytes([step << 4 | kind]) if 0 < step < 16 else bytes([kind]) + _varint(number << 1)]
        parts += [_value(kind, value, short=short)]
        last = number
    return b"".join(parts) + b"\0"


def _value(kind: int, value: Any, *, short: bool) -> bytes:
    if kind in BOOLEANS:
        return b""
    if kind in (BYTE, DOUBLE):
        return bytes(value)
    if kind in INTEGERS:
        return _varint(value)
    if kind == BINARY:
        return _varint(len(value)) + value
    if kind in LISTS:
        element, values = value
        each = BYTE if element in BOOLEANS else element
        head = bytes([len(values) << 4 | element]) if short and len(values) < 15 else b""
        head = head or bytes([0xF0 | element]) + _varint(len(values))
        return head + b"".join(_value(each, item, short=short) for item in values)
    return written(value, short=short)


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)
