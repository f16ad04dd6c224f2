"""The columns that a function returns, and their sizes, from a sample that each host maps once."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import pyarrow as pa

from dataload.cache.blocks.reader import Blocks, Object
from dataload.catalog.footer_cache import Metadata
from dataload.catalog.manifest import Manifest
from dataload.errors import ConfigError, DataError
from dataload.formats.schema import fields_of
from dataload.mapping.forms import joined_forms
from dataload.mapping.map_maker import head_of
from dataload.mapping.places import mapped_of, rows_text, where
from dataload.mapping.running import ChunkError, Function, Runner, mapped_blobs, records_of
from dataload.mapping.stage import Stage, UserFunction, given_and_kept, key_of, schema_of
from dataload.rows.row_group_cache import RowGroupCache
from dataload.rows.size_sampling import spread

if TYPE_CHECKING:
    from dataload.rows.row_block import Records

VERSION = 2
SAMPLE_ROWS = 32  # of each sampled row group


def stage_of(
    function: Function,
    source: RowGroupCache,
    manifest: Manifest,
    schema: pa.Schema,
    blocks: Blocks,
    *,
    columns: Sequence[str] | None,
    version: Any,
    processes: int | None,
) -> Stage:
    """Return the map of a dataset. A sample of its rows tells the columns.

    Args:
        function: The function.
        source: The row groups that are mapped.
        manifest: The dataset.
        schema: Its columns.
        blocks: The cache.
        columns: As for `Dataset.map`.
        version: As for `Dataset.map`.
        processes: As for `Dataset.map`.

    Raises:
        ConfigError: An argument cannot work, or the dataset has no row.
        DataError: The function raised, or it returned what no column can hold.
        OriginError: The origin failed.
    """
    if processes is not None and (not isinstance(processes, int) or isinstance(processes, bool) or processes < 1):
        raise ConfigError(f"processes={processes!r} must be a number of at least 1, or None for threads")
    if columns is not None and (isinstance(columns, str) or not columns):
        raise ConfigError(f"columns={columns!r} must be a list of at least one name")
    chosen = None if columns is None else tuple(Manifest(schema, (), "").select(columns))
    if not manifest.num_rows:
        raise ConfigError("map needs at least one row, and the dataset has none")
    user = UserFunction.of(function, version)
    first = Object(manifest.row_groups[0].file.path, 0, manifest.fingerprint)
    what = f"map {VERSION} {key_of(user, chosen)} {source.plan.digest}"
    failed = None
    try:
        sample = Metadata(blocks, first, what, _Sample.of).get_or_make_once(
            lambda: _sampled(user, source, manifest, schema, blocks, chosen)
        )
    except _FailedError as error:  # The row may work the next time, so it is not cached.
        sample, failed = _Sample.of(memoryview(error.sample)), str(error)
    user.sources.forget()
    if processes is not None:
        try:  # Now, the error costs no time. The calls in the sample may have made what it names.
            pickle.dumps(user)
        except ConfigError as error:
            raise ConfigError(f"{error}, or leave processes= out") from error.__cause__
    return Stage(user, chosen, processes, manifest, sample.schema, sample.row_bytes, sample.made, failed)


class _Sample(NamedTuple):
    """What a sample of mapped rows tells.

    Attributes:
        schema: The schema of the mapped rows.
        row_bytes: The mean bytes of a value, by column.
        made: The columns that the function made.
    """

    schema: pa.Schema
    row_bytes: dict[str, float]
    made: tuple[str, ...]

    @classmethod
    def of(cls, data: memoryview) -> Self:
        """Return the sample that `_sampled` returned as JSON."""
        found = json.loads(bytes(data))
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(found["schema"])))
        return cls(schema, found["row_bytes"], tuple(found["made"]))


class _FailedError(Exception):
    """The function failed with a row of the sample. The others, or at least one, tell the columns.

    Args:
        text: What failed.
        sample: What `_sampled` returns.
    """

    def __init__(self, text: str, sample: bytes) -> None:
        super().__init__(text)
        self.sample = sample


def _sampled(
    user: UserFunction,
    source: RowGroupCache,
    manifest: Manifest,
    schema: pa.Schema,
    blocks: Blocks,
    columns: Sequence[str] | None,
) -> bytes:
    """Return the schema of the mapped rows, the columns that the function made, and mean sizes, as JSON."""
    layout = source.plan.layout
    given, kept = given_and_kept(layout.fields, columns)
    runner = Runner(user.call, given, kept)
    samples, row_bytes = [], dict[str, float]()
    failed: DataError | None = None
    cause: BaseException | None = None
    filled = np.flatnonzero(manifest.block_lengths).tolist()
    for number in (filled[position] for position in spread(len(filled))):
        records = _head(source, manifest, number, where(manifest.row_groups[number], blocks))
        try:
            found = list(runner.forms(records))
        except ChunkError as error:
            rows = rows_text(manifest.selection, number, 0, len(records), error.row)
            place = f"{where(manifest.row_groups[number], blocks)} {rows}"
            problem = DataError(f"{place}: map {user.name}: {error.text}")
            if error.row is None:
                raise problem from error.__cause__
            failed, cause = failed or problem, cause or error.__cause__
            found = list(runner.forms(records, of_working=True))
        for forms in found:
            samples.append({name: form for name, (form, _) in forms.items()})
            sizes = {name: size for name, (_, size) in forms.items()} | runner.kept_bytes(records)
            # The largest, because a cache of exactly the mean size would be too small by chance.
            row_bytes |= {name: max(size, row_bytes.get(name, 0.0)) for name, size in sizes.items()}
    if failed is not None and not samples:
        raise failed from cause
    if not user.is_same:
        raise ConfigError(
            f"map cannot tell one version of {user.name} from another: it changes an object that it refers to, such as "
            "a global. Pass version=, and change it whenever the function's results change"
        )
    try:
        types = {name: form.type for name, form in joined_forms(samples).items()}
        mapped = schema_of(schema, layout, kept, types)
        fields_of(mapped)  # raises for a type that batches cannot hold
    except DataError as error:
        raise DataError(f"map {user.name}: {error}") from error
    encoded = base64.b64encode(mapped.serialize()).decode()
    sample = json.dumps({"schema": encoded, "made": list(types), "row_bytes": row_bytes}).encode()
    if failed is not None:
        raise _FailedError(str(failed), sample)
    return sample


def _head(source: RowGroupCache, manifest: Manifest, number: int, place: str) -> Records:
    """Return the first rows of a row group that are mapped."""
    mask, layout = mapped_of(manifest.selection, source.selection, number), source.plan.layout
    blob, rows, chosen = next(mapped_blobs(head_of(source, number, SAMPLE_ROWS), mask, layout, place))
    return records_of(blob, rows, layout, chosen[:SAMPLE_ROWS])
