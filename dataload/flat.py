"""The rows that `Dataset.flat_map` makes, as a dataset that counts them at the first look."""

from __future__ import annotations

import threading
from typing import Any

from rich.filesize import decimal

from dataload.catalog.description import columns_text
from dataload.catalog.opening import Call
from dataload.dataset import Dataset
from dataload.mapping.counting import with_counts
from dataload.mapping.stage import Stage, fingerprint_of
from dataload.runtime.text import counted


class FlatDataset(Dataset):
    """The rows that `flat_map` makes, which the first look at the manifest or the stages counts.

    Args:
        source: The rows that the function gets.
        stage: The stage of the function.
    """

    def __init__(self, source: Dataset, stage: Stage) -> None:
        self._source, self._stage = source, stage
        self.schema, self.blocks, self._counting = stage.schema, source.blocks, threading.Lock()
        self._columns, self.read_options = source.file_columns, source.read_options
        self.calls = (*source.calls, Call("flat_map", stage.function))

    def __getattr__(self, name: str) -> Any:
        if name not in ("manifest", "stages"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        self._count()
        return vars(self)[name]

    def __reduce__(self) -> tuple[Any, ...]:
        if self.uncounted is not None:
            return FlatDataset, (self._source, self._stage)
        return Dataset, (self.manifest, self.blocks, self._columns, self.read_options, self.stages, self.calls)

    @property
    def uncounted(self) -> Dataset | None:
        return None if "manifest" in vars(self) else self._source

    def __repr__(self) -> str:
        if (source := self.uncounted) is None:
            return super().__repr__()
        groups = source.row_groups
        cost = f"{counted(len(groups), 'row group')}, {decimal(sum(group.bytes for group in groups))} of files"
        calls = f"it will be called once for each of {counted(source.num_rows, 'row')} in {cost}"
        rows = f"about {counted(int(self._stage.stored().block_lengths.sum()), 'row')}, not counted yet"
        return f"Dataset({self._stage.title}: {rows}: {calls}; {columns_text(self.schema)})"

    def _count(self) -> None:
        with self._counting:
            if self.uncounted is None:
                return
            source, (own,) = self._source, self._source.rowstore.row_groups.caches
            stage = with_counts(own, self._stage)
            manifest = stage.flattened(fingerprint_of(source.manifest, source.stages, last=stage.key))
            vars(self).update(stages=(*source.stages, stage), manifest=manifest)
