"""`on_error="skip"` reaches `map`: a row with which its function raises is replaced, and ends no other row."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dataload import make_dataset, make_loader, mix
from dataload.dataset import Dataset
from dataload.errors import ConfigError, DataError

N = 400
SAMPLED, LATER = 5, 250  # of row groups of 100 rows, of which the first 32 are sampled
BAD = (SAMPLED, LATER, LATER + 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.mkdir()
    pq.write_table(pa.table({"x": np.arange(N), "kept": [f"row {row}" for row in range(N)]}), path / "x.parquet", 100)
    return path


def bad(batch: dict[str, Any], rows: tuple[int, ...]) -> None:
    for row in batch["x"].tolist():
        if row in rows:
            raise LookupError(f"no image {row}")


def made(batch: dict[str, Any]) -> dict[str, Any]:
    bad(batch, BAD)
    x = batch["x"]
    return {
        "x": x,
        "double": 2.0 * x,
        "image": x.repeat(4).reshape(4, -1).T.reshape(-1, 2, 2),
        "text": [f"t{row}" for row in x.tolist()],
        "tokens": [list(range(row % 3)) for row in x.tolist()],
    }


def made_later(batch: dict[str, Any]) -> dict[str, Any]:
    bad(batch, (LATER,))
    return {"x": batch["x"]}


def seen(batches: Any) -> list[list[int]]:
    return [batch["x"].tolist() for batch in batches]


def expected(size: int, rows: tuple[int, ...] = BAD) -> list[list[int]]:
    """Return the batches in file order: the n-th bad row of a batch is replaced by its n-th good one."""
    found = []
    for first in range(0, N, size):
        batch = list(range(first, min(first + size, N)))
        good = iter([row for row in batch if row not in rows])
        found.append([next(good) if row in rows else row for row in batch])
    return found


def skipping(dataset: Dataset, **options: Any) -> Any:
    return make_loader(dataset, 50, **{"shuffle": False, "on_error": "skip", "row_ids": True, **options})


@pytest.mark.variants
@pytest.mark.parametrize("processes", [None, 1])
def test_a_row_with_which_map_raises_is_replaced_named_and_counted(
    path: Path, tmp_path: Path, caplog: Any, processes: int | None
) -> None:
    dataset = make_dataset(path, cache_dir=tmp_path / "cache").map(made, columns=["x"], processes=processes)
    loader = skipping(dataset)
    with caplog.at_level(logging.WARNING):
        batches = list(loader)
        assert seen(loader) == expected(50)
    assert seen(batches) == expected(50)
    for batch in batches:
        x = batch["x"]
        assert torch.equal(batch["double"], 2.0 * x)
        assert torch.equal(batch["image"].reshape(-1, 4), x[:, None].expand(-1, 4))
        assert batch["text"] == [f"t{row}" for row in x.tolist()]
        assert [each.tolist() for each in batch["tokens"]] == [list(range(row % 3)) for row in x.tolist()]
        assert batch["kept"] == [f"row {row}" for row in x.tolist()]
    stats = loader.stats()
    assert (stats.skipped_rows, stats.skipped_row_ids) == (3, [*BAD])
    [named] = [record.message for record in caplog.records if "on_error" in record.message]
    assert f"row {SAMPLED} (" in named
    assert "x.parquet row group 0 row 5" in named
    assert re.search(
        r"map test_skipped_rows.made: LookupError: no image 5 \(.*test_skipped_rows.py:\d+ in bad\)", named
    )


def test_without_skip_the_row_is_an_error_before_the_first_batch_or_when_it_comes(path: Path) -> None:
    dataset = make_dataset(path, cache=False)
    with pytest.raises(
        DataError, match=r"x.parquet row group 0 row 5: map test_skipped_rows.made: LookupError: no image 5"
    ):
        make_loader(dataset.map(made, columns=["x"]), 50)
    later = dataset.map(made_later, columns=["x"])
    with pytest.raises(
        DataError, match=r"x.parquet row group 2 row 50: map test_skipped_rows.made_later: LookupError: no image 250"
    ):
        list(make_loader(later, 50))
    assert later[0]["x"] == 0
    with pytest.raises(DataError, match="no image 250"):
        later[LATER + 9]


def test_the_function_runs_once_for_each_host_and_errors_are_cached(path: Path, tmp_path: Path) -> None:
    log = tmp_path / "calls"

    def logged(batch: dict[str, Any]) -> dict[str, Any]:
        with log.open("a") as file:
            file.write(f"{len(batch['x'])}\n")
        return made(batch)

    for attempt in range(2):
        dataset = make_dataset(path, cache_dir=tmp_path / "cache").map(logged, columns=["x"], version=str(log))
        sampled = len(log.read_text().split())
        loader = skipping(dataset)
        assert seen(loader) == expected(50)
        calls = len(log.read_text().split()) - sampled
        assert calls == 0 if attempt else calls > 0
        assert loader.stats().skipped_rows == 3


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "transform": dict}], ids=["loop", "worker"])
def test_a_resumed_epoch_replaces_the_same_rows(path: Path, tmp_path: Path, options: Any) -> None:
    def loader() -> Any:
        dataset = make_dataset(path, cache_dir=tmp_path / "cache").map(made, columns=["x"])
        return skipping(dataset, shuffle=True, seed=3, **options)

    whole = seen(loader())
    first, second = loader(), loader()
    head = []
    for batch in first:
        head.append(batch["x"].tolist())
        if len(head) == 3:
            break
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert head + seen(second) == whole
    assert {row for batch in whole for row in batch} == {*range(N)} - {*BAD}


def test_maps_one_after_the_other_name_the_one_that_failed(path: Path, caplog: Any) -> None:
    dataset = make_dataset(path, cache=False).map(made, columns=["x"])
    again = dataset.map(lambda batch: {"x": batch["x"] + bad_once(batch)}, columns=["x"])
    loader = skipping(again)
    rows = tuple(sorted({*BAD, 7}))
    assert seen(loader) == expected(50, rows)
    assert loader.stats().skipped_row_ids == [*rows]
    assert "raised DataError: map test_skipped_rows.made: LookupError" in caplog.text
    with pytest.raises(DataError, match=r"map test_skipped_rows\.made: LookupError: no image 5"):
        make_loader(again, 50)


def bad_once(batch: dict[str, Any]) -> int:
    bad(batch, (7,))
    return 0


def test_splits_and_selections_of_mapped_rows_skip_too(path: Path) -> None:
    dataset = make_dataset(path, cache=False).map(made, columns=["x"]).select(range(0, N, 5))
    loader = make_loader(dataset, 20, shuffle=False, on_error="skip")
    assert {row for batch in seen(loader) for row in batch} == {*range(0, N, 5)} - {*BAD}
    assert loader.stats().skipped_rows == 2


def test_a_function_that_always_raises_is_an_error(path: Path) -> None:
    dataset = make_dataset(path, cache=False)
    with pytest.raises(DataError, match="<lambda>: ZeroDivisionError"):
        dataset.map(lambda batch: {"x": batch["x"].tolist()[0] / 0})
    after = dataset.map(lambda batch: {"x": batch["x"] if batch["x"].max() < 300 else batch["nothing"]})
    with pytest.raises(DataError, match="<lambda>: KeyError: 'nothing'"):
        list(skipping(after))


def test_an_error_of_no_row_is_raised(path: Path) -> None:
    def full(batch: dict[str, Any]) -> dict[str, Any]:
        if 250 in batch["x"]:
            raise MemoryError("no memory")
        return {"x": batch["x"]}

    with pytest.raises(DataError, match=r"map .*full: MemoryError: no memory"):
        list(skipping(make_dataset(path, cache=False).map(full, columns=["x"])))


def test_mixtures_skip_and_follow_set_weights(path: Path) -> None:
    dataset = make_dataset(path, cache=False).map(made, columns=["x"])
    parts = dataset.split([0.5, 0.5])
    mixture = mix(parts, [1, 1], stop="all_exhausted")
    loader = make_loader(mixture, 20, on_error="skip")
    assert {row for batch in seen(loader) for row in batch} == {*range(N)} - {*BAD}
    assert loader.stats().skipped_rows >= 3
    mixture.set_weights([3, 1])
    assert loader.dataset.weights == (3, 1)
    assert len(seen(loader)) > 20  # The second source is exhausted later.
    with pytest.raises(DataError, match="no image 5"):
        make_loader(mixture, 20)
    plain = make_dataset(path, columns=["x"], cache=False)
    with pytest.raises(ConfigError, match=r"source '0' is mapped, and '1' is not: map all sources or none"):
        make_loader(mix([plain.map(made_later), plain], [1, 1]), 20, on_error="skip")


def test_a_failure_in_the_sample_is_not_cached(path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.touch()

    def unless_broken(batch: dict[str, Any]) -> dict[str, Any]:
        if broken.exists():
            bad(batch, BAD)
        return {"x": batch["x"]}

    def loader() -> Any:
        dataset = make_dataset(path, cache_dir=tmp_path / "cache")
        return make_loader(dataset.map(unless_broken, version=str(broken)), 50, shuffle=False)

    with pytest.raises(DataError, match="no image 5"):
        loader()
    broken.unlink()
    assert seen(loader()) == expected(50, ())


class Raises:
    """A function that raises an error with one row."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if LATER in batch["x"].tolist():
            raise self.error
        return {"x": batch["x"]}


@pytest.mark.parametrize("error", [SystemExit(3), ValueError("cannot read \udcff.jpg")], ids=["exit", "text"])
def test_no_error_of_a_row_ends_the_job(path: Path, error: BaseException) -> None:
    dataset = make_dataset(path, cache=False).map(Raises(error), version="1")
    loader = skipping(dataset)
    assert seen(loader) == expected(50, (LATER,))
    assert loader.stats().skipped_row_ids == [LATER]


@pytest.mark.parametrize("error", [ConnectionResetError("by peer"), TimeoutError("after 5 s")])
def test_a_service_that_may_answer_later_makes_no_row_bad_for_good(path: Path, error: OSError) -> None:
    with pytest.raises(DataError, match=str(error)):
        seen(skipping(make_dataset(path, cache=False).map(Raises(error), version="1")))


class Unanswered(RuntimeError):
    """An error of a client."""


@pytest.mark.parametrize("is_cause", [False, True])
def test_a_service_that_does_not_answer_is_asked_once_and_no_row_is_named(path: Path, is_cause: bool) -> None:
    calls: list[int] = []

    def asks(batch: dict[str, Any]) -> dict[str, Any]:
        if LATER not in batch["x"].tolist():
            return {"x": batch["x"]}
        calls.append(len(batch["x"]))
        if is_cause:
            raise Unanswered("no answer") from TimeoutError()
        raise TimeoutError("no answer")

    mapped = make_dataset(path, cache=False).map(asks, version="1")
    with pytest.raises(DataError, match=r"x.parquet row group 2 rows \d+ to \d+: map .*asks: \w+: no answer"):
        mapped[LATER]
    assert len(calls) == 1


def test_memory_that_runs_out_in_the_sample_is_of_no_row(path: Path) -> None:
    def hungry(batch: dict[str, Any]) -> dict[str, Any]:
        raise MemoryError("no 3 GB")

    with pytest.raises(DataError, match=r"x.parquet row group 0 .*MemoryError: no 3 GB"):
        make_dataset(path, cache=False).map(hungry, version="1")
