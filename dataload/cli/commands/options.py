"""Options that commands share, and the parsers of their values."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Collection
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dataload.cache.config import OF_FOLDER, OF_PYTHON, CacheConfig, described, split_options
from dataload.cli.console import progress
from dataload.errors import ConfigError

if TYPE_CHECKING:
    from dataload.cache.blocks.reader import Blocks, Object
    from dataload.cache.local.directory import CacheFolder
    from dataload.catalog.manifest import Manifest
    from dataload.formats.hive_partitions import Partitioning
    from dataload.formats.text import TextErrors
    from dataload.rows.read_options import ReadOptions
    from dataload.rows.row_group_cache import RowGroupCache
    from dataload.samplers.order import Shuffle

ANYWHERE = inspect.Parameter.KEYWORD_ONLY  # whether there is a default or not

BatchSize = Annotated[int, typer.Option(min=1, help="Rows of one rank's batch.")]
Columns = Annotated[str | None, typer.Option(help="Names of columns, comma-separated or as a JSON list; default: all.")]
FillNull = Annotated[
    str | None,
    typer.Option(help='The loader\'s fill_null, as JSON: 0, or {"age": 0, "name": "-"}; default: none.'),
]
Errors = Annotated[
    str, typer.Option("--errors", help="The loader's: raise for text that is not UTF-8, or replace its bad bytes.")
]
FilterLists = Annotated[
    str | None,
    typer.Option("--filters", help='Rows to read, as a JSON list: [["label", "=", "cat"]]; default: all.'),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
NullMasks = Annotated[bool, typer.Option("--null-masks", help="As for the loader: rows with masks of nulls.")]
NODES = "Number of nodes: the loader's num_streams, unless that is a multiple of the nodes."
NumStreams = Annotated[int | None, typer.Option(min=1, help="The loader's num_streams; default: the number of nodes.")]
Url = Annotated[
    str,
    typer.Argument(
        help="URL or path of a file, a folder or a glob; or a table: delta+URL[@version], "
        "iceberg://catalog/namespace.table[@snapshot]."
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(help="Weights of the URLs, comma-separated in their order; default: by rows."),
]
WeightSchedule = Annotated[
    str | None,
    typer.Option("--schedule", help='Weights from rows of the epoch on, as JSON: {"0": [3, 1], "100000": [1, 1]}.'),
]
Ramp = Annotated[bool, typer.Option("--ramp", help="Weights change linearly between the rows of --schedule.")]
PartitioningName = Annotated[
    str, typer.Option("--partitioning", help="The loader's: hive, where folders named key=value are columns, or none.")
]
ShuffleName = Annotated[str, typer.Option("--shuffle", help="The loader's shuffle: block, full or none.")]
Seed = Annotated[int, typer.Option(help="Seed of the shuffle, as given to the loader.")]
StorageOptions = Annotated[str | None, typer.Option(help="Options of the fsspec filesystem, as a JSON object.")]
Window = Annotated[
    int | None, typer.Option(min=1, help="Row groups to shuffle together; default: chosen from the dataset.")
]


@dataclass(frozen=True)
class Reads:
    """What a loader reads of a dataset: an option of a command for each argument of `make_dataset`."""

    columns: Columns = None
    filters: FilterLists = None
    fill_null: FillNull = None
    null_masks: NullMasks = False
    errors: Errors = "raise"
    partitioning: PartitioningName = "hive"

    @property
    def chosen(self) -> tuple[list[str] | None, Any]:
        """The columns and the filters. Raises ConfigError if one of them is not valid."""
        return names(self.columns), parsed("--filters", self.filters)

    @property
    def options(self) -> ReadOptions:
        """How values are read. Raises ConfigError if an option is not valid."""
        from dataload.formats.text import checked_errors
        from dataload.rows.read_options import ReadOptions

        return ReadOptions(parsed("--fill-null", self.fill_null), self.null_masks, checked_errors(self.errors))


def names(text: str | None) -> list[str] | None:
    """Return the columns of --columns; None for all. Raise ConfigError if the text is not valid."""
    if not text:
        return None
    if not text.startswith("["):
        return [name.strip() for name in text.split(",")]
    try:
        columns: list[str] = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--columns={text}: not a JSON list: {error}") from error
    if not columns or not all(isinstance(column, str) for column in columns):
        raise ConfigError(f"--columns={text}: must be a list of at least one name")
    return columns


def parsed(option: str, text: str | None) -> Any:
    """Return the value of an option that is JSON; None without it. Raise ConfigError if the text is not JSON."""
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option}={text}: not JSON: {error}") from error


def shuffle_of(name: str) -> Shuffle:
    """Return the argument `shuffle` of --shuffle. Raise ConfigError if there is no such shuffle."""
    found: dict[str, Shuffle] = {"block": "block", "full": "full", "none": False}
    if name not in found:
        raise ConfigError(f"--shuffle={name}: must be block, full or none")
    return found[name]


def partitioning_of(name: str) -> Partitioning:
    """Return the argument `partitioning` of --partitioning. Raise ConfigError if there is no such partitioning."""
    if name not in ("hive", "none"):
        raise ConfigError(f"--partitioning={name}: must be hive or none")
    return "hive" if name == "hive" else None


def node_of(text: str | None) -> tuple[int, int]:
    """Return (i, n) of --shard "i/n"; (0, 1) without the option. Raise ConfigError if the text is not valid."""
    if text is None:
        return 0, 1
    node, _, nodes = text.partition("/")
    if not (node.isdecimal() and nodes.isdecimal()):
        raise ConfigError(f"--shard={text}: must be i/n, such as 0/4 for the first of four nodes")
    return int(node), int(nodes)


def mapping(text: str | None) -> dict[str, Any]:
    """Return the options of --storage-options.

    Raises:
        ConfigError: The text is not a JSON object. The message omits the text, which may hold a password.
    """
    try:
        options = json.loads(text or "{}")
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ConfigError("--storage-options must be a JSON object, such as '{\"anon\": true}'")
    return options


def with_shared_options(*, of_folder: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator of commands that replaces `cache` by an option for each setting, and `reads` by its options.

    Args:
        of_folder: Only the settings that say which folder it is, for commands that fetch nothing.
    """
    settings = [
        each
        for each in fields(CacheConfig)
        if (each.metadata == OF_FOLDER if of_folder else each.metadata != OF_PYTHON)
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters

        @functools.wraps(command)
        def run(*arguments: Any, **named: Any) -> None:
            cache, others = split_options(named)
            if "reads" in own:
                others["reads"] = Reads(
                    **{each.name: others.pop(each.name) for each in fields(Reads) if each.name in others}
                )
            command(*arguments, cache=CacheConfig(**cache), **others)

        of_reads = inspect.signature(Reads, eval_str=True).parameters.values()
        shared = {"cache": [_option(each) for each in settings], "reads": of_reads}
        parameters = [
            option.replace(kind=ANYWHERE) for each in own.values() for option in shared.get(each.name, [each])
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def _option(setting: Field[Any]) -> inspect.Parameter:
    """Return the option of a setting. Its help is the first sentence of the setting's documentation."""
    kinds: dict[Any, Any] = {"bool": bool, "int": int, "str | os.PathLike[str] | None": Path | None}
    flag = [f"--{setting.name.replace('_', '-')}"] if setting.default is False else []
    sentence = described()[setting.name].partition(". ")[0].replace("`", "").rstrip(".")
    kind: Any = Annotated[kinds.get(setting.type, str | None), typer.Option(*flag, help=f"{sentence}.")]
    return inspect.Parameter(setting.name, ANYWHERE, default=setting.default, annotation=kind)


def existing(cache: CacheConfig) -> CacheFolder:
    """Open an existing cache. Raise ConfigError if there is none."""
    from dataload.cache.local.fsck import NoCacheError, open_existing

    try:
        return open_existing(cache.folder, allow_network_filesystem=cache.allow_network_filesystem)
    except NoCacheError as error:
        raise ConfigError(f"no cache at {cache.folder}: name its folder with --cache-dir") from error


def open_manifest(
    url: str,
    storage_options: str | None,
    cache: CacheConfig,
    *,
    partitioning: str,
    errors: TextErrors = "raise",
    quiet: bool,
) -> tuple[Manifest, Blocks, Collection[Object]]:
    """Read the footers at `url`. Return the dataset, the reader of its objects, and those, also without row groups."""
    from dataload.cache.blocks.reader import Blocks
    from dataload.cache.origin.source import open_source
    from dataload.catalog.resolve import manifest_of
    from dataload.catalog.sources import list_objects
    from dataload.catalog.tables import is_table, manifest_of_table, open_table, snapshot_of

    if is_table(url):
        options = None if storage_options is None else mapping(storage_options)
        snapshot = snapshot_of(url, options)
        blocks, files = open_table(snapshot, options, cache)
        with progress("reading footers", len(files), quiet=quiet, unit="files") as advance:
            return manifest_of_table(snapshot, blocks, files, errors, lambda _: advance(1)), blocks, files
    blocks = Blocks.open(open_source(url, mapping(storage_options)), cache)
    objects = list_objects(url, blocks, partitioning_of(partitioning))
    with progress("reading footers", len(objects), quiet=quiet, unit="files") as advance:
        return manifest_of(objects, blocks, lambda _: advance(1), errors), blocks, objects


def open_row_groups(
    url: str,
    storage_options: str | None,
    cache: CacheConfig,
    reads: Reads,
    *,
    quiet: bool,
) -> RowGroupCache:
    """Read the footers at `url`. Return the row groups of the dataset, as a loader with these arguments reads them."""
    options, chosen = reads.options, reads.chosen
    manifest, blocks, _ = open_manifest(
        url, storage_options, cache, partitioning=reads.partitioning, errors=options.errors, quiet=quiet
    )
    return row_groups_of(manifest, blocks, *chosen, options)


def row_groups_of(
    manifest: Manifest,
    blocks: Blocks,
    columns: list[str] | None,
    filters: Any,
    read_options: ReadOptions,
) -> RowGroupCache:
    """Return the row groups of a dataset as a loader with these arguments reads them."""
    from dataload.rows.making.file_maker import FileMaker
    from dataload.rows.row_group_cache import RowGroupCache

    selected = manifest.select(columns)
    if filters is not None:
        from dataload.catalog.filtering import narrow

        manifest = narrow(manifest, blocks, filters, errors=read_options.errors)
    return RowGroupCache(FileMaker(manifest, selected, blocks, read_options))
