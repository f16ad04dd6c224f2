"""The S3 server of the tests: its counters, its connections and its faults."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import urllib.request

import boto3
import botocore.exceptions
import pytest
import s3fs
from moto_server import S3Server, classify

BODY = bytes(range(256)) * 4096  # 1 MiB
# moto requires a signature but does not verify it.
SIGNED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=testing/20200101/us-east-1/s3/aws4_request, "
    "SignedHeaders=host, Signature=0"
}


@pytest.fixture(autouse=True)
def no_aws(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)


def client_of(server):
    options = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
    return boto3.client("s3", endpoint_url=server.endpoint_url, **options)


@pytest.fixture
def own():
    """A new server with one object, bucket/folder/object, and counters at zero."""
    with S3Server() as server:
        client = client_of(server)
        client.create_bucket(Bucket="bucket")
        client.put_object(Bucket="bucket", Key="folder/object", Body=BODY)
        client.close()
        server.reset()
        yield server


def counted(server):
    stats = server.stats()
    return stats["get_requests"], stats["get_bytes"]


def test_counts_agree_with_boto3(own):
    client = client_of(own)
    assert client.get_object(Bucket="bucket", Key="folder/object")["Body"].read() == BODY
    assert counted(own) == (1, len(BODY))
    part = client.get_object(Bucket="bucket", Key="folder/object", Range="bytes=100-299")
    assert part["Body"].read() == BODY[100:300]
    assert part["ContentRange"] == f"bytes 100-299/{len(BODY)}"
    assert counted(own) == (2, len(BODY) + 200)
    client.head_object(Bucket="bucket", Key="folder/object")
    client.list_objects_v2(Bucket="bucket")
    client.put_object(Bucket="bucket", Key="other", Body=b"abc")
    assert own.stats() == {
        "get_requests": 2,
        "get_bytes": len(BODY) + 200,
        "head_requests": 1,
        "list_requests": 1,
        "other_requests": 1,
    }
    client.close()


def test_counts_agree_with_s3fs(own):
    filesystem = s3fs.S3FileSystem(**own.storage_options, skip_instance_cache=True)
    assert filesystem.ls("bucket/folder") == ["bucket/folder/object"]
    starts = [0, 1000, 500_000]
    ends = [10, 2000, len(BODY)]
    parts = filesystem.cat_ranges(["bucket/folder/object"] * 3, starts, ends)
    assert parts == [BODY[start:end] for start, end in zip(starts, ends, strict=True)]
    assert counted(own) == (3, sum(map(len, parts)))
    filesystem.pipe_file("bucket/new", BODY * 6)  # more than one part of an upload
    assert filesystem.cat_file("bucket/new") == BODY * 6
    assert {(sent.path, sent.range) for sent in own.requests if sent.method == "GET" and sent.range} == {
        ("/bucket/folder/object", f"bytes={start}-{end - 1}") for start, end in zip(starts, ends, strict=True)
    }


def test_failed_requests_are_counted_with_what_they_sent(own):
    client = client_of(own)
    with pytest.raises(botocore.exceptions.ClientError, match="NoSuchKey"):
        client.get_object(Bucket="bucket", Key="missing")
    with pytest.raises(botocore.exceptions.ClientError, match="PreconditionFailed"):
        client.get_object(Bucket="bucket", Key="folder/object", IfMatch='"other"')
    assert [sent.status for sent in own.requests] == [404, 412]
    assert own.stats()["get_requests"] == 2
    assert own.stats()["get_bytes"] == sum(sent.num_bytes for sent in own.requests) < 2000
    client.close()


def test_one_connection_serves_many_requests(own):
    connection = http.client.HTTPConnection("127.0.0.1", int(own.endpoint_url.rpartition(":")[2]))
    connection.connect()
    socket_name = connection.sock.getsockname()
    for method, path, body in (
        ("GET", "/bucket/folder/object", None),
        ("PUT", "/bucket/small", b"x" * 1000),
        ("HEAD", "/bucket/small", None),
        ("GET", "/bucket/missing", None),
        ("DELETE", "/bucket/small", None),
        ("GET", "/bucket/folder/object", None),
    ):
        connection.request(method, path, body, SIGNED)
        answer = connection.getresponse()
        content = answer.read()
        assert connection.sock is not None, f"closed after {method} {path}"
        assert connection.sock.getsockname() == socket_name
    assert content == BODY
    connection.close()


def test_uploads_may_come_in_chunks(own):
    connection = http.client.HTTPConnection("127.0.0.1", int(own.endpoint_url.rpartition(":")[2]))
    for key in ("first", "second"):
        connection.request("PUT", f"/bucket/{key}", iter([b"abc", b"defg"]), SIGNED)  # no length: chunked
        assert connection.getresponse().read() == b""
        connection.request("GET", f"/bucket/{key}", headers=SIGNED)
        assert connection.getresponse().read() == b"abcdefg"
    connection.close()


def test_other_processes_read_the_counts(own):
    client = client_of(own)
    client.get_object(Bucket="bucket", Key="folder/object")["Body"].read()
    client.close()
    with urllib.request.urlopen(own.stats_url) as answer:
        read = json.load(answer)
    assert read == own.stats()
    assert read["get_requests"] == 1
    own.reset()
    assert counted(own) == (0, 0)
    assert own.requests == []


def test_nothing_of_a_server_outlives_it():
    before = set(threading.enumerate())
    with S3Server() as server:
        port = int(server.endpoint_url.rpartition(":")[2])
        idle = http.client.HTTPConnection("127.0.0.1", port)
        idle.request("PUT", "/bucket", headers=SIGNED)
        idle.getresponse().read()
        assert idle.sock is not None
        assert set(threading.enumerate()) - before
    assert set(threading.enumerate()) <= before
    assert idle.sock.recv(1) == b""
    idle.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with S3Server() as server:
        client = client_of(server)
        assert client.list_buckets()["Buckets"] == []
        client.close()


@pytest.mark.parametrize("sent", [1000, 0])
def test_faults_can_be_put_in_front(sent):
    """The client sees a truncated body, only the sent bytes are counted, and an exception becomes a 500."""

    def faulty(app):
        def wrapped(environ, start_response):
            if environ["PATH_INFO"].endswith("crash"):
                raise RuntimeError("on purpose")
            body = b"".join(app(environ, start_response))
            return [body[:sent]] if environ["REQUEST_METHOD"] == "GET" else [body]

        return wrapped

    with S3Server(wrap=faulty) as server:
        client = client_of(server)
        client.create_bucket(Bucket="bucket")
        client.put_object(Bucket="bucket", Key="object", Body=BODY)
        client.close()
        connection = http.client.HTTPConnection("127.0.0.1", int(server.endpoint_url.rpartition(":")[2]))
        connection.request("GET", "/bucket/object", headers=SIGNED)
        with pytest.raises(http.client.IncompleteRead):
            connection.getresponse().read()
        assert counted(server) == (1, sent)
        connection.close()
        connection.request("GET", "/bucket/crash")
        assert connection.getresponse().status == 500
        connection.close()


@pytest.mark.parametrize(
    ("method", "path", "query", "kind"),
    [
        ("GET", "/bucket/key", "", "get"),
        ("GET", "/bucket/a/b", "x-id=GetObject&versionId=null", "get"),
        ("GET", "/bucket/key", "tagging", "other"),
        ("GET", "/bucket", "list-type=2&prefix=a", "list"),
        ("GET", "/bucket/", "", "list"),
        ("GET", "/", "", "list"),
        ("HEAD", "/bucket/key", "", "head"),
        ("PUT", "/bucket/key", "partNumber=1&uploadId=x", "other"),
    ],
)
def test_requests_are_classified(method, path, query, kind):
    assert classify(method, path, query) == kind
