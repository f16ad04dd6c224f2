"""Settings of S3 that follow from options and environment alone, so that no session of botocore is needed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataload.errors import ConfigError

# Options of s3fs, and those in its client_kwargs.
FLAGS = frozenset({"anon", "requester_pays"})
TEXTS = frozenset({"endpoint_url", "key", "secret", "token"})
CLIENT_TEXTS = frozenset({"endpoint_url", "region_name"})
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")  # the first that is set
TOKENS = ("AWS_SECURITY_TOKEN", "AWS_SESSION_TOKEN")
FILES = {"AWS_CONFIG_FILE": "~/.aws/config", "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials"}
# Variables that this module reads, or that change no request. botocore ignores AWS_REGION.
VARIABLES = frozenset(
    {*ENDPOINTS, *TOKENS, *FILES, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_REGION"}
    | {"AWS_CA_BUNDLE", "AWS_EC2_METADATA_DISABLED", "AWS_EXECUTION_ENV", "AWS_MAX_ATTEMPTS", "AWS_PAGER"}
    | {"AWS_RETRY_MODE"}
)
AMAZON = re.compile(r"https://s3([.-][a-z0-9-]+)?\.amazonaws\.com/?")  # not a private endpoint
REGION = re.compile(r"(af|ap|ca|eu|il|me|mx|sa|us)-[a-z]+-\d+")  # served under amazonaws.com
# The regions that share bucket names. China and the US government have others.
COMMERCIAL = re.compile(rf"https://s3([.-]{REGION.pattern})?\.amazonaws\.com/?")
ANY_REGION = "https://s3.amazonaws.com"
URL = re.compile(
    r"https?://(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?(/[A-Za-z0-9._~/-]*)?"
)  # obstore panics at others
LABEL = re.compile(r"[A-Za-z0-9-]+")  # the form of a region at any store
REGION_TIMEOUT = 5.0  # seconds


@dataclass(frozen=True)
class KnownS3:
    """The settings of all buckets of a store.

    Attributes:
        endpoint: The URL that botocore would use.
        region: The region of the client. A bucket at Amazon may have another one.
        requester_pays: Whether requests say so.
        credentials: Key, secret and token; None for anonymous requests.
        ca_bundle: File of the certificates to trust.
    """

    endpoint: str = field(repr=False)  # It may have a password.
    region: str
    requester_pays: bool
    credentials: tuple[str, str, str | None] | None = field(repr=False)
    ca_bundle: str | None = None

    @property
    def certificate(self) -> bytes | None:
        """The content of `ca_bundle`, if connections use it."""
        return read_bundle(self.ca_bundle) if self.ca_bundle and self.endpoint.startswith("https:") else None

    def place_of(self, bucket: str) -> tuple[str, str] | None:
        """Return endpoint and region of a bucket; None if only a session of botocore can tell them."""
        if bucket.startswith("arn:") or bucket.endswith("--x-s3"):
            return None
        if not AMAZON.fullmatch(self.endpoint):
            return self.endpoint, self.region
        region = _region_of(f"{self.endpoint.rstrip('/')}/{bucket}", self.ca_bundle)
        return (f"https://s3.{region}.amazonaws.com", region) if region else None


def known_s3(options: Mapping[str, Any], environ: Mapping[str, str]) -> KnownS3 | None:
    """Return the settings that s3fs would use; None if botocore's session has to find some of them.

    A session reads profiles, roles and the metadata of an instance or a container, and renews their credentials.

    Args:
        options: The arguments of s3fs.
        environ: The environment.
    """
    given = {name: value for name, value in options.items() if value is not None}
    client = given.pop("client_kwargs", {})
    if not (_plain(given, TEXTS, FLAGS) and isinstance(client, dict) and _plain(client, CLIENT_TEXTS, frozenset())):
        return None
    if any(name.startswith("AWS_") and name not in VARIABLES for name in environ) or _has_files(environ):
        return None
    credentials = None if given.get("anon") else _credentials(given, environ)
    if credentials is None and not given.get("anon"):
        return None
    if "endpoint_url" in given and "endpoint_url" in client:
        return None  # s3fs raises an error if they differ.
    named = (given.get("endpoint_url"), client.get("endpoint_url"), *map(environ.get, ENDPOINTS))
    region = client.get("region_name") or environ.get("AWS_DEFAULT_REGION")
    endpoint = next(filter(None, named), None) or _amazon(region)
    if endpoint is None or "accelerate" in endpoint or not (URL.fullmatch(endpoint) and LABEL.fullmatch(region or "-")):
        return None
    bundle = environ.get("AWS_CA_BUNDLE") or bundle_of_requests(environ)
    return KnownS3(endpoint, region or "us-east-1", bool(given.get("requester_pays")), credentials, bundle)


def read_bundle(path: str) -> bytes:
    """Return the certificates in a file.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        what = "is a folder" if Path(path).is_dir() else f"cannot be read ({error.strerror})"
        fix = "set AWS_CA_BUNDLE (or ca_bundle in ~/.aws/config) to a file of certificates, or unset it"
        raise ConfigError(f"{path}, which holds the certificates to trust, {what}: {fix}") from error


def bundle_of_requests(environ: Mapping[str, str]) -> str | None:
    """Return the file of certificates that botocore shares with requests, which also takes a folder of them."""
    path = environ.get("REQUESTS_CA_BUNDLE")
    return path if path and Path(path).is_file() else None


def _plain(given: Mapping[str, Any], texts: frozenset[str], flags: frozenset[str]) -> bool:
    """Return whether these are texts and flags of these names, and nothing else."""
    return all(
        (name in texts and isinstance(value, str) and value != "") or (name in flags and isinstance(value, bool))
        for name, value in given.items()
    )


def _has_files(environ: Mapping[str, str]) -> bool:
    """Return whether botocore would read a file of settings."""
    # `Path` raises errors for a user without a home folder, and for a folder of another user.
    return any(os.path.exists(os.path.expanduser(environ.get(name, usual))) for name, usual in FILES.items())  # noqa: PTH110, PTH111


def _credentials(given: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[str, str, str | None] | None:
    key, secret, token = (given.get(name) for name in ("key", "secret", "token"))
    if not (key or secret or token):
        key, secret = environ.get("AWS_ACCESS_KEY_ID"), environ.get("AWS_SECRET_ACCESS_KEY")
        token = next(filter(None, map(environ.get, TOKENS)), None)
    if not key or not secret or not (key + (token or "")).isprintable():  # obstore panics at such a header.
        return None
    return key, secret, token


def _amazon(region: str | None) -> str | None:
    """Return the endpoint of S3 at Amazon for a client of this region; None outside of the usual regions."""
    if region in (None, "us-east-1"):
        return ANY_REGION
    return f"https://s3.{region}.amazonaws.com" if REGION.fullmatch(str(region)) else None


def _region_of(url: str, ca_bundle: str | None) -> str | None:
    """Return the region of the bucket at this URL, which denied responses name, too; None if the request fails."""
    import http.client  # Few programs need these modules.
    import ssl
    import urllib.error
    import urllib.request

    try:
        request = urllib.request.Request(url, method="HEAD")  # noqa: S310 (the URL matches `AMAZON`)
        trusted = ssl.create_default_context(cafile=ca_bundle)
        with urllib.request.urlopen(request, timeout=REGION_TIMEOUT, context=trusted) as answer:  # noqa: S310
            headers = answer.headers
    except urllib.error.HTTPError as error:
        headers = error.headers
        error.close()
    except (OSError, http.client.HTTPException):
        return None
    found = headers.get("x-amz-bucket-region")
    return None if found is None else str(found)
