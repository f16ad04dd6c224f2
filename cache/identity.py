"""What a store is called in cache keys, whoever asks it and with whatever credentials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.utils import tokenize

from dataload.cache.redact import CREDENTIALS, redacted, unsigned

# Options that say which store an address is, as against how to get in. Credentials never become part of a key.
ADDRESS_OPTIONS = ("endpoint_url", "base_url", "host", "port", "account_name", "namenode")
# Where protocol, address and path together name an object in full. Elsewhere (an archive, a folder of another
# filesystem) all that the filesystem was made with becomes part of the store's name, digested, but for credentials.
PATH_IS_NAME = frozenset(
    {
        "abfs",
        "abfss",
        "adl",
        "az",
        "file",
        "ftp",
        "gcs",
        "gs",
        "hdfs",
        "hf",
        "http",
        "https",
        "local",
        "memory",
        "s3",
        "s3a",
        "sftp",
        "smb",
        "ssh",
        "webhdfs",
    }
)


def address_of(filesystem: Any) -> tuple[str, str]:
    """Its protocol, and the address that it was given, which may be empty."""
    protocol = filesystem.protocol if isinstance(filesystem.protocol, str) else filesystem.protocol[0]
    options = {**filesystem.storage_options, **(filesystem.storage_options.get("client_kwargs") or {})}
    return protocol, ":".join(str(options[name]) for name in ADDRESS_OPTIONS if options.get(name))


def identity_of(filesystem: Any) -> str:
    """A store's name in cache keys: the same for all ways to get in, and for no other store."""
    protocol, address = address_of(filesystem)
    if protocol not in PATH_IS_NAME:
        address = tokenize(type(filesystem), _named(filesystem.storage_args), _public(filesystem.storage_options))
    elif not address and hasattr(filesystem, "call_s3"):
        address = filesystem.s3.meta.endpoint_url  # The environment or a profile may name another than AWS.
    return redacted(f"{protocol}://{address}")


def _public(options: Mapping[str, Any]) -> dict[str, Any]:
    """What a filesystem was made with, without what says how to get in."""
    found = {}
    for name, value in options.items():
        if not CREDENTIALS.search(name):
            nested = isinstance(value, Mapping) and name.endswith(("options", "kwargs"))
            found[name] = _public(value) if nested else _named(value)
    return found


def _named(said: Any) -> Any:
    """What names a store, or is its content: all of it, but for credentials in URLs."""
    if isinstance(said, Mapping):
        return {name: _named(value) for name, value in said.items()}
    if isinstance(said, (list, tuple)):
        return [_named(value) for value in said]
    if isinstance(said, AbstractFileSystem):
        return identity_of(said)
    return unsigned(said) if isinstance(said, str) else said
