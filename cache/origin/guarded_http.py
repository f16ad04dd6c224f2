"""What fsspec's HTTP filesystem lacks: a redirect to another server takes no credentials along."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any

from dataload.errors import OriginError
from dataload.runtime.redact import redacted

REDIRECTS = frozenset({301, 302, 303, 307, 308})
MOST_REDIRECTS = 10
ENCRYPTS = ("http", 80, "https", 443)
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
            before, url = answer.url, answer.url.join(URL(location))
            options.pop("params", None)
            if (before.scheme, url.scheme) == ("https", "http"):
                fix = "name a URL that stays with https"
                raise OriginError(f"{redacted(before)} redirects to {redacted(url)}, without encryption: {fix}")
            if not _is_same_server(before, url):
                is_own = False
                headers = {name: text for name, text in options.get("headers", {}).items() if name.lower() in HARMLESS}
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


def _is_same_server(before: Any, url: Any) -> bool:
    """Return whether a URL has the server of the one before, perhaps with encryption now."""
    encrypts = before.host == url.host and (before.scheme, before.port, url.scheme, url.port) == ENCRYPTS
    return bool(encrypts or before.origin() == url.origin())


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
