"""Tests of what a source names: the files of folders, globs and lists."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attempts import fail_at_once

from dataload import CacheConfig, make_dataset, make_loader
from dataload.cache.origin.origin import Origin
from dataload.cache.origin.s3_names import _lists_prefixes
from dataload.errors import ConfigError, DataError, OriginError, OriginNotFound


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Hugging Face datasets, without the thread of its progress bars."""
    found = pytest.importorskip("datasets")
    import tqdm  # installed with it

    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    return found


def write(file: Path, *values: int) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"x": pa.array(values, pa.int64())}), file)
    return file


def read(source: object) -> list[int]:
    """Return the rows of a source in file order."""
    loader = make_loader(source, 100, shuffle=False, cache=False)  # type: ignore[arg-type]
    return [int(value) for batch in loader for value in batch["x"]]


# A cache inside the source


@pytest.mark.parametrize(
    ("source", "cache"),
    [
        ("data", "data/cache"),
        ("data/", "data/day/cache"),
        ("data", "data"),
        ("data/**", "data/cache"),
        ("data/*/*", "data/cache"),
        ("link", "data/cache"),
        ("data", "link/cache"),
    ],
)
def test_a_cache_inside_the_source_is_refused(tmp_path: Path, source: str, cache: str) -> None:
    write(tmp_path / "data" / "day" / "0.parquet", 1)
    (tmp_path / "link").symlink_to("data")
    says = f"cache_dir {tmp_path / cache} lies inside the source {tmp_path}/{source}: name a folder outside of it"
    with pytest.raises(ConfigError, match=re.escape(says)):
        make_dataset(f"{tmp_path}/{source}", cache_dir=tmp_path / cache)
    assert not (tmp_path / "data" / "cache").exists()


def test_the_default_cache_inside_the_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "0.parquet", 1)
    monkeypatch.setenv("DATALOAD_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=f"cache_dir {tmp_path}/cache lies inside the source .*DATALOAD_CACHE_DIR"):
        make_dataset(tmp_path)
    assert len(make_dataset(tmp_path, cache=False)) == 1


@pytest.mark.parametrize(
    ("source", "cache"),
    [
        ("data", "cache"),
        ("data", "data/.cache"),
        ("data/*.parquet", "data/cache"),
        ("data/**/*.parquet", "data/cache"),
        ("data/0.parquet", "data/cache"),
        ("data/day", "data/cache"),
    ],
)
def test_a_cache_beside_the_files_of_the_source(tmp_path: Path, source: str, cache: str) -> None:
    for name in ("data/0.parquet", "data/day/1.parquet"):
        write(tmp_path / name, 1)
    lengths = [len(list(make_loader(tmp_path / source, 1, cache_dir=tmp_path / cache))) for _ in range(2)]
    assert lengths[0] == lengths[1] > 0


@pytest.mark.parametrize("cache", [False, None])
def test_a_glob_that_is_none_is_an_error(tmp_path: Path, cache: Any) -> None:
    write(tmp_path / "part" / "0.parquet", 1)
    folder = {} if cache is False else {"cache_dir": tmp_path / "cache"}
    with pytest.raises(ConfigError, match=re.escape("part**.parquet")):
        make_dataset(f"{tmp_path}/part**.parquet", cache=cache, **folder)


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


# Folders that cannot be listed


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that makes the listing of a folder fail with an error number. Another folder has a file."""
    fail_at_once(monkeypatch)
    write(tmp_path / "good" / "0.parquet", 0)
    write(tmp_path / "bad" / "1.parquet", 1)
    scan = os.scandir

    def fail(number: int) -> None:
        def scandir(path: str) -> Any:
            if path == str(tmp_path / "bad"):
                raise OSError(number, os.strerror(number), path)
            return scan(path)

        monkeypatch.setattr(os, "scandir", scandir)

    return fail


@pytest.mark.parametrize("pattern", ["", "/*/*.parquet", "/**/*.parquet"])
def test_a_folder_of_a_failing_mount_raises(failing: Callable[[int], None], tmp_path: Path, pattern: str) -> None:
    failing(errno.ESTALE)
    with pytest.raises(OriginError, match=rf"Stale file handle.*{tmp_path}/bad"):
        read(f"{tmp_path}{pattern}")


def test_a_folder_of_someone_else_is_left_out(
    failing: Callable[[int], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing(errno.EACCES)
    assert read(tmp_path) == [0]
    assert f"Permission denied: '{tmp_path}/bad': this folder is left out" in caplog.text


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


# Tables and datasets of other libraries


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("_delta_log/0.json", r"is a Delta table, .* DeltaTable\(url\)\.file_uris\(\)\. .* vectors, first run REORG"),
        (".hoodie/hoodie.properties", "is a Hudi table, .* has log files, first run its compaction"),
        ("metadata/00000-1.metadata.json", "is an Iceberg table, .* has delete files, first run rewrite_data_files"),
    ],
)
@pytest.mark.parametrize("below", ["", "tables/t/"])
def test_a_table_with_deleted_rows_is_not_read_as_files(tmp_path: Path, name: str, says: str, below: str) -> None:
    data = write(tmp_path / below / "data" / "0.parquet", 1)
    (tmp_path / below / name).parent.mkdir()
    (tmp_path / below / name).write_text("{}")
    with pytest.raises(ConfigError, match=says):
        make_dataset(tmp_path, cache=False)
    assert read([data]) == [1]


SIGNS = ["_delta_log/00000000000000000000.json", ".hoodie/hoodie.properties", "metadata/v1.metadata.json"]


@pytest.mark.parametrize("name", SIGNS)
@pytest.mark.parametrize("below", ["", "day=1/", "day=1/hour=2/", "data/", "data/day=1/"])
@pytest.mark.parametrize("pattern", ["", "*.parquet", "**/*.parquet"])
def test_a_part_of_a_table_with_deleted_rows_is_not_read(tmp_path: Path, name: str, below: str, pattern: str) -> None:
    table = tmp_path / "t"
    data = write(table / below / "0.parquet", 1)
    (table / name).parent.mkdir()
    assert read(f"{table}/{below}{pattern}") == [1]
    (table / name).write_text("{}")
    with pytest.raises(ConfigError, match=rf"{table if below or pattern else ''} is an? \w+ table, .* also has files"):
        make_dataset(f"{table}/{below}{pattern}", cache=False)
    assert read([data]) == [1]
    assert read(write(tmp_path / "t.parquet" / "data" / "day=1.parquet", 2)) == [2]


@pytest.mark.parametrize("name", SIGNS)
@pytest.mark.parametrize("below", ["", "data/", "data/day=1/"])
@pytest.mark.parametrize("pattern", ["*/{}*.parquet", "*/{}0.parquet", "t*/{}*.parquet", "**/*.parquet"])
def test_a_glob_above_a_table_with_deleted_rows_is_not_read(
    tmp_path: Path, name: str, below: str, pattern: str
) -> None:
    pattern = f"{tmp_path}/lake/{pattern.format(below)}"
    for folder in ("other", "t"):
        write(tmp_path / "lake" / folder / below / "0.parquet", 1)
    (tmp_path / "lake" / "t" / name).parent.mkdir(parents=True)
    assert set(read(pattern)) == {1}
    (tmp_path / "lake" / "t" / name).write_text("{}")
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/lake/t is an? \w+ table, .* also has files"):
        make_dataset(pattern, cache=False)


def test_a_glob_of_many_folders_looks_for_tables_in_few_of_each_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        write(tmp_path / "lake" / f"{number:02}" / "new" / "day=1" / "0.parquet", number)
    patterns, whole = [], Origin.list

    def listing(self: Origin, path: str, **options: Any) -> Any:
        patterns.append(path.removeprefix(f"{tmp_path}/"))
        return whole(self, path, **options)

    monkeypatch.setattr(Origin, "list", listing)
    globs = [f"{tmp_path}/lake/{number}*/**/*.parquet" for number in (0, 1)]
    assert len(make_dataset(globs, cache=False)) == 20
    first = [f"lake/{number:02}" for number in (0, 5, 10, 15)]
    checked = sorted(["lake", *first, *(f"{folder}/new" for folder in first)])
    assert patterns[:2] == ["lake/0*/**/*.parquet", "lake/1*/**/*.parquet"]
    assert [path.rsplit("/", 2)[0] for path in patterns[2::3]] == checked
    assert len(patterns) == len(globs) + 3 * len(checked)


@pytest.mark.parametrize("others", [["_a", "_c", "_tmp", ".b"], ["[a]", "[b]", "[c]", "[d]"]], ids=str)
def test_folders_that_are_skipped_do_not_count_among_those_searched_for_tables(
    tmp_path: Path, others: list[str]
) -> None:
    for folder in (*others, "t"):
        write(tmp_path / "lake" / folder / "0.parquet", 1)
    write(tmp_path / "lake" / "t" / "_delta_log" / "0.checkpoint.parquet", 1)
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/lake/t is a Delta table"):
        make_dataset(f"{tmp_path}/lake/*/*.parquet", cache=False)


OLD_S3FS = pytest.mark.skipif(not _lists_prefixes(), reason="this s3fs lists all folders below that of the glob")


@pytest.mark.variants
@pytest.mark.parametrize(("engine", "each"), [("auto", 3), pytest.param("fsspec", 5, marks=OLD_S3FS)])
def test_looking_for_a_table_in_s3_takes_few_requests(bucket: Any, cache: CacheConfig, engine: str, each: int) -> None:
    """It takes some for each folder that is not listed in any case, and two for the folder of files that are named."""

    def requests(*sources: str) -> int:
        bucket.server.reset()
        options = {"storage_options": bucket.options, "cache": replace(cache, engine=engine)}
        assert len(make_dataset([*map(bucket.url, sources)], **options)) == len(sources)
        return int(sum(bucket.server.stats()[f"{kind}_requests"] for kind in ("list", "head")))

    for key in ("t/day=1/0.parquet", "t/day=2/0.parquet", "t/x=1.parquet", "plain.parquet"):
        bucket.put_table(key, pa.table({"x": [1]}))
    for named in ("plain.parquet", "t/x=1.parquet", "t/day=1/0.parquet"):
        assert requests(named) == 1 + each
    assert requests("t/day=1/0.parquet", "t/day=2/0.parquet") == requests("plain.parquet") + 2
    folder = requests("t/day=1")
    assert requests("t/day=1/*") == folder + each
    assert requests("t/day=1", "t/day=2") == 2 * folder - each
    for name in SIGNS:
        bucket.put(f"t/{name}", b"{}")
        for source in ("t/*/*.parquet", "t/day=1", "t/day=1/*.parquet", "*/day=1/*.parquet", "**/0.parquet"):
            with pytest.raises(ConfigError, match=rf"^{bucket.name}/t is an? \w+ table"):
                requests(source)
        assert requests("t/day=1/0.parquet", "t/day=2/0.parquet")
        bucket.client.delete_object(Bucket=bucket.name, Key=f"t/{name}")


def test_a_folder_above_the_source_that_cannot_be_listed_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rights may be for the named folder only."""
    fail_at_once(monkeypatch)
    write(tmp_path / "t" / "day=1" / "0.parquet", 1)
    (tmp_path / "t" / "metadata").mkdir()
    scan = os.scandir

    def scandir(path: str) -> Any:
        if path == str(tmp_path / "t" / "metadata"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert read(tmp_path / "t" / "day=1") == [1]


def test_results_of_map_in_a_folder_of_hugging_face_are_no_data(tmp_path: Path, datasets: Any) -> None:
    datasets.Dataset.from_dict({"x": [0, 1, 2]}).save_to_disk(tmp_path / "saved")
    saved = datasets.load_from_disk(tmp_path / "saved")
    saved.map(lambda row: {"x": row["x"] * 100})
    saved.filter(lambda row: row["x"] > 1)
    first, _ = (tmp_path / "saved").glob("cache-*.arrow")
    first.rename(first.with_stem(f"{first.stem}_00000_of_00002"))  # the name with num_proc=2
    assert read(tmp_path / "saved") == [0, 1, 2]
    assert read(f"{tmp_path}/saved/*.arrow") == [0, 1, 2]


def test_a_folder_of_splits_names_them(tmp_path: Path, datasets: Any) -> None:
    one = datasets.Dataset.from_dict({"x": [0, 1, 2]})
    datasets.DatasetDict(train=one, test=one).save_to_disk(tmp_path / "saved")
    for source in (tmp_path / "saved", f"{tmp_path}/saved/", tmp_path):
        with pytest.raises(ConfigError, match="/saved has the splits 'test' and 'train': name the folder of one"):
            make_dataset(source, cache=False)
    assert read(tmp_path / "saved" / "test") == [0, 1, 2]


@pytest.mark.parametrize("form", ["data/{}-00000-of-00001.parquet", "{}/0.parquet", "{}.parquet"])
def test_splits_that_are_read_together_are_logged(tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / form.format("train"), 1)
    write(tmp_path / "trainer-a.parquet", 2)
    make_dataset(tmp_path, cache=False)
    assert not caplog.text
    write(tmp_path / form.format("test"), 3)
    assert sorted(read(tmp_path)) == [1, 2, 3]
    assert "reads the splits 'test' and 'train' together" in caplog.text


def test_markers_of_folders_are_no_data(bucket: Any, dataset_of: Callable[..., str]) -> None:
    url = dataset_of([[3]])
    bucket.put("data/day=1_$folder$", b"")
    assert len(make_dataset(url, storage_options=bucket.options, cache=False)) == 3
    bucket.put("data/0.parquet", b"")
    with pytest.raises(DataError, match=r"data/0\.parquet is empty"):
        make_dataset(url, storage_options=bucket.options, cache=False)


# Names and order


SPECIAL = ["a[1].parquet", "a?b.parquet", "a*b.parquet", "run[lr=1e-3]/0.parquet"]


@pytest.mark.parametrize("name", SPECIAL)
def test_a_path_that_exists_is_no_glob(tmp_path: Path, name: str) -> None:
    for number, other in enumerate([*SPECIAL, "a1.parquet", "axb.parquet", "runl/1.parquet"]):
        write(tmp_path / other, number)
    assert read(tmp_path / name) == [SPECIAL.index(name)]
    assert read(tmp_path / Path(name).parts[0]) == [SPECIAL.index(name)]


def test_a_glob_below_a_folder_with_a_bracket(tmp_path: Path) -> None:
    write(tmp_path / "run[1]" / "0.parquet", 1)
    with pytest.raises(OriginNotFound, match=r"no objects .*write \[\[\] for a \["):
        make_dataset(tmp_path / "run[1]" / "*.parquet", cache=False)
    assert read(tmp_path / "run[[]1]" / "*.parquet") == [1]


def test_an_object_in_s3_whose_name_looks_like_a_glob(bucket: Any) -> None:
    for key in ("data/a[1]/b.parquet", "data/b[1].parquet"):
        bucket.put_table(key, pa.table({"x": [1]}))
    for name in ("data/a[1]/", "data/a[1]/b.parquet", "data/b[1].parquet"):
        assert len(make_dataset(bucket.url(name), storage_options=bucket.options, cache=False)) == 1


@pytest.mark.parametrize("names", [{}, {"version_aware": True}])  # those of obstore, and those of s3fs
def test_an_object_in_s3_with_the_name_of_a_folder(bucket: Any, names: dict[str, Any]) -> None:
    bucket.put_table("data/p", pa.table({"x": [1]}))
    bucket.put_table("data/p/q.parquet", pa.table({"x": [2, 3]}))
    options = bucket.options | names
    for name, count in {"data/p": 2, "data/[p]": 1, "data": 3}.items():
        assert len(make_dataset(bucket.url(name), storage_options=options, cache=False)) == count


def test_the_objects_of_a_list_in_s3_are_listed_at_the_same_time(
    bucket: Any, dataset_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = dataset_of([[3]] * 4)
    objects = [f"{url}/part-{number:03d}.parquet" for number in range(4)]
    together, whole = threading.Barrier(4), Origin.list

    def held(self: Origin, path: str, **options: Any) -> Any:
        together.wait(200)
        return whole(self, path, **options)

    monkeypatch.setattr(Origin, "list", held)
    assert len(make_dataset(objects, storage_options=bucket.options, cache=False)) == 12


def test_the_first_missing_file_of_a_list_is_named(tmp_path: Path) -> None:
    files = [write(tmp_path / "0.parquet", 0), tmp_path / "gone.parquet", tmp_path / "gone, too.parquet"]
    with pytest.raises(OriginNotFound, match=r"no objects at .*/gone\.parquet"):
        make_dataset(files, cache=False)


@pytest.mark.parametrize(
    "pattern", ["data", "data/*.parquet", ["data/part-000.parquet", "data/part-001.parquet"]], ids=str
)
@pytest.mark.parametrize("engine", ["fsspec", "auto"])
def test_s3fs_keeps_no_listing_of_a_dataset(
    bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig, engine: str, pattern: str | list[str]
) -> None:
    """It would keep 1 kB an object for the life of the process. Listings of the user stay."""
    dataset_of([[3], [3]])
    bucket.put("data/\N{SNOWMAN}/_empty", b"")  # obstore lists no such names.
    bucket.put("mine/x", b"")
    s3fs = fsspec.filesystem("s3", **bucket.options)
    s3fs.ls(f"{bucket.name}/mine")
    source = bucket.url(pattern) if isinstance(pattern, str) else list(map(bucket.url, pattern))
    assert len(make_dataset(source, storage_options=bucket.options, cache=replace(cache, engine=engine))) == 6
    assert fsspec.filesystem("s3", **bucket.options) is s3fs
    assert set(s3fs.dircache) <= {f"{bucket.name}/mine"}
    if engine == "fsspec":
        assert s3fs.dircache


def test_the_order_of_a_list_does_not_count(tmp_path: Path) -> None:
    """glob.glob lists files in another order on each node."""
    files = [write(tmp_path / f"part-{number}.parquet", number) for number in (10, 2, 1)]
    assert read(files) == read(files[::-1]) == read(tmp_path) == [1, 10, 2]
    assert len({make_dataset(each, cache=False).fingerprint for each in (files, files[::-1], str(tmp_path))}) == 1


@pytest.mark.parametrize("again", ["0.parquet", "", "*.parquet"])
def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path, again: str, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path / "0.parquet", 1)
    assert read([file, tmp_path / again]) == [1]
    [record] = caplog.records
    assert re.search(r"names .*0\.parquet twice, and it is read once: mix repeats", record.getMessage())


# Lists of a table's files


def delta_table(folder: Path, *commits: list[dict[str, Any]]) -> None:
    (folder / "_delta_log").mkdir(parents=True)
    for version, actions in enumerate(commits):
        lines = "\n".join(map(json.dumps, actions))
        (folder / "_delta_log" / f"{version:020}.json").write_text(lines)


def added(path: str, *, marked: bool = False) -> dict[str, Any]:
    vector = {"deletionVector": {"storageType": "u", "pathOrInlineDv": "x", "cardinality": 1}} if marked else {}
    return {"add": {"path": path, "size": 1, **vector}}


def removed(path: str) -> dict[str, Any]:
    return {"remove": {"path": path, "deletionVector": {"storageType": "u"}}}


@pytest.mark.parametrize("below", ["", "day=1/", "y=1/m=2/", "zB/", "a b=c/"])
def test_listed_files_with_deletion_vectors_are_refused(tmp_path: Path, below: str) -> None:
    table = tmp_path / "t"
    files = [write(table / below / f"{number}.parquet", number) for number in range(3)]
    first, second, _ = (f"{below}{number}.parquet".replace(" ", "%20") for number in range(3))
    log = [[added(first), added(second)], [removed(second), added(second, marked=True)]]
    delta_table(table, *log)
    with pytest.raises(ConfigError, match=rf"^{files[1]} has rows that its Delta table deleted .* run REORG TABLE"):
        make_dataset(files[:2], cache=False)
    assert read([files[0], files[2]]) == [0, 2]
    shutil.rmtree(table / "_delta_log")
    delta_table(table, *log, [removed(second), added("purged.parquet")])
    assert read(files) == [0, 1, 2]
    shutil.rmtree(table / "_delta_log")
    delta_table(table, *log, [added(second)])  # restored
    assert read(files) == [0, 1, 2]


@pytest.mark.parametrize("later", [[], [added("9.parquet")], [removed("1.parquet")]], ids=["none", "more", "removed"])
def test_deletion_vectors_in_a_checkpoint_are_found(tmp_path: Path, later: list[dict[str, Any]]) -> None:
    files = [write(tmp_path / f"{number}.parquet", number) for number in range(2)]
    delta_table(tmp_path, [added("0.parquet"), added("1.parquet", marked=True)], [], later)
    actions = [{"add": None, "metaData": {"schemaString": "{}"}}, added("0.parquet"), added("1.parquet", marked=True)]
    log = tmp_path / "_delta_log"
    pq.write_table(pa.Table.from_pylist(actions), log / f"{1:020}.checkpoint.parquet")
    (log / f"{0:020}.json").unlink()
    if later and "remove" in later[0]:
        assert read(files) == [0, 1]
    else:
        with pytest.raises(ConfigError, match=rf"^{files[1]} has rows that its Delta table deleted"):
            make_dataset(files, cache=False)


def test_an_older_version_of_a_table_is_read_after_rows_of_its_files_are_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = [write(tmp_path / f"{number}.parquet", number) for number in range(2)]
    later = [removed("0.parquet"), removed("1.parquet"), added("1.parquet", marked=True)]
    delta_table(tmp_path, [added("0.parquet"), added("1.parquet")], later)
    assert read(files) == [0, 1]
    [record] = caplog.records
    assert re.search(rf"^{files[1]} has rows .* is without {files[0]}, so an older one is read", record.getMessage())
    with pytest.raises(ConfigError, match=rf"^{files[1]} has rows"):
        make_dataset(files[1:], cache=False)


@pytest.mark.parametrize("unread", ["v2", "damaged", "gap", "large"])
def test_a_log_that_is_not_read_as_a_whole_is_told(
    tmp_path: Path, unread: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "0.parquet", 1)
    delta_table(tmp_path, [added("0.parquet")], [], [])
    assert read([data]) == [1]
    assert not caplog.records
    log = tmp_path / "_delta_log"
    checkpoint = log / f"{1:020}.checkpoint.parquet"
    adds = [added(f"{number}.parquet") for number in range(1000)]
    pq.write_table(pa.Table.from_pylist(adds), checkpoint, compression="none", use_dictionary=False)
    assert read([data]) == [1]
    assert not caplog.records
    if unread == "v2":
        checkpoint.rename(log / f"{1:020}.checkpoint.80a083e8-7026-4e79-81be-64bd76c43a11.parquet")
        (log / f"{0:020}.json").unlink()
    elif unread == "damaged":
        content = checkpoint.read_bytes()
        checkpoint.write_bytes(content[:4] + bytes(4000) + content[4004:])
    elif unread == "gap":
        checkpoint.unlink()
        (log / f"{1:020}.json").unlink()
    else:
        monkeypatch.setattr("dataload.catalog.table_logs.MOST_BYTES", checkpoint.stat().st_size - 1)
    if unread in ("v2", "damaged"):
        [name] = log.glob("*.checkpoint.*")
        with pytest.raises(ConfigError, match=rf"^{name} cannot be read, .*: write a checkpoint of the classic form"):
            make_dataset([data], cache=False)
        return
    assert read([data]) == [1]
    [record] = caplog.records
    assert record.getMessage().startswith(f"{tmp_path} is a Delta table whose log can be read in part only")


def test_a_checkpoint_of_another_form_does_not_matter_if_it_is_old(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = write(tmp_path / "0.parquet", 1)
    delta_table(tmp_path, [], [], [added("0.parquet")], [], [])
    log = tmp_path / "_delta_log"
    (log / f"{0:020}.checkpoint.80a083e8-7026-4e79-81be-64bd76c43a11.json").write_text("{}")
    pq.write_table(pa.Table.from_pylist([added("0.parquet")]), log / f"{2:020}.checkpoint.parquet")
    (log / f"{3:020}.json").unlink()  # a gap
    assert read([data]) == [1]
    assert "whose log can be read in part only" in caplog.text


def test_a_checkpoint_whose_files_are_listed_elsewhere_is_refused(tmp_path: Path) -> None:
    """One of the protocol's V2 may have the name of a classic one."""
    data = write(tmp_path / "0.parquet", 1)
    delta_table(tmp_path, [added("0.parquet", marked=True)])
    actions = [{**added("0.parquet"), "sidecar": {"path": "a.parquet"}}, {"add": None, "sidecar": None}]
    checkpoint = tmp_path / "_delta_log" / f"{0:020}.checkpoint.parquet"
    schema = pa.Table.from_pylist(actions).schema
    pq.write_table(pa.Table.from_pylist([{**actions[0], "add": None}], schema), checkpoint)
    with pytest.raises(ConfigError, match=rf"^{checkpoint} cannot be read, .*: write a checkpoint of the classic form"):
        make_dataset([data], cache=False)
    pq.write_table(pa.Table.from_pylist([{**added("0.parquet"), "sidecar": None}], schema), checkpoint)
    assert read([data]) == [1]


def test_blank_lines_in_a_commit_are_skipped(tmp_path: Path) -> None:
    data = write(tmp_path / "0.parquet", 1)
    delta_table(tmp_path, [added("0.parquet", marked=True)])
    [commit] = (tmp_path / "_delta_log").iterdir()
    commit.write_text(f"\n{commit.read_text()}\r\n\n")
    with pytest.raises(ConfigError, match="has rows that its Delta table deleted"):
        make_dataset([data], cache=False)


def test_a_log_that_the_store_does_not_give_is_an_error_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "0.parquet", 1)
    delta_table(tmp_path, [added("0.parquet")])
    whole = Origin.read

    def refuse(self: Origin, path: str, *arguments: Any) -> Any:
        if "_delta_log" in path:
            raise OriginError(f"{path}: 403 Forbidden")
        return whole(self, path, *arguments)

    monkeypatch.setattr(Origin, "read", refuse)
    with pytest.raises(OriginError, match=r"_delta_log/.*: 403 Forbidden"):
        make_dataset([data], cache=False)


def test_listed_files_whose_table_calls_their_columns_otherwise_are_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "0.parquet", 1)
    mapped = {"name": "id", "type": "long", "metadata": {"delta.columnMapping.physicalName": "col-8a"}}
    types = [
        {"type": "struct", "fields": [mapped]},
        {"type": "struct", "fields": [{"name": "s", "type": {"type": "struct", "fields": [mapped]}, "metadata": {}}]},
    ]
    for number, kind in enumerate(types):
        delta_table(tmp_path / "t" / f"{number}", [{"metaData": {"schemaString": json.dumps(kind)}}])
        file = shutil.copy(data, tmp_path / "t" / f"{number}" / "0.parquet")
        with pytest.raises(ConfigError, match="with column mapping: its files call the column 'id' 'col-8a': copy it"):
            make_dataset([file], cache=False)
    mapped["metadata"] = {"delta.columnMapping.physicalName": "id"}  # as after an upgrade of the table
    delta_table(tmp_path / "same", [{"metaData": {"schemaString": json.dumps(types[0])}}])
    assert read([shutil.copy(data, tmp_path / "same" / "0.parquet")]) == [1]


def test_listed_changes_of_a_delta_table_are_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "_change_data" / "0.parquet", 1)
    with pytest.raises(ConfigError, match="has changes of a Delta table, not its rows: list the files of a version"):
        make_dataset([data], cache=False)


@pytest.mark.parametrize("below", ["data/", "data/day=1/"])
def test_listed_files_of_an_iceberg_table_with_delete_files_are_refused(tmp_path: Path, below: str) -> None:
    data = write(tmp_path / "t" / below / "0.parquet", 1)
    (tmp_path / "t" / "metadata").mkdir()

    def version(number: int, deletes: int) -> None:
        snapshots = [{"snapshot-id": 1}, {"snapshot-id": number, "summary": {"total-delete-files": f"{deletes}"}}]
        metadata = {"current-snapshot-id": number, "snapshots": snapshots}
        (tmp_path / "t" / "metadata" / f"{number:05}-a.metadata.json").write_text(json.dumps(metadata))

    version(9, 1)
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/t is an Iceberg table whose delete files .* run rewrite_data"):
        make_dataset([data], cache=False)
    version(10, 0)
    assert read([data]) == [1]
    compressed = tmp_path / "t" / "metadata" / "00011-b.gz.metadata.json"
    for number, says in ((9, "is an Iceberg table whose delete files"), (10, None)):
        plain = (tmp_path / "t" / "metadata" / f"{number:05}-a.metadata.json").read_bytes()
        compressed.write_bytes(gzip.compress(plain))
        with nullcontext() if says is None else pytest.raises(ConfigError, match=says):
            assert read([data]) == [1]
    for content in (compressed.read_bytes()[:-9], gzip.compress(bytes(65 << 20))):
        compressed.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"^{compressed} cannot be read"):
            make_dataset([data], cache=False)
    compressed.unlink()
    newest = tmp_path / "t" / "metadata" / "00011-a.metadata.json"
    newest.write_text('{"current-snapshot-id": 1, "snap')
    with pytest.raises(ConfigError, match=rf"^{newest} cannot be read, so rows that an Iceberg table deleted may go"):
        make_dataset([data], cache=False)


DELTA_COMMITS = [
    b"{",
    b"[]",
    b'{"add": 3}',
    b"\xff",
    b'{"metaData": {"schemaString": "{"}}',
    b'{"add": {"path": [3], "deletionVector": {}}}',
    b'{"add": {"path": 3, "deletionVector": {"storageType": "u"}}}',
    b'{"metaData": {"schemaString": "{\\"fields\\": [3]}"}}',
    b'{"metaData": {"schemaString": "{\\"fields\\": 3}"}}',
]


ENDLESS = b'{"snapshots": [{"snapshot-id": 1, "summary": {"total-delete-files": 1e999}}], "current-snapshot-id": 1}'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((f"_delta_log/{0:020}.json", content) for content in DELTA_COMMITS),
        *((f"_delta_log/{0:020}.checkpoint.parquet", content) for content in (b"", b"PAR1")),
        *(("metadata/v1.metadata.json", content) for content in (b"", b"{", b"[]", b'{"snapshots": [3]}', ENDLESS)),
    ],
)
def test_a_log_that_cannot_be_understood_is_an_error_that_names_it(tmp_path: Path, name: str, content: bytes) -> None:
    data = write(tmp_path / "0.parquet", 1)
    assert read([data]) == [1]
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        ConfigError, match=rf"^{tmp_path / name} cannot be read, so rows that an? \w+ table deleted may"
    ):
        make_dataset([data], cache=False)


def test_a_list_of_many_files_is_checked_by_few_listings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write(tmp_path / f"{number % 20:02}" / "day=1" / f"{number}.parquet", number) for number in range(40)]
    patterns, whole = [], Origin.list

    def listing(self: Origin, path: str, **options: Any) -> Any:
        patterns.append(path.removeprefix(f"{tmp_path}/"))
        return whole(self, path, **options)

    monkeypatch.setattr(Origin, "list", listing)
    assert len(make_dataset(files, cache=False)) == 40
    assert len(patterns) <= 40 + 2 * 2 * 4
