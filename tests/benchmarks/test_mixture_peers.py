import json
from pathlib import Path

import numpy as np
import pytest

from dataload.benchmarks.mixtures import systems
from dataload.benchmarks.mixtures.systems import EPOCHS, SYSTEMS, WEIGHTS, measured, workload_of
from dataload.benchmarks.workloads import write


def test_a_mixture_is_measured_with_its_quota_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source in range(len(WEIGHTS)):
        write(workload_of(source, "tiny"), tmp_path / str(source) / "parquet")
    measured("dataload, mix", 0, tmp_path, tmp_path / "cache")
    result = json.loads(capsys.readouterr().out)
    assert result["error"] < 1
    assert result["rows"] >= workload_of(0, "tiny").rows
    assert result["rate"] > 0


def test_the_rate_counts_the_rows_of_every_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(2 * EPOCHS))
    monkeypatch.setattr(systems, "perf_counter", lambda: next(clock))  # An epoch takes one second.
    lengths = [1000, *range(1, EPOCHS + 1)]
    monkeypatch.setitem(SYSTEMS, "growing", lambda *_: (iter([{"label": np.zeros(n, np.int64)}]) for n in lengths))
    measured("growing", 0, tmp_path, tmp_path)
    result = json.loads(capsys.readouterr().out)
    assert result["rate"] == result["rows"] == sum(lengths[1:]) / EPOCHS


def test_a_source_ahead_of_its_share_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def batches() -> object:
        yield {"label": np.zeros(10, np.int64)}

    monkeypatch.setitem(SYSTEMS, "one source", lambda *_: (batches() for _ in range(EPOCHS + 1)))
    measured("one source", 0, tmp_path, tmp_path)
    assert json.loads(capsys.readouterr().out)["error"] == pytest.approx(10 * (1 - WEIGHTS[0]))
