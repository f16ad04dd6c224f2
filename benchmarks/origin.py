"""A read-only S3 for measurements: a folder served by a process of its own, as late, slow and faulty as you like.

`with Origin(folder) as origin:` starts it; `python -m dataload.benchmarks.origin FOLDER` runs it by hand. The
subfolders of the folder are the buckets, the files below them the objects; a symbolic link is neither.

`GET /__stats` shows the counters as JSON and `POST /__reset` zeroes them; `GET /__behaviour` shows the behaviour and
`PUT /__behaviour` replaces it by the one in its JSON body, and starts the sequence of faults anew.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote
from urllib.request import ProxyHandler, Request, build_opener

from dataload.benchmarks import s3
from dataload.benchmarks.behaviour import Behaviour
from dataload.errors import ConfigError

__all__ = ["Behaviour", "Origin"]

PATIENCE = 30.0


class Origin:
    """`with Origin(folder) as origin:` an S3 endpoint at `origin.endpoint_url`, on a free port of 127.0.0.1.

    nice: how much the server's process yields to others (0 to 19).

    Entering raises ConfigError when aiohttp is missing or the server does not start; its reason is on standard error.
    The server ends with the block, and with this process whatever happens to it.
    """

    def __init__(self, folder: str | Path, *, behaviour: Behaviour | None = None, nice: int = 0) -> None:
        self.folder = Path(folder)
        self.behaviour = behaviour or Behaviour()
        self._nice = nice

    def __enter__(self) -> Self:
        check_aiohttp()
        self._process = subprocess.Popen(self._command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.endpoint_url = self._process.stdout.readline().strip()
        if not self.endpoint_url:
            self._end()
            raise ConfigError(f"the server of {self.folder} did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _command(self) -> list[str]:
        given = {name: value for name, value in asdict(self.behaviour).items() if value is not None}
        options = [f"{option(name)}={value}" for name, value in given.items()]
        here = [sys.executable, "-m", "dataload.benchmarks.origin", str(self.folder)]
        return [*here, "--port=0", "--until-eof", f"--nice={self._nice}", *options]

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    @property
    def pid(self) -> int:
        """Of the server."""
        return self._process.pid

    @property
    def storage_options(self) -> dict[str, Any]:
        """Arguments for `s3fs.S3FileSystem`."""
        return s3.storage_options(self.endpoint_url)

    def url(self, bucket: str, key: str = "") -> str:
        """Where an object is, over HTTP."""
        return f"{self.endpoint_url}/{quote(bucket)}/{quote(key)}"

    def stats(self) -> dict[str, Any]:
        """Totals since the start or the last `reset()`, whatever the status of the answers.

        get_requests: GETs of objects. get_bytes: bytes of objects handed to connections for them. head_requests,
        list_requests, other_requests: HEADs, pages of ListObjectsV2, and all the rest. duplicate_gets: GETs of the
        same bytes of the same version of an object as one that was answered whole. errors: the faults that struck,
        by their names. most_gets_at_once: GETs of objects under way at a time.

        Who has an answer finds it counted. Bytes on their way when a connection breaks count, though lost.
        """
        return self._control("GET", "__stats")

    def reset(self) -> None:
        """Counts start from zero, and nothing counts as served before."""
        self._control("POST", "__reset")

    def behave(self, **changes: Any) -> None:
        """Changes settings of the behaviour, from the next request on. The sequence of faults starts anew."""
        changed = replace(self.behaviour, **changes)
        self._control("PUT", "__behaviour", asdict(changed))
        self.behaviour = changed

    def _control(self, method: str, name: str, body: Any = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.endpoint_url}/{name}", data, method=method)
        with build_opener(ProxyHandler({})).open(request, timeout=PATIENCE) as answer:
            told: dict[str, Any] = json.load(answer)
        return told


def check_aiohttp() -> None:
    """Raises ConfigError."""
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError("the origin server needs aiohttp: pip install 'dataload[bench]'")


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="python -m dataload.benchmarks.origin",
        description="Serves a folder as a read-only S3: its subfolders are the buckets. Prints its URL, and serves.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument("folder", type=Path, help="the folder whose subfolders are the buckets")
    command.add_argument("--host", default="127.0.0.1", help="address to listen on")
    command.add_argument("--port", type=int, default=0, help="port to listen on; 0: a free one")
    command.add_argument("--nice", type=int, default=0, help="how much the process yields to others, 0 to 19")
    command.add_argument("--until-eof", action="store_true", help="end when standard input does")
    for each in fields(Behaviour):
        kind = int if each.name == "seed" else float
        command.add_argument(option(each.name), type=kind, default=each.default, help=each.metadata["help"])
    return command


def main() -> None:
    command = parser()
    given = command.parse_args()
    try:
        check_aiohttp()
        behaviour = Behaviour(**{each.name: getattr(given, each.name) for each in fields(Behaviour)})
    except ConfigError as error:
        command.error(str(error))
    if not given.folder.is_dir():
        command.error(f"{given.folder} is not a folder")
    from dataload.benchmarks.server import serve

    os.nice(given.nice)
    asyncio.run(serve(given.folder, behaviour, given.host, given.port, until_eof=given.until_eof))


if __name__ == "__main__":
    main()
