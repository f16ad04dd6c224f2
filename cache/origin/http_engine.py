"""The engines that read over HTTP(S): web servers, and the Hugging Face Hub."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from email.utils import formatdate, parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from dataload.cache.origin.errors import (
    HttpError,
    UnsuitableError,
    WrongBodyError,
    is_passing,
    is_transient,
    is_unsupported,
)
from dataload.cache.origin.fsspec_engine import Fsspec
from dataload.cache.origin.http import Connections, Response
from dataload.cache.origin.hub import names_commit, resolved
from dataload.cache.origin.identity import address_of
from dataload.cache.origin.translation import OF_FSSPEC, has_proxy, is_class, unknown_options
from dataload.cache.origin.version import MODIFIED, OF_TABLE, Answer, is_tag

LEAST_TIME = "it takes less CPU time than the filesystem"
OF_HTTP = OF_FSSPEC | {
    *("block_size", "cache_options", "cache_type", "client_kwargs", "encoded", "headers", "same_scheme"),
    *("simple_links", "size_policy", "timeout"),
}
OF_HUB = OF_FSSPEC | {"block_size", "endpoint", "expand_info", "live_follow", "max_workers", "token"}
MOST_PLACES = 100_000  # of objects on the Hub, each of which is resolved again after so many others


class Http(Fsspec):
    """Reads from web servers. fsspec's HTTP filesystem lists objects.

    Each request has If-Match, or If-Unmodified-Since at servers without ETags, and each answer is compared.
    """

    name = "http"

    def __init__(self, filesystem: Any) -> None:
        super().__init__(filesystem, LEAST_TIME)
        self._connections = Connections()
        self._sends_conditions = True

    def parts(self, path: str, start: int, stop: int, version: str, seconds: float) -> Iterator[Any]:
        yield from self._response(path, start, stop, version, seconds).parts()

    def _response(self, path: str, start: int, stop: int, version: str, seconds: float) -> Response:
        if not (is_tag(version) or version.startswith((MODIFIED, OF_TABLE))):
            raise UnsuitableError("the server names no version of the object", whole_store=False)
        url = str(self._filesystem.encode_url(path))
        if "@" in urlsplit(url).netloc:
            raise UnsuitableError("the URL has a user", whole_store=False)
        headers = _headers_of(self._filesystem)
        conditions = _conditions(version) if self._sends_conditions else {}
        try:
            response = self._connections.get(url, {**headers, **conditions}, start, stop, seconds)
        except WrongBodyError:  # The object may be shorter now.
            self._check_version(path, version)
            raise
        except HttpError as error:
            if not conditions or not is_unsupported(error):
                raise
            response = self._connections.get(url, headers, start, stop, seconds)  # The answer is compared.
            self._sends_conditions = is_passing(error)
        try:
            answer = _answer_of(response)
            if is_tag(version) and answer.tag is None:
                self._check_version(path, version)
            else:
                self._versions.check(path, version, answer)
        except BaseException:
            response.close()
            raise
        return response


class Hub(Http):
    """Reads from the Hugging Face Hub. `HfFileSystem` lists objects.

    The Hub redirects to where the bytes of a file are. This engine remembers it: each request to the Hub counts against
    a limit of the user. An answer names the content of the file, which is its version.
    """

    def __init__(self, filesystem: Any) -> None:
        super().__init__(filesystem)
        self._places: dict[tuple[str, str], str] = {}
        self._mutex = threading.Lock()

    def _response(self, path: str, start: int, stop: int, version: str, seconds: float) -> Response:
        if (place := self._places.get((path, version))) is not None:
            try:
                return self._connections.get(place, {}, start, stop, seconds)
            except (FileNotFoundError, HttpError) as error:
                if is_transient(error) and not isinstance(error, FileNotFoundError):
                    raise
                self._places.pop((path, version), None)  # Its signature has expired.
        url, headers = resolved(self._filesystem, path)
        response = self._connections.get(url, headers, start, stop, seconds)
        try:
            if not names_commit(path) and not _has(response, version):
                self._check_version(path, version)
            elif urlsplit(response.url).netloc != urlsplit(url).netloc:  # There, no token is needed.
                self._remember(path, version, response.url)
        except BaseException:
            response.close()
            raise
        return response

    def _remember(self, path: str, version: str, url: str) -> None:
        with self._mutex:
            if len(self._places) >= MOST_PLACES:
                self._places.clear()
            self._places[path, version] = url


def web_engine(filesystem: Any) -> Fsspec | None:
    """Return the engine of a filesystem over HTTP or of the Hub; None for others."""
    if filesystem.protocol == "hf":
        reason = is_class(filesystem, "huggingface_hub.hf_file_system.HfFileSystem")
        reason = reason or unknown_options(filesystem, "HfFileSystem", OF_HUB) or _proxy_of(filesystem.endpoint)
        return Fsspec(filesystem, reason) if reason else Hub(filesystem)
    if address_of(filesystem)[0] not in ("http", "https"):
        return None
    reason = is_class(filesystem, "fsspec.implementations.http.HTTPFileSystem")
    reason = reason or unknown_options(filesystem, "the filesystem", OF_HTTP)
    if not reason and (unknown := set(filesystem.client_kwargs) - {"headers", "timeout"}):
        reason = f"the filesystem was given {', '.join(sorted(unknown))} in client_kwargs"
    return Fsspec(filesystem, reason) if reason else Http(filesystem)


def _proxy_of(endpoint: str) -> str | None:
    """Return that a proxy leads to an endpoint; None if none does. This module knows no proxies."""
    return f"a proxy leads to {urlsplit(endpoint).hostname}" if has_proxy(endpoint) else None


def _headers_of(filesystem: Any) -> dict[str, str]:
    """Return the headers that a filesystem over HTTP would send."""
    return {**(filesystem.client_kwargs.get("headers") or {}), **(filesystem.kwargs.get("headers") or {})}


def _conditions(version: str) -> dict[str, str]:
    """Return the headers of a request that no other version answers, as far as HTTP has some."""
    if version.startswith(MODIFIED):
        seconds = int(version.removeprefix(MODIFIED).partition("/")[0])
        return {"If-Unmodified-Since": formatdate(seconds, usegmt=True)}
    return {"If-Match": version} if version.startswith('"') else {}  # A weak ETag matches nothing.


def _answer_of(response: Response) -> Answer:
    headers = response.headers
    total = (headers.get("Content-Range") or "").rpartition("/")[2] or headers.get("Content-Length") or ""
    modified = None
    with suppress(TypeError, ValueError):
        modified = parsedate_to_datetime(headers.get("Last-Modified", ""))
    return Answer(headers.get("ETag"), modified, int(total) if total.isdecimal() else None)


def _has(response: Response, version: str) -> bool:
    """Return whether the Hub says that an answer has this content."""
    names = (response.first.get(name) for name in ("X-Linked-Etag", "X-Xet-Hash", "ETag"))
    return version in {name.removeprefix("W/").strip('"') for name in names if name}
