"""Stores as they are: whatever one answers, the rows are exact, or one clear error names what to do."""

from __future__ import annotations

import io
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from credential_services import PROVIDERS, issuing
from faulty_store import Answer, Asked, Store, faulty_store

import dataload
from dataload.errors import ConfigError, OriginError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_aws_settings")]
ROWS = 400
ODD_NAMES = ("a b", "ü", "a+b", "a%20b", "a=b&c", "./d")


@dataclass
class Case:
    """A store that misbehaves, and what comes of it: rows, or an error with this text.

    `{store}` in variables and options stands for the address of the store, and `{nobody}` for one without a server.
    """

    store: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    source: str = "s3://bucket/d"
    options: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)


def some(kind: str, numbers: Callable[[int], bool], answer: Answer) -> dict[str, Any]:
    """Return arguments of `Store`: some requests of a kind get this answer."""
    return {"fault": lambda asked: replace(answer) if asked.kind == kind and numbers(asked.number) else None}


def first(kind: str, *answers: Answer) -> dict[str, Any]:
    """Return arguments of `Store`: the first requests of a kind get these answers."""
    return {"fault": lambda asked: dict(enumerate(answers)).get(asked.number) if asked.kind == kind else None}


def spoilt(kind: str, most: int, **changes: Any) -> dict[str, Any]:
    """Return arguments of `Store`: the right answers to the first requests of a kind are changed."""

    def spoil(asked: Asked, answer: Answer) -> Answer:
        return replace(answer, **changes) if asked.kind == kind and asked.number < most else answer

    return {"spoil": spoil}


def always(kind: str, status: int, code: str = "", **headers: str) -> dict[str, Any]:
    return some(kind, lambda _: True, Answer.error(status, code, **headers))


def with_headers(drop: str = "", **headers: str) -> dict[str, Any]:
    """Return arguments of `Store`: answers to GET have other headers."""

    def spoil(asked: Asked, answer: Answer) -> Answer:
        if asked.kind != "get":
            return answer
        kept = {name: value for name, value in answer.headers.items() if name != drop}
        return replace(answer, headers=kept | {name.replace("_", "-"): value for name, value in headers.items()})

    return {"spoil": spoil}


def in_region(region: str) -> dict[str, Any]:
    """Return arguments of `Store`: it answers requests that are signed for another region as Amazon does."""

    def refuse(asked: Asked) -> Answer | None:
        signed = asked.headers.get("Authorization", "")
        if f"/{region}/s3/" in signed:
            return None
        return Answer.error(400, "AuthorizationHeaderMalformed", f"expecting '{region}'", x_amz_bucket_region=region)

    return {"fault": refuse, "region": region}


WEST = {"AWS_DEFAULT_REGION": "us-west-1"}
PROXY = "http://user:s3cret@{store}"
BEHIND = {"endpoint_url": "http://store.invalid"}  # which the proxy alone knows


CASES = {
    # Regions
    "the region of the client": Case(in_region("eu-west-3"), options={"client_kwargs": {"region_name": "eu-west-3"}}),
    "the region of a variable": Case(in_region("eu-west-3"), variables={"AWS_DEFAULT_REGION": "eu-west-3"}),
    "the region of a variable that botocore ignores": Case(
        in_region("eu-west-3"), "set AWS_DEFAULT_REGION", variables={"AWS_REGION": "eu-west-3"}
    ),
    "another region": Case(in_region("eu-west-3"), "region of the bucket", variables=WEST),
    "a region of no form": Case(options={"client_kwargs": {"region_name": "a b"}}, error="region"),
    # Proxies
    "a proxy": Case(options=BEHIND, variables={"http_proxy": PROXY}),
    "a proxy of all schemes, which botocore ignores": Case(
        options=BEHIND, variables={"all_proxy": PROXY}, error="cannot be reached"
    ),
    "a proxy of an option": Case(options=BEHIND | {"config_kwargs": {"proxies": {"http": PROXY}}}),
    "a proxy that is not for this host": Case(variables={"http_proxy": "http://{nobody}", "no_proxy": "127.0.0.1"}),
    "a proxy without a server": Case(
        options=BEHIND, variables={"http_proxy": "http://user:s3cret@{nobody}"}, error="HTTP_PROXY"
    ),
    "a proxy that wants a password": Case(
        always("list", 407, Proxy_Authenticate="Basic"), "HTTP_PROXY", options=BEHIND, variables={"http_proxy": PROXY}
    ),
    "a proxy that answers with a page": Case(
        some("list", lambda _: True, Answer(200, b"<html><body>Sign in</body></html>", {"Content-Type": "text/html"})),
        "check bucket, prefix and endpoint", options=BEHIND, variables={"http_proxy": PROXY},
    ),
    **{f"a proxy that answers once with {status}": Case(
        first("get", Answer.error(status, "")), options=BEHIND, variables={"http_proxy": PROXY}
    ) for status in (502, 503, 504)},
    # Throttling and outages
    **{f"a get answered once with {status}": Case(first("get", Answer.error(status, code))) for status, code in (
        (500, "InternalError"), (502, ""), (503, "SlowDown"), (503, "ServiceUnavailable"), (504, ""), (429, ""),
        (408, "RequestTimeout"), (503, ""),
    )},
    **{f"a listing answered once with {status}": Case(first("list", Answer.error(status, code))) for status, code in (
        (500, "InternalError"), (503, "SlowDown"), (429, ""), (502, "")
    )},
    "each third get throttled": Case(some("get", lambda n: n % 3 == 0, Answer.error(503, "SlowDown"))),
    "a listing cut off": Case(spoilt("list", 1, cut=100)),
    # Connections
    "bodies cut short": Case(spoilt("get", 2, cut=100)),
    "bodies cut by a reset": Case(spoilt("get", 2, cut=100, reset=True)),
    "bodies that begin late": Case(spoilt("get", 4, pause=0.3)),
    "bodies in small parts": Case(spoilt("get", 20, pause=0.01, parts=20)),
    # Listings
    **{f"a listing that is {kind}": Case({"listing": kind, "page": 2}) for kind in ("v2",)},
    **{f"a {kind} listing of pages of ten": Case({"listing": kind, "page": 10}) for kind in ("tokenless", "v1")},
    "a listing that repeats": Case({"listing": "repeating", "page": 5}, "with an earlier one"),
    **{f"a listing refused with {status} {code}": Case(always("list", status, code), error) for status, code, error in (
        (403, "AccessDenied", "denied access"),
        (404, "NoSuchBucket", "check the name of the bucket"),
        (501, "NotImplemented", "name its files in a list"),
        (400, "InvalidArgument", "name its files in a list"),
        (400, "ExpiredToken", "renew the token"),
        (403, "InvalidAccessKeyId", "to a key of this store"),
        (403, "SignatureDoesNotMatch", "own secret"),
        (403, "RequestTimeTooSkewed", "set the clock"),
        (400, "AuthorizationHeaderMalformed", "region of the bucket"),
        (301, "PermanentRedirect", "region of the bucket"),
    )},
    # Objects
    **{f"objects refused with {status} {code}": Case(always("get", status, code), error) for status, code, error in (
        (403, "AccessDenied", "denied access"),
        (403, "InvalidObjectState", "restore the object"),
        (404, "NoSuchKey", "is gone from"),
        (400, "ExpiredToken", "renew the token"),
        (412, "PreconditionFailed", "was replaced"),
        (416, "InvalidRange", "was replaced"),
    )},
    # Identity and changes
    "no etags": Case({"tags": False}),
    "no etags, and conditions ignored": Case({"tags": False, "conditions": False}),
    "no dates": Case({"dates": False}),
    "etags in listings alone": Case({"tags": "listed"}),
    "conditions ignored": Case({"conditions": False}),
    **{f"conditions rejected with {status}": Case({
        "fault": lambda asked, status=status: Answer.error(status, "") if "If-Match" in asked.headers else None
    }) for status in (400, 501)},
    # Redirects
    **{f"a redirect by {status}": Case(always("get", status, Location="http://localhost:1/x"), "redirect")
       for status in (302, 307, 308)},
    "an address without a server": Case(options={"endpoint_url": "http://127.0.0.1:9"}, error="cannot be reached"),
    "TLS without a certificate": Case(options={"endpoint_url": "https"}, error="SSL"),
    # Names
    **{f"a name with {name!r}": Case(source=f"s3://bucket/{name}") for name in ODD_NAMES},
    "whitespace around the URL": Case(source="s3://bucket/nothing ", error="whitespace"),
    "braces": Case(source="s3://bucket/{d,e}", error="braces"),
    "nothing there": Case(source="s3://bucket/nothing", error="no objects"),
    **{f"the option {name}": Case(options={name: "x"}, error="which s3fs calls")
       for name in ("region", "aws_access_key_id", "aws_secret_access_key", "endpoint")},
}  # fmt: skip


def fill(store: Store, folder: str) -> None:
    """Write `ROWS` rows in 20 files."""
    for number in range(20):
        sink = io.BytesIO()
        pq.write_table(pa.table({"x": range(20 * number, 20 * number + 20)}), sink)
        store.put(f"{folder}/{number:02d}.parquet", sink.getvalue())


def rows(source: str, options: dict[str, Any], tmp_path: Path) -> list[int]:
    loader = dataload.make_loader(
        source, 16, storage_options=options, cache_dir=str(tmp_path / "cache"), cache_bytes="50MB"
    )
    return sorted(int(row) for batch in loader for row in batch["x"])


def placed(options: Any, places: dict[str, str]) -> Any:
    """Return options with the addresses of a test."""
    if isinstance(options, dict):
        return {name: placed(value, places) for name, value in options.items()}
    return options.format(**places) if isinstance(options, str) else options


@pytest.mark.parametrize("client", ["obstore", "s3fs"])
@pytest.mark.parametrize("name", CASES)
def test_the_rows_are_exact_or_one_error_is_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, client: str
) -> None:
    case = CASES[name]
    with faulty_store(**case.store) as store, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        places = {"store": store.url.removeprefix("http://"), "nobody": f"127.0.0.1:{nobody.getsockname()[1]}"}
        for variable, value in case.variables.items():
            monkeypatch.setenv(variable, value.format(**places))
        fill(store, case.source.removeprefix("s3://bucket/") if case.error is None else "d")
        options = store.options | placed(case.options, places) | ({"version_aware": False} if client == "s3fs" else {})
        if options["endpoint_url"] == "https":
            options["endpoint_url"] = store.url.replace("http:", "https:")
        if case.error is None:
            assert rows(case.source, options, tmp_path) == [*range(ROWS)]
        else:
            with pytest.raises((OriginError, ConfigError), match=case.error) as raised:
                rows(case.source, options, tmp_path)
            assert "\n" not in str(raised.value)
            assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize("minutes", [4, 60])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_epoch_survives_new_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str, minutes: int
) -> None:
    with (
        issuing(provider, tmp_path, monkeypatch, timedelta(minutes=minutes)) as issuer,
        faulty_store(fault=issuer.fault) as store,
    ):
        fill(store, "d")
        issuer.valid = 2  # Else a request that is repeated with new ones could find them old already.
        loader = dataload.make_loader(
            "s3://bucket/d", 16, storage_options={"endpoint_url": store.url}, cache=False, window=1
        )
        seen = []
        for number, batch in enumerate(loader):
            seen += [int(row) for row in batch["x"]]
            if number in (2, 4, 6, 8):
                issuer.rotate()
        assert sorted(seen) == [*range(ROWS)]
