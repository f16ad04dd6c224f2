"""The GPU benchmark on a machine without a GPU: it runs, reports that, and recognizes hidden copies."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from dataload.benchmarks import gpu


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="here it would be the whole benchmark")
def test_it_runs_without_a_gpu_and_says_so():
    command = [sys.executable, "-m", "dataload.benchmarks.gpu", "--json"]
    said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=200).stdout)
    assert said["device"].startswith("no GPU here")
    figures = {row["what"].strip(): row for row in said["rows"]}
    assert figures["batches as on the host"]["figure"] == "16 of 16"
    assert figures["batches as on the host"]["ok"]
    assert figures["of the step on a resident batch"]["asked"] == "at most 1.01 x"


def test_what_is_hidden_is_counted_once():
    assert gpu.overlap(0, 10, []) == 0
    assert gpu.overlap(0, 10, [(-5, 2), (1, 3), (8, 20)]) == 5
    assert gpu.overlap(0, 10, [(2, 4), (-1, 11), (3, 5)]) == 10
    assert gpu.overlap(0, 10, [(11, 12), (-3, 0)]) == 0


def event(kind, name, start, microseconds, num_bytes=0):
    return {"cat": kind, "name": name, "ts": start, "dur": microseconds, "args": {"bytes": num_bytes}}


def test_copies_are_read_from_the_trace():
    """Two copies of 1 MB in 20 µs each count; those of labels and those to the host do not."""
    copies = [event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", start, 20, 10**6) for start in (0, 100)]
    others = [
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 200, 5, 2048),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 300, 50, 10**6),
        {"name": "process_name", "ph": "M"},
    ]
    hidden = [event("kernel", "gemm", start, 30) for start in (0, 95)]
    good = gpu.copied_in([*copies, *others, *hidden], 55e9)
    assert [(row.figure, row.ok) for row in good] == [("55.0 GB/s", None), ("50.0 GB/s", True), ("100.0%", True)]
    bad = gpu.copied_in([*copies, *others, hidden[0]], 56e9)
    assert [(row.figure, row.ok) for row in bad] == [("56.0 GB/s", None), ("50.0 GB/s", False), ("50.0%", False)]
    assert [row.ok for row in gpu.copied_in(others, 1.0)] == [False]


def test_checksums_differ_in_another_order():
    first, second = ({"image": torch.arange(6).view(3, 2)[order]} for order in ([0, 1, 2], [0, 2, 1]))
    assert gpu.checksum(first) == gpu.checksum(dict(first))
    assert gpu.checksum(first) != gpu.checksum(second)
