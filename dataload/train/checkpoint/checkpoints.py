"""Checkpoints: folders with all that a training run needs to resume. A rename publishes a folder when it is complete.

torch.distributed.checkpoint (DCP) writes the tensors, a share on each rank, under the names that DCP itself would use:
`dcp.load({"model": tensors}, checkpoint_id=folder)` reads the model, where `tensors` are those of `model.state_dict()`.
The file `state.json` holds everything else, and where each tensor is. The file `manifest.json` has the size and the
checksum of every other file: they are verified, each by one rank, before any of them is trusted. No pickle is read but
those of tensors, by `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar, cast
from uuid import uuid4

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.futures import Future

from dataload.cache.local.run_lock import RunLock, wait_for
from dataload.cache.origin.lease import Lease
from dataload.cache.origin.store_path import DamagedFile, StorePath
from dataload.errors import ConfigError
from dataload.runtime.redact import redacted
from dataload.train.checkpoint import manifest, tensor_file, tensor_layout
from dataload.train.checkpoint.places import (
    NAME,
    STATE,
    TENSORS,
    AnyPath,
    Place,
    StoreFileSystem,
    has_parts,
    has_tensors,
    name_of,
    path_of,
    place_of,
    sizes_in,
)
from dataload.train.checkpoint.shared_folder import last_objections
from dataload.train.checkpoint.state import from_json, map_leaves, tensors, to_json, to_meta
from dataload.train.ranks.collectives import agree, is_first, on_all, on_each, on_first, process_count, process_number
from dataload.train.ranks.sharded import allocator

ACCELERATOR_ERROR = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)  # Older releases lack it.

T = TypeVar("T")

log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of a run in a folder that all ranks see.

    Args:
        folder: Where the checkpoints are; None if the run saves none.
        keep: Number of latest checkpoints of this run to keep.

    Attributes:
        folder: As above.

    Raises:
        ConfigError: `keep` is less than 1, or (on every rank) the ranks do not see the same folder, or another run
            saves into it.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, keep: int) -> None:
        if keep < 1:
            raise ConfigError(f"keep={keep}: at least 1 checkpoint is kept")
        self.folder = on_all(lambda: None if folder is None else path_of("checkpoint_dir", folder))
        self._place = None if self.folder is None else place_of(self.folder)
        self._keep = keep
        agree("whether there is a checkpoint_dir", self.enabled)
        agree("whether checkpoint_dir is a URL", isinstance(self.folder, StorePath))
        self._lock: RunLock | Lease | None = None
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        if self._place is not None:
            self._place.open()
            self._acquire(self._place)
        numbers = on_all(lambda: [] if self._place is None else self._place.numbers())
        agree("the checkpoints in checkpoint_dir", tuple(numbers))
        self._numbers = numbers  # of the checkpoints that are there, as far as this run knows
        self._latest = numbers[-1] if numbers else 0
        self._earlier = self._latest  # the last checkpoint of other runs, whose checkpoints stay
        self._run: str = on_first(lambda: uuid4().hex)  # names the drafts of this run
        on_first(lambda: None if self._place is None else self._place.sweep())

    def _acquire(self, place: Place) -> None:
        """Acquire the lock of the place on rank 0. A run that is about to end, as before a requeue, has some time."""
        self._lock = place.lock()
        if (holder := wait_for(self._lock, f"{place.path} is that of another run", on_first)) is not None:
            raise ConfigError(
                f"checkpoint_dir {str(place.path)!r} is that of another run, {holder}: end that run, or give each a "
                "checkpoint_dir of its own"
            )

    def close(self) -> None:
        """Let another run save into the folder."""
        if self._lock is not None:
            self._lock.release()

    @property
    def enabled(self) -> bool:
        """Whether the run saves checkpoints."""
        return self.folder is not None

    @property
    def ledger_folder(self) -> Path | None:
        """Where a run that has no other folder keeps its ledger; None: a store has no files that grow."""
        return self.folder if isinstance(self.folder, Path) else None

    def find(self, resume: str | os.PathLike[str] | None) -> AnyPath | None:
        """Return the checkpoint to resume from; None if there is none.

        A run that resumes from the latest checkpoint in its own folder continues that run. Any other run is a new one.

        Args:
            resume: "auto" for the latest in the run's own folder, None for none, the path of a checkpoint, or the path
                of a folder of checkpoints, whose latest is returned.

        Raises:
            ConfigError: `resume` is a path without a checkpoint, or another one on another rank, or a file of the
                checkpoint is damaged. The message names the latest earlier checkpoint that is whole.
            OSError: A file cannot be read.
        """
        own, found, name = on_all(lambda: self._search(resume))
        agree("the checkpoint to resume from", name)  # Each rank verifies a part of it, at a path of its own.
        if found is None and resume not in (None, "auto"):
            raise ConfigError(f"resume={redacted(resume)!r}: there is no checkpoint at this path")
        if found is not None:
            _require_whole(found)
        if found is not None and own is not None and _is_same(found, own):
            self._earlier = _state_of(found)[1]
        elif self._latest:
            log.info("%s has checkpoints of earlier runs, up to %s: they stay", self.folder, name_of(self._latest))
        return found

    def _search(self, resume: str | os.PathLike[str] | None) -> tuple[AnyPath | None, AnyPath | None, str | None]:
        """Return the latest checkpoint in the folder, the one to resume from, and a name that only its copies have."""
        found = own = _latest_in(self.folder)
        if resume != "auto":
            found = None if resume is None else _checkpoint_at(path_of("resume", resume))
        if found is None:
            return own, None, None
        if not (found / manifest.MANIFEST).is_file():
            return own, found, found.name
        [entry] = manifest.entries(found, [manifest.MANIFEST]).values()
        return own, found, f"{found.name}, {entry.xxh3}"

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
        assert self._place is not None
        place, run = self._place, self._run
        self._latest = on_first(lambda: self._claim(place))
        draft = place.draft(self._latest, run)
        try:
            writer = _Writer(draft, place.filesystem())
            with _dcp_errors(), tensor_file.unsummed():
                metadata = dcp_save(tensors(states), storage_writer=writer)
            needed = tensor_layout.files_of(metadata)
            written = {k: v for each in on_each(lambda: writer.written) for k, v in each.items()}
            files = {name: written[name] for name in [*needed, TENSORS]}
            if problem := last_objections(lambda: on_first(lambda: _incomplete(draft, needed, files)))[0]:
                raise ConfigError(problem)
            content = {"parts": map_leaves(states, to_meta), "earlier": self._earlier, **rest}
            on_first(lambda: self._publish(place, content, tensor_layout.to_json(metadata), files))
        except OSError as error:
            on_first(lambda: place.abandon(self._latest, run))
            what = f"{error.strerror or error} while a checkpoint was saved"
            raise OSError(error.errno or errno.EIO, what, str(self.folder)) from error

    def _claim(self, place: Place) -> int:
        """Return the number of the next checkpoint. Raise ConfigError if another run has taken the place over."""
        assert self._lock is not None
        self._lock.check()
        return place.claim(self._latest + 1, self._run)

    def _publish(self, place: Place, content: Any, layout: Any, files: dict[str, manifest.Entry]) -> None:
        """Complete the checkpoint, unless another run has taken the place over. Remove those that are not kept."""
        assert self._lock is not None
        self._lock.check()
        state = json.dumps({"state": to_json(content), "tensors": layout}).encode()
        place.publish(self._latest, self._run, state, files)
        self._numbers.append(self._latest)
        own = [number for number in self._numbers if number > self._earlier]
        self._numbers = own[-self._keep :]
        place.remove(own[: -self._keep])


def load(path: AnyPath, parts: dict[str, Any], read: Callable[[dict[str, Any]], T]) -> T:
    """Load the state of each part from the checkpoint at `path`, which `find` has verified; return read(the rest).

    Raises:
        ConfigError: The checkpoint has other parts, or the state of another model or optimizer, or nonsense.
    """
    states, _, rest, layout = _state_of(path)
    with _reading(path):
        found = read(rest)
    if unmatched := (states.keys() ^ parts.keys()) - {"evaluate"}:
        raise ConfigError(
            f"{path} does not match this call of fit: only one of the two has {', '.join(sorted(unmatched))}; pass "
            "what that run passed, or give this run a checkpoint_dir of its own, or resume=None"
        )
    if "evaluate" in states.keys() ^ parts.keys() and is_first():  # It does not change the training.
        log.warning("only one of %s and this call of fit has a state of evaluate, which begins again", path)
    states = {name: state for name, state in states.items() if name in parts}
    live = tensors({name: part.state_dict() for name, part in parts.items()})
    with _reading(path):
        files = manifest.read(path)
        metadata = tensor_layout.from_json(layout, files)
        for name, tensor in tensors(states).items():  # before they are allocated: a size may be planted
            if tensor.is_meta and list(tensor.shape) != list(layout[name]["shape"]):
                raise ValueError(f"tensor {name} has shape {list(tensor.shape)}, and another one in its files")
    states = map_leaves(states, allocator(live, parts.get("optimizer")))
    try:
        with _dcp_errors():
            dcp_load(tensors(states), storage_reader=_Reader(path, metadata, files))
    except DamagedFile as error:
        raise _refusal(path, str(error)) from error
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
    return found


def _load_optimizer(path: AnyPath, optimizer: Any, state: dict[str, Any]) -> None:
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


class _Writer(FileSystemWriter):
    """A DCP writer that raises the error of the filesystem, in whose place torch.save raises one of its own format.

    Args:
        path: Where the files are written.
        filesystem: That of a `Place`. It hashes files on their way, so that none is read back.
    """

    def __init__(self, path: AnyPath, filesystem: Any) -> None:
        super().__init__("", sync_files=isinstance(path, Path))
        self.fs, self.path, self.written = filesystem, cast(Path, path), filesystem.written

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().write_data(*args, **kwargs)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None


class _Reader(FileSystemReader):
    """A DCP reader of tensors that are known, which names the checkpoint if it cannot read one."""

    def __init__(self, path: AnyPath, metadata: Metadata, files: dict[str, manifest.Entry]) -> None:
        super().__init__("")
        self.path = self._source = cast(Path, path)
        self._metadata = metadata
        if isinstance(path, StorePath):
            self.fs = cast(FileSystem, StoreFileSystem(files))

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        """Read the tensors, each into its place. DCP itself has torch.load make one, which it copies."""
        by_file: dict[str, list[tuple[int, int, ReadItem]]] = {}
        for item in plan.items:
            stored = self.storage_data[item.storage_index]
            by_file.setdefault(stored.relative_path, []).append((stored.offset, stored.length, item))
        filesystem: Any = self.fs
        if isinstance(filesystem, StoreFileSystem):
            filesystem.wanted = {
                name: [(start, start + length) for start, length, _ in each] for name, each in by_file.items()
            }
        with _reading(self._source):
            for name, items in by_file.items():
                with filesystem.create_stream(filesystem.concat_path(self.path, name), "rb") as stream:
                    for start, length, item in sorted(items, key=itemgetter(0)):
                        target = planner.resolve_tensor(item).detach()
                        part = tensor_file.Part(stream, start, length)
                        tensor_file.read_into(target, part, item.storage_offsets, item.lengths)
                        planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _state_of(path: AnyPath) -> tuple[dict[str, Any], int, dict[str, Any], Any]:
    """Return the state of each part, the number of the last checkpoint of earlier runs, the rest, and the layout."""
    with _reading(path):
        content = json.loads((path / STATE).read_bytes())
        rest = from_json(content["state"])
        return dict(rest.pop("parts")), int(rest.pop("earlier")), rest, content["tensors"]


@contextmanager
def _reading(path: AnyPath) -> Iterator[None]:
    """Raise the error of a file that makes no sense as a ConfigError. An OSError stays one: a disk may recover."""
    try:
        yield
    except (torch.OutOfMemoryError, ACCELERATOR_ERROR, MemoryError):
        raise
    except DamagedFile:
        raise
    except OSError as error:
        error.add_note(f"while {path} was read")
        raise
    except Exception as error:
        raise ConfigError(
            f"{path} cannot be read ({shorten(repr(error), 160)}), although its checksums are right: another program "
            "wrote it, or another version; resume from another checkpoint"
        ) from error


def _require_whole(path: AnyPath) -> None:
    """Raise ConfigError on every rank if a file of the checkpoint is damaged.

    In a store, the tensors are verified when they are loaded: that spares to fetch them twice.
    """
    if problem := _damage(path, blocks=isinstance(path, Path)):
        raise _refusal(path, problem)


def _refusal(path: AnyPath, problem: str) -> ConfigError:
    """Return the error about a damaged checkpoint, which names the latest earlier one that is whole."""
    match = NAME.fullmatch(path.name)
    numbers = on_first(lambda: place_of(path.parent).numbers())  # Another rank may have others.
    earlier = [path.with_name(name_of(each)) for each in numbers if not match or each < int(match[1])]
    whole = next((each for each in reversed(earlier) if each != path and _damage(each) is None), None)
    way_out = "no earlier checkpoint beside it is whole: pass resume=None to start again"
    if whole is not None:
        way_out = f"{whole.name} is whole: to resume from it, remove {path.name}, or pass resume={str(whole)!r}"
    return ConfigError(f"{path} is damaged: {problem}; {way_out}")


def _damage(path: AnyPath, *, blocks: bool = True) -> str | None:
    """Return what is wrong with a checkpoint, of which each rank verifies a part; None if it is whole."""
    part, parts, needed = process_number(), process_count(), (STATE, TENSORS)
    found = on_each(lambda: manifest.damage(path, needed, part, parts, blocks=blocks))
    return next((each for each in found if each is not None), None)


def _is_same(path: AnyPath, other: AnyPath) -> bool:
    return path == other if isinstance(path, StorePath) else isinstance(other, Path) and path.samefile(other)


def _incomplete(folder: AnyPath, needed: dict[str, int], files: dict[str, manifest.Entry]) -> str | None:
    """Return a message that names the tensor files that rank 0 does not see in full; None if it sees all."""
    try:
        sizes = sizes_in(folder)
    except OSError as error:  # A file that NFS has cached may be old.
        return f"{folder} cannot be checked and is not published: {error}"
    missing = sorted(name for name, least in needed.items() if not least <= files[name].size == sizes.get(name))
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
                if isinstance(failure, (ConfigError, OSError)):
                    raise failure from error
            raise OSError(str(error)) from error


def _latest_in(folder: AnyPath | None) -> AnyPath | None:
    """Return the latest checkpoint in `folder`; None if there is none."""
    numbers = [] if folder is None else place_of(folder).numbers()
    return folder / name_of(numbers[-1]) if folder is not None and numbers else None


def _checkpoint_at(path: AnyPath) -> AnyPath | None:
    """Return the latest checkpoint in `path`, else `path` if it is one, perhaps renamed; None if there is none."""
    if (latest := _latest_in(path)) is not None:
        return latest
    named = NAME.fullmatch(path.name) and has_parts(path)
    both = all((path / name).is_file() for name in (manifest.MANIFEST, STATE))
    return path if named or both or has_tensors(path) else None
