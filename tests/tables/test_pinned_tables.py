"""A run stays at the version of a table with which it began, and says so when it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

pytest.importorskip("deltalake")

import torch
from deltalake import DeltaTable, write_deltalake
from test_agreement import errors_of, read
from torch import nn

from dataload import fit, make_dataset, make_loader, mix
from dataload.cli import app
from dataload.errors import ConfigError


def rows(first: int, count: int) -> pa.Table:
    return pa.table({"x": pa.array(range(first, first + count), pa.int64())})


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = f"{tmp_path}/table"
    write_deltalake(path, rows(0, 20))
    return path


def grow(path: str) -> None:
    write_deltalake(path, rows(DeltaTable(path).to_pyarrow_table().num_rows, 4), mode="append")


def test_versions_have_fingerprints_of_their_own(table):
    before = make_dataset(DeltaTable(table), cache=False)
    DeltaTable(table).alter.set_table_description("a new version with the same files")
    after = make_dataset(DeltaTable(table), cache=False)
    assert len(before) == len(after)
    assert before.fingerprint != after.fingerprint
    assert make_dataset(f"delta+{table}@0", cache=False).fingerprint == before.fingerprint
    assert repr(before).startswith(f"Dataset(delta+{table}@0: 20 rows in ")
    assert f"delta+{table}@1" in repr(after.select([0, 1]))


def test_an_open_dataset_does_not_follow_its_table(table):
    source = DeltaTable(table)
    dataset = make_dataset(source, cache=False)
    grow(table)
    source.update_incremental()
    assert sorted(dataset["x"].tolist()) == list(range(20))


def test_a_resume_opens_the_version_of_its_state(table):
    loader = make_loader(DeltaTable(table), 4, cache=False)
    batches = iter(loader)
    seen = next(batches)["x"].tolist()
    state = json.loads(json.dumps(loader.state_dict()))
    batches.close()
    assert state["tables"] == [f"delta+{table}@0"]
    grow(table)
    newer = make_loader(DeltaTable(table), 4, cache=False)
    with pytest.raises(ConfigError) as found:
        newer.load_state_dict(state)
    for text in (
        f"the state is of delta+{table}@0",
        f"this loader reads delta+{table}@1",
        f"make_loader('delta+{table}@0', …)",
    ):
        assert text in str(found.value)
    again = make_loader(state["tables"][0], 4, cache=False)
    again.load_state_dict(state)
    rest = [number for batch in again for number in batch["x"].tolist()]
    assert sorted(seen + rest) == list(range(20))


def test_a_state_of_many_tables_is_short(table):
    mixture = mix({f"source {number}": f"delta+{table}" for number in range(60)}, cache=False)
    assert len(json.dumps(make_loader(mixture, 4).state_dict())) <= 4096


def test_ranks_at_two_versions_are_told_both(table, ranks):
    grow(table)
    errors = errors_of(ranks(2, read, [f"delta+{table}@0", f"delta+{table}@1"], "agent"))
    assert errors
    for error in errors:
        assert f"delta+{table}@0" in error
        assert f"delta+{table}@1" in error
        assert "Give all ranks the same version of the table" in error


def test_fit_names_the_version_of_a_checkpoint(table, tmp_path):
    def train(source: object, steps: int) -> None:
        taken = iter(range(steps))

        def loss(net: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            if next(taken, None) is None:
                raise RuntimeError("enough")
            return net(batch["x"][:, None].float()).mean()

        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        options = {"checkpoint_dir": tmp_path / "run", "checkpoint_every": 1, "precision": "fp32"}
        fit(model, optimizer, make_loader(source, 4, cache=False), loss, epochs=1, **options)

    with pytest.raises(RuntimeError, match="enough"):
        train(DeltaTable(table), 2)
    grow(table)
    with pytest.raises(
        ConfigError, match=rf"was saved within an epoch of delta\+{table}@0, and this loader reads .*@1"
    ):
        train(DeltaTable(table), 99)
    train(f"delta+{table}@0", 99)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run `dataload …` in this process. Return its status, standard output and standard error."""

    def dataload(*words: str) -> tuple[object, str, str]:
        monkeypatch.setattr("sys.argv", ["dataload", *words])
        with pytest.raises(SystemExit) as end:
            app.main()
        return end.value.code, *capsys.readouterr()

    return dataload


def test_the_command_line_takes_tables(table, run):
    grow(table)
    for version, count in ((0, 20), (1, 24)):
        status, out, _ = run("head", f"delta+{table}@{version}", "--json")
        assert (status, json.loads(out)["rows"]) == (0, count)
    status, _, errors = run("head", f"delta+{table}@7")
    assert status == 2
    assert "has no version 7" in errors


@pytest.mark.parametrize("command", ["plan", "warm"])
def test_plan_and_warm_take_tables(command, table, tmp_path, run):
    status, out, errors = run(command, f"delta+{table}", "--cache-dir", str(tmp_path / "cache"), "--json")
    assert status == 0, errors
    assert json.loads(out)


def test_doctor_refuses_tables(table):
    with pytest.raises(ConfigError, match="doctor checks no tables"):
        app.app(["doctor", f"delta+{table}"], standalone_mode=False)


def test_importing_dataload_imports_no_library_of_tables():
    code = "import sys, dataload; sys.exit(any(name in sys.modules for name in ('deltalake', 'pyiceberg')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_opening_a_table_imports_no_pandas(table):
    opens = f"from dataload import make_dataset; make_dataset('delta+{table}')"
    code = f"import sys; {opens}; sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
