"""Repeated requests after transient errors: exponential backoff with full jitter."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from random import SystemRandom
from typing import TypeVar

from dataload.cache.origin.errors import is_transient
from dataload.runtime.redact import redacted

ATTEMPTS = 6
ATTEMPTS_SECONDS = 60.0  # after this time there is no further attempt
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0  # seconds

T = TypeVar("T")

log = logging.getLogger(__name__)

_random = SystemRandom()  # It draws nothing from the generators of the user, and differs in forked children.


def retried(
    request: Callable[[], T],
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Make a request, and repeat it after transient errors.

    Args:
        request: Makes the request once.
        sleep: Waits for a number of seconds.
        clock: Monotonic time in seconds.
    """
    deadline = clock() + ATTEMPTS_SECONDS
    attempt = 0
    while True:
        attempt += 1
        try:
            return request()
        except Exception as error:
            if not is_transient(error) or attempt >= ATTEMPTS or clock() >= deadline:
                raise
            log.debug("attempt %d failed, trying again: %s", attempt, redacted(error))
        sleep(_random.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (attempt - 1))))
