"""Tests of the fork hooks: which objects are notified, and when."""

from __future__ import annotations

import os
import threading
import weakref

from dataload.runtime.forks import ForkAware


class Notified(ForkAware):
    def __init__(self) -> None:
        self.events: list[str] = []
        super().__init__()

    def before_fork(self) -> None:
        self.events.append("before")

    def after_fork_in_parent(self) -> None:
        self.events.append("parent")

    def after_fork_in_child(self) -> None:
        self.events.append("child")


class Late(Notified):
    """Registers another object during a fork."""

    def before_fork(self) -> None:
        super().before_fork()
        self.new = Notified()


def test_only_objects_notified_before_a_fork_are_notified_after_it() -> None:
    late = Late()
    child = os.fork()
    if child == 0:
        os._exit(int((late.events, late.new.events) != (["before", "child"], [])))
    assert os.waitpid(child, 0)[1] == 0
    assert (late.events, late.new.events) == (["before", "parent"], [])


def test_a_child_neither_leaks_objects_nor_blocks_new_ones() -> None:
    notified = Notified()
    child = os.fork()
    if child == 0:
        kept = weakref.ref(notified)
        del notified
        thread = threading.Thread(target=Notified, daemon=True)
        thread.start()
        thread.join(20)
        os._exit(int(thread.is_alive() or kept() is not None))
    assert os.waitpid(child, 0)[1] == 0
