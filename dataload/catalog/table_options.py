"""Options of stores: in the words of deltalake and of pyiceberg, and in those of s3fs, adlfs and gcsfs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# Of several words for one thing, the first that is there counts. Each library has its own list, because a `token` of
# pyiceberg is that of the catalog, which no store may see.
OF_DELTA = {  # in lower case, without "aws_", "azure_", "google_" and "storage_"
    "s3": {
        "access_key_id": "key",
        "secret_access_key": "secret",
        "session_token": "token",
        "token": "token",
        "endpoint_url_s3": "endpoint_url",
        "endpoint_url": "endpoint_url",
        "endpoint": "endpoint_url",
        "region": "region",
        "default_region": "region",
        "skip_signature": "anon",
        "profile": "profile",
    },
    "az": {
        "account_name": "account_name",
        "account_key": "account_key",
        "access_key": "account_key",
        "sas_token": "sas_token",
        "sas_key": "sas_token",
        "client_id": "client_id",
        "client_secret": "client_secret",
        "tenant_id": "tenant_id",
        "connection_string": "connection_string",
    },
    "gs": {
        "service_account_key": "token",
        "service_account": "token",
        "service_account_path": "token",
        "application_credentials": "token",
    },
}
OF_ICEBERG = {
    "s3": {
        "s3.access-key-id": "key",
        "client.access-key-id": "key",
        "s3.secret-access-key": "secret",
        "client.secret-access-key": "secret",
        "s3.session-token": "token",
        "client.session-token": "token",
        "s3.endpoint": "endpoint_url",
        "s3.region": "region",
        "client.region": "region",
        "s3.anonymous": "anon",
        "s3.profile-name": "profile",
        "client.profile-name": "profile",
    },
    "az": {
        "adls.account-name": "account_name",
        "adls.account-key": "account_key",
        "adls.sas-token": "sas_token",
        "adls.client-id": "client_id",
        "adls.client-secret": "client_secret",
        "adls.tenant-id": "tenant_id",
        "adls.connection-string": "connection_string",
    },
    "gs": {
        "gcs.oauth2.token": "token",
        "gcs.project-id": "project",
        "gcs.service.host": "endpoint_url",
    },
}
SAS_OF_ACCOUNT = "adls.sas-token."  # begins the property of pyiceberg that has the token of one account
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


def scheme_of(url: str) -> str:
    """Return what kind of store a URL names: "s3", "az" and "gs" by any of their names; "" is a path."""
    name = url.partition("://")[0].lower() if "://" in url else ""
    names = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "file": ""}
    return names.get(name, "az" if name in ("adl", "abfs", "abfss", "wasb", "wasbs") else name)


def of_delta(url: str, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options of deltalake that fsspec needs to read the files of a table.

    Args:
        url: URL of the table.
        options: The `storage_options` of deltalake.
    """
    prefix = {"s3": "aws_", "az": "azure_", "gs": "google_"}.get(scheme_of(url), "")
    plain = {name.lower().removeprefix(prefix).removeprefix("storage_"): each for name, each in (options or {}).items()}
    found = _of_store(plain, OF_DELTA.get(scheme_of(url), {}))
    if isinstance(token := found.get("token"), str) and token.lstrip().startswith("{"):
        found["token"] = json.loads(token)  # the key of a Google account, and not the name of its file
    return found


def of_iceberg(url: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of pyiceberg that fsspec needs to read the files of a table.

    Args:
        url: URL of the table.
        properties: Those of the table's `FileIO`, with those of its catalog.
    """
    of_account = {}
    for name in properties:
        if name.startswith(SAS_OF_ACCOUNT):
            account = name.removeprefix(SAS_OF_ACCOUNT).partition(".")[0]
            of_account = {"adls.account-name": account, "adls.sas-token": properties[name]}
    return _of_store({**of_account, **properties}, OF_ICEBERG.get(scheme_of(url), {}))


def to_delta(url: str, options: Mapping[str, Any] | None) -> dict[str, str]:
    """Return options of fsspec in the words of deltalake, and others as they are."""
    kind, given = scheme_of(url), dict(options or {})
    if kind == "gs" and (token := given.pop("token", None)) is not None:
        given["google_service_account_key" if isinstance(token, Mapping) else "google_service_account"] = (
            json.dumps(dict(token)) if isinstance(token, Mapping) else str(token)
        )
    found = _of_fsspec(given, TO_DELTA if kind == "s3" else {})
    if (endpoint := found.get("AWS_ENDPOINT_URL")) is not None:
        found["AWS_ALLOW_HTTP"] = str(endpoint.startswith("http://")).lower()
    return found


def to_iceberg(options: Mapping[str, Any] | None) -> dict[str, str]:
    """Return options of s3fs in the words of pyiceberg, and others, such as those of a catalog, as they are."""
    return _of_fsspec(options or {}, TO_ICEBERG)


def _of_store(options: Mapping[str, Any], words: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word, name in words.items():
        if options.get(word) is not None:
            found.setdefault(name, options[word])
    if "anon" in found:
        found["anon"] = _is_true(found["anon"])
    if region := found.pop("region", None):
        found["client_kwargs"] = {"region_name": region}
    return found


def _of_fsspec(options: Mapping[str, Any], words: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in options.items():
        if name == "client_kwargs":
            found |= _of_fsspec({each: value[each] for each in OF_CLIENTS if each in value}, words)
        elif name in words:
            found[words[name]] = str(_is_true(value)).lower() if name == "anon" else str(value)
        elif isinstance(value, str):
            found[name] = value
    return found


def _is_true(value: object) -> bool:
    return str(value).lower() in ("true", "1")
