"""What fsspec's HTTP filesystem lacks: a redirect to another server takes no credentials along."""

from __future__ import annotations

from collections.abc import Coroutine, Generator, Mapping
from typing import Any
from urllib.parse import urljoin, urlsplit

from dataload.errors import OriginError
from dataload.runtime.redact import redacted

REDIRECTS = frozenset({301, 302, 303, 307, 308})
MOST_REDIRECTS = 10
PORTS = {"http": 80, "https": 443}
HARMLESS = frozenset(
    {"accept", "accept-encoding", "if-match", "if-unmodified-since", "range"}
)  # headers, in lower case
HARMLESS_OPTIONS = frozenset({"proxy", "proxy_auth", "proxy_headers", "ssl", "timeout"})


def guarded_http(filesystem: Any) -> None:
    """Make a filesystem send headers, cookies and passwords to the server of a URL alone, also after a redirect."""
    if "set_session" in vars(filesystem):
        return
    own = filesystem.set_session

    async def set_session() -> Any:
        return _Redirecting(await own())

    filesystem.set_session = set_session


class _Redirecting:
    """A session of aiohttp that follows redirects to other servers without what its user has set."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def get(self, url: Any, **options: Any) -> _Response:
        return _Response(self._follow("GET", url, **options))

    def head(self, url: Any, allow_redirects: bool = False, **options: Any) -> _Response:
        return _Response(self._follow("HEAD", url, allow_redirects=allow_redirects, **options))

    async def _follow(self, method: str, url: Any, *, allow_redirects: bool = True, **options: Any) -> Any:
        from yarl import URL

        is_own = True
        for _ in range(MOST_REDIRECTS):
            request = self._session.request if is_own else self._request_elsewhere
            answer = await request(method, url, **options, allow_redirects=False)
            location = answer.headers.get("Location")
            if not allow_redirects or location is None or answer.status not in REDIRECTS:
                return answer
            answer.release()
            target, is_same_server = redirected(str(answer.url), location)
            url = URL(target)
            options.pop("params", None)
            if not is_same_server:
                is_own = False
                headers = harmless(options.get("headers", {}))
                options = {name: value for name, value in options.items() if name in HARMLESS_OPTIONS}
                options["headers"] = headers
        raise OriginError(f"{redacted(url)} is redirected more than {MOST_REDIRECTS} times: name the final URL")

    async def _request_elsewhere(self, method: str, url: Any, **options: Any) -> Any:
        """Make a request over the same connections, without what the session adds."""
        import aiohttp

        base = self._session
        session = aiohttp.ClientSession(
            connector=base.connector, connector_owner=False, timeout=base.timeout, trust_env=base.trust_env
        )
        try:
            return await session.request(method, url, **options)
        finally:
            session.detach()


def redirected(url: str, location: str) -> tuple[str, bool]:
    """Return where a redirect leads, and whether to the same server, perhaps with encryption now.

    Raises:
        OriginError: It leads to a server without encryption, or to what is no URL.
    """
    try:
        target = urljoin(url, location)
        before, after = urlsplit(url), urlsplit(target)
        _ = before.port, after.port  # They raise for what is no port.
    except ValueError:
        raise OriginError(f"{redacted(url)} redirects to what is no URL: name the final URL") from None
    if (before.scheme, after.scheme) == ("https", "http") or after.scheme not in PORTS:
        fix = "name a URL that stays with https"
        raise OriginError(f"{redacted(url)} redirects to {redacted(target)}, without encryption: {fix}")
    servers = [(each.scheme, each.hostname, each.port or PORTS[each.scheme]) for each in (before, after)]
    encrypts = servers == [("http", before.hostname, 80), ("https", before.hostname, 443)]
    return target, encrypts or servers[0] == servers[1]


def harmless(headers: Mapping[str, str]) -> dict[str, str]:
    """Return those headers that any server may see."""
    return {name: text for name, text in headers.items() if name.lower() in HARMLESS}


class _Response:
    """The answer to a request, to be awaited or entered."""

    def __init__(self, request: Coroutine[Any, Any, Any]) -> None:
        self._request = request

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._request.__await__()

    async def __aenter__(self) -> Any:
        self._answer = await self._request
        return await self._answer.__aenter__()

    async def __aexit__(self, *error: object) -> None:
        await self._answer.__aexit__(*error)
