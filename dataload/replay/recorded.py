"""The data of a loop as the ledger has it: the order of its rows and their places. No file is opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from dataload.catalog.inventory import Inventory
from dataload.catalog.inventory_store import from_bytes
from dataload.catalog.selection import Selection
from dataload.errors import ConfigError, DataloadError
from dataload.loader.changes import BY_ROWS, rest_of
from dataload.samplers.mixture.sampler import MixtureSampler
from dataload.samplers.mixture.source import MixtureSource
from dataload.samplers.mixture.weights import weights_of
from dataload.samplers.position import EARLIER, STATE_VERSION
from dataload.samplers.rank_sampler import RankSampler, Rest
from dataload.samplers.sharded import ShardedSampler
from dataload.telemetry.run_ledger import read_kept
from dataload.world import World

MOST_RANKS = 1 << 20


class Place(NamedTuple):
    """Where a row is.

    Attributes:
        source: The source of a mixture that has it; "" if this is none.
        url: The file.
        row_group: The row group in the file.
        row: The row in the row group: a sequence, if documents are packed.
    """

    source: str
    url: str
    row_group: int
    row: int


class Recorded:
    """The data of a loop.

    Args:
        record: The record of the loop.
        inventories: Which rows each source has; and if the epoch had other data before, which of them it still gets.

    Attributes:
        names: The sources; ("",) if this is no mixture.
        own: Which rows each source has.
        firsts: The number of the first row of each source, then that of all rows: int64 [S + 1].
    """

    def __init__(self, record: Mapping[str, Any], inventories: Sequence[Inventory]) -> None:
        recipe, urls = record["recipe"], record["urls"]
        self.names = tuple(recipe) if isinstance(recipe, Mapping) else ("",)
        self.own, left = inventories[: len(self.names)], inventories[len(self.names) :]
        if len(self.own) != len(self.names) or len(left) not in (0, len(self.names)) or len(urls) != len(self.names):
            raise ValueError(f"{len(inventories)} inventories of {len(self.names)} sources")
        self._left = [cast("Selection", each.selection) for each in left]
        self._urls, self._is_mixture = urls, isinstance(recipe, Mapping)
        self._ends = [np.cumsum(each.block_lengths) for each in self.own]
        self.firsts = np.cumsum([0, *(int(ends[-1]) for ends in self._ends)])

    @classmethod
    def of(cls, folder: Path, record: Mapping[str, Any]) -> Recorded | None:
        """Return the data of a loop; None: the ledger has too little about it.

        Args:
            folder: That of the ledger.
            record: The record of the loop.

        Raises:
            ConfigError: What is beside the ledger is damaged.
        """
        name = record.get("inventory")
        data = read_kept(folder, name) if isinstance(name, str) else None
        if data is None:
            return None
        with as_damage():
            return cls(record, from_bytes(data))

    def sampler(self, record: Mapping[str, Any]) -> RankSampler:
        """Return the sampler of the first rank at the start of a loop.

        Raises:
            ConfigError: The record is damaged, or of other data.
        """
        with as_damage():
            return self._sampler(record, world_of(record).world_size)

    def _sampler(self, record: Mapping[str, Any], ranks: int) -> RankSampler:
        given = record.get("next_order") or record["order"]  # which the loader had as arguments
        how = {name: given[name] for name in ("shuffle", "seed", "num_streams")}
        how |= {"batch_size": record["batch_size"], "drop_last": record["drop_last"], "num_nodes": record["nodes"]}
        sampler: RankSampler
        if self._is_mixture:
            sources = [
                MixtureSource(each.block_lengths, name, each.order_key.encode())
                for name, each in zip(self.names, self.own, strict=True)
            ]
            how |= {name: given[name] for name in ("stop", "num_rows", "batching", "windows")}
            sampler = MixtureSampler(sources, ranks, 0, weights=weights_of(given["weights"]), **how)
        else:
            [own] = self.own
            key = own.order_key.encode()
            sampler = ShardedSampler(own.block_lengths, ranks, 0, window=given["window"], dataset_key=key, **how)
        sampler.load_state_dict(state_of(record), self.rest(record))
        return sampler

    def rest(self, record: Mapping[str, Any]) -> Rest | None:
        """Return what makes the order of the rest of an epoch that had other data before; None: it had not."""
        earlier = record["order"].get(EARLIER)
        if not earlier:
            return None
        taken, by_rows = sum(each["rows"] for each in earlier), BY_ROWS in earlier[0]
        return partial(rest_of, left=self._left, taken=taken, by_rows=by_rows)

    def places(self, numbers: npt.NDArray[np.int64]) -> list[Place]:
        """Return where rows are, by their numbers: int64 [n]."""
        found = []
        for source, group, row in map(self._find, numbers.tolist()):
            path, _, _, number = self.own[source].keys[group]
            found.append(Place(self.names[source], f"{self._urls[source]}{path}", number, row))
        return found

    def number_in(self, other: Recorded, number: int) -> int | None:
        """Return the number that a row has in other data, which has its file, unchanged; None: that lacks it."""
        source, group, row = self._find(number)
        name, key = self.names[source], self.own[source].keys[group]
        if name not in other.names:
            return None
        there = other.names.index(name)
        own = other.own[there]
        if key not in own.keys:
            return None
        group = own.keys.index(key)
        before = int(other.firsts[there] + own.block_lengths[:group].sum())
        if own.selection is None:
            return before + row
        mask = own.selection.mask(group)
        return before + int(mask[:row].sum()) if mask[row] else None

    def _find(self, number: int) -> tuple[int, int, int]:
        """Return the source of a row, its row group among those of the source, and its number in that."""
        source = int(np.searchsorted(self.firsts, number, "right")) - 1
        selection, row = self.own[source].selection, number - int(self.firsts[source])
        group = int(np.searchsorted(self._ends[source], row, "right"))
        row -= int(self._ends[source][group - 1]) if group else 0
        return source, group, row if selection is None else int(np.flatnonzero(selection.mask(group))[row])


def state_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a loader at the start of a loop."""
    place = {"version": STATE_VERSION, "dataset": record["data"], "epoch": record["epoch"], "cursor": record["cursor"]}
    return {**place, **record["order"]}


def calls_of(recipe: Any) -> list[tuple[str, Any]]:
    """Return the calls of a recipe, of all sources: what they called, and what the ledger says of it.

    Raises:
        ConfigError: It is no recipe.
    """
    with as_damage():
        parts = recipe.values() if isinstance(recipe, Mapping) else [recipe]
        return [pair for calls in parts for call in calls for pair in call.items()]


def world_of(record: Mapping[str, Any]) -> World:
    """Return the world of the first rank of a loop. Raise ConfigError for one that there cannot be."""
    ranks, nodes = record["ranks"], record["nodes"]
    if not 0 < nodes <= ranks <= MOST_RANKS:
        raise ConfigError(f"the ledger has a loop of {ranks} ranks on {nodes} nodes, so it is damaged")
    return World(0, ranks, node_sizes=(ranks // nodes,) * nodes)


@contextmanager
def as_damage() -> Iterator[None]:
    """Raise ConfigError for the exceptions that a record causes that no loop has written."""
    try:
        yield
    except DataloadError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"the ledger is damaged, or another version of dataload wrote it: {type(error).__name__}: {error}"
        ) from error
