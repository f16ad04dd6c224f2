"""Requests to an origin that are made once."""

from __future__ import annotations

import pytest


def fail_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise transient errors of origins without retries."""
    for name in ("RETRY_SECONDS", "FIRST_CONTACT_SECONDS"):
        monkeypatch.setattr(f"dataload.cache.origin.origin.{name}", 0)
