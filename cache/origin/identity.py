"""The identity of a store in cache keys: equal for all users of a store, different for different stores.

A cache key names an object by its store and path. Every setting that decides where the bytes of a path come from is
part of the store's identity: options, environment, profile, connection string. The filesystem has resolved them
before this module reads them. Credentials are not part of the identity, not even as a digest.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec import AbstractFileSystem
from fsspec.utils import tokenize

from dataload.cache.origin.known_s3 import ANY_REGION, COMMERCIAL
from dataload.errors import ConfigError
from dataload.runtime.redact import CREDENTIALS, redacted, without_credentials

# Options that name a store in messages.
ADDRESS_OPTIONS = ("endpoint_url", "base_url", "host", "port", "account_name", "namenode")
# Attributes in which filesystems outside `LOCATIONS` store settings from the environment.
RESOLVED = ("account_name", "account_url", "base_url", "endpoint", "_endpoint", "endpoint_url", "host", "port", "url")
# Variables that name a store for filesystems that read them late, such as those of pyarrow and obstore.
ENVIRONMENT = (
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ENDPOINT",
    "STORAGE_EMULATOR_HOST",
)
# Options that name the protocol of a wrapped filesystem, and the options with its arguments.
WRAPPED = {"target_protocol": "target_options", "remote_protocol": "remote_options"}


def address_of(filesystem: Any) -> tuple[str, str]:
    """Return the protocol of a filesystem and its configured address, which may be empty, for messages."""
    protocol = filesystem.protocol if isinstance(filesystem.protocol, str) else filesystem.protocol[0]
    options = {**filesystem.storage_options, **(filesystem.storage_options.get("client_kwargs") or {})}
    return protocol, ":".join(str(options[name]) for name in ADDRESS_OPTIONS if options.get(name))


def is_s3(filesystem: Any) -> bool:
    """Return whether this is a store in S3."""
    return address_of(filesystem)[0] in ("s3", "s3a")


def endpoint_of(filesystem: Any) -> str | None:
    """Return the URL of a store in S3, which the environment or a profile may name.

    Return None for other stores, and if botocore cannot tell. Then a request fails, too.
    """
    if not is_s3(filesystem):
        return None
    with suppress(Exception):
        return redacted(_s3(filesystem))
    return None


def identity_of(filesystem: Any) -> str:
    """Return the identity of a filesystem's store in cache keys.

    Raises:
        ConfigError: The store was given as an object without a stable identity.
    """
    protocol, _ = address_of(filesystem)
    resolve = LOCATIONS.get(protocol)
    try:
        location = resolve(filesystem) if resolve else None
    except (AttributeError, KeyError):  # not the usual class of this protocol
        location = None
    if location is None:
        location = _digest(filesystem, ENVIRONMENT if resolve else ())
    return redacted(f"{protocol}://{location}")


def _s3(filesystem: Any) -> str:
    configured = filesystem.endpoint_url or filesystem.client_kwargs.get("endpoint_url")
    return str(configured or filesystem.s3.meta.endpoint_url)  # The environment or a profile may name an endpoint.


def _s3_store(filesystem: Any) -> str:
    # At Amazon the bytes come from the region of the bucket, whatever that of the client.
    url = _s3(filesystem)
    return ANY_REGION if COMMERCIAL.fullmatch(url) else url


def _azure(filesystem: Any) -> str:
    # adlfs resolved its options, the environment and the connection string, which has precedence.
    given = None if filesystem.connection_string else filesystem.account_name
    account = filesystem.service_client.account_name or given or ""
    url = str(filesystem.service_client.url).partition("?")[0]  # A SAS token may follow.
    location = urlsplit(url)
    named = account in ((location.hostname or "").partition(".")[0], *location.path.split("/"))
    return url if named else f"{url}{account}"


def _google(filesystem: Any) -> str:
    return str(filesystem.base)  # from the option, or the emulator in the environment


def _hub(filesystem: Any) -> str:
    return str(filesystem.endpoint)


def _http(filesystem: Any) -> str:
    return str(filesystem.client_kwargs.get("base_url") or "")  # Paths are whole URLs.


def _webhdfs(filesystem: Any) -> str:
    return str(filesystem.url)


def _server(filesystem: Any) -> str:
    arguments = _arguments(filesystem)
    return f"{arguments['host']}:{arguments.get('port') or ''}"


def _server_of_user(filesystem: Any) -> str:
    # The account decides which folder is "/". Its name enters the identity only as a digest.
    return f"{_server(filesystem)}/{tokenize(_arguments(filesystem).get('username') or '')}"


def _hadoop(filesystem: Any) -> str:
    arguments = _arguments(filesystem)
    host, port = arguments.get("host", "default"), arguments.get("port") or ""
    conf = arguments.get("extra_conf")
    folders = [os.environ.get(name, "") for name in ("HADOOP_CONF_DIR", "HADOOP_HOME")]
    # The Hadoop configuration names the default host: identify it by the configuration's folder.
    named = tokenize(*folders) if host == "default" else ""
    return f"{host}:{port}/{named}{tokenize(conf) if conf else ''}"


def _this_host(filesystem: Any) -> str:  # noqa: ARG001 (no option matters)
    return ""


# Protocols whose objects are identified by protocol, location and path. For other filesystems (an archive, a folder of
# another filesystem) the identity is a digest of all their arguments except credentials.
LOCATIONS: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(("abfs", "abfss", "az"), _azure),
    **dict.fromkeys(("file", "local", "memory"), _this_host),
    **dict.fromkeys(("ftp", "sftp", "ssh"), _server_of_user),
    **dict.fromkeys(("gcs", "gs"), _google),
    **dict.fromkeys(("http", "https"), _http),
    **dict.fromkeys(("s3", "s3a"), _s3_store),
    "hdfs": _hadoop,
    "hf": _hub,
    "smb": _server,
    "webhdfs": _webhdfs,
}


def _digest(filesystem: Any, variables: Iterable[str]) -> str:
    """Return a digest of a filesystem's arguments and resolved settings, without credentials.

    Args:
        filesystem: The filesystem.
        variables: Environment variables to include.
    """
    arguments = _arguments(filesystem)
    for protocol, options in WRAPPED.items():
        if arguments.get(protocol):
            wrapped = fsspec.filesystem(arguments[protocol], **(arguments.get(options) or {}))
            arguments[options] = wrapped
    found = {name: vars(filesystem).get(name) for name in RESOLVED}
    found |= {name: os.environ.get(name) for name in variables}
    resolved = {name: without_credentials(str(value)) for name, value in found.items() if isinstance(value, (str, int))}
    return str(tokenize(type(filesystem), _without_credentials(arguments), resolved))


def _arguments(filesystem: Any) -> dict[str, Any]:
    """Return the arguments of a filesystem's constructor by name; those of `*args` by number."""
    names = list(inspect.signature(type(filesystem).__init__).parameters)[1:]
    names += map(str, range(len(names), len(filesystem.storage_args)))
    return {**dict(zip(names, filesystem.storage_args, strict=False)), **filesystem.storage_options}


def _without_credentials(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options without credentials."""
    kept = {}
    for name, value in options.items():
        if not CREDENTIALS.search(name):
            nested = isinstance(value, Mapping) and name.endswith(("options", "kwargs", "config"))
            kept[name] = _without_credentials(value) if nested else _named(value)
    return kept


def _named(value: Any) -> Any:
    """Return an argument in a form with a stable digest, without credentials in URLs."""
    if isinstance(value, Mapping):
        return {name: _named(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_named(each) for each in value]
    if isinstance(value, AbstractFileSystem):
        return identity_of(value)
    if isinstance(value, str):
        return without_credentials(value)
    return _pickled_parts(value) if " at 0x" in str(value) else value  # Its text holds a memory address.


def _pickled_parts(value: Any) -> Any:
    """Return the parts from which pickling would rebuild an object.

    Raises:
        ConfigError: The object cannot be pickled.
    """
    try:
        reduced = value.__reduce_ex__(2)
        if isinstance(reduced, str):  # the name of a global
            return [type(value), reduced]
        parts = [_without_credentials(part) if isinstance(part, Mapping) else _named(part) for part in reduced[1]]
        state = reduced[2] if len(reduced) > 2 else None
        return [type(value), parts, _without_credentials(state) if isinstance(state, Mapping) else _named(state)]
    except ConfigError:
        raise
    except Exception as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ConfigError(f"a store given as a {kind} cannot be told from others: name it with origin_id") from error
