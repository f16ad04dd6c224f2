"""Warm epochs of tokens with a ledger beside the same ones without it, in turn. In CPU time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import process_time

from dataload import World, make_dataset, make_loader, mix
from dataload.benchmarks.workloads import Workload

ROUNDS = 9  # of two epochs with and two without it: the median of the ratios counts
BATCH, BATCHES = 256, 2000  # rows repeat, so that an epoch of little data is as long as a usual one


def test_ledger(
    files: Callable[[str], tuple[Workload, Path]], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The cost of the ledger: its line at the start, the digest of the rows, its seal at the end."""
    _, folder = files("tokens")
    tokens = make_dataset(folder, cache_dir=tmp_path / "cache")
    loader = make_loader(mix({"tokens": tokens}, num_rows=BATCH * BATCHES), BATCH, world=World(0, 1))

    def epoch(ledger: Path | None) -> float:
        before = process_time()
        for _ in loader.batches_on(ledger_dir=ledger):
            pass
        return process_time() - before

    epoch(tmp_path / "run")
    ratios, seconds = [], list[float]()
    for _ in range(ROUNDS):
        with_it, without, without_too, with_it_too = (
            epoch(tmp_path / "run" if kept else None) for kept in (True, False, False, True)
        )
        ratios.append((with_it + with_it_too) / (without + without_too))
        seconds += [without, without_too]
    record_property("batches of an epoch", len(loader))
    record_property("milliseconds without", f"{1000 * median(seconds):.1f}")
    record_property("cost of the ledger", f"{100 * (median(ratios) - 1):+.2f} %")
