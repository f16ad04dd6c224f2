"""Presigned URLs: the signature lets a request pass, and names nothing."""

from __future__ import annotations

import http.server
import traceback
from collections.abc import Iterator
from functools import partial
from typing import Any

import fsspec
import pytest
from http_servers import serving

from dataload import CacheConfig, make_dataset, make_loader
from dataload.cache.origin.origin import Origin
from dataload.errors import OriginError


def presigned(bucket: Any, names: list[str], seconds: int) -> list[str]:
    return [
        bucket.client.generate_presigned_url("get_object", {"Bucket": bucket.name, "Key": name}, seconds)
        for name in names
    ]


def test_new_signatures_are_of_the_same_dataset(bucket: Any, dataset_of: Any, cache: CacheConfig) -> None:
    dataset_of([[5, 5], [7]])
    names = [each["Key"] for each in bucket.client.list_objects_v2(Bucket=bucket.name)["Contents"]]
    first, second = (make_dataset(presigned(bucket, names, seconds), cache=cache) for seconds in (100, 200))
    assert first.fingerprint == second.fingerprint
    assert [part.fingerprint for part in first.split([0.5, 0.5])] == [
        part.fingerprint for part in second.split([0.5, 0.5])
    ]
    rows = [first[number]["row_id"] for number in range(len(first))]
    fetched = first.blocks.stats()["bytes_origin"]
    assert [second[number]["row_id"] for number in range(len(second))] == rows
    assert second.blocks.stats()["bytes_origin"] == 0 < fetched
    state = make_loader(first, 2).state_dict()
    make_loader(second, 2).load_state_dict(state)


class _Expired(http.server.BaseHTTPRequestHandler):
    """A store that rejects the signature of each URL."""

    def do_GET(self) -> None:
        self.send_response(403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815 (a name of http.server)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def expired() -> Iterator[str]:
    with serving(_Expired) as url:
        yield f"{url}/x.parquet"


def test_an_expired_signature_is_named(expired: str) -> None:
    url = f"{expired}?X-Amz-Expires=60&X-Amz-Signature=s3cret"
    origin = Origin(fsspec.filesystem("http", skip_instance_cache=True))
    for call in (lambda: origin.info(url), lambda: origin.read(url, 0, 10, "v")):
        with pytest.raises(OriginError, match="the signature of the URL has expired or is wrong: pass a new") as raised:
            call()
        assert "s3cret" not in str(raised.value)
    with pytest.raises(OriginError, match="check the credentials"):
        origin.info(expired)


def test_the_traceback_of_an_error_shows_no_credentials(expired: str) -> None:
    origin = Origin(fsspec.filesystem("http", skip_instance_cache=True))
    for url in (f"{expired}?X-Amz-Expires=60&X-Amz-Signature=s3cret", expired.replace("//", "//user:s3cret@")):
        for call in (partial(origin.info, url), partial(origin.read, url, 0, 10, "v")):
            with pytest.raises(OriginError, match="403") as raised:
                call()
            assert "s3cret" not in "".join(traceback.format_exception(raised.value))
    with pytest.raises(OriginError, match="403") as raised:
        origin.info(expired)
    assert raised.value.__cause__ is not None
