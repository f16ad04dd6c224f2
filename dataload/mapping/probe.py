"""The columns that a function returns, and their sizes, from a sample that each host maps once."""

from __future__ import annotations

import base64
import json
import logging
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import pyarrow as pa

from dataload.cache.blocks.reader import Blocks, Object
from dataload.catalog.footer_cache import Metadata
from dataload.catalog.manifest import Manifest
from dataload.errors import ConfigError, DataError
from dataload.formats.null_types import has_null_type
from dataload.formats.schema import ambiguous, fields_of, flatten, mask_name, needs_mask
from dataload.mapping.forms import Form, Made, joined
from dataload.mapping.map_maker import CHUNK_ROWS, head_of
from dataload.mapping.places import mapped_of, rows_text, where
from dataload.mapping.running import ChunkError, Function, Runner, bytes_of, mapped_blobs, records_of, rows_in
from dataload.mapping.stage import Counts, Stage, UserFunction, given_and_kept, key_of, schema_of
from dataload.mapping.values import Returned
from dataload.rows.read_options import ReadOptions
from dataload.rows.row_group_cache import RowGroupCache
from dataload.rows.size_sampling import spread
from dataload.runtime.cached_property import cached_property

if TYPE_CHECKING:
    from dataload.rows.row_block import Records

log = logging.getLogger(__name__)

VERSION = 6
SAMPLE_ROWS = 32  # of each sampled row group


def _warn_of_nulls(sample: _Sample, source: pa.Schema) -> None:
    """Warn of columns whose type is open in part: if later rows have values there, the loop ends."""
    for field in (sample.schema.field(name) for name in sample.made):
        if has_null_type(field.type) and not (field.name in source.names and source.field(field.name).equals(field)):
            text = "column %r is %s, because the sample of map has only None or empty lists there: return %s"
            log.warning(text, field.name, field.type, "pa.array(values, type)")


class _Sample(NamedTuple):
    """What a sample of mapped rows tells.

    Attributes:
        schema: The schema of the mapped rows.
        row_bytes: The mean bytes of a value, by column.
        made: The columns that the function made.
        masks: The columns that mark their nulls.
        ratio: The rows that the function makes of one.
    """

    schema: pa.Schema
    row_bytes: dict[str, float]
    made: tuple[str, ...]
    masks: tuple[str, ...]
    ratio: float

    @classmethod
    def of(cls, data: memoryview) -> Self:
        """Return the sample that `Probe.sampled` returned as JSON."""
        found = json.loads(bytes(data))
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(found["schema"])))
        return cls(schema, found["row_bytes"], tuple(found["made"]), tuple(found["masks"]), found["ratio"])


class _FailedError(Exception):
    """The function failed with a row of the sample. The others, or at least one, tell the columns.

    Args:
        text: What failed.
        sample: What `Probe.sampled` returns.
    """

    def __init__(self, text: str, sample: bytes) -> None:
        super().__init__(text)
        self.sample = sample


@dataclass(frozen=True)
class Probe:
    """Finds out what a function makes, by a sample of a dataset's rows.

    Args:
        source: The row groups that are mapped.
        manifest: The dataset.
        schema: Its columns.
        blocks: The cache.
        columns: The columns that the function gets; None: all.
        read_options: How the values that the function makes are read.
        is_flat: Whether the function may make more or fewer rows than it gets.
    """

    source: RowGroupCache
    manifest: Manifest
    schema: pa.Schema
    blocks: Blocks
    columns: Sequence[str] | None
    read_options: ReadOptions
    is_flat: bool

    def stage(self, function: Function, version: Any, processes: int | None) -> Stage:
        """Return the map of the dataset. The arguments are those of `Dataset.map`.

        Raises:
            ConfigError: An argument cannot work, or the dataset has no row.
            DataError: The function raised, or it returned what no column can hold.
            OriginError: The origin failed.
        """
        if processes is not None and (not isinstance(processes, int) or isinstance(processes, bool) or processes < 1):
            raise ConfigError(f"processes={processes!r} must be a number of at least 1, or None for threads")
        chosen = self._chosen
        if not self.manifest.num_rows:
            raise ConfigError("map needs at least one row, and the dataset has none")
        user = UserFunction.of(function, version)
        first = Object(self.manifest.row_groups[0].file.path, 0, self.manifest.fingerprint)
        masks = " masks" * self.read_options.null_masks
        what = f"map {VERSION} {key_of(user, chosen, is_flat=self.is_flat)} {self.source.plan.digest}{masks}"
        failed = None
        try:
            sample = Metadata(self.blocks, first, what, _Sample.of).get_or_make_once(lambda: self.sampled(user))
        except _FailedError as error:  # The row may work the next time, so it is not cached.
            sample, failed = _Sample.of(memoryview(error.sample)), str(error)
        _warn_of_nulls(sample, self.schema)
        user.sources.forget()
        if processes is not None:
            try:  # Now, the error costs no time. The calls in the sample may have made what it names.
                pickle.dumps(user)
            except ConfigError as error:
                raise ConfigError(f"{error}, or leave processes= out") from error.__cause__
        counts = Counts(sample.ratio) if self.is_flat else None
        fill_null, errors = self.read_options.fill_null, self.read_options.errors
        told = sample.schema, sample.row_bytes, sample.made, sample.masks, fill_null, failed
        return Stage(user, chosen, processes, self.manifest, *told, errors=errors, counts=counts)

    @cached_property
    def _chosen(self) -> tuple[str, ...] | None:
        if self.columns is None:
            return None
        if isinstance(self.columns, str) or not self.columns:
            raise ConfigError(f"columns={self.columns!r} must be a list of at least one name")
        return tuple(Manifest(self.schema, (), "").select(self.columns))

    def sampled(self, user: UserFunction) -> bytes:
        """Return the schema of the mapped rows, the columns that the function made, and mean sizes, as JSON."""
        layout = self.source.plan.layout
        given, kept = given_and_kept(layout.fields, self._chosen, is_flat=self.is_flat)
        runner = Runner(user.call, given, kept, self.schema, is_flat=self.is_flat, errors=self.read_options.errors)
        title = f"{'flat_map' if self.is_flat else 'map'} {user.name}"
        samples: list[tuple[dict[str, Returned], int]] = []  # of at least one row each
        row_bytes = dict[str, float]()
        failed: DataError | None = None
        cause: BaseException | None = None
        called = 0
        for number, records in self._records(samples):
            try:
                found = list(runner.sample(records))
            except ChunkError as error:
                rows = rows_text(self.manifest.selection, number, 0, len(records), error.row)
                place = f"{where(self.manifest.row_groups[number], self.blocks)} {rows}"
                problem = DataError(f"{place}: {title}: {error.text}")
                if error.row is None or self.is_flat:
                    raise problem from error.__cause__
                failed, cause = failed or problem, cause or error.__cause__
                found = _of_working(runner, records, problem)
            called += len(records)
            counted = ((sample, rows_in(sample) if self.is_flat else rows) for sample, rows in found)
            samples += [(sample, count) for sample, count in counted if count]
            _add_largest(row_bytes, runner.kept_bytes(records))
        if failed is not None and not samples:
            raise failed from cause
        if not user.is_same:
            raise ConfigError(
                f"map cannot tell one version of {user.name} from another: it changes an object that it refers to, "
                "such as a global. Pass version=, and change it whenever the function's results change"
            )
        if not samples:
            raise ConfigError(f"{title} makes no row of any of the {self.manifest.num_rows:,} rows: return some")
        try:
            made = _made_of([sample for sample, _ in samples], self.schema, self.read_options)
            for sample, count in samples:
                _add_largest(row_bytes, {name: bytes_of(each) / count for name, each in made.fitted(sample).items()})
        except DataError as error:
            raise DataError(f"{title}: {error}") from error
        masks = pa.schema([pa.field(mask, pa.bool_()) for mask in made.masks])
        mapped = schema_of(self.schema, layout, kept, pa.schema([*made.schema, *masks]))
        encoded = base64.b64encode(mapped.serialize()).decode()
        told = {"schema": encoded, "made": made.schema.names, "masks": made.masks, "row_bytes": row_bytes}
        told["ratio"] = sum(count for _, count in samples) / max(1, called)
        if failed is not None:
            raise _FailedError(str(failed), json.dumps(told).encode())
        return json.dumps(told).encode()

    def _records(self, samples: Sequence[Any]) -> Iterator[tuple[int, Records]]:
        """Yield the first rows of some row groups; then, as long as there are no samples, the rows of all."""
        filled = np.flatnonzero(self.manifest.block_lengths).tolist()
        for number in (filled[position] for position in spread(len(filled))):
            yield number, next(self._of(number, SAMPLE_ROWS))[:SAMPLE_ROWS]
        if not self.is_flat:
            return
        for number in filled:
            chunks = self._of(number, CHUNK_ROWS)
            while not samples and (records := next(chunks, None)) is not None:
                yield number, records

    def _of(self, number: int, rows: int) -> Iterator[Records]:
        """Yield the rows of a row group that are mapped, about `rows` at a time."""
        place = where(self.manifest.row_groups[number], self.blocks)
        mask, layout = mapped_of(self.manifest.selection, self.source.selection, number), self.source.plan.layout
        for blob, count, chosen in mapped_blobs(head_of(self.source, number, rows), mask, layout, place):
            for first in range(0, len(chosen), rows):
                yield records_of(blob, count, layout, chosen[first : first + rows])


def _made_of(samples: Sequence[Mapping[str, Returned]], source: pa.Schema, read_options: ReadOptions) -> Made:
    """Return the columns that hold the values of all samples.

    Raises:
        DataError: The samples differ in their columns or their types, or batches cannot hold a type.
    """
    for sample in samples:
        for name in sample.keys() ^ samples[0].keys():
            raise DataError(f"it returned the column {name!r} for some rows only: return the same columns")
    fields = [joined(name, (Form.of(sample[name]) for sample in samples), source) for name in samples[0]]
    schema = pa.schema(fields)
    for text in ambiguous(schema).values():
        raise DataError(f"it returned columns of which {text}: return one")
    schema = flatten(schema)
    own, names = fields_of(schema), set(schema.names)
    known = {mask_name(field) for field in own}  # The function may return the masks that it got.
    masks = [mask_name(field) for field in own if needs_mask(field) and field.name not in known]
    added = tuple(name for name in masks if name not in names) if read_options.null_masks else ()
    return Made(schema, added, read_options.fill_null)


def _of_working(runner: Runner, records: Records, problem: DataError) -> list[tuple[dict[str, Returned], int]]:
    """Return what the function makes of the rows with which it works. Raise the problem if it is of no row."""
    try:
        return list(runner.sample(records, of_working=True))
    except ChunkError as error:
        raise problem from error.__cause__


def _add_largest(means: dict[str, float], found: Mapping[str, float]) -> None:
    """Add mean sizes: the largest, because a cache of exactly the mean size would be too small by chance."""
    means |= {name: max(size, means.get(name, 0.0)) for name, size in found.items()}
