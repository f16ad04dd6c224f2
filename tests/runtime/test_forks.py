"""Tests of the fork hooks: which objects are notified, and when."""

from __future__ import annotations

import os
import threading
import weakref

import pytest

from dataload.runtime.forks import ForkAware, KeptByChildren


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
        thread.join(200)
        os._exit(int(thread.is_alive() or kept() is not None))
    assert os.waitpid(child, 0)[1] == 0


def test_a_child_keeps_the_objects_whose_end_would_change_its_parent() -> None:
    kept = KeptByChildren()
    added = kept.add(threading.Event())
    alive = weakref.ref(added)
    child = os.fork()
    if child == 0:
        del added
        os._exit(alive() is None)
    assert os.waitpid(child, 0)[1] == 0
    del added
    assert alive() is None


class Interrupted(Notified):
    """Ctrl-C arrives before a fork."""

    def before_fork(self) -> None:
        super().before_fork()
        if len(self.events) == 1:  # only once: pytest may keep it alive
            raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exception_before_a_fork_leaves_out_no_object() -> None:
    """Python forks all the same. Hooks are called in pairs."""
    members = [*(Notified() for _ in range(20)), Interrupted(), *(Notified() for _ in range(20))]
    child = os.fork()
    if child == 0:
        os._exit(any(member.events != ["before", "child"] for member in members))
    assert os.waitpid(child, 0)[1] == 0
    assert all(member.events == ["before", "parent"] for member in members)


class Unbalanced(Notified):
    """Releases a lock that it did not acquire."""

    def after_fork_in_parent(self) -> None:
        if len(self.events) == 1:
            raise RuntimeError


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exception_after_a_fork_keeps_no_other_object_waiting() -> None:
    members = [*(Notified() for _ in range(20)), Unbalanced(), *(Notified() for _ in range(20))]
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [len(member.events) for member in members] == [*[2] * 20, 1, *[2] * 20]
    thread = threading.Thread(target=Notified, daemon=True)
    thread.start()
    thread.join(200)
    assert not thread.is_alive()
