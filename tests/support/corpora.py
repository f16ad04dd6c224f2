"""Reads every file of ../shared/corpora in processes of their own, and compares the rows with those of pyarrow.

Run as a program, it reads all files and prints what became of them: `make corpora`. It fails unless each file gives
pyarrow's rows, is refused in one `DataError` that names it, or is in `EXCEPTIONS`.
"""

from __future__ import annotations

import math
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dataload import make_dataset
from dataload.cache.config import CacheConfig
from dataload.errors import DataError
from dataload.formats.arrow_types import is_bytes, is_list, number, storage

ROOT = Path(__file__).parents[3] / "shared" / "corpora"
SECONDS, MEMORY = 60, 1 << 30  # of a process
ROWS_AT_ONCE = 1 << 14
EXCEPTIONS = {
    "arrow-testing/data/arrow-ipc-file/clusterfuzz-testcase-minimized-arrow-ipc-file-fuzz-5654157323403264": (
        "it has no rows, so that the error of its union names the column only"
    ),
}
"""Why the outcome for a file differs from pyarrow's, by its path below `ROOT`."""


class Outcome(NamedTuple):
    """What reading a file ended in: "rows", "refused", "error", "killed", "time" or "memory"; and its text."""

    kind: str
    text: str


def files() -> list[str]:
    """Return the paths of all files, below `ROOT`."""
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file())


def by_arrow(path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of pyarrow, as batches of a loader have them, with None for each null."""
    table = _table(path)
    while any(_has_members(storage(kind)) for kind in table.schema.types):
        table = pa.table(list(map(_struct, table.columns)), table.column_names).flatten()
    columns = {name: _values(column) for name, column in zip(table.column_names, table.columns, strict=True)}
    for row in range(len(table)):
        yield {name: values[row] for name, values in columns.items()}


def _table(path: str) -> pa.Table:
    with Path(path).open("rb") as file:
        head = file.read(6)
    if head[:4] == b"PAR1":
        with pq.ParquetFile(path, page_checksum_verification=True) as parquet:
            unit = None
            if any(b"org.apache.spark" in key for key in parquet.metadata.metadata or {}):
                unit = "us"
        with pq.ParquetFile(path, page_checksum_verification=True, coerce_int96_timestamp_unit=unit) as parquet:
            return parquet.read()
    opened = pa.ipc.open_file if head == b"ARROW1" else pa.ipc.open_stream
    with pa.memory_map(path) as source, opened(source) as reader:
        table = reader.read_all()
    table.validate(full=True)
    return table


def _has_members(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind) and kind.num_fields)


def _struct(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column whose values are structs with the type of a struct, and others unchanged."""
    kind = storage(column.type)
    if kind == column.type or not _has_members(kind):
        return column
    is_extension = isinstance(column.type, pa.BaseExtensionType)
    chunks = [chunk.storage if is_extension else chunk.dictionary.take(chunk.indices) for chunk in column.chunks]
    return _struct(pa.chunked_array(chunks, None if chunks else kind))


def _values(column: pa.ChunkedArray) -> list[Any]:
    return [_value(scalar, column.type) for chunk in column.chunks for scalar in chunk]


def _value(scalar: pa.Scalar, kind: pa.DataType) -> Any:
    """Return a value as batches have it."""
    stored, types = storage(kind), pa.types
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name != "arrow.uuid":
        return _value(scalar.value, kind.storage_type) if scalar.is_valid else None
    if types.is_dictionary(kind) and _is_single(stored):
        return _value(scalar.value, stored)
    if types.is_run_end_encoded(kind) and _is_single(stored):
        return _value(pa.scalar(scalar.as_py(), stored), stored)
    if types.is_decimal(stored):
        return _rounded(float(scalar.as_py())) if scalar.is_valid else math.nan
    if types.is_floating(stored):
        return float(scalar.as_py()) if scalar.is_valid else math.nan
    if not scalar.is_valid:
        return None
    if types.is_temporal(stored) and number(stored) is not None:
        return int(scalar.value)
    if (is_list(stored) or types.is_fixed_size_list(stored)) and _is_dense(stored.value_type):
        found = [_value(each, stored.value_type) for each in scalar.values]
        return None if None in found else found
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return scalar.as_buffer().to_pybytes()


def _rounded(value: float) -> float:
    """Return a float of 12 digits: beyond 15, decimals are rounded in several ways."""
    return float(f"{value:.12g}")


def _is_single(kind: pa.DataType) -> bool:
    return number(kind) is not None or is_bytes(kind)


def _is_dense(kind: pa.DataType) -> bool:
    kind = storage(kind)
    return number(kind) is not None or bool(pa.types.is_fixed_size_list(kind) and _is_dense(kind.value_type))


def by_dataload(path: str, cache: CacheConfig | bool) -> Iterator[dict[str, Any]]:
    """Yield the rows of a dataset, with None for each null."""
    dataset = make_dataset(path, cache=cache or False, null_masks=True)
    for first in range(0, len(dataset), ROWS_AT_ONCE):
        batch = dataset.__getitems__(range(first, min(len(dataset), first + ROWS_AT_ONCE)))
        masks = {name: values for name, values in batch.columns.items() if name.endswith(".is_null")}
        columns = {name: _plain(values) for name, values in batch.columns.items() if name not in masks}
        for name in [name for name in columns if pa.types.is_decimal(storage(dataset.schema.field(name).type))]:
            columns[name] = [_rounded(value) for value in columns[name]]
        for row in range(len(batch)):
            yield {
                name: None if f"{name}.is_null" in masks and masks[f"{name}.is_null"][row] else values[row]
                for name, values in columns.items()
            }


def _plain(values: Any) -> list[Any]:
    if isinstance(values, torch.Tensor):
        return list(values.tolist())
    return [_plain_value(value) for value in values]


def _plain_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return bytes(value) if isinstance(value, memoryview) else value


def outcome(read: Callable[[], Iterator[dict[str, Any]]], name: str) -> Outcome:
    """Return what reading a file ends in, in a process of its own. name: of the file, which an error must have."""
    with tempfile.TemporaryFile() as found:
        pid = os.fork()
        if not pid:
            _child(read, name, found.fileno())
        began = time.monotonic()
        while True:
            ended, status, usage = os.wait4(pid, os.WNOHANG)
            if ended:
                break
            if time.monotonic() - began > SECONDS:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return Outcome("time", f"more than {SECONDS} s")
            time.sleep(0.002)
        if usage.ru_maxrss << 10 > MEMORY:
            return Outcome("memory", f"{usage.ru_maxrss >> 10} MiB")
        if status:
            return Outcome("killed", f"status {status}")
        found.seek(0)
        kind, _, text = found.read().decode(errors="surrogateescape").partition("\n")
        return Outcome(kind, text)


def _child(read: Callable[[], Iterator[dict[str, Any]]], name: str, descriptor: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    try:
        lines = [repr(sorted(row.items())) for row in read()]
        result = "rows\n" + "\n".join(lines)
    except DataError as error:
        text = " ".join(str(error).split())
        result = f"refused\n{text}" if name in text and "\n" not in str(error) else f"error\nwithout the name: {text}"
    except MemoryError as error:
        result = f"memory\n{error}"
    except BaseException as error:  # whatever it is, it is the outcome
        result = f"error\n{type(error).__name__}: {' '.join(str(error).split())}"
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(result.encode(errors="surrogateescape"))
    os._exit(0)


class Verdict(NamedTuple):
    """What became of a file: "equal", "refused" or "wrong"; and why."""

    kind: str
    text: str


def verdict(file: str) -> Verdict:
    """Return what becomes of a file, without a cache, and twice with one."""
    path, name = str(ROOT / file), Path(file).name
    with tempfile.TemporaryDirectory() as folder:
        cache = CacheConfig(cache_dir=folder, cache_bytes=64 << 20)

        def cached() -> Iterator[dict[str, Any]]:
            list(by_dataload(path, cache))
            return by_dataload(path, cache)

        results = {
            "without a cache": outcome(lambda: by_dataload(path, False), name),
            "with a cache": outcome(cached, name),
        }
    has_rows = any(found.kind == "rows" for found in results.values())
    expected = outcome(lambda: by_arrow(path), name) if has_rows else Outcome("refused", "")
    for how, found in results.items():
        if found.kind == "rows" and expected != found:
            return Verdict("wrong", f"{how}, other rows than pyarrow: {_difference(expected, found)}")
        if found.kind not in ("rows", "refused"):
            return Verdict("wrong", f"{how}, {found.kind}: {found.text}")
    kinds = {found.kind for found in results.values()}
    if len(kinds) > 1:
        return Verdict("wrong", f"{ {how: found.kind for how, found in results.items()} }")
    if kinds == {"rows"}:
        return Verdict("equal", f"{len(expected.text.splitlines())} rows")
    return Verdict("refused", results["with a cache"].text)


def _difference(expected: Outcome, found: Outcome) -> str:
    if expected.kind != "rows":
        return f"pyarrow: {expected.kind} {expected.text[:200]}"
    mine, theirs = found.text.splitlines(), expected.text.splitlines()
    if len(mine) != len(theirs):
        return f"{len(mine)} and {len(theirs)} rows"
    return next(
        f"row {row}: {a[:300]} and {b[:300]}" for row, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b
    )


def main(names: Sequence[str]) -> int:
    """Read the files whose paths have one of these names in them, or all. Return the exit status."""
    verdicts = {file: verdict(file) for file in files() if not names or any(name in file for name in names)}
    refused = defaultdict[str, list[str]](list)
    for file, (kind, text) in verdicts.items():
        if kind == "refused":
            where = str(ROOT / file)
            refused[re.sub(r"\d+", "N", text.replace(where, "FILE"))].append(file)
    for text, among in sorted(refused.items(), key=lambda item: -len(item[1])):
        print(f"{len(among):5} refused: {text[:160]} ({among[0]})")
    wrong = {file: text for file, (kind, text) in verdicts.items() if kind == "wrong"}
    for file, text in wrong.items():
        print(f"{'listed' if file in EXCEPTIONS else 'WRONG'}: {file}: {EXCEPTIONS.get(file, text)}")
    counts = Counter(kind for kind, _ in verdicts.values())
    listed = sum(file in EXCEPTIONS for file in wrong)
    print(
        f"{len(verdicts)} files: {counts['equal']} equal, {counts['refused']} refused by name, {listed} listed, "
        f"{len(wrong) - listed} wrong"
    )
    return int(len(wrong) > listed)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
