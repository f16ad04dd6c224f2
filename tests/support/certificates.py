"""Certificates for servers of tests."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = dt.timedelta(days=1)


class Authority:
    """A certificate authority; `path` is its own certificate."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "authority.pem"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        self.path.write_bytes(self._sign(self._key, self._name, DAY, "authority.invalid", ca=True))

    def certify(self, host: str = "127.0.0.1", ends: dt.timedelta = DAY) -> tuple[Path, Path]:
        """Return the files of a certificate for `host`, with the given validity, and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
        certificate, private = self.folder / "server.pem", self.folder / "server.key"
        certificate.write_bytes(self._sign(key, name, ends, host))
        plain = serialization.NoEncryption()
        private.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
        return certificate, private

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
