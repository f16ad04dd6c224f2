# ruff: noqa: NPY002 (the legacy functions of NumPy that the user's code may call)
"""What the user's `collate_fn` and `transform` find around a call: generators of their own, and the loop's torch modes.

Each batch has its own seed, so that it is the same in threads, in workers, in the loop and after a resume, and so that
the loop's draws don't depend on the batches that are made ahead. torch, NumPy and Python each have one generator for a
whole process. A worker seeds them, and the loop's thread restores them after a call. Another thread can do neither
while the loop runs: there, torch's functions get a generator as an argument, and a warning tells of other draws.

albumentations has generators of its own, which get those of the batch in each of these places.

Code may draw in few batches only, such as those with rows of a rare label. So every batch gets its generators, also if
those before it needed none; what is slow to make is made at the first draw.
"""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from dataload.loader import albumentations_draws
from dataload.runtime.cached_property import cached_property
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
    """Tells of draws that differ between runs."""

    def __init__(self) -> None:
        self._told = False

    def tell(self, names: list[str]) -> None:
        """Warn, once, of generators that threads share with the loop."""
        if names and not self._told:
            self._told = True
            log.warning(
                "transform or collate_fn (or another thread of the program) draws from the global generator of %s, or "
                "seeds it. Threads share it with the training loop, so batches, and the loop's own draws, differ "
                "between runs: draw from rng, as in transform(batch, rng), or pass num_workers=1 or num_threads=0",
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


@contextmanager
def in_loop(stream: tuple[int, ...], cursor: int) -> Iterator[None]:
    """Seed the generators of the process for calls in the thread of the loop, which gets them back. See `Around`."""
    before = {name: each.state() for name, each in _GLOBAL.items()}
    try:
        with in_worker(stream, cursor):
            yield
    finally:
        for name, state in before.items():
            _GLOBAL[name].restore(state)


class InThreads:
    """The surroundings of calls in threads that run beside the loop. See `Around`.

    Make one in the thread of the loop, whose modes of torch the calls get.

    Args:
        cursor: Where the loop begins. It waits for this batch, so it doesn't move the generators meanwhile.
        draws: Tells of draws from generators that the loop has, too, in the first batch.
    """

    def __init__(self, cursor: int, draws: Draws) -> None:
        self._modes = modes_here()
        self._first = cursor
        self._draws = draws

    @contextmanager
    def __call__(self, stream: tuple[int, ...], cursor: int) -> Iterator[None]:
        """Surround the calls for a batch. See `Around`."""
        before = {name: each.state() for name, each in _GLOBAL.items()} if cursor == self._first else {}
        seed = _seed_of(stream, cursor)
        with self._in_modes() if self._modes else nullcontext(), albumentations_draws.seeded(seed), _Drawing(seed):
            yield
        self._draws.tell(_moved(before))

    @contextmanager
    def _in_modes(self) -> Iterator[None]:
        with ExitStack() as stack:
            for mode in self._modes:
                stack.enter_context(mode())
            yield


def _moved(before: dict[str, Any]) -> list[str]:
    """Return the names of the generators that code has drawn from since they had the states `before`."""
    return [name for name, state in before.items() if pickle.dumps(_GLOBAL[name].state()) != pickle.dumps(state)]


def modes_here() -> list[Callable[[], AbstractContextManager[object]]]:
    """Return what enters torch's modes of this thread in another one: no_grad, inference_mode, autocast, device."""
    modes: list[Callable[[], AbstractContextManager[object]]] = []
    if (device := torch.get_default_device()).type != "cpu":
        modes.append(partial(torch.device, device))
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
        *(torch.poisson, torch.binomial),
        *(torch._standard_gamma, torch._sample_dirichlet),  # noqa: SLF001 (of torch.distributions)
        *(torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.random_, torch.Tensor.exponential_),
        *(torch.Tensor.geometric_, torch.Tensor.cauchy_, torch.Tensor.log_normal_, torch.Tensor.bernoulli_),
        *(torch.Tensor.bernoulli, torch.Tensor.multinomial),
    ]
)
_LIKE = (torch.rand_like, torch.randn_like, torch.randint_like)


@cache
def _drawing() -> frozenset[Any]:
    """Return the functions of torch that take a `generator`. Older releases have none for those of `_LIKE`."""
    with suppress(TypeError):
        torch.rand_like(torch.empty(0, device="cpu"), generator=torch.Generator())
        return _DRAWING.union(_LIKE)
    return _DRAWING


class _Drawing(TorchFunctionMode):
    """Makes the functions of torch that this thread calls draw from a generator of their own, if they draw on the CPU.

    Args:
        seed: Seeds the generator. What the user's code seeds in this thread is the generator of the process.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    @cached_property
    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _drawing() and _has_no_generator(args, kwargs) and _is_on_cpu(args, kwargs):
            kwargs = {**kwargs, "generator": self._generator}
        return func(*args, **kwargs)


def _has_no_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = kwargs.get("generator")
    return given in (None, torch.default_generator) and not any(isinstance(each, torch.Generator) for each in args)


def _is_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is None:
        given = next((each for each in args if isinstance(each, torch.Tensor)), None)
        device = torch.get_default_device() if given is None else given.device
    return torch.device(device).type == "cpu"


def _seed_of(stream: tuple[int, ...], cursor: int) -> int:
    seed, epoch, rank = stream
    return derive_key("generators", seed, epoch, cursor, rank)
