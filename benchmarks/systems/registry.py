"""Every system by the name that tables show, where it lives and what is asked of it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal


@dataclass(frozen=True)
class Entry:
    """A system, not yet imported.

    kind: "ours", "peer" or "floor". environment: "own" is the one that runs the suite, "peers" has one for itself.
    phases: "cold", the first epoch with nothing cached, and "warm", those after it. converts: needs its own format.
    """

    name: str
    module: str
    maker: str
    kind: Literal["ours", "peer", "floor", "check"]
    environment: Literal["own", "peers"] = "own"
    phases: tuple[str, ...] = ("cold", "warm")
    workers: tuple[int, ...] = (0, 2)
    converts: bool = False

    def load(self) -> Any:
        return getattr(self._module(), self.maker)

    def converter(self) -> Any:
        return self._module().convert

    def _module(self) -> Any:
        return import_module(f"dataload.benchmarks.systems.{self.module}")


ENTRIES = (
    Entry("dataload", "ours", "Dataload", "ours"),
    Entry("pyarrow.dataset, s3fs", "arrow", "S3fs", "peer"),
    Entry("pyarrow.dataset, blockcache", "arrow", "Blockcache", "peer"),
    Entry("Hugging Face, streaming", "huggingface", "Streaming", "peer", "peers"),
    Entry("Hugging Face, map-style", "huggingface", "MapStyle", "peer", "peers"),
    Entry("MosaicML Streaming", "mosaic", "Mosaic", "peer", "peers", converts=True),
    Entry("LitData", "litdata", "LitData", "peer", "peers", converts=True),
    Entry("WebDataset", "webdataset", "WebDataset", "peer", "peers", converts=True),
    Entry("DataLoader over rows", "torch_rows", "TorchRows", "peer"),
    Entry("floor: ranged GETs", "floors", "Saturator", "floor", phases=("cold",), workers=(0,)),
    Entry("floor: decode", "floors", "Decode", "floor", phases=("cold",), workers=(0,)),
    Entry("floor: gather", "floors", "Gather", "floor", phases=("warm",), workers=(0,)),
    Entry("dataload, slowed", "ours", "Slowed", "check"),
)


def named(name: str) -> Entry:
    """The entry of that name. Raises KeyError."""
    return {entry.name: entry for entry in ENTRIES}[name]
