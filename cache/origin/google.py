"""Google Cloud Storage through obstore, with the options of the user's gcsfs filesystem.

gcsfs finds the credentials: service accounts, workload identity, application default credentials, tokens. obstore gets
its access tokens, and requests one generation of an object: no other one can answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from typing import Any

from dataload.cache.origin.errors import UnsuitableError
from dataload.cache.origin.translation import OF_FSSPEC, Translation, client_settings, is_class, unknown_options

CLASSES = ("gcsfs.core.GCSFileSystem", "gcsfs.extended_gcsfs.ExtendedGcsFileSystem")
# Options whose effect obstore gets through the filesystem, and options that do not affect range requests.
TRANSLATED = frozenset({"access", "endpoint_url", "project", "token"})
IRRELEVANT = OF_FSSPEC | {
    "block_size",
    "cache_timeout",
    "check_connection",
    "consistency",
    "default_location",
    "requests_timeout",
    "secure_serialize",
    "timeout",
}
JSON_API = "/storage/v1/"


def untranslatable(filesystem: Any) -> str | None:
    """Return why obstore cannot replace this filesystem; None if it can."""
    return is_class(filesystem, *CLASSES) or unknown_options(filesystem, "gcsfs", TRANSLATED | IRRELEVANT)


def settings(filesystem: Any, bucket: str) -> dict[str, Any]:
    """Return the arguments of `GCSStore` for a bucket, without credentials."""
    layouts = getattr(filesystem, "_storage_layout_cache", {})  # gcsfs has no public name for it.
    if "ZONAL" in str(layouts.get(bucket)):
        raise UnsuitableError(f"obstore does not support zonal buckets such as {bucket}")
    endpoint = str(filesystem.base).removesuffix(JSON_API)
    found = client_settings(endpoint)
    credentials = filesystem.credentials.credentials
    if project := getattr(credentials, "quota_project_id", None):
        found["client_options"]["default_headers"] = {"x-goog-user-project": project}
    return {
        "bucket": bucket,
        # Explicit values: obstore would read these from the environment, as gcsfs already did.
        "base_url": endpoint,
        "skip_signature": credentials is None,
        **found,
    }


def fetched(filesystem: Any) -> dict[str, Any]:
    """Return the access token of a filesystem."""
    filesystem.credentials.maybe_refresh()
    return _token(filesystem)


def renewed(filesystem: Any, held: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return another access token than the one that the store has rejected; None if there is none."""
    from google.auth.transport.requests import Request  # gcsfs has imported it.

    own = filesystem.credentials
    if own.credentials is None:
        return None
    with own.lock:
        if held is None or own.credentials.token == held["token"]:
            own.credentials.refresh(Request())
            own.credentials.apply(own.heads)
    found = _token(filesystem)
    return found if held is None or found["token"] != held["token"] else None


def _token(filesystem: Any) -> dict[str, Any]:
    credentials = filesystem.credentials.credentials
    expires_at = credentials.expiry and credentials.expiry.replace(tzinfo=UTC)
    return {"token": credentials.token, "expires_at": expires_at}


def _condition(version: str) -> dict[str, Any]:
    return {"version": version} if version.isdecimal() else {}


def _version(meta: Mapping[str, Any]) -> str | None:
    found: str | None = meta["version"]
    return found


GOOGLE = Translation(
    "gcsfs", "GCSStore", untranslatable, settings, fetched, renewed, _condition, _version, version_mark="#"
)  # fmt: skip
