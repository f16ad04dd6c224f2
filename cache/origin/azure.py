"""Azure Blob Storage through obstore, with the options of the user's adlfs filesystem.

adlfs finds the credentials: account keys, SAS tokens, connection strings, service principals, workload and managed
identities. obstore gets them from it, and sends If-Match.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fsspec.asyn import sync

from dataload.cache.origin.translation import (
    OF_FSSPEC,
    Translation,
    client_settings,
    if_match,
    is_class,
    tag_of,
    unknown_options,
)

# Options whose effect obstore gets through the filesystem, and options that do not affect range requests.
TRANSLATED = frozenset(
    {
        "account_host",
        "account_key",
        "account_name",
        "anon",
        "client_id",
        "client_secret",
        "connection_string",
        "credential",
        "sas_token",
        "tenant_id",
    }
)
IRRELEVANT = OF_FSSPEC | {
    "assume_container_exists",
    "blocksize",
    "connection_timeout",
    "location_mode",
    "read_timeout",
    "socket_timeout",
    "timeout",
}
SCOPE = "https://storage.azure.com/.default"


def untranslatable(filesystem: Any) -> str | None:
    """Return why obstore cannot replace this filesystem; None if it can."""
    if reason := is_class(filesystem, "adlfs.spec.AzureBlobFileSystem"):
        return reason
    if reason := unknown_options(filesystem, "adlfs", TRANSLATED | IRRELEVANT):
        return reason
    if filesystem.location_mode != "primary":
        return "adlfs was given location_mode"
    given = filesystem.credential
    if given is not None and not filesystem.connection_string and not hasattr(given, "get_token"):
        return f"adlfs was given a {type(given).__name__} as credential"
    return None


def settings(filesystem: Any, container: str) -> dict[str, Any]:
    """Return the arguments of `AzureStore` for a container, without credentials."""
    client = filesystem.service_client
    endpoint = str(client.url).partition("?")[0].rstrip("/")  # A SAS token may follow.
    return {
        "container_name": container,
        "account_name": client.account_name or filesystem.account_name,
        # Explicit values: obstore would read these from the environment, as adlfs already did.
        "endpoint": endpoint,
        "use_emulator": False,
        "skip_signature": _given(filesystem) is None and filesystem.credential is None,
        **client_settings(endpoint),
    }


def fetched(filesystem: Any) -> dict[str, Any]:
    """Return the key, the SAS token or an access token of a filesystem."""
    if given := _given(filesystem):
        return given
    credential = filesystem.sync_credential
    token = credential.get_token(SCOPE) if credential else sync(filesystem.loop, _token, filesystem.credential)
    return {"token": token.token, "expires_at": datetime.fromtimestamp(token.expires_on, UTC)}


def renewed(filesystem: Any, held: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return another access token than the one that the store has rejected; None if there is none."""
    if _given(filesystem) or filesystem.credential is None:
        return None
    found = fetched(filesystem)
    return found if held is None or found["token"] != held["token"] else None


async def _token(credential: Any) -> Any:
    found = credential.get_token(SCOPE)
    return await found if hasattr(found, "__await__") else found


def _given(filesystem: Any) -> dict[str, Any] | None:
    """Return the key or the SAS token that a filesystem was given. The order is that of adlfs."""
    if filesystem.connection_string:
        parts = (part.partition("=") for part in filesystem.connection_string.split(";"))
        named = {name.strip().lower(): value.strip() for name, _, value in parts}
        key, signature = named.get("accountkey"), named.get("sharedaccesssignature")
    elif filesystem.credential is not None:
        return None
    else:
        key, signature = filesystem.account_key, filesystem.sas_token
    if key:
        return {"access_key": key, "expires_at": None}
    return {"sas_token": signature.lstrip("?"), "expires_at": None} if signature else None


def _condition(version: str) -> dict[str, Any]:
    quoted = '"' + version.strip('"') + '"'
    return if_match(version) and if_match(quoted)


AZURE = Translation(
    "adlfs", "AzureStore", untranslatable, settings, fetched, renewed, _condition, tag_of, version_mark="?versionid="
)  # fmt: skip
