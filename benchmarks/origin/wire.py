"""The network alone: bytes from the origin go into reused buffers and are not read."""

from __future__ import annotations

import http.client
import threading
from urllib.parse import urlsplit


class Wire:
    """A client for ranged GETs of a folder's objects. Each thread has its own connection and buffer.

    Args:
        endpoint_url: URL of the origin.
        folder: Bucket and prefix.
        most: Bytes of the largest range.
    """

    def __init__(self, endpoint_url: str, folder: str, most: int) -> None:
        self._address = urlsplit(endpoint_url).netloc
        self._folder = f"/{folder}"
        self._most = most
        self._thread = threading.local()
        self._connections: list[http.client.HTTPConnection] = []

    def get(self, requested: tuple[str, int, int]) -> int:
        """Fetch a range. Return its bytes, as `read` does."""
        return len(self.read(requested))

    def read(self, requested: tuple[str, int, int]) -> memoryview:
        """Fetch the range (name, start, stop).

        Returns:
            The bytes, valid until the next call in this thread.

        Raises:
            OSError: The answer is shorter than the range.
        """
        name, start, stop = requested
        path = f"{self._folder}/{name}"
        local = self._thread
        if not hasattr(local, "connection"):
            local.connection = http.client.HTTPConnection(self._address)
            self._connections.append(local.connection)
            local.buffer = memoryview(bytearray(self._most))
        local.connection.request("GET", path, headers={"Range": f"bytes={start}-{stop - 1}"})
        response = local.connection.getresponse()
        received = 0
        while read := response.readinto(local.buffer[received : stop - start]):
            received += read
        response.read()
        if received != stop - start:
            raise OSError(f"{path}: received {received} bytes instead of {stop - start}")
        body: memoryview = local.buffer[:received]
        return body

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
