"""The behaviour of the origin server: latency, bandwidth and faults."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from dataload.errors import ConfigError

Fault = Literal["slow_down", "reset", "short", "stalled", "replaced", "delayed"]
FAULTS: tuple[Fault, ...] = ("slow_down", "reset", "short", "stalled", "replaced", "delayed")
BANDWIDTHS = ("bytes_per_second", "host_bytes_per_second")


def setting(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class Behaviour:
    """Latency, bandwidth and fault rates of a server. A GET of an object has at most one fault.

    Raises:
        ConfigError: A value is out of range, or the fault rates add up to more than 1.
    """

    latency: float = setting(0.0, "seconds between a request and the first byte of its answer")
    bytes_per_second: float | None = setting(None, "bandwidth of a connection for object bodies, in bytes per second")
    host_bytes_per_second: float | None = setting(None, "bandwidth of all connections together, in bytes per second")
    slow_down: float = setting(0.0, "probability (0 to 1) that a GET is answered with 503 SlowDown")
    reset: float = setting(0.0, "probability (0 to 1) that the connection is reset in the middle of a body")
    short: float = setting(0.0, "probability (0 to 1) that the connection is closed in the middle of a body")
    stalled: float = setting(0.0, "probability (0 to 1) that a body pauses in its middle for --stall seconds")
    replaced: float = setting(0.0, "probability (0 to 1) that the object is replaced on disk during a GET")
    delayed: float = setting(0.0, "probability (0 to 1) that an answer begins --delay seconds later")
    stall: float = setting(3600.0, "seconds that a stalled body pauses")
    delay: float = setting(1.0, "seconds that a delayed answer waits beyond the latency")
    seed: int = setting(0, "seed of the faults")

    def __post_init__(self) -> None:
        for attribute in fields(self):
            name, value = attribute.name, getattr(self, attribute.name)
            numeric = isinstance(value, int if name == "seed" else (int, float)) and not isinstance(value, bool)
            if not numeric and not (name in BANDWIDTHS and value is None):
                raise ConfigError(f"{name} must be a number, not {value!r}")
        for name in BANDWIDTHS:
            rate = getattr(self, name)
            if rate is not None and not 0 < rate < math.inf:
                raise ConfigError(f"{name} must be above 0, or None for no limit, not {rate}")
        for name in ("latency", "stall", "delay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be 0 or more seconds, not {getattr(self, name)}")
        rates = [getattr(self, name) for name in FAULTS]
        if not (all(0 <= rate <= 1 for rate in rates) and math.fsum(rates) <= 1):
            raise ConfigError(f"{', '.join(FAULTS)} must be from 0 to 1 and add up to at most 1, not {rates}")


# S3 as one host sees it: 30 ms, 90 MB/s a connection, 10 Gbit/s a host, and one request of 1,000 delayed by a second.
S3 = Behaviour(latency=0.03, bytes_per_second=90e6, host_bytes_per_second=1.25e9, delayed=0.001)


class Faults:
    """The sequence of faults for GETs of objects. The seed determines it."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._rates = [getattr(behaviour, name) for name in FAULTS]
        self._random = random.Random(behaviour.seed)

    def draw(self) -> tuple[Fault | None, float]:
        """Draw the next fault, and the share of the body after which it strikes."""
        drawn, part = self._random.random(), self._random.random()
        for index, name in enumerate(FAULTS):
            if drawn < math.fsum(self._rates[: index + 1]):
                return name, part
        return None, part
