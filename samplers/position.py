"""A place in the epochs of a dataset: what samplers move, loaders hand out and checkpoints hold."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from dataload.arguments import whole_number
from dataload.errors import ConfigError
from dataload.samplers.keys import derive_key

STATE_VERSION: Final = 1
PLACE: Final = ("version", "dataset", "epoch", "cursor")

# The options of a mixture that have numbers for each source, in words. In a state, the last become digests first.
LISTS: Final = {"weights": "weights", "next_weights": "weights of the next epoch", "windows": "windows"}
CHOICE: Final = 'choose on_change="continue" or "next_epoch"'  # of a loader's load_state_dict, and of fit
EARLIER: Final = "earlier"  # an option: the data that an epoch had before, a dict for each, the first one first
TABLES: Final = "tables"  # an option: the versions of the tables that the data is of
MOST_CHARACTERS: Final = 3400  # of all lists as JSON: a state has at most 4 KB


class Position(NamedTuple):
    """A place in an epoch, and the order of the epoch. Its JSON is the state of samplers and loaders.

    Any rank of any world can continue at a position, because it counts the rows of all ranks together.

    Attributes:
        dataset: Digest of the data.
        epoch: Number of the epoch.
        cursor: Rows of the epoch that are consumed.
        options: The options of the order, as JSON-able values.
    """

    dataset: str
    epoch: int
    cursor: int
    options: Mapping[str, Any]

    def at(self, cursor: int) -> Position:
        """Return another position in the same epoch."""
        return Position(self.dataset, self.epoch, cursor, self.options)

    def with_options(self, **options: Any) -> Position:
        """Return the same place with some other options."""
        return self._replace(options={**self.options, **options})

    def state_dict(self) -> dict[str, Any]:
        """Return the position as a JSON-able dict of at most 4 KB. Digests replace lists that are too long for it."""
        options = dict(self.options)
        left = MOST_CHARACTERS - sum(len(json.dumps(options[name])) for name in (EARLIER, TABLES) if name in options)
        for name in LISTS:
            if options.get(name) is not None:
                size = len(json.dumps(options[name]))
                if size <= left:
                    left -= size
                else:
                    options[name] = digest(options[name])
        place = {"version": STATE_VERSION, "dataset": self.dataset, "epoch": self.epoch, "cursor": self.cursor}
        return {**place, **options}

    @classmethod
    def from_state(cls, state: Any) -> Position:
        """Return the position of a state, which may come from anywhere.

        Raises:
            ConfigError: `state` is no state of this release.
        """
        if (version := state.get("version") if isinstance(state, Mapping) else None) != STATE_VERSION:
            raise ConfigError(
                f"the state has version {version!r}; this release reads {STATE_VERSION}: give a state_dict() of it"
            )
        require(PLACE, state)
        if not isinstance(state["dataset"], str):
            raise ConfigError(f"the state has dataset={state['dataset']!r}: give all that state_dict() returned")
        epoch, cursor = (whole_number(name, state[name]) for name in ("epoch", "cursor"))
        for name in LISTS:
            if not isinstance(state.get(name), list | tuple | str | None):
                raise ConfigError(f"the state has {name}={state[name]!r}: give all that state_dict() returned")
        options = {name: value for name, value in state.items() if name not in PLACE}
        return cls(state["dataset"], epoch, cursor, options)

    def restored(self, here: Position, known: Mapping[str, Iterable[Sequence[Any]]], differences: str) -> Position:
        """Return this position with the options that `here` has, and lists in place of their digests.

        Args:
            here: A position of the sampler that continues.
            known: The lists that a digest may stand for, by the name of the option.
            differences: How two datasets may differ, for the error.

        Raises:
            ConfigError: This is a position of another dataset, or it lacks an option, or no known list has a digest.
        """
        if self.dataset != here.dataset:
            raise ConfigError(
                f"the state is of another dataset ({self.dataset!r}, this is {here.dataset!r}): {differences}. Use "
                f"those of the state, or {CHOICE}, or begin an epoch with set_epoch instead of load_state_dict"
            )
        names = here.options.keys() - {EARLIER}
        require(names, self.options)
        options = listed({name: self.options[name] for name in here.options if name in names}, known)
        if self.options.get(EARLIER):
            options[EARLIER] = self.options[EARLIER]
        return self._replace(options=options)


def listed(options: Mapping[str, Any], known: Mapping[str, Iterable[Sequence[Any]]]) -> dict[str, Any]:
    """Return the options of a state with lists in place of their digests. known: as for `Position.restored`.

    Raises:
        ConfigError: No known list has a digest.
    """
    found = dict(options)
    for name in LISTS:
        if isinstance(stored := found.get(name), str):
            found[name] = next((list(each) for each in known.get(name, ()) if digest(each) == stored), None)
            if found[name] is None:
                raise ConfigError(
                    f"the state has only a digest of its {LISTS[name]}, which are too long for it, and those here are "
                    "others: give mix and make_loader the weights, schedule and window of the run that saved it"
                )
    return found


def require(names: Iterable[str], state: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a state has all of these."""
    if missing := set(names) - state.keys():
        raise ConfigError(f"the state lacks {', '.join(sorted(missing))}: give all that state_dict() returned")


def digest(numbers: Sequence[Any]) -> str:
    """Return a short name of these numbers, or of lists of them."""
    parts = numbers if all(isinstance(number, int) for number in numbers) else [json.dumps(numbers)]
    return f"{derive_key('numbers', *parts):016x}"
