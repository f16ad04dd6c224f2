"""Datasets of torch and Hugging Face as sources of a loader: the rows of ours, or of the files that they have."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch.utils.data import Subset

from dataload.catalog.sources import Source, is_of_hugging_face
from dataload.dataset import Dataset, make_dataset
from dataload.errors import ConfigError
from dataload.formats.arrow_types import canonical
from dataload.formats.schema import flatten
from dataload.map_style import MapStyle
from dataload.rows.columns import Array

# Changes of a table after which its columns are those of its file, by name: their types are compared
KEEPING = ("slice", "select", "drop", "remove_column", "cast", "replace_schema_metadata")
WRITE = "write it by to_parquet(path), and name that path"

log = logging.getLogger(__name__)


def dataset_of(source: Source | MapStyle | Subset[Any], options: dict[str, Any], *, shuffled: bool) -> MapStyle:
    """Return the dataset of a loader's source.

    Args:
        source: As in `make_loader`.
        options: Arguments of `make_dataset`.
        shuffled: Whether the loader shuffles. If not, a warning says that the rows do not come in the source's order.

    Raises:
        ConfigError: The options cannot be combined with the source, or it has rows that its files do not have.
        OriginError: The source cannot be read.
        DataError: A file or a column type is not supported.
    """
    numbers: Array | None = None  # of the rows that are selected; None: all
    while isinstance(source, Subset):
        own = _indices_of(source)
        source, numbers = source.dataset, own if numbers is None else _taken(own, numbers)  # type: ignore[assignment]
    if not isinstance(source, MapStyle) and is_of_hugging_face(source):
        return _of_hugging_face(source, options, numbers, shuffled=shuffled)
    whole = source if isinstance(source, MapStyle) else make_dataset(source, **options)
    if whole is source and options:
        raise ConfigError(f"{min(options)} cannot be combined with a dataset: pass it to make_dataset or mix")
    if numbers is None:
        return whole
    if not isinstance(whole, Dataset):
        raise ConfigError("the source is a Subset of a mixture: select the rows of its sources, and mix these")
    return _selected(whole, numbers, shuffled=shuffled)


def _indices_of(source: Subset[Any]) -> Array:
    """Return the numbers that a Subset selects of its dataset, int64 [n]."""
    kind = type(source)
    if kind.__getitem__ is not Subset.__getitem__ or kind.__getitems__ is not Subset.__getitems__:
        raise ConfigError(
            f"the source is a {kind.__name__}, whose own __getitem__ no loader calls: pass transform=, and "
            "Subset(source.dataset, source.indices)"
        )
    found = np.asarray(source.indices)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ConfigError(f"the indices of a Subset must be a list of integers, not {found.dtype} {list(found.shape)}")
    return found.astype(np.int64)


def _taken(rows: Array, numbers: Array) -> Array:
    """Return some of the rows that a source has selected."""
    try:
        return rows[numbers]
    except IndexError as error:
        raise ConfigError(f"a Subset selects a row that its source does not have: {error}") from error


def _of_hugging_face(source: Any, options: dict[str, Any], numbers: Array | None, *, shuffled: bool) -> Dataset:
    """Return the rows of a dataset of Hugging Face: those of its Arrow files that it has selected.

    Args:
        source: The dataset.
        options: Arguments of `make_dataset`.
        numbers: Which of its rows; None: all.
        shuffled: Whether the loader shuffles.
    """
    kind = type(source).__name__
    if isinstance(source, Mapping):
        raise ConfigError(f"the source is a {kind}: pass one of its splits, such as source[{next(iter(source), '')!r}]")
    if not hasattr(source, "data"):
        raise ConfigError(f"the source is an {kind}, without files of its own: name the URL of its files")
    if source.format["type"] == "custom":
        raise ConfigError(
            "the source has a set_transform, which no loader calls: pass transform=, and source.with_format(None)"
        )
    blocks = _blocks_of(source.data)
    if blocks is None:
        raise ConfigError(f"the source is a Dataset in memory, or with other columns than its files: {WRITE}")
    if not len(source):
        raise ConfigError("the source has no rows: select at least one")
    filters, files = options.pop("filters", None), list(dict.fromkeys(path for path, _ in blocks))
    columns = source.column_names if source.format["output_all_columns"] else source.format["columns"]
    dataset = make_dataset(files, **{"columns": columns, **options})
    types = {field.name: canonical(field.type) for field in flatten(source.features.arrow_schema)}
    own = _numbers_of(dataset, blocks)
    if len(own) != source.data.num_rows or any(types.get(each.name) != canonical(each.type) for each in dataset.schema):
        raise ConfigError(f"the source has other rows or types than its Arrow files, which have changed: {WRITE}")
    if source._indices is not None:  # noqa: SLF001 (nothing public has the selected rows in order)
        own = own[source._indices.column(0).to_numpy()]  # noqa: SLF001
    own = own if numbers is None else _taken(own, numbers)
    is_whole = np.array_equal(own, np.arange(len(dataset)))
    dataset = dataset if is_whole else _selected(dataset, own, shuffled=shuffled)
    return dataset if filters is None else dataset.filter(filters)


def _blocks_of(table: Any) -> list[tuple[str, list[tuple[int, int | None]]]] | None:
    """Return the file of each consecutive block of a table, and the slices that were made of its rows.

    None: a block has no file, or has other columns, such as those of several files.
    """
    found = []
    for block, *others in getattr(table, "blocks", [[table]]):
        changes = getattr(block, "replays", None) or []
        if others or not hasattr(block, "path") or any(name not in KEEPING for name, *_ in changes):
            return None
        found.append((block.path, [arguments for name, arguments, _ in changes if name == "slice"]))
    return found


def _numbers_of(dataset: Dataset, blocks: list[tuple[str, list[tuple[int, int | None]]]]) -> Array:
    """Return the numbers of the rows of these blocks in the dataset of their files."""
    ranges: dict[str, range] = {}
    first = 0
    for group in dataset.row_groups:  # Those of a file follow each other.
        start = ranges.get(group.file.path, range(first, first)).start
        first += group.rows
        ranges[group.file.path] = range(start, first)
    found = [np.empty(0, np.int64)]
    for path, slices in blocks:
        rows = ranges.get(dataset.blocks.origin.path_of(path), range(0))
        for offset, length in slices:
            rows = rows[offset : None if length is None else offset + length]
        found.append(np.arange(rows.start, rows.stop))
    return np.concatenate(found)


def _selected(dataset: Dataset, numbers: Array, *, shuffled: bool) -> Dataset:
    try:
        selected = dataset.select(numbers)
    except (ConfigError, IndexError) as error:
        raise ConfigError(f"the rows that the source selects: {error}") from error
    if not shuffled and np.any(np.diff(numbers % len(dataset)) < 0):
        log.warning("the source selects rows in an order of its own, and they come in that of the files")
    return selected
