"""Warm epochs of nested and shared values: `python -m dataload.benchmarks.rows.nested [--part NAME]`.

Each part prints a table of rows per second of CPU time, measured in turns. The epochs wait for nothing, and other jobs
of the machine disturb CPU time less than the clock.

- chat: lists of structs of two strings, beside Hugging Face datasets map-style in the same process.
- text: 500 distinct texts of 120 bytes, which Parquet stores as dictionary codes.
- flat: the workloads `table` and `tokens`. They have no nested column and must not get slower.

`--before CHECKOUT` runs the parts `text` and `flat` also with the code of another checkout.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from rich.console import Console
from rich.table import Table

from dataload.benchmarks.workloads import workloads, write
from dataload.loader import Loader, make_loader

BATCH = 256
ROUNDS = 7
PASSES = 6  # epochs of a process in one round; the fastest counts
DISTINCT, TEXT_BYTES = 500, 120


def chat(rows: int, folder: Path, before: Path | None) -> Table:  # noqa: ARG001 (no earlier version opens such files)
    """Rows per second of conversations of one to seven messages."""
    import datasets
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    datasets.disable_progress_bars()
    pq.write_table(conversations(rows), folder / "chat.parquet", row_group_size=4000)
    files = str(folder / "chat.parquet")
    others = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(folder / "huggingface"))
    sampler = BatchSampler(RandomSampler(others), BATCH, drop_last=False)
    other: Any = DataLoader(others, sampler=sampler, batch_size=None, collate_fn=lambda batch: batch)
    loader = make_loader(files, BATCH, cache_dir=str(folder / "cache"), cache_bytes="4GB")
    rates = [(rate(loader, "messages"), rate(other, "messages")) for _ in range(1 + ROUNDS)][1:]
    table = Table("round", "dataload, rows/s", "Hugging Face map-style, rows/s", "ratio")
    for number, (ours, theirs) in enumerate(rates):
        table.add_row(str(number), f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.2f}")
    return with_median(table, [ours / theirs for ours, theirs in rates])


def text(rows: int, folder: Path, before: Path | None) -> Table:
    """Rows per second, and bytes a row on disk, of text with few distinct values."""
    values = [f"{number:0{TEXT_BYTES}d}" for number in range(DISTINCT)]
    codes = pa.array(np.random.default_rng(0).integers(0, DISTINCT, rows))
    file = folder / "text.parquet"
    pq.write_table(pa.table({"text": pa.array(values).take(codes)}), file, row_group_size=100_000)
    table = in_turns("text", file, folder, before)
    caches = {tree: used_bytes(folder / tree) / rows for tree in ("now", "before") if (folder / tree).exists()}
    sizes = ", ".join(f"cache {tree} {size:.1f}" for tree, size in caches.items())
    table.caption = f"bytes a row: Parquet {file.stat().st_size / rows:.1f}, {sizes}"
    return table


def flat(rows: int, folder: Path, before: Path | None) -> Table:
    """Rows per second of columns that are not nested."""
    table = Table()
    for name in ("table", "tokens"):
        workload = workloads("small" if rows > BATCH * ROUNDS else "tiny")[name]
        write(workload, folder / name)
        table = in_turns(name, folder / name, folder / f"{name}-caches", before, table if name == "tokens" else None)
    return table


PARTS: dict[str, Callable[[int, Path, Path | None], Table]] = {"chat": chat, "text": text, "flat": flat}


def main(
    part: Annotated[list[str], typer.Option(help=", ".join(PARTS))] = list(PARTS),  # noqa: B006 (typer copies it)
    rows: Annotated[int, typer.Option(help="Rows of the parts chat and text.")] = 200_000,
    before: Annotated[Path | None, typer.Option(help="Another checkout, which is measured in turns.")] = None,
) -> None:
    for name in part:
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            Console().print(name, PARTS[name](rows, Path(folder), before))


def conversations(rows: int) -> pa.Table:
    """Return lists of one to seven messages, each with a role and 20 to 300 letters."""
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 8, rows)
    lengths = rng.integers(20, 300, int(counts.sum()))
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     etaoinshr", np.uint8)
    starts, ends = (np.concatenate(([0], np.cumsum(sizes))).astype(np.int32) for sizes in (counts, lengths))
    characters = letters[rng.integers(0, len(letters), int(ends[-1]))]
    content = pa.StringArray.from_buffers(len(lengths), pa.py_buffer(ends), pa.py_buffer(characters))
    role = pa.array(["system", "user", "assistant"]).take(pa.array(rng.integers(0, 3, len(lengths))))
    messages = pa.StructArray.from_arrays([role, content], ["role", "content"])
    return pa.table({"messages": pa.ListArray.from_arrays(pa.array(starts), messages)})


def rate(batches: Iterable[Any], column: str) -> float:
    """Return the rows of one epoch per second of CPU time."""
    started = process_time()
    count = sum(len(batch[column]) for batch in batches)
    return count / (process_time() - started)


def in_turns(name: str, source: Path, caches: Path, before: Path | None, table: Table | None = None) -> Table:
    """Return a table of the rates of processes that run this code and the code of another checkout in turns."""
    here = Path(__file__).resolve().parents[2]
    trees = {"now": here} | ({} if before is None else {"before": before.resolve()})
    table = table or Table("part", *(f"{tree}, rows/s" for tree in trees), "ratio")
    ratios = []
    for _ in range(ROUNDS):
        rates = [_in_process(name, source, caches / tree, path) for tree, path in trees.items()]
        ratios.append(rates[0] / rates[-1])
        table.add_row(name, *(f"{each:,.0f}" for each in rates), f"{ratios[-1]:.2f}" if before else "")
    return with_median(table, ratios)


def with_median(table: Table, ratios: list[float]) -> Table:
    table.add_row(*[""] * (len(table.columns) - 2), "median", f"{median(ratios):.2f}", end_section=True)
    return table


def used_bytes(folder: Path) -> int:
    """Return the bytes of the blobs of a cache."""
    return sum(path.stat().st_size for path in (folder / "blobs").rglob("*") if path.is_file())


def _in_process(name: str, source: Path, cache: Path, checkout: Path) -> float:
    """Return the rate of a process that imports `dataload` from a checkout."""
    command = [sys.executable, "-P", __file__, name, str(source), str(cache)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout)


def _print_rate(name: str, source: str, cache: str) -> None:
    group = {"x": list(workloads("tiny")[name].features)} if name == "table" else None
    loader: Loader = make_loader(source, BATCH, group=group, cache_dir=cache, cache_bytes="4GB")
    column = "text" if name == "text" else "label"
    print(max([rate(loader, column) for _ in range(1 + PASSES)][1:]))  # noqa: T201 (read by the parent)


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] in ("table", "text", "tokens"):  # a process of `in_turns`
        _print_rate(*sys.argv[1:])
    else:
        typer.run(main)
