"""Repeated requests after transient errors: exponential backoff with full jitter."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from random import SystemRandom
from typing import TypeVar

from dataload.cache.origin.errors import is_transient

RETRY_SECONDS = 60.0  # The last attempt begins after this time: an outage of the store may last as long.
# The same until the store has answered for the first time: its address may be wrong.
FIRST_CONTACT_SECONDS = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0  # seconds

T = TypeVar("T")

_random = SystemRandom()  # It draws nothing from the generators of the user, and differs in forked children.


def retried(
    request: Callable[[], T],
    seconds: Callable[[Exception], float],
    retry: Callable[[Exception], None],
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Make a request, and repeat it after transient errors.

    Args:
        request: Makes the request once.
        seconds: Returns for how long after the first attempt to retry a transient error.
        retry: Called with the error before each retry.
        sleep: Waits for a number of seconds.
        clock: Monotonic time in seconds.
    """
    began = clock()
    for attempt in itertools.count():
        try:
            return request()
        except Exception as error:
            left = began + seconds(error) - clock() if is_transient(error) else 0
            if left <= 0:
                raise
            retry(error)
        sleep(min(left, _random.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt))))
    raise AssertionError("unreachable")
