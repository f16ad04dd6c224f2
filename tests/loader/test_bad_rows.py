"""`on_error="skip"`: rows that raise are replaced by others, always the same ones, and counted."""

from __future__ import annotations

import errno
import functools
import json
import logging
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dataload import World, fit, make_dataset, make_loader, mix
from dataload.dataset import Dataset
from dataload.errors import ConfigError, DataError, RowError
from dataload.loader.bad_rows import MOST_SUBSTITUTES, replacements
from dataload.telemetry.loader_stats import MOST_ROW_IDS
from dataload.telemetry.stats_log import read

N = 1000
POISONED = 70_123


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """Row i has x == i; the text of rows 300 and 301 is not UTF-8."""
    texts = pa.array([b"\xff" if row in (300, 301) else b"row %d" % row for row in range(N)]).view(pa.string())
    pq.write_table(pa.table({"x": np.arange(N), "text": texts}), tmp_path / "a.parquet", row_group_size=100)
    return make_dataset(tmp_path, cache=False)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """100,000 rows in three files; the text of one of them is not UTF-8."""
    folder = tmp_path_factory.mktemp("large")
    for number, (first, last) in enumerate([(0, 40_000), (40_000, 75_000), (75_000, 100_000)]):
        texts = pa.array([b"\xc3(" if row == POISONED else b"%d" % row for row in range(first, last)]).view(pa.string())
        table = pa.table({"x": np.arange(first, last), "text": texts})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=8000)
    return str(folder)


def fails_at(batch: dict[str, Any], rows: frozenset[int] = frozenset()) -> dict[str, Any]:
    if bad := rows & {*batch["x"].tolist()}:
        raise LookupError(f"cannot read {min(bad)}")
    return batch


def loader_of(dataset: Dataset, *bad: int, **options: Any) -> Any:
    options = {"batch_size": 50, "shuffle": False, "row_ids": True, "on_error": "skip", **options}
    transform = functools.partial(fails_at, rows=frozenset(bad))
    return make_loader(dataset, options.pop("batch_size"), transform=transform, **options)


def x_of(batches: Any) -> list[list[int]]:
    return [batch["x"].tolist() for batch in batches]


@pytest.fixture
def numbers(dataset: Dataset, tmp_path: Path) -> Dataset:
    return make_dataset(tmp_path, columns=["x"], cache=False)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "transform": dict}], ids=str)
def test_a_value_that_no_batch_can_hold_names_its_file_and_row_group(tmp_path: Path, options: Any) -> None:
    lists: list[Any] = [[[row]] for row in range(30)]
    lists[17][0][0] = lists[25][0][0] = None
    texts = pa.array([b"\xff" if row == 12 else b"%d" % row for row in range(30)]).view(pa.string())
    pq.write_table(pa.table({"x": lists, "text": texts}), tmp_path / "a.parquet", row_group_size=10)
    for column, row, says in (("x", 7, "has nulls of int64 inside"), ("text", 2, "has a string that is not UTF-8")):
        dataset = make_dataset(tmp_path, columns=[column], cache=False)
        place = rf"{tmp_path}/a\.parquet row group 1 row {row}: column '{column}' {says}"
        with pytest.raises(DataError, match=place):
            list(make_loader(dataset, 30, shuffle=False, ragged="flat", **options))
        if column == "text":
            with pytest.raises(DataError, match=place):
                dataset.__getitems__(range(30)).columns  # noqa: B018


# Rows in real batches


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_threads": 2}, {"shuffle": True}], ids=str)
def test_an_exception_of_the_transform_names_the_row_that_raised(numbers: Dataset, options: Any) -> None:
    loader = loader_of(numbers, 120, 131, on_error="raise", **options)
    with pytest.raises(LookupError) as caught:
        list(loader)
    position = r"row \d+" if "shuffle" in options else "row 20"
    row = r"row 1[23][01] of the dataset \(\S+/a\.parquet row group 1 row \d+\)"
    place = f"{position} of the batch is the first that raises: {row}"
    assert re.search(place, noted(caught.value)), noted(caught.value)


def test_an_exception_that_no_single_row_causes_names_the_batch_only(numbers: Dataset) -> None:
    def fails_together(batch: dict[str, Any]) -> dict[str, Any]:
        if len(batch["x"]) > 1:
            raise LookupError("needs single rows")
        return batch

    with pytest.raises(LookupError) as caught:
        list(make_loader(numbers, 50, shuffle=False, transform=fails_together))
    assert "batch 0 has 50 rows of the dataset: 0-49" in noted(caught.value)
    assert "the first that raises" not in noted(caught.value)


@pytest.mark.parametrize("error", [TimeoutError, CancelledError, LookupError])
def test_a_function_that_was_slow_or_timed_out_is_called_once(
    numbers: Dataset, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()

    def fails(batch: dict[str, Any]) -> dict[str, Any]:
        calls.append(len(batch["x"]))
        raise error("no answer")

    if error is LookupError:
        monkeypatch.setattr("dataload.loader.bad_rows.CALL_SECONDS", 0.0)
    with pytest.raises(error):
        list(make_loader(numbers, 50, shuffle=False, transform=fails))
    assert calls == [50]


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_rows_are_replaced_by_good_ones_of_their_batch(numbers: Dataset, workers: int) -> None:
    loader = loader_of(numbers, 7, 8, 9, 120, num_workers=workers)
    batches = list(loader)
    assert x_of(batches)[0] == [*range(7), 0, 1, 2, *range(10, 50)]
    assert x_of(batches)[2] == [*range(100, 120), 100, *range(121, 150)]
    assert x_of(batches)[3:] == [[*range(first, first + 50)] for first in range(150, N, 50)]
    assert all(torch.equal(batch["row_id"], batch["x"]) for batch in batches)
    assert (loader.stats().skipped_rows, loader.stats().skipped_row_ids) == (4, [7, 8, 9, 120])
    assert "4 rows that raised are skipped" in str(loader.stats())
    assert loader.stats().rows == N


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2, "transform": dict}, {"collate_fn": lambda rows: rows.columns}]
)
def test_values_that_cannot_be_decoded_are_replaced(dataset: Dataset, options: Any) -> None:
    loader = make_loader(dataset, 50, shuffle=False, on_error="skip", **options)
    batches = list(loader)
    assert x_of(batches)[6] == [302, 303, *range(302, 350)]
    assert batches[6]["text"][:3] == ["row 302", "row 303", "row 302"]
    assert [len(batch["text"]) for batch in batches] == [50] * 20
    assert loader.stats().skipped_row_ids == [300, 301]


def test_the_same_seed_and_epoch_give_the_same_replacements(numbers: Dataset) -> None:
    bad = range(0, N, 17)
    runs = [loader_of(numbers, *bad, shuffle=True, seed=5, num_workers=workers) for workers in (0, 0, 2)]
    found = [[x_of(loader) for _ in range(2)] for loader in runs]
    assert found[0] == found[1] == found[2]
    assert found[0][0] != found[0][1]
    for epoch in found[0]:
        rows = [row for batch in epoch for row in batch]
        assert len(rows) == N
        assert set(rows) == {*range(N)} - {*bad}
    assert {loader.stats().skipped_rows for loader in runs} == {len(bad)}


def test_a_resumed_epoch_has_the_same_replacements(numbers: Dataset) -> None:
    bad = range(0, N, 17)
    whole = x_of(loader_of(numbers, *bad, shuffle=True))
    loader, resumed = (loader_of(numbers, *bad, shuffle=True) for _ in range(2))
    batches = iter(loader)
    first = x_of([next(batches) for _ in range(7)])
    batches.close()
    resumed.load_state_dict(loader.state_dict())
    assert first + x_of(resumed) == whole


def noisy(batch: dict[str, Any], rng: np.random.Generator, bad: int = -1) -> dict[str, Any]:
    noise = rng.random(len(batch["x"]))
    return {**fails_at(batch, frozenset({bad})), "noise": noise, "next": rng.random()}


def test_the_random_numbers_are_those_without_errors(numbers: Dataset) -> None:
    def noise(bad: int) -> list[Any]:
        transform = functools.partial(noisy, bad=bad)
        loader = make_loader(numbers, 50, shuffle=True, on_error="skip", transform=transform)
        return [(batch["noise"].tolist(), batch["next"]) for batch in loader]

    assert noise(-1) == noise(333)


def test_a_batch_without_a_good_row_gets_the_next_row_of_the_dataset(numbers: Dataset) -> None:
    loader = loader_of(numbers, *range(50, 103))
    found = x_of(loader)
    assert found[1] == [103] * 50
    assert found[2] == [103, 104, 105, *range(103, 150)]
    assert loader.stats().skipped_rows == 53
    assert x_of(loader_of(numbers, N - 1, batch_size=1))[-1] == [0]


def fails_at_the_end_of_the_first_source(batch: dict[str, Any]) -> dict[str, Any]:
    if ((batch["source"] == 0) & (batch["x"] >= 950)).any():
        raise LookupError("cannot read")
    return batch


def test_a_homogeneous_batch_without_a_good_row_keeps_its_source(numbers: Dataset) -> None:
    mixture = mix({"a": numbers, "b": numbers}, batching="homogeneous", name_column="source")
    transform = fails_at_the_end_of_the_first_source
    loader = make_loader(mixture, 50, shuffle=False, on_error="skip", transform=transform)
    batches = list(loader)
    assert [batch["source"].unique().numel() for batch in batches] == [1] * 40
    counts = Counter(row for batch in batches for row in batch["source"].tolist())
    assert loader.stats().rows_by_source == {"a": counts[0], "b": counts[1]} == {"a": N, "b": N}
    assert [batch["x"].tolist() for batch in batches].count([0] * 50) == 1
    assert loader.stats().skipped_rows == 50


def test_if_every_row_raises_the_exception_is_raised(numbers: Dataset) -> None:
    calls = 0

    def wrong(batch: dict[str, Any]) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        raise LookupError("no such column")

    loader = make_loader(numbers, 50, shuffle=False, on_error="skip", transform=wrong)
    with pytest.raises(LookupError, match="no such column") as caught:
        list(loader)
    assert "rank 0, epoch 0, batch 0 has 50 rows of the dataset: 0-49\n" in caught.value.__notes__[0]
    assert calls < 200


def stacked(batch: dict[str, Any]) -> torch.Tensor:
    """Raise RuntimeError unless all images have one shape. Row 333 has another."""
    return torch.stack([torch.zeros(3 if row == 333 else 4) + row for row in batch["x"]])


def test_a_row_that_does_not_suit_the_others_is_replaced(numbers: Dataset) -> None:
    loader = make_loader(numbers, 50, shuffle=True, on_error="skip", transform=stacked)
    assert [batch.shape for batch in loader] == [(50, 4)] * 20
    assert loader.stats().skipped_row_ids == [333]


def test_a_transform_that_changes_its_batch_before_it_raises(numbers: Dataset) -> None:
    def half_done(batch: dict[str, Any]) -> dict[str, Any]:
        checked = {"x": batch["x"].clone()}
        batch["x"] += 1
        batch["row_id"].zero_()
        fails_at(checked, frozenset({3}))
        return batch

    loader = make_loader(numbers, 50, shuffle=False, on_error="skip", row_ids=True, transform=half_done)
    assert x_of(loader)[0] == [1, 2, 3, 1, *range(5, 51)]


def test_an_interrupt_is_no_bad_row(numbers: Dataset) -> None:
    calls = 0

    def interrupted(batch: dict[str, Any]) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return batch

    with pytest.raises(KeyboardInterrupt):
        list(make_loader(numbers, 50, on_error="skip", transform=interrupted))
    assert calls == 3


def test_the_first_row_is_logged(numbers: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dataload"):
        x_of(loader_of(numbers, 120, 555))
    [record] = [record.getMessage() for record in caplog.records if "on_error" in record.getMessage()]
    assert "row 120 (file://" in record
    assert "a.parquet row group 1 row 20) raised LookupError: cannot read 120;" in record


def test_a_row_is_logged_at_each_power_of_ten(numbers: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of(numbers, *range(100, 120), *range(500, 600, 2))
    x_of(loader)
    x_of(loader)
    logged = [re.search(r"row (\d+) .*it is replaced, and (\d+) rows", line) for line in caplog.messages]
    assert [found.groups() for found in logged if found] == [("100", "20"), ("500", "115")]


def raised(call: Callable[[], Any]) -> Exception:
    with pytest.raises((RuntimeError, cv2.error)) as caught:
        call()
    return caught.value


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("no memory"),
        OSError(errno.EMFILE, "too many open files"),
        OSError(errno.EDQUOT, "disk quota exceeded"),
        OSError("out of memory error when reading image file"),  # of Pillow
        raised(lambda: torch.empty(1 << 60, dtype=torch.uint8, device="cpu")),
        raised(lambda: cv2.copyMakeBorder(np.zeros((1, 1), np.uint8), 0, 1 << 30, 0, 1 << 30, cv2.BORDER_CONSTANT)),
        caused(RowError.of("x", 3, 50, "cannot be decoded"), MemoryError()),
        caused(RowError.of("x", 3, 50, "cannot be decoded"), caused(ValueError(), torch.OutOfMemoryError())),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("call", [1, 4])
def test_exhausted_resources_are_no_bad_row(numbers: Dataset, error: Exception, call: int) -> None:
    """In the fourth call, the loader looks for another bad row."""
    calls = 0

    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return fails_at(batch, frozenset([3]))

    with pytest.raises(type(error)):
        x_of(make_loader(numbers, 50, shuffle=False, on_error="skip", transform=transform))
    assert calls == call


def test_a_text_about_memory_in_the_data_is_a_bad_row(numbers: Dataset) -> None:
    def checked(batch: dict[str, Any]) -> dict[str, Any]:
        if 120 in batch["row_id"]:
            error = ValueError("out of memory.jpg is no image")
            raise error from error
        return batch

    loader = make_loader(numbers, 50, transform=checked, row_ids=True, on_error="skip")
    assert sum(len(batch["x"]) for batch in loader) == N
    assert loader.stats().skipped_row_ids == [120]


def test_the_log_names_no_row_of_the_batch(numbers: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    def checked(batch: dict[str, Any]) -> dict[str, Any]:
        if 120 in batch["row_id"]:
            raise RowError.of("x", int((batch["row_id"] == 120).nonzero()), 50, "cannot be decoded")
        return batch

    for _ in make_loader(numbers, 50, transform=checked, row_ids=True, on_error="skip"):
        pass
    assert "a.parquet row group 1 row 20) raised DataError: x cannot be decoded; it is replaced" in caplog.text


def test_statistics_list_some_rows_and_count_all(numbers: Dataset, tmp_path: Path) -> None:
    loader = loader_of(numbers, *range(0, N, 3), stats_dir=tmp_path / "stats")
    x_of(loader)
    assert loader.stats().skipped_rows == 334
    assert loader.stats().skipped_row_ids == list(range(0, N, 3))[:MOST_ROW_IDS]
    [logged] = read(tmp_path / "stats")
    assert logged.stats.skipped_rows == 334
    assert logged.stats.skipped_row_ids == loader.stats().skipped_row_ids
    line = json.loads((tmp_path / "stats" / "rank-0.jsonl").read_text().splitlines()[-1])
    assert line["skipped_rows"] == 334


def test_fit_counts_replaced_rows(dataset: Dataset) -> None:
    model = nn.Linear(1, 1)
    loader = make_loader(dataset, 50, on_error="skip")
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    [epoch] = fit(model, optimizer, loader, lambda model, batch: model(batch["x"][:, None].float()).mean(), epochs=1)
    assert (epoch["rows"], epoch["skipped_rows"]) == (N, 2)


def test_without_skip_a_bad_row_is_an_error(numbers: Dataset) -> None:
    with pytest.raises(LookupError):
        x_of(loader_of(numbers, 7, on_error="raise"))
    with pytest.raises(ConfigError, match="on_error='ignore' is unknown: use one of 'raise', 'skip'"):
        loader_of(numbers, 7, on_error="ignore")


def noted(error: BaseException) -> str:
    """Return the message and the notes of an error. Workers send both as the message."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def none_at(rows: Any, number: int) -> dict[str, Any] | None:
    """Forget to return the batch with a row. Also a `collate_fn`."""
    batch: dict[str, Any] = getattr(rows, "columns", rows)
    return None if number in batch["x"].tolist() else batch


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_threads": 0}], ids=str)
@pytest.mark.parametrize("function", ["transform", "collate_fn"])
def test_none_is_no_batch(numbers: Dataset, function: str, options: dict[str, Any]) -> None:
    options = {**options, function: functools.partial(none_at, number=60)}
    with pytest.raises(DataError, match=f"{function} returned None: return the batch") as caught:
        list(make_loader(numbers, 50, shuffle=False, **options))
    assert "rank 0, epoch 0, batch 1 has 50 rows of the dataset: 50-99" in noted(caught.value)
    loader = make_loader(numbers, 50, shuffle=False, on_error="skip", **options)
    assert x_of(loader)[1] == [*range(50, 60), 50, *range(61, 100)]
    assert loader.stats().skipped_row_ids == [60]


# One of 100,000


def test_one_poisoned_row_is_located(large: str) -> None:
    dataset = make_dataset(large, cache=False)
    loader = make_loader(dataset, 256, on_error="skip", row_ids=True)
    rows = Counter(row for batch in loader for row in batch["row_id"].tolist())
    assert loader.stats().skipped_row_ids == [POISONED]
    assert {*range(100_000)} - rows.keys() == {POISONED}
    url, row_group, row = dataset.locate(loader.stats().skipped_row_ids)[0]
    value = pq.ParquetFile(url.removeprefix("file://")).read_row_group(row_group)["text"][row]
    assert value.as_buffer().to_pybytes() == b"\xc3("


def counted(folder: str) -> tuple[int, list[int], int, list[int]]:
    loader = make_loader(make_dataset(folder, cache=False), 256, on_error="skip", transform=dict, num_workers=1)
    sizes = [len(batch["text"]) for batch in loader]
    return World.detect().rank, sizes, loader.stats().skipped_rows, loader.stats().skipped_row_ids


def test_four_ranks_end_with_equal_counts(ranks: Any, large: str) -> None:
    answers = ranks(4, counted, large)
    assert [answer[0] for answer in answers] == [0, 1, 2, 3]
    assert [answer[1] for answer in answers] == [answers[0][1]] * 4
    assert sum(sum(answer[1]) for answer in answers) == 100_000
    assert sum(answer[2] for answer in answers) == 1
    assert [row for answer in answers for row in answer[3]] == [POISONED]


# The search for bad rows


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))), st.integers(0, 90))
def test_exactly_the_bad_rows_are_replaced(case: tuple[int, set[int]], more: int) -> None:
    count, bad = case
    numbers, total = np.arange(count) + 7, count + 7 + more
    found = replacements(numbers, range(total), lambda rows: not {row - 7 for row in rows.tolist()} & bad)
    good = [row + 7 for row in range(count) if row not in bad]
    assert found is not None
    if not good:
        assert found.tolist() == [(count + 7) % total] * count
        return
    lost = iter(good * count)
    assert found.tolist() == [row + 7 if row not in bad else next(lost) for row in range(count)]


@given(st.integers(3, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))))
def test_exactly_the_row_that_does_not_suit_the_others_is_replaced(case: tuple[int, int]) -> None:
    count, odd = case
    found = replacements(np.arange(count), range(count), lambda rows: len({row == odd for row in rows.tolist()}) == 1)
    assert found is not None
    assert np.flatnonzero(found != np.arange(count)).tolist() == [odd]


@given(st.integers(2, 5), st.integers(0, 90), st.data())
def test_a_batch_that_needs_several_rows_loses_exactly_the_bad_row(least: int, more: int, data: st.DataObject) -> None:
    count = 2 * least + more
    bad = data.draw(st.integers(0, count - 1))
    found = replacements(np.arange(count), range(count), lambda rows: len(rows) >= least and bad not in rows)
    assert found is not None
    assert np.flatnonzero(found != np.arange(count)).tolist() == [bad]


def test_a_batch_that_needs_several_rows_may_consist_of_one_row() -> None:
    found = replacements(np.arange(2), range(10), lambda rows: len(rows) >= 2 and 1 not in rows)
    assert found is not None
    assert found.tolist() == [2, 2]


def test_one_bad_row_of_many_takes_few_calls() -> None:
    sizes = []

    def works(rows: Any) -> bool:
        sizes.append(len(rows))
        return 700 not in rows

    found = replacements(np.arange(1024), range(1024), works)
    assert found is not None
    assert np.flatnonzero(found != np.arange(1024)).tolist() == [700]
    assert len(sizes) <= 4 * 10
    assert sum(sizes) <= 5 * 1024


def test_no_row_works() -> None:
    tried = []

    def works(rows: Any) -> bool:
        tried.append(rows.tolist())
        return False

    assert replacements(np.arange(4), range(1000), works) is None
    assert tried[-MOST_SUBSTITUTES:] == [[row] * 4 for row in range(4, 4 + MOST_SUBSTITUTES)]
    assert replacements(np.zeros(1, np.int64), range(1), works) is None


def test_an_error_that_does_not_come_again_is_logged(dataset: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    errors = [OSError("disk hiccup")]

    def hiccup(batch: dict[str, Any]) -> dict[str, Any]:
        if errors:
            raise errors.pop()
        return batch

    loader = make_loader(dataset.select(range(200)), 50, shuffle=False, on_error="skip", transform=hiccup)
    assert sum(len(batch["x"]) for batch in loader) == 200
    assert loader.stats().skipped_rows == 0
    assert "disk hiccup; it was made again" in caplog.text
