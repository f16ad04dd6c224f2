"""S3 without s3fs: the same names, sizes, versions, identities and errors."""

from __future__ import annotations

import http.server
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from http_servers import serving

from dataload.benchmarks.origin import Origin as Server
from dataload.benchmarks.origin import s3
from dataload.cache.blocks.reader import Blocks
from dataload.cache.origin import obstore
from dataload.cache.origin.credentials import Credentials
from dataload.cache.origin.deferred_s3 import DeferredS3, deferred_s3
from dataload.cache.origin.known_s3 import KnownS3
from dataload.cache.origin.origin import Origin
from dataload.cache.origin.s3_names import _lists_prefixes
from dataload.cache.origin.source import open_source
from dataload.cache.origin.version import version_of
from dataload.errors import OriginError

KEYS = {
    **{f"plain/part-{number}.parquet": b"x" * (number + 1) for number in range(3)},
    **{f"hive/day={day}/part.parquet": b"xy" for day in (1, 2)},
    "spark/_SUCCESS": b"",
    "spark/part.parquet": b"abc",
    "spark/empty": b"",
    "spark/sub/": b"",
    "spark/": b"",
    "marked/sub/": b"not empty",
    "marked/sub/part.parquet": b"abc",
    "odd/a//b": b"1",
    "odd/ü é%20[1]~.parquet": b"12",
    "odd/x y+z.parquet": b"123",
    "ü%41/part.parquet": b"1",
    "both": b"12",
    "both/part.parquet": b"1",
    **{f"many/sub-{number}/": b"" for number in range(12)},
    "plain-2/part.parquet": b"1",
    "only/": b"",
}
PATHS = ["plain", "hive", "spark", "marked", "odd", "ü%41", "both", "many", "only", "plain/part-1.parquet", "nothing"]
PATHS += ["", "plain/*", "plain/part-[12].parquet", "hive/*/*.parquet", "hive/**", "hive/**/*.parquet", "pl*/*"]
PATHS += ["spark/*", "marked/*", "odd/*", "many/*", "nothing/*", "plain/part-?.parquet", "ü%41/*", "both/", "hive/*"]


pytestmark = pytest.mark.usefixtures("no_aws_settings")


def through_s3fs(options: dict[str, Any]) -> Origin:
    return Origin(fsspec.filesystem("s3", **options), engine="fsspec")


def deferred(options: dict[str, Any]) -> Origin:
    return Origin(DeferredS3(**options))


def listed(origin: Origin, path: str) -> Any:
    """Return name, size and version of the objects at a path, or the error."""
    try:
        return {(info["name"], info["size"], version_of(info)) for info in origin.list(path).values()}
    except Exception as error:
        return type(error), str(error)


@pytest.fixture(scope="module")
def tree(server: Any) -> str:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        aws_access_key_id="k",
        aws_secret_access_key="s",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket="names")
    for key, body in KEYS.items():
        client.put_object(Bucket="names", Key=key, Body=body)
    return "names"


@pytest.mark.variants
@pytest.mark.parametrize("path", PATHS)
def test_the_objects_of_a_path_are_those_of_s3fs(server: Any, tree: str, path: str) -> None:
    place = f"{tree}/{path}" if path else tree
    assert listed(deferred(server.storage_options), place) == listed(through_s3fs(server.storage_options), place)


@pytest.mark.variants
@pytest.mark.parametrize("path", ["", "**", "*/*", "*"])
@pytest.mark.parametrize("keys", [["/x"], ["/x", "x"], ["/a/x", "a/x"]], ids=str)
def test_names_that_begin_with_a_slash_are_those_of_s3fs(bucket: Any, keys: list[str], path: str) -> None:
    for number, key in enumerate(keys):
        bucket.put(key, bytes(number + 1))
    found, expected = (listed(each(bucket.options), f"{bucket.name}/{path}") for each in (deferred, through_s3fs))
    assert found == expected


@pytest.mark.parametrize(
    "path", ["no-such-bucket/x", "no-such-bucket/*", "no-such-bucket", "*/x", "no bucket/x", "b{}/*"]
)
def test_the_errors_are_those_of_s3fs(server: Any, path: str) -> None:
    assert listed(deferred(server.storage_options), path) == listed(through_s3fs(server.storage_options), path)


@pytest.mark.parametrize("path", ["plain/part-1.parquet", "plain", "spark/sub", "nothing", "odd/ü é%20[1]~.parquet"])
def test_one_object_is_that_of_s3fs(server: Any, tree: str, path: str) -> None:
    def found(origin: Origin) -> Any:
        try:
            info = origin.info(f"{tree}/{path}")
        except OriginError as error:
            return str(error)
        return [info["name"], info["size"], info["type"], version_of(info) if info["type"] == "file" else None]

    assert found(deferred(server.storage_options)) == found(through_s3fs(server.storage_options))


@pytest.mark.parametrize(
    ("path", "requests"),
    [("plain", 1), ("hive", 1), ("plain/*.parquet", 1), ("hive/*/*.parquet", 1), ("plain/part-1.parquet", 2)],
)
def test_a_listing_takes_few_requests_and_no_s3fs(server: Any, tree: str, path: str, requests: int) -> None:
    origin = deferred(server.storage_options)
    origin._filesystem.load = None  # Nothing may call it.
    server.reset()
    assert origin.list(f"{tree}/{path}")
    assert len(server.requests) == requests


def test_a_whole_bucket_is_listed_by_two_requests(bucket: Any) -> None:
    for key in ("x", "y"):
        bucket.put(key, b"1")
    origin = deferred(bucket.options)
    origin._filesystem.load = None  # Nothing may call it.
    bucket.server.reset()
    assert sorted(origin.list(bucket.name)) == [f"{bucket.name}/x", f"{bucket.name}/y"]
    assert len(bucket.server.requests) == 2  # the second finds names that begin with "/"


@pytest.mark.skipif(not _lists_prefixes(), reason="this s3fs takes a part of a folder for all of it")
def test_a_glob_through_s3fs_lists_only_folders_that_can_match(server: Any, tree: str) -> None:
    origin = through_s3fs(server.storage_options)
    server.reset()
    assert origin.list(f"{tree}/pl*/*.parquet")
    assert len(server.requests) == 3  # the bucket, plain and plain-2


@pytest.mark.variants
@pytest.mark.parametrize("path", ["all", "all/*.bin", "**"])
def test_more_names_than_a_page_holds_are_listed(tmp_path: Path, path: str) -> None:
    folder = tmp_path / "bucket" / "all"
    folder.mkdir(parents=True)
    for number in range(2050):
        (folder / f"{number:04d}.bin").write_bytes(b"x")
    with Server(tmp_path) as running:
        found = listed(deferred(running.storage_options), f"bucket/{path}")
        assert found == listed(through_s3fs(running.storage_options), f"bucket/{path}")
    assert len(found) == 2050


class _Denying(http.server.BaseHTTPRequestHandler):
    """A server that denies each request, as S3 does."""

    def do_GET(self) -> None:
        body = b"<Error><Code>AccessDenied</Code><Message>You shall not pass</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 (a name of http.server)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("path", ["bucket/x", "bucket/*"])
def test_a_denial_is_told_as_s3fs_tells_it(path: str) -> None:
    with serving(_Denying) as url:
        options = s3.storage_options(url)
        found = listed(deferred(options), path)
        assert found == listed(through_s3fs(options), path)
    assert "*" in path or ("denied access (AccessDenied: You shall not pass)" in found[1])


def test_a_replaced_object_is_listed_with_its_new_version(bucket: Any) -> None:
    origin = deferred(bucket.options)
    bucket.put("data/x", b"old")
    [(_, _, old)] = listed(origin, f"{bucket.name}/data")
    bucket.put("data/x", b"new")
    [(_, _, new)] = listed(origin, f"{bucket.name}/data")
    assert old != new


LOADS = """
import json, sys
import dataload
url, options, cache = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
rows = 0
for batch in dataload.make_loader(url, 64, storage_options=options, cache_dir=cache, cache_bytes="100MB"):
    rows += len(batch["n"])
loaded = [name for name in ("s3fs", "aiobotocore", "botocore") if name in sys.modules]
print(json.dumps([rows, loaded]))
"""


@pytest.fixture
def dataset_server(tmp_path: Path) -> Iterator[Server]:
    """A server of two files with 100 rows each, in s3://bucket/set."""
    folder = tmp_path / "data" / "bucket" / "set"
    folder.mkdir(parents=True)
    for number in range(2):
        pq.write_table(pa.table({"n": np.arange(100) + 100 * number}), folder / f"{number}.parquet")
    with Server(tmp_path / "data") as running:
        yield running


def load(tmp_path: Path, options: dict[str, Any], environment: dict[str, str]) -> tuple[int, list[str], str]:
    """Load the dataset in a new process. Return its number of rows, the imported modules of s3fs, and the log."""
    command = [sys.executable, "-c", LOADS, "s3://bucket/set", json.dumps(options), str(tmp_path / "cache")]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    done = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows, loaded = json.loads(done.stdout)
    return rows, loaded, done.stderr


@pytest.mark.variants
@pytest.mark.parametrize("told", ["options", "environment", "anonymous", "profile"])
def test_a_loader_imports_s3fs_for_what_only_a_session_finds(tmp_path: Path, dataset_server: Server, told: str) -> None:
    options: dict[str, Any] = {"endpoint_url": dataset_server.endpoint_url}
    environment: dict[str, str] = {}
    if told == "options":
        options |= {"key": "k", "secret": "s"}
    elif told == "anonymous":
        options |= {"anon": True}
    elif told == "environment":
        options = {}
        environment |= {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-west-2"}
        environment |= {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ENDPOINT_URL_S3": dataset_server.endpoint_url}
    else:
        (tmp_path / "credentials").write_text("[mine]\naws_access_key_id=k\naws_secret_access_key=s\n")
        environment |= {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"), "AWS_PROFILE": "mine"}
    rows, loaded, _ = load(tmp_path, options, environment)
    assert rows == 200
    assert bool(loaded) == (told == "profile")


@pytest.mark.slow
def test_s3fs_reads_on_a_system_without_ca_certificates(tmp_path: Path, dataset_server: Server) -> None:
    options = s3.storage_options(dataset_server.endpoint_url)
    nowhere = {"SSL_CERT_FILE": "/nonexistent", "SSL_CERT_DIR": "/nonexistent"}
    rows, _, log = load(tmp_path, options, nowhere)
    assert rows == 200
    assert "s3fs instead of obstore reads s3://" in log
    assert "no CA certificates on this system; install ca-certificates, or set SSL_CERT_FILE, or silence" in log


SECRET = {"key": "k", "secret": "s"}
ENVIRONMENT_KEY = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        (SECRET, {}),
        (SECRET, {"AWS_DEFAULT_REGION": "us-east-1"}),
        (SECRET, {"AWS_DEFAULT_REGION": "eu-west-1", "AWS_REGION": "us-west-2"}),
        (SECRET | {"client_kwargs": {"region_name": "ap-southeast-5"}}, {"AWS_DEFAULT_REGION": "eu-west-1"}),
        (SECRET | {"endpoint_url": "http://minio:9000/"}, {"AWS_ENDPOINT_URL": "http://other:1"}),
        (SECRET | {"client_kwargs": {"endpoint_url": "http://minio:9000"}}, {}),
        (SECRET, {"AWS_ENDPOINT_URL": "http://all:1", "AWS_ENDPOINT_URL_S3": "http://s3:1"}),
        ({}, ENVIRONMENT_KEY | {"AWS_ENDPOINT_URL": "https://all:1", "AWS_SESSION_TOKEN": "t"}),
        ({"anon": True, "requester_pays": True}, {"AWS_DEFAULT_REGION": "me-central-1"}),
    ],
)
def test_the_settings_are_those_of_botocore(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    filesystem = fsspec.filesystem("s3", **options)
    filesystem.connect()
    found = deferred_s3("s3://bucket/x", options)
    assert found is not None and found.known is not None
    assert (Origin(found).identity, Origin(found).address) == (Origin(filesystem).identity, Origin(filesystem).address)
    assert found.known.region == filesystem.s3.meta.region_name
    told = Credentials(lambda: filesystem) if not filesystem.anon else None
    own = obstore._lasting(found.known)
    assert (told and told()) == own


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ({}, {}),
        ({"key": "k"}, {}),
        ({"token": "t"}, ENVIRONMENT_KEY),
        ({"key": "k\n", "secret": "s"}, {}),
        (SECRET | {"profile": "mine"}, {}),
        (SECRET | {"client_kwargs": {"verify": False}}, {}),
        (SECRET | {"config_kwargs": {"s3": {"addressing_style": "virtual"}}}, {}),
        (SECRET | {"version_aware": True}, {}),
        (SECRET | {"skip_instance_cache": True}, {}),
        (SECRET | {"endpoint_url": ""}, {}),
        (SECRET | {"endpoint_url": "127.0.0.1:9000"}, {}),
        (SECRET | {"endpoint_url": "http://no host"}, {}),
        (SECRET | {"endpoint_url": "http://user:password@minio:9000"}, {}),
        (SECRET | {"endpoint_url": "http://a", "client_kwargs": {"endpoint_url": "http://b"}}, {}),
        (SECRET, {"AWS_PROFILE": "mine"}),
        (SECRET, {"AWS_USE_DUALSTACK_ENDPOINT": "true"}),
        (SECRET, {"AWS_DEFAULT_REGION": "cn-north-1"}),
        (SECRET, {"AWS_DEFAULT_REGION": "us-gov-west-1"}),
        (SECRET | {"endpoint_url": "http://minio:9000"}, {"AWS_DEFAULT_REGION": "us-east-1\n"}),
        (SECRET, {"HOME": "", "AWS_SHARED_CREDENTIALS_FILE": __file__}),
        ({}, ENVIRONMENT_KEY | {"AWS_CREDENTIAL_EXPIRATION": "2026-01-01T00:00:00Z"}),
        ({}, {"AWS_WEB_IDENTITY_TOKEN_FILE": "/token", "AWS_ROLE_ARN": "arn:aws:iam::1:role/r"}),
        ({}, {"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/v2"}),
    ],
)
def test_what_only_a_session_finds_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert deferred_s3("s3://bucket/x", options) is None


def test_a_configuration_file_is_left_to_the_session(tmp_path: Path) -> None:
    assert deferred_s3("s3://bucket/x", SECRET) is not None
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text("[default]\nregion = eu-west-1\n")
    assert deferred_s3("s3://bucket/x", SECRET) is None


def test_a_home_folder_that_cannot_be_read_has_no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", f"/{'x' * 300}")  # The system refuses so long a name, to root as well.
    assert deferred_s3("s3://bucket/x", SECRET) is not None


@pytest.mark.variants
@pytest.mark.parametrize("address", ["127.0.0.1:99999", "999.999.1.1:9", "[:::::]:9"])
def test_an_address_that_obstore_cannot_parse_raises_as_with_s3fs(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr("dataload.cache.origin.origin.FIRST_CONTACT_SECONDS", 0)
    options = SECRET | {"endpoint_url": f"http://{address}", "config_kwargs": None}
    found, expected = listed(deferred(options), "bucket/x"), listed(through_s3fs(options), "bucket/x")
    assert found == expected


def test_a_process_in_which_only_a_session_finds_the_settings_has_the_same_identity(tmp_path: Path) -> None:
    options = SECRET | {"endpoint_url": "http://127.0.0.1:9"}
    sent = pickle.dumps(deferred(options))
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text("[default]\n")
    assert pickle.loads(sent).identity == through_s3fs(options).identity


@pytest.mark.parametrize("url", ["bucket/x", "tiercache::s3://bucket/x", "gs://bucket/x", "s3://bucket/x?versionId=1"])
def test_other_urls_are_left_to_fsspec(url: str) -> None:
    assert deferred_s3(url, SECRET) is None


def test_an_option_of_the_configuration_of_fsspec_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": "http://other:1"})
    assert deferred_s3("s3://bucket/x", SECRET) is None


@pytest.mark.parametrize(
    ("endpoint", "bucket", "place"),
    [
        ("http://minio:9000", "b", ("http://minio:9000", "us-east-1")),
        ("http://minio:9000", "arn:aws:s3:::x", None),
        ("http://minio:9000", "b--x-s3", None),
    ],
)
def test_a_bucket_has_the_endpoint_of_its_store(endpoint: str, bucket: str, place: Any) -> None:
    assert KnownS3(endpoint, "us-east-1", False, None).place_of(bucket) == place


@pytest.mark.parametrize("region", ["eu-west-1", None])
def test_a_bucket_at_amazon_has_a_region_of_its_own(monkeypatch: pytest.MonkeyPatch, region: str | None) -> None:
    monkeypatch.setattr("dataload.cache.origin.known_s3._region_of", lambda *_: region)
    place = KnownS3("https://s3.amazonaws.com", "us-east-1", False, None).place_of("b")
    assert place == (region and ("https://s3.eu-west-1.amazonaws.com", "eu-west-1"))


def test_credentials_of_the_environment_are_neither_shown_nor_pickled(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-the-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    bucket.put("x", b"abc")
    origin = Blocks.open(open_source(bucket.url("x"), {"endpoint_url": bucket.options["endpoint_url"]}), None).origin
    [info] = origin.list(f"{bucket.name}/x").values()
    assert origin.read(f"{bucket.name}/x", 0, 3, version_of(info)) == b"abc"
    shown = repr([origin, origin._filesystem, origin._filesystem.known, origin.engine, vars(origin)])
    assert "a-secret" not in shown
    assert b"a-secret" not in pickle.dumps(origin)
    copied = pickle.loads(pickle.dumps(origin))
    assert copied.read(f"{bucket.name}/x", 0, 3, version_of(info)) == b"abc"
    assert copied.engine is origin.engine, "datasets of a store share connections"


def test_a_forked_child_lists_through_s3fs(server: Any, tree: str) -> None:
    """The child lacks obstore's threads: a request would hang."""
    origin = deferred(server.storage_options)
    expected = listed(origin, f"{tree}/plain")
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            same = listed(origin, f"{tree}/plain") == expected
            os.write(writing, f"{same} {origin.engine.name}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    assert said == b"True fsspec"


@pytest.mark.parametrize(("version", "lists"), [("2025.10.0", False), ("2026.6.1", False), ("2026.7.0", True)])
def test_an_s3fs_that_takes_a_part_of_a_folder_for_all_of_it_lists_whole_folders(
    monkeypatch: pytest.MonkeyPatch, version: str, *, lists: bool
) -> None:
    monkeypatch.setattr("s3fs.__version__", version)
    assert _lists_prefixes() is lists
