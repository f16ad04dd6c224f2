import json
from pathlib import Path

import numpy as np
import pytest

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


def test_a_source_ahead_of_its_share_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def batches() -> object:
        yield {"label": np.zeros(10, np.int64)}

    monkeypatch.setitem(SYSTEMS, "one source", lambda *_: (batches() for _ in range(EPOCHS + 1)))
    measured("one source", 0, tmp_path, tmp_path)
    assert json.loads(capsys.readouterr().out)["error"] == pytest.approx(10 * (1 - WEIGHTS[0]))
