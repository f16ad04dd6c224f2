"""HTTP servers of tests, one thread each."""

from __future__ import annotations

import http.server
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

POLL_SECONDS = 0.01  # until a server notices that it should end; by default half a second, longer than most tests


class _Server(http.server.ThreadingHTTPServer):
    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection on which the body of an answer doesn't wait until the client acknowledges the headers."""
        connection, address = super().get_request()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection, address


@contextmanager
def serving(
    kind: Callable[..., http.server.BaseHTTPRequestHandler], context: ssl.SSLContext | None = None
) -> Iterator[str]:
    """Serve requests for the duration of the block, with `context` over TLS. Yield the URL of the server."""
    with _Server(("127.0.0.1", 0), kind) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(POLL_SECONDS,))
        thread.start()
        try:
            yield f"http{'s' if context else ''}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
