"""Processor time per gigabyte of reads from S3, Google Cloud Storage, Azure and a web server, in a loader's requests.

The servers are processes of their own, whose time does not count. That of the stores other than S3 is beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import process_time
from typing import Any

import emulators
import fsspec
import numpy as np
import pytest

from dataload.benchmarks.systems.base import BUCKET
from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.origin.origin import Origin
from dataload.formats.range_stream import LARGEST_PIECE
from dataload.runtime.executor import awaited

OBJECTS, OBJECT_BYTES, ROUNDS = 32, LARGEST_PIECE, 5
BODY = np.random.default_rng(0).bytes(OBJECT_BYTES)
NAMES = [f"{number}.bin" for number in range(OBJECTS)]
seconds_of_s3: dict[str, float] = {}  # per gigabyte
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of the clients that write the objects

Store = tuple[Any, list[str]]
"""A filesystem, and the paths of the objects."""


@contextmanager
def s3(origin_of: Callable[[], Any], name: str = "s3") -> Iterator[Store]:
    origin = origin_of()
    folder = origin.folder / BUCKET / "stores"
    folder.mkdir(exist_ok=True)
    for each in NAMES:
        (folder / each).write_bytes(BODY)
    options = origin.storage_options if name == "s3" else {}
    root = f"{BUCKET}/stores" if name == "s3" else f"{origin.endpoint_url}/{BUCKET}/stores"
    yield fsspec.filesystem(name, **options), [f"{root}/{each}" for each in NAMES]


@contextmanager
def emulated(start: Callable[[], Any]) -> Iterator[Store]:
    with start() as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # else gcsfs waits for a server of gRPC
        for name, value in running.environment().items():
            patch.setenv(name, value)
        filesystem = running.filesystem()
        filesystem.mkdir("stores")
        for each in NAMES:
            filesystem.pipe_file(f"stores/{each}", BODY)
        yield fsspec.filesystem(running.protocol, **running.options()), [f"stores/{each}" for each in NAMES]


STORES: dict[str, Callable[[Any], Any]] = {
    "s3": s3,
    "http": lambda origin_of: s3(origin_of, "http"),
    "gcs": lambda _: emulated(emulators.google),
    "azure": lambda _: emulated(emulators.azure),
}


@pytest.mark.parametrize("store", STORES)
def test_reads(benchmark: Any, origin_of: Any, store: str, per_second: Any, record_property: Any) -> None:
    benchmark.group = "reads from stores"
    memory, starts = memoryview(bytearray(OBJECTS * OBJECT_BYTES)), range(0, OBJECTS * OBJECT_BYTES, OBJECT_BYTES)
    with STORES[store](origin_of) as (filesystem, paths):
        blocks = Blocks.uncached(Origin(filesystem))
        objects = [Object.of(blocks.origin.info(path)) for path in paths]

        def read() -> None:
            parts = [(each, memory[start : start + OBJECT_BYTES]) for each, start in zip(objects, starts, strict=True)]
            for request in [blocks.submit(blocks.fetch_into, each, 0, part) for each, part in parts]:
                awaited(request)

        read()  # opens the connections
        assert memory[-OBJECT_BYTES:] == BODY
        before = process_time()
        benchmark.pedantic(read, rounds=ROUNDS)
        spent = (process_time() - before) / ROUNDS / len(memory) * 1e9
    per_second("MB", len(memory) / 1e6)
    record_property("CPU-s/GB", f"{spent:.2f}")
    if store == "s3":
        seconds_of_s3[store] = spent
    elif seconds_of_s3:
        record_property("of S3's", f"{spent / seconds_of_s3['s3']:.2f} ×")
