"""What a client of obstore takes from an fsspec filesystem: settings, credentials, and the precondition of a read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from dataload.cache.origin.errors import UnsuitableError
from dataload.cache.origin.version import is_tag

STALL_SECONDS = 20  # without receiving a byte
# A proxy for all hosts but that of the store, so that obstore follows no redirect to others: it would send the token of
# a session there. Nothing can listen on port 0. Subdomains of the store's host are exempt, too: no exclusion is exact.
NOWHERE = "127.0.0.1:0"
# Options of fsspec that change no request for a range.
OF_FSSPEC = frozenset(
    {
        "asynchronous",
        "default_cache_type",
        "default_fill_cache",
        "listings_expiry_time",
        "loop",
        "max_concurrency",
        "max_paths",
        "skip_instance_cache",
        "use_listings_cache",
        "version_aware",
    }
)


@dataclass(frozen=True)
class Translation:
    """How obstore reads a store for which the user has configured an fsspec filesystem.

    Attributes:
        package: The package of the filesystem.
        store: The class of `obstore.store`.
        untranslatable: Returns why obstore cannot replace a filesystem; None if it can.
        settings: Returns the arguments of the class for a filesystem and a bucket, without credentials.
        fetched: Returns the credentials of a filesystem, as a provider of obstore does.
        renewed: Returns other credentials than those that the store has rejected; None if there are none.
        condition: Returns the options of a request that no other version of an object answers.
        version: Returns what an answer calls the version of its object.
        version_mark: What stands before the version in a path.
        writes: Whether obstore writes objects, too.
    """

    package: str
    store: str
    untranslatable: Callable[[Any], str | None]
    settings: Callable[[Any, str], dict[str, Any]]
    fetched: Callable[[Any], dict[str, Any]]
    renewed: Callable[[Any, dict[str, Any] | None], dict[str, Any] | None]
    condition: Callable[[str], dict[str, Any]]
    version: Callable[[Mapping[str, Any]], str | None]
    version_mark: str
    writes: bool = False


def if_match(version: str) -> dict[str, Any]:
    """Return the condition that an object has an ETag."""
    return {"if_match": version} if is_tag(version) else {}


def tag_of(meta: Mapping[str, Any]) -> str | None:
    """Return the ETag of an answer of obstore."""
    found: str | None = meta["e_tag"]
    return found


def unknown_options(filesystem: Any, package: str, known: Collection[str], **within: Collection[str]) -> str | None:
    """Return the options of a filesystem that obstore has no equal for, as a reason; None without one.

    within: The known ones within an option, such as client_kwargs.
    """
    if filesystem.storage_args:
        return f"{package} was given positional arguments"
    unknown = {name for name, value in filesystem.storage_options.items() if value is not None and name not in known}
    for option, names in within.items():
        unknown |= {f"{name} in {option}" for name in getattr(filesystem, option) if name not in names}
    return f"{package} was given {', '.join(sorted(unknown))}" if unknown else None


def is_class(filesystem: Any, *names: str) -> str | None:
    """Return why a filesystem is none of these classes; None if it is one."""
    kind = f"{type(filesystem).__module__}.{type(filesystem).__name__}"
    return None if kind in names else f"{kind} is not {names[0].partition('.')[0]}"


def has_proxy(endpoint: str) -> bool:
    """Return whether the environment names a proxy that leads to an endpoint."""
    location, proxies = urlsplit(endpoint), getproxies()
    return bool(proxies.get(location.scheme, proxies.get("all"))) and not proxy_bypass(location.hostname or "")


def client_settings(endpoint: str, certificate: bytes | None = None) -> dict[str, Any]:
    """Return how obstore speaks to an endpoint.

    Raises:
        UnsuitableError: It would be through a proxy.
    """
    location = urlsplit(endpoint)
    host = location.hostname or ""
    if has_proxy(endpoint):
        fix = f"if {host} can be reached without the proxy, add it to NO_PROXY"
        raise UnsuitableError("through a proxy, obstore would follow redirects to any host", fix=fix)
    client: Any = {"allow_http": location.scheme == "http", "proxy_url": f"http://{NOWHERE}", "proxy_excludes": host}
    client["read_timeout"] = f"{STALL_SECONDS}s"
    if certificate is not None:
        client["root_certificate"] = certificate
    # `Origin` retries.
    return {"client_options": client, "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=60)}}
