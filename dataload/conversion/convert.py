"""`dataload.convert`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dataload.arguments import with_plain_arguments
from dataload.conversion.conversion import Conversion, Converted


@with_plain_arguments
def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    shuffle: int | None = None,
    format: str | None = None,  # noqa: A002 (as pyarrow calls it)
    storage_options: Mapping[str, Any] | None = None,
    to_storage_options: Mapping[str, Any] | None = None,
    scratch_dir: str | os.PathLike[str] | None = None,
) -> Converted:
    r"""Write a dataset as Parquet that trains well: row groups of about 32 MB in files of about 512 MB.

    Run it again after an interruption: it goes on, and a finished conversion is a no-op. At the end, rows and a
    checksum of the files, which are read again, are compared with those of the source.

    Args:
        source: A file, a folder or a glob of Parquet, Arrow IPC or Feather, JSON lines, CSV, folders of images (each is
            a class), or tar files of WebDataset; or a folder of MDS, of LitData or of Hugging Face's `save_to_disk`.
        destination: An empty folder.
        shuffle: A seed, to shuffle all rows. None: keep the order.
        format: The kind of source, if files of several kinds are there: "parquet", "arrow", "json", "csv", "images",
            "webdataset", "mds", "litdata" or "huggingface". None: as the files say.
        storage_options: Options of the filesystem of the source, as for `make_dataset`.
        to_storage_options: Those of the destination; default: those of the source if both have one protocol.
        scratch_dir: Where a shuffle keeps all rows for a while; default: in a destination on this machine.

    Returns:
        Rows, files, bytes and the checksum.

    Raises:
        ConfigError: An argument cannot work, the kind of source is unknown, the destination has other files, or another
            conversion is writing there.
        DataError: A file of the source cannot be read.
        OriginError: A store failed, or a file was replaced meanwhile.
        DataloadError: The files hold other rows than the source.

    Examples:
        >>> import tempfile, pathlib
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "rows.csv").write_text("x,y\n1,a\n2,b\n")
        >>> convert(folder / "rows.csv", folder / "rows").rows
        2
    """
    conversion = Conversion(
        source,
        destination,
        shuffle=shuffle,
        format=format,
        storage_options=storage_options,
        to_storage_options=to_storage_options,
        scratch_dir=scratch_dir,
    )
    return conversion.run()
