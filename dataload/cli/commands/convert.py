"""`dataload convert`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from dataload.cli.commands.options import Json, StorageOptions, mapping
from dataload.cli.console import progress, show
from dataload.runtime.text import counted


def convert(
    source: Annotated[
        str,
        typer.Argument(help="URL or path of Parquet, Arrow, JSON lines, CSV, images, tar, MDS or LitData."),
    ],
    destination: Annotated[str, typer.Argument(help="URL or path of an empty folder.")],
    shuffle: Annotated[
        int | None, typer.Option(help="Shuffle all rows, with this seed; default: keep the order.")
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option("--format", help="The kind of source, if several are there, such as parquet or images."),
    ] = None,
    scratch_dir: Annotated[
        Path | None,
        typer.Option(help="Where a shuffle keeps all rows for a while; default: in a destination on this machine."),
    ] = None,
    storage_options: StorageOptions = None,
    to_storage_options: Annotated[
        str | None, typer.Option(help="Those of the destination; default: those of a source of the same protocol.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a dataset as Parquet that trains well.

    After an interrupt, the same command continues.
    """
    from dataload.conversion.conversion import Conversion

    conversion = Conversion(
        source,
        destination,
        shuffle=shuffle,
        format=kind,
        storage_options=mapping(storage_options),
        to_storage_options=None if to_storage_options is None else mapping(to_storage_options),
        scratch_dir=scratch_dir,
    )
    with progress("converting", conversion.bytes, quiet=as_json) as advance:
        try:
            done = conversion.run(advance)
        except KeyboardInterrupt:
            raise typer.Abort("interrupted: the complete files stay; run the same command to continue") from None
    show(
        asdict(done),
        f"{counted(done.rows, 'row')} in {counted(done.files, 'file')}, {decimal(done.bytes)}; source and files have "
        f"the same rows (checksum {done.checksum})",
        as_json=as_json,
    )
