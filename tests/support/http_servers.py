"""HTTP servers of tests, one thread each."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def serving(kind: Callable[..., http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve requests for the duration of the block. Yield the URL of the server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
