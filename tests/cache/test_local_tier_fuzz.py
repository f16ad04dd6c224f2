"""The local tier under random sequences of operations by two processes, one of which is killed."""

from __future__ import annotations

import inspect
import random
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import tiers
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from nightly import NIGHTLY
from tiers import FORKSERVER, LIMIT, data_of, key, look, put

from dataload.cache import blob_file
from dataload.cache.local import fsck
from dataload.cache.local.tier import LocalTier

SETTINGS = settings(
    max_examples=200 if NIGHTLY else 6,
    stateful_step_count=50 if NIGHTLY else 30,
    phases=[Phase.generate, Phase.shrink] if NIGHTLY else [Phase.generate],
    suppress_health_check=list(HealthCheck),
)
SPANS = "span" in inspect.signature(LocalTier.get).parameters

NAMES = [f"{folder}/{number}" for folder in "xy" for number in range(6)]
names = st.sampled_from(NAMES)
fractions = st.floats(0, 1)


# Operations of both processes


def look_into(tier: LocalTier, name: str, low: float, high: float) -> bool:
    """Read a span of a blob, if the blob is cached and the tier reads spans."""
    if not SPANS:
        return look(tier, name)
    start, stop = (int(bound * len(data_of(name))) for bound in sorted((low, high)))
    found = tier.get(key(name), (start, stop))
    assert found is None or found == data_of(name)[start:stop], f"{name}: wrong bytes in {start}-{stop}"
    return found is not None


def evict_folder(tier: LocalTier, folder: str) -> None:
    fsck.evict(tier.folder, path=f"bucket/{folder}")
    assert not any(tiers.name_of(row.name).startswith(f"{folder}/") for row in tier.folder.index.rows())


def evict_to(tier: LocalTier, fraction: float) -> None:
    fsck.evict(tier.folder, keep_bytes=int(fraction * LIMIT))
    assert tier.folder.index.used_bytes() <= fraction * LIMIT


def repair(tier: LocalTier) -> None:
    fsck.verify(tier.folder, repair=True)
    assert fsck.verify(tier.folder).problems == []


OPERATIONS = st.one_of(
    st.tuples(st.just(put), names),
    st.tuples(st.just(put), names),
    st.tuples(st.just(put), st.just("huge")),
    st.tuples(st.just(look), names),
    st.tuples(st.just(look_into), names, fractions, fractions),
    st.tuples(st.just(tiers.put_half), names),
    st.tuples(st.just(evict_folder), st.sampled_from("xy")),
    st.tuples(st.just(evict_to), st.sampled_from([0, 0.3, 0.7])),
    st.tuples(st.just(repair)),
)


# The second process


def serve(path: Path, policy: str, commands: Connection) -> None:
    """Execute commands until one ends at the step that kills the process."""
    tier = LocalTier(path, LIMIT, policy)
    commands.send("open" if tier.folder else "")
    while True:
        (operation, *arguments), die_at = commands.recv()
        if die_at:
            tiers.die_at(die_at)
        operation(tier, *arguments)
        commands.send("done")


class Helper:
    """A process with the same cache open that executes commands."""

    def __init__(self, path: Path, policy: str) -> None:
        self._commands, theirs = FORKSERVER.Pipe()
        with theirs:
            self._process = tiers.start(serve, path, policy, theirs)
        assert self.answers()

    def tell(self, operation: tuple[Any, ...], die_at: int = 0) -> bool:
        """Send a command, with an optional step to die at. Return whether the process is alive afterwards."""
        self._commands.send((operation, die_at))
        return self.answers()

    def answers(self) -> bool:
        try:
            assert self._commands.poll(tiers.PATIENCE), "the helper hangs"
            return bool(self._commands.recv())
        except (EOFError, ConnectionResetError):
            return False

    def end(self) -> int:
        self._process.kill()
        self._commands.close()
        return tiers.end(self._process)


# The machine


class Machine(RuleBasedStateMachine):
    """Two processes, one at a time. The model: a blob has its correct bytes, or is missing.

    Damage by the test may be found until a process repairs it. Nothing else may ever be wrong.
    """

    done: dict[str, int]

    def __init__(self, policy: str) -> None:
        super().__init__()
        self._root = TemporaryDirectory(prefix="tier")
        self._path = Path(self._root.name) / "c"
        self._policy = policy
        self._damaged: dict[bytes, tuple[int, ...] | None] = {}
        self._views: list[tuple[str, memoryview]] = []
        self._helper: Helper | None = None
        self._open()

    def teardown(self) -> None:
        if self._helper is not None:
            assert self._helper.end() == -signal.SIGKILL
        self._views.clear()
        del self._tier
        self._root.cleanup()

    @rule(operation=OPERATIONS)
    def do(self, operation: tuple[Any, ...]) -> None:
        operation[0](self._tier, *operation[1:])

    @rule(operation=OPERATIONS)
    def have_it_done(self, operation: tuple[Any, ...]) -> None:
        assert self._second().tell(operation), f"the helper failed in {operation}"

    @rule(operation=OPERATIONS, step=st.integers(1, 12), reopen=st.booleans())
    def have_it_killed(self, operation: tuple[Any, ...], step: int, reopen: bool) -> None:
        """Kill the helper at a step or soon after it. The next process that opens the cache cleans up."""
        self._second().tell(operation, step)
        assert self._second().end() == -signal.SIGKILL
        self._helper = None
        self._settle()
        self._open() if reopen else self._second()

    @rule()
    def reopen(self) -> None:
        self._open()

    @rule(name=names)
    def fill_with_room(self, name: str) -> None:
        """A filled blob is cached, unless it does not fit or damage has been detected."""
        room = LIMIT - self._tier.folder.index.used_bytes()
        put(self._tier, name)
        if room >= len(data_of(name)) + tiers.ROOM and not self._hurt:
            assert look(self._tier, name), f"{name} fits but was not cached"

    @rule(name=names)
    def hold_a_view(self, name: str) -> None:
        view = self._tier.get(key(name))
        if view is not None:
            self._views = [*self._views[-5:], (name, view)]

    @rule(kind=st.sampled_from(["flip", "cut", "delete"]), seed=st.integers(0, 1 << 16))
    def damage(self, kind: str, seed: int) -> None:
        """Replace a blob by a damaged copy, or delete it. Each blob once: a second flip would undo the first."""
        files = sorted(each for each in tiers.files_of(self._path).items() if each[0] not in self._damaged)
        if not files:
            return
        chance = random.Random(seed)
        digest, file = chance.choice(files)
        body = bytearray(file.read_bytes())
        file.unlink()
        self._hurt = True
        self._damaged[digest] = None
        if kind != "delete":
            footer = chance.random() < 0.5  # The footer has few bytes, but each of them matters.
            place = chance.randrange(max(0, len(body) - 100) if footer else 0, len(body))
            body[place] ^= 1 << chance.randrange(8)
            file.write_bytes(body if kind == "flip" else body[:place])
            self._damaged[digest] = identity(file)

    @rule()
    def verify(self) -> None:
        """Verification finds exactly the damage by the test."""
        problems = fsck.verify(self._tier.folder).problems
        rows = {row.digest: row.name for row in self._tier.folder.index.rows()}
        assert len(problems) == len(self._damaged)
        assert all(any(rows[digest] in problem for problem in problems) for digest in self._damaged)

    @invariant()
    def accounts_are_right(self) -> None:
        """With no operation under way, the used bytes equal the sums of rows and files, within the limit."""
        self._settle()
        index, files = self._tier.folder.index, tiers.files_of(self._path)
        rows = {row.digest: row.size for row in index.rows()}
        assert sum(rows.values()) == index.used_bytes() <= LIMIT
        assert {
            digest: blob_file.allocated(file.stat().st_size)
            for digest, file in files.items()
            if digest not in self._damaged
        } == {digest: size for digest, size in rows.items() if digest not in self._damaged}
        assert tiers.drafts_in(self._path) == []

    @invariant()
    def views_stay_right(self) -> None:
        assert all(view == data_of(name) for name, view in self._views)

    def _open(self) -> None:
        self._tier: Any = None
        self._tier = LocalTier(self._path, LIMIT, self._policy)
        assert self._tier.folder
        self._hurt = bool(self._damaged)

    def _second(self) -> Helper:
        if self._helper is None:
            self._helper = Helper(self._path, self._policy)
        return self._helper

    def _settle(self) -> None:
        """Forget damage that a process has repaired: the file was replaced, or the row was dropped."""
        files = tiers.files_of(self._path)
        rows = {row.digest for row in self._tier.folder.index.rows()}
        self._damaged = {
            digest: what
            for digest, what in self._damaged.items()
            if digest in rows and (identity(files[digest]) if digest in files else None) == what
        }


def identity(file: Path) -> tuple[int, ...]:
    status = file.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> Iterator[None]:
    with tiers.fork_server(__name__):
        yield


@pytest.mark.variants
@pytest.mark.timeout(3600 if NIGHTLY else 300)
@pytest.mark.parametrize("policy", ["pin", "lru"])
def test_any_order_of_operations_keeps_the_promises(policy: str) -> None:
    if not SPANS:
        print("spans are not read: LocalTier.get takes none")
    machine: Callable[[], Machine] = lambda: Machine(policy)  # noqa: E731
    run_state_machine_as_test(machine, settings=SETTINGS)
