"""`dataload rows` and `dataload replay`: the rows of steps, the steps of rows, and batches again."""

from __future__ import annotations

import importlib
import io
import json
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from dataload import World, make_dataset, make_loader, mix
from dataload.cli.app import app
from dataload.errors import ConfigError, DataloadError
from dataload.loader.loader import Loader

RNG = np.random.default_rng(7)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lengths = RNG.integers(1, 20, 150)
    tokens = pa.array([np.arange(length) for length in lengths], pa.list_(pa.int64()))
    table = pa.table({"id": range(150), "tokens": tokens, "n_tokens": lengths})
    (tmp_path / "data").mkdir()
    for name, start, rows in (("a", 0, 90), ("b", 90, 40), ("c", 130, 20)):
        pq.write_table(table.slice(start, rows), tmp_path / "data" / f"{name}.parquet", row_group_size=17)
    return tmp_path / "data"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what a command about the run in `tmp_path / "run"` prints as JSON, and its exit code."""
    monkeypatch.setenv("DATALOAD_CACHE_DIR", str(tmp_path / "command"))

    def call(name: str, *words: str, code: int = 0) -> Any:
        done = CliRunner().invoke(app, [name, str(tmp_path / "run"), *words, "--json"], catch_exceptions=False)
        assert done.exit_code == code, done.output
        return json.loads(done.stdout)

    return call


def made(folder: Path, kind: str, rank: int, ranks: int, stats_dir: Path) -> Loader:
    """Return the loader of a rank over a dataset of some kind."""
    data = make_dataset(folder / "a.parquet", cache=False)
    how: dict[str, Any] = {"batch_size": 5}
    if kind == "mixture":
        parts = {name: make_dataset(folder / f"{name}.parquet", cache=False) for name in "abc"}
        data = mix(parts, [3, 2, 1], stop="all_exhausted")
    elif kind == "tokens":
        how = {"batch_tokens": 64, "length": "n_tokens"}
    elif kind == "packed":
        data = data.pack(16)
    elif kind == "selected":
        data = data.filter([("id", ">", 3)]).exclude([5, 7]).split([0.7, 0.3])[0]
    return make_loader(data, **how, row_ids=True, stats_dir=stats_dir, world=World(rank, ranks))


@pytest.mark.parametrize(
    "kind",
    ["mixture", "tokens", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("plain", "packed", "selected"))],
)
def test_the_steps_of_a_row_are_exact_over_five_epochs(folder: Path, tmp_path: Path, run: Any, kind: str) -> None:
    loaders = [made(folder, kind, rank, 2, tmp_path / "run") for rank in range(2)]
    steps: list[tuple[int, list[list[int]]]] = []  # the epoch, and the rows of each rank
    for epoch in range(4):
        together = zip(*loaders, strict=True)
        steps += [(epoch, [batch["row_id"].tolist() for batch in batches]) for batches in together]
    coming = [loaders[0].rows_at(4, number) for number in range(len(loaders[0]))]
    steps += [(4, [rows.tolist() for rows in each]) for each in coming]
    for row in (0, 33, len(loaders[0].dataset) - 1):
        expected = [
            {"step": number, "epoch": epoch, "rank": rank}
            for number, (epoch, ranks) in enumerate(steps, 1)
            for rank, rows in enumerate(ranks)
            if row in rows
        ]
        assert run("rows", "--row", str(row), "--epochs", "1")["seen"] == expected
    number = len(steps) // 2
    [batch] = run("rows", "--step", str(number))["batches"]
    assert [[each["row_id"] for each in rank["rows"]] for rank in batch["ranks"]] == steps[number - 1][1]


def test_rows_are_located_and_shown(folder: Path, tmp_path: Path, run: Any) -> None:
    loader = made(folder, "mixture", 0, 1, tmp_path / "run")
    batches = list(loader)
    [batch] = run("rows", "--step", "3", "--rank", "0", "--show")["batches"]
    rows = batch["ranks"][0]["rows"]
    assert [row["values"]["id"] for row in rows] == batches[2]["id"].tolist()
    assert [row["values"]["tokens"] for row in rows] == [tokens.tolist() for tokens in batches[2]["tokens"]]
    for row, place in zip(rows, loader.dataset.locate(batches[2]["row_id"]), strict=True):
        assert (row["url"], row["row_group"], row["row"]) == place
        assert place.url.endswith(f"{row['source']}.parquet")


def test_a_packed_sequence_tells_its_documents(folder: Path, tmp_path: Path, run: Any) -> None:
    batches = list(made(folder, "packed", 0, 1, tmp_path / "run"))
    [batch] = run("rows", "--step", "2", "--show")["batches"]
    for row, tokens in zip(batch["ranks"][0]["rows"], batches[1]["tokens"], strict=True):
        values = [value for each in row["documents"] for value in range(each["start"], each["stop"])]
        assert values == tokens.tolist()[: len(values)]
        assert row["values"]["tokens"] == tokens.tolist()


@pytest.mark.parametrize("indexed", [True, False])
def test_show_fetches_the_footers_and_the_pages_of_the_rows(
    bucket: Any, tmp_path: Path, run: Any, indexed: bool
) -> None:
    """Without an index of the pages, the columns of the row groups."""
    rows, group, rng = 40_000, 10_000, np.random.default_rng(5)
    table = pa.table(
        {
            "id": range(rows),
            "x": rng.random(rows),
            "text": [rng.bytes(40).hex() for _ in range(rows)],
            "tokens": pa.array([[number] * (number % 5) for number in range(rows)], pa.list_(pa.int32())),
            "maybe": [None if number % 3 else number for number in range(rows)],
            "unread": rng.random(rows),
        }
    )
    data = io.BytesIO()
    small = {"data_page_size": 4 << 10, "write_batch_size": 32}
    pq.write_table(table, data, row_group_size=group, write_page_index=indexed, use_dictionary=["maybe"], **small)
    bucket.client.put_object(Bucket=bucket.name, Key="pages/rows.parquet", Body=data.getvalue())
    columns = [name for name in table.column_names if name != "unread"]
    source = f"s3://{bucket.name}/pages"
    dataset = make_dataset(source, columns=columns, fill_null=0, storage_options=bucket.options, cache=False)
    loader = make_loader(dataset, 4, window=1, stats_dir=tmp_path / "run", world=World(0, 1))
    next(iter(loader))
    [numbers] = loader.rows_at(0, 0)
    bucket.server.reset()
    [batch] = run("rows", "--step", "1", "--show", "--storage-options", json.dumps(bucket.options))["batches"]
    got = bucket.server.stats()["get_bytes"]
    shown = [row["values"] for row in batch["ranks"][0]["rows"]]
    assert shown == table.select(columns).take(pa.array(numbers)).to_pylist()
    footer = pq.ParquetFile(pa.BufferReader(data.getvalue()))
    chunks = [
        footer.metadata.row_group(number).column(leaf)
        for number in {number // group for number in numbers.tolist()}
        for leaf, name in enumerate(table.column_names)
        if name in columns
    ]
    whole = sum(chunk.total_compressed_size for chunk in chunks)
    dictionaries = sum(
        chunk.data_page_offset - (chunk.dictionary_page_offset or chunk.data_page_offset) for chunk in chunks
    )
    tail = 64 << 10  # what is fetched of a file to find its footer, and an index of pages
    pages = len(columns) * len(numbers) * (6 << 10)
    assert got <= 2 * tail + (dictionaries + pages if indexed else whole + len(chunks) * (64 << 10))
    assert not indexed or got < whole


def test_replay_saves_the_batch(folder: Path, tmp_path: Path, run: Any) -> None:
    batches = list(made(folder, "plain", 1, 2, tmp_path / "run"))
    list(made(folder, "plain", 0, 2, tmp_path / "run"))
    done = run("replay", "--step", "4", "--rank", "1", "--out", str(tmp_path / "batch.pt"))
    again = torch.load(tmp_path / "batch.pt")
    assert again["id"].tolist() == batches[3]["id"].tolist()
    assert done["calls"] == ["loader.batch_at(0, 3, rank=1)"]


PROGRAM = """
from dataload import make_dataset, make_loader

def add(batch, rng):
    return {**batch, "noise": rng.random(4).tolist()}

def ids(batch):
    return {"id": batch["id"]}

def loader(world, **options):
    data = make_dataset(FOLDER, cache=False).flat_map(ids, columns=["id"])
    return make_loader(data, 6, transform=add, world=world, **options)
"""


def test_a_program_s_own_loader_is_replayed(
    folder: Path, tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train_of_replay.py").write_text(PROGRAM.replace("FOLDER", repr(str(folder))))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "train_of_replay", raising=False)
    train_of_replay = importlib.import_module("train_of_replay")

    batches = list(train_of_replay.loader(World(0, 1), stats_dir=tmp_path / "run"))
    name = "train_of_replay:loader"
    run("replay", "--step", "4", "--out", str(tmp_path / "batch.pt"), "--loader", name)
    assert torch.load(tmp_path / "batch.pt")["noise"] == batches[3]["noise"]
    assert run("rows", "--verify", "--loader", name)["differences"] == []
    [batch] = run("rows", "--step", "4")["batches"]  # of which the ledger knows the rows
    own = train_of_replay.loader(World(0, 1))
    places = own.dataset.locate(own.rows_at(0, 3)[0])
    assert [(row["url"], row["row_group"], row["row"]) for row in batch["ranks"][0]["rows"]] == places
    failed = CliRunner().invoke(app, ["rows", str(tmp_path / "run"), "--step", "4", "--show"])
    assert "flat_map" in str(failed.exception)
    assert "--loader module:function" in str(failed.exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rows"], "name one of --step, --row and --verify"),
        (["rows", "--row", "9999"], "--row=9999: the data of the latest loop has the rows 0 to 89"),
        (["rows", "--step", "1", "--rank", "7"], "--rank=7: step 1 has the ranks 0 to 0"),
        (["rows", "--step", "1", "--show", "--loader", "no_such_module:loader"], "No module named 'no_such_module'"),
        (["rows", "--step", "1", "--show", "--loader", "builtins:repr"], "returns str: let it return make_loader"),
        (
            ["rows", "--step", "1", "--show", "--loader", "train_of_replay:other"],
            "2 ranks with a batch_size of 3, and the run",
        ),
        (["replay", "--step", "1", "--out", "/nowhere/batch.pt"], "/nowhere/batch.pt cannot be written"),
    ],
)
def test_wrong_use_is_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setenv("DATALOAD_CACHE_DIR", str(tmp_path / "command"))
    monkeypatch.chdir(tmp_path)
    made(folder, "plain", 0, 1, tmp_path / "run").batch_at(0, 0)
    next(iter(made(folder, "plain", 0, 1, tmp_path / "run")))
    text = f"def other(_):\n    return make_loader({str(folder / 'a.parquet')!r}, 3, world=World(0, 2), cache=False)\n"
    (tmp_path / "train_of_replay.py").write_text(f"from dataload import World, make_loader\n{text}")
    monkeypatch.delitem(sys.modules, "train_of_replay", raising=False)
    done = CliRunner().invoke(app, [words[0], str(tmp_path / "run"), *words[1:]])
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": 0},
        {"ranks": 1 << 60, "nodes": 1 << 60},
        {"order": "text"},
        {"order": {}},
        {"recipe": 5},
        {"recipe": [5]},
        {"recipe": [{"make_dataset": {"source": "a", "storage_options": {"key": "x"}}}]},
        {"recipe": [{"make_dataset": {"source": 5}}]},
        {"recipe": [{"pack": {"foo": 1}}]},
        {"cursor": "first"},
        {"urls": []},
    ],
    ids=str,
)
def test_a_planted_ledger_is_one_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    monkeypatch.setenv("DATALOAD_CACHE_DIR", str(tmp_path / "command"))
    next(iter(made(folder, "plain", 0, 1, tmp_path / "run")))
    path = tmp_path / "run" / "ledger.jsonl"
    first = json.loads(path.read_text().splitlines()[0])
    path.write_text(json.dumps({**first, **change}) + "\n")
    for words in (["rows", "--step", "1", "--show"], ["replay", "--step", "1", "--out", str(tmp_path / "batch.pt")]):
        done = CliRunner().invoke(app, [words[0], str(tmp_path / "run"), *words[1:]])
        assert isinstance(done.exception, DataloadError), (words, done.exception)


def changed_data(folder: Path, stats_dir: Path) -> list[list[int]]:
    """Run an epoch whose data changes in it. Return the "id" of each batch, which no other row has."""
    data = folder.parent / "changing"
    data.mkdir()
    shutil.copy(folder / "a.parquet", data)

    def loader() -> Loader:
        return make_loader(data, 5, seed=3, stats_dir=stats_dir, world=World(0, 1), cache=False)

    first = loader()
    batches = [batch["id"].tolist() for batch in islice(first, 7)]
    state = first.state_dict()
    shutil.copy(folder / "b.parquet", data)
    (data / "a.parquet").replace(folder / "gone.parquet")
    for _ in range(2):
        second = loader()
        second.load_state_dict(state, on_change="continue")
        found = [batch["id"].tolist() for batch in islice(second, 3)]
    return batches + found


def test_steps_of_data_that_is_gone_are_told_by_the_ledger(folder: Path, tmp_path: Path, run: Any) -> None:
    seen = changed_data(folder, tmp_path / "run")
    rows = {
        f"file://{folder.parent}/changing/{name}": pq.ParquetFile(folder / file)
        for name, file in (("a.parquet", "gone.parquet"), ("b.parquet", "b.parquet"))
    }
    for step, ids in enumerate(seen, 1):
        [batch] = run("rows", "--step", str(step))["batches"]
        found = batch["ranks"][0]["rows"]
        assert [rows[row["url"]].read_row_group(row["row_group"])["id"][row["row"]].as_py() for row in found] == ids
    assert run("rows", "--verify")["unknown"] == []
    failed = CliRunner().invoke(app, ["rows", str(tmp_path / "run"), "--step", "2", "--show"])
    assert "a.parquet" in str(failed.exception) and "is gone" in str(failed.exception)
    [shown] = run("rows", "--step", "9", "--show")["batches"]
    assert [row["values"]["id"] for row in shown["ranks"][0]["rows"]] == seen[8]
    # A row is followed: those of b.parquet, with ids from 90 on, have numbers that others had before.
    before = {number for ids in seen[:7] for number in ids}
    number = next(each - 90 for ids in seen[7:] for each in ids if each - 90 in before)
    steps = [step for step, ids in enumerate(seen, 1) if number + 90 in ids]
    assert [each["step"] for each in run("rows", "--row", str(number), "--epochs", "0")["seen"]][: len(steps)] == steps


def test_what_is_beside_the_ledger_is_checked_and_may_be_gone(folder: Path, tmp_path: Path, run: Any) -> None:
    changed_data(folder, tmp_path / "run")
    files = sorted((tmp_path / "run" / "ledger.rows").iterdir())
    assert len(files) == 2
    for file in files:
        file.write_bytes(file.read_bytes()[:-1])
    failed = CliRunner().invoke(app, ["rows", str(tmp_path / "run"), "--step", "2"])
    assert "is damaged: it is not what the run has written" in str(failed.exception)
    for file in files:
        file.unlink()
    for words in (["--step", "2"], ["--row", "1"]):
        failed = CliRunner().invoke(app, ["rows", str(tmp_path / "run"), *words])
        assert isinstance(failed.exception, ConfigError)
    assert "the loop at epoch 0, row 0 had other data" in str(failed.exception)
    found = run("rows", "--verify", code=1)
    assert found["unknown"][0].startswith("epoch 0, row 0: ")
    assert found["differences"] == []


def test_verify_exits_with_1_for_a_changed_ledger(folder: Path, tmp_path: Path, run: Any) -> None:
    list(made(folder, "plain", 0, 1, tmp_path / "run"))
    assert run("rows", "--verify")["differences"] == []
    path = tmp_path / "run" / "ledger.jsonl"
    path.write_text(path.read_text().replace('"drop_last":false', '"drop_last":true'))
    assert len(run("rows", "--verify", code=1)["differences"]) == 1


def test_an_evaluation_in_the_same_folder_counts_no_steps(folder: Path, tmp_path: Path, run: Any) -> None:
    train = made(folder, "plain", 0, 1, tmp_path / "run")
    held_out = make_loader(
        folder / "b.parquet", 5, shuffle=False, cache=False, stats_dir=tmp_path / "run", world=World(0, 1)
    )
    seen = list[Any]()
    for _ in range(3):
        for number, batch in enumerate(train):
            seen.append(batch["row_id"].tolist())
            if number == 7:
                list(held_out)
    for number in (1, 9, 20, 40, len(seen)):
        found = run("rows", "--step", str(number))
        assert [row["row_id"] for row in found["batches"][0]["ranks"][0]["rows"]] == seen[number - 1]
        assert found["other_loops"] == 3
    times = [each["step"] for each in run("rows", "--row", "17", "--epochs", "0")["seen"]]
    assert times == [number for number, rows in enumerate(seen, 1) if 17 in rows]


def test_an_evaluation_that_comes_first_counts_no_steps(folder: Path, tmp_path: Path, run: Any) -> None:
    list(
        make_loader(folder / "b.parquet", 5, shuffle=False, cache=False, stats_dir=tmp_path / "run", world=World(0, 1))
    )
    batches = list(made(folder, "plain", 0, 1, tmp_path / "run"))
    found = run("rows", "--step", "3")
    assert [row["row_id"] for row in found["batches"][0]["ranks"][0]["rows"]] == batches[2]["row_id"].tolist()
    assert found["other_loops"] == 1


@pytest.mark.parametrize("kind", ["pack", "length"])
def test_columns_of_a_map_need_the_program_s_loader(folder: Path, tmp_path: Path, run: Any, kind: str) -> None:
    def longer(batch: dict[str, Any]) -> dict[str, Any]:
        return {"text": [values.tolist() for values in batch["tokens"]], "n": batch["n_tokens"]}

    data = make_dataset(folder / "a.parquet", cache=False).map(longer)
    how: dict[str, Any] = {"batch_tokens": 64, "length": "n"}
    if kind == "pack":
        data, how = data.pack(16, column="text"), {"batch_size": 2}
    list(make_loader(data, **how, stats_dir=tmp_path / "run", world=World(0, 1)))
    failed = CliRunner().invoke(app, ["replay", str(tmp_path / "run"), "--step", "1", "--out", str(tmp_path / "b.pt")])
    assert isinstance(failed.exception, ConfigError)
    assert "The run called map, whose function the ledger does not have: name what makes it" in str(failed.exception)


def test_a_replayed_batch_of_a_mixture_names_its_sources(folder: Path, tmp_path: Path, run: Any) -> None:
    parts = {name: make_dataset(folder / f"{name}.parquet", cache=False) for name in "abc"}
    batches = list(make_loader(mix(parts, name_column="of"), 5, stats_dir=tmp_path / "run", world=World(0, 1)))
    run("replay", "--step", "2", "--out", str(tmp_path / "batch.pt"))
    assert torch.load(tmp_path / "batch.pt")["of"].tolist() == batches[1]["of"].tolist()


def test_a_command_without_torch_says_what_it_needs(folder: Path, tmp_path: Path) -> None:
    list(made(folder, "plain", 0, 1, tmp_path / "run"))
    program = "import sys; sys.modules['torch'] = None; from dataload.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "rows", str(tmp_path / "run"), "--step", "1"], capture_output=True, text=True
    )
    assert "need torch, as the run did: pip install torch" in " ".join(done.stderr.split())


def test_other_rows_go_on_with_the_steps_of_the_run(folder: Path, tmp_path: Path, run: Any) -> None:
    data = make_dataset(folder / "a.parquet", cache=False)
    first, then = (
        make_loader(each, 5, row_ids=True, stats_dir=tmp_path / "run", world=World(0, 1))
        for each in (data, data.exclude([3]))
    )
    list(first)
    then.set_epoch(1)
    batches = list(then)
    found = run("rows", "--step", str(len(first) + 2))
    assert found["other_loops"] == 0
    rows = [row["row_id"] for row in found["batches"][0]["ranks"][0]["rows"]]
    assert rows == batches[1]["row_id"].tolist()


def test_a_training_s_loops_count_and_the_others_do_not(folder: Path, tmp_path: Path, run: Any) -> None:
    train, held_out = (made(folder, "plain", 0, 1, tmp_path / "run") for _ in range(2))
    list(held_out)
    train.set_epoch(2)
    batches = list(train.batches_on(progress={"step": 20, "accumulate": 2}))
    list(held_out)
    found = run("rows", "--step", "22")
    assert [batch["ranks"][0]["rows"][0]["row_id"] for batch in found["batches"]] == [
        batch["row_id"][0].item() for batch in batches[2:4]
    ]
    failed = CliRunner().invoke(app, ["rows", str(tmp_path / "run"), "--step", "5"])
    assert "the ledger begins with step 21, and step 5 came before" in str(failed.exception)


def test_a_step_that_the_run_has_not_had_is_told(folder: Path, tmp_path: Path, run: Any) -> None:
    loader = made(folder, "plain", 0, 1, tmp_path / "run")
    list(loader)
    iterator = iter(loader)
    list(zip(range(3), iterator, strict=False))
    iterator.close()
    last = len(loader) + 3
    assert run("rows", "--step", str(last))["recorded"]
    assert not run("rows", "--step", str(last + 1))["recorded"]
    assert not run("replay", "--step", "5000", "--out", str(tmp_path / "batch.pt"))["recorded"]
    text = CliRunner().invoke(app, ["rows", str(tmp_path / "run"), "--step", "5000"]).stdout
    assert "no seal and no later loop tells that the run got here: this is how it goes on" in text


def test_show_tells_what_the_values_are_without(folder: Path, tmp_path: Path, run: Any) -> None:
    def twice(batch: dict[str, Any]) -> dict[str, Any]:
        return {"id": batch["id"] * 2}

    data = make_dataset(folder / "a.parquet", columns=["id"], cache=False).map(twice)
    list(make_loader(data, 5, stats_dir=tmp_path / "run", transform=dict, world=World(0, 1)))
    left_out = run("rows", "--step", "3", "--show")["left_out"]
    assert [name.split()[0] for name in left_out] == ["map", "transform"]
    assert run("rows", "--step", "3")["left_out"] == []
    text = CliRunner().invoke(app, ["rows", str(tmp_path / "run"), "--step", "3", "--show"]).stdout
    assert f"values are without {', '.join(left_out)}" in text


def test_a_saved_batch_of_any_columns_is_loaded_again(tmp_path: Path, run: Any) -> None:
    table = pa.table({"id": range(8), "image": [b"\xff\x00"] * 8, "tokens": [[1, 2]] * 8})
    pq.write_table(table, tmp_path / "rows.parquet")
    for ragged in ("list", "flat"):
        list(make_loader(tmp_path / "rows.parquet", 4, ragged=ragged, cache=False, stats_dir=tmp_path / "run"))
        run("replay", "--step", "1", "--out", str(tmp_path / "batch.pt"))
        (tmp_path / "run" / "ledger.jsonl").unlink()
        assert torch.load(tmp_path / "batch.pt", weights_only=True).keys() == {"id", "image", "tokens"}
    assert not list(tmp_path.glob("*.partial"))
