"""The program `python -m dataload.benchmarks.origin`."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import fields
from pathlib import Path

from dataload.benchmarks.origin.behaviour import Behaviour
from dataload.benchmarks.origin.client import check_aiohttp, option
from dataload.errors import ConfigError


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="python -m dataload.benchmarks.origin",
        description="Serve a folder as S3, with its subfolders as buckets. The first line is the AWS_ENDPOINT_URL.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument("folder", type=Path, help="the folder whose subfolders are the buckets")
    command.add_argument("--host", default="127.0.0.1", help="address to listen on")
    command.add_argument("--port", type=int, default=0, help="port to listen on; 0 for a free one")
    command.add_argument("--content-etags", action="store_true", help="ETags that change with the content only")
    command.add_argument("--writable", action="store_true", help="take objects to write, and remove them, too")
    command.add_argument("--until-eof", action="store_true", help="exit when standard input is closed")
    for attribute in fields(Behaviour):
        kind = int if attribute.name == "seed" else float
        command.add_argument(
            option(attribute.name), type=kind, default=attribute.default, help=attribute.metadata["help"]
        )
    return command


def main() -> None:
    command = parser()
    args = command.parse_args()
    try:
        check_aiohttp()
        behaviour = Behaviour(**{attribute.name: getattr(args, attribute.name) for attribute in fields(Behaviour)})
    except ConfigError as error:
        command.error(str(error))
    if not args.folder.is_dir():
        command.error(f"{args.folder} is not a folder")
    from dataload.benchmarks.origin.server import serve

    flags = {"content_etags": args.content_etags, "until_eof": args.until_eof, "writable": args.writable}
    asyncio.run(serve(args.folder, behaviour, args.host, args.port, **flags))


if __name__ == "__main__":
    main()
