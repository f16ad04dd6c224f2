"""Checks of the arguments of `make_loader` that need no dataset, so that they run before the first request."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from dataload.arguments import local_folder, unknown_keyword, whole_number
from dataload.cache.config import CacheConfig
from dataload.cache.options import CacheOptions
from dataload.errors import ConfigError
from dataload.loader.transform import Transform
from dataload.samplers.order import SHUFFLES
from dataload.world import World

_OWN = ("dataset", "sampler", "batch_sampler")  # arguments of torch's DataLoader that the loader sets itself


class LoaderOptions(CacheOptions, total=False):
    """Arguments of `make_loader` beside its own: those of a cache, and those that torch's DataLoader gets."""

    timeout: float
    worker_init_fn: Callable[[int], object] | None
    multiprocessing_context: Any
    generator: Any
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Check the arguments of `make_loader`.

    Args:
        arguments: All of them by name. "for_torch" has those for `torch.utils.data.DataLoader`.

    Raises:
        ConfigError: An argument is out of range or unknown, or two of them exclude each other.
    """
    for name, least in (
        *(
            ("batch_tokens", 1),
            ("pad_to_multiple", 1),
            ("batch_size", 1),
            ("window", 1),
            ("num_streams", 1),
            ("prefetch", 1),
            ("metrics_port", 1),
        ),
        *(("num_workers", 0), ("num_threads", 0), ("seed", None)),
    ):
        if arguments[name] is not None or name == "seed":
            whole_number(name, arguments[name], least)
    stall = arguments["stall_warning"]
    if not isinstance(stall, (int, float)) or not stall > 0:
        raise ConfigError(f"stall_warning={stall!r} must be seconds above 0; math.inf logs no line")
    _check_batches(arguments)
    for name, allowed in (("ragged", ("list", "flat")), ("on_error", ("raise", "skip")), ("shuffle", tuple(SHUFFLES))):
        if arguments[name] not in allowed:
            raise ConfigError(f"{name}={arguments[name]!r} is unknown: use one of {', '.join(map(repr, allowed))}")
    for name in ("transform", "collate_fn"):
        if arguments[name] is not None and not callable(arguments[name]):
            raise ConfigError(f"{name}={arguments[name]!r} must be a function")
    Transform(arguments["transform"])  # raises if it needs other arguments
    _check_group(arguments["group"])
    for name, kind, expected in (
        *(("world", World, "a World"), ("mesh", DeviceMesh, "a DeviceMesh")),
        ("drop_last", bool, "True or False"),
    ):
        if arguments[name] is not None and not isinstance(arguments[name], kind):
            raise ConfigError(f"{name}={arguments[name]!r} must be {expected}")
    workers, dataloader_kwargs = arguments["num_workers"], arguments["for_torch"]
    _check_threads(workers, arguments["num_threads"], dataloader_kwargs.get("timeout"))
    _check_places(arguments["device"], arguments["stats_dir"])
    _check_for_torch(workers, dataloader_kwargs, arguments)


def _check_batches(arguments: Mapping[str, Any]) -> None:
    size, tokens, multiple = (arguments[name] for name in ("batch_size", "batch_tokens", "pad_to_multiple"))
    if (size is None) == (tokens is None):
        given = "neither is given" if size is None else "both are given"
        raise ConfigError(f"batch_size or batch_tokens says how many rows a batch has, and {given}: pass one of them")
    if tokens is None:
        for name in ("length", "pad_to_multiple"):
            if arguments[name] is not None:
                raise ConfigError(f"{name}={arguments[name]!r} belongs to batch_tokens: pass both, or leave it out")
        return
    if not isinstance(arguments["length"], str):
        raise ConfigError(
            f"length={arguments['length']!r}: batch_tokens needs the name of the column that has the length of each "
            "row, or lists whose lengths count"
        )
    if multiple is not None and tokens < multiple:
        raise ConfigError(f"batch_tokens={tokens} holds no row padded to pad_to_multiple={multiple}: raise it")
    if (arguments["num_streams"] or 1) > 1:
        raise ConfigError(
            f"num_streams={arguments['num_streams']}: batches of batch_tokens are of all rows of a window: leave it out"
        )


def _check_group(group: Any) -> None:
    if group is None:
        return
    lists = group.values() if isinstance(group, Mapping) else [None]
    if not all(isinstance(columns, Collection) and not isinstance(columns, str) for columns in lists):
        raise ConfigError(f"group={group!r} must map names to lists of columns, such as {{'x': ['price', 'age']}}")


def _check_threads(workers: int, threads: int | None, timeout: Any) -> None:
    if workers and threads is not None:
        raise ConfigError(
            f"num_workers={workers} and num_threads={threads}: use one of them: threads for a transform that "
            "releases the interpreter lock, workers otherwise"
        )
    if threads == 0 and timeout:
        raise ConfigError(
            f"timeout={timeout} and num_threads=0: the loop itself makes the batches, so it cannot time out; leave "
            "one of them out"
        )


def _check_places(device: Any, stats_dir: Any) -> None:
    if stats_dir is not None:
        local_folder("stats_dir", stats_dir)
    try:
        kind = torch.device("cpu" if device is None else device).type
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r} is not a device of torch: {str(error).splitlines()[0]}") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={str(device)!r}: torch finds no GPU here: leave device out")


def _check_for_torch(workers: int, dataloader_kwargs: Mapping[str, Any], own_names: Iterable[str]) -> None:
    known = [name for name in inspect.signature(DataLoader.__init__).parameters if name not in ("self", *_OWN)]
    for name in dataloader_kwargs:
        if name in _OWN:
            raise ConfigError(f"{name}= is not an argument of make_loader, which makes its own: leave it out")
        if name not in known:
            otherwise = "it is an argument of neither make_loader nor DataLoader"
            of_cache = (each.name for each in fields(CacheConfig))
            raise unknown_keyword(name, [*own_names, *of_cache, *known], otherwise)
    if dataloader_kwargs.get("generator") is not None:
        raise ConfigError(
            "generator= would not change the order, which seed= and the epoch determine: pass seed=, and draw in "
            "transform(batch, rng)"
        )
    if not dataloader_kwargs.get("in_order", True):
        raise ConfigError("in_order=False: an epoch cannot be resumed if its batches are out of order; leave it out")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the loader's own DataLoader will warn
            DataLoader(range(1), num_workers=workers, **dataloader_kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"torch's DataLoader does not take these arguments: {error}") from error
