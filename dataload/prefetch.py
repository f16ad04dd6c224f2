"""Work done ahead of its use: batches on a thread, row groups in the order in which they will be needed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
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

    order: row groups in the order of their first need; ask: starts the fetching of some; ahead: how many beyond the
    last that batches have touched.
    """

    def __init__(self, order: Iterator[int], ask: Callable[[list[int]], Any], ahead: int) -> None:
        self._order = order
        self._ask = ask
        self._ahead = ahead
        self._places: dict[int, int] = {}  # in the order, of the row groups taken from it so far
        self._reach = 0

    def touch(self, groups: Sequence[int]) -> None:
        """A batch has been made from these row groups. A rank may never touch some that its node needs."""
        coming = self._take(lambda: all(group in self._places for group in groups))
        self._reach = max(self._reach, *(self._places.get(group, -1) + 1 for group in groups))
        coming += self._take(lambda: len(self._places) >= self._reach + self._ahead)
        self._ask(coming)

    def _take(self, enough: Callable[[], bool]) -> list[int]:
        taken = []
        while not enough() and (group := next(self._order, None)) is not None:
            self._places[group] = len(self._places)
            taken.append(group)
        return taken
