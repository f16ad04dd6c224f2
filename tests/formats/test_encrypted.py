"""Parquet files with encrypted columns raise an error that says so."""

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


@pytest.mark.parametrize("plaintext_footer", [True, False])
def test_an_encrypted_file(tmp_path: Path, plaintext_footer: bool) -> None:
    config = pe.EncryptionConfiguration("footer", column_keys={"key": ["x"]}, plaintext_footer=plaintext_footer)
    keys = pe.CryptoFactory(Plain).file_encryption_properties(pe.KmsConnectionConfig(), config)
    table = pa.table({"x": [1], "y": [2]})
    with pq.ParquetWriter(tmp_path / "0.parquet", table.schema, encryption_properties=keys) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match=r"0\.parquet is encrypted, .*: write it without encryption"):
        make_dataset(tmp_path, columns=["y"], cache=False)
