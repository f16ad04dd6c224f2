"""Work done ahead of its use: batches on a thread, row groups in the order in which they will be needed."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def run_ahead(items: Iterable[T], depth: int) -> Generator[T, None, None]:
    """The items, made on a thread of their own, at most `depth` ahead of their use.

    What making an item raises is raised here, in its place. Closing the generator stops the thread and waits for it.
    """
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue()
    room = threading.Semaphore(depth)
    stopped = threading.Event()

    def make() -> None:
        iterator = iter(items)
        try:
            while room.acquire() and not stopped.is_set():
                ready.put((next(iterator), None))
        except BaseException as error:  # noqa: BLE001 (raised again where the item is awaited)
            ready.put((None, error))

    thread = threading.Thread(target=make, name="dataload-ahead", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            room.release()
            yield item  # type: ignore[misc]
    finally:
        stopped.set()
        room.release()
        thread.join()


class Lookahead:
    """Asks for row groups before the batches that need them are made.

    needs: (position in the epoch, row group), in the order of their first need; ask: starts the loading of some;
    ahead: how many are asked for that no batch has needed yet.
    """

    def __init__(self, needs: Iterator[tuple[int, int]], ask: Callable[[list[int]], Any], ahead: int) -> None:
        self._needs = needs
        self._ask = ask
        self._ahead = ahead
        self._waiting: deque[int] = deque()  # positions that need what was asked for

    def reach(self, position: int) -> None:
        """Batches are made of all positions before this one."""
        while self._waiting and self._waiting[0] < position:
            self._waiting.popleft()
        coming = []
        while len(self._waiting) < self._ahead and (need := next(self._needs, None)) is not None:
            coming.append(need[1])
            if need[0] >= position:
                self._waiting.append(need[0])
        self._ask(coming)
