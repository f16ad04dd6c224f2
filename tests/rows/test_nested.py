"""Batches of nested columns equal `to_pylist()`; with ragged="flat" they are the same values, flat."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from decoded import gather, plain, whole
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from nightly import NIGHTLY
from row_groups import load

from dataload import CacheConfig, make_dataset, make_loader
from dataload.catalog.locations import Location
from dataload.catalog.preview import first_rows
from dataload.errors import ConfigError, DataError
from dataload.formats import parquet
from dataload.formats.arrow_arrays import plain as plain_array
from dataload.formats.arrow_types import portable
from dataload.formats.schema import Layout, fields_of
from dataload.loader.worker_transport import pack, unpack
from dataload.rows import row_group_plan
from dataload.rows.batch_tree import map_tensors
from dataload.rows.collate import Flat, cut, to_batch
from dataload.rows.numbered_rows import NumberedRows
from dataload.rows.row_block import Records
from dataload.train.batch_size import find_batch_size

EXAMPLES = 2000 if NIGHTLY else 50

LEAVES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.null(): st.none(),
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-128, 127),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.float32(): st.floats(allow_nan=False, width=32),
    pa.float64(): st.floats(allow_nan=False),
    pa.string(): st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    pa.large_string(): st.text("aé€😀", max_size=20),
    pa.string_view(): st.text("aé€😀", max_size=20),
    pa.binary(): st.binary(max_size=5),
    pa.large_binary(): st.binary(max_size=5),
    pa.binary_view(): st.binary(max_size=20),
    pa.binary(3): st.binary(min_size=3, max_size=3),
    pa.dictionary(pa.int8(), pa.string()): st.sampled_from(["a", "b", "ccc"]),
    pa.date32(): st.dates(date(1900, 1, 1), date(2100, 1, 1)),
    pa.time64("us"): st.times(),
    pa.timestamp("us"): st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1)),  # noqa: DTZ001 (the type has no zone)
    pa.timestamp("ms", "UTC"): st.integers(-(10**12), 10**12),
    pa.duration("us"): st.timedeltas(timedelta(-9999), timedelta(9999)),
    pa.decimal128(9, 3): st.integers(-(10**8), 10**8).map(lambda number: Decimal(number) / 1000),
}
KEYS = [pa.string(), pa.int64(), pa.large_string()]


def nested(depth: int, *, views: bool) -> st.SearchStrategy[pa.DataType]:
    """Return types of at most this depth, with or without the types of lists that Parquet lacks."""
    # Arrow cannot write slices of views of bytes to Parquet, and no views of lists.
    leaves = st.sampled_from([kind for kind in LEAVES if views or kind not in (pa.string_view(), pa.binary_view())])
    if depth == 0:
        return leaves
    inner = nested(depth - 1, views=views)
    lists = [pa.list_, pa.large_list, *([pa.list_view, pa.large_list_view] if views else [])]
    sizes = st.integers(1, 2)
    return st.one_of(
        leaves,
        st.builds(lambda make, kind: make(kind), st.sampled_from(lists), inner),
        st.builds(lambda kind, size: pa.list_(kind, size), inner, sizes),
        st.builds(
            lambda kinds: pa.struct(list(zip("abc", kinds, strict=False))), st.lists(inner, min_size=1, max_size=3)
        ),
        st.builds(pa.map_, st.sampled_from(KEYS), inner),
    )


def columns(depth: int, *, views: bool) -> st.SearchStrategy[pa.DataType]:
    """Return types of columns of Python values."""
    kinds = nested(depth - 1, views=views)
    return st.one_of(
        kinds.map(pa.list_), kinds.map(pa.large_list), kinds.map(lambda kind: pa.map_(pa.string(), kind))
    ).filter(lambda kind: fields_of(pa.schema([("c", kind)]))[0].kind == "nested")


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Return values of a type, as pyarrow accepts them, with nulls at every depth."""
    types = pa.types
    if types.is_struct(kind):
        found = st.fixed_dictionaries({field.name: values_of(field.type) for field in kind})
    elif types.is_map(kind):
        found = st.lists(st.tuples(LEAVES[kind.key_type], values_of(kind.item_type)), max_size=2)
    elif types.is_fixed_size_list(kind):
        found = st.lists(values_of(kind.value_type), min_size=kind.list_size, max_size=kind.list_size)
    elif kind in LEAVES:
        found = LEAVES[kind]
    else:
        found = st.lists(values_of(kind.value_type), max_size=3)
    return st.none() | found


def test_a_struct_without_members(tmp_path: Path) -> None:
    empty = pa.struct([])
    members = pa.struct([("e", empty), ("x", pa.int64())])
    table = pa.table(
        {
            "e": pa.array([{}, None, {}], empty),
            "s": pa.array([{"e": {}, "x": 1}, {"e": None, "x": 2}, {"e": {}, "x": 3}], members),
            "l": pa.array([[{}, None], None, []], pa.list_(empty)),
        }
    )
    expected = {"e": [{}, None, {}], "s.e": [{}, None, {}], "l": [[{}, None], None, []]}
    with pa.ipc.new_file(tmp_path / "x.arrow", table.schema) as writer:
        writer.write_table(table)
    dataset = make_dataset(tmp_path, cache=False)
    assert dataset.schema.names == ["e", "s.e", "s.x", "l"]
    batch = dataset.__getitems__(range(3)).columns
    assert {name: batch[name] for name in expected} == expected
    assert batch["s.x"].tolist() == [1, 2, 3]
    flat = next(iter(make_loader(dataset, 3, shuffle=False, ragged="flat")))
    assert (flat["e"], flat["l"].values) == (expected["e"], [{}, None])
    assert dataset.filter(pc.field("e").is_valid()).__getitems__([0, 1]).columns["e"] == [{}, {}]
    rows = first_rows(dataset.manifest, dataset.schema.names, dataset.blocks, 3)
    assert [row["s.e"] for row in rows] == expected["s.e"]


def test_an_empty_dictionary_in_a_null_struct() -> None:
    kind = pa.struct([("a", pa.dictionary(pa.int8(), pa.string()))])
    assert whole(pa.table({"c": pa.array([[None], []], pa.list_(kind))})) == {"c": [[None], []]}
    assert whole(pa.table({"c": pa.array([None], kind)})) == {"c.a": [None]}


class Private(pa.ExtensionType):
    """A type that one process of a job has registered, and another one has not."""

    def __init__(self) -> None:
        super().__init__(pa.list_(pa.int32()), "private")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Private:
        return cls()


class Point(pa.ExtensionType):
    """A type with members."""

    def __init__(self) -> None:
        super().__init__(
            pa.struct([("x", pa.int64()), ("name", pa.string()), ("tags", pa.list_(pa.string()))]), "point"
        )

    def __hash__(self) -> int:
        return hash(self.extension_name)

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Point:
        return cls()


def test_members_of_an_extension_type_are_chosen_alone(tmp_path: Path) -> None:
    """Arrow cannot make a value of an extension type of some of its members."""
    rows = [{"x": number, "name": "a name" * 10, "tags": ["a"]} for number in range(100)]
    points = pa.ExtensionArray.from_storage(Point(), pa.array(rows, Point().storage_type))
    structs = pa.StructArray.from_arrays([points, pa.array(range(100))], ["p", "q"])
    table = pa.table({"p": points, "s": structs})
    pa.register_extension_type(Point())
    try:
        pq.write_table(table, tmp_path / "x.parquet")
        for column, expected in {"p.x": 7, "s.p.tags": ["a"], "s.q": 7}.items():
            assert make_dataset(tmp_path, columns=[column], cache=False)[7] == {column: expected}
        names = make_dataset(tmp_path, columns=["p.name"], cache=False).rowstore.row_groups.caches[0]
        names.measure()
        assert names.row_bytes > len("a name" * 10)
    finally:
        pa.unregister_extension_type("point")


@pytest.mark.parametrize(
    "around",
    [
        lambda kind: pa.list_(kind),
        lambda kind: pa.large_list(pa.list_view(kind)),
        lambda kind: pa.list_(pa.struct([("a", pa.int8()), ("b", kind)]), 2),
        lambda kind: pa.map_(pa.string(), pa.large_list_view(kind)),
    ],
)
def test_records_have_one_name_whatever_types_a_process_knows(around: Any) -> None:
    """Hugging Face datasets registers types for its arrays. Cached rows serve processes with and without it."""
    [known, unknown] = [
        Layout(fields_of(pa.schema([pa.field("c", around(kind))]))).describe()
        for kind in (Private(), Private().storage_type)
    ]
    assert known == unknown
    [field] = fields_of(pa.schema([pa.field("c", around(Private()))]))
    assert plain_array(pa.nulls(2, around(Private()))).type.equals(plain_array(pa.nulls(2, field.type)).type)


def columns_with_rows(*, views: bool) -> st.SearchStrategy[pa.Table]:
    """Return tables of one or two nested columns, which may be slices and may have several chunks."""

    @st.composite
    def draw(draw: Any) -> pa.Table:
        kinds = draw(st.lists(columns(4, views=views), min_size=1, max_size=2))
        count, start = draw(st.integers(1, 6)), draw(st.integers(0, 2))
        arrays = []
        for kind in kinds:
            rows = draw(st.lists(values_of(kind), min_size=count + start, max_size=count + start))
            parts = (
                [pa.array(rows[:1], kind), pa.array(rows[1:], kind)] if draw(st.booleans()) else [pa.array(rows, kind)]
            )
            arrays.append(pa.chunked_array(parts, kind))
        return pa.table(arrays, [f"c{number}" for number in range(len(kinds))]).slice(start)

    return draw()


@settings(max_examples=EXAMPLES)
@given(table=columns_with_rows(views=True), data=st.data())
def test_a_batch_is_to_pylist_of_take(table: pa.Table, data: st.DataObject) -> None:
    """Rows of two blobs, also flat; cut into two batches as a loader does it."""
    tables = [table, table.slice(1)] if len(table) > 1 else [table]
    rows = data.draw(st.lists(st.integers(0, len(tables[-1]) - 1), max_size=6))
    which = data.draw(st.lists(st.integers(0, len(tables) - 1), min_size=len(rows), max_size=len(rows)))
    expected = [tables[part].slice(row, 1).to_pylist()[0] for part, row in zip(which, rows, strict=True)]
    records = gather(tables, np.array(which, np.int64), np.array(rows, np.int64))
    batch = to_batch(records)
    assert {name: list(values) for name, values in batch.items()} == {
        name: [row[name] for row in expected] for name in table.column_names
    }
    try:
        flat = to_batch(records, ragged="flat")
    except DataError as error:
        assert "ragged='flat' cannot hold" in str(error)
    else:
        sizes = [1, len(rows) - 1] if len(rows) > 1 else [len(rows)]
        parts = list(zip(cut(flat, sizes), sizes, strict=True))
        for name in table.column_names:
            found = [row for part, size in parts for row in unflattened(part[name], size)]
            assert found == [emptied(row[name], table.schema.field(name).type) for row in expected]


def unflattened(column: Any, count: int) -> list[Any]:
    """Return the rows of a flat column as lists and dicts."""
    if isinstance(column, Flat):
        total = int(column.offsets[-1])
        values = unflattened(column.values, total)
        bounds = column.offsets.tolist()
        return [values[start:stop] for start, stop in itertools.pairwise(bounds)]
    if isinstance(column, dict):
        members = {name: unflattened(values, count) for name, values in column.items()}
        return [{name: values[row] for name, values in members.items()} for row in range(count)]
    return [str(value) if isinstance(value, float) else value for value in plain(column)]


def emptied(value: Any, kind: pa.DataType) -> Any:
    """Return what a flat batch holds of a value: empty lists and bytes for nulls, counts for times, NaN for floats."""
    types = pa.types
    if types.is_struct(kind):
        return {field.name: emptied(value and value[field.name], field.type) for field in kind}
    if types.is_map(kind):
        return [{"key": key, "value": emptied(item, kind.item_type)} for key, item in value or []]
    if types.is_nested(kind):
        return [emptied(element, kind.value_type) for element in value or []]
    if types.is_dictionary(kind):
        return value
    if kind in (pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(3)):
        return list(value or b"")
    if types.is_decimal(kind) or types.is_floating(kind):
        return "nan" if value is None else str(float(value))
    if types.is_temporal(kind):
        scalar = pa.scalar(value, kind)
        return scalar.cast(pa.int64() if kind.bit_width == 64 else pa.int32()).as_py()
    return value


def is_valid(path: Path) -> bool:
    """Return whether Arrow accepts its own file: under null structs it may write codes that no dictionary has."""
    try:
        pa.ipc.open_file(path).read_all().validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_files_are_read_like_arrow_reads_them(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("nested")
    as_parquet = data.draw(st.booleans())
    table = data.draw(columns_with_rows(views=not as_parquet))
    half = -(-len(table) // 2)
    if as_parquet:
        pq.write_table(table, folder / "x.parquet", row_group_size=half)
        table = pq.read_table(folder / "x.parquet")
    else:
        with pa.ipc.new_file(folder / "x.arrow", table.schema) as file:
            file.write_table(table.combine_chunks(), max_chunksize=half)
        assume(is_valid(folder / "x.arrow"))
    rows = data.draw(st.lists(st.integers(0, len(table) - 1), min_size=1, max_size=6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_group_plan, "BLOB_ROWS", data.draw(st.sampled_from([1, 2, 1 << 16])))
        dataset = make_dataset(str(folder), cache=False)
    found = dataset.__getitems__(rows)
    assert [dict(row.items()) for row in found] == [table.slice(row, 1).to_pylist()[0] for row in rows]


CHAT = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def chat_table(rows: int) -> pa.Table:
    """Return conversations, tags and numbers with nulls, each a function of `id`."""
    ids = range(rows)
    messages = [
        None if row % 7 == 3 else [{"role": "user", "content": None if turn else f"{row}é"} for turn in range(row % 4)]
        for row in ids
    ]
    tags = [None if row % 5 == 2 else [f"t{tag}" for tag in range(row % 3)] for row in ids]
    pairs = [[(f"k{row}", [row, row + 1])] * (row % 2) for row in ids]
    vectors = [None if row % 6 == 1 else [0.5] * (row % 3) for row in ids]
    names = [None if row % 4 == 1 else f"row {row}" for row in ids]
    columns = {"id": ids, "chat": pa.array(messages, CHAT), "tags": tags, "vector": vectors, "name": names}
    return pa.table(columns | {"map": pa.array(pairs, pa.map_(pa.string(), pa.list_(pa.int32())))})


def reversed_tags(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "tags": [None if tags is None else tags[::-1] for tags in batch["tags"]]}


@pytest.mark.variants
@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1}, {"ragged": "flat"}, {"ragged": "flat", "num_workers": 1}], ids=str
)
def test_a_loader_of_nested_columns(tmp_path: Path, options: dict[str, Any]) -> None:
    """On a thread and from a worker, each row has its values, also in batches that are gathered together."""
    table = chat_table(100)
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=30)
    transform = reversed_tags if options == {"num_workers": 1} else None
    if options.get("ragged") and options.get("num_workers"):
        transform = dict
    loader = make_loader(
        str(tmp_path / "x.parquet"),
        8,
        cache_dir=str(tmp_path / "cache"),
        cache_bytes="1GB",
        transform=transform,
        **options,
    )
    found = {}
    for batch in loader:
        size = len(batch["id"])
        values = {
            name: unflattened(column, size) if options.get("ragged") else [plain(value) for value in column]
            for name, column in batch.items()
        }
        found |= {
            row["id"]: row
            for row in (dict(zip(values, each, strict=True)) for each in zip(*values.values(), strict=True))
        }
    expected = {row["id"]: row for row in table.to_pylist()}
    if transform is reversed_tags:
        expected = {number: row | {"tags": row["tags"] and row["tags"][::-1]} for number, row in expected.items()}
    if options.get("ragged"):
        kinds = {name: table.schema.field(name).type for name in table.column_names}
        expected = {number: {name: emptied(row[name], kinds[name]) for name in row} for number, row in expected.items()}
    assert found == expected


def test_a_batch_of_nested_values_crosses_to_another_process_and_device() -> None:
    batch = whole(chat_table(20))
    flat = whole(chat_table(20), ragged="flat")
    moved = map_tensors(unpack(pack(batch)), lambda tensor: tensor.clone())
    assert moved.keys() == batch.keys()
    assert all([plain(a) for a in moved[name]] == [plain(b) for b in batch[name]] for name in batch)
    moved = map_tensors(unpack(pack(flat)), lambda tensor: tensor.clone())
    assert all(unflattened(moved[name], 20) == unflattened(flat[name], 20) for name in flat)


def test_null_bytes_cross_to_another_process() -> None:
    batch = whole(pa.table({"b": [b"ab", None, b"", b"c"]}))
    assert [plain(value) for value in unpack(pack(batch))["b"]] == [b"ab", None, b"", b"c"]


@pytest.mark.parametrize("ragged", ["list", "flat"])
def test_the_search_for_a_batch_size_repeats_nested_rows(ragged: str) -> None:
    batch = whole(chat_table(5), ragged=ragged)
    expected = [
        unflattened(column, 5) if ragged == "flat" else [plain(value) for value in column] for column in batch.values()
    ]
    model, seen = torch.nn.Linear(1, 1), []

    def loss(model: torch.nn.Module, repeated: dict[str, Any]) -> torch.Tensor:
        size = len(repeated["id"])
        seen.append(size)
        rows = [
            unflattened(column, size) if ragged == "flat" else [plain(value) for value in column]
            for column in repeated.values()
        ]
        assert rows == [[column[row % 5] for row in range(size)] for column in expected]
        return model(torch.ones(size, 1)).sum()

    find_batch_size(model, torch.optim.SGD(model.parameters()), batch, loss, start=7, limit=14, gain=-1, device="cpu")
    assert set(seen) == {7, 14}


def test_rows_of_a_flat_batch_are_indexed() -> None:
    table = pa.table({"c": [[["a"], []], None, [["b", "c"]]]})
    [first, second, third] = gather_rows(table, "flat")
    assert (unflattened(first["c"], 2), third["c"].values) == ([["a"], []], ["b", "c"])
    assert second["c"].offsets.tolist() == [0]


def gather_rows(table: pa.Table, ragged: str) -> NumberedRows:
    numbers = np.arange(len(table))
    records = gather([table], np.zeros(len(table), np.int64), numbers)
    return NumberedRows(records, numbers, lambda row: Location("rows", 0, row), ragged=ragged)


def test_columns_of_nested_rows_come_from_the_rows_of_all_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataset of few columns takes them from cached rows, without a request; so does one of joined blobs."""
    monkeypatch.setattr(parquet, "SHARED_BYTES", 0)  # no bytes of the file are cached
    table = chat_table(50)
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=25)
    cache = CacheConfig(str(tmp_path / "cache"), "1GB")
    everything = make_dataset(str(tmp_path / "x.parquet"), cache=cache)
    assert everything.__getitems__(range(50)).columns["chat"] == table["chat"].to_pylist()
    few = make_dataset(str(tmp_path / "x.parquet"), columns=["chat", "name", "vector"], cache=cache)
    (tmp_path / "x.parquet").unlink()
    batch = few.__getitems__(range(50)).columns
    assert batch["chat"] == table["chat"].to_pylist()
    assert batch["name"] == table["name"].to_pylist()
    assert [plain(value) for value in batch["vector"]] == table["vector"].to_pylist()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (pa.dense_union([pa.field("a", pa.int8()), pa.field("b", pa.string())]), "a union"),
        (pa.list_(pa.sparse_union([pa.field("a", pa.int8())])), "a union"),
        (pa.map_(pa.string(), pa.list_(pa.dense_union([pa.field("a", pa.int8())]))), "a union"),
        (pa.list_(pa.struct([("a", pa.int8()), ("a", pa.string())])), "two members of one name"),
    ],
    ids=str,
)
def test_an_unsupported_type_raises_an_error_that_names_the_column(kind: pa.DataType, reason: str) -> None:
    with pytest.raises(DataError, match=f"column 'odd' has type .* with {reason}: leave it out with columns="):
        fields_of(pa.schema([("fine", pa.int8()), ("odd", kind)]))


def test_text_inside_lists_that_is_not_utf_8() -> None:
    broken = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, 1], np.int32)), pa.py_buffer(b"\xff"))
    table = pa.table({"c": pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), broken)})
    for ragged in ("list", "flat"):
        with pytest.raises(DataError, match="column 'c' has a string that is not UTF-8"):
            whole(table, ragged=ragged)


def test_nulls_that_flat_tensors_cannot_hold() -> None:
    for values in ([[[1, None]]], [[{"a": 1}, None]]):
        with pytest.raises(DataError, match=r"column 'c' has nulls of int64 inside, which ragged='flat' cannot hold"):
            whole(pa.table({"c": values}), ragged="flat")


def test_extension_types() -> None:
    identities = [uuid.UUID(int=1), None, uuid.UUID(int=2)]
    tensor = pa.fixed_shape_tensor(pa.float32(), (2, 3), permutation=[1, 0])
    values = np.arange(12, dtype=np.float32)
    tensors = tensor.wrap_array(pa.FixedSizeListArray.from_arrays(pa.array(values), 6))
    raw = [None if each is None else each.bytes for each in identities]
    table = pa.table(
        {
            "id": pa.uuid().wrap_array(pa.array(raw, pa.binary(16))),
            "ids": pa.array([[each] for each in raw], pa.list_(pa.binary(16))).cast(pa.list_(pa.uuid())),
            "flag": pa.bool8().wrap_array(pa.array([1, 0, 2], pa.int8())),
        }
    )
    batch = whole(table)
    assert batch["id"] == identities
    assert batch["ids"] == table["ids"].to_pylist()
    assert batch["flag"].tolist() == [True, False, True]
    assert batch["flag"].dtype == torch.bool
    batch = whole(pa.table({"t": tensors}))
    assert batch["t"].shape == (2, 3, 2)
    np.testing.assert_array_equal(batch["t"].numpy(), tensors.to_numpy_ndarray())
    if hasattr(pa, "json_"):
        assert whole(pa.table({"j": pa.json_().wrap_array(pa.array(['{"a": 1}', None]))}))["j"] == ['{"a": 1}', None]


def test_dictionaries_of_lists() -> None:
    tables = [
        pa.table({"c": pa.DictionaryArray.from_arrays(pa.array([1, None, 0], pa.int8()), pa.array(values))})
        for values in ([["a", None], []], [["b"], None])
    ]
    batch = to_batch(gather(tables, np.array([1, 0, 0, 1]), np.array([2, 0, 1, 0])))
    assert batch["c"] == [["b"], [], None, None]


class Celsius(pa.ExtensionType):
    """A type that only this process knows."""

    def __init__(self) -> None:
        super().__init__(pa.float32(), "tests.celsius")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, serialized: bytes) -> Celsius:
        return cls()


@pytest.fixture
def celsius() -> Iterator[None]:
    pa.register_extension_type(Celsius())
    yield
    pa.unregister_extension_type("tests.celsius")


def test_a_type_of_this_process_is_its_storage(celsius: None) -> None:
    values = pa.ExtensionArray.from_storage(Celsius(), pa.array([1.0, None, 2.0], pa.float32()))
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 3], pa.int32()), pa.StructArray.from_arrays([values], ["t"]))
    records = gather([pa.table({"l": lists})], np.zeros(2, int), np.arange(2))
    assert to_batch(records)["l"] == [[{"t": 1.0}, {"t": None}], [{"t": 2.0}]]
    assert records.nested(records.layout.fields[0]).type == pa.list_(pa.struct([("t", pa.float32())]))
    assert whole(pa.table({"t": values}))["t"].tolist()[2] == 2.0


def test_runs_are_decoded() -> None:
    runs = pc.run_end_encode(pa.array([1, 1, 2], pa.int32()))
    texts = pc.run_end_encode(pa.array(["a", None, None]))
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 3], pa.int32()), texts)
    batch = whole(pa.table({"r": runs, "t": texts}))
    assert (batch["r"].tolist(), batch["t"]) == ([1, 1, 2], ["a", None, None])
    assert whole(pa.table({"l": lists}))["l"] == [["a", None], [None]]


def test_runs_in_a_null_struct() -> None:
    kinds = (pa.int32(), pa.string())
    members = [pc.run_end_encode(pa.array(row, kind)) for row, kind in zip([[1, 1, 2], ["a"] * 3], kinds, strict=True)]
    struct = pa.StructArray.from_arrays(members, ["r", "t"], mask=pa.array([False, True, False]))
    deep = pa.StructArray.from_arrays([struct], ["s"], mask=pa.array([True, False, False]))
    columns = pa.chunked_array([struct, struct[1:]]), pa.chunked_array([deep, deep[1:]])
    batch = whole(pa.table(dict(zip("sd", columns, strict=True))), {"s.r": -1, "d.s.r": -1})
    assert (batch["s.r"].tolist(), batch["s.t"]) == ([1, -1, 2, -1, 2], ["a", None, "a", None, "a"])
    assert (batch["d.s.r"].tolist(), batch["d.s.t"]) == ([-1, -1, 2, -1, 2], [None, None, "a", None, "a"])


@pytest.mark.parametrize("mode", ["sparse", "dense"])
def test_a_member_beside_a_union_in_a_null_struct(mode: str, tmp_path: Path) -> None:
    codes, values = pa.array([0, 1, 0], pa.int8()), [pa.array([1, 2, 3]), pa.array(["a", "b", "c"])]
    union = pa.UnionArray.from_sparse(codes, values)
    if mode == "dense":
        union = pa.UnionArray.from_dense(codes, pa.array([0, 1, 2], pa.int32()), values)
    members = [union, pa.array([0.5, 1.5, 2.5])]
    struct = pa.StructArray.from_arrays(members, ["u", "f"], mask=pa.array([False, True, False]))
    deep = pa.StructArray.from_arrays([struct], ["s"], mask=pa.array([True, False, False]))
    table = pa.table({"s": struct, "d": deep})
    with pa.ipc.new_file(tmp_path / "x.arrow", table.schema) as writer:
        writer.write_table(table)
    dataset = make_dataset(tmp_path, columns=["s.f", "d.s.f"], cache=False)
    found = [[float(value) for value in row.values()] for row in dataset.__getitems__(range(3))]
    np.testing.assert_equal(found, [[0.5, np.nan], [np.nan, np.nan], [2.5, 2.5]])
    rows = first_rows(dataset.manifest, ["s.u", "d.s.u"], dataset.blocks, 3)
    assert [list(row.values()) for row in rows] == [[1, None], [None, None], [3, 3]]


@pytest.mark.parametrize("order", [(False, True), (True, False)])
@pytest.mark.parametrize("wrap", [lambda kind: kind, lambda kind: pa.map_(pa.string(), kind)], ids=["list", "map"])
def test_some_files_say_that_members_are_never_null(tmp_path: Path, order: tuple[bool, bool], wrap: Any) -> None:
    values: dict[bool, Any] = {False: 1, True: None}
    for number, nullable in enumerate(order):
        kind = wrap(pa.list_(pa.struct([pa.field("a", pa.int32(), nullable)])))
        value: Any = [{"a": values[nullable]}]
        rows = pa.array([[("k", value)] if pa.types.is_map(kind) else value], kind)
        pq.write_table(pa.table({"c": rows}), tmp_path / f"{number}.parquet")
    batch = make_loader(str(tmp_path), 2, shuffle=False, cache=False)
    [found] = [batch["c"] for batch in batch]
    assert [str(values[nullable]) in str(row) for nullable, row in zip(order, found, strict=True)] == [True, True]


def test_the_values_of_maps_may_be_null() -> None:
    kind = pa.map_(pa.string(), pa.field("value", pa.int32(), nullable=False))
    assert portable(kind).item_field.nullable


def list_views(kind: Any, values: pa.Array) -> pa.Array:
    """Return [[values[3]], None, [values[0]], [values[1], values[2]], []] in this order, as list views."""
    offsets, sizes = pa.array([3, 0, 0, 1, 2], pa.int32()), pa.array([1, 2, 1, 2, 0], pa.int32())
    mask = pa.array([False, True, False, False, False])
    return pa.ListViewArray.from_arrays(offsets, sizes, values, type=pa.list_view(kind), mask=mask)


STRUCT = pa.struct([pa.field("a", pa.int32(), nullable=False)])
STRUCTS = pa.array([{"a": number} for number in range(4)], STRUCT)
VIEWS = {
    "alone": [list_views(STRUCT, STRUCTS)],
    "not null": [list_views(pa.field("item", STRUCT, nullable=False), STRUCTS), pa.array([[None]], pa.list_(STRUCT))],
    "text": [list_views(pa.string(), pa.array(list("abcd"))), pa.array([["x"], None], pa.list_(pa.string()))],
    "without numbers": [list_views(pa.null(), pa.nulls(4)), pa.array([[1], None], pa.list_(pa.int64()))],
    "without text": [list_views(pa.null(), pa.nulls(4)), pa.array([["x"], None], pa.list_(pa.string()))],
}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("case", VIEWS)
def test_list_views_have_their_sizes_and_order(tmp_path: Path, case: str, order: int) -> None:
    """Arrow's own cast of list views to lists ignores the sizes."""
    columns = VIEWS[case][::order]
    for number, column in enumerate(columns):
        table = pa.table({"c": column})
        with pa.ipc.new_file(tmp_path / f"{number}.arrow", table.schema) as file:
            file.write(table)
    expected = [value for column in columns for value in column.to_pylist()]
    if case == "without numbers":  # Batches have 0 for a null in a list of integers.
        expected = [value and [each or 0 for each in value] for value in expected]
    dataset = make_dataset(tmp_path, cache=False, null_masks=True)
    assert [plain(value) for value in dataset.__getitems__(range(len(dataset))).columns["c"]] == expected
    assert len(dataset.filter(pc.list_value_length(pc.field("c")) == 2)) == 1


@pytest.mark.parametrize("kind", [pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_a_part_of_lists_is_converted_alone(kind: pa.DataType) -> None:
    """Record batches are cut into blobs."""
    lists = pa.array([["some text"] * 3] * 1000, pa.list_(kind))
    part = plain_array(lists[5:6])
    assert (part.to_pylist(), len(part.values)) == ([["some text"] * 3], 3)


def test_nested_rows_have_a_size(tmp_path: Path) -> None:
    """The estimate for the plan of the cache is measured where dictionary codes hide the sizes."""
    rows = [["a long tag that repeats" * 20] * 3] * 2000
    pq.write_table(pa.table({"tags": rows}), tmp_path / "x.parquet")
    dataset = make_dataset(str(tmp_path / "x.parquet"), cache=False)
    blobs = dataset.rowstore.row_groups.caches[0]
    before = blobs.num_bytes
    blobs.measure()
    actual = sum(len(blob) for blob in load(blobs, 0))
    assert before < actual / 10
    assert actual / 1.2 < blobs.num_bytes < actual * 1.2


@pytest.mark.parametrize("write", ["parquet", "arrow"])
def test_lists_of_codes_of_other_dictionaries_join(tmp_path: Path, write: str) -> None:
    """More distinct values than the codes of one dictionary could name."""
    kind, expected = pa.list_(pa.dictionary(pa.int8(), pa.string())), []
    for number in range(2):
        values = [[f"{number} {row}"] for row in range(100)]
        table = pa.table({"tags": pa.array(values, kind)})
        if write == "parquet":
            pq.write_table(table, tmp_path / f"{number}.parquet")
        else:
            with pa.ipc.new_file(tmp_path / f"{number}.arrow", table.schema) as file:
                file.write(table)
        expected += values
    loader = make_loader(f"{tmp_path}/[01].*", 200, shuffle=False, cache_dir=str(tmp_path / "cache"))
    assert [row for batch in loader for row in batch["tags"]] == expected


def test_uuids_of_other_writers_are_those_of_arrow(tmp_path: Path) -> None:
    """Other writers store no Arrow schema, so the type comes from Parquet's own schema."""
    ids = [uuid.UUID(int=number) for number in range(3)]
    one = pa.array([each.bytes for each in ids], pa.uuid())
    table = pa.table({"one": one, "some": pa.ListArray.from_arrays(pa.array([0, 1, 2, 3]), one)})
    pq.write_table(table, tmp_path / "x.parquet", store_schema=False)
    [batch] = make_loader(str(tmp_path / "x.parquet"), 3, shuffle=False, cache_dir=str(tmp_path / "cache"))
    expected = pq.read_table(tmp_path / "x.parquet").to_pylist()
    assert [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)] == expected


def test_values_that_python_cannot_hold_name_their_column(tmp_path: Path) -> None:
    late = pa.array([[[10**15]]], pa.list_(pa.list_(pa.timestamp("ms"))))
    rows = gather_rows(pa.table({"late": late}), "list")
    with pytest.raises(DataError, match=r"'late' has a value that Python cannot hold .* ragged='flat'"):
        rows.columns  # noqa: B018 (made on access)


@pytest.mark.parametrize("ragged", ["list", "flat"])
def test_a_batch_of_too_many_nested_values_names_its_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ragged: str
) -> None:
    """More than 2 GiB of strings or bytes inside lists."""
    pq.write_table(pa.table({"clips": [["a"], ["b"]]}), tmp_path / "x.parquet")
    loader = make_loader(tmp_path, 2, cache=False, ragged=ragged)

    def overflow(*_: Any) -> Any:
        raise pa.ArrowInvalid("offset overflow while concatenating arrays")

    monkeypatch.setattr(Records, "nested", overflow)
    with pytest.raises(DataError, match=r"'clips' has too many values in one batch .*overflow.*use a smaller batch"):
        list(loader)


@pytest.mark.parametrize("options", [{}, {"transform": dict, "on_error": "skip"}], ids=str)
def test_a_batch_that_is_too_large_blames_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """As many strings as Arrow can count in one batch take more memory than a test should have."""
    pq.write_table(pa.table({"clips": [["a"]] * 8}), tmp_path / "x.parquet")
    nested = Records.nested

    def overflow(records: Records, field: Any) -> pa.Array:
        if len(records) > 4:
            raise pa.ArrowInvalid("offset overflow while concatenating arrays")
        return nested(records, field)

    monkeypatch.setattr(Records, "nested", overflow)
    assert len(list(make_loader(tmp_path, 4, cache=False, **options))) == 2
    with pytest.raises(ConfigError, match=r"^column 'clips' has too many values in one batch .*: use a smaller batch"):
        list(make_loader(tmp_path, 8, cache=False, **options))


def test_few_shared_strings_are_not_kept(tmp_path: Path) -> None:
    """A string that two rows share is made for each batch: all strings of a blob would take much memory."""
    values = [f"text {row // 2}" for row in range(2000)]
    pq.write_table(pa.table({"text": values}), tmp_path / "x.parquet")
    dataset = make_dataset(str(tmp_path / "x.parquet"), cache=CacheConfig(str(tmp_path / "cache")))
    records = dataset.rowstore.gather(np.arange(2000))
    [field] = records.layout.fields
    assert to_batch(records)["text"] == values
    assert len(records.blobs[0].spans(field)) == 1000
    assert not records.blobs[0]._texts
