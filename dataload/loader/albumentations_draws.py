"""Draws of albumentations, whose pipelines keep generators of their own: in a call for a batch, they are the batch's.

The generators belong to the objects, which user code may have anywhere, and which threads share. So the classes look
their generators up: within a call for a batch in this thread they get those of the batch, and otherwise their own.
AlbumentationsX, its successor, takes a seed for each call instead. Old releases draw from NumPy's and Python's global
generators, as other code does.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np

log = logging.getLogger(__name__)

_NAME = "albumentations"  # of both packages
_ATTRIBUTES = ("random_generator", "py_random")


class _Batch(threading.local):
    """What this thread makes.

    Attributes:
        seed: Seeds the generators of the batch for which it calls user code; None: it is in no such call.
        generators: Those that have been needed, by attribute.
        own: Those of pipelines that the user's code has seeded in this call, by object and attribute.
    """

    seed: int | None = None
    generators: Mapping[str, Any] = MappingProxyType({})
    own: Mapping[tuple[int, str], tuple[Any, Any]] = MappingProxyType({})


_batch = _Batch()
_done = set[str]()  # what happens once in a process
_lock = threading.Lock()  # held by the thread that does it
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def is_used() -> bool:
    """Return whether the program has imported albumentations."""
    return _NAME in sys.modules


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let the pipelines that this thread calls in the block draw from generators with this seed."""
    was_used = is_used()
    if was_used:
        _watch()
    before = dict(vars(_batch))
    _batch.seed, _batch.generators, _batch.own = seed, {}, {}
    try:
        yield
    finally:
        vars(_batch).clear()
        vars(_batch).update(before)
    if is_used() and not was_used:
        _tell_of_import()


def _tell_of_import() -> None:
    """Warn, once, that a batch had the pipelines' own draws."""
    with _lock:
        is_told = "import" in _done
        _done.add("import")
    if not is_told:
        log.warning(
            "transform or collate_fn imports albumentations while it makes a batch, whose draws differ between runs: "
            "import it before the loop"
        )


def _generator(name: str) -> Any:
    """Return a generator of the batch."""
    if name not in _batch.generators:
        make: Callable[[int | None], Any] = random.Random if name == "py_random" else np.random.default_rng
        _batch.generators = {**_batch.generators, name: make(_batch.seed)}
    return _batch.generators[name]


class _OfBatch:
    """A generator of a pipeline: that of the batch, or the pipeline's own. It is an attribute of a class.

    Args:
        name: The attribute.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, pipeline: Any, kind: type) -> Any:
        if pipeline is None:
            return self
        if _batch.seed is not None:
            _, seeded = _batch.own.get((id(pipeline), self._name), (None, None))
            return _generator(self._name) if seeded is None else seeded
        try:
            return vars(pipeline)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, pipeline: Any, generator: Any) -> None:
        vars(pipeline)[self._name] = generator
        if _batch.seed is not None and vars(pipeline).get("seed") is not None:  # by set_random_seed
            # The pipeline is kept, so that no other has its id.
            _batch.own = {**_batch.own, (id(pipeline), self._name): (pipeline, generator)}


def _watch() -> None:
    """Let the classes of albumentations look their generators up, once."""
    if "watch" in _done:
        return
    with _lock:
        module = sys.modules[_NAME]
        if "watch" not in _done and _watched(module):
            _done.add("watch")


def _watched(module: Any) -> bool:
    """Let the classes look their generators up. Return whether there are classes: none, while it is being imported."""
    pipelines = [vars(module)[name] for name in ("BaseCompose", "BasicTransform") if name in vars(module)]
    if len(pipelines) < 2:
        return False
    compose = module.Compose
    if "invocation_seed" in inspect.signature(compose.__call__).parameters:
        compose.__call__ = _with_seed(compose.__call__)
    elif all(hasattr(kind, "set_random_state") and not hasattr(kind, _ATTRIBUTES[0]) for kind in pipelines):
        for kind in pipelines:
            for name in _ATTRIBUTES:
                setattr(kind, name, _OfBatch(name))
    elif hasattr(pipelines[0], "set_random_seed"):
        log.warning(
            "albumentations %s has generators that cannot be seeded for each batch: call "
            "pipeline.set_random_seed(int(rng.integers(2**32))) in transform(batch, rng), with num_threads=0 or "
            "num_workers=",
            getattr(module, "__version__", ""),
        )
    return True


def _with_seed(call: Any) -> Any:
    """Return the call of a pipeline, with a seed of the batch unless it has one."""

    @functools.wraps(call)
    def called(self: Any, *args: Any, invocation_seed: int | None = None, **data: Any) -> Any:
        if invocation_seed is None and _batch.seed is not None:
            invocation_seed = _generator("py_random").getrandbits(32)
        return call(self, *args, invocation_seed=invocation_seed, **data)

    return called
