# ruff: noqa: NPY002 (the legacy functions of NumPy that the user's code may call)
"""What the user's `collate_fn` and `transform` find around a call: generators of their own, and the loop's torch modes.

Each batch has its own seed, so that it is the same in threads, in workers, in the loop and after a resume, and so that
the loop's draws don't depend on the batches that are made ahead. torch, NumPy and Python each have one generator for a
whole process. A worker seeds them, and the loop's thread restores them after a call. Another thread can do neither
while the loop runs: there, torch's functions get a generator as an argument, and a warning tells of other draws.

albumentations has generators of its own, which get those of the batch in each of these places.

To save and restore takes longer than many a transform. So the first batch of each loop tells which generators the code
draws from, and later batches leave the others alone.
"""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from dataload.loader import albumentations_draws
from dataload.samplers.keys import derive_key

log = logging.getLogger(__name__)


class _Global(NamedTuple):
    """A generator of the process."""

    state: Callable[[], Any]
    restore: Callable[[Any], object]
    seed: Callable[[int], object]


_GLOBAL = {
    # torch.manual_seed would seed the generators of accelerators, too.
    "torch": _Global(
        lambda: torch.default_generator.get_state().numpy(),
        lambda state: torch.default_generator.set_state(torch.from_numpy(state)),
        torch.default_generator.manual_seed,
    ),
    "numpy.random": _Global(
        np.random.get_state, np.random.set_state, lambda seed: np.random.seed([seed >> 32, seed & 0xFFFF_FFFF])
    ),
    "random": _Global(random.getstate, random.setstate, random.seed),
}


class Around(Protocol):
    """What surrounds the calls of the user's code for a batch."""

    def __call__(self, stream: tuple[int, ...], cursor: int) -> AbstractContextManager[object]:
        """Return the surroundings of the calls for a batch.

        Args:
            stream: (seed, epoch, rank).
            cursor: Rows of the epoch before the global batch.
        """


class Draws:
    """Which generators the code of a loader draws from: all, until the first batch of a loop has shown it.

    Attributes:
        names: Their names.
    """

    def __init__(self) -> None:
        self.names = {*_GLOBAL}
        self._is_known = False
        self._told = False

    def learn(self, names: Iterable[str]) -> None:
        """Add generators that the first batch of a loop drew from. Those of the first loop replace all."""
        self.names = {*names, *(self.names if self._is_known else ())}
        self._is_known = True

    def tell(self, names: list[str]) -> None:
        """Warn, once, of generators that threads share with the loop."""
        if names and not self._told:
            self._told = True
            log.warning(
                "transform or collate_fn draws from the global generator of %s, which threads share with the training "
                "loop: batches, and the loop's own draws, differ between runs. Draw from rng, as in "
                "transform(batch, rng), or pass num_workers=1 or num_threads=0",
                " and ".join(names),
            )


@contextmanager
def in_worker(stream: tuple[int, ...], cursor: int) -> Iterator[None]:
    """Seed the generators of a process that makes batches only. See `Around`."""
    seed = _seed_of(stream, cursor)
    for each in _GLOBAL.values():
        each.seed(seed)
    with albumentations_draws.seeded(seed):
        yield


class InLoop:
    """The surroundings of calls in the thread of the loop. See `Around`.

    Args:
        cursor: Where the loop begins.
        draws: Which generators the code draws from.
    """

    def __init__(self, cursor: int, draws: Draws) -> None:
        self._first = cursor
        self._draws = draws

    @contextmanager
    def __call__(self, stream: tuple[int, ...], cursor: int) -> Iterator[None]:
        seed, is_first = _seed_of(stream, cursor), cursor == self._first
        used = {name: each for name, each in _GLOBAL.items() if is_first or name in self._draws.names}
        before = {name: each.state() for name, each in used.items()}
        try:
            for each in used.values():
                each.seed(seed)
            seeded = {name: each.state() for name, each in used.items()} if is_first else {}
            is_seeded = is_first or albumentations_draws.is_used()
            with albumentations_draws.seeded(seed) if is_seeded else nullcontext():
                yield
            if is_first:
                self._draws.learn(_moved(seeded))
        finally:
            for name, state in before.items():
                _GLOBAL[name].restore(state)


class InThreads:
    """The surroundings of calls in threads that run beside the loop. See `Around`.

    Make one in the thread of the loop, whose modes of torch the calls get.

    Args:
        cursor: Where the loop begins. It waits for this batch, so only the user's code moves the generators meanwhile.
        draws: Which generators the code draws from.
    """

    def __init__(self, cursor: int, draws: Draws) -> None:
        self._modes = modes_here()
        self._first = cursor
        self._draws = draws

    def __call__(self, stream: tuple[int, ...], cursor: int) -> AbstractContextManager[object]:
        """Return the surroundings of the calls for a batch. See `Around`."""
        is_first = cursor == self._first
        if is_first or self._modes or "torch" in self._draws.names:
            return self._entered(stream, cursor, is_first=is_first)
        is_used = albumentations_draws.is_used()
        return albumentations_draws.seeded(_seed_of(stream, cursor)) if is_used else nullcontext()

    @contextmanager
    def _entered(self, stream: tuple[int, ...], cursor: int, *, is_first: bool) -> Iterator[None]:
        before = {name: each.state() for name, each in _GLOBAL.items()} if is_first else {}
        with ExitStack() as stack:
            for mode in self._modes:
                stack.enter_context(mode())
            seed = _seed_of(stream, cursor)
            stack.enter_context(albumentations_draws.seeded(seed))
            generator = torch.Generator().manual_seed(seed)
            seeded = generator.get_state()
            stack.enter_context(_Drawing(generator))
            yield
        if is_first:
            moved = _moved(before)
            self._draws.tell(moved)
            self._draws.learn(moved if torch.equal(generator.get_state(), seeded) else [*moved, "torch"])


def _moved(before: dict[str, Any]) -> list[str]:
    """Return the names of the generators that code has drawn from since they had the states `before`."""
    return [name for name, state in before.items() if pickle.dumps(_GLOBAL[name].state()) != pickle.dumps(state)]


def modes_here() -> list[Callable[[], AbstractContextManager[object]]]:
    """Return what enters torch's modes of this thread in another one: no_grad, inference_mode and autocast."""
    modes: list[Callable[[], AbstractContextManager[object]]] = []
    if torch.is_inference_mode_enabled():
        modes.append(torch.inference_mode)
    if not torch.is_grad_enabled():
        modes.append(torch.no_grad)
    cached = torch.is_autocast_cache_enabled()
    return modes + [
        partial(torch.autocast, kind, torch.get_autocast_dtype(kind), cache_enabled=cached)
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]


_DRAWING: frozenset[Any] = frozenset(
    [
        *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.bernoulli, torch.multinomial),
        *(torch.rand_like, torch.randn_like, torch.randint_like, torch.poisson, torch.binomial),
        *(torch._standard_gamma, torch._sample_dirichlet),  # noqa: SLF001 (of torch.distributions)
        *(torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.random_, torch.Tensor.exponential_),
        *(torch.Tensor.geometric_, torch.Tensor.cauchy_, torch.Tensor.log_normal_, torch.Tensor.bernoulli_),
        *(torch.Tensor.bernoulli, torch.Tensor.multinomial),
    ]
)


class _Drawing(TorchFunctionMode):
    """Makes the functions of torch that this thread calls draw from a generator, if they draw on the CPU."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWING and kwargs.get("generator") is None and _is_on_cpu(args, kwargs):
            kwargs = {**kwargs, "generator": self._generator}
        return func(*args, **kwargs)


def _is_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is None:
        given = next((each for each in args if isinstance(each, torch.Tensor)), None)
        device = torch.get_default_device() if given is None else given.device
    return torch.device(device).type == "cpu"


def _seed_of(stream: tuple[int, ...], cursor: int) -> int:
    seed, epoch, rank = stream
    return derive_key("generators", seed, epoch, cursor, rank)
