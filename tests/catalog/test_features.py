"""What files say about columns: features and class names of Hugging Face, categories of pandas, Arrow's metadata."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload import make_dataset
from dataload.dataset import Dataset
from dataload.errors import ConfigError, DataError
from dataload.rows.read_options import ReadOptions

LABEL = {"names": ["cat", "dog"], "_type": "ClassLabel"}
FEATURES = {
    "label": LABEL,
    "tags": {"feature": LABEL, "_type": "List"},
    "old": [LABEL],
    "objects": {"feature": {"category": LABEL, "box": {"dtype": "int64", "_type": "Value"}}, "_type": "Sequence"},
    "text": {"dtype": "string", "_type": "Value"},
    "image": {"_type": "Image"},
}
TABLE = pa.table(
    {
        "label": [0, 1],
        "tags": [[0], [1, 0]],
        "old": [[0], [1]],
        "objects": pa.StructArray.from_arrays([pa.array([[0], [1]]), pa.array([[1], [2]])], ["category", "box"]),
        "text": ["a", "b"],
        "image": pa.StructArray.from_arrays([pa.array([b"", b""]), pa.array(["", ""])], ["bytes", "path"]),
    }
)
HUGGING_FACE = TABLE.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": FEATURES}})})


def write(table: pa.Table, path: Path) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    return path


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_features_and_class_names_of_hugging_face(tmp_path: Path, name: str) -> None:
    dataset = make_dataset(write(HUGGING_FACE, tmp_path / name), cache=False)
    assert dataset.features == FEATURES
    for column in ("label", "tags", "old", "objects.category"):
        assert dataset.class_names(column) == ["cat", "dog"]
    with pytest.raises(ConfigError, match=r"no names of classes.*: those with names are 'label', 'tags', 'old'"):
        dataset.class_names("text")
    with pytest.raises(ConfigError, match="column 'lable' is not in the dataset: did you mean 'label'"):
        dataset.class_names("lable")
    some = make_dataset(tmp_path / name, columns=["text", "image"], cache=False)
    assert some.features == {each: FEATURES[each] for each in ("text", "image")}
    assert dataset.select([0]).features == FEATURES


def test_columns_that_map_made_have_no_features(tmp_path: Path) -> None:
    dataset = make_dataset(write(HUGGING_FACE, tmp_path / "x.parquet"), columns=["label", "text"], cache=False)
    mapped = dataset.map(lambda batch: {"label": 1 - batch["label"]}, columns=["label"])
    assert mapped.features == {"text": FEATURES["text"]}


def of_map(dataset: Dataset) -> Dataset:
    return dataset.map(lambda batch: {"label": batch["label"]}, columns=["label"])


def of_flat_map(dataset: Dataset) -> Dataset:
    return dataset.flat_map(lambda batch: {"text": batch["text"]})


CATEGORIES = pa.table({"label": TABLE["text"].dictionary_encode(), "text": TABLE["text"]})


@pytest.mark.parametrize("table", [HUGGING_FACE, CATEGORIES], ids=["labels", "categories"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (of_map, "column 'label' has no names of classes, because a function of map returned it: ask the dataset "),
        (of_flat_map, "column 'label' is not in the dataset: there are 'text'"),
    ],
)
def test_columns_that_map_made_or_dropped_have_no_class_names(
    tmp_path: Path, table: pa.Table, change: Callable[[Dataset], Dataset], says: str
) -> None:
    dataset = make_dataset(write(table, tmp_path / "x.parquet"), columns=["label", "text"], cache=False)
    with pytest.raises(ConfigError, match=says):
        change(dataset).class_names("label")


@pytest.mark.parametrize("table", [HUGGING_FACE, CATEGORIES], ids=["labels", "categories"])
def test_columns_left_out_have_no_class_names(tmp_path: Path, table: pa.Table) -> None:
    dataset = make_dataset(write(table, tmp_path / "x.parquet"), columns=["text"], cache=False)
    with pytest.raises(ConfigError, match="column 'label' is not in the dataset: there are 'text'"):
        dataset.class_names("label")


def test_files_that_name_classes_differently_are_named(tmp_path: Path) -> None:
    for name, names in (("a", ["cat", "dog"]), ("b", ["dog", "cat"])):
        features = {"label": {"names": names, "_type": "ClassLabel"}}
        content = json.dumps({"info": {"features": features}})
        write(TABLE.replace_schema_metadata({"huggingface": content}), tmp_path / f"{name}.parquet")
    dataset = make_dataset(tmp_path, columns=["label"], cache=False)
    with pytest.raises(
        ConfigError, match=r"other names of classes in \S+a.parquet than in \S+b.parquet, 'cat', 'dog' and"
    ):
        dataset.class_names("label")
    assert dataset.select([2, 3]).class_names("label") == ["dog", "cat"]


def test_categories_that_are_not_utf_8(tmp_path: Path) -> None:
    text = pa.Array.from_buffers(pa.string(), 2, pa.array([b"caf\xe9", b"x"]).buffers())
    codes = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), text)
    write(pa.table({"c": codes}), tmp_path / "x.parquet")
    assert make_dataset(tmp_path, errors="replace", cache=False).class_names("c") == ["caf\ufffd", "x"]
    with pytest.raises(
        DataError, match=r"x.parquet row group 0 column 'c' has a dictionary that is not UTF-8.*errors="
    ):
        make_dataset(tmp_path, cache=False).class_names("c")


CONTENTS = [b"{", b"[1]", b"{}", b'{"info": {}}', b'{"info": null}', b'{"info": {"features": null}}', b"[" * 100_000]


@pytest.mark.parametrize("content", CONTENTS, ids=range(len(CONTENTS)))
def test_other_metadata_is_no_error(tmp_path: Path, content: bytes) -> None:
    table = TABLE.replace_schema_metadata({"huggingface": content, "other": "x"})
    dataset = make_dataset(write(table, tmp_path / "x.parquet"), cache=False)
    assert dataset.features == {}
    with pytest.raises(ConfigError, match=r"no column has a ClassLabel; numpy.unique\(dataset\['label'\]\) finds its"):
        dataset.class_names("label")


def test_files_of_the_library_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    features = datasets.Features({"y": datasets.ClassLabel(names=["no", "yes"]), "x": datasets.Value("int32")})
    datasets.Dataset.from_dict({"y": [0, 1], "x": [1, 2]}, features).to_parquet(tmp_path / "x.parquet")
    dataset = make_dataset(tmp_path, cache=False)
    assert dataset.class_names("y") == ["no", "yes"]
    assert datasets.Features.from_dict(dataset.features) == features


@pytest.mark.parametrize(
    "content", [{"columns": None}, {"columns": [1, {"name": []}]}, {"columns": [{"name": "text", "metadata": [1]}]}]
)
def test_other_metadata_of_pandas_is_no_error(tmp_path: Path, content: Any) -> None:
    table = TABLE.replace_schema_metadata({"pandas": json.dumps(content)})
    assert make_dataset(write(table, tmp_path / "x.parquet"), cache=False).features == {}


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_categories_are_class_names_in_their_order(tmp_path: Path, name: str) -> None:
    def frame(values: list[Any], *others: str) -> pa.Table:
        categories = pd.Categorical(values, categories=["small", "large", "huge", *others], ordered=True)
        return pa.Table.from_pandas(pd.DataFrame({"size": categories, "word": ["x"] * len(values)}))

    write(frame(["huge", None, "large"]), tmp_path / name)
    write(frame(["small"], "giant"), tmp_path / name.replace("a.", "b."))
    dataset = make_dataset(tmp_path, cache=False)
    assert dataset.class_names("size") == ["small", "large", "huge", "giant"]
    assert dataset.features == {"size": {"pandas_type": "categorical", "num_categories": 3, "ordered": True}}
    assert dataset["size"].tolist() == ["huge", None, "large", "small"]


def test_each_row_group_may_have_other_categories(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    schema = pa.schema([("c", pa.dictionary(pa.int32(), pa.string()))])
    with pq.ParquetWriter(path, schema) as writer:
        for part in (["a", "b"], ["b", "c"], ["d"]):
            writer.write_table(pa.table([pa.array(part).dictionary_encode()], schema=schema))
    assert make_dataset(path, cache=False).class_names("c") == ["a", "b", "c", "d"]


def test_categories_in_some_files_only_are_no_class_names(tmp_path: Path) -> None:
    write(pa.table({"c": pa.array(["a", "b"]).dictionary_encode()}), tmp_path / "a.parquet")
    write(pa.table({"c": ["a", "c"]}), tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match=r"a dictionary in some files, and none in \S+b.parquet: numpy.unique"):
        make_dataset(tmp_path, cache=False).class_names("c")


def test_metadata_of_arrow_fields(tmp_path: Path) -> None:
    field = pa.field("x", pa.int64(), metadata={"unit": "mm"})
    write(pa.table([[1], [2]], schema=pa.schema([field, pa.field("y", pa.int64())])), tmp_path / "x.parquet")
    assert make_dataset(tmp_path, cache=False).features == {"x": {"unit": "mm"}}


def test_masks_that_map_made_or_kept_say_nothing(tmp_path: Path) -> None:
    path = write(pa.table({"x": [1, None, 3], "n": [None, 5, 6]}), tmp_path / "x.parquet")
    rows = make_dataset(path, null_masks=True, cache=False).map(lambda batch: {"x": batch["x"]}, columns=["x"])
    assert rows.features == {}
    assert rows["n.is_null"].tolist() == [True, False, False]


@pytest.mark.slow
def test_wide_files_take_linear_time(tmp_path: Path) -> None:
    names = [f"c{number}" for number in range(6000)]
    pq.write_table(pa.table({name: [1] for name in names}), tmp_path / "wide.parquet")
    dataset = make_dataset(tmp_path / "wide.parquet", cache=False)
    start = time.perf_counter()
    assert dataset.features == {}
    Dataset(dataset.manifest, dataset.blocks, names, ReadOptions(dict.fromkeys(names, 0)))
    assert time.perf_counter() - start < 6  # of one, and not of fifteen


@pytest.mark.slow
def test_map_of_wide_files_takes_linear_time(tmp_path: Path) -> None:
    path = write(pa.table({f"c{number}": [1] for number in range(6000)}), tmp_path / "wide.parquet")
    dataset = make_dataset(path, cache=False)
    start = time.process_time()
    dataset.map(dict, dataset.schema.names, version=1)
    assert time.process_time() - start < 4  # of two, and not of five or more
