"""The command line. Nothing heavy is imported until a command needs it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal

from dataload.benchmarks.run import bench
from dataload.errors import ConfigError, DataError, DataloadError, OriginNotFound

if TYPE_CHECKING:
    from dataload.cache.blocks import Blocks, Object
    from dataload.cache.config import CacheConfig
    from dataload.cache.folder import CacheFolder
    from dataload.partitions import Keys

FOUND_A_PROBLEM = 1
WRONG_USE = 2
INTERRUPTED = 130

app = typer.Typer(
    name="dataload",
    help="Data loading for PyTorch from S3.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=True,
)

CacheDir = Annotated[Path | None, typer.Option(help="Folder of the cache; default: the user's cache folder.")]
CacheBytes = Annotated[str | None, typer.Option(help='Most bytes the cache may hold, such as "500GB".')]
Cluster = Annotated[str | None, typer.Option(help="Valkey or Redis that hosts share: valkey://host:port,host:port.")]
StorageOptions = Annotated[str | None, typer.Option(help="For the filesystem of the URL, as fsspec takes them; JSON.")]
Columns = Annotated[str | None, typer.Option(help="Names, comma-separated; default: all.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


@app.callback()
def common(debug: Annotated[bool, typer.Option(help="Show tracebacks.")] = False) -> None:
    """Data loading for PyTorch from S3."""


@app.command()
def plan(
    url: str,
    window: Annotated[
        int | None, typer.Option(min=1, help="Row groups to shuffle together; default: the best.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a batch, of all ranks together.")] = 256,
    columns: Columns = None,
    cache_dir: CacheDir = None,
    cache_bytes: CacheBytes = None,
    storage_options: StorageOptions = None,
    as_json: Json = False,
) -> None:
    """What reading a dataset will take, and what its shuffle is worth: from the footers alone."""
    from dataload.manifest import pin
    from dataload.plan import plan as foretell
    from dataload.rowblobs import RowBlobs

    blocks, objects = _listed(url, storage_options, cache_dir, cache_bytes)
    manifest = pin(objects, blocks)
    blobs = RowBlobs(manifest, manifest.select(_names(columns)), blocks)
    found = foretell(manifest, blobs, list(objects), window, batch_size)
    _print(found.to_json(), as_json, str(found))


@app.command()
def warm(
    url: str,
    shard: Annotated[str | None, typer.Option(help="Node i of n, i/n, counted from 0; default: everything.")] = None,
    num_streams: Annotated[
        int | None, typer.Option(min=1, help="As the loader's; default: the number of nodes.")
    ] = None,
    columns: Columns = None,
    cache_dir: CacheDir = None,
    cache_bytes: CacheBytes = None,
    cluster: Cluster = None,
    storage_options: StorageOptions = None,
    as_json: Json = False,
) -> None:
    """Fetch a dataset, or a node's part, and keep its rows decoded. Stopped half-way, it goes on where it ended."""
    from dataload.manifest import pin
    from dataload.rowblobs import RowBlobs
    from dataload.warm import part_of
    from dataload.warm import warm as decode

    node = _shard(shard)
    blocks, objects = _listed(url, storage_options, cache_dir, cache_bytes, cluster)
    if cluster is not None:
        _must_answer(cluster)
    manifest = pin(objects, blocks)
    blobs = RowBlobs(manifest, manifest.select(_names(columns)), blocks)
    sizes = [group.bytes for group in manifest.row_groups]
    groups = range(len(sizes)) if node is None else part_of(manifest, *node, num_streams)
    with _progress("warming", sum(sizes[group] for group in groups), quiet=as_json) as advance:
        decode(blobs, groups, lambda group: advance(sizes[group]))
    blocks.settle()
    stats, rows = blocks.stats(), sum(manifest.row_groups[group].rows for group in groups)
    _print(
        {"objects": len(objects), "rows": rows, "bytes": sum(obj.size for obj in objects), **stats},
        as_json,
        f"{len(objects)} objects, {rows:,} rows; {decimal(int(stats['bytes_origin']))} fetched in "
        f"{int(stats['requests_origin'])} requests, the rest was there",
    )
    if stats["refused"]:
        raise DataloadError(f"{int(stats['refused'])} blobs did not fit: raise --cache-bytes or evict")
    if stats["errors"]["local"]:
        raise DataloadError(f"{int(stats['errors']['local'])} blobs could not be kept: is the disk full?")
    if cluster is not None and stats["cluster"]["unkept"]:
        raise DataloadError(f"{stats['cluster']['unkept']} blobs did not reach the cluster: is it full, or gone?")


@app.command()
def stats(cache_dir: CacheDir = None, as_json: Json = False) -> None:
    """What the cache holds."""
    folder = _existing(cache_dir)
    rows = list(folder.index.rows())
    used = folder.index.used_bytes()
    _print(
        {"cache_dir": str(folder.path), "blobs": len(rows), "bytes": used},
        as_json,
        f"{folder.path}: {len(rows)} blobs, {decimal(used)}",
    )


@app.command()
def verify(
    cache_dir: CacheDir = None,
    repair: Annotated[bool, typer.Option(help="Remove what is wrong; it will be fetched again.")] = False,
    as_json: Json = False,
) -> None:
    """Check every cached byte. Exits with 1 when something is wrong."""
    from dataload.cache import fsck

    folder = _existing(cache_dir)
    with _progress("verifying", folder.index.used_bytes(), quiet=as_json) as advance:
        report = fsck.verify(folder, repair=repair, progress=advance)
    removed = ", removed" if repair else ""
    _print(
        {"blobs": report.blobs, "bytes": report.bytes, "problems": report.problems, "repaired": repair},
        as_json,
        "\n".join([*report.problems, f"{report.blobs} blobs are right, {len(report.problems)} are not{removed}"]),
    )
    if report.problems:
        raise typer.Exit(FOUND_A_PROBLEM)


@app.command()
def evict(
    url: Annotated[str | None, typer.Argument(help="An object or a folder; left out: everything.")] = None,
    cache_dir: CacheDir = None,
    keep_bytes: Annotated[str | None, typer.Option(help="Keep so many bytes of what was used last.")] = None,
    as_json: Json = False,
) -> None:
    """Remove blobs from the cache."""
    import fsspec

    from dataload.cache import fsck
    from dataload.cache.config import parse_bytes

    if url and keep_bytes:
        raise ConfigError("give a URL or --keep-bytes, not both")
    folder = _existing(cache_dir)
    path = fsspec.core.strip_protocol(url) if url else None
    freed = fsck.evict(folder, path=path, keep_bytes=parse_bytes("keep_bytes", keep_bytes) if keep_bytes else 0)
    _print({"bytes": freed}, as_json, f"{decimal(freed)} evicted")
    if url and not freed:
        raise DataloadError(f"nothing of {url} is in the cache")


@app.command()
def demo(
    cache_dir: CacheDir = None,
    keep: Annotated[bool, typer.Option(help="Keep the cache for a second run.")] = False,
    shuffled_labels: Annotated[
        bool, typer.Option(help="The control: labels at random, nothing to be learned.")
    ] = False,
    rows: Annotated[int, typer.Option(help="Of the dataset, 4 kB each.", min=1000)] = 50_000,
    seed: Annotated[int, typer.Option(help="Of the order and of the model.")] = 0,
    as_json: Json = False,
) -> None:
    """The whole path on this machine: an S3 server, the cache, two ranks, a trained model."""
    try:
        from dataload.demo.main import run_demo
    except ImportError as error:
        raise ConfigError(f"the demo needs more packages ({error.name}): pip install 'dataload[demo]'") from error

    result = run_demo(
        cache_dir=cache_dir, rows=rows, keep=keep, shuffled_labels=shuffled_labels, seed=seed, json=as_json
    )
    if result.problems:
        raise typer.Exit(FOUND_A_PROBLEM)


app.command()(bench)


def main() -> None:
    """Run the command that the arguments name, and exit: 0 done, 1 found a problem, 2 wrong use."""
    try:
        code = app(standalone_mode=False)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        message, code = _explain(error)
        typer.echo(f"dataload: {message}", err=True)
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code or 0)


def _explain(error: Exception) -> tuple[str, int]:
    """One line for an error, and the exit code."""
    if isinstance(error, DataloadError):
        wrong_use = isinstance(error, (ConfigError, DataError, OriginNotFound))
        return " ".join(str(error).split()), WRONG_USE if wrong_use else FOUND_A_PROBLEM
    if isinstance(error, typer.Abort):
        return "interrupted", INTERRUPTED
    if hasattr(error, "format_message"):  # wrong options or arguments, in the words of the option parser
        return f"{error.format_message()} See --help.", WRONG_USE
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"unexpected {said} (dataload --debug … shows where)", FOUND_A_PROBLEM


def _config(cache_dir: Path | None, cache_bytes: str | None, cluster: str | None = None) -> CacheConfig:
    from dataload.cache.config import CacheConfig

    return CacheConfig(cache_dir=str(cache_dir) if cache_dir else None, cache_bytes=cache_bytes, cluster=cluster)


def _existing(cache_dir: Path | None) -> CacheFolder:
    from dataload.cache.fsck import open_existing

    return open_existing(_config(cache_dir, None).folder)


def _listed(
    url: str,
    storage_options: str | None,
    cache_dir: Path | None,
    cache_bytes: str | None,
    cluster: str | None = None,
) -> tuple[Blocks, dict[Object, Keys]]:
    """The cache in front of `url`, and the objects there with their partition keys."""
    from dataload.cache.filesystem import open_source
    from dataload.manifest import list_objects

    blocks = open_source(url, _options(storage_options), _config(cache_dir, cache_bytes, cluster))
    return blocks, list_objects(url, blocks)


def _must_answer(cluster: str) -> None:
    """Asked for by name, it is not done without, as a training would; and that is said before, not hours later."""
    from dataload.cache.address import Address
    from dataload.cache.client import connect
    from dataload.cache.redact import redacted

    address = Address.parse(cluster)
    try:
        connect(address).close()
    except Exception as error:
        raise DataloadError(f"nothing was fetched: cluster {address} does not answer: {redacted(error)}") from error


def _shard(text: str | None) -> tuple[int, int] | None:
    """(i, n) of "i/n"."""
    if text is None:
        return None
    node, _, nodes = text.partition("/")
    if not (node.isdecimal() and nodes.isdecimal()):
        raise ConfigError(f"--shard={text}: must be i/n, such as 0/4 for the first of four nodes")
    return int(node), int(nodes)


def _names(text: str | None) -> list[str] | None:
    return [name.strip() for name in text.split(",")] if text else None


def _options(text: str | None) -> dict[str, Any]:
    try:
        options = json.loads(text or "{}")
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ConfigError("--storage-options must be a JSON object, such as '{\"anon\": true}'")
    return options


def _print(figures: dict[str, Any], as_json: bool, text: str) -> None:
    typer.echo(json.dumps(figures) if as_json else text)


@contextmanager
def _progress(what: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], object]]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress("{task.description}", *columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda size: bar.advance(task, size)
