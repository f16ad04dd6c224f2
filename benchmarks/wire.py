"""The wire alone: bytes from the origin into a buffer that is used again, and nobody looks at them."""

from __future__ import annotations

import http.client
import threading
from urllib.parse import urlsplit


class Wire:
    """Ranged GETs of a folder's objects, on a connection and into a buffer for each thread that asks.

    folder: bucket and prefix. most: bytes of the largest range.
    """

    def __init__(self, endpoint_url: str, folder: str, most: int) -> None:
        self._address = urlsplit(endpoint_url).netloc
        self._folder = f"/{folder}"
        self._most = most
        self._of_thread = threading.local()
        self._connections: list[http.client.HTTPConnection] = []

    def get(self, wanted: tuple[str, int, int]) -> int:
        """Fetch bytes `start` up to `stop` of a file; how many there were. Raises OSError when some are missing."""
        return len(self.read(wanted))

    def read(self, wanted: tuple[str, int, int]) -> memoryview:
        """What `get` fetches, until this thread asks again."""
        name, start, stop = wanted
        path = f"{self._folder}/{name}"
        here = self._of_thread
        if not hasattr(here, "connection"):
            here.connection = http.client.HTTPConnection(self._address)
            self._connections.append(here.connection)
            here.buffer = memoryview(bytearray(self._most))
        here.connection.request("GET", path, headers={"Range": f"bytes={start}-{stop - 1}"})
        response = here.connection.getresponse()
        got = 0
        while read := response.readinto(here.buffer[got : stop - start]):
            got += read
        response.read()
        if got != stop - start:
            raise OSError(f"{path}: {got} bytes came instead of {stop - start}")
        came: memoryview = here.buffer[:got]
        return came

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
