"""Checkpoints: folders with all that a training run needs to resume. A rename publishes a folder when it is complete.

torch.distributed.checkpoint (DCP) writes the tensors, a share on each rank, under the names that DCP itself would use:
`dcp.load({"model": tensors}, checkpoint_id=folder)` reads the model, where `tensors` are those of `model.state_dict()`.
The file `rest.pt` holds everything else, with a meta tensor in place of each tensor. Saving raises an error for values
that are not plain data, and loading unpickles only plain data.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any
from uuid import uuid4

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from dataload.arguments import local_folder
from dataload.cache.local.setup.durable_file import sync_folder
from dataload.errors import ConfigError
from dataload.train.checkpoint.shared_folder import last_objections, require_shared
from dataload.train.checkpoint.state import (
    MetadataUnpickler,
    load_plain,
    map_leaves,
    save_plain,
    tensors,
    to_meta,
    to_plain,
)
from dataload.train.ranks.collectives import agree, is_first, on_first, process_number
from dataload.train.ranks.sharded import allocator

REST = "rest.pt"
NAME = re.compile(r"checkpoint-(\d{6,})")
UNFINISHED = ".checkpoint-"  # prefix of folders that a killed process may have left half written or half removed

log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of a run in a folder that all ranks see.

    Args:
        folder: Where the checkpoints are; None if the run saves none.
        keep: Number of latest checkpoints of this run to keep.

    Raises:
        ConfigError: `keep` is less than 1, or (on every rank) the ranks do not see the same folder.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, keep: int) -> None:
        if keep < 1:
            raise ConfigError(f"keep={keep}: at least 1 checkpoint is kept")
        self._folder = None if folder is None else local_folder("checkpoint_dir", folder)
        self._keep = keep
        agree("whether there is a checkpoint_dir", self.enabled)
        if self._folder is not None:
            require_shared(self._folder, f"{UNFINISHED}probe-")
        numbers = _numbers(self._folder)
        agree("the checkpoints in checkpoint_dir", tuple(numbers))
        self._latest = numbers[-1] if numbers else 0
        self._earlier = self._latest  # the last checkpoint of other runs, whose checkpoints stay
        # Names the drafts of this run: another one may still save into the folder, such as that of a requeued job.
        self._run: str = on_first(lambda: uuid4().hex)
        on_first(partial(self._remove, f"{UNFINISHED}*"))
        on_first(self._check_format)

    @property
    def enabled(self) -> bool:
        """Whether the run saves checkpoints."""
        return self._folder is not None

    def find(self, resume: str | os.PathLike[str] | None) -> Path | None:
        """Return the checkpoint to resume from; None if there is none.

        A run that resumes from the latest checkpoint in its own folder continues that run. Any other run is a new one.

        Args:
            resume: "auto" for the latest in the run's own folder, None for none, the path of a checkpoint, or the path
                of a folder of checkpoints, whose latest is returned.

        Raises:
            ConfigError: `resume` is a path without a checkpoint, or the checkpoint is damaged.
        """
        folder = self._folder if resume == "auto" else None if resume is None else local_folder("resume", resume)
        found = _latest_in(folder)
        if found is None and resume not in (None, "auto"):
            raise ConfigError(f"resume={str(resume)!r}: there is no checkpoint at this path")
        own = _latest_in(self._folder)
        if found is not None and own is not None and found.samefile(own):
            self._earlier = _rest_of(found).get("earlier", 0)
        elif self._latest:
            log.info("%s has checkpoints of earlier runs, up to %s: they stay", self._folder, _name(self._latest))
        return found

    def save(self, states: dict[str, Any], rest: dict[str, Any]) -> None:
        """Add a checkpoint and remove those of this run that are no longer kept.

        Args:
            states: The state_dict of each part, such as the model. DCP keeps one rank's copy of each plain tensor.
            rest: Plain data. Only that of rank 0 is saved.

        Raises:
            ConfigError: A value is neither a tensor nor plain data, or a file is missing.
            ConfigError: Another run has saved a checkpoint of the same number.
            OSError: A rank cannot write or rename a file. As all errors of this method, every rank raises it.
        """
        assert self._folder is not None
        self._latest += 1
        unfinished = self._folder / f".{_name(self._latest)}-{self._run}"
        with _dcp_errors():
            dcp_save(tensors(states), storage_writer=FileSystemWriter(unfinished))
        if problem := last_objections(lambda: on_first(lambda: _incomplete(unfinished)))[0]:
            raise ConfigError(problem)
        on_first(partial(self._publish, unfinished, states, rest))

    def _publish(self, unfinished: Path, states: dict[str, Any], rest: dict[str, Any]) -> None:
        """Complete the folder and rename it into place. Remove the checkpoints that are no longer kept."""
        assert self._folder is not None
        content = {"parts": map_leaves(states, to_meta), "earlier": self._earlier, **map_leaves(rest, to_plain)}
        save_plain(unfinished / REST, content)
        published = self._folder / _name(self._latest)
        try:
            unfinished.rename(published)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise ConfigError(
                f"{published} is the checkpoint of another run: end that run, or give each a checkpoint_dir of its own"
            ) from None
        sync_folder(self._folder)
        own = [number for number in _numbers(self._folder) if number > self._earlier]
        for number in own[: -self._keep]:
            (self._folder / _name(number)).rename(self._folder / f"{UNFINISHED}{number}-leaving")
        self._remove(f"{UNFINISHED}*-leaving")

    def _check_format(self) -> None:
        """Raise ConfigError if the metadata that this torch writes has more than MetadataUnpickler allows."""
        if self._folder is None:
            return
        probe = self._folder / f"{UNFINISHED}probe-{self._run}"
        try:
            with _dcp_errors():
                dcp_save({"x": torch.zeros(1)}, storage_writer=FileSystemWriter(probe), no_dist=True)
            _metadata(probe)
        except pickle.UnpicklingError as error:
            raise ConfigError(
                f"torch {torch.__version__} writes checkpoints that this version of dataload cannot read back "
                f"({error}): use an earlier torch or a later dataload"
            ) from error
        finally:
            self._remove(probe.name)

    def _remove(self, pattern: str) -> None:
        """Remove folders that hold no checkpoint of the run. On NFS, files that are open elsewhere stay until later."""
        for folder in self._folder.glob(pattern) if self._folder else ():
            try:
                shutil.rmtree(folder)
            except OSError as error:
                log.info("%s cannot be removed yet: %s", folder, error)


def load(path: Path, parts: dict[str, Any]) -> dict[str, Any]:
    """Load the state of each part from the checkpoint at `path`; return the rest.

    Raises:
        ConfigError: The checkpoint has other parts, or the state of another model or optimizer, or it is damaged.
    """
    rest = _rest_of(path)
    states = rest.pop("parts")
    if unmatched := (states.keys() ^ parts.keys()) - {"evaluate"}:
        raise ConfigError(
            f"{path} does not match this call of fit: only one of the two has {', '.join(sorted(unmatched))}; pass "
            "what that run passed, or give this run a checkpoint_dir of its own, or resume=None"
        )
    if "evaluate" in states.keys() ^ parts.keys() and is_first():  # It does not change the training.
        log.warning("only one of %s and this call of fit has a state of evaluate, which begins again", path)
    states = {name: state for name, state in states.items() if name in parts}
    live = tensors({name: part.state_dict() for name, part in parts.items()})
    states = map_leaves(states, allocator(live, parts.get("optimizer")))
    with _dcp_errors():
        reader = _SafeReader(path)
        with _reading(path):
            reader.read_metadata()  # here, because DCP would hide its errors
        dcp_load(tensors(states), storage_reader=reader)
    for name, state in states.items():
        try:
            _load_optimizer(path, parts[name], state) if name == "optimizer" else parts[name].load_state_dict(state)
        except torch.OutOfMemoryError:
            raise
        except (KeyError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"{path} has the state of another {name} ({' '.join(repr(error).split())}): resume with that {name}, "
                "or give this run a checkpoint_dir of its own, or resume=None"
            ) from error
    return rest


def _load_optimizer(path: Path, optimizer: Any, state: dict[str, Any]) -> None:
    """Load the state of the optimizer. Log learning rates of this call of fit that the checkpoint replaces."""
    given = _learning_rates(optimizer)
    optimizer.load_state_dict(state)
    for group in optimizer.param_groups:
        _ = [group[name] for name in optimizer.defaults]  # torch itself misses them in the first step only
    resumed = _learning_rates(optimizer)
    if resumed != given and is_first():
        log.warning("resumed with the learning rate of %s, %s, not %s of this call of fit", path, resumed, given)


def _learning_rates(optimizer: Any) -> list[float]:
    """Return the learning rate of each group of parameters, before the changes by a scheduler."""
    return [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]


class _SafeReader(FileSystemReader):
    """A DCP reader that unpickles metadata with an allow-list, and names the checkpoint if its tensors are damaged."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return _metadata(Path(self.path))

    def read_data(self, *args: Any, **kwargs: Any) -> Any:
        with _reading(Path(self.path)):
            return super().read_data(*args, **kwargs)


def _rest_of(path: Path) -> dict[str, Any]:
    with _reading(path):
        return load_plain(path / REST)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise the error of a damaged file as a ConfigError. An OSError stays one: a disk or a network may recover."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        # In a file that was cut short, torch seeks to a negative offset, which is an invalid argument.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            error.add_note(f"while {path} was read")
            raise
        raise ConfigError(
            f"{path} cannot be read ({shorten(repr(error), 160)}): if its files are damaged, remove this folder, and "
            "the run resumes from the checkpoint before"
        ) from error


def _metadata(folder: Path) -> Metadata:
    with (folder / ".metadata").open("rb") as file:
        metadata: Metadata = MetadataUnpickler(file).load()
    return metadata


def _incomplete(folder: Path) -> str | None:
    """Return a message that names the tensor files that rank 0 does not see in full; None if it sees all."""
    needed: dict[str, int] = {}
    try:
        for part in _SafeReader(folder).read_metadata().storage_data.values():
            needed[part.relative_path] = max(needed.get(part.relative_path, 0), part.offset + part.length)
        sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    except (OSError, EOFError) as error:  # A file that NFS has cached may be old.
        return f"{folder} cannot be checked and is not published: {error}"
    missing = sorted(name for name, size in needed.items() if sizes.get(name, -1) < size)
    if not missing:
        return None
    return (
        f"{folder} is not published, because rank 0 does not see all of {', '.join(missing)}: give a checkpoint_dir on "
        "a filesystem that all nodes mount"
    )


@contextmanager
def _dcp_errors() -> Iterator[None]:
    """Raise DCP's own error, which is not an Exception, as OSError, or as the ConfigError of a rank.

    Ignore its warning about a single process.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
        try:
            yield
        except CheckpointException as error:
            own, _ = error.failures.get(process_number(), (error, None))
            if not isinstance(own, (Exception, CheckpointException)):  # such as Ctrl-C, or a signal that ends the job
                raise own from None
            for failure, _ in error.failures.values():
                if isinstance(failure, ConfigError):
                    raise failure from error
            raise OSError(str(error)) from error


def _name(number: int) -> str:
    return f"checkpoint-{number:06d}"


def _latest_in(folder: Path | None) -> Path | None:
    """Return `folder` if it is a checkpoint, else the latest checkpoint in it; None if there is none."""
    if folder is not None and not (folder / REST).is_file():
        return folder / _name(numbers[-1]) if (numbers := _numbers(folder)) else None
    return folder


def _numbers(folder: Path | None) -> list[int]:
    """Return the numbers of the checkpoints in `folder`, oldest first."""
    if folder is None or not folder.is_dir():
        return []
    names = [path.parent.name for path in folder.glob(f"*/{REST}")]  # Other programs use such names, too.
    matches = (NAME.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match)
