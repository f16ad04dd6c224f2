"""The services and files from which credentials of S3 come, for tests."""

from __future__ import annotations

import http.server
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from hashlib import sha1
from pathlib import Path

import pytest
from botocore.credentials import SSOProvider
from faulty_store import Answer, Asked
from http_servers import serving

from dataload.benchmarks.origin.s3 import document, element, group

PROVIDERS = ["environment", "file", "process", "container", "instance", "web identity", "role", "sso"]
START = "https://sign-in.invalid/start"


class Issuer:
    """Issues credentials, and says which ones a store accepts.

    Attributes:
        issued: How many times credentials were requested from a service.
        lifetime: How long they last, as they say.
        valid: How many of the latest credentials the store accepts.
    """

    def __init__(self, home: Path, lifetime: timedelta) -> None:
        self.number = 0
        self.issued = 0
        self.lifetime = lifetime
        self.home = home
        self.accepts_none = False
        self.valid = 1
        self.write: Callable[[], object] = lambda: None

    @property
    def key(self) -> str:
        return _key(self.number)

    @property
    def expiration(self) -> datetime:
        return datetime.now(UTC) + self.lifetime

    def rotate(self) -> None:
        """Issue other credentials from now on."""
        self.number += 1
        self.write()

    def fault(self, asked: Asked) -> Answer | None:
        accepted = {_key(self.number - before) for before in range(self.valid)}
        if asked.access_key in accepted and not self.accepts_none:
            return None
        return Answer.error(400, "ExpiredToken", "The provided token has expired.")

    def shown(self) -> dict[str, object]:
        return {
            "Version": 1,
            "Code": "Success",
            "AccessKeyId": self.key,
            "SecretAccessKey": "a-secret",
            "Token": "a-token",
            "SessionToken": "a-token",
            "Expiration": f"{self.expiration:%Y-%m-%dT%H:%M:%SZ}",
        }

    def body(self, path: str, sent: str) -> bytes:
        if "/latest/api/token" in path:
            return b"a-token-of-the-instance"
        if path.endswith("/security-credentials/"):
            return b"a-role"
        self.issued += 1
        if "Action=" in sent:
            action = "AssumeRoleWithWebIdentity" if "WebIdentity" in sent else "AssumeRole"
            found = self.shown()
            names = ("AccessKeyId", "SecretAccessKey", "SessionToken", "Expiration")
            credentials = group("Credentials", *(element(name, found[name]) for name in names))
            return document(f"{action}Response", group(f"{action}Result", credentials), namespace="").encode()
        if "/federation/credentials" in path:
            expires = int((time.time() + self.lifetime.total_seconds()) * 1000)
            found = {"accessKeyId": self.key, "secretAccessKey": "a-secret", "sessionToken": "a-token"}
            return json.dumps({"roleCredentials": {**found, "expiration": expires}}).encode()
        return json.dumps(self.shown()).encode()


def _key(number: int) -> str:
    return f"AKID{number:04d}"


@contextmanager
def issuing(provider: str, home: Path, monkeypatch: pytest.MonkeyPatch, lifetime: timedelta) -> Iterator[Issuer]:
    """Configure one of `PROVIDERS` for the duration of the block."""
    issuer = Issuer(home, lifetime)
    kind = type("Service", (_Service,), {"issuer": issuer})
    folder = home / ".aws"
    folder.mkdir()
    with serving(kind) as url:
        SETUPS[provider](issuer, url, folder, monkeypatch)
        issuer.write()
        yield issuer


def _environment(issuer: Issuer, _: str, __: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    issuer.write = lambda: os.environ.update(AWS_ACCESS_KEY_ID=issuer.key)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", issuer.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-token")


def _file(issuer: Issuer, _: str, folder: Path, __: pytest.MonkeyPatch) -> None:
    rest = "aws_secret_access_key = a-secret\naws_session_token = a-token\n"
    path = folder / "credentials"
    issuer.write = lambda: path.write_text(f"[default]\naws_access_key_id = {issuer.key}\n{rest}")


def _process(issuer: Issuer, _: str, folder: Path, __: pytest.MonkeyPatch) -> None:
    path = folder / "of-the-process.json"
    issuer.write = lambda: path.write_text(json.dumps(issuer.shown()))
    (folder / "config").write_text(f"[default]\ncredential_process = cat {path}\n")


def _container(_: Issuer, url: str, __: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/container")


def _instance(_: Issuer, url: str, __: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED", raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url)


def _web_identity(_: Issuer, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "identity").write_text("a-web-identity")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(folder / "identity"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/a-role")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)


def _role(_: Issuer, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "[profile source]\naws_access_key_id = S\naws_secret_access_key = s\n"
    role = "[default]\nregion = us-east-1\nrole_arn = arn:aws:iam::123456789012:role/a-role\nsource_profile = source\n"
    (folder / "config").write_text(role + source)
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)


def _sso(_: Issuer, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = folder / "sso" / "cache"
    cached.mkdir(parents=True)
    monkeypatch.setattr(SSOProvider, "_SSO_TOKEN_CACHE_DIR", str(cached))  # Found in the first home of the process.
    token = {"accessToken": "signed-in", "startUrl": START, "region": "us-east-1", "expiresAt": "2099-01-01T00:00:00Z"}
    (cached / f"{sha1(START.encode()).hexdigest()}.json").write_text(json.dumps(token))
    lines = [f"sso_start_url = {START}", "sso_region = us-east-1", "sso_account_id = 123456789012"]
    (folder / "config").write_text("\n".join(["[default]", *lines, "sso_role_name = a-role", ""]))
    monkeypatch.setenv("AWS_ENDPOINT_URL_SSO", url)


SETUPS: dict[str, Callable[[Issuer, str, Path, pytest.MonkeyPatch], None]] = {
    "environment": _environment,
    "file": _file,
    "process": _process,
    "container": _container,
    "instance": _instance,
    "web identity": _web_identity,
    "role": _role,
    "sso": _sso,
}


class _Service(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    issuer: Issuer

    def do_GET(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        body = self.issuer.body(self.path, sent)
        self.send_response(200)
        self.send_header("Content-Type", "text/xml" if body[:1] == b"<" else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_POST = do_GET  # noqa: N815 (names of http.server)

    def log_message(self, *_: object) -> None:
        pass
