"""Checkpoints: everything that a training run needs to go on, each a folder that is there as a whole or not at all.

Tensors are written by torch.distributed.checkpoint (DCP), each rank a share, under the names that DCP would give them:
`dcp.load({"model": model.state_dict()}, checkpoint_id=folder)` reads the model alone. All else is in `rest.pt`, with a
shell for each tensor. Nothing but plain data is unpickled, and nothing else is saved: what is there can be read.
"""

from __future__ import annotations

import os
import pickle
import random
import re
import shutil
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import is_dataclass
from enum import EnumType
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from dataload.errors import ConfigError
from dataload.train.distributed import agree, gather, is_first
from dataload.train.shared_folder import last_objections, require_shared

REST = "rest.pt"
NAME = re.compile(r"checkpoint-(\d+)")
UNFINISHED = ".checkpoint-"  # written, or removed, by a process that may have been killed at it


class Checkpoints:
    """The last `keep` checkpoints in `folder`, which all ranks see; none where it is None.

    Raises ConfigError, on every rank, when the ranks do not see one folder.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, keep: int) -> None:
        if keep < 1:
            raise ConfigError(f"keep={keep}: at least the last checkpoint is kept")
        self._folder = None if folder is None else Path(folder)
        self._keep = keep
        agree("whether there is a checkpoint_dir", self.wanted)
        if self._folder is not None:
            require_shared(self._folder, f"{UNFINISHED}probe-")
        numbers = _numbers(self._folder)
        agree("the checkpoints that are there", tuple(numbers))
        self._latest = numbers[-1] if numbers else 0
        if self._folder is not None and is_first():
            for left in self._folder.glob(f"{UNFINISHED}*"):
                shutil.rmtree(left)

    def find(self, resume: str | os.PathLike[str] | None) -> Path | None:
        """The checkpoint that `resume` means: "auto", None, one of a run, or the folder of a run, of which the last.

        Raises ConfigError when a path is given and none is there.
        """
        place = self._folder if resume == "auto" else None if resume is None else Path(resume)
        if place is not None and (place / REST).is_file():
            return place
        if numbers := _numbers(place):
            return place and place / _name(numbers[-1])
        if resume in (None, "auto"):
            return None
        raise ConfigError(f"resume={str(resume)!r}: no checkpoint there")

    @property
    def wanted(self) -> bool:
        return self._folder is not None

    def save(self, states: dict[str, Any], rest: dict[str, Any]) -> None:
        """Adds a checkpoint of states of parts, the same on all ranks, and of plain data, of which rank 0's is kept.

        Raises ConfigError, on every rank, when something in it but tensors is not plain data, or a file is missing.
        """
        assert self._folder is not None
        self._latest += 1
        unfinished = self._folder / f".{_name(self._latest)}"
        with _tamed():
            dcp_save(_tensors(states), storage_writer=FileSystemWriter(unfinished))
        # Read as torch of some day may write it, which this cannot know.
        problem = last_objections(lambda: _incomplete(unfinished) if is_first() else None)[0]
        if is_first() and problem is None:
            content = {"parts": _each(states, _shell), **_each(rest, _plain)}
            problem = _written(unfinished / REST, content)
            if problem is None:
                unfinished.rename(self._folder / _name(self._latest))
                _sync(self._folder)
                self._prune()
        if problem := gather(problem)[0]:
            raise ConfigError(problem)

    def _prune(self) -> None:
        assert self._folder is not None
        for number in _numbers(self._folder)[: -self._keep]:
            leaving = self._folder / f"{UNFINISHED}{number}-leaving"
            (self._folder / _name(number)).rename(leaving)
            shutil.rmtree(leaving)


def _incomplete(folder: Path) -> str | None:
    """Return a message that names the tensor files that rank 0 does not see in full; None if it sees all."""
    needed: dict[str, int] = {}
    try:
        for part in _PlainReader(folder).read_metadata().storage_data.values():
            needed[part.relative_path] = max(needed.get(part.relative_path, 0), part.offset + part.length)
        sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    except OSError as error:  # A listing that NFS has cached may be stale, and the other ranks wait for this one.
        return f"{folder} cannot be checked, so it becomes no checkpoint: {error}"
    lacking = sorted(name for name, size in needed.items() if sizes.get(name, -1) < size)
    if not lacking:
        return None
    return (
        f"{folder}, as rank 0 sees it, lacks all or a part of {', '.join(lacking)}, so it becomes no checkpoint: give "
        "a checkpoint_dir on a filesystem that all nodes mount"
    )


def load(path: Path, parts: dict[str, Any]) -> dict[str, Any]:
    """Restores the parts; returns the rest. Raises ConfigError when the checkpoint is not of these parts."""
    rest = _read(path / REST)
    states = rest.pop("parts")
    if odd := states.keys() ^ parts.keys():
        raise ConfigError(f"{path} and this call of fit do not both have: {', '.join(sorted(odd))}")
    states = _each(states, _filled)
    with _tamed():
        reader = _PlainReader(path)
        reader.read_metadata()  # DCP would hide what is wrong with it
        dcp_load(_tensors(states), storage_reader=reader)
    for name, part in parts.items():
        part.load_state_dict(states[name])
    return rest


class _PlainReader(FileSystemReader):
    """DCP keeps what it knows of its files in a pickle; this one makes nothing of it but records of DCP's own."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = _PlainUnpickler(file).load()
        return metadata


class _PlainUnpickler(pickle.Unpickler):
    MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    LAYOUT = ("torch.serialization", "_get_layout")  # a function, of a name

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == self.LAYOUT:
            return lambda _: torch.strided
        if (module.split(".", maxsplit=1)[0], name) == ("pathlib", "PosixPath"):
            return PurePosixPath
        if module in self.MODULES:
            found = super().find_class(module, name)
            if is_dataclass(found) or isinstance(found, EnumType):
                return found
        raise pickle.UnpicklingError(f"a checkpoint's metadata has no business with {module}.{name}")


@contextmanager
def _tamed() -> Iterator[None]:
    """DCP warns of a process without others, and its own error is no Exception."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
        try:
            yield
        except CheckpointException as error:
            raise OSError(str(error)) from error


def _name(number: int) -> str:
    return f"checkpoint-{number:06d}"


def _numbers(folder: Path | None) -> list[int]:
    """Of the checkpoints in `folder`, in the order in which they were made."""
    if folder is None or not folder.is_dir():
        return []
    matches = (NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def _sync(folder: Path) -> None:
    """The renames in `folder` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _written(path: Path, content: dict[str, Any]) -> str | None:
    """Writes it down; returns why it could not be read again, None when it can."""
    try:
        with path.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        _read(path)
    except (pickle.PickleError, TypeError, AttributeError) as error:
        odd = [f"{name} ({type(leaf).__qualname__})" for name, leaf in _leaves(content).items() if not _readable(leaf)]
        return (
            "a checkpoint holds tensors, numbers, strings, and dicts, lists and tuples of them, for nothing else is "
            f"read back safely; make plain data of {', '.join(odd) or error}"
        )
    return None


def _read(file: Path | BytesIO) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return content


def _readable(leaf: Any) -> bool:
    file = BytesIO()
    try:
        torch.save(leaf, file)
        file.seek(0)
        _read(file)
    except (pickle.PickleError, TypeError, AttributeError):
        return False
    return True


def alike(states: Iterable[Any]) -> bool:
    """Whether states of plain data and tensors are equal."""
    first, *others = map(_leaves, states)
    return all(first.keys() == other.keys() and all(map(_equal, first.values(), other.values())) for other in others)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other


def _each(state: Any, function: Callable[[str, Any], Any], name: str = "") -> Any:
    """`state` with function(name, leaf) in the place of all that is in its dicts, lists and tuples, which stay such."""
    if type(state) in (dict, OrderedDict, Counter):  # the dicts that are read back
        made = type(state)(
            {
                _plain(name, key): _each(value, function, f"{name}.{key}" if name else str(key))
                for key, value in state.items()
            }
        )
        if hasattr(state, "_metadata"):  # versions of a module's parts: without, they would take it for an old one's
            vars(made)["_metadata"] = _each(vars(state)["_metadata"], function, f"{name}._metadata")
        return made
    if type(state) in (list, tuple):
        return type(state)(_each(value, function, f"{name}.{i}") for i, value in enumerate(state))
    return function(name, state)


def copied(state: Any) -> Any:
    """A copy of a state, its tensors in the host's memory."""
    return _each(state, _copied)


def _leaves(state: Any) -> dict[str, Any]:
    """What is in the dicts, lists and tuples of `state`, by name."""
    found: dict[str, Any] = {}
    _each(state, found.__setitem__)
    return found


def _tensors(states: Any) -> dict[str, Any]:
    """The tensors of `states` by name."""
    return {name: leaf for name, leaf in _leaves(states).items() if isinstance(leaf, Tensor)}


def _plain(_: str, leaf: Any) -> Any:
    """Numpy's scalars (a scheduler's, say) as Python's, which can be read back."""
    return leaf.item() if isinstance(leaf, np.generic) else leaf


def _shell(name: str, leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) else _plain(name, leaf)


def _copied(_: str, leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else deepcopy(leaf)


def _filled(_: str, leaf: Any) -> Any:
    return torch.empty_like(leaf, device="cpu") if isinstance(leaf, Tensor) else leaf


def generators() -> dict[str, Any]:
    """The state of the generators that the user's code may draw from, numpy's global one included, as plain data."""
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate(), "numpy": numpy}


def set_generators(saved: dict[str, Any]) -> None:
    """Go on where `generators` was called."""
    torch.set_rng_state(saved["torch"])
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])  # noqa: NPY002
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
