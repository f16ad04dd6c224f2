"""Repeated requests after transient errors: exponential backoff with full jitter."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from random import SystemRandom
from typing import TypeVar

from dataload.cache.origin.errors import is_transient

# The last attempt begins this long after the first failure: an outage of the store may last as long.
RETRY_SECONDS = 60.0
# The same until the store has answered for the first time, from the start of the request: its address may be wrong.
FIRST_CONTACT_SECONDS = 5.0
LEAST_ATTEMPTS = 3  # at a store that has answered, also if each takes long or waits for other requests
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0  # seconds

T = TypeVar("T")

# Whether the request under way is one that `retried` repeats. fsspec's event loop runs it in the context of the caller.
is_repeated: ContextVar[bool] = ContextVar("is_repeated", default=False)

_wanted = threading.Event()  # is never set

# Set once nobody waits for the requests of this context any more, as after an error of another one: no more retries.
abandoned: ContextVar[threading.Event] = ContextVar("abandoned", default=_wanted)

_random = SystemRandom()  # It draws nothing from the generators of the user, and differs in forked children.


def retried(
    request: Callable[[], T],
    seconds: Callable[[Exception], float],
    on_retry: Callable[[Exception], None],
    sleep: Callable[[float], object] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Make a request, and repeat it after transient errors.

    Args:
        request: Makes the request once.
        seconds: Returns for how long to retry a transient error: after the first failure, or from the start until the
            store has answered.
        on_retry: Called with the error before each retry.
        sleep: Waits for a number of seconds; None: or until the request is `abandoned`.
        clock: Monotonic time in seconds.
    """
    began, failed_at = clock(), None
    for attempt in itertools.count():
        token = is_repeated.set(True)
        try:
            return request()
        except Exception as error:
            if not is_transient(error):
                raise
            failed_at = clock() if failed_at is None else failed_at
            allowed = seconds(error)
            is_first_contact = allowed <= FIRST_CONTACT_SECONDS
            left = (began if is_first_contact else failed_at) + allowed - clock()
            too_few = attempt + 1 < LEAST_ATTEMPTS and not is_first_contact
            if (left <= 0 and not too_few) or abandoned.get().is_set():
                raise
            on_retry(error)
        finally:
            is_repeated.reset(token)
        pause = _random.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt))
        (sleep or abandoned.get().wait)(pause if left <= 0 else min(left, pause))
    raise AssertionError("unreachable")
