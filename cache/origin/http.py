"""Byte ranges over HTTP(S) by blocking requests: aiohttp and httpx take several times the CPU time."""

from __future__ import annotations

import http.client
import ssl
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from dataload.cache.origin.errors import HttpError, WrongBodyError
from dataload.cache.origin.guarded_http import MOST_REDIRECTS, REDIRECTS, harmless, redirected
from dataload.cache.origin.translation import STALL_SECONDS
from dataload.errors import OriginError
from dataload.runtime.redact import redacted

PART_BYTES = 256 << 10  # of a part of a body: it stays in the processor's cache
MAX_READ_RATIO = 2  # A server may ignore Range and send the whole object. Read at most this many times the range.
IDLE_SECONDS = 30.0  # Servers close a connection that is idle for longer.
MOST_IDLE = 64  # connections to a server

Place = tuple[str, str]  # scheme and host


class Response:
    """An answer that has the requested bytes. Its body is read by `parts`, or left by `close`.

    Attributes:
        url: The URL that answered, behind all redirects.
        headers: Its headers.
        first: The headers of the first answer, which may be a redirect.
    """

    def __init__(
        self,
        url: str,
        first: Mapping[str, str],
        span: tuple[int, int],
        answer: http.client.HTTPResponse,
        lease: tuple[Connections, Place, http.client.HTTPConnection, float],
    ) -> None:
        self.url, self.headers, self.first = url, answer.headers, first
        self._span, self._answer, self._lease = span, answer, lease

    def parts(self) -> Iterator[memoryview]:
        """Yield the bytes in parts, each of which is overwritten by the next."""
        connections, place, connection, deadline = self._lease
        start, stop = self._span
        is_whole = self._answer.length == stop
        buffer = memoryview(bytearray(min(PART_BYTES, max(stop, 1))))
        done = 0
        try:
            while done < stop and (count := self._read(buffer[: stop - done], connection, deadline)):
                if done + count > start:
                    yield buffer[max(0, start - done) : count]
                done += count
            if done == stop and is_whole and not self._answer.will_close:
                self._answer.close()
                connections.keep(place, connection)
                connection = None  # type: ignore[assignment]
        finally:
            if connection is not None:
                self.close()

    def _read(self, into: memoryview, connection: http.client.HTTPConnection, deadline: float) -> int:
        _limit(connection, deadline)
        if self._answer.chunked:
            part = self._answer.read1(len(into))
            into[: len(part)] = part
            return len(part)
        # One call of recv: `readinto` would wait for the whole part, however slowly it comes.
        return self._answer.fp.readinto1(into)

    def close(self) -> None:
        """Leave the body unread."""
        self._answer.close()
        self._lease[2].close()


class Connections:
    """Connections to servers, which are used again. Any thread may call it."""

    def __init__(self) -> None:
        self._idle: dict[Place, list[tuple[http.client.HTTPConnection, float]]] = defaultdict(list)
        self._mutex = threading.Lock()
        weakref.finalize(self, _close, self._idle).atexit = False

    def get(self, url: str, headers: Mapping[str, str], start: int, stop: int, seconds: float) -> Response:
        """Request the bytes [start, stop) of a URL, which is percent-encoded.

        A redirect to another server takes no header along that the user has set.

        Raises:
            FileNotFoundError: There is no such object.
            HttpError: The server answered with another error.
            WrongBodyError: The answer has another range.
            OriginError: It redirects to a server without encryption, or ignores the range.
            TimeoutError: No byte came for `STALL_SECONDS`, or for longer than `seconds` not all of them.
        """
        deadline = time.monotonic() + seconds
        requested = f"bytes={start}-{stop - 1}"
        # nginx ignores the range of a compressed answer, and makes its ETag a weak one.
        sent = {**headers, "Accept-Encoding": "identity", "Range": requested}
        first: Any = None
        for _ in range(MOST_REDIRECTS):
            place, connection, answer = self._asked(url, sent, deadline)
            try:
                first = answer.headers if first is None else first
                location = answer.headers.get("Location")
                if answer.status in REDIRECTS and location is not None:
                    if answer.length == 0 and not answer.will_close:
                        answer.close()
                        self.keep(place, connection)
                    else:
                        connection.close()
                    url, is_same_server = redirected(url, location)
                    sent = sent if is_same_server else harmless(sent)
                    continue
                whole = _is_whole(url, answer, start, stop)
            except BaseException:
                answer.close()
                connection.close()
                raise
            span = (start, stop) if whole else (0, stop - start)
            return Response(url, first, span, answer, (self, place, connection, deadline))
        raise OriginError(f"{redacted(url)} is redirected more than {MOST_REDIRECTS} times: name the final URL")

    def keep(self, place: Place, connection: http.client.HTTPConnection) -> None:
        """Use a connection again, whose answer has been read."""
        with self._mutex:
            if len(self._idle[place]) < MOST_IDLE:
                self._idle[place].append((connection, time.monotonic()))
                return
        connection.close()

    def _asked(
        self, url: str, headers: Mapping[str, str], deadline: float
    ) -> tuple[Place, http.client.HTTPConnection, http.client.HTTPResponse]:
        location = urlsplit(url)
        place = location.scheme, location.netloc
        target = (location.path or "/") + (f"?{location.query}" if location.query else "")
        while True:
            connection, is_new = self._connection(place)
            try:
                _limit(connection, deadline)
                connection.request("GET", target, headers=dict(headers))
                return place, connection, connection.getresponse()
            except (ConnectionError, http.client.BadStatusLine):
                connection.close()
                if is_new:  # The server may have closed one that was idle.
                    raise
            except BaseException:
                connection.close()
                raise

    def _connection(self, place: Place) -> tuple[http.client.HTTPConnection, bool]:
        """Return a connection to a server, and whether it is new."""
        with self._mutex:
            idle = self._idle[place]
            while idle:
                connection, since = idle.pop()
                if time.monotonic() - since < IDLE_SECONDS:
                    return connection, False
                connection.close()
        scheme, host = place
        if scheme == "https":
            return http.client.HTTPSConnection(host, context=_trusted()), True
        return http.client.HTTPConnection(host), True


def _close(idle: dict[Place, list[tuple[http.client.HTTPConnection, float]]]) -> None:
    for connections in idle.values():
        for connection, _ in connections:
            connection.close()


@cache
def _trusted() -> ssl.SSLContext:
    return ssl.create_default_context()  # It takes some 20 ms.


def _limit(connection: http.client.HTTPConnection, deadline: float) -> None:
    """Let the next call on a connection end at the deadline, or after `STALL_SECONDS` without a byte."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the request took too long")
    connection.timeout = min(STALL_SECONDS, left)
    if connection.sock is not None:
        connection.sock.settimeout(connection.timeout)


def _is_whole(url: str, answer: http.client.HTTPResponse, start: int, stop: int) -> bool:
    """Return whether an answer has the whole object, or else raise an error unless it has the requested bytes."""
    if answer.status in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
        raise FileNotFoundError(redacted(url))
    if answer.status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
        raise HttpError(f"{redacted(url)}: {answer.status} {answer.reason}", answer.status)
    requested, sent = f"bytes={start}-{stop - 1}", answer.headers.get("Content-Range")
    if sent and not sent.startswith(f"{requested.replace('=', ' ')}/"):
        raise WrongBodyError(f"{sent} came instead of {requested}")
    if answer.status == HTTPStatus.OK and not sent:
        if stop > MAX_READ_RATIO * (stop - start):
            raise ignores_ranges(url, start, stop)
        return True
    if not sent and answer.length not in (None, stop - start):
        raise WrongBodyError(f"{answer.length} bytes came instead of {requested}")
    return False


def ignores_ranges(path: str, start: int, stop: int) -> OriginError:
    """Return the error of a store that would send the whole object for each range."""
    return OriginError(
        f"{redacted(path)} bytes {start}-{stop - 1}: the store ignores Range and sends the whole object: "
        "use a store or a proxy that answers ranges, or copy the data to one"
    )
