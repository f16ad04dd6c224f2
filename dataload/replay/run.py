"""A run as its ledger tells it: the batches of a step, the steps of a row, and whether the ledger is what was read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataload.errors import ConfigError, DataloadError
from dataload.loader.loader import Loader
from dataload.replay.recorded import Place, Recorded, as_damage, calls_of
from dataload.samplers.rank_sampler import RankSampler
from dataload.samplers.steps import EpochPlace
from dataload.telemetry.run_ledger import Chain, Start, read_ledger

Rows = npt.NDArray[np.int64]


class Batch(NamedTuple):
    """A batch of all ranks.

    Attributes:
        epoch: Its epoch.
        number: Its number in the epoch, as `Loader.rows_at` takes it.
        cursor: Rows of the epoch, of all ranks, before it.
        rows: The rows of each rank.
    """

    epoch: int
    number: int
    cursor: int
    rows: list[Rows]


class Step(NamedTuple):
    """An optimizer step, or a batch of a program without `fit`.

    Attributes:
        number: Its number, from 1.
        start: The loop that had it, or will have it.
        batches: Its batches.
        earlier: The loops that had a step of this number before, until a kill, or a restart from an earlier checkpoint.
        is_recorded: Whether a seal, or a later loop, tells that the run has been there. Else it is how the run goes on.
    """

    number: int
    start: Start
    batches: list[Batch]
    earlier: list[Start]
    is_recorded: bool

    @property
    def is_packed(self) -> bool:
        """Whether its rows are sequences of documents."""
        return any(name == "pack" for name, _ in calls_of(self.start.record["recipe"]))


class Seen(NamedTuple):
    """One time that a row comes.

    Attributes:
        step: The number of the step.
        epoch: Its epoch.
        rank: The rank that gets it.
    """

    step: int
    epoch: int
    rank: int


class Verified(NamedTuple):
    """What a check of a ledger has found.

    Attributes:
        rows: Rows that the digests of the ledger cover.
        seals: Their number.
        differences: How lines or rows differ from what was sealed.
        unknown: The loops whose rows are not known here, and why.
    """

    rows: int
    seals: int
    differences: list[str]
    unknown: list[str]


class Run:
    """The loops of a run.

    Args:
        folder: The folder of the ledger.
        open_loader: Returns the loader of the first rank at the start of a loop, given the record of the loop and the
            rows of its data, if the ledger has them.

    Attributes:
        starts: All loops of the ledger.
        loops: Those that count as steps: of `fit`, if any is; else of loaders that shuffle, if any does. Of these, that
            of the first one, and those that went on where it was. So an evaluation counts no steps.

    Raises:
        ConfigError: There is no ledger.
    """

    def __init__(self, folder: Path, open_loader: Callable[[Mapping[str, Any], Recorded | None], Loader]) -> None:
        self.starts = read_ledger(folder)
        self._folder, self._open = folder, open_loader
        self._loaders: dict[int, Loader] = {}
        self._data: dict[str, Recorded | None] = {}
        self._planned: dict[tuple[int, int], int] = {}
        self.loops = _loops_of(self.starts)
        self._before = self._steps_before()

    def loader(self, start: Start) -> Loader:
        """Return the loader of the first rank at the start of a loop."""
        if start.number not in self._loaders:
            self._loaders = {start.number: self._open(start.record, self.data(start))}
        return self._loaders[start.number]

    def data(self, start: Start) -> Recorded | None:
        """Return the data of a loop; None: the ledger has too little about it."""
        name = json.dumps([start.record.get(each) for each in ("inventory", "recipe", "urls")])
        if name not in self._data:
            self._data[name] = Recorded.of(self._folder, start.record)
        return self._data[name]

    def sampler(self, start: Start) -> RankSampler:
        """Return the sampler of the first rank at the start of a loop: by the ledger, or by data that is opened."""
        data = self.data(start)
        if data is None or "batch_tokens" in (start.record.get("loader") or {}):
            return self.loader(start).rank_sampler
        return data.sampler(start.record)

    def places(self, start: Start, numbers: Rows) -> list[Place]:
        """Return where rows of the data of a loop are."""
        if (data := self.data(start)) is not None:
            return data.places(numbers)
        dataset = self.loader(start).dataset
        counts = dataset.rows_by_source(numbers, [1] * len(numbers))
        names = ["".join(name for name, count in each.items() if count) for each in counts]
        return [Place(name, *place) for name, place in zip(names, dataset.locate(numbers), strict=True)]

    def step(self, number: int) -> Step:
        """Return a step, given its number, at least 1.

        Raises:
            ConfigError: It came before the ledger.
        """
        begun = [loop for loop in self.loops if self._before[loop.number] < number]
        if not begun:
            first = min(self._before.values()) + 1
            raise ConfigError(
                f"the ledger begins with step {first:,}, and step {number:,} came before: name the folder that the run "
                "wrote to then"
            )
        *earlier, start = begun
        sampler, left = self.sampler(start), number - 1 - self._before[start.number]
        place, per_step = sampler.here, _batches_of_a_step(start)
        while left >= (steps := -(-place.left // per_step)):
            left -= steps
            place = sampler.at(place.epoch + 1, 0)
        count = min(per_step, place.left - left * per_step)
        batches = [_batch_at(place.later(left * per_step + offset)) for offset in range(count)]
        again = [loop for loop in earlier if self._before[loop.number] + self._steps_of(loop) >= number]
        reached = [self._before[start.number] + self._steps_of(start, start.reached or start.cursor)]
        reached += [self._before[loop.number] for loop in self.loops if loop.number > start.number]
        return Step(number, start, batches, again, number <= max(reached))

    def steps_of(self, row: int, epochs: int = 0) -> Iterator[Seen]:
        """Yield when a row came and will come, in the order of the steps, until this many epochs after the last one.

        Args:
            row: Its number in the data of the last loop. Earlier data may have it under another number.
            epochs: The epochs.

        Raises:
            ConfigError: There is no such row, or the ledger has too little about earlier data.
        """
        rows = self._rows(self.loops[-1])
        if row >= rows:
            raise ConfigError(f"--row={row}: the data of the latest loop has the rows 0 to {rows - 1}")
        for start in self.loops:
            number = self._number_in(start, row)
            if number is None:
                continue
            sampler, before = self.sampler(start), self._before[start.number]
            place = sampler.here
            last = min((steps for loop, steps in self._before.items() if loop > start.number), default=None)
            per_step = _batches_of_a_step(start)
            yield from _times(place, number, before, per_step, last)
            if start is self.loops[-1]:
                for _ in range(epochs):
                    before += -(-place.left // per_step)
                    place = sampler.at(place.epoch + 1, 0)
                    yield from _times(place, number, before, per_step, None)

    def _rows(self, start: Start) -> int:
        """Return the rows of the data of a loop."""
        data = self.data(start)
        return len(self.loader(start).dataset) if data is None else int(data.firsts[-1])

    def _number_in(self, start: Start, row: int) -> int | None:
        """Return the number that a row of the last loop's data has in that of another loop; None: that lacks it."""
        last = self.loops[-1]
        if start.record["data"] == last.record["data"]:
            return row
        own, there = self.data(last), self.data(start)
        if own is None or there is None:
            raise ConfigError(
                f"the loop at {_place(start)} had other data, and the ledger does not have which rows: --row cannot "
                "tell whether it had this one"
            )
        return own.number_in(there, row)

    def verify(self) -> Verified:
        """Compute the digests of the ledger again."""
        rows, seals, differences, unknown = 0, 0, list[str](), list[str]()
        for start in self.starts:
            if not start.seals:
                continue
            try:
                covered, difference = self._checked(start)
            except DataloadError as error:
                unknown.append(f"{_place(start)}: {error}")
                continue
            rows, seals = rows + covered, seals + len(start.seals)
            differences += [] if difference is None else [f"{_place(start)}: {difference}"]
        return Verified(rows, seals, differences, unknown)

    def _checked(self, start: Start) -> tuple[int, str | None]:
        """Return the rows of a loop that its seals cover, and how they differ from those of the order; None: not."""
        chain, left, rows = Chain(start.lines), list(start.seals), 0
        for run, cursor, size in self.sampler(start).runs():
            last = cursor + size * len(run)
            while left and left[0][0] <= last:
                to, text = left.pop(0)
                part = run[: -(-(to - cursor) // size)]
                if chain.sealed(part.ravel(), to) != text:
                    return rows, f"the rows up to row {to} of the epoch, or lines before, were others"
                if not left:
                    return rows + part.size, None
            chain.add(run.ravel())
            rows += run.size
        return rows, "it has a seal after the end of the epoch"

    def _steps_before(self) -> dict[int, int]:
        """Return the steps before each loop, by its number."""
        found = dict[int, int]()
        for start in self.loops:
            known = start.record.get("step")
            found[start.number] = self._derived(start, found) if known is None else known
        return found

    def _derived(self, start: Start, before: dict[int, int]) -> int:
        """Return the batches before a loop of a program without `fit`: those of the epoch up to it, and before that."""
        for earlier in reversed([each for each in self.loops if each.number < start.number]):
            if earlier.epoch == start.epoch and earlier.cursor <= start.cursor:
                return before[earlier.number] + self._steps_of(earlier, start.cursor)
            if earlier.epoch < start.epoch:
                return before[earlier.number] + self._steps_of(earlier)
        return 0

    def _steps_of(self, start: Start, end: int | None = None) -> int:
        """Return the steps of a loop up to a number of rows of its epoch; None: of those that it has handed out."""
        if end is None:
            end = start.reached or start.record["rows"]
        given = start.record.get("loader") or {}
        if "batch_tokens" in given:
            batches = self._batches_by_tokens(start, end)
        else:
            size = start.record["ranks"] * start.record["batch_size"]
            whole, rest = divmod(max(0, end - start.cursor), size)
            batches = whole + (rest > 0 and not start.record["drop_last"])
        return -(-batches // _batches_of_a_step(start))

    def _batches_by_tokens(self, start: Start, end: int) -> int:
        """Return the batches of a loop with a token budget up to row `end`, for which they are planned, once."""
        if (start.number, end) not in self._planned:
            here = self.sampler(start).here
            self._planned[start.number, end] = here.left - here.steps.left(here.epoch, end)
        return self._planned[start.number, end]


def _loops_of(starts: Sequence[Start]) -> list[Start]:
    """Return the loops that count as steps of the run."""
    if trained := [start for start in starts if start.record.get("step") is not None]:
        return trained
    with as_damage():
        starts = [start for start in starts if start.record["order"]["shuffle"]] or starts
    ours, found = {_loader_key(starts[0]): True}, list[Start]()
    for start in starts:
        later = not found or (start.epoch, start.cursor) > (found[-1].epoch, found[-1].cursor)
        if ours.setdefault(_loader_key(start), later):
            found.append(start)
    return found


def _place(start: Start) -> str:
    return f"epoch {start.epoch}, row {start.cursor}"


def _loader_key(start: Start) -> str:
    return json.dumps([start.record.get("data"), start.record.get("loader")], sort_keys=True)


def _batches_of_a_step(start: Start) -> int:
    return max(1, start.record.get("accumulate") or 1)


def _batch_at(place: EpochPlace) -> Batch:
    return Batch(place.epoch, place.step, place.cursor, place.batches)


def _times(place: EpochPlace, row: int, before: int, per_step: int, last: int | None) -> Iterator[Seen]:
    """Yield when a row comes in the rest of an epoch, up to the step `last`; None: all."""
    batches = place.left
    for number in sorted({*place.steps_with(row), batches - 1}):  # The last one may have the row as padding.
        step = before + number // per_step + 1
        if 0 <= number < batches and (last is None or step <= last):
            rows = place.later(number).batches
            yield from (Seen(step, place.epoch, rank) for rank, own in enumerate(rows) if row in own)
