"""Short texts about a dataset, for `repr`."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pyarrow as pa

from dataload.cache.tier import Tier
from dataload.runtime.redact import redacted
from dataload.runtime.text import few


def columns_text(schema: pa.Schema) -> str:
    """Return the names and types of the columns: "id: int64, text: string, … 198 more"."""
    return few(f"{field.name}: {_type_text(field.type)}" for field in schema)


def _type_text(kind: pa.DataType) -> str:
    if isinstance(kind, pa.FixedShapeTensorType):
        return f"{kind.value_type} {list(kind.shape)}"
    return str(kind)


def source_text(urls: Sequence[str]) -> str:
    """Return the URL that objects have in common: that of one object or of a folder. It has no credentials."""
    common = os.path.commonprefix(list(urls))  # noqa: RUF071 (it is cut at a slash)
    return redacted(common if len(urls) == 1 else common[: common.rfind("/") + 1])


def cache_text(tier: Tier) -> str:
    """Return where the rows are cached."""
    return f"{'read-only ' * tier.read_only}cache {tier.location}" if tier.on_disk else "no cache"
