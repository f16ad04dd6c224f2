"""The name of a store in cache keys: the same for all users of the store, and another one for every other store.

An object is named by its store and its path. So whatever decides where the bytes of a path come from is part of the
store's name, be it said in the options, in the environment, in a profile or in a connection string. A filesystem has
resolved all of these when it is asked here. Credentials are no part of the name, not even digested.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import fsspec
from fsspec import AbstractFileSystem
from fsspec.utils import tokenize

from dataload.errors import ConfigError
from dataload.runtime.redact import CREDENTIALS, redacted, unsigned

# Options that name a store in messages.
ADDRESS_OPTIONS = ("endpoint_url", "base_url", "host", "port", "account_name", "namenode")
# Attributes in which filesystems that are not known below keep what they took from the environment.
RESOLVED = ("account_name", "account_url", "base_url", "endpoint", "_endpoint", "endpoint_url", "host", "port", "url")
# Variables that name a store for filesystems that look there late, such as those of pyarrow and obstore.
ENVIRONMENT = (
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ENDPOINT",
    "STORAGE_EMULATOR_HOST",
)
# Options that name the filesystem below another one, and those that it is given.
BELOW = {"target_protocol": "target_options", "remote_protocol": "remote_options"}


def address_of(filesystem: Any) -> tuple[str, str]:
    """Return the protocol of a filesystem, and the address it was given, which may be empty: for messages."""
    protocol = filesystem.protocol if isinstance(filesystem.protocol, str) else filesystem.protocol[0]
    options = {**filesystem.storage_options, **(filesystem.storage_options.get("client_kwargs") or {})}
    return protocol, ":".join(str(options[name]) for name in ADDRESS_OPTIONS if options.get(name))


def identity_of(filesystem: Any) -> str:
    """Return the name of a filesystem's store in cache keys.

    Raises ConfigError when the store was given as an object that does not tell it from others.
    """
    protocol, _ = address_of(filesystem)
    resolve = PLACES.get(protocol)
    try:
        place = resolve(filesystem) if resolve else None
    except (AttributeError, KeyError):  # another class than the usual one for this protocol
        place = None
    if place is None:
        place = _digest(filesystem, ENVIRONMENT if resolve else ())
    return redacted(f"{protocol}://{place}")


def _s3(filesystem: Any) -> str:
    told = filesystem.endpoint_url or filesystem.client_kwargs.get("endpoint_url")
    return str(told or filesystem.s3.meta.endpoint_url)  # The environment or a profile may name another than AWS.


def _azure(filesystem: Any) -> str:
    # What adlfs made of its options, the environment and the connection string, which overrides the others.
    given = None if filesystem.connection_string else filesystem.account_name
    account = filesystem.service_client.account_name or given or ""
    url = str(filesystem.service_client.url).partition("?")[0]  # A SAS token may follow.
    return url if account in url else f"{url}{account}"


def _google(filesystem: Any) -> str:
    return str(filesystem.base)  # of the option, or the emulator that the environment names


def _hub(filesystem: Any) -> str:
    return str(filesystem.endpoint)


def _http(filesystem: Any) -> str:
    return str(filesystem.client_kwargs.get("base_url") or "")  # Paths are whole URLs.


def _webhdfs(filesystem: Any) -> str:
    return str(filesystem.url)


def _server(filesystem: Any) -> str:
    told = _arguments(filesystem)
    return f"{told['host']}:{told.get('port') or ''}"


def _server_of_user(filesystem: Any) -> str:
    # The account decides which folder is called "/". Its name goes no further than into this digest.
    return f"{_server(filesystem)}/{tokenize(_arguments(filesystem).get('username') or '')}"


def _hadoop(filesystem: Any) -> str:
    told = _arguments(filesystem)
    host, port, conf = told.get("host", "default"), told.get("port") or "", told.get("extra_conf")
    folders = [os.environ.get(name, "") for name in ("HADOOP_CONF_DIR", "HADOOP_HOME")]
    # A host that the configuration names is known by the folder of that configuration.
    named = tokenize(*folders) if host == "default" else ""
    return f"{host}:{port}/{named}{tokenize(conf) if conf else ''}"


def _this_host(filesystem: Any) -> str:  # noqa: ARG001 (of whatever options)
    return ""


# Where protocol, place and path together name an object in full. Elsewhere (an archive, a folder of another
# filesystem) all that the filesystem was made with becomes part of the store's name, digested, but for credentials.
PLACES: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(("abfs", "abfss", "az"), _azure),
    **dict.fromkeys(("file", "local", "memory"), _this_host),
    **dict.fromkeys(("ftp", "sftp", "ssh"), _server_of_user),
    **dict.fromkeys(("gcs", "gs"), _google),
    **dict.fromkeys(("http", "https"), _http),
    **dict.fromkeys(("s3", "s3a"), _s3),
    "hdfs": _hadoop,
    "hf": _hub,
    "smb": _server,
    "webhdfs": _webhdfs,
}


def _digest(filesystem: Any, variables: Iterable[str]) -> str:
    """Return a digest of all that a filesystem was made with and has resolved, but for credentials.

    variables: of the environment, which belong to it.
    """
    told = _arguments(filesystem)
    for protocol, options in BELOW.items():
        if told.get(protocol):
            told[options] = fsspec.filesystem(told[protocol], **(told.get(options) or {}))
    found = {name: vars(filesystem).get(name) for name in RESOLVED}
    found |= {name: os.environ.get(name) for name in variables}
    resolved = {name: unsigned(str(value)) for name, value in found.items() if isinstance(value, (str, int))}
    return str(tokenize(type(filesystem), _public(told), resolved))


def _arguments(filesystem: Any) -> dict[str, Any]:
    """Return the arguments that a filesystem was made with, by name; those of `*args` by number."""
    names = list(inspect.signature(type(filesystem).__init__).parameters)[1:]
    names += map(str, range(len(names), len(filesystem.storage_args)))
    return {**dict(zip(names, filesystem.storage_args, strict=False)), **filesystem.storage_options}


def _public(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options without those that say how to get in."""
    found = {}
    for name, value in options.items():
        if not CREDENTIALS.search(name):
            nested = isinstance(value, Mapping) and name.endswith(("options", "kwargs", "config"))
            found[name] = _public(value) if nested else _named(value)
    return found


def _named(said: Any) -> Any:
    """Return what names a store, or is its content: all of it, but for credentials in URLs."""
    if isinstance(said, Mapping):
        return {name: _named(value) for name, value in said.items()}
    if isinstance(said, (list, tuple)):
        return [_named(value) for value in said]
    if isinstance(said, AbstractFileSystem):
        return identity_of(said)
    if isinstance(said, str):
        return unsigned(said)
    return _made_of(said) if " at 0x" in str(said) else said  # The text would name a place in memory.


def _made_of(said: Any) -> Any:
    """Return what an object would be made of again, as pickling asks for it. Raises ConfigError."""
    try:
        made = said.__reduce_ex__(2)
    except TypeError as error:
        kind = f"{type(said).__module__}.{type(said).__qualname__}"
        raise ConfigError(f"a store given as a {kind} cannot be told from others: name it with origin_id") from error
    parts = [_public(part) if isinstance(part, Mapping) else _named(part) for part in made[1]]
    state = made[2] if len(made) > 2 else None
    return [type(said), parts, _public(state) if isinstance(state, Mapping) else _named(state)]
