"""The identity of a store in cache keys: different for each source of bytes, and free of credentials."""

from __future__ import annotations

import base64
import pickle
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec
import pyarrow.fs
import pytest
import s3fs
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.dirfs import DirFileSystem
from http_servers import serving

from dataload.cache.filesystem import TierCacheFileSystem
from dataload.cache.origin import identity
from dataload.cache.origin.deferred_s3 import DeferredS3
from dataload.cache.origin.identity import LOCATIONS, identity_of
from dataload.cache.origin.origin import Origin
from dataload.cache.origin.version import version_of
from dataload.errors import ConfigError

KEYS = [base64.b64encode(secret).decode() for secret in (b"the first secret", b"the second secret")]
VARIABLES = (
    "AWS_CONFIG_FILE",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_PROFILE",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_SAS_TOKEN",
    "STORAGE_EMULATOR_HOST",
)


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


def named(protocol: str, **options: Any) -> str:
    return Origin(fsspec.filesystem(protocol, **options, skip_instance_cache=True)).identity


def connection_string(account: str, key: str = KEYS[0], **more: str) -> str:
    parts = {"DefaultEndpointsProtocol": "https", "AccountName": account, "AccountKey": key, **more}
    return ";".join(f"{name}={value}" for name, value in parts.items())


@pytest.fixture
def adlfs() -> Any:
    return pytest.importorskip("adlfs", reason="adlfs is not installed: Azure's accounts are not told apart here")


@pytest.mark.usefixtures("adlfs")
@pytest.mark.parametrize("protocol", ["abfs", "az"])
def test_azure_accounts_are_told_apart_by_their_connection_strings(protocol: str) -> None:
    one, other = (named(protocol, connection_string=connection_string(name)) for name in ("one", "other"))
    assert one != other
    assert one == named(protocol, connection_string=connection_string("one", KEYS[1])), "a key is no place"
    assert one == named(protocol, account_name="one", account_key=KEYS[0])
    assert one == named(protocol, account_name="one", anon=True)
    assert one == named(protocol, account_name="one", sas_token="sv=1&sig=abc")
    assert one != named(protocol, connection_string=connection_string("one", EndpointSuffix="core.chinacloudapi.cn"))


@pytest.mark.usefixtures("adlfs")
def test_azure_accounts_are_told_apart_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for account in ("one", "other"):
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", account)
        found.append(named("abfs", anon=True))
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    for account in ("one", "other"):
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection_string(account))
        found.append(named("abfs"))
    assert found[:2] == found[2:]
    assert found[0] != found[1]


@pytest.mark.usefixtures("adlfs")
def test_azure_accounts_behind_one_host_are_told_apart() -> None:
    def at(account: str) -> str:
        return named("abfs", account_name=account, account_host="127.0.0.1:10000", anon=True)

    def emulated(account: str) -> str:
        endpoint = f"http://127.0.0.1:10000/{account}"
        return named("abfs", connection_string=connection_string(account, BlobEndpoint=endpoint))

    assert at("one") != at("other")
    assert emulated("one") != emulated("other")


@pytest.mark.usefixtures("adlfs")
def test_no_credential_of_azure_is_in_its_name() -> None:
    told = connection_string("one", KEYS[0])
    sas = "BlobEndpoint=http://127.0.0.1:1/one;SharedAccessSignature=sv=1&sig=abc"
    for options in (
        {"connection_string": told},
        {"connection_string": sas},
        {"account_name": "one", "sas_token": "abc"},
    ):
        origin = Origin(fsspec.filesystem("abfs", **options, skip_instance_cache=True))
        for said in (origin.identity, repr(origin), origin.address):
            assert not any(secret in said for secret in (KEYS[0], "abc", "AccountKey"))


LISTING = """<?xml version="1.0" encoding="utf-8"?>
<EnumerationResults ContainerName="container"><Blobs><Blob><Name>blob</Name><Properties>
<Last-Modified>Thu, 01 Jan 2026 00:00:00 GMT</Last-Modified><Etag>the same</Etag><BlobType>BlockBlob</BlobType>
<Content-Length>{}</Content-Length></Properties></Blob></Blobs><NextMarker/></EnumerationResults>"""


class Accounts(BaseHTTPRequestHandler):
    """A minimal Azure blob storage: each account has one blob, whose content is the account's name."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        content = url.path.split("/")[1].encode()
        lists = "comp=list" in url.query
        if lists:
            content = LISTING.format(len(content)).encode()
        self.send_response(206 if self.command == "GET" and not lists else 200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Range", f"bytes 0-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Type", "application/xml" if lists else "application/octet-stream")
        self.send_header("ETag", '"the same"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("x-ms-blob-type", "BlockBlob")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.usefixtures("adlfs")
@pytest.mark.parametrize("consistency", ["immutable", "generation"])
def test_an_azure_account_is_not_served_the_bytes_of_another(tmp_path: Path, consistency: str) -> None:
    with serving(Accounts) as url:
        for account in ("uno", "due", "uno"):
            below = {"connection_string": connection_string(account, BlobEndpoint=f"{url}/{account}")}
            options = {"cache_dir": str(tmp_path / "cache"), "consistency": consistency, "skip_instance_cache": True}
            fs = fsspec.filesystem("tiercache", target_protocol="abfs", target_options=below, **options)
            assert fs.cat_file("container/blob") == account.encode()
    assert fs.stats()["bytes_origin"] == 0, "the third time it is there"


@pytest.mark.usefixtures("adlfs")
@pytest.mark.parametrize("wrapped", [False, True], ids=["itself", "in dirfs"])
def test_a_blob_of_azure_is_listed_by_its_own_name(tmp_path: Path, wrapped: bool) -> None:
    """The filesystem of Azure finds it without its info."""
    with serving(Accounts) as url:
        below = connection_string("uno", BlobEndpoint=f"{url}/uno")
        azure = fsspec.filesystem("abfs", connection_string=below, skip_instance_cache=True)
        store, folder = (DirFileSystem("container", azure), "") if wrapped else (azure, "container")
        blob = f"{folder}/blob".lstrip("/")
        listed = Origin(store).list(blob)
        assert [(name, version_of(info)) for name, info in listed.items()] == [(blob, '"the same"')]
        fs = TierCacheFileSystem(fs=store, cache_dir=str(tmp_path / "cache"), skip_instance_cache=True)
        assert fs.find(blob) == fs.find(folder) == [blob]
        assert fs.find(blob, detail=True)[blob]["size"] == len("uno")
        fs.prefetch([blob], wait=True)
        assert fs.cat_file(blob) == b"uno"


def test_emulators_of_google_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gcsfs", reason="gcsfs is not installed: Google's emulators are not told apart here")
    found = [named("gcs", token="anon"), named("gs", token="anon", endpoint_url="http://127.0.0.1:1")]
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:2")
    found.append(named("gcs", token="anon"))
    assert len({place.partition("://")[2] for place in found}) == 3


def test_endpoints_of_s3_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    where = {"http://127.0.0.1:1": {"endpoint_url": "http://127.0.0.1:1"}}
    where["http://127.0.0.1:2"] = {"client_kwargs": {"endpoint_url": "http://127.0.0.1:2"}}
    found = {place: named("s3", **options) for place, options in where.items()}
    found["http://127.0.0.1:3"] = Origin(
        s3fs.S3FileSystem(True, "http://127.0.0.1:3", skip_instance_cache=True)
    ).identity
    config = "[profile {0}]\nservices = {0}\n[services {0}]\ns3 =\n  endpoint_url = {1}\n"
    (tmp_path / "config").write_text(config.format("four", "http://127.0.0.1:4"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    found["http://127.0.0.1:4"] = named("s3", profile="four", anon=True)
    for number, name in enumerate(("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"), 5):
        monkeypatch.setenv(name, f"http://127.0.0.1:{number}")
        found[f"http://127.0.0.1:{number}"] = named("s3", anon=True)
    assert found == {place: f"s3://{place}" for place in found}


AMAZON = "s3://https://s3.amazonaws.com"


@pytest.mark.parametrize(
    ("region", "name"),
    [
        (None, AMAZON),
        ("us-east-1", AMAZON),
        ("eu-west-1", AMAZON),
        ("ap-southeast-3", AMAZON),
        ("us-gov-west-1", "s3://https://s3.us-gov-west-1.amazonaws.com"),
        ("cn-north-1", "s3://https://s3.cn-north-1.amazonaws.com.cn"),
    ],
)
def test_all_regions_of_amazon_that_share_bucket_names_are_one_store(
    region: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if region is None:
        monkeypatch.delenv("AWS_DEFAULT_REGION")
    else:
        monkeypatch.setenv("AWS_DEFAULT_REGION", region)
    deferred = Origin(DeferredS3(anon=True))
    assert (named("s3", anon=True), deferred.identity) == (name, name)
    shown = f"https://s3.{region}.amazonaws.com" if region not in (None, "us-east-1") else "https://s3.amazonaws.com"
    assert deferred.address.removesuffix(".cn") == shown, "a message names the address of the request"


@pytest.mark.parametrize(
    ("url", "is_amazon"),
    [
        ("https://s3.eu-west-1.amazonaws.com/", True),
        ("https://s3-eu-west-1.amazonaws.com", True),
        ("https://s3-us-gov-west-1.amazonaws.com", False),
        ("https://bucket.vpce-1a-2b.s3.eu-west-1.vpce.amazonaws.com", False),
        ("https://s3.eu-west-1.amazonaws.com.example.org", False),
    ],
)
def test_an_address_of_amazon_names_its_store(url: str, is_amazon: bool) -> None:
    assert named("s3", anon=True, endpoint_url=url) == (AMAZON if is_amazon else f"s3://{url}")


def test_hosts_and_accounts_of_servers_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def hdfs(*args: Any, **options: Any) -> str:
        return LOCATIONS["hdfs"](Made(*args, **options))

    class Made:
        """A stand-in with the arguments of an HDFS filesystem: a real one needs a cluster and Java."""

        def __init__(self, host: str = "default", port: int = 0, **options: Any) -> None:
            self.storage_args = () if host == "default" else (host, port)
            self.storage_options = options

    assert len({hdfs("one"), hdfs("other"), hdfs("one", 9000), hdfs("default"), hdfs(extra_conf={"a": "b"})}) == 5
    assert hdfs("one", kerb_ticket="/tmp/krb5cc_1", user="a") == hdfs("one", user="b")
    before = hdfs()
    monkeypatch.setenv("HADOOP_CONF_DIR", "/etc/other")
    assert hdfs() != before
    one, other = (named("webhdfs", host=host, port=9870) for host in ("one", "other"))
    assert one != other
    assert named("http") == named("http", headers={"Authorization": "x"})
    assert named("http") != named("http", client_kwargs={"base_url": "http://other"})


def test_what_lies_below_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The identity of a wrapped filesystem includes the store below, even if the environment names it."""
    found = []
    for endpoint in ("http://127.0.0.1:1", "http://127.0.0.1:2"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        below = s3fs.S3FileSystem(anon=True, skip_instance_cache=True)
        found.append(identity_of(DirFileSystem("bucket/folder", below)))
        s3fs.S3FileSystem.clear_instance_cache()
        found.append(named("reference", fo={"x": ["bucket/x"]}, remote_protocol="s3", remote_options={"anon": True}))
    assert len(set(found)) == 4


@pytest.mark.parametrize("given", ["fs", "option"])
def test_a_filesystem_of_pyarrow_is_named_by_what_it_was_told(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def at(endpoint: str, key: str) -> str:
        told = {"endpoint_override": endpoint} if given == "option" else {}
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        made = pyarrow.fs.S3FileSystem(region="us-east-1", access_key=key, secret_key=key, **told)
        return Origin(ArrowFSWrapper(made)).identity

    assert at("http://127.0.0.1:1", "a") == at("http://127.0.0.1:1", "b")
    assert at("http://127.0.0.1:1", "a") != at("http://127.0.0.1:2", "a")


def test_what_says_nothing_of_itself_needs_a_name() -> None:
    class Mute:
        def __reduce_ex__(self, _: Any) -> Any:
            raise TypeError("cannot pickle")

    class Wrapping(fsspec.AbstractFileSystem):
        protocol = "wrapping"

        def __init__(self, inner: Any, **options: Any) -> None:
            super().__init__(**options)

    with pytest.raises(ConfigError, match=r"Mute cannot be told from others: name it with origin_id"):
        _ = Origin(Wrapping(Mute())).identity
    assert Origin(Wrapping(Mute()), "mine").identity == "mine"


NAMES = """
import os, sys, pickle
from dataload.cache.origin.identity import identity_of
print(*map(identity_of, pickle.load(sys.stdin.buffer)), flush=True)
os._exit(0)  # pyarrow's S3 may crash at the end of a process
"""


@pytest.mark.slow
def test_names_are_the_same_in_all_processes(tmp_path: Path) -> None:
    made = [
        s3fs.S3FileSystem(anon=True),
        DirFileSystem(str(tmp_path), fsspec.filesystem("file")),
        ArrowFSWrapper(pyarrow.fs.S3FileSystem(region="us-east-1", endpoint_override="http://127.0.0.1:1")),
        fsspec.filesystem("reference", fo={"a": [str(tmp_path)]}),
    ]
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "AWS_DEFAULT_REGION": "us-east-1", "PYTHONPATH": ":".join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", NAMES], input=pickle.dumps(made), capture_output=True, check=True, env=environment
        )
        assert done.stdout.decode().split() == [identity_of(filesystem) for filesystem in made]


def test_a_store_that_is_a_global_or_cannot_be_pickled() -> None:
    class Global:
        def __reduce__(self) -> str:
            return "the_store"

    class Stubborn:
        def __reduce__(self) -> Any:
            raise ValueError("not me")

    assert identity._pickled_parts(Global()) == [Global, "the_store"]
    with pytest.raises(ConfigError, match="origin_id"):
        identity._pickled_parts(Stubborn())
