"""The filesystem that a URL names, with the options of its store."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec

from dataload.cache.origin.deferred_s3 import deferred_s3
from dataload.cache.origin.explanation import opening
from dataload.cache.origin.origin import connect, introduce
from dataload.cache.origin.s3_names import VERSION
from dataload.errors import ConfigError
from dataload.runtime.redact import redacted

ARN = re.compile(r"(?:^|(?<=::))s3a?://arn:")  # the name of an access point, which may have "::" in it
NO_BUCKET = re.compile(r"(s3a?|gcs|gs)://(/.*)?", re.DOTALL)
# Options of pandas' other engines, polars, deltalake and boto3, without "aws_".
NAMES_IN_S3FS = {
    **dict.fromkeys(("access_key_id", "access_key"), "'key'"),
    **dict.fromkeys(("secret_access_key", "secret_key"), "'secret'"),
    **dict.fromkeys(("session_token", "security_token"), "'token'"),
    **dict.fromkeys(("region", "region_name", "default_region"), "client_kwargs={'region_name': …}"),
    **dict.fromkeys(("endpoint", "endpoint_override"), "'endpoint_url'"),
    **dict.fromkeys(("skip_signature", "anonymous", "no_sign_request"), "'anon'"),
}


def open_source(url: str, storage_options: Mapping[str, Any] | None, others: Sequence[str] = ()) -> Any:
    """Return the fsspec filesystem of a URL, or a `DeferredS3`.

    Args:
        url: A URL or a local path.
        storage_options: Options of its filesystem.
        others: Further URLs or paths, which must be of the same filesystem.

    Raises:
        ConfigError: The URL is empty, names no bucket or is in an archive, its protocol is unknown, its filesystem
            rejects the options, which other libraries may call so, or another URL is of another filesystem; or as for
            `checked_options`.
        OriginError: The filesystem cannot connect to its server.
    """
    introduce()
    for each in (url, *others):
        _check_url(each)
    opened, options = next((each for each in (url, *others) if VERSION in each), url), checked_options(storage_options)
    if VERSION in opened:  # For such a URL, fsspec sets version_aware itself.
        options.pop("version_aware", None)
    if opened.startswith(("s3://", "s3a://")):
        _check_options(options)
    with_options = " with these storage_options" if storage_options else ""
    with opening(url, f"{redacted(url)} cannot be opened{with_options}"):
        filesystem = deferred_s3(opened, options)
        if filesystem is None and "::" in opened and not split_chain(opened)[0]:
            # fsspec would split the name of a local file, or of an access point, at each "::".
            filesystem = connect("s3" if ARN.match(opened) else "file", options)
        filesystem = filesystem or fsspec.url_to_fs(opened, **options)[0]
    for other in others:
        if _store_of(other, filesystem) != _store_of(url, filesystem):
            raise ConfigError(
                f"{redacted(url)} and {redacted(other)} are of two filesystems: make_dataset for each, and mix() them"
            )
    return filesystem


def checked_options(storage_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options of a filesystem as a dict. Raise ConfigError unless they are a mapping."""
    if not isinstance(storage_options, Mapping | None):
        kind = type(storage_options).__name__  # The value may have credentials.
        raise ConfigError(f"storage_options is of type {kind}: pass a dict, such as {{'anon': True}}")
    return dict(storage_options or {})


def _check_options(options: dict[str, Any]) -> None:
    """Raise ConfigError for options that other libraries of S3 name otherwise than s3fs does."""
    for name in options:
        if own := NAMES_IN_S3FS.get(name.lower().removeprefix("aws_")):
            raise ConfigError(f"storage_options names {name!r}, which s3fs calls {own}: pass that")


def split_chain(url: str) -> tuple[str, str]:
    """Return the filesystems before the last "::" of a URL, such as "tiercache", and the rest."""
    if arn := ARN.search(url):
        chain, last = url[: arn.start()].removesuffix("::"), url[arn.start() :]
    else:
        chain, _, last = url.rpartition("::")
    named = {part.partition("://")[0] for part in chain.split("::")}
    return (chain, last) if named <= {*fsspec.available_protocols()} else ("", url)


def _check_url(url: str) -> None:
    """Raise ConfigError for an empty URL, for one without a bucket, in an archive, or that a Path has changed."""
    if not url:
        raise ConfigError("the URL is empty: name an object, a folder or a glob")
    if "://" in url and url != url.lstrip():
        raise ConfigError(f"{redacted(repr(url))} begins with whitespace: remove it")
    chain, last = split_chain(url)
    if "://" in chain:
        fix = "which dataload cannot read: unpack the archive"
        raise ConfigError(f"{redacted(url)} names a file in an archive by '::', {fix}")
    if NO_BUCKET.fullmatch(last):
        raise ConfigError(f"{redacted(url)} names no bucket: name one, and a folder in it")
    protocol, mark, rest = url.partition(":/")
    # fsspec takes file:/path for a local path.
    protocols = {*fsspec.available_protocols()} - {"file", "local"}
    if mark and not rest.startswith("/") and protocol in protocols and not Path(url).parent.exists():
        fix = f"pass the text '{protocol}://…', because a Path cannot hold a URL"
        raise ConfigError(f"{redacted(url)} has a single slash behind {protocol}: {fix}")


def _store_of(url: str, filesystem: Any) -> tuple[Any, ...]:
    """Return what a URL says about its store: protocol, host, account. `filesystem`: of one of the URLs."""
    chain, last = split_chain(url)
    protocol, mark, _ = last.partition("://")
    if chain:
        return (chain, protocol if mark else "file")
    names = [filesystem.protocol] if isinstance(filesystem.protocol, str) else filesystem.protocol
    options = filesystem._get_kwargs_from_urls(last)  # noqa: SLF001 (an extension point of fsspec)
    options.pop("version_aware", None)
    return (names[0] if (protocol if mark else "file") in names else protocol, options)
