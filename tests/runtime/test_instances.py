"""Tests of objects that all their users in one process share, and of what these users ask for."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from dataload.runtime.forks import ForkAware
from dataload.runtime.instances import Instances, Largest


class Thing:
    """An object that can be referred to weakly."""


def exit_code_of_fork(work) -> int:
    child = os.fork()
    if child == 0:
        os._exit(int(work()))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_two_threads_that_make_an_object_get_the_same_one() -> None:
    shared: Instances[str, Thing] = Instances(inherited=True)
    both = threading.Barrier(2, timeout=200)

    def make() -> Thing:
        both.wait()
        return Thing()

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: shared.get("key", make), range(2))
    assert first is second


def test_an_object_ends_with_its_last_user() -> None:
    shared: Instances[str, Thing] = Instances(inherited=True)
    thing = shared.get("key", Thing)
    assert shared.get("key", Thing) is thing
    assert shared.get("other", Thing) is not thing
    ended = weakref.ref(thing)
    del thing
    gc.collect()
    assert ended() is None


@pytest.mark.parametrize("inherited", [True, False])
def test_a_child_goes_on_with_the_objects_of_its_parent_or_begins_with_none(inherited: bool) -> None:
    shared: Instances[str, Thing] = Instances(inherited=inherited)
    thing = shared.get("key", Thing)
    assert exit_code_of_fork(lambda: (shared.get("key", Thing) is thing) != inherited) == 0
    assert shared.get("key", Thing) is thing


def test_a_process_may_fork_while_another_thread_makes_an_object() -> None:
    """`make` registers objects for forks, so it may wait for the fork that goes on."""
    shared: Instances[str, Thing] = Instances(inherited=True)
    codes: list[int] = []

    def make() -> Thing:
        fork = threading.Thread(target=lambda: codes.append(exit_code_of_fork(lambda: 0)), daemon=True)
        fork.start()
        fork.join(200)
        return Thing()

    shared.get("key", make)
    assert codes == [0]


class User(ForkAware):
    """Asks for the shared object again in a forked child, as readers do for their thread pools."""

    def __init__(self, shared: Instances[str, Thing]) -> None:
        self.shared = shared
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self.thing = self.shared.get("key", Thing)


def test_the_hooks_of_other_objects_get_those_of_the_child_whatever_their_order() -> None:
    shared: Instances[str, Thing] = Instances(inherited=False)
    users = [User(shared) for _ in range(20)]
    others = {id(user.thing) for user in users}
    assert len(others) == 1
    parents = users[0].thing
    assert exit_code_of_fork(lambda: any(user.thing is parents for user in users)) == 0
    assert exit_code_of_fork(lambda: len({id(user.thing) for user in users}) != 1) == 0


def test_the_largest_numbers_of_all_users_apply_as_long_as_these_live() -> None:
    largest, first, second = Largest(), Thing(), Thing()
    assert largest.of(first, 3, 1) == (3, 1)
    assert largest.of(second, 2, 5) == (3, 5)
    assert largest.of(second, 2, 4) == (3, 4)
    del first
    gc.collect()
    assert largest.of(second, 2, 4) == (2, 4)


def test_users_of_other_threads_come_and_go_while_one_asks() -> None:
    """At each instruction, one comes and the last one goes."""
    largest, user, others = Largest(), Thing(), [Thing(), Thing()]
    for other in others:
        largest.of(other, 1)
    came = 0

    def meanwhile(frame: FrameType, event: str, _: object) -> Any:  # Python traces no calls that it makes.
        nonlocal came
        frame.f_trace_opcodes = True
        if event == "opcode":
            others.append(Thing())
            largest.of(others[-1], 2)
            del others[0]
            came += 1
        return meanwhile

    before = sys.gettrace()
    sys.settrace(meanwhile)
    try:
        found = largest.of(user, 3)
    finally:
        sys.settrace(before)
    assert found == (3,)
    assert came > 10
