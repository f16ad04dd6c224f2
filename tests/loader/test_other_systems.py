"""Without a cache a loader reads with the calls that macOS has, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

# Run before dataload is imported: remove what only Linux has.
WITHOUT_LINUX = """
import builtins, ctypes, fcntl, io, mmap, os, select, signal, sys
import torch  # torch itself needs some of it

for module, names in {
    os: "posix_fallocate posix_fadvise sched_getaffinity sched_setaffinity memfd_create eventfd splice copy_file_range "
        "O_TMPFILE O_DIRECT O_PATH",
    mmap: "MAP_POPULATE MADV_HUGEPAGE MADV_DONTFORK MADV_REMOVE",
    fcntl: "F_OFD_SETLK F_OFD_SETLKW F_OFD_GETLK",
    select: "epoll",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)


class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("mremap", "mallopt", "prctl", "malloc_trim", "fallocate"):
            raise AttributeError(name)
        return super().__getattr__(name)


def guarded(function):
    def call(path, *arguments, **options):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(path)
        return function(path, *arguments, **options)
    return call


ctypes.CDLL = Library
builtins.open = io.open = guarded(open)
os.open, os.listdir, os.readlink = guarded(os.open), guarded(os.listdir), guarded(os.readlink)
"""

READ = """
from dataload import make_loader

for arguments in ({}, {"num_threads": 2, "transform": dict}, {"shuffle": "full", "ragged": "flat"}):
    loader = make_loader(sys.argv[1], 64, cache=False, **arguments)
    for epoch in range(2):
        batches = list(loader)
        assert sorted(row for batch in batches for row in batch["id"].tolist()) == list(range(1000)), arguments
    assert all(batch["text"] == [f"text {row}" for row in batch["id"].tolist()] for batch in batches), arguments
print("read", loader.dataset[7]["text"])
"""


@pytest.mark.variants
@pytest.mark.parametrize("sizes", [100, 1000])
def test_a_loader_without_a_cache_needs_no_call_that_only_linux_has(tmp_path: Path, sizes: int) -> None:
    table = {
        "id": range(1000),
        "text": [f"text {row}" for row in range(1000)],
        "list": [np.arange(row % 5) for row in range(1000)],
    }
    pq.write_table(pa.table(table), tmp_path / "rows.parquet", row_group_size=sizes)
    program = [sys.executable, "-c", WITHOUT_LINUX + READ, str(tmp_path / "rows.parquet")]
    ran = subprocess.run(program, capture_output=True, text=True, check=False, timeout=200)
    assert (ran.returncode, ran.stdout) == (0, "read text 7\n"), ran.stderr
