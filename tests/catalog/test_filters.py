"""Filters keep the same rows as pyarrow, or raise an error with a reason."""

from __future__ import annotations

import datetime as dt
import io
import itertools
import math
import operator
import os
import random
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
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
from dataload.cache.origin.source import open_source
from dataload.catalog.filtering import ROW_GROUPS_AT_ONCE, narrow
from dataload.catalog.filters import Filters, filter_of
from dataload.catalog.manifest import Manifest, RowGroup
from dataload.catalog.pruning import decide
from dataload.catalog.resolve import resolve
from dataload.errors import ConfigError, OriginError

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
SMALL_DECIMALS = [pa.decimal32(7, 2), pa.decimal64(12, 2)] if hasattr(pa, "decimal32") else []
VALUES |= {kind: VALUES[pa.decimal128(7, 2)] for kind in SMALL_DECIMALS}
LACKING = pytest.param(None, marks=pytest.mark.skip(f"pyarrow {pa.__version__} lacks decimals of 32 and 64 bits"))
TYPES = [*VALUES, *([] if SMALL_DECIMALS else [LACKING])]
# Values that are of no column's type, or outside of its range. Arrow compares many of them.
OTHERS: list[Any] = [0.5, -1, 300, 2**40, 2**63 - 1, math.inf, math.nan, True, Decimal("0.5"), Decimal("-1.234")]
OTHERS += ["1970-01-01", b"ab", DAY, dt.date(2024, 1, 1), DAY.replace(tzinfo=dt.UTC), dt.timedelta(seconds=1)]
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
    blocks = Blocks.open(open_source(str(folder), None), None)
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


def compared(schema: pa.Schema) -> pa.Schema:
    """Return the schema with types that pyarrow compares by every operator."""
    others = {
        pa.float16(): pa.float32(),
        **{kind: pa.decimal128(kind.precision, kind.scale) for kind in SMALL_DECIMALS},
    }
    return pa.schema([(field.name, others.get(field.type, field.type)) for field in schema])


def holds(predicate: tuple[str, str, Any], groups: list[pa.Table]) -> list[np.ndarray]:
    """Return the rows that match by pyarrow, of which `read_table` does not compare all types and values."""
    name, sign, value = predicate
    whole = pa.concat_tables(groups)
    whole = whole.cast(compared(whole.schema))
    kind = whole.schema.field(name).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    kind = pa.float64() if pa.types.is_floating(kind) else kind
    column = pc.field(name)
    value = pa.array(value, kind) if "in" in sign else pa.scalar(value, kind)
    numbered = whole.append_column("number", pa.array(range(len(whole)), pa.int64()))
    matching = COMPARE[sign](column, value)
    left = pads.dataset(numbered).to_table(filter=matching, columns=["number"])["number"].to_numpy()
    borders = np.cumsum([len(group) for group in groups])[:-1]
    return np.split(np.isin(np.arange(len(whole)), left), borders)


def read_by_pyarrow(groups: list[pa.Table], filters: Filters) -> list[int] | None:
    """Return the rows that `pyarrow.parquet.read_table` keeps; None if it raises. Its statistics would lose NaN."""
    whole, body = pa.concat_tables(groups), io.BytesIO()
    whole = whole.cast(compared(whole.schema))
    pq.write_table(whole.append_column("number", pa.array(range(len(whole)), pa.int64())), body, write_statistics=False)
    try:
        return pq.read_table(body, filters=filters, columns=["number"])["number"].to_pylist()
    except (pa.ArrowException, OverflowError):
        return None


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
    sign = draw(st.sampled_from(OPERATORS))
    if "in" in sign:  # pyarrow rounds other values to the type
        return column, sign, draw(st.lists(st.sampled_from([*VALUES[kind], None]), max_size=3))
    return column, sign, draw(st.sampled_from(draw(st.sampled_from([VALUES[kind], [*VALUES[kind], *OTHERS]]))))


def kept(manifest: Manifest, blocks: Blocks, filters: Filters) -> list[int]:
    """Return the numbers of the rows that filters keep."""
    try:
        narrowed = narrow(manifest, blocks, filters)
    except ConfigError as error:
        if "leave none" in str(error):
            return []
        raise
    starts = np.cumsum([0, *(group.rows for group in manifest.row_groups)])
    found = []
    for number, group in enumerate(narrowed.row_groups):
        mask = np.ones(group.rows, bool) if narrowed.selection is None else narrowed.selection.mask(number)
        found += (starts[manifest.row_groups.index(group)] + np.flatnonzero(mask)).tolist()
    return found


@given(data=st.data())
def test_lists_keep_what_pyarrow_keeps(data: st.DataObject, stored: Stored) -> None:
    groups = kinds_and_groups(data.draw, list(VALUES))
    choices = [
        [predicate_of(data.draw, groups[0]) for _ in range(data.draw(st.integers(1, 2)))]
        for _ in range(data.draw(st.integers(1, 2)))
    ]
    filters = choices[0] if len(choices) == 1 else choices
    expected = read_by_pyarrow(groups, filters)
    try:
        found = kept(*stored(groups), filters)
    except ConfigError:
        assert expected is None
    else:
        assert expected in (None, found)


@pytest.mark.variants
@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_every_type_by_every_operator(kind: pa.DataType, stored: Stored) -> None:
    values = VALUES[kind]
    groups = [pa.table({"x": pa.array([value] * 2, kind)}) for value in values]
    manifest, blocks = stored(groups)
    for sign in OPERATORS:
        for value in (value for value in values if value is not math.nan):
            said = ("x", sign, [value] if "in" in sign else value)
            assert kept(manifest, blocks, [said]) == np.flatnonzero(np.concatenate(holds(said, groups))).tolist()


@pytest.mark.parametrize("number", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_random_expressions_keep_what_pyarrow_keeps(tmp_path: Path, number: int) -> None:
    dice, rows = random.Random(0), 4000
    integers = pa.array([None if dice.random() < 0.05 else dice.randrange(40) for _ in range(rows)])
    words = pa.array([None if dice.random() < 0.05 else dice.choice("abcdefgh") for _ in range(rows)])
    members = [{"day": number // 500, "size": dice.random()} for number in range(rows)]
    whole = pa.table({"id": range(rows), "n": integers, "x": np.random.default_rng(0).random(rows), "word": words})
    whole = whole.append_column("s", pa.array(members))
    for label, part in (("cat", whole[:2500]), ("dog", whole[2500:])):
        (tmp_path / f"label={label}").mkdir()
        pq.write_table(part, tmp_path / f"label={label}" / "rows.parquet", row_group_size=300)
    reference = pads.dataset(tmp_path, partitioning="hive")

    def leaf() -> pc.Expression:
        return dice.choice(
            [
                lambda: pc.field("id") < dice.randrange(rows),
                lambda: pc.field("id") >= dice.randrange(rows),
                lambda: pc.field("n") == dice.randrange(40),
                lambda: pc.field("n").isin(dice.sample(range(40), 3)),
                lambda: pc.field("n").is_null(),
                lambda: pc.field("x") > dice.random(),
                lambda: pc.field("x") != 0.5,
                lambda: pc.field("word") == dice.choice("abcdefgh"),
                lambda: pc.field("word").isin(["a", None]),
                lambda: pc.field("s", "day") == dice.randrange(9),
                lambda: pc.field("s", "size") < dice.random(),
                lambda: pc.field("label") == dice.choice(["cat", "dog"]),
                lambda: pc.utf8_upper(pc.field("word")) > "D",
                lambda: pc.add(pc.field("n"), pc.field("id")) > dice.randrange(rows),
            ]
        )()

    def tree(depth: int) -> pc.Expression:
        if depth == 0 or dice.random() < 0.2:
            return leaf()
        if dice.random() < 0.2:
            return ~tree(depth - 1)
        return dice.choice([operator.and_, operator.or_])(tree(depth - 1), tree(depth - 1))

    counts = []
    for _ in range(number):
        expression = tree(3)
        expected = reference.to_table(filter=expression, columns=["id"])["id"].to_numpy()
        if not len(expected):
            with pytest.raises(ConfigError, match="leave none of 4000 rows"):
                make_dataset(tmp_path, filters=expression, cache=False)
            continue
        dataset = make_dataset(tmp_path, columns=["id"], filters=expression, cache=False)
        assert len(dataset) == len(expected)
        np.testing.assert_array_equal(
            dataset.__getitems__(range(len(dataset))).columns["id"].numpy(), np.sort(expected), str(expression)
        )
        counts.append(len(expected))
    assert len(counts) > 0.7 * number
    assert min(counts) < rows // 20
    assert max(counts) > rows // 2


def test_long_lists_that_differ_in_the_middle(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [number * 2 for number in range(100)]}), tmp_path / "x.parquet")
    cache = CacheConfig(cache_dir=str(tmp_path / "cache"), cache_bytes="100MB")
    for missing in (40, 60):
        members = [number for number in range(100) if number != missing]
        dataset = make_dataset(tmp_path / "x.parquet", filters=pc.field("x").isin(members), cache=cache)
        assert [int(row["x"]) for row in dataset.__getitems__(range(49))] == [
            number for number in range(0, 100, 2) if number != missing
        ]


DIGEST = """
import pyarrow as pa
from dataload.catalog.filters import filter_of
from dataload.catalog.manifest import Manifest

schema = pa.schema({"x": pa.string()})
print(filter_of([("x", "in", {*"abcdefgh", None})], Manifest(schema, (), ""), schema).digest)
"""


def test_a_set_is_the_same_filter_in_all_processes() -> None:
    """So all ranks share the cached result."""
    digests = set()
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", DIGEST], capture_output=True, check=True, env=environment)
        digests.add(done.stdout)
    assert len(digests) == 1


def test_nulls_match_as_in_pyarrow(stored: Stored) -> None:
    groups = [pa.table({"x": [1, None, 5]}), pa.table({"x": pa.nulls(2, pa.int64())})]
    for sign, value, left in [
        ("=", 1, [0]),
        ("!=", 1, [2]),
        ("<", 5, [0]),
        ("not in", [1], [1, 2, 3, 4]),
        ("not in", [1, None], [2]),
        ("in", [1, 5], [0, 2]),
        ("in", [1, None], [0, 1, 3, 4]),
        ("in", [None], [1, 3, 4]),
        ("in", [], []),
        ("not in", [], [0, 1, 2, 3, 4]),
    ]:
        filters = [("x", sign, value)]
        assert kept(*stored(groups), filters) == read_by_pyarrow(groups, filters) == left


def test_a_column_that_is_null_in_all_files(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.nulls(3), "y": [1, 2, 3]}), tmp_path / "x.parquet")

    def rows(sign: str, value: Any) -> int:
        return len(make_dataset(str(tmp_path), filters=[("x", sign, value)], cache=False, columns=["y"]))

    assert [rows("in", [None]), rows("in", [1, None]), rows("not in", [1])] == [3, 3, 3]
    for sign, value in (("in", [1]), ("not in", [None]), ("==", 1)):
        with pytest.raises(ConfigError, match="leave none of 3 rows"):
            rows(sign, value)


@pytest.mark.parametrize(
    ("predicate", "left"),
    [
        (("x", ">", 1.5), [2, 3]),
        (("x", "=", 1.5), []),
        (("x", "!=", math.nan), [0, 2, 3]),
        (("x", "<", math.inf), [0, 2, 3]),
        (("x", "in", {0.5, 1}), [0]),
        (("x", "=", Decimal("5.0")), [2]),
        (("small", "!=", -1), [0, 2, 3]),
        (("small", "<", 300), [0, 2, 3]),
        (("small", "in", [-1, 255]), [3]),
        (("small", "<", 2**40), [0, 2, 3]),
        (("half", "=", math.nan), []),
        (("half", "in", [math.nan, 0.5]), [0, 3]),
        (("text", "=", b"b"), [2]),
        (("date", ">=", DAY + dt.timedelta(hours=1)), [2, 3]),
        (("time", ">", dt.date(2024, 1, 1)), [2, 3]),
        (("zoned", ">", dt.date(2024, 1, 1)), [2, 3]),
        (("price", "<", Decimal("1.234")), [0]),
        (("price", "<", 1.5), [0]),
        (("price", "in", [Decimal("1.234"), Decimal(2), Decimal("9.001")]), [3]),
        (("price", "not in", [Decimal("1.234"), Decimal(2)]), [0, 1, 2]),
    ],
    ids=str,
)
def test_values_that_are_not_of_the_type_of_the_column(
    predicate: tuple[str, str, Any], left: list[int], stored: Stored
) -> None:
    """The first two rows are one row group, and statistics decide about the others."""
    days = [DAY, None, DAY + dt.timedelta(days=1), DAY + dt.timedelta(days=9)]
    table = pa.table(
        {
            "x": [1, None, 5, 2**20],
            "small": pa.array([1, None, 7, 255], pa.uint8()),
            "half": [0.5, None, 1.5, math.nan],
            "text": ["a", None, "b", "c"],
            "date": pa.array(days, pa.date32()),
            "time": pa.array(days, pa.timestamp("us")),
            "zoned": pa.array(days, pa.timestamp("us", "UTC")),
            "price": pa.array([Decimal("1.23"), None, Decimal("9.00"), Decimal("2.00")]),
        }
    )
    groups = [table[:2], table[2:3], table[3:]]
    assert kept(*stored(groups), [predicate]) == left
    if not (isinstance(predicate[2], Decimal) and pa.__version__.startswith("18.")):  # It compares their integers.
        assert read_by_pyarrow(groups, [predicate]) == left


@pytest.mark.parametrize("unit", ["M", "D", "h", "m", "s", "ns"])
def test_times_of_numpy_are_compared_in_every_unit(unit: str, stored: Stored) -> None:
    days = [dt.datetime(2024, month, 1) for month in (1, 2, 3)]  # noqa: DTZ001
    table = pa.table(
        {
            "date": pa.array(days, pa.date32()),
            "time": pa.array(days, pa.timestamp("us")),
            "span": pa.array([dt.timedelta(hours=hours) for hours in (24, 48, 72)], pa.duration("ms")),
        }
    )
    manifest, blocks = stored([table])
    february = np.datetime64("2024-02").astype(f"M8[{unit}]")
    for name in ("date", "time"):
        assert kept(manifest, blocks, [(name, ">=", february)]) == [1, 2]
        assert kept(manifest, blocks, [(name, "in", [february])]) == [1]
    if unit != "M":
        span = np.timedelta64(2, "D").astype(f"m8[{unit}]")
        assert kept(manifest, blocks, [("span", "<", span)]) == [0]
        assert kept(manifest, blocks, [("span", "not in", [span])]) == [0, 2]


@pytest.mark.variants
@pytest.mark.parametrize("kind", [pa.int8(), pa.uint8(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()], ids=str)
@pytest.mark.parametrize("sign", OPERATORS)
def test_integers_of_every_size_are_compared_with_every_number(kind: pa.DataType, sign: str, stored: Stored) -> None:
    """Also with numbers that the type does not have, where the column has integers that no float has."""
    least, most = int(np.iinfo(str(kind)).min), int(np.iinfo(str(kind)).max)
    rows = [least, 0, 1, 3, most - 1, most, None]
    groups = [pa.table({"x": pa.array(part, kind)}) for part in (rows[:3], rows[3:])]
    manifest, blocks = stored(groups)
    numbers = [-0.5, 0.5, 3.0, np.float32(0.5), np.int64(3), Decimal("0.5"), Decimal(3), least - 1, least - 0.5]
    numbers += [most + 1, -(2**70), math.inf, -math.inf, math.nan, np.uint8(0)]
    for number in numbers:
        value = [1, number] if "in" in sign else number
        compare = {**COMPARE, "in": lambda row, among: row in among, "not in": lambda row, among: row not in among}[
            sign
        ]
        left = [n for n, row in enumerate(rows) if (sign == "not in" if row is None else compare(row, value))]
        assert kept(manifest, blocks, [("x", sign, value)]) == left, value


@pytest.mark.variants
@pytest.mark.parametrize("kind", [pa.decimal128(5, 2), pa.decimal128(3, 0), pa.decimal256(50, 1)], ids=str)
@pytest.mark.parametrize("sign", OPERATORS)
def test_decimals_are_compared_with_every_number(kind: pa.DataType, sign: str, stored: Stored) -> None:
    """Also with numbers of more digits than the type has, and with floats, of which Arrow makes 0.5700000000000001."""
    most = 10**kind.precision - 1
    rows = [Decimal(f"{number}e{-kind.scale}") for number in (-most, 0, 1, 3, most - 1, most)]
    prices = [Decimal(price) for price in ("0.57", "1.15", "4.35", "19.99")] if kind.scale == 2 else []
    rows += prices
    groups = [pa.table({"x": pa.array(part, kind)}) for part in (rows[:3], [*rows[3:], None])]
    manifest, blocks = stored(groups)
    numbers: list[Any] = [-1, 0, 1, 3, 1000, 10**60, -(10**60), *rows, Decimal("-0.0005"), Decimal("1.234")]
    numbers += [most, Decimal(f"{most}.5"), Decimal(f"-{most}.5"), Decimal("1e70"), Decimal("inf")]
    numbers += [0.5, -0.5, 1e70, math.inf, -math.inf, math.nan, np.float64(0.5)]
    exact: dict[Any, Decimal] = {float(price): price for price in prices}
    for number in [*numbers, *exact, *map(np.float64, exact)]:
        value = [1, number] if "in" in sign else number
        compare = {**COMPARE, "in": lambda row, among: row in among, "not in": lambda row, among: row not in among}[
            sign
        ]
        meant = [1, exact.get(number, number)] if "in" in sign else exact.get(number, number)
        left = [n for n, row in enumerate(rows) if compare(Fraction(row), meant)] + [len(rows)] * (sign == "not in")
        assert kept(manifest, blocks, [("x", sign, value)]) == left, value


@pytest.mark.variants
@pytest.mark.parametrize("kind", [kind for kind in VALUES if not pa.types.is_floating(kind)], ids=str)
def test_a_list_keeps_the_rows_that_equal_its_value(kind: pa.DataType, stored: Stored) -> None:
    """Also a value that the type does not have, which pyarrow rounds."""
    rows = [*VALUES[kind], None]
    manifest, blocks = stored([pa.table({"x": pa.array(rows, kind)})])
    others = [1, 2, "1", 0.1, 0.101, 1e30, DAY + dt.timedelta(hours=12), DAY + dt.timedelta(microseconds=1)]
    others += [dt.time(0, 0, 0, 1), dt.timedelta(microseconds=1), np.datetime64("2024-01-01T12", "us")]
    for value in [*VALUES[kind], *OTHERS, *others]:
        try:
            equal = kept(manifest, blocks, [("x", "=", value)])
        except ConfigError:
            if isinstance(value, str):
                continue  # In a list, it is read as a value of the type.
            for sign in ("in", "not in"):
                with pytest.raises(ConfigError, match="cannot be compared"):
                    kept(manifest, blocks, [("x", sign, [value])])
        else:
            assert kept(manifest, blocks, [("x", "in", [value])]) == equal, value
            assert kept(manifest, blocks, [("x", "not in", [value])]) == sorted({*range(len(rows))} - {*equal}), value
            assert kept(manifest, blocks, [("x", "in", [value, None])]) == [*equal, len(rows) - 1], value


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [(pa.date32(), DAY.date(), "2024-01-01"), (pa.int64(), 2020, "2020"), (pa.decimal128(5, 2), Decimal(2), "2.00")],
    ids=str,
)
def test_a_text_in_a_list_is_read_as_a_value(kind: pa.DataType, value: Any, text: str, stored: Stored) -> None:
    manifest, blocks = stored([pa.table({"x": pa.array([value, None], kind)})])
    assert kept(manifest, blocks, [("x", "in", [text])]) == [0]
    assert kept(manifest, blocks, [("x", "not in", [text])]) == [1]
    with pytest.raises(ConfigError, match="cannot be compared"):
        kept(manifest, blocks, [("x", "in", ["a"])])


def test_floats_are_compared_with_large_integers_and_decimals(stored: Stored) -> None:
    manifest, blocks = stored([pa.table({"x": [0.5, 2.0**63, 1e300]})])
    assert kept(manifest, blocks, [("x", "<", 2**63)]) == [0]
    assert kept(manifest, blocks, [("x", "in", [2**63, Decimal("0.5")])]) == [0, 1]


def test_a_null_key_in_a_folder_name_matches_as_in_pyarrow(tmp_path: Path) -> None:
    for number, key in enumerate(["1", "2", "__HIVE_DEFAULT_PARTITION__"]):
        (tmp_path / f"key={key}").mkdir()
        pq.write_table(pa.table({"id": [number]}), tmp_path / f"key={key}" / "a.parquet")
    for predicate in (("key", "not in", [1]), ("key", "in", [2, None]), ("key", "!=", 1), ("key", "<", 1.5)):
        expected = pq.read_table(tmp_path, filters=[predicate])["id"].to_pylist()
        dataset = make_dataset(tmp_path, columns=["id"], filters=[predicate], cache=False)
        assert dataset.__getitems__(range(len(dataset))).columns["id"].tolist() == expected


def test_statistics_ignore_nan_and_rows_do_not(stored: Stored) -> None:
    """Pyarrow's own datasets lose the NaN here: the statistics say that all values are 1."""
    manifest, blocks = stored([pa.table({"x": [1.0, math.nan], "y": [1.0, math.nan], "z": [1, 2]})])
    x, y = pc.field("x"), pc.field("y")
    for filters, left in [
        ([("x", "!=", 1.0)], [1]),
        ([("x", "not in", [1.0])], [1]),
        ([("x", "<=", 1.0)], [0]),
        (~(x <= 1), [1]),
        (~(x <= 1) & ~(y <= 1), [1]),
        (~(x <= 1) | (pc.field("z") > 5), [1]),
        (x < 0, []),
    ]:
        assert kept(manifest, blocks, filters) == left


def test_zeros_in_lists_of_floats(stored: Stored) -> None:
    """The bounds of zeros are -0.0 and 0.0."""
    groups = [pa.table({"x": [0.0, 0.0]}), pa.table({"x": [0.0, 1.0]}), pa.table({"x": [5.0, 2.0]})]
    assert kept(*stored(groups), [("x", "in", [0.0, 1.0])]) == [0, 1, 2, 3]
    assert kept(*stored(groups), pc.field("x").isin([0.0])) == [0, 1, 2]


def test_zeros_in_functions_of_floats(stored: Stored) -> None:
    groups = [pa.table({"x": [0.0, 0.0]}), pa.table({"x": [-0.0, 2.0]})]
    x = pc.field("x")
    assert kept(*stored(groups), x.cast(pa.string()) == "0") == [0, 1]
    assert kept(*stored(groups), pc.divide(pc.scalar(1.0), x) > 0) == [0, 1, 3]
    assert kept(*stored(groups), pc.atan2(x, pc.scalar(-1.0)) > 0) == [0, 1, 3]


@pytest.mark.parametrize(
    "nan", [pc.scalar(math.nan), pc.divide(pc.scalar(0.0), pc.scalar(0.0)), pc.scalar("nan").cast(pa.float64())]
)
def test_casts_beside_nan(nan: pc.Expression, stored: Stored) -> None:
    """Arrow takes NaN for larger than the bounds of an integer."""
    groups = [pa.table({"x": [1, 255]}), pa.table({"x": [7, 7]}), pa.table({"x": [None, 2]})]
    numbers = pc.field("x").cast(pa.float64())
    assert kept(*stored(groups), numbers < nan) == []
    assert kept(*stored(groups), nan >= numbers) == []
    assert kept(*stored(groups), ~(numbers <= nan)) == [0, 1, 2, 3, 5]


def test_casts_that_overflow(stored: Stored) -> None:
    groups = [pa.table({"x": pa.array([1, 128], pa.uint8())}), pa.table({"x": pa.array([0, 1], pa.uint8())})]
    signed = pc.field("x").cast(pa.int8(), safe=False)
    assert kept(*stored(groups), signed == -128) == [1]
    assert kept(*stored(groups), ~(signed <= 0)) == [0, 3]


def test_columns_and_texts_called_nan(stored: Stored) -> None:
    """They do not keep statistics from deciding."""
    groups = [pa.table({"finance": [number], "text": ['a "nan" b']}) for number in range(3)]
    manifest, blocks = stored(groups)
    chosen = filter_of((pc.field("finance") > 1) & (pc.field("text") == 'a "nan" b'), manifest, manifest.schema)
    assert decide(manifest, blocks, chosen) == [False, False, True]


def test_statistics_that_arrow_cannot_use(stored: Stored) -> None:
    ids = [uuid.UUID(int=number).bytes for number in range(4)]
    table = pa.table(
        {
            "id": pa.ExtensionArray.from_storage(pa.uuid(), pa.array(ids, pa.binary(16))),
            "f": [1.0, 2.0, 3.0, 4.0],
        }
    )
    manifest, blocks = stored([table[:2], table[2:]])
    assert kept(manifest, blocks, pc.field("id") == pa.scalar(ids[2], pa.binary(16))) == [2]
    assert kept(manifest, blocks, pc.field("f").cast(pa.int64()) == 3) == [2]


def test_views_of_text(stored: Stored) -> None:
    table = pa.table({"view": pa.array(["a", "b", "c", "d"], pa.string_view())})
    try:
        manifest, blocks = stored([table[:2], table[2:]])
    except pa.ArrowNotImplementedError:
        pytest.skip(f"pyarrow {pa.__version__} cannot write views to Parquet")
    assert kept(manifest, blocks, [("view", ">=", "c")]) == [2, 3]


def test_expressions_without_columns(stored: Stored) -> None:
    groups = [pa.table({"x": [1, 2]}), pa.table({"x": [3]})]
    assert kept(*stored(groups), pc.scalar(True)) == [0, 1, 2]
    assert kept(*stored(groups), pc.scalar(False)) == []
    assert kept(*stored(groups), pc.scalar(True) & (pc.field("x") > 1)) == [1, 2]


def test_an_expression_that_fails_blames_itself(stored: Stored) -> None:
    with pytest.raises(ConfigError, match=r"filters=.*divide.* cannot be evaluated: divide by zero"):
        narrow(*stored([pa.table({"x": [1, 0]})]), pc.divide(pc.scalar(1), pc.field("x")) > 0)


@pytest.mark.parametrize("text", [pa.string(), pa.string_view()], ids=["parquet", "views"])
def test_a_filter_does_not_see_rows_that_an_earlier_one_dropped(tmp_path: Path, text: pa.DataType) -> None:
    """Also if Arrow cannot gather the text, as in Arrow files with views."""
    table = pa.table({"x": [4, 0, 2, 1, 0, 5], "text": pa.array(["1", "a", "", "20", "b", "3"], text)})
    if text == pa.string():
        pq.write_table(table, tmp_path / "x.parquet", row_group_size=3)
    else:
        write_ipc(tmp_path / "x.arrow", table, rows=3)
    cache = CacheConfig(cache_dir=str(tmp_path / "cache"), cache_bytes="100MB")
    dataset = make_dataset(f"{tmp_path}/x.*", cache=cache)
    quotient = pc.divide(pc.scalar(4), pc.field("x")) >= 2
    number = pc.field("text").cast(pa.int64()) > 1
    for expression in (quotient, number):
        with pytest.raises(ConfigError, match="cannot be evaluated"):
            dataset.filter(expression)
    without_zeros = dataset.filter(pc.field("x") != 0)
    assert without_zeros.filter(quotient).__getitems__([0, 1]).columns["x"].tolist() == [2, 1]
    left = dataset.select([0, 3, 5]).filter(number)
    assert left.__getitems__(range(len(left))).columns["text"] == ["20", "3"]
    with pytest.raises(ConfigError, match="cannot be evaluated"):
        without_zeros.filter(number)
    assert dataset.select([3, 5]).filter(number).num_rows == 2


def test_messages_are_one_short_line(stored: Stored) -> None:
    for filters in ([("x", "in", list(range(100_000)))], pc.field("x").isin(list(range(100)))):
        with pytest.raises(ConfigError, match="leave none of 1 rows") as caught:
            narrow(*stored([pa.table({"x": [-5]})]), filters)
        assert len(str(caught.value)) < 400
        assert "\n" not in str(caught.value)
    assert kept(*stored([pa.table({"x": ["FieldPath(0)"]})]), [("x", "=", "FieldPath(0)")]) == [0]


def test_an_error_ends_the_scan(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, blocks = stored([pa.table({"x": [number, None]}) for number in range(200)])
    read, released = [], threading.Event()

    def matches(_reader: Any, group: RowGroup, *_: Any) -> Any:
        read.append(group.number)
        if group.number == 0:
            raise OriginError("no answer")
        released.wait()
        return np.zeros(2, bool)

    monkeypatch.setattr("dataload.catalog.filtering._matches", matches)
    # In one part, row group 0 is the first. Others would occupy all threads while they wait for its error.
    monkeypatch.setattr("dataload.catalog.filtering.CACHED_TOGETHER", len(manifest.row_groups))
    with pytest.raises(OriginError, match="no answer"):
        narrow(manifest, blocks, [("x", "<", 300)])
    released.set()
    for thread in threading.enumerate():
        if thread.name.startswith("dataload-filter"):
            thread.join(200)
            assert not thread.is_alive()
    assert len(read) <= 1 + ROW_GROUPS_AT_ONCE


def test_members_of_structs_that_are_null(stored: Stored) -> None:
    groups = [pa.table({"many": [[1, 2]] * 2, "s": [{"a": [3], "b": number}, None]}) for number in range(3)]
    assert kept(*stored(groups), [("s.b", ">=", 1)]) == [2, 4]
    assert kept(*stored(groups), pc.field("s", "b") >= 1) == [2, 4]
    assert kept(*stored(groups), pc.field("s").is_valid()) == [0, 2, 4]


def test_text_that_is_dictionary_coded(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(3000), "word": ["a", "b", "c"] * 1000}), tmp_path / "x.parquet")
    dataset = make_dataset(tmp_path, filters=[("word", "=", "b")], cache=False)
    assert [int(row["x"]) for row in dataset.__getitems__(range(3))] == [1, 4, 7]


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        (pc.field("z") > 1, "'z' is not in the dataset: there are 'x'"),
        (pc.field("xs") > 1, "did you mean 'x'"),
        (pc.field("s.a") > 1, r"'s\.a' is a member of a struct: write pyarrow.compute.field\('s', 'a'\)"),
        (pc.field("s", "z") > 1, r"'s\.z' is not in the dataset: did you mean 's\.a'"),
        (pc.field("x (y)") > 1, r"'x \(y\)' is not in the dataset"),
        (pc.field("x") + 1, "int64, not bool"),
        (pc.field("x") > "a", "int64, string"),
        (pc.field(0) > 1, "name the columns"),
    ],
    ids=str,
)
def test_expressions_that_cannot_work(expression: pc.Expression, says: str, stored: Stored) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        narrow(*stored([pa.table({"x": [1], "s": [{"a": 1}]})]), expression)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("filters", "says"),
    [
        ([], "must be a list of"),
        ("x", "must be a list of"),
        (("x", "=", 1), "must be a list of"),
        ([[]], "must be a list of"),
        ([("x", "=", 1), []], "must be a list of"),
        ({"x": 1}, "must be a list of"),
        ([("x", "=")], "operator one of"),
        ([("x", "~", 1)], "operator one of"),
        ([[("x", "=", 1)], [1, 2, 3]], "operator one of"),
        ([("z", "=", 1)], "'z' is not in the dataset"),
        ([("dat", "=", 1)], "'dat'.*did you mean 'date'"),
        ([("s", "=", 1)], r"'s' is a struct.*s\.a"),
        ([("list", "=", [1])], "'list' has type list.*only single values"),
        ([("x", "=", "a")], "int64"),
        ([("x", "=", True)], "int64"),
        ([("x", "=", None)], r"matches no row, not even nulls: write \('x', 'in', \[None\]\)"),
        ([("x", "!=", None)], r"matches no row, not even nulls: write \('x', 'not in', \[None\]\)"),
        ([("x", "=", [1])], "int64"),
        ([("x", "in", ["a"])], "int64"),
        ([("x", "in", [1, "a"])], "int64"),
        ([("zoned", "in", [DAY])], "timestamp"),
        ([("x", "in", 1)], "list of values"),
        ([("text", "in", "abc")], "list of values"),
        ([("text", "=", 1)], "string"),
        ([("half", "=", "1")], "double"),
        ([("date", "=", "2024-01-01")], "date32"),
        ([("date", "=", 5)], "date32"),
        ([("time", "=", DAY.replace(tzinfo=dt.UTC))], "timestamp"),
        ([("zoned", "=", DAY)], "timestamp"),
        ([("nanos", "<", dt.datetime(9999, 12, 31))], "out of bounds"),  # noqa: DTZ001
    ],
)
def test_filters_that_cannot_work(filters: Any, says: str, stored: Stored) -> None:
    group = pa.table(
        {
            "x": [1],
            "s": [{"a": 1}],
            "list": [[1]],
            "text": ["a"],
            "half": [0.5],
            "date": [dt.date(2024, 1, 1)],
            "time": pa.array([DAY], pa.timestamp("us")),
            "zoned": pa.array([DAY.replace(tzinfo=dt.UTC)], pa.timestamp("us", "UTC")),
            "nanos": pa.array([DAY], pa.timestamp("ns")),
            "small": pa.array([1], pa.uint8()),
            "price": pa.array([Decimal("1.23")]),
        }
    )
    with pytest.raises(ConfigError, match=says) as caught:
        narrow(*stored([group]), filters)
    assert "\n" not in str(caught.value)


def ids_kept(source: Path, filters: Filters) -> list[int]:
    dataset = make_dataset(source, columns=["id"], filters=filters, cache=False)
    return dataset.__getitems__(range(len(dataset))).columns["id"].tolist()


def write_ipc(path: Path, table: pa.Table, rows: int | None = None) -> None:
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table, rows)


def test_runs(tmp_path: Path) -> None:
    runs = pc.run_end_encode(pa.array([1, 1, 2]))
    struct = pa.StructArray.from_arrays([runs], ["r"], mask=pa.array([False, True, False]))
    write_ipc(tmp_path / "x.arrow", pa.table({"r": runs, "s": struct, "id": [0, 1, 2]}))
    assert ids_kept(tmp_path, [("r", "=", 1)]) == [0, 1]
    assert ids_kept(tmp_path, [("s.r", "=", 1)]) == [0]


def test_members_beside_a_union(tmp_path: Path) -> None:
    union = pa.UnionArray.from_sparse(pa.array([0, 0, 0], pa.int8()), [pa.array([1, 2, 3])])
    struct = pa.StructArray.from_arrays([union, pa.array([0, 1, 2])], ["u", "f"], mask=pa.array([False, True, False]))
    deep = pa.StructArray.from_arrays([struct, union], ["s", "u"])
    write_ipc(tmp_path / "x.arrow", pa.table({"s": struct, "d": deep, "id": [0, 1, 2]}))
    assert ids_kept(tmp_path, [("s.f", ">=", 0)]) == ids_kept(tmp_path, [("d.s.f", ">=", 0)]) == [0, 2]
    assert ids_kept(tmp_path, pc.field("s").is_null()) == [1]
    with pytest.raises(ConfigError, match=r"'s\.u' has type sparse_union.*only single values"):
        ids_kept(tmp_path, [("s.u", "=", 1)])


@pytest.mark.parametrize("order", [1, -1])
def test_bytes_that_have_a_fixed_size_in_some_files(tmp_path: Path, order: int) -> None:
    for number, kind in enumerate([pa.binary(2), pa.binary(), pa.large_binary()][::order]):
        table = pa.table({"h": pa.array([b"aa", b"bb"], kind), "id": [number, -1]})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    for value in (b"aa", pa.scalar(b"aa", pa.binary(2))):
        assert ids_kept(tmp_path, pc.field("h") == value) == [0, 1, 2]
    assert ids_kept(tmp_path, [("h", "=", b"aa")]) == ids_kept(tmp_path, [("h", "in", [b"aa", b"a"])]) == [0, 1, 2]


@pytest.mark.parametrize("order", [1, -1])
def test_structs_whose_members_have_another_order_in_other_files(tmp_path: Path, order: int) -> None:
    kinds = {"a": pa.int64(), "b": pa.string()}
    for number, names in enumerate(["ab", "ba"][::order]):
        struct = pa.array([{"a": 1, "b": "x"}, {"a": 1, "b": "y"}, None], pa.struct([(n, kinds[n]) for n in names]))
        pq.write_table(pa.table({"s": struct, "id": [number, -1, -1]}), tmp_path / f"{number}.parquet")
    assert ids_kept(tmp_path, [("s.a", "=", 1), ("s.b", "=", "x")]) == [0, 1]
    assert ids_kept(tmp_path, (pc.field("s", "a") == 1) & (pc.field("s", "b") == "x")) == [0, 1]
