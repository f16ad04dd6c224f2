"""The check that the batches of several datasets have the same columns."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from dataload.errors import ConfigError
from dataload.formats.schema import Field, Layout


def check_same_columns(names: Sequence[str], layouts: Sequence[Layout], schemas: Sequence[pa.Schema]) -> None:
    """Raise ConfigError unless the batches of all datasets have the same columns of the same types.

    Args:
        names: Name of each dataset.
        layouts: Layout of the records of each.
        schemas: Arrow schema of each, for the error.
    """
    first, *others = ({field.name: field for field in layout.fields} for layout in layouts)
    for name, schema, fields in zip(names[1:], schemas[1:], others, strict=True):
        for column in [*first, *(fields.keys() - first.keys())]:
            here, there = first.get(column), fields.get(column)
            if here != there:
                raise ConfigError(
                    f"column {column!r} is {_type(schemas[0], here)} in source {names[0]!r} and "
                    f"{_type(schema, there)} in source {name!r}: convert it, or leave it out with columns="
                )


def _type(schema: pa.Schema, field: Field | None) -> str:
    """Return the type of a column in words."""
    if field is None:
        return "missing"
    return str(schema.field(field.name).type) if field.name in schema.names else "a mask of nulls"
