"""The local tier under kills: at each named step, at random moments, in a lock, in a read, and as workers."""

from __future__ import annotations

import faulthandler
import functools
import gc
import itertools
import os
import random
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import tiers
from lock_waits import announce_waits
from nightly import NIGHTLY
from tiers import FORKSERVER, LIMIT, PATIENCE, assert_sound, data_of, key, look, put

from dataload.cache.local import failpoints, fsck
from dataload.cache.local.tier import LocalTier
from dataload.cache.tier import Allocate

KILLS = 1000 if NIGHTLY else 200
KILLS_A_ROUND = 20
SAMPLES = 5000 if NIGHTLY else 120


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> Iterator[None]:
    with tiers.fork_server(__name__):
        yield


# At each named step


@dataclass(frozen=True)
class Scenario:
    """An operation on a cache, during which the process is killed.

    Attributes:
        before: Prepares the folder, in a process that exits normally.
        act: The operation that is killed. A second run succeeds.
        survivors: The blobs that stay cached, at whatever step the kill comes.
        hurt: Whether the damage by `before` is still present; only `act` may repair it.
    """

    before: Callable[[Path], object]
    act: Callable[[LocalTier], object]
    survivors: frozenset[str] = frozenset()
    hurt: Callable[[Path], bool] = lambda _: False
    limit: int = LIMIT


DAMAGED = b"damaged"


def keep(path: Path, *names: str, limit: int = LIMIT) -> None:
    for name in names:
        put(LocalTier(path, limit, "lru"), name)


def nothing(path: Path) -> None:
    """Leave the folder missing."""


def three(path: Path) -> None:
    keep(path, "x/0", "x/2", "y/0")


def full(path: Path) -> None:
    """Fill three blobs; a blob of 66,000 bytes evicts two of them."""
    keep(path, "x/0", "x/3", "y/3")


def three_one_damaged(path: Path) -> None:
    three(path)
    tiers.files_of(path)[key("x/0").digest].write_bytes(DAMAGED)


def three_one_gone(path: Path) -> None:
    three(path)
    tiers.files_of(path)[key("x/0").digest].unlink()


def is_damaged(path: Path) -> bool:
    return any(file.read_bytes() == DAMAGED for file in tiers.files_of(path).values())


def is_gone(path: Path) -> bool:
    return key("x/0").digest not in tiers.files_of(path)


def three_one_unknown(path: Path) -> None:
    """Create a file without a row, as after an index was lost while a process ran."""
    three(path)
    tier = LocalTier(path, LIMIT, "lru")
    tier.folder.index.drop(key("x/0").digest)


def is_unknown(path: Path) -> bool:
    tier = LocalTier(path, LIMIT, "lru")
    rows = tier.folder.index.rows()
    return key("x/0").digest in tiers.files_of(path).keys() - {row.digest for row in rows}


def index_damaged(path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        three(path)
        os._exit(0)
    os.waitpid(pid, 0)
    (path / "index" / "data.mdb").write_bytes(DAMAGED * 2000)


def killed_before(path: Path, scenario: str, step: str) -> None:
    """Run another scenario in a child that is killed when it first reaches a step."""
    pid = os.fork()
    if pid == 0:
        SCENARIOS[scenario].before(path)
        act(path, scenario, 1, step)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def fill(tier: LocalTier) -> None:
    put(tier, "x/0")


def fill_together(tier: LocalTier) -> None:
    """Cache small blobs at once. One of them, x/0, may be cached or damaged."""
    names = ("x/0", "w/1", "w/0")
    found = tier.bulk.put_together([(key(name), memoryview(data_of(name))) for name in names])
    assert found == [data_of(name) for name in names]


def fill_large(tier: LocalTier) -> None:
    put(tier, "z/5")


def fill_huge(tier: LocalTier) -> None:
    put(tier, "huge")


def fail(tier: LocalTier) -> None:
    tiers.put_half(tier, "z/0")


def evict_all(tier: LocalTier) -> None:
    fsck.evict(tier.folder)


def evict_folder(tier: LocalTier) -> None:
    fsck.evict(tier.folder, path="bucket/x")


def discard(tier: LocalTier) -> None:
    tier.discard([key("x/0"), key("y/0")], made=[key("x/2")])


def repair(tier: LocalTier) -> None:
    fsck.verify(tier.folder, repair=True)


def again(tier: LocalTier) -> None:
    """Run most other operations, one after the other."""
    for name in ("x/0", "z/5", "x/3"):
        put(tier, name)


XXY = frozenset({"x/0", "x/2", "y/0"})
SCENARIOS = {
    "a first fill": Scenario(nothing, fill),
    "a fill beside others": Scenario(three, fill_large, limit=2 * LIMIT, survivors=XXY),
    "a fill that evicts": Scenario(full, fill_large),
    "a fill that fails": Scenario(three, fail, survivors=XXY),
    "a fill that does not fit": Scenario(three, fill_huge, survivors=XXY),
    "fills together": Scenario(three, fill_together, limit=2 * LIMIT, survivors=XXY - {"x/0"}),
    "fills together that evict": Scenario(full, fill_together),
    "a damaged blob among fills together": Scenario(three_one_damaged, fill_together, XXY - {"x/0"}, is_damaged),
    "a damaged blob": Scenario(three_one_damaged, fill, XXY - {"x/0"}, is_damaged),
    "a missing blob": Scenario(three_one_gone, fill, XXY - {"x/0"}, is_gone),
    "evicting all": Scenario(three, evict_all),
    "evicting a folder": Scenario(three, evict_folder, survivors=frozenset({"y/0"})),
    "discarding": Scenario(three, discard, survivors=frozenset({"x/2"})),
    "an unknown blob": Scenario(three_one_unknown, repair, XXY - {"x/0"}, is_unknown),
    "repairing": Scenario(three_one_damaged, repair, XXY - {"x/0"}, is_damaged),
    "a damaged index": Scenario(index_damaged, fill),
    **{
        f"after a kill at {step!r}": Scenario(functools.partial(killed_before, scenario=name, step=step), again)
        for name, step in (
            ("a fill that evicts", "fill: reserved"),
            ("a fill that evicts", "fill: published"),
            ("a fill that evicts", "evict: unlinked"),
            ("a damaged blob", "discard: unlinked"),
        )
    },
}


def act(path: Path, scenario: str, number: int, step: str) -> None:
    """Run a scenario and die when it reaches a step for the `number`-th time."""
    tiers.die_at(number, step)
    chosen = SCENARIOS[scenario]
    chosen.act(LocalTier(path, chosen.limit, "lru"))


def record(path: Path, scenario: str, steps_to: Connection) -> None:
    seen: list[str] = []
    failpoints.watch(seen.append)
    SCENARIOS[scenario].act(LocalTier(path, SCENARIOS[scenario].limit, "lru"))
    steps_to.send(seen)


class Prepared:
    """The prepared folders of the scenarios, and how often each scenario reaches each step."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._arrivals: dict[str, Counter[str]] = {}

    def arrivals(self, name: str) -> Counter[str]:
        if name not in self._arrivals:
            self._arrivals[name] = self._rehearse(name)
        return self._arrivals[name]

    def copy(self, name: str, to: Path) -> None:
        if (self._root / name).exists():
            shutil.copytree(self._root / name, to)

    def _rehearse(self, name: str) -> Counter[str]:
        assert tiers.run(SCENARIOS[name].before, self._root / name) == 0
        self.copy(name, self._root / "rehearsal" / name)
        receiver, sender = FORKSERVER.Pipe(duplex=False)
        with receiver, sender:
            assert tiers.run(record, self._root / "rehearsal" / name, name, sender) == 0
            return Counter(receiver.recv())


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return Prepared(tmp_path_factory.mktemp("prepared"))


@pytest.mark.variants
@pytest.mark.parametrize("step", failpoints.STEPS)
def test_a_kill_at_each_step_breaks_nothing(tmp_path: Path, prepared: Prepared, step: str) -> None:
    """Each scenario that reaches the step is killed there, at its first and at its last arrival."""
    often = {name: prepared.arrivals(name)[step] for name in SCENARIOS}
    moments = [(name, number) for name, last in often.items() if last for number in {1, last}]
    assert moments, f"no scenario comes to {step!r}: add one"
    for name, number in moments:
        path = tmp_path / f"{name} {number}"
        prepared.copy(name, path)
        assert_a_kill_breaks_nothing(path, name, number, step)


def assert_a_kill_breaks_nothing(path: Path, name: str, number: int, step: str) -> None:
    scenario = SCENARIOS[name]
    assert tiers.run(act, path, name, number, step) == -signal.SIGKILL
    try:
        problems = fsck.verify(LocalTier(path, scenario.limit, "lru").folder).problems
        if problems and scenario.hurt(path):
            assert [names_x0(problem) for problem in problems] == [True]
        else:
            assert assert_sound(path, scenario.limit) >= scenario.survivors
        scenario.act(LocalTier(path, scenario.limit, "lru"))
        assert assert_sound(path, scenario.limit) >= scenario.survivors
    except AssertionError as error:
        raise AssertionError(f"{name}, killed at arrival {number} at {step!r}") from error


def names_x0(problem: str) -> bool:
    return key("x/0").name in problem or key("x/0").digest.hex() in problem


def test_a_kill_is_no_reason_to_start_anew(tmp_path: Path) -> None:
    """Blobs that a process published before it was killed stay cached."""
    path = tmp_path / "c"
    assert tiers.run(three, path) == 0
    assert tiers.run(act, path, "a fill that fails", 1, "fill: locked") == -signal.SIGKILL
    assert assert_sound(path, LIMIT) == XXY


# Leftovers of a killed writer


def die_in_fill(path: Path, name: str) -> None:
    tiers.die_at(1, "fill: filled")
    put(LocalTier(path, LIMIT, "lru"), name)


def open_once(path: Path) -> None:
    assert LocalTier(path, LIMIT, "lru").folder


def test_who_takes_over_and_fails_leaves_nothing(tmp_path: Path) -> None:
    """A sweep removes the dead writer's files while its successor holds the lock. Then the successor's fill fails."""
    path = tmp_path / "c"
    assert tiers.run(die_in_fill, path, "x/0") == -signal.SIGKILL

    def fails(_: Allocate) -> None:
        assert tiers.run(open_once, path) == 0
        raise tiers.OriginError

    tier = tier_that_did_not_sweep(path, "x/0")
    with pytest.raises(tiers.OriginError):
        tier.get_or_fill(key("x/0"), fails)
    del tier
    assert assert_sound(path, LIMIT) == set()


def test_who_takes_over_and_is_killed_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "c"
    assert tiers.run(take_over_and_die, path, "x/0") == -signal.SIGKILL
    assert assert_sound(path, LIMIT) == set()


def take_over_and_die(path: Path, name: str) -> None:
    tier = tier_that_did_not_sweep(path, name)

    def dies(_: Allocate) -> None:
        forked(open_once, path)
        tiers.kill_myself()

    tier.get_or_fill(key(name), dies)


def test_who_takes_over_keeps_the_limit(tmp_path: Path) -> None:
    """The partial file of the dead writer takes disk space until it is removed."""
    tier = tier_that_did_not_sweep(tmp_path / "c", "z/5")

    def fills(allocate: Allocate) -> None:
        room = allocate(len(data_of("z/5")))
        assert_within(tier, LIMIT)
        room[:] = data_of("z/5")

    assert tier.get_or_fill(key("z/5"), fills) == data_of("z/5")
    assert_within(tier, LIMIT)


def test_a_writer_killed_while_another_process_recovers_leaves_nothing(tmp_path: Path) -> None:
    """It fills the blob of a dead writer after the sweep, and is killed before the row of that writer is dropped."""
    path = tmp_path / "c"
    ours, theirs = FORKSERVER.Pipe()
    with ours, theirs:
        late = tiers.start(fill_on_demand_and_die, path, "x/0", theirs)
        assert ours.recv() == "open"
        assert tiers.run(die_in_fill, path, "x/0") == -signal.SIGKILL

        def at(step: str) -> None:
            if step == "recover: swept":
                ours.send("fill")
                assert tiers.end(late) == -signal.SIGKILL

        failpoints.watch(at)
        try:
            tier = LocalTier(path, LIMIT, "lru")
            assert_within(tier, LIMIT)
        finally:
            failpoints.watch(None)
    del tier
    assert assert_sound(path, LIMIT) == set()


def fill_on_demand_and_die(path: Path, name: str, dialogue: Connection) -> None:
    tier = LocalTier(path, LIMIT, "lru")
    assert tier.folder
    tiers.die_at(1, "fill: filled")
    dialogue.send("open")
    dialogue.recv()
    put(tier, name)


def test_two_may_clear_what_a_dead_process_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that opens the cache sweeps files that the next writer of the blob removes at the same time."""
    path = tmp_path / "c"
    assert tiers.run(die_in_fill, path, "x/0") == -signal.SIGKILL
    unlink = os.unlink

    def unlink_after_another(file: Any, *, dir_fd: int | None = None) -> None:
        unlink(file, dir_fd=dir_fd)
        unlink(file, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink_after_another)
        open_once(path)
    assert assert_sound(path, LIMIT) == set()


def test_what_a_dead_process_reserved_is_evicted_with_its_file(tmp_path: Path) -> None:
    tier = tier_that_did_not_sweep(tmp_path / "c", "z/5")
    put(tier, "y/5")
    assert look(tier, "y/5")
    assert_within(tier, LIMIT)


def tier_that_did_not_sweep(path: Path, name: str) -> LocalTier:
    """Return a tier that was open before another process was killed in its fill of `name`."""
    tier = LocalTier(path, LIMIT, "lru")
    assert tier.folder
    forked(die_in_fill, path, name)
    return tier


def forked(target: Callable[..., object], *arguments: object) -> None:
    """Run `target` in a forked child and wait until the child exits or is killed."""
    pid = os.fork()
    if pid == 0:
        try:
            target(*arguments)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def fork_to_wait(over: Any) -> None:
    """Fork a child that runs until `over` is set. Return once it has closed its copies of the parent's files."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, b"here")
        over.wait(2 * PATIENCE)
        os._exit(0)
    os.read(reading, 4)


def assert_within(tier: LocalTier, limit: int) -> None:
    """Assert that the index covers the bytes on disk and is within the limit. Other processes must be stopped."""
    used = tier.folder.index.used_bytes()
    assert used == sum(row.size for row in tier.folder.index.rows())
    drafts = [file for file in tiers.drafts_in(tier.path) if file.stat().st_size]  # empty before its row, or a mark
    on_disk = tiers.bytes_in([*tier.path.glob("blobs/*/*"), *drafts])
    assert on_disk <= used <= limit, f"{on_disk} bytes on disk, {used} used and reserved, limit {limit}"


# At random moments

NAMES = [f"{folder}/{number}" for folder in "xy" for number in range(8)]


def load(path: Path, policy: str, seed: int, die_at: int, report: Connection) -> None:
    """Read, fill, fail and evict in two threads until the process dies at its `die_at`-th step or is killed."""
    faulthandler.register(signal.SIGUSR1)
    if die_at:
        tiers.die_at(die_at)
    tier = LocalTier(path, LIMIT, policy)
    telling = threading.Lock()

    def work(thread: int) -> None:
        chance = random.Random(f"{seed} {thread}")
        try:
            while True:
                do_something(tier, chance)
                with telling:
                    report.send_bytes(b"done")
        except BaseException as error:
            report.send_bytes(f"{type(error).__name__}: {error}".encode())
            raise

    other = threading.Thread(target=work, args=(1,), daemon=True)
    other.start()
    work(0)


def do_something(tier: LocalTier, chance: random.Random) -> None:
    name, dice = chance.choice(NAMES), chance.random()
    if dice < 0.7:
        put(tier, name)
    elif dice < 0.8:
        look(tier, name)
    elif dice < 0.87:
        tiers.put_half(tier, name)
    elif dice < 0.92:
        fsck.evict(tier.folder, path=f"bucket/{name.partition('/')[0]}")
    elif dice < 0.96:
        fsck.evict(tier.folder, keep_bytes=LIMIT // 2)
    else:
        fsck.verify(tier.folder, repair=True)  # It may find leftovers of processes killed since the last opening.


class Victim:
    """A process under load that dies at a random moment: at a step, or after a number of operations."""

    def __init__(self, path: Path, policy: str, seed: int) -> None:
        chance = random.Random(seed)
        at_step = chance.random() < 0.5
        self.operations = 0 if at_step else chance.randrange(1, 30)
        self.reports, sender = FORKSERVER.Pipe(duplex=False)
        with sender:
            die_at = chance.randrange(1, 120) if at_step else 0
            self.process = tiers.start(load, path, policy, seed, die_at, sender)

    def hear(self) -> bool:
        """Receive one report. Return False if the process is dead."""
        try:
            report = self.reports.recv_bytes()
        except EOFError:
            return False
        assert report == b"done", report.decode()
        self.operations -= 1
        if self.operations == 0:
            os.kill(self.process.pid, signal.SIGKILL)
        return True

    def bury(self) -> None:
        self.reports.close()
        assert tiers.end(self.process) == -signal.SIGKILL

    def end(self) -> None:
        self.process.kill()
        self.bury()


@pytest.mark.timeout(1200 if NIGHTLY else 120)
@pytest.mark.parametrize("policy", ["pin", pytest.param("lru", marks=pytest.mark.slow)])
def test_kills_at_random_moments_break_nothing(tmp_path: Path, policy: str) -> None:
    """Three processes run at a time and are replaced when they die, so new ones sweep while others work."""
    seeds = itertools.count(1)
    for _ in range(KILLS // 2 // KILLS_A_ROUND):
        kill_some(tmp_path / "c", policy, list(itertools.islice(seeds, KILLS_A_ROUND)))
        assert_sound(tmp_path / "c", LIMIT, policy)


def kill_some(path: Path, policy: str, seeds: list[int]) -> None:
    """Start a process for each seed, three at a time, and receive their reports until all are dead."""
    alive: dict[Any, Victim] = {}
    try:
        while seeds or alive:
            while seeds and len(alive) < 3:
                victim = Victim(path, policy, seeds.pop())
                alive[victim.reports] = victim
            ready = wait(list(alive), PATIENCE) or where_they_hang(alive)
            for reports in ready:
                if not alive[reports].hear():
                    alive.pop(reports).bury()
    finally:
        for victim in alive.values():
            victim.end()


def where_they_hang(alive: dict[Any, Victim]) -> list[Any]:
    """Make every process print the stacks of its threads, then fail."""
    for victim in alive.values():
        os.kill(victim.process.pid, signal.SIGUSR1)
    wait(list(alive), timeout=2)
    raise AssertionError("all hang: see their tracebacks")


# One fill

PROCESSES, THREADS = 8, 4


class Race:
    """The shared state of processes that request one cold key at once: number of fills, and arrivals."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.fills = FORKSERVER.Value("i", 0)
        self.waiting = FORKSERVER.Semaphore(0)  # one for each thread that waits for the lock of the key
        self.over = FORKSERVER.Event()

    def fill(self, allocate: Allocate) -> None:
        room = allocate(len(data_of("x/0")))
        with self.fills.get_lock():
            self.fills.value += 1
            first = self.fills.value == 1
        if first:
            for _ in range(PROCESSES * THREADS - 1):  # A thread that starts a second fill does not wait.
                assert self.waiting.acquire(timeout=PATIENCE)
            self.hold_up()
        room[:] = data_of("x/0")

    def hold_up(self) -> None:
        """Act as the first writer while all others wait for the key."""
        if self.kind == "killed":
            tiers.kill_myself()
        elif self.kind == "child lives, killed":
            fork_to_wait(self.over)
            tiers.kill_myself()
        elif self.kind == "child ends":
            forked(gc.collect)


def ask(path: Path, race: Race, answers: Connection) -> None:
    announce_waits(race.waiting.release)
    tier = LocalTier(path, LIMIT, "pin")
    right: list[bool] = []

    def one() -> None:
        right.append(tier.get_or_fill(key("x/0"), race.fill) == data_of("x/0"))

    threads = [threading.Thread(target=one) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers.send(right)


@pytest.mark.parametrize(
    ("kind", "fills"), [("undisturbed", 1), ("killed", 2), ("child ends", 1), ("child lives, killed", 2)]
)
def test_a_cold_key_is_filled_once(tmp_path: Path, kind: str, fills: int) -> None:
    """One fill in total; one more if the writer is killed. A forked child neither keeps nor releases the lock."""
    race = Race(kind)
    receiver, sender = FORKSERVER.Pipe(duplex=False)
    processes = [tiers.start(ask, tmp_path / "c", race, sender) for _ in range(PROCESSES)]
    try:
        codes = [tiers.end(process) for process in processes]
        assert assert_sound(tmp_path / "c", LIMIT, "pin", alone=False) == {"x/0"}
    finally:
        race.over.set()
    killed = fills - 1
    assert sorted(codes) == [-signal.SIGKILL] * killed + [0] * (PROCESSES - killed)
    with receiver, sender:
        assert [receiver.recv() for _ in range(PROCESSES - killed)] == [[True] * THREADS] * (PROCESSES - killed)
    assert race.fills.value == fills


# The limit


class Stepper:
    """A process under load that waits for an answer of the test at every step."""

    def __init__(self, path: Path, policy: str, seed: int) -> None:
        self.dialogue, theirs = FORKSERVER.Pipe()
        with theirs:
            self.process = tiers.start(load_in_steps, path, policy, seed, theirs)

    def states(self) -> set[str]:
        """Return the states of its threads as in proc(5); T is stopped."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        return {task.read_text().rpartition(")")[2].split()[0] for task in tasks}

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self.dialogue.close()
        assert tiers.end(self.process) == -signal.SIGKILL, "it died before the kill"


class _Listening:
    """A receiver that ignores the reports of `load`."""

    def send_bytes(self, report: bytes) -> None:
        assert report == b"done"


def load_in_steps(path: Path, policy: str, seed: int, dialogue: Connection) -> None:
    telling = threading.Lock()

    def watcher(name: str) -> None:
        with telling:
            dialogue.send_bytes(name.encode())
            dialogue.recv_bytes()

    failpoints.watch(watcher)
    load(path, policy, seed, 0, _Listening())


class Watchdog:
    """A process that resumes the stopped processes if the test blocks on a mutex that one of them holds.

    A thread would not do: LMDB waits for its mutexes with the interpreter's lock held.
    """

    def __init__(self) -> None:
        self._dialogue, theirs = FORKSERVER.Pipe()
        with theirs:
            self._process = tiers.start(watch_over, theirs)

    @contextmanager
    def standing_still(self, steppers: list[Stepper]) -> Iterator[None]:
        """Stop every thread of these processes. Raises TimeoutError if the watchdog had to resume them."""
        for stepper in steppers:
            stepper.signal(signal.SIGSTOP)
        while any(stepper.states() - {"T"} for stepper in steppers):
            os.sched_yield()
        self._dialogue.send([stepper.process.pid for stepper in steppers])
        try:
            yield
        finally:
            self._dialogue.send("done")
            barked = self._dialogue.recv()
            for stepper in steppers:
                stepper.signal(signal.SIGCONT)
            if barked:
                raise TimeoutError

    def end(self) -> None:
        self._dialogue.close()
        assert tiers.end(self._process) == 0


def watch_over(dialogue: Connection) -> None:
    try:
        while True:
            stopped = dialogue.recv()
            barks = not dialogue.poll(1)
            for pid in stopped if barks else ():
                os.kill(pid, signal.SIGCONT)
            assert dialogue.recv() == "done"
            dialogue.send(barks)
    except EOFError:
        pass


def assert_within_at_this_moment(watchdog: Watchdog, tier: LocalTier, steppers: list[Stepper]) -> None:
    """Count while all are stopped. Repeat if one was stopped while it held the index lock."""
    while True:
        try:
            with watchdog.standing_still(steppers):
                assert_within(tier, LIMIT)
        except TimeoutError:
            continue
        return


@pytest.mark.timeout(1200 if NIGHTLY else 120)
@pytest.mark.parametrize("policy", ["pin", pytest.param("lru", marks=pytest.mark.slow)])
def test_the_limit_holds_at_every_moment(tmp_path: Path, policy: str) -> None:
    """At each step of one process, all others are stopped and every byte is counted. Some are killed."""
    tier = LocalTier(tmp_path / "c", LIMIT, policy)
    put(tier, "x/1")
    chance, seeds, seen = random.Random(policy), itertools.count(1), set[str]()
    alive: list[Stepper] = []
    watchdog = Watchdog()
    try:
        for number in range(SAMPLES):
            alive += [Stepper(tier.path, policy, next(seeds)) for _ in range(3 - len(alive))]
            speaking = wait([stepper.dialogue for stepper in alive], PATIENCE)
            assert speaking, "all hang"
            speaker: Any = chance.choice(speaking)
            seen.add(speaker.recv_bytes().decode())
            assert_within_at_this_moment(watchdog, tier, alive)
            speaker.send_bytes(b"go on")
            if number % 20 == 19:
                alive.pop(chance.randrange(3)).end()
    finally:
        for stepper in alive:
            stepper.end()
        watchdog.end()
    assert {"fill: reserved", "fill: published", "evict: unlinked", "recover: swept"} <= seen
    del tier
    assert_sound(tmp_path / "c", LIMIT, policy)


# Views


def evict_by_filling(tier: LocalTier) -> None:
    put(tier, "z/5")
    put(tier, "y/5")
    fsck.evict(tier.folder, path="bucket/y")


def mend(tier: LocalTier) -> None:
    """Replace the file by a damaged one, which the next fill removes."""
    file = tier.folder.path_of(key("x/0").digest)
    file.with_suffix(".damaged").write_bytes(DAMAGED)
    file.with_suffix(".damaged").rename(file)


@pytest.mark.parametrize("leave", [evict_all, evict_folder, evict_by_filling, mend])
def test_a_view_outlives_its_blob_and_its_name(tmp_path: Path, leave: Callable[[LocalTier], None]) -> None:
    """Another process evicts the blob and fills it with other bytes; existing views do not change."""
    path = tmp_path / "c"
    tier = LocalTier(path, LIMIT, "lru")
    put(tier, "x/0")
    view = tier.get(key("x/0"))
    assert tiers.run(let_go_and_fill_anew, path, leave) == 0
    assert view == data_of("x/0")
    assert tier.get(key("x/0")) == data_of("x/0")[::-1]
    assert view == data_of("x/0")


def let_go_and_fill_anew(path: Path, leave: Callable[[LocalTier], None]) -> None:
    tier = LocalTier(path, LIMIT, "lru")
    leave(tier)

    def fill_other(allocate: Allocate) -> None:
        allocate(len(data_of("x/0")))[:] = data_of("x/0")[::-1]

    assert tier.get_or_fill(key("x/0"), fill_other) == data_of("x/0")[::-1]


# Workers


class Reading:
    """A dataset of blobs, read through a tier that may be open before the workers start."""

    def __init__(self, tier: LocalTier, fills: Path) -> None:
        self.tier = tier
        self.fills = fills

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> bytes:
        name = f"x/{number}"

        def fill(allocate: Allocate) -> None:
            with self.fills.open("a") as file:
                file.write(f"{name}\n")
            tiers.fill_of(name)(allocate)

        return bytes(self.tier.get_or_fill(key(name), fill))


@pytest.mark.variants
@pytest.mark.parametrize(
    "persistent", [pytest.param(False, id="anew", marks=pytest.mark.slow), pytest.param(True, id="persistent")]
)
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_read_through_their_parents_tier(tmp_path: Path, method: str, persistent: bool) -> None:
    from torch.utils.data import DataLoader

    reading = Reading(LocalTier(tmp_path / "c", 10 * LIMIT), tmp_path / "fills")
    assert reading[0] == data_of("x/0")
    loader = DataLoader(
        reading, batch_size=3, num_workers=2, multiprocessing_context=method, persistent_workers=persistent
    )
    expected = [data_of(f"x/{number}") for number in range(len(reading))]
    for _ in range(2):
        assert [blob for batch in loader for blob in batch] == expected
        assert reading[11] == expected[11]
    del loader
    assert sorted((tmp_path / "fills").read_text().split()) == sorted(f"x/{number}" for number in range(len(reading)))
    put(reading.tier, "y/0")
    assert fsck.verify(reading.tier.folder).problems == []


def test_a_fork_within_a_fill_changes_nothing(tmp_path: Path) -> None:
    """The child closes its copies of the parent's files; the parent's draft and folder stay."""
    tier = LocalTier(tmp_path / "c", LIMIT)

    def fill(allocate: Allocate) -> None:
        room = allocate(len(data_of("x/0")))
        forked(child_of_a_filler, tier)
        assert len(tiers.drafts_in(tier.path)) == 1
        room[:] = data_of("x/0")

    assert tier.get_or_fill(key("x/0"), fill) == data_of("x/0")
    assert tier.get(key("x/0")) == data_of("x/0")
    assert assert_sound(tmp_path / "c", LIMIT, alone=False) == {"x/0", "y/0"}


def child_of_a_filler(tier: LocalTier) -> None:
    put(tier, "y/0")
    gc.collect()


def test_what_a_killed_child_was_filling_is_swept_while_its_parent_lives(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c", LIMIT, "lru")
    put(tier, "x/0")
    forked(die_in_parents_tier, tier)
    assert tiers.run(assert_sound_beside_others, tier.path) == 0
    put(tier, "y/0")
    assert look(tier, "x/0")


def die_in_parents_tier(tier: LocalTier) -> None:
    tiers.die_at(1, "fill: filled")
    put(tier, "y/0")


def assert_sound_beside_others(path: Path) -> None:
    assert assert_sound(path, LIMIT, alone=False) == {"x/0"}


def test_a_living_child_does_not_stand_in_for_its_killed_parent(tmp_path: Path) -> None:
    """The lock on the parent's folder ends with the parent, so that the folder is swept."""
    over = FORKSERVER.Event()
    try:
        assert tiers.run(fork_and_die, tmp_path / "c", over) == -signal.SIGKILL
        assert assert_sound(tmp_path / "c", LIMIT) == {"x/0"}
    finally:
        over.set()


def fork_and_die(path: Path, over: Any) -> None:
    tier = LocalTier(path, LIMIT, "lru")
    put(tier, "x/0")
    fork_to_wait(over)
    tiers.kill_myself()


def fill_tiny(path: Path, policy: str, die_at: int) -> None:
    tier = LocalTier(path, 2_000_000, policy)
    if die_at:
        tiers.die_at(die_at)
    for number in range(600):
        tier.get_or_fill(key(f"a folder of tiny row groups/{number}"), tiers.fill_of("x/1"))


@pytest.mark.parametrize("policy", ["pin", "lru"])
def test_tiny_blobs_count_as_the_disk_allocates_them(tmp_path: Path, policy: str) -> None:
    """With the folders and the index, and after a kill."""
    for die_at in (1000, 0):
        assert tiers.run(fill_tiny, tmp_path / "c", policy, die_at) == -signal.SIGKILL * (die_at > 0)
        files = [tmp_path / "c", *(tmp_path / "c").rglob("*")]
        assert sum(512 * file.stat().st_blocks for file in files) <= 2_000_000
    assert len(LocalTier(tmp_path / "c").folder.index.rows()) > 300
