"""Tests of the columns that a function may return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from dataload.errors import DataError
from dataload.formats.schema import fields_of
from dataload.mapping.forms import Form, converted, fitted, joined
from dataload.mapping.map_maker import ChunkSize
from dataload.rows.collate import Flat
from dataload.rows.columns import Dense


@pytest.mark.parametrize(
    ("value", "form", "first"),
    [
        pytest.param(np.arange(2), "int64 [B]", 0, id="array"),
        pytest.param(np.zeros((2, 3), np.uint8), "uint8 [B, 3]", [0, 0, 0], id="array of rows"),
        pytest.param(torch.ones(2, 1, dtype=torch.float16), "float16 [B, 1]", [1.0], id="tensor"),
        pytest.param(torch.ones(2, requires_grad=True), "float32 [B]", 1.0, id="tensor with a gradient"),
        pytest.param([1, 2], "int64 [B]", 1, id="ints"),
        pytest.param([1, 2.5], "float64 [B]", 1.0, id="floats"),
        pytest.param([True, False], "bool [B]", True, id="bools"),
        pytest.param([np.zeros((2, 2)), np.ones((2, 2))], "float64 [B, 2, 2]", [[0, 0], [0, 0]], id="list of images"),
        pytest.param([torch.tensor(3), torch.tensor(4)], "int64 [B]", 3, id="list of scalars"),
        pytest.param([np.arange(2), np.arange(2)], "lists of int64", [0, 1], id="list of vectors"),
        pytest.param([[1], []], "lists of int64", [1], id="lists"),
        pytest.param(([1.5], None), "lists of float64", [1.5], id="lists with a null"),
        pytest.param(Flat(torch.arange(3), torch.tensor([0, 1, 3])), "lists of int64", [0], id="flat"),
        pytest.param(["a", None], "strings", "a", id="strings"),
        pytest.param(np.array(["a", "b"]), "strings", "a", id="array of strings"),
        pytest.param([b"a", memoryview(b"b")], "bytes", b"a", id="bytes"),
        pytest.param(pa.array([[1], [2]]), "lists of int64", [1], id="arrow"),
        pytest.param(pa.array([2**63 + 1, 1], pa.uint64()), "uint64 [B]", 2**63 + 1, id="arrow of uint64"),
        pytest.param(pa.chunked_array([[1], [2]], pa.uint64()), "uint64 [B]", 1, id="arrow of two chunks"),
        pytest.param(pa.array([1.5, 2.5], pa.float32()), "float64 [B]", 1.5, id="arrow of numbers"),
        pytest.param([np.uint64(2**63 + 1), np.uint64(1)], "uint64 [B]", 2**63 + 1, id="list of uint64"),
        pytest.param([[np.uint64(2**63 + 1)], []], "lists of uint64", [2**63 + 1], id="lists of uint64"),
        pytest.param(np.arange(2, dtype=">i4"), "int32 [B]", 0, id="other byte order"),
    ],
)
def test_each_form_of_a_column(value: Any, form: str, first: Any) -> None:
    found, column = converted("x", value, 2)
    assert str(found) == form
    [field] = fields_of(pa.schema([pa.field("x", found.type)]))
    assert Form.of(field).holds(found)
    assert fitted(field, value, 2).values.dtype == np.dtype(field.dtype)
    values = column.values
    if field.ragged:
        values = values[column.offsets[0] : column.offsets[1]]
        values = values.tobytes() if field.is_bytes else values.tolist()
        assert (values.decode() if field.kind == "string" else values) == first
    else:
        assert values[0].tolist() == first


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ([1], r"'x' has 1 rows, and the batch 2"),
        (np.zeros((3, 2)), r"'x' has 3 rows, and the batch 2"),
        (7, r"'x' is one int: return an array"),
        (np.float32(1), "'x' is one numpy.float32"),
        (None, "'x' is one NoneType"),
        ({"a": 1}, "'x' is a dict"),
        ([{"a": 1}] * 2, "'x' has a dict in a row"),
        ([1, None], "'x' is an array of object"),
        (pa.array([1, None]), "'x' is an array of object"),
        ([1, 2**63 + 1], r"'x' has 9223372036854775809, which int64 .*: return an array, .*np\.array\(…, np\.uint64\)"),
        ([2**63 + 1, 2**63 + 2], "'x' has 9223372036854775809, which int64 cannot hold"),
        ([np.uint64(2**63 + 1), 1], "'x' has 9223372036854775809, which int64 cannot hold"),
        ([[1], [2**63 + 1]], "'x' has 9223372036854775809, which int64 cannot hold"),
        (np.array([1, 2**63 + 1], object), "'x' has 9223372036854775809, which int64 cannot hold"),
        (pa.array([[1], [2**63 + 1]], pa.list_(pa.uint64())), "'x' has 9223372036854775809, which int64 cannot hold"),
        ([1, "a"], "'x' is an array of"),
        (["a", 1], "'x' has values of several types"),
        ([[1], ["a"]], "'x' has lists of"),
        ([[[1]], [[2]]], "'x' has lists of int64"),
        ([np.zeros((1, 2)), np.zeros((2, 1))], "'x' has values of several shapes"),
        ([np.arange(1), np.arange(1.0)], "'x' has lists of float64 and int64"),
        ([[1.5, 2.5], np.array([1, 2])], "'x' has both arrays and lists"),
        ([b"abc", 5], r"'x' has values of several types \(bytes and int\)"),
        (np.array([b"a\0\0", b"abc"]), r"'x' is an array of \|S3: return .* a list of strings or of bytes"),
        (np.zeros(2, np.complex64), "'x' is an array of complex64"),
        (np.zeros(2, "datetime64[s]"), "'x' is an array of datetime64"),
        (np.ma.masked_equal([0.0, 1.0], 1), r"'x' is a masked array, .*: fill it, such as by \.filled\(np\.nan\)"),
        (torch.zeros(2, dtype=torch.bfloat16), "'x' is a tensor that numpy cannot hold"),
    ],
)
def test_other_values_are_errors(value: Any, error: str) -> None:
    with pytest.raises(DataError, match=error):
        converted("x", value, 2)


@pytest.mark.parametrize(
    ("before", "here", "error"),
    [
        (np.zeros((2, 3)), np.zeros((2, 4)), r"float64 \[B, 4\] here, and float64 \[B, 3\]"),
        (np.zeros(2, np.float32), np.zeros(2), r"float64 \[B\] here, and float32 \[B\]"),
        ([1, 2], [1.5, 2], r"float64 \[B\] here, and int64 \[B\]"),
        ([[1], [2]], [[1.5], [2]], "lists of float64 here, and lists of int64"),
        (["a", "b"], [b"a", b"b"], "bytes here, and strings"),
    ],
)
def test_another_shape_or_dtype_names_both(before: Any, here: Any, error: str) -> None:
    form, _ = converted("x", before, 2)
    [field] = fields_of(pa.schema([pa.field("x", form.type)]))
    with pytest.raises(DataError, match=f"column 'x' has the form {error} in the rows before"):
        fitted(field, here, 2)


@pytest.mark.parametrize(("before", "here"), [
    ([1.5, 2], [1, 2]),
    (pa.array([1.5, 2]), pa.array([1, 2])),
    ([[1.5], []], [[1], []]),
    ([[1], []], [[], None]),
])  # fmt: skip
def test_numbers_of_python_become_those_of_the_rows_before(before: Any, here: Any) -> None:
    form, _ = converted("x", before, 2)
    [field] = fields_of(pa.schema([pa.field("x", form.type)]))
    assert fitted(field, here, 2).values.dtype == np.dtype(field.dtype)


def test_samples_join_to_the_wider_form() -> None:
    forms = [converted("x", value, 2)[0] for value in ([[], None], [[1], []], [[1.5], []])]
    assert str(joined("x", forms)) == "lists of float64"
    assert str(joined("x", forms[:2])) == "lists of int64"
    with pytest.raises(DataError, match="'x' has only None or empty lists in the sample"):
        joined("x", forms[:1])
    with pytest.raises(DataError, match="'x' has the form strings in one batch and lists of int64 in another"):
        joined("x", [forms[1], converted("x", ["a", "b"], 2)[0]])


def test_chunks_follow_the_size_of_their_results() -> None:
    chunk = ChunkSize(1024, 32, limit=1 << 20)
    small, large = ({"x": Dense(np.zeros((chunk.rows, size), np.uint8))} for size in (16, 1 << 16))
    sizes = [chunk.rows]
    for columns in (small, small, large, small):
        chunk.follow(columns, len(columns["x"].values))
        sizes.append(chunk.rows)
    assert sizes == [32, 64, 128, 16, 32]
