"""Who is told of a fork, and when."""

from __future__ import annotations

import os
import threading
import weakref

from dataload.runtime.forks import ForkAware


class Told(ForkAware):
    def __init__(self) -> None:
        self.heard: list[str] = []
        super().__init__()

    def before_fork(self) -> None:
        self.heard.append("before")

    def after_fork_in_parent(self) -> None:
        self.heard.append("parent")

    def after_fork_in_child(self) -> None:
        self.heard.append("child")


class Late(Told):
    """Brings somebody new while a fork is under way."""

    def before_fork(self) -> None:
        super().before_fork()
        self.new = Told()


def test_only_who_was_told_before_a_fork_is_told_after_it() -> None:
    late = Late()
    child = os.fork()
    if child == 0:
        os._exit(int((late.heard, late.new.heard) != (["before", "child"], [])))
    assert os.waitpid(child, 0)[1] == 0
    assert (late.heard, late.new.heard) == (["before", "parent"], [])


def test_a_child_keeps_nobody_and_nobody_out() -> None:
    told = Told()
    child = os.fork()
    if child == 0:
        kept = weakref.ref(told)
        del told
        thread = threading.Thread(target=Told, daemon=True)
        thread.start()
        thread.join(20)
        os._exit(int(thread.is_alive() or kept() is not None))
    assert os.waitpid(child, 0)[1] == 0
