"""The server as a context manager."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote
from urllib.request import ProxyHandler, Request, build_opener

from dataload.benchmarks.origin import s3
from dataload.benchmarks.origin.behaviour import Behaviour
from dataload.errors import ConfigError

TIMEOUT = 30.0  # seconds


class Origin:
    """An S3 endpoint on a free port of 127.0.0.1.

    The server process ends with the block, or with this process.

    Args:
        folder: Folder of the buckets.
        behaviour: Latency, bandwidth and faults. Default: none.
        content_etags: Whether an ETag changes with the content only, as in S3. Default: with the file, which is fast.
        writable: Whether it takes objects to write.

    Raises:
        ConfigError: aiohttp is missing, or the server did not start. Standard error has the reason.

    Example:
        with Origin(folder) as origin:
            filesystem = S3FileSystem(**origin.storage_options)
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        behaviour: Behaviour | None = None,
        content_etags: bool = False,
        writable: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.behaviour = behaviour or Behaviour()
        self._flags = [name for name, on in (("content-etags", content_etags), ("writable", writable)) if on]

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
        values = {name: value for name, value in asdict(self.behaviour).items() if value is not None}
        options = [f"{option(name)}={value}" for name, value in values.items()]
        program = [sys.executable, "-m", "dataload.benchmarks.origin", str(self.folder)]
        return [*program, *(f"--{name}" for name in self._flags), "--port=0", "--until-eof", *options]

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    @property
    def storage_options(self) -> dict[str, Any]:
        """Arguments for `s3fs.S3FileSystem`."""
        return s3.storage_options(self.endpoint_url)

    @property
    def stats_url(self) -> str:
        """URL of `stats()` as JSON, for other processes."""
        return f"{self.endpoint_url}/__stats"

    def url(self, bucket: str, key: str = "") -> str:
        """Return the HTTP URL of an object."""
        return f"{self.endpoint_url}/{quote(bucket)}/{quote(key)}"

    def stats(self) -> dict[str, Any]:
        """Return totals since the start or the last `reset()`, including answers with errors.

        A client that has an answer finds it counted. Bytes in flight when a connection breaks count, too.

        Returns:
            get_requests: GETs of objects. get_bytes: bytes of their bodies. head_requests: HEADs. list_requests:
            pages of ListObjectsV2. other_requests: all other requests. duplicate_gets: GETs whose bytes and version
            an earlier GET received completely. errors: number of faults by name. most_gets_at_once: most concurrent
            GETs of objects.
        """
        stats: dict[str, Any] = self._control("GET", "__stats")
        return stats

    def gets_over_time(self) -> list[tuple[float, int]]:
        """Return (seconds of the monotonic clock, GETs of objects under way from then on) since the last reset."""
        return [(at, count) for at, count in self._control("GET", "__gets")]

    def reset(self) -> None:
        """Set all counters to zero, and forget which bytes were served."""
        self._control("POST", "__reset")

    def behave(self, **changes: Any) -> None:
        """Change settings of the behaviour for all later requests. Restart the sequence of faults."""
        changed = replace(self.behaviour, **changes)
        self._control("PUT", "__behaviour", asdict(changed))
        self.behaviour = changed

    def _control(self, method: str, name: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.endpoint_url}/{name}", data, method=method)
        with build_opener(ProxyHandler({})).open(request, timeout=TIMEOUT) as answer:
            return json.load(answer)


def check_aiohttp() -> None:
    """Raise ConfigError if aiohttp is not installed."""
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError("the origin server needs aiohttp: pip install 'dataload[bench]' or 'dataload[demo]'")


def option(name: str) -> str:
    return "--" + name.replace("_", "-")
