"""The lengths of documents: read once for each host or cluster, where footers do not tell the sequences."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiers
from clusters import Server, running_server  # noqa: F401
from pyarrow import feather

from dataload import CacheConfig, World, make_dataset, make_loader
from dataload.cli import app
from dataload.dataset import Dataset
from dataload.errors import ConfigError, DataError
from dataload.mapping import counting

ROWS, GROUP, LENGTH = 120, 10, 8
SAMPLED = 4 * GROUP  # rows of four row groups, which have fewer than 32 rows
LENGTHS = np.random.default_rng(0).integers(0, 3 * LENGTH, ROWS)


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> Iterator[None]:
    with tiers.fork_server(__name__):
        yield


@pytest.fixture
def file(tmp_path: Path) -> Path:
    columns = {"id": range(ROWS), "text": [f"row {n}" for n in range(ROWS)]}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet", row_group_size=GROUP)
    return tmp_path / "rows.parquet"


class Tokenize:
    """A function of `map` that notes in a file which rows it got.

    Args:
        told: The file.
        killed_at: The row with which it kills its process, until the file "<told>.go" exists.
        more: Values of each document besides those in `LENGTHS`.
    """

    def __init__(self, told: Path, killed_at: int = -1, more: int = 0) -> None:
        self.told, self.killed_at, self.more = str(told), killed_at, more

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        ids = batch["id"].tolist()
        if self.killed_at in ids and not Path(f"{self.told}.go").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        with Path(self.told).open("a") as file:
            file.write("".join(f"{n}\n" for n in ids))
        return {"tokens": [[n] * (int(LENGTHS[n]) + self.more) for n in ids]}

    @property
    def calls(self) -> list[int]:
        return [*map(int, Path(self.told).read_text().split())]


def tokens_of(packed: Dataset) -> Counter[int]:
    batches = make_loader(packed, 4)
    return Counter(token for batch in batches for token in batch["tokens"][batch["segment_ids"] > 0].tolist())


EXPECTED = Counter({n: int(size) for n, size in enumerate(LENGTHS) if size})


@pytest.mark.variants
@pytest.mark.parametrize("split", [True, False])
def test_documents_are_tokenized_once(file: Path, cache: CacheConfig, tmp_path: Path, split: bool) -> None:
    tokenize = Tokenize(tmp_path / "told")
    mapped = make_dataset(file, cache=cache).map(tokenize, version="1")
    packed = mapped.pack(LENGTH, split=split)
    assert len(tokenize.calls) == SAMPLED
    assert tokens_of(packed) == EXPECTED
    assert Counter(tokenize.calls[SAMPLED:]) == Counter(range(ROWS))  # The first epoch finds what the count has made.
    again = make_dataset(file, cache=cache).map(tokenize, version="1")
    for length in (LENGTH, 3 * LENGTH):  # The lengths are known, whatever the length of a sequence.
        assert tokens_of(again.pack(length, split=split)) == EXPECTED
    assert len(tokenize.calls) == SAMPLED + ROWS


def test_lengths_are_kept_if_the_rows_are_not(file: Path, cache: CacheConfig, tmp_path: Path) -> None:
    tokenize = Tokenize(tmp_path / "told")
    packed = make_dataset(file, cache=cache).map(tokenize, version="1").pack(LENGTH)
    count = len(packed)
    [blobs] = packed.rowstore.row_groups.caches
    for number in range(ROWS // GROUP):
        blobs.tier.retract(blobs.keys(number))
    again = make_dataset(file, cache=cache).map(tokenize, version="1").pack(2 * LENGTH)
    assert 0 < len(again) < count
    assert len(tokenize.calls) == SAMPLED + ROWS


def _counted(file: Path, cache: CacheConfig, function: Tokenize, out: Any) -> None:
    counting.IN_FLIGHT = 1
    packed = make_dataset(file, cache=cache).map(function, version="1").pack(LENGTH, split=False)
    out.put((len(packed), tokens_of(packed)))


def _started(*arguments: Any) -> Any:
    process = tiers.FORKSERVER.Process(target=_counted, args=arguments)
    process.start()
    return process


def test_a_killed_count_goes_on_where_it_was(file: Path, cache: CacheConfig, tmp_path: Path) -> None:
    function, out = Tokenize(tmp_path / "told", killed_at=57), tiers.FORKSERVER.SimpleQueue()
    process = _started(file, cache, function, out)
    process.join(tiers.PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    assert function.calls[SAMPLED:] == list(range(50))
    Path(f"{function.told}.go").touch()
    process = _started(file, cache, function, out)
    assert out.get()[1] == EXPECTED
    process.join(tiers.PATIENCE)
    assert Counter(function.calls[SAMPLED:]) == Counter(range(ROWS))


def test_ranks_of_a_host_count_lengths_once(file: Path, cache: CacheConfig, tmp_path: Path) -> None:
    function, out = Tokenize(tmp_path / "told"), tiers.FORKSERVER.SimpleQueue()
    ranks = [_started(file, cache, function, out) for _ in range(2)]
    assert out.get() == out.get()
    for rank in ranks:
        rank.join(tiers.PATIENCE)
        assert rank.exitcode == 0
    assert len(function.calls) == SAMPLED + ROWS


@pytest.mark.slow
def test_another_host_of_a_cluster_counts_nothing(
    file: Path, cache: CacheConfig, tmp_path: Path, cluster_server: Server
) -> None:
    url, function = cluster_server.url, Tokenize(tmp_path / "told")
    first = make_dataset(file, cache=replace(cache, cluster=url)).map(function, version="1").pack(LENGTH)
    count = len(first)
    other = CacheConfig(str(tmp_path / "other"), "1GB", cluster=url)
    packed = make_dataset(file, cache=other).map(function, version="1").pack(LENGTH)
    assert len(packed) == count
    assert tokens_of(packed) == EXPECTED
    assert len(function.calls) == SAMPLED + ROWS


@pytest.mark.parametrize("split", [True, False])
def test_other_documents_than_were_counted_are_an_error(
    file: Path, cache: CacheConfig, tmp_path: Path, split: bool
) -> None:
    function = Tokenize(tmp_path / "told")
    packed = make_dataset(file, cache=cache).map(function, version="1").pack(LENGTH, split=split)
    count = len(packed)
    [blobs] = packed.rowstore.row_groups.caches
    blobs.tier.retract(blobs.keys(0))
    function.more = LENGTH
    told = r"row group 0 row 0 and the rest of its row group make \d+ sequences and not \d+, as were counted before"
    with pytest.raises(DataError, match=told):
        packed[0]
    assert packed[count - 1]["tokens"].shape == (LENGTH,)


def test_a_column_of_lengths_is_read_in_place_of_the_documents(tmp_path: Path, bucket: Any) -> None:
    columns = {"n_tokens": LENGTHS, "tokens": [[n] * int(size) for n, size in enumerate(LENGTHS)]}
    sink, wrong = pa.BufferOutputStream(), {**columns, "n_tokens": LENGTHS // 2, "broken": [-1] * ROWS}
    pq.write_table(pa.table(columns), sink, row_group_size=GROUP, use_dictionary=False)
    bucket.put("rows.parquet", sink.getvalue().to_pybytes())
    cache = CacheConfig(str(tmp_path / "cache"), "1GB")
    dataset = make_dataset(bucket.url("rows.parquet"), storage_options=bucket.options, cache=cache)
    for documents in (dataset, dataset.exclude([3, 50])):
        packed = documents.pack(LENGTH, split=False, lengths="n_tokens")
        assert len(packed) == len(documents.pack(LENGTH, split=False))
        expected = {n: size for n, size in EXPECTED.items() if documents is dataset or n not in (3, 50)}
        assert tokens_of(packed) == expected
    pq.write_table(pa.table(wrong), tmp_path / "wrong.parquet", row_group_size=GROUP)
    documents = make_dataset(tmp_path / "wrong.parquet", cache=False)
    with pytest.raises(DataError, match=r"and not \d+, as the column 'n_tokens' says: it must have the number"):
        tokens_of(documents.pack(LENGTH, split=False, lengths="n_tokens"))
    with pytest.raises(DataError, match=r"row group 0 row 0: column 'broken' has no length"):
        len(documents.pack(LENGTH, split=False, lengths="broken"))
    with pytest.raises(ConfigError, match=r"lengths='tokens' is no column of integers .* there are: 'n_tokens', 'b"):
        documents.pack(LENGTH, lengths="tokens")


def test_footers_tell_without_reading_a_document(tmp_path: Path, bucket: Any) -> None:
    table = pa.table({"tokens": [[n] * int(size) for n, size in enumerate(LENGTHS)]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=GROUP)
    bucket.put("rows.parquet", sink.getvalue().to_pybytes())
    cache = CacheConfig(str(tmp_path / "cache"), "1GB")
    dataset = make_dataset(bucket.url("rows.parquet"), storage_options=bucket.options, cache=cache)
    bucket.server.reset()
    packed = dataset.pack(LENGTH)
    values = [np.maximum(LENGTHS[first : first + GROUP], 1).sum() for first in range(0, ROWS, GROUP)]
    assert packed.block_lengths.tolist() == [-(-size // LENGTH) for size in values]
    assert not bucket.server.requests
    assert tokens_of(packed) == EXPECTED


def test_the_plan_tells_sequences_tokens_and_padding(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    table = pa.table({"id": range(ROWS), "tokens": [[n] * int(size + 1) for n, size in enumerate(LENGTHS)]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=GROUP)
    packed = make_dataset(tmp_path / "rows.parquet", cache=False).pack(LENGTH)

    def planned(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["dataload", "plan", str(tmp_path / "rows.parquet"), "--pack", "8", *words])
        with pytest.raises(SystemExit):
            app.main()
        captured = capsys.readouterr()
        return str(captured.out or captured.err)

    loader = make_loader(packed, 4)
    for _ in loader:
        pass
    found, stats = json.loads(planned("--json")), loader.stats()
    assert (found["rows"], found["tokens"], found["reads_lengths"]) == (len(packed), stats.tokens, False)
    assert found["padding_share"] == pytest.approx(stats.padding_share)
    lines = " ".join(planned().split())
    assert f"{len(packed)} sequences in {ROWS // GROUP} row groups" in lines
    assert f"packed {stats.tokens:,} tokens an epoch, {stats.padding_share:.2%} padding" in lines
    for words in (["--no-split"], ["--filters", '[["id", "<", 55]]']):
        assert "the lengths of all documents are read once" in " ".join(planned(*words).split())
    assert "--pack-column=id is no column of lists of numbers" in planned("--pack-column", "id")
    other = str(tmp_path / "rows.parquet")
    assert "--pack is for one URL" in planned(other + "?", "--weights", "1,1")
    feather.write_feather(table, tmp_path / "rows.arrow")
    monkeypatch.setattr("sys.argv", ["dataload", "plan", str(tmp_path / "rows.arrow"), "--pack", "8"])
    with pytest.raises(SystemExit):
        app.main()
    assert "do not tell how many values 'tokens' has" in capsys.readouterr().err


def test_the_plan_tells_the_batches_of_a_token_budget(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    lengths = LENGTHS + 1
    table = pa.table({"id": range(ROWS), "n_tokens": lengths, "tokens": [[0] * int(size) for size in lengths]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=GROUP)

    def planned(*words: str) -> str:
        command = ["dataload", "plan", str(tmp_path / "rows.parquet"), "--batch-tokens", "64", "--world-size", "2"]
        monkeypatch.setattr("sys.argv", [*command, *words])
        with pytest.raises(SystemExit):
            app.main()
        captured = capsys.readouterr()
        return str(captured.out or captured.err)

    dataset = make_dataset(tmp_path / "rows.parquet", cache=False)
    ranks = [make_loader(dataset, batch_tokens=64, length="n_tokens", world=World(rank, 2)) for rank in range(2)]
    for loader in ranks:
        for _ in loader:
            pass
    stats = [loader.stats() for loader in ranks]
    for length in ("n_tokens", "tokens"):
        found = json.loads(planned("--length", length, "--json"))
        assert found["tokens"] == lengths.sum() == sum(each.tokens for each in stats)
        assert {found["batches"]} == {each.batches for each in stats}
        padding = sum(each.padding_tokens for each in stats)
        assert found["padding_share"] == pytest.approx(padding / (padding + lengths.sum()))
    lines = " ".join(planned("--length", "n_tokens").split())
    assert f"batches about {stats[0].batches} a rank and epoch, with {lengths.sum():,} tokens and" in lines
    assert "length='rows' is not in the dataset" in planned("--length", "rows")
    assert "--batch-tokens is for one URL" in planned(str(tmp_path / "rows.parquet?"))
