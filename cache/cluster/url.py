"""The URL of a Valkey or Redis: addresses and credentials."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from dataload.errors import ConfigError

PORT = 6379
SCHEMES = {"valkey": False, "valkeys": True, "redis": False, "rediss": True}
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname")
USERNAME, PASSWORD = "VALKEY_USERNAME", "VALKEY_PASSWORD"

Node = tuple[str, int]
"""Host, port."""


@dataclass(frozen=True)
class ClusterUrl:
    """The address of a server, or of some nodes of a cluster.

    Attributes:
        nodes: Hosts and ports.
        options: Client options: TLS, and the credentials in the URL.
    """

    nodes: tuple[Node, ...]
    options: dict[str, Any] = field(repr=False)

    def __str__(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self.nodes)

    @classmethod
    def parse(cls, url: str) -> ClusterUrl:
        """Parse `valkey://user:password@host:port,host:port`, or `valkeys://` for TLS. Only one host is required.

        The query of a TLS URL may set the paths ssl_ca_certs, ssl_certfile and ssl_keyfile, and
        ssl_check_hostname=false.

        Raises:
            ConfigError: The URL is invalid. The message omits the URL, because it may contain a password.
        """
        try:
            found = urlsplit(url)
            userinfo, _, hosts = found.netloc.rpartition("@")
            parsed = [urlsplit(f"//{host}") for host in hosts.split(",")]
            nodes = tuple((host.hostname or "", host.port or PORT) for host in parsed)
        except (ValueError, AttributeError):  # AttributeError: it is no text
            nodes = ()
        if (
            not nodes
            or not all(host for host, _ in nodes)
            or found.scheme not in SCHEMES
            or found.path.strip("/")
            or found.fragment
            or "@" in found.query  # The password contains an unescaped "?".
        ):
            raise ConfigError(
                "cluster: must be valkey://host:port,host:port or, with TLS, valkeys://…; special "
                "characters in a password must be percent-encoded"
            )
        options: dict[str, Any] = {}
        if SCHEMES[found.scheme]:
            options |= {"ssl": True, "ssl_check_hostname": True}
        for name, value in parse_qsl(found.query):
            if name not in TLS_OPTIONS or "ssl" not in options:
                raise ConfigError(
                    f"cluster: the query of valkeys:// allows only {', '.join(TLS_OPTIONS)}; a ? in a "
                    "password must be percent-encoded"
                )
            options[name] = value.lower() != "false" if name == "ssl_check_hostname" else value
        user, _, password = map(unquote, userinfo.partition(":"))
        options |= {name: value for name, value in (("username", user), ("password", password)) if value}
        return cls(nodes, options)
