"""The columns that a function may return, their forms, and their conversion to columns of records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from dataload.errors import DataError
from dataload.formats.schema import Field
from dataload.rows.collate import unflattened
from dataload.rows.columns import Array, Column, Dense, Ragged

_BYTES = np.dtype(np.uint8)
_PYTHON = (bool, int, float)
ACCEPTED = (
    "return an array or a tensor [B, ...], a list of numbers, a list of strings or of bytes, or a list of lists of "
    "numbers"
)


@dataclass(frozen=True)
class Form:
    """The form of a column: what `Field` says, without the name.

    Args:
        kind: "dense", "list", "string" or "binary"; "" if all values are None.
        dtype: Type of one element; None if there are only empty lists.
        shape: Shape of a dense value.
        loose: Whether the elements are numbers of Python, which may become those of another dtype.
    """

    kind: str
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...] = ()
    loose: bool = False

    @classmethod
    def of(cls, field: Field) -> Form:
        """Return the form of a column."""
        return cls("dense" if field.kind == "mask" else field.kind, np.dtype(field.dtype), field.shape)

    def __str__(self) -> str:
        if self.kind == "dense":
            return f"{self.dtype} [{', '.join(['B', *map(str, self.shape)])}]"
        return {"list": f"lists of {self.dtype}", "string": "strings", "binary": "bytes", "": "None"}[self.kind]

    @property
    def type(self) -> pa.DataType:
        """The Arrow type of the values."""
        assert self.dtype is not None
        if self.kind in ("string", "binary"):
            return pa.string() if self.kind == "string" else pa.binary()
        kind = pa.from_numpy_dtype(self.dtype)
        if self.kind == "list":
            return pa.list_(kind)
        return pa.fixed_shape_tensor(kind, self.shape) if self.shape else kind

    def holds(self, other: Form) -> bool:
        """Return whether a column of this form can hold the values of another one."""
        if not other.kind:
            return self.kind in ("", "string", "binary", "list")
        same = (self.kind, self.shape) == (other.kind, other.shape)
        if other.dtype is None or self.dtype == other.dtype:
            return same
        wider = other.loose and self.dtype is not None and self.dtype.kind == "f" and other.dtype.kind == "i"
        return same and wider


def joined(name: str, forms: Sequence[Form]) -> Form:
    """Return the form that holds the values of all forms. Raise DataError if none does, or if no value is known."""
    for form in forms:
        if all(form.holds(other) for other in forms):
            if form.dtype is None or not form.kind:
                raise DataError(
                    f"column {name!r} has only None or empty lists in the sample: return an array of a dtype"
                )
            return form
    first, other = next((each, other) for each in forms for other in forms if not each.holds(other))
    raise DataError(f"column {name!r} has the form {other} in one batch and {first} in another: return the same form")


def joined_forms(samples: Sequence[Mapping[str, Form]]) -> dict[str, Form]:
    """Return the form of each column in all samples.

    Raises:
        DataError: The samples differ in their columns or their forms.
    """
    for sample in samples:
        for name in sample.keys() ^ samples[0].keys():
            raise DataError(f"it returned the column {name!r} for some rows only: return the same columns")
    return {name: joined(name, [sample[name] for sample in samples]) for name in samples[0]}


def converted(name: str, value: Any, rows: int) -> tuple[Form, Column]:
    """Return the form of a column that a function returned, and the column.

    Args:
        name: Name of the column.
        value: The values.
        rows: Rows of the batch.

    Raises:
        DataError: No column can hold the values, or there are more or fewer than `rows`.
    """
    value = unflattened(value)
    if isinstance(value, torch.Tensor):
        value = _numpy(name, value)
    if isinstance(value, (pa.Array, pa.ChunkedArray)):
        # Arrow infers types by chunk, so other numbers must stay those of Python, which fit another chunk's form.
        is_exact = not pa.types.is_uint64(value.type) or value.null_count
        value = value.to_pylist() if is_exact else np.asarray(value)
    if isinstance(value, np.ma.MaskedArray):
        raise DataError(f"column {name!r} is a masked array, which has no form: fill it, such as by .filled(np.nan)")
    if isinstance(value, np.ndarray) and value.dtype.kind in "OU":
        value = value.tolist()
    if not isinstance(value, (np.ndarray, list, tuple)) or (isinstance(value, np.ndarray) and not value.ndim):
        raise DataError(f"column {name!r} is {_type(value)}: {ACCEPTED}")
    if len(value) != rows:
        raise DataError(f"column {name!r} has {len(value)} rows, and the batch {rows}: return a row for each row")
    if isinstance(value, np.ndarray):
        return _dense(name, value)
    return _of_list(name, value)


def fitted(field: Field, value: Any, rows: int) -> Column:
    """Return the column of a field that a function returned.

    Raises:
        DataError: The values have another form, or there are more or fewer than `rows`.
    """
    form, column = converted(field.name, value, rows)
    expected = Form.of(field)
    if not expected.holds(form):
        raise DataError(
            f"column {field.name!r} has the form {form} here, and {expected} in the rows before: return one"
        )
    if isinstance(column, Dense):  # The function may write its next result to the same memory.
        return Dense(column.values.astype(field.dtype))
    assert isinstance(column, Ragged)
    return Ragged(column.values.astype(field.dtype, copy=False), column.offsets, column.valid)


def _type(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"one {name}" if np.isscalar(value) or value is None else f"a {name}"


def _numpy(name: str, tensor: torch.Tensor) -> Array:
    try:
        array: Array = tensor.detach().cpu().numpy()
    except (TypeError, RuntimeError) as error:  # bfloat16, nested and sparse tensors
        raise DataError(f"column {name!r} is a tensor that numpy cannot hold ({error}): convert it") from error
    return array


def _dense(name: str, array: Array, *, loose: bool = False) -> tuple[Form, Column]:
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise DataError(f"column {name!r} is an array of {array.dtype}: {ACCEPTED}")
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return Form("dense", array.dtype, array.shape[1:], loose), Dense(array)


def _of_list(name: str, values: Sequence[Any]) -> tuple[Form, Column]:
    first = next((value for value in values if value is not None), None)
    if first is None:
        return Form("", None), _ragged([b""] * len(values), _valid(values))
    if isinstance(first, str):
        return Form("string", _BYTES), _of_bytes(name, values, str.encode)
    if isinstance(first, (bytes, bytearray, memoryview)):
        return Form("binary", _BYTES), _of_bytes(name, values, _binary)
    if isinstance(first, (*_PYTHON, np.generic)):
        return _stacked(name, values, loose=isinstance(first, _PYTHON))
    if isinstance(first, torch.Tensor):
        values = [None if value is None else _numpy(name, value) for value in values]
        first = next(value for value in values if value is not None)
    if isinstance(first, np.ndarray) and first.ndim != 1:
        return _stacked(name, values, loose=False)
    if isinstance(first, (list, tuple, np.ndarray)):
        return _lists(name, values)
    raise DataError(f"column {name!r} has {_type(first)} in a row: {ACCEPTED}")


def _stacked(name: str, values: Sequence[Any], *, loose: bool) -> tuple[Form, Column]:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise DataError(f"column {name!r} has values of several shapes or types ({error}): {ACCEPTED}") from error
    _check_ints(name, values, array)
    return _dense(name, array, loose=loose)


def _check_ints(name: str, values: Sequence[Any], array: Array) -> None:
    """Raise DataError if numbers of Python have an int that int64 cannot hold. Beside others, NumPy rounds it."""
    if array.dtype.kind not in "uf" or int not in {*map(type, values)}:
        return
    for number in values:
        if isinstance(number, (int, np.integer)) and not -(1 << 63) <= int(number) < 1 << 63:
            raise DataError(
                f"column {name!r} has {number}, which int64 cannot hold: return an array, such as np.array(…, "
                "np.uint64)"
            )


def _of_bytes(name: str, values: Sequence[Any], encode: Callable[[Any], bytes]) -> Ragged:
    try:
        return _ragged([b"" if value is None else encode(value) for value in values], _valid(values))
    except (TypeError, ValueError) as error:
        raise DataError(f"column {name!r} has values of several types ({error}): {ACCEPTED}") from error


def _binary(value: Any) -> bytes:
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"bytes and {type(value).__qualname__}")
    return bytes(value)


def _lists(name: str, values: Sequence[Any]) -> tuple[Form, Column]:
    lists = [() if value is None else value for value in values]
    dtypes = {each.dtype for each in lists if isinstance(each, np.ndarray) and each.ndim == 1}
    if dtypes and any(len(each) for each in lists if not isinstance(each, np.ndarray)):
        raise DataError(f"column {name!r} has both arrays and lists, whose numbers may be of another type: {ACCEPTED}")
    numbers: list[Any] = []
    try:
        offsets = np.concatenate(([0], np.cumsum([len(each) for each in lists], dtype=np.int64)))
        if dtypes:
            flat = np.concatenate([np.asarray(each, min(dtypes, key=str)) for each in lists])
        else:
            numbers = list(chain.from_iterable(lists))
            flat = np.asarray(numbers)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"column {name!r} has values of several types ({error}): {ACCEPTED}") from error
    _check_ints(name, numbers, flat)
    if len(dtypes) > 1 or (len(flat) and (flat.dtype.kind not in "biuf" or flat.ndim != 1)):
        found = " and ".join(sorted(map(str, dtypes))) if len(dtypes) > 1 else str(flat.dtype)
        raise DataError(f"column {name!r} has lists of {found}: {ACCEPTED}")
    is_known = bool(dtypes) or len(flat) > 0
    return Form("list", flat.dtype if is_known else None, (), not dtypes), Ragged(flat, offsets, _valid(values))


def _ragged(parts: Sequence[bytes], valid: npt.NDArray[np.bool_] | None) -> Ragged:
    offsets = np.concatenate(([0], np.cumsum([len(part) for part in parts], dtype=np.int64)))
    return Ragged(np.frombuffer(b"".join(parts), _BYTES), offsets, valid)


def _valid(values: Sequence[Any]) -> npt.NDArray[np.bool_] | None:
    if all(value is not None for value in values):
        return None
    return np.array([value is not None for value in values], np.bool_)
