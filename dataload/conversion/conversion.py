"""A conversion: a source, a destination and what was done so far."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from dataload.arguments import local_folder, whole_number, with_plain_arguments
from dataload.conversion.destination import BUCKETS, STATE, Destination, part_name
from dataload.conversion.kinds import KINDS, kind_of
from dataload.conversion.reading import Position, Reading
from dataload.conversion.row_sums import row_sum
from dataload.conversion.shuffled import Shuffled
from dataload.conversion.source import Files, Source
from dataload.conversion.writer import GATHERED_BYTES, SAMPLE_BYTES, Writer, storage_of, stored_schema
from dataload.errors import ConfigError, DataError, DataloadError
from dataload.runtime.executor import DaemonExecutor, awaited

MODULUS = 1 << 64
BATCH_BYTES, MOST_ROWS, BUFFER_BYTES = 8 << 20, 1 << 16, 1 << 20  # of what is read again
IN_WORK = re.compile(rf"_({STATE}|part-\d+\.parquet)\.tmp|{BUCKETS}/.*", re.DOTALL)


@dataclass(frozen=True)
class Converted:
    """What a conversion has written.

    Attributes:
        format: The kind of source, such as "parquet".
        rows: Rows of the source, and of the files.
        files: How many files there are.
        bytes: Their size.
        checksum: The checksum of the rows of the source and of those that the files hold: both are equal.
    """

    format: str
    rows: int
    files: int
    bytes: int
    checksum: str


@with_plain_arguments
def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    shuffle: int | None = None,
    format: str | None = None,  # noqa: A002 (as pyarrow calls it)
    storage_options: Mapping[str, Any] | None = None,
    to_storage_options: Mapping[str, Any] | None = None,
    scratch_dir: str | os.PathLike[str] | None = None,
) -> Converted:
    r"""Write a dataset as Parquet that trains well: row groups of about 32 MB in files of about 512 MB.

    Run it again after an interruption: it goes on, and a finished conversion is a no-op. At the end, rows and a
    checksum of the files, which are read again, are compared with those of the source.

    Args:
        source: A file, a folder or a glob of Parquet, Arrow IPC or Feather, JSON lines, CSV, folders of images (each is
            a class), or tar files of WebDataset; or a folder of MDS, of LitData or of Hugging Face's `save_to_disk`.
        destination: An empty folder.
        shuffle: A seed, to shuffle all rows. None: keep the order.
        format: The kind of source, if files of several kinds are there: "parquet", "arrow", "json", "csv", "images",
            "webdataset", "mds", "litdata" or "huggingface". None: as the files say.
        storage_options: Options of the filesystem of the source, as for `make_dataset`.
        to_storage_options: Those of the destination; default: those of the source if both have one protocol.
        scratch_dir: Where a shuffle keeps all rows for a while; default: in a destination on this machine.

    Returns:
        Rows, files, bytes and the checksum.

    Raises:
        ConfigError: An argument cannot work, the kind of source is unknown, the destination has other files, or another
            conversion is writing there.
        DataError: A file of the source cannot be read.
        OriginError: A store failed, or a file was replaced meanwhile.
        DataloadError: The files hold other rows than the source.

    Examples:
        >>> import tempfile, pathlib
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "rows.csv").write_text("x,y\n1,a\n2,b\n")
        >>> convert(folder / "rows.csv", folder / "rows").rows
        2
    """
    conversion = Conversion(
        source,
        destination,
        shuffle=shuffle,
        format=format,
        storage_options=storage_options,
        to_storage_options=to_storage_options,
        scratch_dir=scratch_dir,
    )
    return conversion.run()


class Conversion:
    """See `convert`, whose arguments it takes. It reads and writes no rows before `run`.

    Attributes:
        bytes: What `run` reads, for progress.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        destination: str | os.PathLike[str],
        *,
        shuffle: int | None = None,
        format: str | None = None,  # noqa: A002 (as pyarrow calls it)
        storage_options: Mapping[str, Any] | None = None,
        to_storage_options: Mapping[str, Any] | None = None,
        scratch_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self._seed = None if shuffle is None else whole_number("shuffle", shuffle)
        if to_storage_options is None and _protocol(source) == _protocol(destination):
            to_storage_options = storage_options
        self._files = Files(os.fspath(source), storage_options)
        self._to = Destination(os.fspath(destination), to_storage_options)
        _check_apart(self._files, self._to)
        self._format = kind_of(self._files, format)
        self._scratch = self._scratch_folder(scratch_dir)
        self._begun()
        self.bytes = (KINDS[self._format].passes + (self._seed is not None)) * self._files.num_bytes

    def run(self, advance: Callable[[int], object] = lambda _: None) -> Converted:
        """Convert, or go on with it. `advance` is called with the bytes of the source that are read.

        Raises:
            DataError: A file of the source cannot be read.
            OriginError: A store failed.
            DataloadError: The files hold other rows than the source.
        """
        if not (state := self._begun())["is_done"]:
            with self._to.locked():
                state = self._begun()  # Another conversion may have ended meanwhile.
                if not state["is_done"]:
                    self._files.advance = advance
                    self._convert(state)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        return Converted(
            self._format,
            sum(each["rows"] for each in state["files"]),
            len(state["files"]),
            sum(each["bytes"] for each in state["files"]),
            f"{sum(each['sum'] for each in state['files']) % MODULUS:016x}",
        )

    def _begun(self) -> dict[str, Any]:
        """Return the state of this conversion, which may not have begun yet.

        Raises:
            ConfigError: The destination has other files, lacks one of this conversion, or is that of another one.
        """
        begun = {"source": self._files.identity, "format": self._format, "shuffle": self._seed}
        new = {**begun, "files": [], "position": [0, 0], "rows": 0, "sum": 0, "is_done": False}
        before, found = self._to.sizes(), self._to.state()  # in this order: another conversion may add files
        self._check_destination(before, found)
        if differs := [name for name, value in begun.items() if found is not None and found[name] != value]:
            raise ConfigError(
                f"{self._to.url} was begun with another {' and '.join(differs)}: name an empty folder, or empty it"
            )
        return found or new

    def _convert(self, state: dict[str, Any]) -> None:
        """Do what the state lacks."""
        source = KINDS[self._format].open(self._files)
        if not source.schema.names:
            raise DataError(f"{self._files.url} has no columns: check what the files hold")
        schema = stored_schema(source.schema)
        self._to.save(state)  # Now the folder is known as this conversion's.
        if self._seed is None or self._scratch is None:
            self._write(source, schema, state)
            rows, total = state["rows"], state["sum"]
        else:
            shuffled = Shuffled(source, schema, self._seed, self._scratch)
            rows, total = shuffled.deal(self._files.told)
            self._write(shuffled, schema, state)
        _check(self._to.url, rows, total, state["files"])
        if not rows:
            raise DataError(f"{self._files.url} has no rows: check what the files hold")
        state["is_done"] = True
        self._to.save(state)

    def _write(self, source: Source, schema: pa.Schema, state: dict[str, Any]) -> None:
        """Write the files that are missing. The state has a file once it was read again, while the next is written."""
        reading = Reading(source, schema, Position(*state["position"]), self._files.told)
        storage = storage_of(reading.peek(SAMPLE_BYTES))
        threads = DaemonExecutor(2, "dataload-convert-sums")
        rows, total, number = state["rows"], state["sum"], len(state["files"])
        check: tuple[Future[dict[str, Any]], dict[str, Any]] | None = None

        def note(checked: Future[dict[str, Any]], then: dict[str, Any]) -> None:
            state.update(then, files=[*state["files"], awaited(checked)])
            self._to.save(state)

        while reading.peek(1).num_rows:
            name, first_row = part_name(number), rows
            with self._to.create(name) as file, Writer(file, schema, storage) as writer:
                while not writer.is_full:
                    table = reading.take(writer.wanted_rows, GATHERED_BYTES)
                    if not table.num_rows:
                        break
                    added = threads.submit(self._sum, table, rows)
                    writer.write(table)
                    rows, total = rows + table.num_rows, (total + awaited(added)) % MODULUS
            if check is not None:
                note(*check)
            then = {"position": list(reading.position), "rows": rows, "sum": total}
            check, number = (threads.submit(self._read_again, name, first_row), then), number + 1
        if check is not None:
            note(*check)

    def _sum(self, rows: pa.Table, first_row: int) -> int:
        return row_sum(rows, first_row if self._seed is None else None)

    def _read_again(self, name: str, first_row: int) -> dict[str, Any]:
        """Return name, rows, bytes and checksum of a file."""
        from pyarrow import parquet

        rows = total = 0
        with self._to.open(name) as file:
            written = parquet.ParquetFile(file, buffer_size=BUFFER_BYTES)
            size = sum(written.metadata.row_group(group).total_byte_size for group in range(written.num_row_groups))
            wanted = max(1, min(MOST_ROWS, BATCH_BYTES * written.metadata.num_rows // max(1, size)))
            for batch in written.iter_batches(wanted):
                total = (total + self._sum(pa.Table.from_batches([batch]), first_row + rows)) % MODULUS
                rows += batch.num_rows
            return {"name": name, "rows": rows, "bytes": file.seek(0, os.SEEK_END), "sum": total}

    def _check_destination(self, sizes: dict[str, int], state: dict[str, Any] | None) -> None:
        """Raise ConfigError if the destination has other files than this conversion's, or lacks one of them."""
        done = {} if state is None else {each["name"]: each["bytes"] for each in state["files"]}
        own = {*done, STATE}
        if state is not None:  # A kill may leave one that was not read again yet, and the next one.
            own |= {part_name(len(done)), part_name(len(done) + 1)}
        if others := [name for name in sizes if name not in own and not IN_WORK.fullmatch(name)]:
            raise ConfigError(f"{self._to.url} has {others[0]}, which convert has not written: name an empty folder")
        now = self._to.sizes() if done else {}
        if lost := [name for name, size in done.items() if now.get(name) != size]:
            raise ConfigError(f"{self._to.url} has lost {lost[0]}: empty the folder, and convert again")

    def _scratch_folder(self, scratch_dir: str | os.PathLike[str] | None) -> Path | None:
        """Return the folder of the buckets of a shuffle; None without one."""
        if self._seed is None:
            return None
        if scratch_dir is not None:
            key = hashlib.blake2b(repr((self._to.url, self._files.identity, self._seed)).encode(), digest_size=8)
            return local_folder("scratch_dir", scratch_dir) / f"dataload-convert-{key.hexdigest()}"
        if self._to.origin.is_local:
            return Path(self._to.root) / BUCKETS
        raise ConfigError(
            f"a shuffle to {self._to.url} needs scratch_dir: name a folder of this machine with room for all rows"
        )


def _protocol(url: str | os.PathLike[str]) -> str:
    return os.fspath(url).rpartition("://")[0]


def _check_apart(files: Files, to: Destination) -> None:
    """Raise ConfigError if source or destination lies in the other."""
    if files.origin.address != to.origin.address:
        return
    inner = any(each.path.startswith(f"{to.root}/") for each in files.objects.values())
    if inner or f"{to.root}/".startswith(f"{files.root}/"):
        raise ConfigError(f"{files.url} and {to.url}: one lies in the other: name a folder beside the source")


def _check(url: str, rows: int, total: int, files: list[dict[str, Any]]) -> None:
    """Raise DataloadError unless the files have these rows."""
    written, found = sum(each["rows"] for each in files), sum(each["sum"] for each in files) % MODULUS
    if (written, found) != (rows, total):
        raise DataloadError(
            f"{url} does not hold the rows of the source: {written:,} rows with the checksum {found:016x}, and not "
            f"{rows:,} with {total:016x}: empty the folder and convert again, on another disk if that repeats"
        )
