"""Options of stores as tables have them, in the words of fsspec's filesystems, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The words of deltalake, in lower case and without "aws_", "azure_", "azure_storage_" or "google_", and those of
# pyiceberg, without "client."; and those of s3fs, adlfs and gcsfs.
S3 = {
    "access_key_id": "key",
    "secret_access_key": "secret",
    "session_token": "token",
    "token": "token",
    "endpoint_url": "endpoint_url",
    "endpoint": "endpoint_url",
    "region": "region",
    "default_region": "region",
    "skip_signature": "anon",
    "anonymous": "anon",
    "s3.access-key-id": "key",
    "s3.secret-access-key": "secret",
    "s3.session-token": "token",
    "s3.endpoint": "endpoint_url",
    "s3.region": "region",
    "s3.anonymous": "anon",
    "access-key-id": "key",
    "secret-access-key": "secret",
    "session-token": "token",
}
AZURE = {
    "account_name": "account_name",
    "account_key": "account_key",
    "access_key": "account_key",
    "sas_token": "sas_token",
    "sas_key": "sas_token",
    "client_id": "client_id",
    "client_secret": "client_secret",
    "tenant_id": "tenant_id",
    "adls.account-name": "account_name",
    "adls.account-key": "account_key",
    "adls.sas-token": "sas_token",
    "adls.client-id": "client_id",
    "adls.client-secret": "client_secret",
    "adls.tenant-id": "tenant_id",
}
GOOGLE = {
    "service_account": "token",
    "service_account_path": "token",
    "application_credentials": "token",
    "gcs.project-id": "project",
    "gcs.service.host": "endpoint_url",
}
STORES = {
    **dict.fromkeys(("s3", "s3a"), (S3, "aws_")),
    **dict.fromkeys(("az", "adl", "abfs", "abfss"), (AZURE, "azure_")),
    **dict.fromkeys(("gs", "gcs"), (GOOGLE, "google_")),
}
TO_DELTA = {
    "key": "AWS_ACCESS_KEY_ID",
    "secret": "AWS_SECRET_ACCESS_KEY",
    "token": "AWS_SESSION_TOKEN",
    "endpoint_url": "AWS_ENDPOINT_URL",
    "anon": "AWS_SKIP_SIGNATURE",
    "region_name": "AWS_REGION",
}
TO_ICEBERG = {
    "key": "s3.access-key-id",
    "secret": "s3.secret-access-key",
    "token": "s3.session-token",
    "endpoint_url": "s3.endpoint",
    "anon": "s3.anonymous",
    "region_name": "s3.region",
}
OF_CLIENTS = ("endpoint_url", "region_name")  # in client_kwargs


def of_fsspec(url: str, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options of a table for its files, in the words of fsspec. Those that say nothing of reading are left.

    Args:
        url: URL of the table or of a file.
        options: Those of deltalake or pyiceberg.
    """
    words, prefix = STORES.get(url.partition("://")[0], ({}, ""))
    found: dict[str, Any] = {}
    for name, value in (options or {}).items():
        plain = name.lower().removeprefix("client.").removeprefix(prefix).removeprefix("storage_")
        if (word := words.get(plain)) is not None and value is not None:
            found.setdefault(word, value)
    if "anon" in found:
        found["anon"] = str(found["anon"]).lower() == "true"
    if region := found.pop("region", None):
        found["client_kwargs"] = {"region_name": region}
    return found


def of_delta(options: Mapping[str, Any] | None) -> dict[str, str]:
    """Return options of s3fs in the words of deltalake, and others as they are."""
    found = _of_s3fs(options or {}, TO_DELTA)
    if (endpoint := found.get("AWS_ENDPOINT_URL")) is not None:
        found["AWS_ALLOW_HTTP"] = str(endpoint.startswith("http://")).lower()
    return found


def of_iceberg(options: Mapping[str, Any] | None) -> dict[str, str]:
    """Return options of s3fs in the words of pyiceberg, and others as they are."""
    return _of_s3fs(options or {}, TO_ICEBERG)


def _of_s3fs(options: Mapping[str, Any], words: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in options.items():
        if name == "client_kwargs":
            found |= _of_s3fs({each: value[each] for each in OF_CLIENTS if each in value}, words)
        elif name in words:
            found[words[name]] = str(bool(value)).lower() if name == "anon" else str(value)
        elif isinstance(value, str):
            found[name] = value
    return found
