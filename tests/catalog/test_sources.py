"""Tests of what a source names: the files of folders, globs and lists."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload import make_dataset, make_loader
from dataload.errors import DataError


def write(file: Path, *values: int) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"x": pa.array(values, pa.int64())}), file)
    return file


def read(source: object) -> list[int]:
    """Return the rows of a source in file order."""
    loader = make_loader(source, 100, shuffle=False, cache=False)  # type: ignore[arg-type]
    return [int(value) for batch in loader for value in batch["x"]]


# Symbolic links


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """Return a folder with a file, a link to a file and a link to a folder, as the cache of the Hub has them."""
    folder = tmp_path / "snapshot"
    write(folder / "0.parquet", 0)
    (folder / "1.parquet").symlink_to(write(tmp_path / "blobs" / "b10b", 1, 2))
    write(tmp_path / "shared" / "deep" / "0.parquet", 3, 4)
    (folder / "day").symlink_to(Path("..") / "shared")
    return folder


def test_links_to_files_and_folders_are_followed(linked: Path) -> None:
    assert read(linked) == [0, 1, 2, 3, 4]
    assert read(f"{linked}/*.parquet") == [0, 1, 2]
    assert read(f"{linked}/*/deep/*.parquet") == [3, 4]
    assert read(f"{linked}/**/*.parquet") == [0, 1, 2, 3, 4]
    (linked.parent / "all").symlink_to(linked)
    assert read(linked.parent / "all") == [0, 1, 2, 3, 4]


def test_a_link_to_a_folder_that_contains_it_is_not_followed(linked: Path) -> None:
    (linked / "up").symlink_to(linked)
    (linked.parent / "shared" / "back").symlink_to(linked)
    assert read(linked) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("target", ["gone", "2.parquet"])
def test_a_link_to_a_missing_file_names_itself(linked: Path, target: str) -> None:
    (linked / ".lock").symlink_to("gone")
    assert read(linked) == [0, 1, 2, 3, 4]
    (linked / "2.parquet").symlink_to(target)
    with pytest.raises(DataError, match=r"2\.parquet is empty, or a link to a missing file"):
        make_dataset(linked, cache=False)
