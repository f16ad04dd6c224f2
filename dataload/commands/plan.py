"""`dataload plan`."""

from __future__ import annotations

from dataload.commands.options import (
    BatchSize,
    CacheBytes,
    CacheDir,
    Columns,
    Json,
    StorageOptions,
    Window,
    config,
    listed,
    names,
)
from dataload.commands.terminal import show


def plan(
    url: str,
    window: Window = None,
    batch_size: BatchSize = 256,
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

    blocks, objects = listed(url, storage_options, config(cache_dir, cache_bytes))
    manifest = pin(objects, blocks)
    blobs = RowBlobs(manifest, manifest.select(names(columns)), blocks)
    found = foretell(manifest, blobs, list(objects), window, batch_size)
    show(found.to_json(), str(found), as_json=as_json)
