"""How much padding packed sequences have, beside offline best-fit decreasing and Grain."""

from __future__ import annotations

from bisect import bisect_left, insort
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload import World, make_dataset, make_loader
from dataload.dataset import Dataset

LENGTH = 512


def _lengths(kind: str, count: int) -> list[int]:
    rng = np.random.default_rng(0)
    found = {
        "web pages": rng.lognormal(4.5, 1, count),
        "uniform": rng.uniform(1, LENGTH, count),
        "long": rng.lognormal(5.5, 0.5, count),
    }[kind]
    return np.clip(found, 1, LENGTH).astype(int).tolist()


def _packed(path: Path, lengths: list[int], group: int, **how: Any) -> Dataset:
    values = pa.array(np.zeros(sum(lengths), np.uint8))
    tokens = pa.ListArray.from_arrays(np.cumsum([0, *lengths], dtype=np.int32), values)
    pq.write_table(pa.table({"tokens": tokens}), path, row_group_size=group)
    return make_dataset(path, cache=False).pack(LENGTH, **how)


def _padding(packed: Dataset) -> float:
    loader = make_loader(packed, 16)
    for _ in loader:
        pass
    return loader.stats().padding_share


def _best_fit_decreasing(lengths: list[int]) -> int:
    """Return how many sequences best-fit decreasing makes: each document goes where it leaves least."""
    rests: list[int] = []
    count = 0
    for size in sorted(lengths, reverse=True):
        place = bisect_left(rests, size)
        count += place == len(rests)
        rest = (LENGTH if place == len(rests) else rests.pop(place)) - size
        insort(rests, rest)
    return count


@pytest.mark.parametrize("kind", ["web pages", "uniform", "long"])
def test_split_documents_leave_a_thousandth_of_padding(tmp_path: Path, kind: str) -> None:
    lengths = _lengths(kind, 12_000)
    group = 12_000 * 1000 * LENGTH // sum(lengths)  # documents of 1,000 sequences
    packed = _packed(tmp_path / "a.parquet", lengths, group)
    assert len(packed.row_groups) > 1
    assert _padding(packed) <= 0.001


@pytest.mark.parametrize("kind", ["web pages", "uniform", "long"])
@pytest.mark.parametrize("group", [100, 1000])
def test_whole_documents_fit_as_offline(tmp_path: Path, kind: str, group: int) -> None:
    lengths = _lengths(kind, 3000)
    packed = _packed(tmp_path / "a.parquet", lengths, group, split=False)
    offline = [_best_fit_decreasing(lengths[first : first + group]) for first in range(0, 3000, group)]
    assert packed.block_lengths.tolist() == offline
    assert _padding(packed) == pytest.approx(1 - sum(lengths) / (sum(offline) * LENGTH))


@pytest.mark.parametrize("kind", ["web pages", "uniform", "long"])
def test_whole_documents_have_no_more_padding_than_grains_best_fit(tmp_path: Path, kind: str) -> None:
    """Grain packs a stream of documents into as many open bins as it is told: here those of a row group."""
    grain = pytest.importorskip("grain", reason="grain is not installed: make packers")
    lengths = _lengths(kind, 3000)
    documents = grain.MapDataset.source([{"tokens": np.zeros(size, np.uint8)} for size in lengths]).to_iter_dataset()
    packed = _packed(tmp_path / "a.parquet", lengths, 1000, split=False)
    for bins in (64, int(packed.block_lengths.max())):
        best_fit = grain.experimental.BestFitPackIterDataset(
            documents, length_struct={"tokens": LENGTH}, num_packing_bins=bins
        )
        assert len(packed) <= sum(1 for _ in best_fit)


@pytest.mark.parametrize(("group", "split"), [(20, True), (20, False), (3000, True), (3000, False)])
def test_a_loader_warns_of_much_padding(tmp_path: Path, group: int, split: bool, caplog: Any) -> None:
    """Small row groups leave it. Each has a sequence that is not full."""
    packed = _packed(tmp_path / "a.parquet", [64] * 3000 if split else [300] * 3000, group, split=split)
    share = packed.padding_share
    loader = make_loader(packed, 16)
    for _ in loader:
        pass
    assert share == pytest.approx(loader.stats().padding_share)
    warned = [record.getMessage() for record in caplog.records if "is padding" in record.getMessage()]
    assert len(warned) == (share > 0.1)
    assert share < 0.001 if split and group == 3000 else share > 0.1
    if warned:
        assert warned[0].startswith(f"{100 * share:.0f}% of the packed sequences is padding")
        assert ("split=True" in warned[0]) == (not split)
        make_loader(packed, 16, world=World(1, 2))
        assert len(caplog.records) == 1


def test_documents_that_stay_whole_meet_others_in_each_epoch(tmp_path: Path) -> None:
    """Most lengths in a row group are of one document only, which ties would leave where it was."""
    lengths = _lengths("web pages", 400)
    packed = _packed(tmp_path / "a.parquet", lengths, 400, split=False)
    together = []
    for epoch in range(3):
        pairs: set[tuple[int, int]] = set()
        for place in packed.locate(range(len(packed))):
            own = sorted(piece.document.row for piece in place.documents(epoch))
            pairs |= {(one, other) for number, one in enumerate(own) for other in own[number + 1 :]}
        together.append(pairs)
    first, *others = together
    assert all(len(first & other) < 0.2 * len(first) for other in others)
