"""`dataload cache`: show, verify and evict the contents of a cache."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.filesize import decimal

from dataload.cache.config import CacheConfig
from dataload.cli.commands.options import Json, existing, with_shared_options
from dataload.cli.console import FOUND_A_PROBLEM, progress, show, show_help
from dataload.errors import ConfigError, DataloadError

group = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


@group.callback()
def common(context: typer.Context) -> None:
    """Show, verify or evict the contents of the cache."""
    if context.invoked_subcommand is None:
        show_help(context)


@group.command()
@with_shared_options(of_folder=True)
def stats(*, cache: CacheConfig, as_json: Json = False) -> None:
    """Show how many blobs and bytes the cache holds."""
    folder = existing(cache)
    rows = list(folder.index.rows())
    used = folder.index.used_bytes()
    limit = folder.default_limit
    figures = {"cache_dir": str(folder.path), "blobs": len(rows), "bytes": used, "default_cache_bytes": limit}
    text = f"{folder.path}: {len(rows)} blobs, {decimal(used)}; the default limit is {decimal(limit)}"
    show(figures, text, as_json=as_json)


@group.command()
@with_shared_options(of_folder=True)
def verify(
    *,
    cache: CacheConfig,
    repair: Annotated[bool, typer.Option(help="Remove damaged blobs; they are fetched again when needed.")] = False,
    as_json: Json = False,
) -> None:
    """Check every cached byte. Exit with 1 if a blob is damaged."""
    from dataload.cache.local import fsck

    folder = existing(cache)
    with progress("verifying", folder.index.used_bytes(), quiet=as_json) as advance:
        report = fsck.verify(folder, repair=repair, progress=advance)
    removed = ", removed" if repair else ""
    show(
        {"blobs": report.blobs, "bytes": report.bytes, "problems": report.problems, "repaired": repair},
        "\n".join([*report.problems, f"{report.blobs} blobs are intact, {len(report.problems)} problems{removed}"]),
        as_json=as_json,
    )
    if report.problems:
        raise typer.Exit(FOUND_A_PROBLEM)


@group.command()
@with_shared_options(of_folder=True)
def evict(
    url: Annotated[str | None, typer.Argument(help="Evict the blobs of this object, folder or glob.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Evict everything.")] = False,
    *,
    cache: CacheConfig,
    keep_bytes: Annotated[
        str | None, typer.Option(help="With --all, keep this many bytes of the most recently used blobs.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Remove blobs from the cache."""
    from dataload.cache.config import parse_bytes
    from dataload.cache.local import fsck
    from dataload.runtime.redact import redacted

    if (url is not None) == everything:
        raise ConfigError("evict takes either a URL or --all")
    if url is not None and keep_bytes:
        raise ConfigError("--keep-bytes goes with --all, not with a URL")
    folder = existing(cache)
    path = None if url is None else _path(url)
    keep = parse_bytes("keep_bytes", keep_bytes) if keep_bytes else 0
    with progress("evicting", max(0, folder.index.used_bytes() - keep), quiet=as_json) as advance:
        freed = fsck.evict(folder, path=path, keep_bytes=keep, progress=advance)
    show({"bytes": freed}, f"{decimal(freed)} evicted", as_json=as_json)
    if url is not None and not freed:
        raise DataloadError(f"the cache holds no blobs of {redacted(url)}, or only some that are being written")


def _path(url: str) -> str:
    """Return the path of a URL, or of a table's folder, at its origin. Raise ConfigError for an unknown protocol."""
    import fsspec

    from dataload.cache.origin.source import split_chain
    from dataload.catalog.tables import folder_of, is_table

    if is_table(url):
        url = folder_of(url)

    _, origin_url = split_chain(url)  # without "tiercache"
    if not origin_url:
        raise ConfigError("the URL is empty: name an object or a folder, or use --all to evict everything")
    try:
        return str(fsspec.core.strip_protocol(origin_url))
    except (ValueError, ImportError) as error:
        raise ConfigError(str(error)) from error
