"""Tests of the removal of credentials from text."""

from __future__ import annotations

from typing import Any

import pytest

from dataload.runtime.redact import cause_of, redacted, secrets_of, without_credentials, without_signature


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("s3://user:secret@host/bucket/x", "s3://host/bucket/x"),
        ("at https://secret@host/x and https://secret@other/y", "at https://host/x and https://other/y"),
        ("https://host/x?X-Amz-Signature=secret&y=1 failed", "https://host/x failed"),
        ("GET 'https://host/x?sig=secret' \"https://host/y?sig=secret\"", "GET 'https://host/x' \"https://host/y\""),
        ("https://host/x?versionId=3", "https://host/x?versionId=3"),
        ("'https://host/x?versionId=3&X-Amz-Signature=secret' failed", "'https://host/x?versionId=3' failed"),
        ("https://host/x?versionId=3?sig=secret", "https://host/x?versionId=3"),
        ("https://host/x@y", "https://host/x@y"),
        ("valkey://user:se@cret@host:6379 failed", "valkey://host:6379 failed"),
        ("//user:secret@host/x", "//host/x"),
        ("file:///data@2026/x and /data//x@y", "file:///data@2026/x and /data//x@y"),
        (
            "abfss://container@account.dfs.core.windows.net/x?sig=secret",
            "abfss://container@account.dfs.core.windows.net/x",
        ),
        ("abfss://user:secret@host/x", "abfss://host/x"),
        ("two\nlines\r\n  here", "two lines here"),
        ("is https://host/x right? No", "is https://host/x right? No"),
    ],
)
def test_credentials_are_left_out(text: str, seen: str) -> None:
    assert redacted(text) == seen


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("https://host/x?id=1&jwt=secret", "https://host/x?id=1"),
        ("https://host/x?code=secret&pwd=secret", "https://host/x"),
        ("https://host/x#access_token=secret", "https://host/x"),
        ("s3://bucket/a#1.parquet", "s3://bucket/a#1.parquet"),
        ("wasbs://container@account/x?token=secret", "wasbs://container@account/x"),
    ],
)
def test_sources_are_recorded_without_credentials(text: str, kept: str) -> None:
    assert without_credentials(text) == kept


@pytest.mark.parametrize(
    ("query", "kept"),
    [
        ("X-Amz-Algorithm=a&X-Amz-Credential=b&X-Amz-Date=c&X-Amz-Expires=1&X-Amz-Signature=d", ""),
        ("x-goog-signature=d&generation=7", "?generation=7"),
        ("AWSAccessKeyId=a&Signature=b&Expires=1&versionId=v", "?versionId=v"),
        ("Policy=p&Signature=b&Key-Pair-Id=k", ""),
        ("sv=2024&sr=b&se=2026&sp=r&sig=d&snapshot=2", "?snapshot=2"),
        ("key=a.parquet&user=me&Expires=1&se=1", "?key=a.parquet&user=me&Expires=1&se=1"),
    ],
)
def test_only_signatures_are_no_part_of_an_identity(query: str, kept: str) -> None:
    assert without_signature(f"https://host/x?{query}") == f"https://host/x{kept}"
    assert without_signature(f"/data/x?{query}") == f"/data/x?{query}"


def test_a_group_of_errors_is_a_cause_unless_a_member_shows_credentials() -> None:
    """Clients raise such a group where they try several addresses; a traceback shows its members."""
    causes = [OSError(f"cannot connect to https://{host}/x") for host in ("host", "user:s3cret@host")]
    harmless, telling = (ExceptionGroup("all failed", [OSError("down"), cause]) for cause in causes)
    assert cause_of(harmless) is harmless
    assert cause_of(telling) is None
    assert cause_of(ExceptionGroup("of groups", [harmless, telling])) is None
    error = OSError("all connection attempts failed")
    error.__cause__ = telling
    assert cause_of(error) is None


CONNECTION = (
    "DefaultEndpointsProtocol=http;AccountName=a;AccountKey=c2VjcmV0c2VjcmV0;BlobEndpoint=http://127.0.0.1:10000/a"
)


@pytest.mark.parametrize(
    ("options", "text", "seen"),
    [
        ({"uri": "postgresql://iceberg:s3cret@db/x"}, "no iceberg_tables; s3cret", "no iceberg_tables; …"),
        ({"uri": "postgresql://iceberg:iceberg@db/x"}, 'no "iceberg_tables"', 'no "iceberg_tables"'),
        ({"uri": "postgresql://u:p%40ssw0rd@h/d"}, "p%40ssw0rd or p@ssw0rd", "… or …"),
        ({"uri": "https://u:s3cret@h/?to=a@b"}, "no s3cret", "no …"),
        ({"uri": "https://h/?id=1234&token=abcdefgh"}, "1234 abcdefgh", "1234 …"),
        ({"user": "iceberg", "s3.role-session-name": "train"}, "iceberg train", "iceberg train"),
        ({"password": "a1:b2@c3"}, "no a1:b2@c3", "no …"),
        ({"password": 12345678}, "no 12345678", "no …"),
        ({"credential": "id:abcdefgh"}, "abcdefgh of id:abcdefgh", "… of …"),
        (
            {"headers": ["Bearer abcdefgh", "Bearer https://abc"]},
            "Bearer abcdefgh https://abc by Bearer",
            "… … by Bearer",
        ),
        ({"s3.secret-access-key": "ab/cd+efgh"}, "ab%2Fcd%2Befgh ab/cd%2Befgh", "… …"),
        ({"connection_string": CONNECTION}, f"{CONNECTION} c2VjcmV0c2VjcmV0", "… …"),
        ({"adls.connection-string": CONNECTION}, f"http c2VjcmV0c2VjcmV0 {CONNECTION}", "http … …"),
        ({"adls.connection-string": "AccountKey=c2VjcmV0c2VjcmV0=="}, "c2VjcmV0c2VjcmV0== c2Vjcm", "… c2Vjcm"),
        ({"token-refresh-enabled": "true", "s3.remote-signing-enabled": True, "auth": "false"}, "true", "true"),
        ({"auth": {"type": "basic", "basic": {"password": "s3cret"}}}, "basic s3cret", "basic …"),
        ({"rest.signing-region": "us-east-1", "rest.signing-name": "glue"}, "us-east-1 glue", "us-east-1 glue"),
        ({"s3.signer": "S3V4RestSigner", "s3.signer.endpoint": "v1/sign"}, "S3V4RestSigner v1/sign", None),
        ({"header.X-Iceberg-Access-Delegation": "vended-credentials"}, "vended-credentials", None),
        ({"oauth2-server-uri": "https://h/tokens"}, "https://h/tokens", None),
    ],
)
def test_only_the_secrets_of_options_are_left_out(options: Any, text: str, seen: str | None) -> None:
    secrets = secrets_of(options)
    assert redacted(text, secrets) == (seen or text)
    error = RuntimeError(text)
    assert cause_of(error, secrets) is (error if seen in (None, text) else None)
