"""The stores that obstore reads: for each, how the options of its fsspec filesystem translate."""

from __future__ import annotations

from typing import Any

from dataload.cache.origin.azure import AZURE
from dataload.cache.origin.google import GOOGLE
from dataload.cache.origin.identity import address_of
from dataload.cache.origin.s3 import S3
from dataload.cache.origin.translation import Translation

BY_PROTOCOL = {
    **dict.fromkeys(("s3", "s3a"), S3),
    **dict.fromkeys(("gs", "gcs"), GOOGLE),
    **dict.fromkeys(("abfs", "abfss", "az"), AZURE),
}


def translation_of(filesystem: Any) -> Translation | None:
    """Return how obstore reads the store of a filesystem; None if it does not know such stores."""
    return BY_PROTOCOL.get(address_of(filesystem)[0])
