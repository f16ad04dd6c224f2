"""Encrypted Parquet: columns in plain text are read, and others raise an error that says so."""

from __future__ import annotations

import base64
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest

from dataload import make_dataset
from dataload.errors import DataError


class Plain(pe.KmsClient):  # type: ignore[misc]
    """A client of a key service that leaves keys as they are."""

    def __init__(self, _: object) -> None:
        super().__init__()

    def wrap_key(self, key: bytes, _: str) -> bytes:
        return base64.b64encode(key)


def write(path: Path, *, plaintext_footer: bool) -> None:
    """Write a file whose columns x and s.b are encrypted."""
    config = pe.EncryptionConfiguration("footer", column_keys={"key": ["x", "s.b"]}, plaintext_footer=plaintext_footer)
    keys = pe.CryptoFactory(Plain).file_encryption_properties(pe.KmsConnectionConfig(), config)
    table = pa.table({"x": ["a", "b"], "y": [2, None], "s": [{"a": 3, "b": 4}, {"a": 5, "b": 6}]})
    with pq.ParquetWriter(path, table.schema, encryption_properties=keys) as writer:
        writer.write_table(table, row_group_size=1)


def test_a_file_with_an_encrypted_footer_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "0.parquet", plaintext_footer=False)
    with pytest.raises(DataError, match=r"0\.parquet is encrypted, .*: write it without encryption"):
        make_dataset(tmp_path, columns=["y"], cache=False)


def test_columns_in_plain_text_are_read_beside_encrypted_ones(tmp_path: Path) -> None:
    write(tmp_path / "0.parquet", plaintext_footer=True)
    columns = make_dataset(tmp_path, columns=["y", "s.a"], fill_null=0, cache=False).__getitems__([0, 1]).columns
    assert (columns["y"].tolist(), columns["s.a"].tolist()) == ([2, 0], [3, 5])
    kept = make_dataset(tmp_path, columns=["s.a"], filters=[("y", ">=", 2)], cache=False)
    assert kept.__getitems__(range(len(kept))).columns["s.a"].tolist() == [3]


@pytest.mark.parametrize(("columns", "name"), [(None, "x"), (["y", "x"], "x"), (["s"], "s.b")])
def test_an_encrypted_column_is_refused_by_name(tmp_path: Path, columns: list[str] | None, name: str) -> None:
    write(tmp_path / "0.parquet", plaintext_footer=True)
    with pytest.raises(DataError, match=rf"0\.parquet: column '{name}' is encrypted; leave it out with columns="):
        make_dataset(tmp_path, columns=columns, cache=False)
