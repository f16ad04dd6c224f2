"""The weights and windows of a mixture in its state, which stays small whatever the number of sources."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dataload.errors import ConfigError
from dataload.samplers.keys import derive_key

NAMES = ("weights", "next_weights", "windows")  # The last ones become digests first.
MOST_CHARACTERS = 3400  # of all lists as JSON: a state has at most 4 KB


def compact(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state in which digests replace the lists that would make it too long."""
    left, short = MOST_CHARACTERS, dict(state)
    for name in NAMES:
        if state.get(name) is not None:
            size = len(json.dumps(state[name]))
            if size <= left:
                left -= size
            else:
                short[name] = digest(state[name])
    return short


def expand(state: Mapping[str, Any], windows: Sequence[int], weights: Iterable[Sequence[int]]) -> dict[str, Any]:
    """Return the state with the lists of its digests.

    Args:
        state: A state from `compact`.
        windows: The windows of this process.
        weights: The weights that this process has and had.

    Raises:
        ConfigError: No known list has the digest.
    """
    whole, known = dict(state), [list(numbers) for numbers in weights]
    for name in NAMES:
        if isinstance(stored := state.get(name), str):
            candidates = [list(windows)] if name == "windows" else known
            found = next((numbers for numbers in candidates if digest(numbers) == stored), None)
            if found is None:
                raise ConfigError(
                    f"the state has only a digest of its {name}, because of the number of sources, and these differ: "
                    "make the mixture and the loader with those of the run that saved it"
                )
            whole[name] = found
    return whole


def digest(numbers: Sequence[int]) -> str:
    """Return a short name of these numbers."""
    return f"{derive_key('numbers', *numbers):016x}"
