"""A cluster tier behind TLS, as Debian's redis-server speaks it; what a certificate is worth is looked at."""

from __future__ import annotations

import datetime as dt
import ipaddress
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from clusters import Server
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dataload.cache.clustered import ClusterTier
from dataload.cache.tier import Allocate, BlobKey

KEY = BlobKey("origin", "bucket/object", "version", "all")
DAY = dt.timedelta(days=1)


class Authority:
    """Signs certificates for servers; `path` is its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "authority.pem"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        self.path.write_bytes(self._sign(self._key, self._name, DAY, "authority.invalid", ca=True))

    def certify(self, host: str = "127.0.0.1", ends: dt.timedelta = DAY) -> tuple[str, ...]:
        """The options that have a server show a certificate for `host`, valid until so long from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
        certificate, private = self.folder / "server.pem", self.folder / "server.key"
        certificate.write_bytes(self._sign(key, name, ends, host))
        plain = serialization.NoEncryption()
        private.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
        files = {"--tls-cert-file": certificate, "--tls-key-file": private, "--tls-ca-cert-file": self.path}
        return (*(str(word) for pair in files.items() for word in pair), "--tls-auth-clients", "no")

    def _sign(
        self, key: ec.EllipticCurvePrivateKey, name: x509.Name, ends: dt.timedelta, host: str, *, ca: bool = False
    ) -> bytes:
        now = dt.datetime.now(dt.UTC)
        try:
            subject: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            subject = x509.DNSName(host)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 10 * DAY)
            .not_valid_after(now + ends)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([subject]), critical=False)
        )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.fixture
def program() -> str:
    """A server that speaks TLS, or the test is skipped with the reason."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        pytest.skip("no server with TLS here: apt-get install redis-server")
    wrong = [found, "--port", "0", "--tls-port", "0", "--tls-cert-file", "/nowhere", "--no-such-setting", ""]
    said = subprocess.run(wrong, capture_output=True, text=True, check=False)
    if "no-such-setting" not in said.stdout + said.stderr:
        pytest.skip(f"{found} was built without TLS")
    return found


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


Serve = Callable[..., Server]


@pytest.fixture
def serve(program: str, authority: Authority, tmp_path: Path) -> Serve:
    def server(**certificate: object) -> Server:
        options = authority.certify(**certificate)  # type: ignore[arg-type]
        checks = {"ssl_ca_certs": str(authority.path), "ssl_cert_reqs": "none", "ssl_check_hostname": False}
        return Server(tmp_path / "server", *options, program=program, ssl=True, **checks)

    return server


def shares(tier: ClusterTier) -> int:
    calls = []

    def fill(allocate: Allocate) -> None:
        calls.append(1)
        allocate(3)[:] = b"one"

    assert tier.get_or_fill(KEY, fill) == b"one"
    tier.settle()
    return len(calls)


def host(path: Path, url: str) -> ClusterTier:
    return ClusterTier(path, 1 << 30, "pin", url)


def test_it_is_shared_through_tls(serve: Serve, authority: Authority, tmp_path: Path) -> None:
    with serve() as server:
        url = f"valkeys://{server.address}?ssl_ca_certs={authority.path}"
        assert shares(host(tmp_path / "a", url)) == 1
        assert shares(host(tmp_path / "b", url)) == 0


@pytest.mark.parametrize(
    "certificate", [{"ends": -DAY}, {"host": "elsewhere.invalid"}], ids=["expired", "of another host"]
)
def test_a_certificate_that_does_not_hold_is_trouble(
    serve: Serve, authority: Authority, tmp_path: Path, certificate: dict[str, object]
) -> None:
    with serve(**certificate) as server:
        tier = host(tmp_path / "a", f"valkeys://{server.address}?ssl_ca_certs={authority.path}")
        assert shares(tier) == 1
        assert tier.cluster.health.state == "off"
        assert server.ask("DBSIZE") == 0


def test_an_authority_nobody_knows_is_trouble(serve: Serve, tmp_path: Path) -> None:
    with serve() as server:
        tier = host(tmp_path / "a", f"valkeys://{server.address}")
        assert shares(tier) == 1
        assert tier.cluster.health.state == "off"


def test_a_host_whose_name_is_not_looked_at(serve: Serve, authority: Authority, tmp_path: Path) -> None:
    with serve(host="elsewhere.invalid") as server:
        url = f"valkeys://{server.address}?ssl_ca_certs={authority.path}&ssl_check_hostname=false"
        assert shares(host(tmp_path / "a", url)) == 1
        assert shares(host(tmp_path / "b", url)) == 0
