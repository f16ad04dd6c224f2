"""Tests of the removal of credentials from text."""

from __future__ import annotations

import pytest

from dataload.runtime.redact import redacted


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("s3://user:secret@host/bucket/x", "s3://host/bucket/x"),
        ("at https://secret@host/x and https://secret@other/y", "at https://host/x and https://other/y"),
        ("https://host/x?X-Amz-Signature=secret&y=1 failed", "https://host/x failed"),
        ("GET 'https://host/x?sig=secret' \"https://host/y?sig=secret\"", "GET 'https://host/x' \"https://host/y\""),
        ("https://host/x?versionId=3", "https://host/x?versionId=3"),
        ("https://host/x@y", "https://host/x@y"),
        ("valkey://user:se@cret@host:6379 failed", "valkey://host:6379 failed"),
        ("//user:secret@host/x", "//host/x"),
        ("file:///data@2026/x and /data//x@y", "file:///data@2026/x and /data//x@y"),
        ("two\nlines\r\n  here", "two lines here"),
    ],
)
def test_credentials_are_left_out(text: str, seen: str) -> None:
    assert redacted(text) == seen
