"""Partition keys and statistics decide about row groups, so that filters fetch only columns of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload import make_dataset
from dataload.cache.blocks.reader import Blocks
from dataload.cache.config import CacheConfig
from dataload.cache.origin.source import open_source
from dataload.catalog import footer_cache
from dataload.catalog.filtering import narrow
from dataload.catalog.filters import Filters
from dataload.catalog.manifest import Manifest
from dataload.catalog.resolve import resolve
from dataload.errors import ConfigError


def table(**columns: Any) -> pa.Table:
    return pa.table(columns)


@pytest.fixture
def keyed(bucket: Any, cache: CacheConfig) -> tuple[Manifest, Blocks]:
    for number, key in enumerate(["label=cat/year=1", "label=cat/year=2", "label=dog/year=1"]):
        bucket.put_table(f"data/{key}/x.parquet", table(x=[number, number + 1], y=[1, 1]), row_group_size=1)
    none = "label=__HIVE_DEFAULT_PARTITION__/year=3"
    bucket.put_table(f"data/{none}/x.parquet", table(x=[9, 10], y=[1, 1]), row_group_size=1)
    blocks = Blocks.open(open_source(bucket.url(), bucket.options), cache)
    return resolve(bucket.url("data"), blocks), blocks


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ([("label", "=", "cat")], [0, 1, 1, 2]),
        ([("label", "!=", "cat")], [2, 3]),
        ([("label", "not in", ["cat", "cow"])], [9, 10, 2, 3]),  # A null key stays, as in pyarrow.
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


def test_keys_alone_need_only_the_schema_of_the_first_file(
    keyed: tuple[Manifest, Blocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    parse = footer_cache.parse_footer
    monkeypatch.setattr(footer_cache, "parse_footer", lambda data, obj: read.append(1) or parse(data, obj))
    narrow(*keyed, [("label", "=", "cat")])
    assert len(read) == 1
    read.clear()
    narrow(*keyed, [("y", "=", 1), ("label", "=", "cat")])
    assert len(read) == 3


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
