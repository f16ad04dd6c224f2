"""What s3fs lacks: listings that lose nothing at stores without tokens, and no redirects to other hosts."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import quote
from weakref import WeakSet

from dataload.cache.origin.known_s3 import read_bundle
from dataload.cache.origin.retries import is_repeated
from dataload.errors import OriginError
from dataload.runtime.redact import redacted

# Begins our continuation tokens, which also describe the page: "<mark><length>:<token of the store><page>". It is its
# last name; with a token of the store its first and last name, as some stores have an order of their own.
MARK = "dataload-page:"
PAGE, TOKEN = "dataload_page", "dataload_token"  # of the context of a request
OPERATIONS = ("GetObject", "HeadObject", "ListObjectsV2")  # that dataload repeats itself
LAST = "\U0010ffff"  # sorts after all names below a folder
LIST_FILES = "name its files in a list, or use a store that pages its listings"

_guarded: WeakSet[Any] = WeakSet()


def guarded_s3(filesystem: Any) -> None:
    """Make the clients of an s3fs filesystem list completely, and follow no redirect."""
    if "get_s3" not in vars(filesystem):
        own = filesystem.get_s3

        async def get_s3(bucket: str | None = None) -> Any:  # Each client of s3fs comes from here.
            client = await own(bucket)
            if client not in _guarded:
                bundle = os.environ.get("AWS_CA_BUNDLE")
                if bundle and filesystem.client_kwargs.get("verify") is None:
                    read_bundle(bundle)  # aiohttp would name neither file nor variable.
                _guarded.add(client)
                _guard(client)
            return client

        filesystem.get_s3 = get_s3


def lacks_token(answer: dict[str, Any]) -> bool:
    """Return whether a page of a listing says that more follows, without the store's own token for it."""
    return bool(answer.get("IsTruncated")) and not _opened(answer.get("NextContinuationToken", ""))[0]


def _guard(client: Any) -> None:
    events = client.meta.events
    events.register("provide-client-params.s3.ListObjectsV2", _continue)
    events.register("before-call.s3.ListObjectsV2", _add_marker)
    events.register_last("after-call.s3.ListObjectsV2", _check_page)
    for operation in OPERATIONS:
        events.register_first(f"needs-retry.s3.{operation}", _raise_at_once)
    session = client._endpoint.http_session  # noqa: SLF001 (botocore has no public name for it)
    own = getattr(session, "_get_session", None)
    if own is not None:  # httpx, the other transport, follows no redirects by itself.

        async def get_session(proxy: Any) -> Any:
            return _Unredirected(await own(proxy))

        session._get_session = get_session  # noqa: SLF001


def _raise_at_once(caught_exception: Exception | None = None, **_: Any) -> None:
    """Raise the error of a server that cannot be reached: `Origin` repeats its requests, and says for how long.

    The program's own requests, through the same filesystem, keep the retries of botocore and s3fs.
    """
    from botocore.exceptions import ConnectionError as UnreachableError  # type: ignore[import-untyped]
    from botocore.exceptions import HTTPClientError

    if is_repeated.get() and isinstance(caught_exception, UnreachableError):
        raise caught_exception
    if is_repeated.get() and isinstance(caught_exception, HTTPClientError):  # s3fs would repeat this one.
        raise ConnectionError(str(caught_exception)) from caught_exception


class _Unredirected:
    """A session of aiohttp that follows no redirects. botocore finds the region of a bucket without them."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def request(self, *args: Any, **options: Any) -> Any:
        return self._session.request(*args, **options, allow_redirects=False)


def _continue(params: dict[str, Any], context: dict[str, Any], **_: Any) -> dict[str, Any]:
    """Replace our token by the store's. Without one, go on after the last name."""
    given = params.get("ContinuationToken", "")
    if not given.startswith(MARK):
        return params
    token, page = _opened(given)
    context.update({TOKEN: token, PAGE: page})
    rest = {name: value for name, value in params.items() if name != "ContinuationToken"}
    return {**rest, "ContinuationToken": token} if token else {**rest, "StartAfter": page}


def _add_marker(params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
    """Name the last name as older stores expect it, too, which ignore what is newer."""
    if PAGE in context and not context[TOKEN]:
        params["url"] += f"&marker={quote(context[PAGE], safe='')}"


def _check_page(parsed: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
    if "Error" in parsed:
        return
    names = [each["Key"] for each in parsed.get("Contents", ())]
    names += [f"{each['Prefix']}{LAST}" for each in parsed.get("CommonPrefixes", ())]
    token, sent, before = parsed.get("NextContinuationToken", ""), context.get(TOKEN, ""), context.get(PAGE, "")
    follows = bool(parsed.get("IsTruncated"))
    if token or (sent and not follows):
        page = f"{names[0]}\0{names[-1]}" if names else ""  # Amazon may send an empty page before the next one.
        repeats = bool(token and token == sent) or bool(page and page == before)
    else:
        after = "" if sent else before
        page = max([after, *names])
        repeats = page == after and (follows or bool(names))
    if repeats:
        place = redacted(f"s3://{parsed.get('Name', '')}/{parsed.get('Prefix', '')}")
        what = "the store answers a request for the next page of a listing with an earlier one"
        raise OriginError(f"{place}: {what}: {LIST_FILES}")
    if follows:
        parsed["NextContinuationToken"] = f"{MARK}{len(token)}:{token}{page}"


def _opened(given: str) -> tuple[str, str]:
    """Return the store's token and what describes the page in a token of ours."""
    if not given.startswith(MARK):
        return given, ""
    length, _, rest = given.removeprefix(MARK).partition(":")
    return rest[: int(length)], rest[int(length) :]
