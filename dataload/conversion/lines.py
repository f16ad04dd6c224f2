"""Sources of text: JSON lines and CSV, which pyarrow parses.

The files are read twice, the first time for the types: an integer column may have its first fraction in the last row.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa
from pyarrow import compute

from dataload.cache.blocks.reader import Object
from dataload.conversion.columns import reading
from dataload.conversion.source import Files, Part
from dataload.errors import DataError
from dataload.formats.arrow_types import children, with_members

Opened = Callable[[], Any]  # opens a file
Told = Callable[[Iterable[Any]], Iterator[Any]]  # yields what is read of a file, and tells of progress

CHUNK_BYTES = 16 << 20  # of JSON lines
BLOCK_BYTES = 4 << 20  # of CSV; a row must fit
WIDER = {pa.null(): pa.int64(), pa.int64(): pa.float64()}  # else text
EXACT = 1 << 53  # up to which float64 holds every whole number
DIGITS = 16  # that such a number has at least
LONG = re.compile(rf"\s*[+-]?\d{{{DIGITS},}}\s*")
LONG_IN_JSON = re.compile(rb"\d{%d}" % DIGITS)
Types = tuple[pa.Schema, set[str]]  # the columns, and the names of those with whole numbers that no float64 holds


class Lines:
    """Text files of one format.

    Args:
        files: The files.
        types: Returns the types of one file, given what opens it, its name, and what tells of progress.
        tables: Yields the tables of one file, given its stream, its name and the types of the columns of all files.
        else_text: Whether any column can be read as text.

    Raises:
        DataError: A file cannot be read.
    """

    def __init__(
        self,
        files: Files,
        types: Callable[[Opened, str, Told], Types],
        tables: Callable[[Any, str, pa.Schema], Iterator[pa.Table]],
        *,
        else_text: bool,
    ) -> None:
        self._files, self._tables = files, tables
        self._objects = [each for each in files.objects.values() if each.size]
        self.parts = [Part(each.name, each.size) for each in self._objects]
        self.schema = pa.schema([])
        exact: dict[str, str] = {}  # Columns with whole numbers that no float64 holds, and a file that has them.
        for each in self._objects:
            with reading(each.name):
                schema, names = types(partial(self._open, each), each.name, partial(files.told, num_bytes=each.size))
                self.schema = wider(self.schema, schema, each.name, else_text=else_text)
                exact |= dict.fromkeys(names, each.name)
        for name in exact:
            if not pa.types.is_floating(_at(self.schema, name)):
                continue
            if not else_text:
                raise DataError(
                    f"{exact[name]}: column {name!r} has whole numbers beyond 2**53, which would be rounded, because "
                    "other values need floats: write the column as text"
                )
            index = self.schema.get_field_index(name)
            self.schema = self.schema.set(index, pa.field(name, pa.string()))

    def read(self, part: int) -> Iterator[pa.Table]:
        each = self._objects[part]
        with reading(each.name), self._open(each) as stream:
            for table in self._tables(stream, each.name, self.schema):
                yield with_columns(table, self.schema)

    def _open(self, each: Object) -> Any:
        """Open a file, which may be compressed as its ending says."""
        return self._files.for_arrow.open_input_stream(each.path, buffer_size=1 << 20)


def json_lines(files: Files) -> Lines:
    """Return a source of JSON lines."""
    return Lines(files, _json_types, _json_tables, else_text=False)


def csv(files: Files) -> Lines:
    """Return a source of CSV; its columns are separated by commas, in files that end in .tsv by tabs."""
    return Lines(files, _csv_types, _csv_tables, else_text=True)


def wider(one: pa.Schema, other: pa.Schema, name: str, *, else_text: bool) -> pa.Schema:
    """Return the columns of both, each of a type that holds the values of both.

    Args:
        one: The columns of what was read before.
        other: Those of a file, or of a part of it.
        name: The file, for errors.
        else_text: Whether any column can be read as text.

    Raises:
        DataError: No type holds the values of a column.
    """
    fields = {field.name: field for field in one}
    for field in other:
        known = fields.get(field.name, field)
        kind = _common(known.type, field.type) or (pa.string() if else_text else None)
        if kind is None:
            raise DataError(
                f"{name}: column {field.name!r} is {field.type} here and {known.type} before: give it one type"
            )
        fields[field.name] = pa.field(field.name, kind)
    return pa.schema(list(fields.values()))


def _common(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return a type that holds the values of two types; None: there is none. What looks like a time is text, too."""
    for kinds in ((one, other), (_with_text(one), _with_text(other))):
        with suppress(pa.ArrowTypeError):
            schemas = [pa.schema([("", kind)]) for kind in kinds]
            return pa.unify_schemas(schemas, promote_options="permissive").types[0]
    return None


def _with_text(kind: pa.DataType) -> pa.DataType:
    """Return a type with text in place of times, at any depth."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    parts = [each.with_type(_with_text(each.type)) for each in children(kind)]
    return with_members(kind, parts) if parts else kind


def with_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table with all columns of a schema, null where it lacks one."""
    has = set(table.schema.names)
    nulls = table.num_rows
    columns = [
        table[field.name].cast(field.type) if field.name in has else pa.chunked_array([pa.nulls(nulls, field.type)])
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _at(schema: pa.Schema, name: str) -> pa.DataType:
    """Return the type of the values of a column, or of a field of it: `column.field`."""
    head, *rest = [name] if name in schema.names else name.split(".")
    kind = schema.field(head).type
    while rest or pa.types.is_list(kind):
        kind = kind.value_type if pa.types.is_list(kind) else kind.field(rest.pop(0)).type
    return kind


def _json_types(opened: Opened, name: str, told: Told) -> Types:
    schema, exact = pa.schema([]), set[str]()
    with opened() as stream:
        for chunk in told(_chunks(stream, name)):
            try:
                chunk.decode()  # pyarrow does not look, and other readers of Parquet would refuse the text.
            except UnicodeDecodeError as error:
                raise DataError(f"{name} is not UTF-8 ({error}): write it in UTF-8, such as by iconv") from error
            schema = wider(schema, _parsed(chunk, None).schema, name, else_text=False)
            for line in chunk.splitlines() if LONG_IN_JSON.search(chunk) else ():
                if LONG_IN_JSON.search(line):
                    exact |= {column for column, value in _numbers("", json.loads(line)) if _is_exact(value)}
    return schema, exact


def _numbers(name: str, value: Any) -> Iterator[tuple[str, int]]:
    """Yield the whole numbers in a value of JSON with the names of their columns, or `column.field`."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _numbers(f"{name}.{key}" if name else key, each)
    elif isinstance(value, list):
        for each in value:
            yield from _numbers(name, each)
    elif isinstance(value, int):
        yield name, value


def _is_exact(value: int) -> bool:
    """Return whether no float64 holds a whole number."""
    return abs(value) > EXACT and (value.bit_length() > 1000 or int(float(value)) != value)


def _json_tables(stream: Any, name: str, schema: pa.Schema) -> Iterator[pa.Table]:
    for chunk in _chunks(stream, name):
        yield _parsed(chunk, schema)


def _parsed(chunk: bytes, schema: pa.Schema | None) -> pa.Table:
    from pyarrow import json

    block = max(1 << 20, 2 * max(map(len, chunk.split(b"\n"))))  # A line must fit into two.
    options = json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error" if schema else "infer")
    return json.read_json(io.BytesIO(chunk), json.ReadOptions(block_size=block), options)


def _chunks(stream: Any, name: str) -> Iterator[bytes]:
    """Yield whole lines, some megabytes at a time."""
    rest = b""
    is_first = True
    while more := stream.read(CHUNK_BYTES):
        rest += more
        lines, mark, rest = rest.rpartition(b"\n")
        if is_first and (lines or rest).lstrip().startswith(b"["):
            fix = "convert it by jq -c '.[]' FILE > FILE.jsonl"
            raise DataError(f"{name} is one JSON array, and not an object a line: {fix}")
        is_first = False
        if lines.strip():
            yield lines + mark
    if rest.strip():
        yield rest


def _csv_types(opened: Opened, name: str, told: Told) -> Types:
    """Return the types that pyarrow infers from the first block, wider where a later value needs it."""
    with opened() as stream:
        found = _csv_reader(stream, name).schema
    kinds = {field.name: field.type for field in found}
    if twice := next((each for each in kinds if found.names.count(each) > 1), None):
        raise DataError(f"{name} has several columns called {twice!r}: rename them in its first line")
    exact: set[str] = set()
    with opened() as stream:
        for batch in told(_csv_reader(stream, name, dict.fromkeys(kinds, pa.string()), null_text=True)):
            for column, values in zip(batch.schema.names, batch.columns, strict=True):
                while not _holds(kinds[column], values):
                    kinds[column] = WIDER.get(kinds[column], pa.string())
                if kinds[column] in WIDER.values() and any(map(_is_exact, _long(values))):
                    exact.add(column)
    return pa.schema(list(kinds.items())), exact


def _long(values: pa.Array) -> Iterator[int]:
    """Yield the whole numbers of many digits in an array of text."""
    found = values.filter(compute.greater_equal(compute.utf8_length(values), DIGITS)).to_pylist()
    return (int(text) for text in found if LONG.fullmatch(text))


def _csv_tables(stream: Any, name: str, schema: pa.Schema) -> Iterator[pa.Table]:
    reader = _csv_reader(stream, name, {field.name: field.type for field in schema})
    for batch in reader:
        yield pa.Table.from_batches([batch])


def _csv_reader(
    stream: Any, name: str, kinds: Mapping[str, pa.DataType] | None = None, *, null_text: bool = False
) -> Any:
    from pyarrow import csv

    tabs = ".tsv" in name.rpartition("/")[2].lower()
    convert = csv.ConvertOptions(column_types=kinds, strings_can_be_null=null_text)
    read, parse = (
        csv.ReadOptions(block_size=BLOCK_BYTES),
        csv.ParseOptions(delimiter="\t" if tabs else ",", newlines_in_values=True),
    )
    return csv.open_csv(stream, read, parse, convert)


def _holds(kind: pa.DataType, values: pa.Array) -> bool:
    """Return whether a column of this type holds the values of text."""
    if pa.types.is_string(kind):
        return True
    if pa.types.is_null(kind):
        return bool(values.null_count == len(values))
    try:
        compute.utf8_trim_whitespace(values).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):  # the latter: Arrow casts no text to times of a day
        return False
    return True
