"""A check that a server listens at an endpoint. botocore retries a refused connection for 10 s and longer."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from dataload.cache.origin.errors import UnreachableError
from dataload.cache.origin.known_s3 import AMAZON
from dataload.cache.origin.retries import retried

PORTS = {"http": 80, "https": 443}
CONNECT_SECONDS = 2.0  # of an attempt
PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy"})


def check_reachable(endpoint: str | None) -> None:
    """Raise UnreachableError if no server accepts a connection. Amazon and what a proxy reaches are not checked.

    Args:
        endpoint: The URL of a store in S3; None for another store, which is not checked.
    """
    parts = urlsplit(endpoint or "")
    if (
        endpoint is None
        or AMAZON.fullmatch(endpoint)
        or not parts.hostname
        or any(name.lower() in PROXIES for name in os.environ)
    ):
        return
    address = parts.hostname, parts.port or PORTS.get(parts.scheme, 443)
    try:
        retried(lambda: socket.create_connection(address, CONNECT_SECONDS).close())
    except OSError as error:
        raise UnreachableError(error.strerror or str(error)) from error
