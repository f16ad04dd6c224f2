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
        kind: "ours", "peer", "floor", or "check" for a check of the benchmark itself.
        shuffle: The range over which rows are shuffled.
        environment: "own" for the environment of the suite, "peers" for the separate one.
        phases: "cold" for the first epoch with an empty cache, "warm" for later epochs.
        converts: Whether it needs its own format.
        parallel: Whether it has workers.
        whole: Whether it reads all rows.
    """

    name: str
    module: str
    maker: str
    kind: Literal["ours", "peer", "floor", "check"]
    shuffle: str
    environment: Literal["own", "peers"] = "own"
    phases: tuple[str, ...] = ("cold", "warm")
    converts: bool = False
    parallel: bool = True
    whole: bool = True

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
BUFFER = "files, then rows within a buffer"
ALL = "all rows"

ENTRIES = (
    Entry("dataload", "ours", "Dataload", "ours", WINDOW),
    Entry("pyarrow.dataset, s3fs", "arrow", "S3fs", "peer", WINDOW),
    Entry("pyarrow.dataset, blockcache", "arrow", "Blockcache", "peer", WINDOW),
    Entry("pyarrow.dataset, its own S3", "arrow", "Native", "peer", WINDOW),
    Entry(
        "Hugging Face, streaming", "huggingface", "Streaming", "peer", "row groups, then rows within a buffer", "peers"
    ),
    Entry("Hugging Face, map-style", "huggingface", "MapStyle", "peer", ALL, "peers"),
    Entry(
        "MosaicML Streaming",
        "mosaic",
        "Mosaic",
        "peer",
        "files, then rows within a range of them",
        "peers",
        converts=True,
    ),
    Entry("LitData", "litdata", "LitData", "peer", "files, then rows within each", "peers", converts=True),
    Entry("WebDataset", "webdataset", "WebDataset", "peer", BUFFER, "peers", converts=True),
    Entry("SPDL over rows", "spdl", "Spdl", "peer", ALL, "peers"),
    Entry("DataLoader over rows", "torch_rows", "TorchRows", "peer", ALL),
    Entry("floor: first GET", "floors", "FirstGet", "floor", "none", phases=("cold",), parallel=False, whole=False),
    Entry("floor: ranged GETs", "floors", "Saturator", "floor", "none", phases=("cold",), parallel=False),
    Entry("floor: decode", "floors", "Decode", "floor", "none", phases=("cold",), parallel=False),
    Entry("floor: gather", "floors", "Gather", "floor", ALL, phases=("warm",), parallel=False),
    Entry("dataload, slowed", "ours", "Slowed", "check", WINDOW),
)


def named(name: str) -> Entry:
    """Return the entry of a name. Raise KeyError for an unknown name."""
    return {entry.name: entry for entry in ENTRIES}[name]
