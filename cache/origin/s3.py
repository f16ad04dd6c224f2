"""S3 through obstore, with the options of the user's s3fs filesystem."""

from __future__ import annotations

import os
from typing import Any

from dataload.cache.origin.credentials import fetched, renewed
from dataload.cache.origin.errors import UnsuitableError, is_transient
from dataload.cache.origin.known_s3 import AMAZON, CLIENT_TEXTS, FLAGS, TEXTS, bundle_of_requests, read_bundle
from dataload.cache.origin.s3_names import VERSION
from dataload.cache.origin.translation import (
    OF_FSSPEC,
    Translation,
    client_settings,
    if_match,
    is_class,
    tag_of,
    unknown_options,
)

# Options of s3fs that are passed on to obstore, and options that do not affect range requests.
TRANSLATED = FLAGS | TEXTS | {"client_kwargs", "use_ssl"}
IRRELEVANT = OF_FSSPEC | {"cache_regions", "config_kwargs", "default_block_size", "fixed_upload_size"}
CLIENT_OPTIONS = CLIENT_TEXTS | {"use_ssl"}
# Timeouts and connection counts: obstore has its own.
CONFIG_OPTIONS = frozenset({"connect_timeout", "max_pool_connections", "read_timeout", "retries"})


def untranslatable(filesystem: Any) -> str | None:
    """Return why obstore cannot replace this filesystem; None if it can."""
    known = {"client_kwargs": CLIENT_OPTIONS, "config_kwargs": CONFIG_OPTIONS}
    reason = is_class(filesystem, "s3fs.core.S3FileSystem")
    return reason or unknown_options(filesystem, "s3fs", TRANSLATED | IRRELEVANT, **known)


def settings(filesystem: Any, bucket: str) -> dict[str, Any]:
    """Return the arguments of `S3Store` for a bucket, without credentials."""
    filesystem.connect()
    meta = filesystem.s3.meta
    if setting := _unsupported_setting(filesystem, bucket):
        raise UnsuitableError(f"obstore does not support {setting}")
    endpoint, region = str(meta.endpoint_url), meta.region_name or "us-east-1"
    if AMAZON.fullmatch(endpoint):
        region = bucket_region(filesystem, bucket) or region  # obstore follows no redirects
        endpoint = f"https://s3.{region}.amazonaws.com"
    certificate = None
    bundle = filesystem.session.get_config_variable("ca_bundle") or bundle_of_requests(os.environ)
    if bundle and endpoint.startswith("https:"):
        certificate = read_bundle(bundle)
    pays, anon = bool(filesystem.req_kw), bool(filesystem.anon)
    return arguments(bucket, endpoint, region, pays=pays, anon=anon, certificate=certificate)


def arguments(
    bucket: str, endpoint: str, region: str, *, pays: bool, anon: bool, certificate: bytes | None = None
) -> dict[str, Any]:
    """Return the arguments of `S3Store`, without credentials."""
    return {
        "bucket": bucket,
        "region": region,
        "request_payer": pays,
        # Explicit values: obstore would read these from the environment, as botocore already did.
        "endpoint": endpoint,
        "aws_endpoint_url_s3": endpoint,
        "virtual_hosted_style_request": False,
        "s3_express": False,
        "skip_signature": anon,
        **client_settings(endpoint, certificate),
    }


def _unsupported_setting(filesystem: Any, bucket: str) -> str | None:
    """Return a botocore setting, from environment, profile or bucket name, that obstore does not support; else None."""
    config = filesystem.s3.meta.config
    unlike = {"addressing_style": ("auto", "path", None), "use_accelerate_endpoint": (False, None)}
    unlike["use_dualstack_endpoint"] = (False, None)
    for name, usual in unlike.items():
        if (config.s3 or {}).get(name) not in usual:
            return name
    if config.proxies:
        return "proxies"
    if "accelerate" in filesystem.s3.meta.endpoint_url:
        return "accelerated endpoints"
    return f"buckets such as {bucket}" if bucket.startswith("arn:") or bucket.endswith("--x-s3") else None


def bucket_region(filesystem: Any, bucket: str) -> str | None:
    """Return the AWS region of a bucket, which denied responses name, too; None if the server names none.

    Raises:
        OSError: The request failed, and a retry may succeed.
    """
    try:
        answer = filesystem.call_s3("head_bucket", Bucket=bucket)
    except OSError as error:
        if is_transient(error):
            raise
        answer = getattr(error.__cause__, "response", {})
    region: str | None = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region")
    return region


S3 = Translation(
    "s3fs", "S3Store", untranslatable, settings, fetched, renewed, if_match, tag_of, VERSION, writes=True
)  # fmt: skip
