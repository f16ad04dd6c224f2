"""The benchmark of nested values runs, and counts every row."""

from __future__ import annotations

from pathlib import Path

import pytest
import tqdm

from dataload.benchmarks.rows import nested


@pytest.mark.slow
@pytest.mark.parametrize("part", nested.PARTS)
def test_a_small_run(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # it would start a thread
    monkeypatch.setattr(nested, "ROUNDS", 1)
    before = Path(nested.__file__).resolve().parents[2] if part == "text" else None
    table = nested.PARTS[part](1000, tmp_path, before)
    assert table.row_count == (4 if part == "flat" else 2)
    assert part != "text" or "cache before" in str(table.caption)
