"""`Dataset.pack`: which values come where, in each epoch, by brute force; what it works with; and errors."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import documents
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import feather
from seeds import seeds
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Subset

from dataload import CacheConfig, World, make_dataset, make_loader, mix
from dataload.dataset import Dataset
from dataload.errors import ConfigError, DataError

LENGTH = 16
PADS = {"tokens": documents.PAD, "labels": documents.LABEL_PAD}


def _packed(dataset: Dataset, length: int, **how: Any) -> Dataset:
    return dataset.pack(length, also=["labels"], pad=PADS, **how)


def _epoch(dataset: Any, length: int, epoch: int = 0, batch_size: int = 3, **how: Any) -> list[Any]:
    loader = make_loader(dataset, batch_size, **how)
    loader.set_epoch(epoch)
    return [sequence for batch in loader for sequence in documents.segments_of(batch, length)]


@pytest.mark.variants
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("seed", seeds(1, 20))
def test_each_value_comes_once_in_an_epoch(tmp_path: Path, suffix: str, split: bool, seed: int) -> None:
    for number in range(10):
        rng = np.random.default_rng(10 * seed + number)
        length, count, group = int(rng.integers(1, 40)), int(rng.integers(1, 60)), int(rng.integers(1, 25))
        lengths = documents.lengths_around(length, count, rng)
        file = documents.write(tmp_path / f"{number}{suffix}", lengths, group)
        packed = _packed(make_dataset(file, cache=False), length, split=split)
        for epoch in range(2):
            found = _epoch(packed, length, epoch, shuffle=["block", "full", False][number % 3])
            assert len(found) == len(packed)
            documents.check_epoch(found, lengths, length, split=split)


@pytest.fixture
def lengths() -> list[int | None]:
    return documents.lengths_around(LENGTH, 90, np.random.default_rng(0))


@pytest.fixture
def file(tmp_path: Path, lengths: list[int | None]) -> Path:
    return documents.write(tmp_path / "documents.parquet", lengths, 15)


@pytest.fixture
def dataset(file: Path, cache: CacheConfig) -> Dataset:
    return make_dataset(file, cache=cache)


def test_documents_meet_others_in_each_epoch(dataset: Dataset) -> None:
    for split in (True, False):
        packed = _packed(dataset, LENGTH, split=split)
        first, again, second, other_seed = (
            sorted(_epoch(packed, LENGTH, epoch, seed=seed)) for epoch, seed in [(0, 0), (0, 0), (1, 0), (0, 1)]
        )
        assert first == again
        assert first != second != other_seed != first
        assert len(first) == len(second) == len(other_seed)


def test_without_a_shuffle_documents_stand_in_file_order(dataset: Dataset, lengths: list[int | None]) -> None:
    found = _epoch(_packed(dataset, LENGTH), LENGTH, epoch=1, shuffle=False)
    pieces = [piece for sequence in found for piece in sequence]
    assert pieces == sorted(pieces)
    documents.check_epoch(found, lengths, LENGTH, split=True)


def test_without_a_shuffle_whole_documents_stand_in_file_order_of_the_first_in_each_sequence(
    dataset: Dataset, lengths: list[int | None]
) -> None:
    found = _epoch(_packed(dataset, LENGTH, split=False), LENGTH, epoch=1, shuffle=False)
    assert all(pieces == sorted(pieces) for pieces in found)
    assert [pieces[0] for pieces in found] == sorted(pieces[0] for pieces in found)
    documents.check_epoch(found, lengths, LENGTH, split=False)


def test_rows_by_number_are_those_without_a_shuffle(dataset: Dataset) -> None:
    packed = _packed(dataset, LENGTH)
    for batch in make_loader(packed, 4, shuffle=False, row_ids=True):
        for row, number in enumerate(batch["row_id"].tolist()):
            own = packed[number]
            assert own.keys() == {"tokens", "labels", "segment_ids", "position_ids"}
            assert all((batch[name][row] == own[name]).all() for name in own)
    several = packed.__getitems__([3, 0])
    assert (several[1]["tokens"] == packed[0]["tokens"]).all()
    assert (several.columns["labels"][0] == packed[3]["labels"]).all()
    assert packed["segment_ids"].shape == (len(packed), LENGTH)
    assert (packed["tokens"][2] == packed[2]["tokens"].numpy()).all()


def test_locate_tells_the_documents(dataset: Dataset) -> None:
    packed = _packed(dataset, LENGTH)
    loader = make_loader(packed, 4, row_ids=True, seed=3)
    loader.set_epoch(2)
    for batch in loader:
        for number, pieces in zip(batch["row_id"].tolist(), documents.segments_of(batch, LENGTH), strict=True):
            place = packed.locate(number)
            assert place.text.endswith(f"row group {place.row_group}, sequence {place.row} of those packed of it")
            told = place.documents(epoch=2, seed=3)
            assert [(15 * each.document.row_group + each.document.row, *each[1:]) for each in told] == pieces
            assert {each.document.row_group for each in told} <= {place.row_group}


def test_cu_seqlens_are_the_bounds_of_segments(dataset: Dataset) -> None:
    whole = make_loader(_packed(dataset, LENGTH, cu_seqlens=True), 4)
    for batch, same in zip(whole, make_loader(_packed(dataset, LENGTH), 4), strict=True):
        ids = batch["segment_ids"]
        rows = torch.arange(len(ids))[:, None].expand(-1, LENGTH)
        borders = [0, *((ids.ravel().diff() != 0) | (rows.ravel().diff() != 0)).nonzero().ravel().add(1).tolist()]
        assert batch["cu_seqlens"].dtype == torch.int32
        assert batch["cu_seqlens"].tolist() == [*borders, ids.numel()]
        assert batch["max_seqlen"] == batch["cu_seqlens"].diff().max().item()
        assert (batch["tokens"] == same["tokens"]).all()


def same(batch: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": batch["tokens"], "labels": batch["labels"]}


def halves(batch: dict[str, Any]) -> dict[str, Any]:
    """Return two documents for each."""
    parts: dict[str, list[Any]] = {"tokens": [], "labels": []}
    dtypes = {"tokens": np.int64, "labels": np.int32}
    for name, values in parts.items():
        for each in batch[name]:
            own = np.empty(0, dtypes[name]) if each is None else each.numpy()
            values += [own[: len(own) // 2], own[len(own) // 2 :]]
    kinds = {"tokens": pa.int64(), "labels": pa.int32()}
    return {name: pa.array(values, pa.list_(kinds[name])) for name, values in parts.items()}


def failing(batch: dict[str, Any]) -> dict[str, Any]:
    if 7 in batch["id"]:
        raise LookupError("no row 7")
    return same(batch)


def failing_often(batch: dict[str, Any]) -> dict[str, Any]:
    if (batch["id"] % 5 == 0).any():
        raise LookupError("no fifth row")
    return same(batch)


@pytest.mark.parametrize("split", [True, False])
def test_filtered_selected_and_mapped_documents_are_packed(
    dataset: Dataset, lengths: list[int | None], split: bool
) -> None:
    chosen = dataset.filter([("id", "<", 70)]).select(range(3, 70)).exclude(range(57, 67))
    kept = [size if 3 <= row < 60 else None for row, size in enumerate(lengths)]
    for documents_of in (chosen, chosen.map(same), dataset.map(same, ["tokens", "labels"]).select(range(3, 60))):
        packed = _packed(documents_of, LENGTH, split=split)
        assert "not counted yet: " in repr(packed)
        found = _epoch(packed, LENGTH, epoch=1)
        assert f"{len(found)} sequences of {LENGTH} values of 'tokens' from {len(documents_of)} documents" in repr(
            packed
        )
        documents.check_epoch(found, kept, LENGTH, split=split)


def test_documents_of_flat_map_are_packed(dataset: Dataset, lengths: list[int | None]) -> None:
    flat = dataset.flat_map(halves)
    packed = _packed(flat, LENGTH)
    assert flat.uncounted is not None  # Neither call has counted anything.
    pieces = [piece for sequence in _epoch(packed, LENGTH) for piece in sequence]
    assert (
        sum(stop - start for _, start, stop in pieces)
        == len({(document, place) for document, start, stop in pieces for place in range(start, stop)})
        == sum(size or 0 for size in lengths)
    )


def test_splits_pack_all_documents(dataset: Dataset, lengths: list[int | None]) -> None:
    parts = _packed(dataset, LENGTH).split([0.6, 0.4])
    found = [sequence for part in parts for sequence in _epoch(part, LENGTH)]
    documents.check_epoch(found, lengths, LENGTH, split=True)
    assert len({part.fingerprint for part in parts}) == 2


def test_documents_that_map_fails_with_are_left_out(dataset: Dataset, lengths: list[int | None], caplog: Any) -> None:
    packed = _packed(dataset.map(failing), LENGTH)
    with pytest.raises(DataError, match=r"row group 0 row 7: map .*failing: .*no row 7"):
        make_loader(packed, 4)
    kept = [None if row == 7 else size for row, size in enumerate(lengths)]
    for _ in range(2):
        loader = make_loader(packed, 4, on_error="skip")
        found = [sequence for batch in loader for sequence in documents.segments_of(batch, LENGTH)]
        documents.check_epoch(found, kept, LENGTH, split=True)
        assert (loader.stats().skipped_rows, loader.stats().skipped_row_ids) == (1, [])
        [warned] = [record.getMessage() for record in caplog.records if "on_error" in record.getMessage()]
        assert "row group 0 row 7: map" in warned
        assert "no row 7" in warned
        assert "the document is left out" in warned
        caplog.clear()


def test_each_document_left_out_counts_once_also_over_a_resume(dataset: Dataset) -> None:
    packed = _packed(dataset.map(failing_often), LENGTH)
    first = make_loader(packed, 2, on_error="skip", world=World(0, 1))
    for _ in zip(first, range(20), strict=False):
        pass
    rest = make_loader(packed, 2, on_error="skip", world=World(0, 1))
    rest.load_state_dict(first.state_dict())
    for _ in rest:
        pass
    assert 0 < rest.stats().skipped_rows < 18
    assert first.stats().skipped_rows + rest.stats().skipped_rows == 18


def test_a_transform_that_fails_with_a_sequence_skips_it(dataset: Dataset) -> None:
    def refuse(batch: dict[str, Any]) -> dict[str, Any]:
        if 3 in batch["row_id"]:
            raise ValueError("no sequence 3")
        return batch

    packed = _packed(dataset, LENGTH)
    with pytest.raises(ValueError, match="no sequence 3") as caught:
        list(make_loader(packed, 4, transform=refuse, row_ids=True))
    assert any("sequence 3 of those packed of it" in note for note in caught.value.__notes__)
    loader = make_loader(packed, 4, transform=refuse, row_ids=True, on_error="skip")
    loader.set_epoch(1)
    rows = [row for batch in loader for row in batch["row_id"].tolist()]
    assert len(rows) == len(packed)
    assert loader.stats().skipped_row_ids == [3]


def test_fingerprints_and_orders_tell_packings_apart(dataset: Dataset) -> None:
    packed = [
        _packed(dataset, LENGTH),
        _packed(dataset, LENGTH + 1),
        _packed(dataset, LENGTH, split=False),
        dataset.pack(LENGTH, "labels"),
    ]
    assert (
        len({each.fingerprint for each in [*packed, dataset]})
        == len({each.order_key for each in [*packed, dataset]})
        == 5
    )
    state = make_loader(packed[0], 4).state_dict()
    for other in (dataset, *packed[1:]):
        with pytest.raises(ConfigError, match="the state is of another dataset"):
            make_loader(other, 4).load_state_dict(state)


def test_workers_and_pickled_copies_make_the_same_batches(dataset: Dataset) -> None:
    packed = _packed(dataset, LENGTH, split=False)
    expected = _epoch(packed, LENGTH, epoch=1)
    assert _epoch(packed, LENGTH, epoch=1, num_workers=2, transform=dict) == expected
    assert _epoch(packed, LENGTH, epoch=1, num_threads=2, transform=dict) == expected
    copy = pickle.loads(pickle.dumps(packed))
    assert copy.uncounted is None
    assert _epoch(copy, LENGTH, epoch=1) == expected


def test_a_packed_dataset_has_no_rows_to_choose(dataset: Dataset) -> None:
    packed = _packed(dataset, LENGTH)
    for call in (
        lambda: packed.filter([("id", "<", 3)]),
        lambda: packed.select([1]),
        lambda: packed.exclude([1]),
        lambda: packed.map(same),
        lambda: packed.flat_map(same),
        lambda: packed.pack(3),
        lambda: make_loader(Subset(packed, [1]), 1),
    ):
        with pytest.raises(ConfigError, match="before pack"):
            call()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"length": 0}, "length=0 must be at least 1"),
        ({"length": "8"}, "length='8' must be a whole number"),
        ({"column": "token"}, "pack: column 'token' is not in the dataset: did you mean 'tokens'?"),
        (
            {"column": "id"},
            "pack: column 'id' is int64, and sequences are made of lists of numbers: make",
        ),
        ({"also": "labels"}, "also='labels' must be a list of names of columns"),
        ({"also": iter(["labels"])}, "must be a list of names of columns"),  # A look at them would be the last one.
        ({"also": {"labels"}}, "also={'labels'} must be a list"),  # Processes would have them in other orders.
        ({"cu_seqlens": "no"}, "cu_seqlens='no' must be True or False"),
        ({"also": ["tokens"]}, "pack: 'tokens' would be two columns of the sequences"),
        ({"pad": {"label": 1}}, "pad= names 'label', which is not packed: name 'tokens'"),
        ({"pad": 0.5}, "pad=0.5 is no number of column 'tokens', which has int64"),
        ({"pad": "x"}, "pad='x' is no number of column 'tokens'"),
    ],
)
def test_wrong_arguments_are_named(dataset: Dataset, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dataset.pack(**{"length": 8, **how})
    assert message in str(caught.value)


def test_wrong_arguments_of_loaders_and_columns_are_named(dataset: Dataset) -> None:
    packed = _packed(dataset, LENGTH)
    with pytest.raises(ConfigError, match=r"group=.* joins single numbers"):
        make_loader(packed, 2, group={"both": ["tokens", "labels"]})
    with pytest.raises(ConfigError, match=r"column 'id' is not in the dataset: there are 'tokens', 'labels'"):
        packed["id"]


def test_columns_of_unequal_lengths_are_named(tmp_path: Path) -> None:
    table = pa.table({"tokens": [[1, 2], [3], [4, 5, 6]], "mask": [[1, 1], [1], [0, 1]]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    packed = make_dataset(tmp_path / "a.parquet", cache=False).pack(2, also=["mask"])
    with pytest.raises(DataError, match=r"a\.parquet row group 1 row 0: column 'tokens' has 3 values, and 'mask' 2"):
        list(make_loader(packed, 1))


def test_documents_without_values_cannot_be_packed(tmp_path: Path) -> None:
    feather.write_feather(pa.table({"tokens": pa.array([[], None], pa.list_(pa.int8()))}), tmp_path / "a.arrow")
    with pytest.raises(ConfigError, match="column 'tokens' has no value in any document"):
        len(make_dataset(tmp_path / "a.arrow", cache=False).pack(2))


class DataParallel(DeviceMesh):
    """The data-parallel dimension of a mesh of 2 x 2 ranks, as one of them sees it, without their process group."""

    mesh_dim_names, shape = ("dp",), (2,)

    def __init__(self, rank: int) -> None:
        self.number = rank

    @property
    def mesh(self) -> torch.Tensor:
        return torch.tensor([self.number % 2, self.number % 2 + 2])

    def size(self, mesh_dim: int | None = None) -> int:
        return 2

    def get_coordinate(self) -> tuple[int, ...]:
        return (self.number // 2,)


def test_tensor_parallel_ranks_of_a_mesh_get_equal_sequences(
    dataset: Dataset, lengths: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, ranks = _packed(dataset, LENGTH), []
    for rank in range(4):
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4}.items():
            monkeypatch.setenv(name, str(value))
        ranks.append(_epoch(packed, LENGTH, mesh=DataParallel(rank), batch_size=1))
    assert ranks[0] == ranks[1] != ranks[2] == ranks[3]
    found = [each for pair in zip(ranks[0], ranks[2], strict=True) for each in pair][: len(packed)]
    documents.check_epoch(found, lengths, LENGTH, split=True)


def test_mixtures_pack_all_sources_alike(tmp_path: Path) -> None:
    sizes = {name: documents.lengths_around(LENGTH, 40, np.random.default_rng(n)) for n, name in enumerate("ab")}
    files = {name: documents.write(tmp_path / f"{name}.parquet", own, 7) for name, own in sizes.items()}
    sources = {name: make_dataset(file, cache=False) for name, file in files.items()}
    chosen = {"a": sources["a"], "b": sources["b"].select(range(0, 40, 2))}
    packed = {name: _packed(each, LENGTH, split=False) for name, each in chosen.items()}
    mixture = mix(packed, stop="all_exhausted", name_column="source")
    loader = make_loader(mixture, 4, row_ids=True)
    loader.set_epoch(1)
    found: dict[int, list[Any]] = {0: [], 1: []}
    for batch in loader:
        for source, pieces in zip(batch["source"].tolist(), documents.segments_of(batch, LENGTH), strict=True):
            found[source].append(pieces)
        place = mixture.locate(int(batch["row_id"][0]))
        told = [(7 * each.document.row_group + each.document.row, *each[1:]) for each in place.documents(epoch=1)]
        assert told == documents.segments_of(batch, LENGTH)[0]
    documents.check_epoch(found[0], sizes["a"], LENGTH, split=False)
    own = [size if row % 2 == 0 else None for row, size in enumerate(sizes["b"])]
    documents.check_epoch(found[1], own, LENGTH, split=False)
    with pytest.raises(ConfigError, match="source 'a' is packed, and 'b' is not packed: pack all alike"):
        mix({"a": packed["a"], "b": sources["b"].select(range(9))})
    with pytest.raises(ConfigError, match="source 'a' is packed with length=16, and 'b' is packed with length=8: pack"):
        mix({"a": packed["a"], "b": _packed(sources["b"], 8, split=False)})
    with pytest.raises(ConfigError, match="filter, map, pack or split these, before mix"):
        mix(sources).pack(LENGTH)  # type: ignore[operator]


@pytest.mark.parametrize("how", [{}, {"num_workers": 1, "transform": dict}])
def test_stats_count_tokens_and_padding(dataset: Dataset, lengths: list[int | None], how: dict[str, Any]) -> None:
    loader = make_loader(_packed(dataset, LENGTH), 4, **how)
    padding = sum(int((batch["segment_ids"] == 0).sum()) for batch in loader)
    stats = loader.stats()
    assert stats.tokens == sum(size or 0 for size in lengths)
    assert stats.padding_tokens == padding
    assert stats.padding_share == padding / (padding + stats.tokens)
    assert f" tokens/s, {stats.padding_share:.2%} padding)" in str(stats)
    assert stats.tokens_per_second == stats.tokens / stats.seconds
    assert "tokens" not in str(make_loader(dataset, 4).stats())


def test_batches_that_accelerate_skips_are_those_of_the_epoch(dataset: Dataset) -> None:
    """A Hugging Face Trainer reads the rest of a resumed epoch by `skip_first_batches`."""
    accelerate = pytest.importorskip("accelerate")
    loader = make_loader(_packed(dataset, LENGTH), 4)
    whole = _epoch(_packed(dataset, LENGTH), LENGTH, epoch=1, batch_size=4)
    loader.set_epoch(1)
    skipping = accelerate.skip_first_batches(loader, 3)
    assert [each for batch in skipping for each in documents.segments_of(batch, LENGTH)] == whole[12:]


def test_empty_documents_make_no_sequence_of_padding_only(tmp_path: Path) -> None:
    """The mean loss of such a sequence would be NaN. Footers count an empty document as a value."""
    documents = [[] if number % 3 else [number] * 5 for number in range(300)]
    pq.write_table(pa.table({"tokens": documents}), tmp_path / "x.parquet")
    packed = make_dataset(tmp_path / "x.parquet", cache=False).pack(8)
    found = []
    for batch in make_loader(packed, 1):
        assert batch["segment_ids"].any()
        found += batch["tokens"][batch["segment_ids"] > 0].tolist()
    assert sorted(found) == sorted(value for document in documents for value in document)


@pytest.mark.parametrize("split", [True, False])
def test_values_in_place_of_nulls_are_packed(tmp_path: Path, split: bool) -> None:
    """Also where a file lacks the column."""
    pq.write_table(pa.table({"tokens": pa.array([[1, 2, 3], None], pa.list_(pa.int64()))}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"other": [1, 2]}), tmp_path / "b.parquet")
    dataset = make_dataset(tmp_path, columns=["tokens"], fill_null={"tokens": [9, 9]}, cache=False)
    batch = dataset.pack(4, split=split).__getitems__(range(len(dataset.pack(4, split=split)))).columns
    assert sorted(batch["tokens"][batch["segment_ids"] > 0].tolist()) == [1, 2, 3, *[9] * 6]


def test_nulls_of_columns_that_are_not_packed_end_no_loop(tmp_path: Path) -> None:
    pq.write_table(pa.table({"tokens": [[1], [2]], "year": pa.array([None, 1])}), tmp_path / "x.parquet")
    [batch] = make_loader(make_dataset(tmp_path / "x.parquet", cache=False).pack(2), 1)
    assert sorted(batch["tokens"][0].tolist()) == [1, 2]


def test_an_error_says_which_documents_a_sequence_had(tmp_path: Path) -> None:
    pq.write_table(pa.table({"tokens": [[number] for number in range(100)]}), tmp_path / "x.parquet")

    def fail(batch: Any) -> Any:
        if (batch["tokens"] == 37).any():
            raise ValueError("bad token")
        return batch

    loader = make_loader(make_dataset(tmp_path / "x.parquet", cache=False).pack(4), 5, seed=4, transform=fail)
    with pytest.raises(ValueError, match="bad token") as raised:
        list(loader)
    [note] = [note for note in raised.value.__notes__ if "documents(epoch, seed)" in note]
    row = int(note.partition(": row ")[2].partition(" ")[0])
    assert 37 in [piece.document.row for piece in loader.dataset.locate(row).documents(0, 4)]


def test_print_calls_no_function_and_names_datasets_without_values(tmp_path: Path) -> None:
    pq.write_table(pa.table({"tokens": pa.array([[], None], pa.list_(pa.int64()))}), tmp_path / "x.parquet")
    dataset, calls = make_dataset(tmp_path / "x.parquet", cache=False), tmp_path / "calls"
    assert "1 sequence of 4 values" in repr(dataset.pack(4))
    pq.write_table(pa.table({"tokens": [[number] for number in range(500)]}), tmp_path / "y.parquet")

    def twice(batch: Any) -> Any:
        with calls.open("a") as file:
            file.write("." * len(batch["tokens"]))
        return {"tokens": [values for values in batch["tokens"] for _ in range(2)]}

    flat = make_dataset(tmp_path / "y.parquet", cache=False).flat_map(twice)
    sampled = calls.read_text()
    assert "not counted yet" in repr(flat.pack(4))
    assert calls.read_text() == sampled


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 2**31}, "length=2,147,483,648 is more than 2,147,483,647"),
        ({"length": 4, "also": None}, "also=None must be a list"),
        ({"length": 4, "split": "no"}, "split='no' must be True or False"),
        ({"length": 4, "column": "max_seqlen"}, "'max_seqlen' would be two columns"),
        ({"length": 4, "pad": float("nan")}, "pad=nan is no number of column 'tokens'"),
    ],
)
def test_more_arguments_that_cannot_work(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    pq.write_table(pa.table({"tokens": [[1]], "max_seqlen": [[1]]}), tmp_path / "x.parquet")
    dataset = make_dataset(tmp_path / "x.parquet", cache=False)
    with pytest.raises(ConfigError, match=message):
        dataset.pack(**arguments)


def test_floats_are_padded_with_the_nearest_value(tmp_path: Path) -> None:
    pq.write_table(pa.table({"tokens": pa.array([[1.5]], pa.list_(pa.float32()))}), tmp_path / "x.parquet")
    packed = make_dataset(tmp_path / "x.parquet", cache=False).pack(2, pad=0.1)
    assert packed[0]["tokens"].tolist() == [1.5, np.float32(0.1)]


def test_a_packed_dataset_refuses_keywords_as_it_refuses_positions(tmp_path: Path) -> None:
    pq.write_table(pa.table({"tokens": [[1]]}), tmp_path / "x.parquet")
    packed = make_dataset(tmp_path / "x.parquet", cache=False).pack(2)
    for call in (lambda: packed.select(rows=[0]), lambda: packed.map(dict, columns=["tokens"])):
        with pytest.raises(ConfigError, match="documents before pack"):
            call()
