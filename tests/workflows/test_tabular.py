"""Tables: writers, labels for weights and strata, subsets, models of scikit-learn and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, WeightedRandomSampler

from dataload import evaluate_over, fit, make_dataset, make_loader, mix

ROWS = 90


def table():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(ROWS, 3)).astype(np.float32)
    label = (np.arange(ROWS) % 10 < 2).astype(np.int64)
    x[:, 0] += 2 * label
    return {"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "label": label, "row": np.arange(ROWS)}


@pytest.fixture
def rows(write, cache):
    return make_dataset(write(table()), cache=cache)


GROUP = {"group": {"x": ["a", "b", "c"]}}


def classifier():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def trained(loader, weight=None, epochs=8):
    model = classifier()

    def loss(model, batch):
        return torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"], weight=weight)

    history = fit(model, torch.optim.Adam(model.parameters(), 0.02), loader, loss, epochs=epochs, progress=False)
    assert history[-1]["loss"] < history[0]["loss"]
    return model


def test_group_columns_and_evaluate(rows):
    """Columns become one tensor; `evaluate_over` gives the exact accuracy."""
    model = trained(make_loader(rows, 16, **GROUP))
    held_out = make_loader(rows, 16, shuffle=False, **GROUP)

    def right(model, batch):
        return {"accuracy": (model(batch["x"]).argmax(1) == batch["label"]).float()}

    assert evaluate_over(model, held_out, right)["accuracy"] > 0.8


def test_class_weights(rows):
    """`ds["label"]` counts the classes for the weights of the loss."""
    counts = np.bincount(rows["label"])
    assert counts.tolist() == [72, 18]
    trained(make_loader(rows, 16, **GROUP), torch.tensor(counts.sum() / counts, dtype=torch.float32))


def test_stratified_split(rows):
    """A stratified split of scikit-learn by `ds["label"]`, and `select`."""
    from sklearn.model_selection import train_test_split

    train, test = train_test_split(np.arange(ROWS), test_size=0.2, stratify=rows["label"], random_state=0)
    parts = [rows.select(part) for part in (train, test)]
    assert [len(part) for part in parts] == [72, 18]
    assert [np.bincount(part["label"]).tolist() for part in parts] == [[58, 14], [14, 4]]


def test_cross_validation(rows):
    """Folds of scikit-learn by `select`: each row is held out once."""
    from sklearn.model_selection import KFold

    held_out = []
    for train, test in KFold(5, shuffle=True, random_state=0).split(np.arange(ROWS)):
        assert sum(len(batch["row"]) for batch in make_loader(rows.select(train), 16)) == len(train)
        held_out += [int(row) for batch in make_loader(rows.select(test), 16) for row in batch["row"]]
    assert sorted(held_out) == list(range(ROWS))


def test_rare_class_by_weight(rows):
    """Instead of WeightedRandomSampler: `mix` of the classes, exact in every prefix, and it resumes."""
    classes = [rows.filter([("label", "==", label)]) for label in (0, 1)]
    loader = make_loader(mix(classes, [1, 1], stop="all_exhausted"), 16, **GROUP)
    shares = [float(batch["label"].float().mean()) for batch in loader]
    assert set(shares[:-1]) == {0.5}


def test_weighted_random_sampler(rows):
    """A WeightedRandomSampler of torch over our dataset in torch's DataLoader."""
    weights = np.where(np.asarray([int(row["label"]) for row in rows.__getitems__(range(ROWS))]) == 1, 4.0, 1.0)
    sampler = WeightedRandomSampler(torch.from_numpy(weights), 400, generator=torch.Generator().manual_seed(0))
    labels = torch.cat([batch["label"] for batch in DataLoader(rows, 40, sampler=sampler)])
    assert 0.4 < labels.float().mean() < 0.6


def test_subset_of_torch(rows):
    """`make_loader` of torch's Subset of our dataset."""
    part = Subset(rows, [3, 1, 8])
    assert sorted(int(row) for batch in make_loader(part, 2) for row in batch["row"]) == [1, 3, 8]


def test_partial_fit_of_scikit_learn(rows):
    """An incremental model of scikit-learn over epochs of the loader."""
    from sklearn.linear_model import SGDClassifier

    model = SGDClassifier(random_state=0)
    loader = make_loader(rows, 16, **GROUP)
    for _ in range(5):
        for batch in loader:
            model.partial_fit(batch["x"].numpy(), batch["label"].numpy(), classes=[0, 1])
    columns = rows.__getitems__(range(ROWS)).columns
    x = torch.stack([columns[name] for name in "abc"], 1)
    assert model.score(x.numpy(), columns["label"].numpy()) > 0.8


def written_by(writer, folder):
    if writer == "pandas":
        import pandas as pd

        pd.DataFrame(table()).to_parquet(folder / "part", partition_cols=["label"])
    elif writer == "polars":
        import polars as pl

        for number, part in enumerate(pl.DataFrame(table()).iter_slices(40)):
            part.write_parquet(folder / f"{number}.parquet")
    else:
        import duckdb
        import pyarrow as pa

        found = pa.table(table())
        assert len(found)
        duckdb.sql(f"COPY (SELECT * FROM found) TO '{folder}/rows.parquet' (ROW_GROUP_SIZE 2048, COMPRESSION zstd)")


@pytest.mark.parametrize("writer", ["pandas", "polars", "duckdb"])
def test_a_folder_written_by(writer, tmp_path, cache):
    """A folder that another library wrote: partitioned by pandas, in slices by polars, by duckdb's COPY."""
    folder = tmp_path / writer
    folder.mkdir()
    written_by(writer, folder)
    rows = make_dataset(folder, cache=cache)
    found = {
        int(row): int(label) for b in make_loader(rows, 16) for row, label in zip(b["row"], b["label"], strict=True)
    }
    assert found == dict(enumerate(table()["label"].tolist()))


@pytest.mark.limit("a DataFrame is no files: write it to Parquet once")
def test_a_data_frame():
    """`make_loader` of a DataFrame is an error that says what to write."""
    import pandas as pd

    from dataload.errors import ConfigError

    with pytest.raises(ConfigError, match=r"to_parquet|Parquet|path"):
        make_loader(pd.DataFrame(table()), 16)


def test_files_of_a_hub_folder(tmp_path, cache):
    """A folder as the Hub has it: README.md, licences, JSON and metadata beside the data are skipped."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path / "hub"
    (folder / "data").mkdir(parents=True)
    (folder / "meta").mkdir()
    pq.write_table(pa.table(table()), folder / "data" / "train-00000-of-00001.parquet")
    for name in ("README.md", "LICENSE", "dataset_infos.json", "meta/info.json", ".gitattributes"):
        (folder / name).write_text("text")
    assert len(make_dataset(folder, cache=cache)) == ROWS


def test_filters_and_folders(write, cache):
    """`filters=` by pyarrow's lists and by an expression give the same rows."""
    import pyarrow.compute as pc

    path = write(table())
    found = [
        len(make_dataset(path, filters=filters, cache=cache))
        for filters in ([("label", "==", 1), ("row", "<", 50)], (pc.field("label") == 1) & (pc.field("row") < 50))
    ]
    assert found == [10, 10]


def test_windows_of_a_series(rows):
    """`flat_map`: windows over the rows of a series."""

    def windows(batch):
        rows = batch["row"]
        starts = range(0, len(rows) - 3, 2)
        return {"window": [rows[start : start + 4].tolist() for start in starts]}

    found = rows.flat_map(windows)
    assert all(len(row["window"]) == 4 for row in found.__getitems__(range(len(found))))


def test_gradient_boosting(rows):
    """All rows as one batch for a model that takes arrays."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    (batch,) = make_loader(rows, ROWS, shuffle=False, **GROUP)
    model = HistGradientBoostingClassifier(max_iter=5).fit(batch["x"].numpy(), batch["label"].numpy())
    assert model.score(batch["x"].numpy(), batch["label"].numpy()) > 0.7
