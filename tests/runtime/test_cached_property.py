"""Tests of the cached property, in threads and forks."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path

from dataload.runtime.cached_property import cached_property


class Holder:
    computed = 0

    @cached_property
    def value(self) -> int:
        """Some number."""
        self.computed += 1
        return 7


def test_it_is_computed_once_and_kept_in_the_instance() -> None:
    holder = Holder()
    assert [holder.value, holder.value] == [7, 7]
    assert holder.computed == 1
    assert vars(holder)["value"] == 7
    del holder.value
    assert (holder.value, holder.computed) == (7, 2)
    assert Holder.value.__doc__ == "Some number."


def test_a_child_forked_while_another_thread_computes_it_is_not_held_up() -> None:
    """A loader forks its workers while another thread makes a batch."""
    computing, goes_on = threading.Event(), threading.Event()

    class Slow:
        @cached_property
        def value(self) -> int:
            if threading.current_thread() is not threading.main_thread():
                computing.set()
                assert goes_on.wait(200)
            return 7

    thread = threading.Thread(target=lambda: Slow().value)
    thread.start()
    assert computing.wait(200)
    child = os.fork()
    if not child:
        os._exit(Slow().value)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    goes_on.set()
    thread.join(200)


class Reads:
    """An attribute that reads a cached value when it is pickled, as another thread may at that moment."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder

    def __reduce__(self) -> tuple[type, tuple[()]]:
        assert self.holder.value == 7
        return object, ()


def test_a_value_may_be_added_while_the_instance_is_pickled() -> None:
    holder = Holder()
    vars(holder).update(first=Reads(holder), second=2)
    copy = pickle.loads(pickle.dumps(holder))
    assert (copy.second, copy.value, holder.value) == (2, 7, 7)


def test_no_lock_of_functools_is_left() -> None:
    package = Path(__file__).parent.parent.parent
    for folder in ("dataload", "cache", "samplers"):
        for path in (package / folder).rglob("*.py"):
            assert "from functools import cached_property" not in path.read_text(), path
