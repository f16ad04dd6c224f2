"""What s3fs lacks: listings that lose nothing at stores without tokens, and no redirects to other hosts."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import quote
from weakref import WeakSet

from dataload.cache.origin.known_s3 import read_bundle
from dataload.errors import OriginError
from dataload.runtime.redact import redacted

# Begins our continuation tokens, which also hold the last name of the page: "<mark><length>:<token of the store><name>"
MARK = "dataload-page:"
AFTER, TOKEN = "dataload_after", "dataload_token"  # of the context of a request
UNSORTED = "--x-s3"  # ends the names of directory buckets, whose listings have no order
LAST = "\U0010ffff"  # sorts after all names below a folder
LIST_FILES = "name its files in a list, or use a store that pages its listings"

_guarded: WeakSet[Any] = WeakSet()


def guarded_s3(filesystem: Any) -> None:
    """Make the clients of an s3fs filesystem list completely, and follow no redirect."""
    if "get_s3" not in vars(filesystem):
        own = filesystem.get_s3

        async def get_s3(bucket: str | None = None) -> Any:  # Each client of s3fs comes from here.
            if bundle := os.environ.get("AWS_CA_BUNDLE"):
                read_bundle(bundle)  # aiohttp would name neither file nor variable.
            client = await own(bucket)
            if client not in _guarded:
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
    events.register_first("needs-retry.s3", _raise_at_once)
    session = client._endpoint.http_session  # noqa: SLF001 (botocore has no public name for it)
    own = getattr(session, "_get_session", None)
    if own is not None:  # httpx, the other transport, follows no redirects by itself.

        async def get_session(proxy: Any) -> Any:
            return _Unredirected(await own(proxy))

        session._get_session = get_session  # noqa: SLF001


def _raise_at_once(caught_exception: Exception | None = None, **_: Any) -> None:
    """Raise the error of a server that cannot be reached: `Origin` repeats requests, and says for how long."""
    from botocore.exceptions import ConnectionError as UnreachableError  # type: ignore[import-untyped]

    if isinstance(caught_exception, UnreachableError):
        raise caught_exception


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
    token, last = _opened(given)
    context.update({TOKEN: token, AFTER: last})
    rest = {name: value for name, value in params.items() if name != "ContinuationToken"}
    return {**rest, "ContinuationToken": token} if token else {**rest, "StartAfter": last}


def _add_marker(params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
    """Name the last name as older stores expect it, too, which ignore what is newer."""
    if AFTER in context and not context[TOKEN]:
        params["url"] += f"&marker={quote(context[AFTER], safe='')}"


def _check_page(parsed: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
    if "Error" in parsed:
        return
    keys = [each["Key"] for each in parsed.get("Contents", ())]
    folders = [f"{each['Prefix']}{LAST}" for each in parsed.get("CommonPrefixes", ())]
    after = context.get(AFTER, "")
    last = max([after, *keys, *folders])
    token = parsed.get("NextContinuationToken", "")
    place = redacted(f"s3://{parsed.get('Name', '')}/{parsed.get('Prefix', '')}")
    advances = last > after or not (keys or folders)  # Amazon may send an empty page before the next one.
    repeats = bool(token) and token == context.get(TOKEN)
    lost = bool(parsed.get("IsTruncated")) and not (token or last > after)
    if not parsed.get("Name", "").endswith(UNSORTED) and (not advances or repeats or lost):
        what = "the store answers a request for the next page of a listing with an earlier one"
        raise OriginError(f"{place}: {what}: {LIST_FILES}")
    if parsed.get("IsTruncated"):
        parsed["NextContinuationToken"] = f"{MARK}{len(token)}:{token}{last}"


def _opened(given: str) -> tuple[str, str]:
    """Return the store's token and the last name in a token of ours."""
    if not given.startswith(MARK):
        return given, ""
    length, _, rest = given.removeprefix(MARK).partition(":")
    return rest[: int(length)], rest[int(length) :]
