"""The registry of systems: names in tables, modules and properties."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Entry:
    """A system that is not imported yet.

    Args:
        name: Name in tables.
        module: Module in this package.
        maker: Class in the module.
        kind: "ours", "peer", or "reference" for a bound, or for what one does without any of them.
        shuffle: The range over which rows are shuffled.
        settings: Its settings in words, for the report.
        environment: "own" for the environment of the suite, "peers" for the separate one.
        workers: Worker processes of a host with one rank. More ranks share them; each has one at least.
        converts: Whether it needs its own format.
    """

    name: str
    module: str
    maker: str
    kind: Literal["ours", "peer", "reference"]
    shuffle: str
    settings: str
    environment: Literal["own", "peers"] = "own"
    workers: int = 0
    converts: bool = False

    def load(self) -> Any:
        return getattr(self._module(), self.maker)

    def converter(self) -> Any:
        return self._module().convert

    def source(self) -> Path:
        """Return the file of its module."""
        return Path(__file__).with_name(f"{self.module}.py")

    def _module(self) -> Any:
        return import_module(f"dataload.benchmarks.systems.{self.module}")


WINDOW = "row groups, then rows within a window of them"
ALL = "all rows"

ENTRIES = (
    Entry("dataload", "ours", "Dataload", "ours", WINDOW, "defaults of make_loader; the cache on the local disk"),
    Entry(
        *("MosaicML Streaming", "mosaic", "Mosaic", "peer", "files, then rows within a range of them"),
        "MDS shards of up to 64 MiB, zstd if the Parquet files are; kept on the local disk",
        environment="peers",
        workers=2,
        converts=True,
    ),
    Entry(
        *("LitData", "litdata", "LitData", "peer", "files, then rows within each"),
        "chunks of up to 64 MiB, not compressed, decoded whole; kept on the local disk",
        environment="peers",
        workers=2,
        converts=True,
    ),
    Entry(
        *("WebDataset", "webdataset", "WebDataset", "peer", "files, then rows within a buffer"),
        "tar shards of up to 64 MiB, kept on the local disk; 256 small rows in each member",
        environment="peers",
        workers=2,
        converts=True,
    ),
    Entry(
        *("Hugging Face, streaming", "huggingface", "Streaming", "peer", "row groups, then rows within a buffer"),
        "row groups as shards, a buffer of 1,000 to 10,000 rows, batches from Arrow tables; keeps nothing",
        environment="peers",
        workers=2,
    ),
    Entry(
        *("Hugging Face, map-style", "huggingface", "MapStyle", "peer", ALL),
        "load_dataset to Arrow files on the local disk, whole batches from Arrow tables",
        environment="peers",
    ),
    Entry(
        *("pyarrow", "arrow", "Arrow", "peer", WINDOW),
        "pyarrow.dataset with Arrow's S3 client, a shuffle pool of 16 row groups; keeps nothing",
    ),
    Entry(
        *("rows in memory", "torch_rows", "TorchRows", "reference", ALL),
        "torch's DataLoader over all rows in the memory of each rank",
    ),
    Entry(
        *("local files", "torch_files", "TorchFiles", "reference", "row groups, then rows within each"),
        "files copied to the local disk first; torch's DataLoader with a DistributedSampler over their row groups",
        workers=2,
    ),
    Entry(
        *("the wire", "wire", "Saturator", "reference", "ranges of bytes"),
        "ranged GETs of all bytes in every epoch, 16 connections, nothing is decoded",
    ),
)


def named(name: str) -> Entry:
    """Return the entry of a name. Raise KeyError for an unknown name."""
    return {entry.name: entry for entry in ENTRIES}[name]
