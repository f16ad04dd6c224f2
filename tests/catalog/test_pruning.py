"""Filters keep the same rows as pyarrow, or raise an error with a reason."""

from __future__ import annotations

import datetime as dt
import io
import itertools
import math
import operator
from collections.abc import Callable
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataload import make_dataset
from dataload.cache.blocks.reader import Blocks
from dataload.cache.config import CacheConfig
from dataload.cache.filesystem import open_source
from dataload.catalog.manifest import Manifest, resolve
from dataload.catalog.pruning import Filters, narrow
from dataload.errors import ConfigError
from dataload.formats.parquet import ParquetFooter

DAY = dt.datetime(2024, 1, 1)  # noqa: DTZ001 (columns without a time zone are compared with such)
# For each type few values, near each other, so that filters often hit a border.
VALUES: dict[pa.DataType, list[Any]] = {
    pa.int8(): [-128, -1, 0, 1, 2, 127],
    pa.uint32(): [0, 1, 2, 2**31, 2**32 - 1],
    pa.uint64(): [0, 1, 2**63, 2**64 - 1],
    pa.float32(): [-math.inf, -0.5, 0.1, 0.2, 3.0, math.inf, math.nan],
    pa.float64(): [-math.inf, -0.5, 0.1, 0.2, 3.0, math.inf, math.nan],
    pa.float16(): [np.float16(0.5), np.float16(2), np.float16(-1)],
    pa.bool_(): [False, True],
    pa.string(): ["", "a", "ab", "b", "é", "\U0001f600", "\uffee"],
    pa.binary(): [b"", b"a", b"\x7f", b"\x80", b"\xff"],
    pa.binary(2): [b"ab", b"a\xff", b"\xff\x00"],
    pa.date32(): [dt.date(1960, 1, 1), dt.date(1969, 12, 31), dt.date(1970, 1, 1), dt.date(2024, 2, 29)],
    pa.timestamp("s"): [DAY + dt.timedelta(seconds=number) for number in range(4)],
    pa.timestamp("us"): [DAY + dt.timedelta(microseconds=number) for number in range(-2, 3)],
    pa.timestamp("ms", "Europe/Berlin"): [
        DAY.replace(tzinfo=dt.UTC) + dt.timedelta(hours=number) for number in range(4)
    ],
    pa.timestamp("ns"): [np.datetime64("2024-01-01", "ns") + np.timedelta64(number, "ns") for number in range(4)],
    pa.time64("us"): [dt.time(0, 0, 0, number) for number in range(4)],
    pa.duration("us"): [dt.timedelta(microseconds=number) for number in range(-2, 2)],
    pa.decimal128(7, 2): [Decimal("-300.01"), Decimal("-0.01"), Decimal(0), Decimal("0.10"), Decimal("300.01")],
    pa.decimal256(50, 1): [Decimal("-300.1"), Decimal("-0.1"), Decimal(0), Decimal("300.1")],
    pa.dictionary(pa.int32(), pa.string()): ["a", "b", "c"],
}
Stored = Callable[..., tuple[Manifest, Blocks]]
OPERATORS = ["=", "==", "!=", "<", ">", "<=", ">=", "in", "not in"]


def written(groups: list[pa.Table], **options: Any) -> io.BytesIO:
    body = io.BytesIO()
    with pq.ParquetWriter(body, groups[0].schema, **options) as writer:
        for group in groups:
            writer.write_table(group, row_group_size=max(1, len(group)))
    return body


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """Return the manifest of one file of these row groups."""
    folder = tmp_path_factory.mktemp("filters")
    blocks = open_source(str(folder), None, None)
    count = itertools.count()

    def stored(groups: list[pa.Table], **options: Any) -> tuple[Manifest, Blocks]:
        path = folder / f"{next(count)}.parquet"
        path.write_bytes(written(groups, **options).getvalue())
        return resolve(path, blocks), blocks

    return stored


@pytest.fixture(scope="module")
def narrowed(stored: Stored) -> Callable[..., Manifest]:
    """Return the row groups of one file that the filters keep."""

    def narrowed(groups: list[pa.Table], filters: Filters, **options: Any) -> Manifest:
        manifest, blocks = stored(groups, **options)
        return narrow(manifest, blocks, filters)

    return narrowed


COMPARE = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda column, values: column.isin(values),
    "not in": lambda column, values: ~column.isin(values),
}


def holds(predicate: tuple[str, str, Any], groups: list[pa.Table]) -> list[np.ndarray]:
    """Return the rows that match by pyarrow, except that a null matches nothing, not even `not in`."""
    name, sign, value = predicate
    whole = pa.concat_tables(groups)
    kind = whole.schema.field(name).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    kind = pa.float64() if pa.types.is_floating(kind) else kind
    column = pc.field(name).cast(kind)
    value = pa.array(value, kind) if "in" in sign else pa.scalar(value, kind)
    numbered = whole.append_column("number", pa.array(range(len(whole)), pa.int64()))
    matching = COMPARE[sign](column, value) & column.is_valid()
    left = pads.dataset(numbered).to_table(filter=matching, columns=["number"])["number"].to_numpy()
    borders = np.cumsum([len(group) for group in groups])[:-1]
    return np.split(np.isin(np.arange(len(whole)), left), borders)


def kinds_and_groups(draw: Any, kinds: list[pa.DataType], names: str = "xy") -> list[pa.Table]:
    schema = {name: draw(st.sampled_from(kinds)) for name in names}

    def group() -> pa.Table:
        rows = draw(st.integers(0, 4))
        narrow_to = {
            name: draw(st.lists(st.sampled_from([*VALUES[kind], None]), min_size=1, max_size=2))
            for name, kind in schema.items()
        }
        columns = {
            name: pa.array([draw(st.sampled_from(narrow_to[name])) for _ in range(rows)], kind)
            for name, kind in schema.items()
        }
        return pa.table(columns)

    return [group() for _ in range(draw(st.integers(1, 4)))]


def predicate_of(draw: Any, table: pa.Table) -> tuple[str, str, Any]:
    column = draw(st.sampled_from(table.schema.names))
    kind = table.schema.field(column).type
    values = [value for value in VALUES[kind] if value is not math.nan]
    sign = draw(st.sampled_from(OPERATORS))
    if "in" in sign:
        return column, sign, draw(st.lists(st.sampled_from(values), max_size=3))
    return column, sign, draw(st.sampled_from(values))


COMPARABLE = [kind for kind in VALUES if kind != pa.float16()]


@given(data=st.data())
def test_what_is_left_is_what_pyarrow_leaves(data: st.DataObject, narrowed: Callable[..., Manifest]) -> None:
    groups = kinds_and_groups(data.draw, COMPARABLE)
    choices = [
        [predicate_of(data.draw, groups[0]) for _ in range(data.draw(st.integers(1, 2)))]
        for _ in range(data.draw(st.integers(1, 2)))
    ]
    alone = {repr(predicate): holds(predicate, groups) for choice in choices for predicate in choice}
    matches = [
        np.any([np.all([alone[repr(predicate)][number] for predicate in choice], axis=0) for choice in choices], axis=0)
        for number in range(len(groups))
    ]
    try:
        left = [group.number for group in narrowed(groups, choices[0] if len(choices) == 1 else choices).row_groups]
    except ConfigError as error:
        if "leave none" in str(error):
            assert not any(match.any() for match in matches)
            return
        number = int(str(error).split("row group ")[1].split(":")[0])
        predicate = next(one for choice in choices for one in choice if repr(one) in str(error))
        assert is_doubtful(predicate, alone[repr(predicate)][number], groups[number][predicate[0]])
        return
    for number, match in enumerate(matches):
        assert match.all() if number in left else not match.any()


def is_doubtful(predicate: tuple[str, str, Any], match: np.ndarray, column: pa.ChunkedArray) -> bool:
    """Return whether only some rows match, NaN is possible, or there are gaps between the values."""
    gaps = predicate[1] not in {"<", "<=", ">", ">="} and len(set(column.to_pylist())) > 1
    return 0 < match.sum() < len(match) or pa.types.is_floating(column.type) or gaps


@pytest.mark.parametrize("kind", COMPARABLE, ids=str)
def test_every_type_by_every_operator(kind: pa.DataType, stored: Stored) -> None:
    """With one value per row group, only NaN leaves a doubt."""
    values = [value for value in VALUES[kind] if value is not math.nan]
    groups = [pa.table({"x": pa.array([value] * 2, kind)}) for value in values]
    manifest, blocks = stored(groups)
    for sign in OPERATORS:
        for value in values:
            said = ("x", sign, [value] if "in" in sign else value)
            expected = [number for number, match in enumerate(holds(said, groups)) if match.all()]
            found = left_of(manifest, blocks, [said])
            if pa.types.is_floating(kind) and found is None:
                assert sign in {"!=", "not in"} or expected
            else:
                assert found == expected


def left_of(manifest: Manifest, blocks: Blocks, filters: Filters) -> list[int] | None:
    """Return the numbers of the row groups that filters keep; None: they raise, because some are in doubt."""
    try:
        return [group.number for group in narrow(manifest, blocks, filters).row_groups]
    except ConfigError as error:
        return [] if "leave none" in str(error) else None


def table(**columns: Any) -> pa.Table:
    return pa.table(columns)


SORTED = [table(x=[1, 2, 3]), table(x=[4, 5, 6]), table(x=[7, 8, 9])]


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ([("x", "<", 4)], [0]),
        ([("x", "<=", 6)], [0, 1]),
        ([("x", ">", 3)], [1, 2]),
        ([("x", ">=", 7)], [2]),
        ([("x", ">", 3), ("x", "<", 7)], [1]),
        ([[("x", "<", 4)], [("x", ">", 6)]], [0, 2]),
        ([("x", "in", range(4, 10))], [1, 2]),
        ([("x", "not in", {1, 2, 3, 100})], [1, 2]),
        ([("x", "!=", 100)], [0, 1, 2]),
        ([("x", "not in", [])], [0, 1, 2]),
        ([("x", "in", [])], []),
        ([("x", "=", 100)], []),
        ([["x", "<", 4]], [0]),
        (([("x", "<", np.int64(4))],), [0]),
    ],
)
def test_sorted_data(filters: Filters, left: list[int], stored: Stored) -> None:
    assert left_of(*stored(SORTED), filters) == left


@pytest.mark.parametrize(
    ("said", "number"),
    [
        (("x", "<", 5), 1),
        (("x", "<=", 5), 1),
        (("x", ">", 4), 1),
        (("x", ">=", 8), 2),
        (("x", "=", 5), 1),
        (("x", "!=", 5), 1),
        (("x", "in", [1, 3]), 0),
        (("x", "not in", [9]), 2),
    ],
)
def test_a_mixed_row_group_is_refused(said: Any, number: int, narrowed: Callable[..., Manifest]) -> None:
    with pytest.raises(ConfigError, match=rf"\.parquet row group {number}: .*'x'.*key.*sort.*transform") as caught:
        narrowed(SORTED, [("x", ">", -5), said])
    assert repr(said) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nulls_match_nothing(stored: Stored) -> None:
    groups = [table(x=[1, 1]), table(x=pa.nulls(2, pa.int64())), table(x=[2, 2])]
    for said, left in [("=", [0]), ("!=", [2])]:
        assert left_of(*stored(groups), [("x", said, 1)]) == left
    assert left_of(*stored(groups), [("x", "not in", [5])]) == [0, 2]
    for sign, value in [("=", 1), ("!=", 5), ("<", 5), ("not in", [5]), ("in", [1])]:
        with pytest.raises(ConfigError, match="row group 0"):
            narrow(*stored([table(x=[1, None])]), [("x", sign, value)])
    assert left_of(*stored([table(x=[1, None])]), [("x", "=", 2)]) == []


def test_nan_may_be_anywhere(stored: Stored) -> None:
    group = [table(x=[1.0, 1.0])]
    for sign in ("=", "<=", ">=", "in"):
        with pytest.raises(ConfigError, match="row group 0"):
            narrow(*stored(group), [("x", sign, [1.0] if sign == "in" else 1.0)])
    for sign in ("!=", "not in"):
        assert left_of(*stored(group), [("x", sign, [2.0] if sign == "not in" else 2.0)]) == [0]
        with pytest.raises(ConfigError, match="row group 0"):
            narrow(*stored(group), [("x", sign, [1.0] if sign == "not in" else 1.0)])
    assert left_of(*stored([table(x=[1.0, math.nan])]), [("x", ">", 1.0)]) == []
    with pytest.raises(ConfigError, match="row group 0"):
        narrow(*stored([table(x=[math.nan] * 2)]), [("x", ">", 1.0)])


@pytest.mark.parametrize("options", [{"write_statistics": False}, {"use_deprecated_int96_timestamps": True}])
def test_without_statistics_nothing_can_be_proved(options: Any, narrowed: Callable[..., Manifest]) -> None:
    groups = [table(x=pa.array([DAY] * 2, pa.timestamp("ns")))]
    with pytest.raises(ConfigError, match="row group 0"):
        narrowed(groups, [("x", "<", np.datetime64("2000-01-01", "ns"))], **options)


@pytest.mark.parametrize(("low", "high"), [(math.nan, 1.0), (1.0, math.nan), (math.nan, math.nan), (2.0, 1.0)])
def test_bounds_that_are_none_prove_nothing(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, low: float, high: float
) -> None:
    manifest, blocks = stored([table(x=[1.0])])
    statistics = SimpleNamespace(has_null_count=True, null_count=0, has_min_max=True, min=low, max=high)
    group = SimpleNamespace(num_columns=1, column=lambda _: SimpleNamespace(statistics=statistics))
    footer = ParquetFooter(SimpleNamespace(row_group=lambda _: group), pa.schema([("x", pa.float64())]))
    monkeypatch.setattr("dataload.catalog.pruning.read_footer", lambda *_: footer)
    for sign in (">", "<", "=", "!="):
        assert left_of(manifest, blocks, [("x", sign, 5.0)]) is None


def test_half_floats_are_in_doubt(narrowed: Callable[..., Manifest]) -> None:
    groups = [table(x=pa.array([np.float16(1)], pa.float16()))]
    with pytest.raises(ConfigError, match="row group 0"):
        narrowed(groups, [("x", ">", 5)])


@pytest.mark.parametrize("version", ["1.0", "2.4", "2.6"])
def test_units_of_time(version: str, stored: Stored) -> None:
    for unit in ("s", "ms", "us", "ns"):
        groups = [table(x=pa.array([second] * 2, pa.int64()).cast(pa.timestamp(unit))) for second in (10**9, 2 * 10**9)]
        border = pa.scalar(15 * 10**8, pa.timestamp(unit)).as_py()
        if unit != "ns":
            assert left_of(*stored(groups, version=version), [("x", "<", border)]) == [0]


def test_empty_row_groups_go(stored: Stored) -> None:
    groups = [table(x=[1]), table(x=pa.array([], pa.int64())), table(x=[1])]
    assert left_of(*stored(groups), [("x", "!=", 5)]) == [0, 2]


def test_members_of_structs(stored: Stored) -> None:
    groups = [table(many=[[1, 2]] * 2, s=[{"a": [3], "b": number}, {"a": [], "b": number}]) for number in range(3)]
    assert left_of(*stored(groups), [("s.b", ">=", 1)]) == [1, 2]
    groups = [table(s=pa.array([None, {"b": 1}], pa.struct({"b": pa.int64()})))]
    with pytest.raises(ConfigError, match=r"'s\.b'"):
        narrow(*stored(groups), [("s.b", ">=", 1)])


@pytest.mark.parametrize(
    ("filters", "says"),
    [
        ([], "must be a list of"),
        ("x", "must be a list of"),
        (("x", "=", 1), "must be a list of"),
        ([[]], "must be a list of"),
        ([("x", "=", 1), []], "must be a list of"),
        ({"x": 1}, "must be a list of"),
        (pc.field("x") > 1, "must be a list of"),
        ([("x", "=")], "operator one of"),
        ([("x", "~", 1)], "operator one of"),
        ([[("x", "=", 1)], [1, 2, 3]], "operator one of"),
        ([("z", "=", 1)], "'z' is not in the dataset"),
        ([("dat", "=", 1)], "'dat'.*did you mean 'date'"),
        ([("s", "=", 1)], r"'s' is a struct.*s\.a"),
        ([("list", "=", [1])], "'list' has type list.*only single values"),
        ([("x", "=", "a")], "int64"),
        ([("x", "=", 1.5)], "int64"),
        ([("x", "=", True)], "int64"),
        ([("x", "=", None)], "int64"),
        ([("x", "=", 2**63)], "int64"),
        ([("x", "=", [1])], "int64"),
        ([("x", "in", 1)], "list of values"),
        ([("text", "in", "abc")], "list of values"),
        ([("x", "in", [1, None])], "int64"),
        ([("text", "=", b"abc")], "string"),
        ([("text", "=", 1)], "string"),
        ([("half", "=", math.nan)], "double"),
        ([("half", "=", "1")], "double"),
        ([("date", "=", DAY)], "date32"),
        ([("date", "=", "2024-01-01")], "date32"),
        ([("date", "=", 5)], "date32"),
        ([("time", "=", DAY.replace(tzinfo=dt.UTC))], "timestamp"),
        ([("time", "=", dt.date(2024, 1, 1))], "timestamp"),
        ([("zoned", "=", DAY)], "timestamp"),
        ([("small", "=", -1)], "uint8"),
        ([("price", "=", Decimal("1.234"))], "decimal"),
    ],
)
def test_filters_that_cannot_work(filters: Any, says: str, narrowed: Callable[..., Manifest]) -> None:
    group = table(
        x=[1],
        s=[{"a": 1}],
        list=[[1]],
        text=["a"],
        half=[0.5],
        date=[dt.date(2024, 1, 1)],
        time=pa.array([DAY], pa.timestamp("us")),
        zoned=pa.array([DAY.replace(tzinfo=dt.UTC)], pa.timestamp("us", "UTC")),
        small=pa.array([1], pa.uint8()),
        price=pa.array([Decimal("1.23")]),
    )
    with pytest.raises(ConfigError, match=says) as caught:
        narrowed([group], filters)
    assert "\n" not in str(caught.value)


# Partition keys, fingerprints, footers


@pytest.fixture
def keyed(bucket: Any, cache: CacheConfig) -> tuple[Manifest, Blocks]:
    for number, key in enumerate(["label=cat/year=1", "label=cat/year=2", "label=dog/year=1"]):
        bucket.put_table(f"data/{key}/x.parquet", table(x=[number, number + 1], y=[1, 1]), row_group_size=1)
    none = "label=__HIVE_DEFAULT_PARTITION__/year=3"
    bucket.put_table(f"data/{none}/x.parquet", table(x=[9, 10], y=[1, 1]), row_group_size=1)
    blocks = open_source(bucket.url(), bucket.options, cache)
    return resolve(bucket.url("data"), blocks), blocks


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ([("label", "=", "cat")], [0, 1, 1, 2]),
        ([("label", "!=", "cat")], [2, 3]),
        ([("label", "not in", ["cat", "cow"])], [2, 3]),
        ([("label", "in", ["dog"])], [2, 3]),
        ([("label", ">", "cat")], [2, 3]),
        ([("year", "<", 2), ("label", "=", "cat")], [0, 1]),
        ([[("year", "=", 3)], [("label", "=", "dog")]], [9, 10, 2, 3]),
        ([("x", "<=", 1), ("label", "=", "cat")], [0, 1, 1]),
        ([[("label", "=", "dog")], [("x", "=", 0)]], [0, 2, 3]),
    ],
)
def test_partition_keys(keyed: tuple[Manifest, Blocks], filters: Filters, left: list[int]) -> None:
    manifest, blocks = keyed
    footers = [
        pq.read_metadata(pa.BufferReader(blocks.read(group.file, 0, group.file.size)))
        for group in narrow(manifest, blocks, filters).row_groups
    ]
    groups = narrow(manifest, blocks, filters).row_groups
    found = [
        footer.row_group(group.number).column(0).statistics.min for footer, group in zip(footers, groups, strict=True)
    ]
    assert found == left


def test_values_of_keys_have_types(keyed: tuple[Manifest, Blocks]) -> None:
    for said in [("year", "=", "1"), ("label", "=", 1)]:
        with pytest.raises(ConfigError, match="give a value of it"):
            narrow(*keyed, [said])


def test_keys_alone_need_no_footer(keyed: tuple[Manifest, Blocks], monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    footer = pq.ParquetFile
    monkeypatch.setattr(pq, "ParquetFile", lambda source: read.append(1) or footer(source))
    narrow(*keyed, [("label", "=", "cat")])
    assert not read
    narrow(*keyed, [("y", "=", 1), ("label", "=", "cat")])
    assert len(read) == 2


def test_fingerprints(keyed: tuple[Manifest, Blocks]) -> None:
    whole, blocks = keyed
    cats = narrow(whole, blocks, [("label", "=", "cat")])
    assert cats.num_rows == 4
    assert cats.fingerprint != whole.fingerprint
    assert narrow(whole, blocks, [("label", "in", ["cat"])]) == cats
    assert narrow(whole, blocks, [("label", "=", "dog")]).fingerprint != cats.fingerprint
    assert narrow(whole, blocks, [("year", ">", 0)]) is whole
    assert narrow(cats, blocks, [("year", "=", 1)]).fingerprint not in {whole.fingerprint, cats.fingerprint}


def test_a_filtered_manifest_survives_its_bytes(keyed: tuple[Manifest, Blocks]) -> None:
    second = narrow(*keyed, [("x", "=", 1), ("year", "=", 1)])
    assert [group.number for group in second.row_groups] == [1]
    assert Manifest.from_bytes(second.to_bytes()) == second


def test_a_dataset_of_some_row_groups(bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig) -> None:
    options = {"storage_options": bucket.options, "cache": cache}
    url = dataset_of([[3, 4], [5], [2]])
    dataset = make_dataset(url, filters=[("row_id", ">=", 3), ("row_id", "<", 12)], **options)
    assert [row["row_id"].item() for row in dataset.__getitems__(range(9))] == list(range(3, 12))
    with pytest.raises(ConfigError, match="leave none of 14 rows"):
        make_dataset(url, filters=[("row_id", "<", 0)], **options)
