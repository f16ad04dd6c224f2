"""Where a Valkey or Redis is, and how to get in: from its URL, or from the environment."""

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
    """A server, or some nodes of a cluster.

    options: for the client: TLS, and credentials where the URL has them.
    """

    nodes: tuple[Node, ...]
    options: dict[str, Any] = field(repr=False)

    def __str__(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self.nodes)

    @classmethod
    def parse(cls, url: str) -> ClusterUrl:
        """`valkey://user:password@host:port,host:port`, all but one host optional; `valkeys://` for TLS.

        TLS takes, behind a "?", the paths ssl_ca_certs, ssl_certfile and ssl_keyfile, and ssl_check_hostname=false.
        Raises ConfigError, which does not repeat the URL: a password may be anywhere in one that is wrong.
        """
        try:
            found = urlsplit(url)
            userinfo, _, hosts = found.netloc.rpartition("@")
            nodes = tuple((one.hostname or "", one.port or PORT) for one in map(_host, hosts.split(",")))
        except ValueError:
            nodes = ()
        if (
            not nodes
            or not all(host for host, _ in nodes)
            or found.scheme not in SCHEMES
            or found.path.strip("/")
            or found.fragment
            or "@" in found.query  # All before it would be the password.
        ):
            raise ConfigError(
                "cluster: must be valkey://host:port,host:port or, with TLS, valkeys://…; what is special in a "
                "password must be percent-encoded"
            )
        options: dict[str, Any] = {}
        if SCHEMES[found.scheme]:
            options |= {"ssl": True, "ssl_check_hostname": True}
        for name, value in parse_qsl(found.query):
            if name not in TLS_OPTIONS or "ssl" not in options:
                raise ConfigError(
                    f"cluster: behind the ? of valkeys:// go {', '.join(TLS_OPTIONS)}, and nothing else; a ? in a "
                    "password must be percent-encoded"
                )
            options[name] = value.lower() != "false" if name == "ssl_check_hostname" else value
        user, _, password = map(unquote, userinfo.partition(":"))
        options |= {name: value for name, value in (("username", user), ("password", password)) if value}
        return cls(nodes, options)


def _host(text: str) -> Any:
    return urlsplit(f"//{text}")
