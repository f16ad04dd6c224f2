"""How the origin server behaves: how late, how fast, and how often it fails."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from dataload.errors import ConfigError

Fault = Literal["slow_down", "reset", "short", "stalled", "replaced"]
FAULTS: tuple[Fault, ...] = ("slow_down", "reset", "short", "stalled", "replaced")


def setting(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class Behaviour:
    """How a server answers. Each GET of an object suffers at most one fault, so their odds add up to at most 1.

    Raises ConfigError when a value makes no sense.
    """

    latency: float = setting(0.0, "seconds between a request and the first byte of its answer")
    bytes_per_second: float | None = setting(None, "bytes per second that a connection carries of objects' bodies")
    slow_down: float = setting(0.0, "odds (0 to 1) that a GET is answered 503 SlowDown")
    reset: float = setting(0.0, "odds (0 to 1) that the connection is reset in the middle of a body")
    short: float = setting(0.0, "odds (0 to 1) that a body ends early, by a connection that is closed in good order")
    stalled: float = setting(0.0, "odds (0 to 1) that a body stops in its middle for --stall seconds")
    replaced: float = setting(0.0, "odds (0 to 1) that the object is replaced on disk while its old version is sent")
    stall: float = setting(3600.0, "seconds that a stalled body stops before it goes on")
    seed: int = setting(0, "seed of the faults")

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            numeric = isinstance(value, int if each.name == "seed" else (int, float)) and not isinstance(value, bool)
            if not numeric and (each.name, value) != ("bytes_per_second", None):
                raise ConfigError(f"{each.name} must be a number, not {value!r}")
        if self.bytes_per_second is not None and not 0 < self.bytes_per_second < math.inf:
            raise ConfigError(f"bytes_per_second must be above 0, or None for no limit, not {self.bytes_per_second}")
        for name in ("latency", "stall"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be 0 or more seconds, not {getattr(self, name)}")
        odds = [getattr(self, name) for name in FAULTS]
        if not (all(0 <= each <= 1 for each in odds) and math.fsum(odds) <= 1):
            raise ConfigError(
                f"the odds of {', '.join(FAULTS)} must be from 0 to 1 and add up to at most 1, not {odds}"
            )


class Faults:
    """Draws what happens to each GET of an object, in their order: one seed gives one sequence."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._odds = [getattr(behaviour, name) for name in FAULTS]
        self._random = random.Random(behaviour.seed)

    def draw(self) -> tuple[Fault | None, float]:
        """(the fault, the part of the body after which it strikes)."""
        drawn, part = self._random.random(), self._random.random()
        for index, name in enumerate(FAULTS):
            if drawn < math.fsum(self._odds[: index + 1]):
                return name, part
        return None, part
