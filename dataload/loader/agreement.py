"""Ranks that would read different rows, such as those that list different files, are told in the same epoch.

Each rank shows what its loader reads where the others can see it, and looks at what two of them show: in the store of
the process group, in that of torchrun's agent, or, for ranks of one host, in the cache folder. It waits for nobody. So
the rank that comes last to the first batch of an epoch sees the others, and they see it at the end of theirs. Snapshots
that a rank has read have the epochs since when: one that has not begun an epoch yet may refresh before it.

A loader is compared with the one that the same place of the program made on the other rank, if that place has made one
on each of the two: those of a loop may come in another order on each rank, such as that of a set.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from operator import itemgetter
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import torch

from dataload.errors import ConfigError
from dataload.runtime.text import counted, few
from dataload.world import meeting_place

if TYPE_CHECKING:
    from types import FrameType

    from dataload.cache.blocks.reader import Object
    from dataload.cache.tier import Notes, Tier
    from dataload.launchers import MeetingPlace
    from dataload.map_style import MapStyle
    from dataload.samplers.rank_sampler import RankSampler

STORE_SECONDS = 2  # to connect to the store
SAME_ATTEMPT_SECONDS = 300.0  # Processes that began further apart are of different attempts of a job.
MOST_LOOKS = 16  # after which a rank that shows nothing runs another program
MOST_FILES = 1 << 12  # of which a rank shows a digest each: the store of a large job has those of all ranks
FILE_BYTES = 4
MOST_TABLES = 8  # whose versions a rank shows
MOST_SNAPSHOTS = 4  # that a rank shows, the latest ones

log = logging.getLogger(__name__)

_started = time.time()
_made = Counter[str]()  # loaders of this process, by the place of the program that made them
_stores: dict[tuple[int, str, int], Any] = {}  # connections by process and address; None: failed


class Agreement:
    """Compares what the loaders of a job's ranks read.

    Args:
        dataset: The dataset of the loader.
        sampler: Its order.
    """

    def __init__(self, dataset: MapStyle, sampler: RankSampler) -> None:
        self._rank, size = sampler.rank, sampler.num_replicas
        self._place = _place_in_program()
        # Torchrun counts no restart if ranks come or go, and keeps its store.
        self._name = f"{self._place} of {size}"
        self._to_compare = {0, 1 if self._rank == 0 else self._rank - 1} - {self._rank}  # ranks
        self._looks = 0
        self._seen: set[int] = set()  # ranks that show something
        self._shown: tuple[int, int, int] | None = None  # loaders of this place, snapshots, the epoch
        self._snapshots: list[dict[str, Any]] = []  # that this loader has read, as shown
        self._count = 0  # of all of them
        self._epoch: int | None = None  # of the latest check
        self.read(dataset, sampler, 0)
        self._snapshots[0]["since"] = 0

    def read(self, dataset: MapStyle, sampler: RankSampler, refreshes: int) -> None:
        """Know what the loader reads from its next epoch on. refreshes: how often it has looked for newer data."""
        self._dataset = dataset
        options = {"batch_size": sampler.batch_size, "drop_last": sampler.drop_last, **sampler.order.options}
        order = json.loads(json.dumps({"data": sampler.order.digest, **options}))
        tables = [each.manifest.pinned for each in dataset.datasets if each.manifest.pinned]
        sizes = {"files": len(self._files), "rows": len(dataset), "tables": tables[:MOST_TABLES]}
        self._count += 1
        own = {"number": self._count, "refreshes": refreshes, "since": None, "repeats": False, "order": order, **sizes}
        self._snapshots = [*self._snapshots, own][-MOST_SNAPSHOTS:]

    def check(self, epoch: int) -> None:
        """Show what this rank reads in an epoch, and compare it with what others show by now.

        Raises:
            ConfigError: Another rank reads other rows.
        """
        if not self._to_compare:
            return
        self._looks += 1
        if self._looks > MOST_LOOKS:
            self._to_compare &= self._seen
        if self._snapshots[-1]["since"] is None:
            self._snapshots[-1].update(since=epoch, repeats=epoch == self._epoch)
        self._epoch = epoch
        difference = None
        try:
            if (board := _board(self._dataset.datasets[0].blocks.tier)) is not None:
                self._show(board, epoch)
                difference = self._difference(board, epoch)
        except Exception as error:  # noqa: BLE001 (best effort: a store may end at any time)
            log.debug("cannot compare this rank with others: %r", error)
            self._to_compare.clear()  # Each try may take seconds.
        if difference is not None:
            raise ConfigError(f"the ranks read different rows: {difference}")

    def _show(self, board: Board, epoch: int) -> None:
        """Show what this rank reads, unless it does already."""
        shown = _made[self._place], self._count, epoch
        if shown != self._shown:
            if self._shown is None or self._shown[1] != self._count:
                board.show(self._files_name(self._count, self._rank), self._digests)
            self._shown = shown
            content = {"started": _started, "loaders": shown[0], "epoch": epoch, "snapshots": self._snapshots}
            board.show(f"{self._name} {self._rank}", json.dumps(content).encode())

    def _difference(self, board: Board, epoch: int) -> str | None:
        """Return how the rows of another rank differ, or None."""
        if _made[self._place] > 1:  # They may come in another order on the other rank.
            self._to_compare.clear()
        own = self._snapshots[-1]
        for rank in sorted(self._to_compare):
            content = board.read(f"{self._name} {rank}")
            other = None if content is None else json.loads(content)
            if other is None or abs(other["started"] - _started) > SAME_ATTEMPT_SECONDS:
                continue
            self._seen.add(rank)
            if other["loaders"] > 1:
                self._to_compare.discard(rank)
                continue
            begun = [each for each in other["snapshots"] if each["since"] is not None and each["since"] <= epoch]
            theirs = begun[-1] if begun else own
            if theirs["refreshes"] < own["refreshes"] and other["epoch"] < own["since"]:
                continue  # It may look for a newer one before its own epoch begins.
            if theirs["refreshes"] != own["refreshes"] and max(own, theirs, key=itemgetter("refreshes"))["repeats"]:
                continue  # One of the two has read both snapshots in epochs of this number.
            if theirs["order"]["data"] != own["order"]["data"]:
                digests = board.read(self._files_name(theirs["number"], rank)) or b""
                return self._other_data(rank, theirs, digests)
            if theirs["order"] != own["order"]:
                return self._other_arguments(rank, theirs["order"])
        return None

    def _files_name(self, number: int, rank: int) -> str:
        """Return the name under which a rank shows the files of a snapshot. Those of older ones are replaced."""
        return f"{self._name} files {number % MOST_SNAPSHOTS} {rank}"

    @property
    def _files(self) -> list[Object]:
        groups = (group for each in self._dataset.datasets for group in each.manifest.row_groups)
        return list(dict.fromkeys(group.file for group in groups))

    @property
    def _digests(self) -> bytes:
        """A digest of the name and the size of each file; copies in another folder have the same."""
        files = self._files[:MOST_FILES]
        shared = len(os.path.commonprefix([f"{file.stable_path.rpartition('/')[0]}/" for file in files]))  # noqa: RUF071 (a part of a name is the same everywhere)
        texts = (f"{file.stable_path[shared:]} {file.size}".encode(errors="surrogateescape") for file in files)
        return b"".join(hashlib.blake2b(text, digest_size=FILE_BYTES).digest() for text in texts)

    def _other_data(self, rank: int, theirs: Mapping[str, Any], digests: bytes) -> str:
        def text(shown: Mapping[str, Any]) -> str:
            of = f" of {few(shown['tables'])}" if shown["tables"] else ""
            data = f"data {str(shown['order']['data'])[:16]}"
            return f"{counted(shown['rows'], 'row')} in {counted(shown['files'], 'file')}{of} ({data})"

        own, files, mine = self._digests, self._files, self._snapshots[-1]
        starts = range(0, max(len(own), len(digests)), FILE_BYTES)
        first = next((at for at in starts if own[at : at + FILE_BYTES] != digests[at : at + FILE_BYTES]), None)
        where = ""
        if first is not None:
            number = first // FILE_BYTES
            name = files[number].name if number < len(files) else f"the one after {files[-1].name}"
            where = f"; the first file that differs is {name}"
        way = "List the files once, when nobody writes them, and give all ranks the same"
        if mine["tables"] and theirs["tables"]:
            way = "Give all ranks the same version of the table, such as rank 0 has"
        if mine["refreshes"] != theirs["refreshes"]:
            way = "Call refresh() on every rank, before the same epoch"
        return f"rank {self._rank} has {text(mine)}, rank {rank} has {text(theirs)}{where}. {way}"

    def _other_arguments(self, rank: int, other: Mapping[str, Any]) -> str:
        mine = self._snapshots[-1]["order"]
        names = [name for name, value in mine.items() if other.get(name) != value]
        own, theirs = (", ".join(f"{name}={each.get(name)!r}" for name in names) for each in (mine, other))
        return f"rank {self._rank} has {own}, rank {rank} has {theirs}. Give all ranks the same"


class Board:
    """What the ranks of a job show each other, by name.

    Args:
        show: Shows some content.
        read: Returns what a rank shows; None if it shows nothing yet.
    """

    def __init__(self, show: Callable[[str, bytes], None], read: Callable[[str], bytes | None]) -> None:
        self.show = show
        self.read = read


def _board(tier: Tier) -> Board | None:
    """Return the board of this job; None if there is none."""
    place = meeting_place()
    store = _store(place)
    if store is None:
        notes = tier.notes
        return None if notes is None else Board(partial(_note, notes, place.run), partial(_noted, notes, place.run))
    prefix = f"dataload attempt {place.attempt}"  # The store of an agent outlives an attempt.
    return Board(partial(_set, store, prefix), partial(_get, store, prefix))


def _store(place: MeetingPlace) -> Any:
    """Return the store of torchrun's agent, or that of the process group; None if there is neither."""
    has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    if place.store is None or not (place.held or has_group):
        return None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # Some builds of torch lack it.

    key = os.getpid(), *place.store
    if key not in _stores:
        _stores[key] = None
        patience = timedelta(seconds=STORE_SECONDS)
        _stores[key] = TCPStore(*place.store, is_master=False, timeout=patience, wait_for_workers=False)
    if _stores[key] is None:
        raise ConnectionError(f"the store at {place.store} could not be reached before")
    return _stores[key]


def _set(store: Any, prefix: str, name: str, content: bytes) -> None:
    store.set(f"{prefix} {name}", base64.b64encode(content).decode())


def _get(store: Any, prefix: str, name: str) -> bytes | None:
    key = f"{prefix} {name}"
    return base64.b64decode(store.get(key)) if store.check([key]) else None  # `get` waits for a key that is not there.


def _note(notes: Notes, run: str, name: str, content: bytes) -> None:
    notes.show(f"{run} {name}", content)


def _noted(notes: Notes, run: str, name: str) -> bytes | None:
    shown = notes.read(f"{run} {name}")
    return shown[0][1] if len(shown) == 1 else None  # Several jobs may have no name, and the same ranks.


def _place_in_program() -> str:
    """Return a digest of the calls of the program that make a loader. Count the loader."""
    calls = []
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        code = frame.f_code
        calls.append(f"{PurePath(code.co_filename).name} {code.co_name} {frame.f_lasti}")  # A line may have several.
        frame = frame.f_back
    place = hashlib.blake2b("\n".join(calls).encode(), digest_size=12).hexdigest()
    _made[place] += 1
    return place
