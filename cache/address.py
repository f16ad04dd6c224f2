"""Where a Valkey or Redis is, and how to get in: from its URL, or from the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from dataload.errors import ConfigError

SECONDS = 1.0  # for a connection, and for each part of a value: what takes longer comes sooner from the origin
PORT = 6379
SCHEMES = {"valkey": False, "valkeys": True, "redis": False, "rediss": True}
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname")
USERNAME, PASSWORD = "VALKEY_USERNAME", "VALKEY_PASSWORD"


@dataclass(frozen=True)
class Address:
    """A server, or some nodes of a cluster, each as (host, port).

    options: for the client: TLS, and credentials where the URL has them.
    """

    nodes: tuple[tuple[str, int], ...]
    options: dict[str, Any] = field(repr=False)

    def __str__(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self.nodes)

    @classmethod
    def parse(cls, url: str) -> Address:
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
        if not nodes or found.scheme not in SCHEMES or found.path.strip("/") or not all(host for host, _ in nodes):
            raise ConfigError(
                "cluster: must be valkey://host:port,host:port or, with TLS, valkeys://…; what is special in a "
                "password must be percent-encoded"
            )
        options: dict[str, Any] = {}
        if SCHEMES[found.scheme]:
            options |= {"ssl": True, "ssl_check_hostname": True}
        for name, value in parse_qsl(found.query):
            if name not in TLS_OPTIONS or "ssl" not in options:
                raise ConfigError(f"cluster: {name!r} is unknown: {', '.join(TLS_OPTIONS)} go with valkeys://")
            options[name] = value.lower() != "false" if name == "ssl_check_hostname" else value
        user, _, password = map(unquote, userinfo.partition(":"))
        options |= {name: value for name, value in (("username", user), ("password", password)) if value}
        return cls(nodes, options)


def connect(address: Address, known: set[tuple[str, int]]) -> Any:
    """A client of the cluster, or of the one server, that answers there.

    known: nodes that the cluster was once seen to have, to be asked when those of the address are gone.
    Raises whatever the client raises.
    """
    import valkey
    import valkey.cluster

    cluster: Any = valkey.cluster
    options = {
        "username": os.environ.get(USERNAME),
        "password": os.environ.get(PASSWORD),
        "socket_timeout": SECONDS,
        "socket_connect_timeout": SECONDS,
        **address.options,
    }
    nodes = dict.fromkeys([*address.nodes, *sorted(known)])
    failure: Exception = ConnectionError(f"{address} does not answer")
    for host, port in nodes:
        one: Any = valkey.Valkey(host=host, port=port, **options)
        try:
            alone = _mode(one.execute_command("HELLO")) != "cluster"
        except (valkey.ValkeyError, OSError) as error:
            failure = error
            one.close()
            continue
        if alone:
            return one
        one.close()
        return cluster.ValkeyCluster(startup_nodes=[cluster.ClusterNode(*node) for node in nodes], **options)
    raise failure


def nodes_of(client: Any) -> set[tuple[str, int]]:
    """The nodes that a client of a cluster knows; none of a single server's."""
    return {(node.host, node.port) for node in client.get_nodes()} if hasattr(client, "get_nodes") else set()


def _host(text: str) -> Any:
    return urlsplit(f"//{text}")


def _mode(hello: Any) -> str:
    """What a server says that it is: "standalone", "cluster" or "sentinel"."""
    said = hello if isinstance(hello, dict) else dict(zip(hello[::2], hello[1::2], strict=True))
    return bytes(said[b"mode"]).decode()
