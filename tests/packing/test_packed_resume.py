"""Packed datasets and mixtures that go on after a resume: the same sequences, on other ranks and after a SIGKILL."""

from __future__ import annotations

import json
import os
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import documents
import numpy as np
import pytest
from ranks import steps_of

from dataload import CacheConfig, World, make_dataset, make_loader, mix

LENGTH, GLOBAL = 16, 12  # of a sequence; sequences of a global batch
PADS = {"tokens": documents.PAD, "labels": documents.LABEL_PAD}
SIZES = {name: documents.lengths_around(LENGTH, 150, np.random.default_rng(n)) for n, name in enumerate("ab")}

Pieces = list[tuple[int, int, int]]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return {name: documents.write(tmp_path / f"{name}.parquet", sizes, 9) for name, sizes in SIZES.items()}


def _data(files: dict[str, Path], *, mixed: bool, split: bool, cache: CacheConfig | bool = False) -> Any:
    packed = {
        name: make_dataset(file, cache=cache).pack(LENGTH, also=["labels"], pad=PADS, split=split)
        for name, file in files.items()
    }
    if not mixed:
        return packed["a"]
    return mix(packed, [2, 1], schedule={80: [1, 3]}, ramp=True, stop="all_exhausted")  # resumed inside the ramp


def _global_batches(data: Any, ranks: int, state: Any, batches: int, **how: Any) -> tuple[list[list[Pieces]], Any]:
    """Return the sequences of the next global batches of epoch 1, and the state after them, which all ranks share."""
    loaders = [make_loader(data, GLOBAL // ranks, world=World(rank, ranks), **how) for rank in range(ranks)]
    for loader in loaders:
        if state is None:
            loader.set_epoch(1)
        else:
            loader.load_state_dict(state)
    steps = [iter(loader) for loader in loaders]
    found: list[list[Pieces]] = []
    for _ in range(batches):
        parts = [next(each, None) for each in steps]
        if parts[0] is None:
            break
        found.append([pieces for part in parts for pieces in documents.segments_of(part, LENGTH)])
    states = {json.dumps(loader.state_dict()) for loader in loaders}
    [text] = states
    assert len(text) < 4096
    for each in steps:
        each.close()
    return found, json.loads(text)


@pytest.mark.variants
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("shuffle", ["block", pytest.param("full", marks=pytest.mark.slow)])
def test_other_ranks_continue_with_the_same_sequences(
    files: dict[str, Path], mixed: bool, split: bool, shuffle: str
) -> None:
    whole, _ = _global_batches(_data(files, mixed=mixed, split=split), 1, None, 10**6, shuffle=shuffle)
    found: list[list[Pieces]] = []
    state = None
    for ranks, batches, window in [(4, 3, None), (3, 2, 5), (1, 1, 2), (4, 10**6, 3)]:
        data = _data(files, mixed=mixed, split=split)
        more, state = _global_batches(data, ranks, state, batches, shuffle=shuffle, window=window)
        found += more
    assert found[:-1] == whole[:-1]
    assert [*map(sorted, found[-1][: len(whole[-1])])] == [*map(sorted, whole[-1])]  # On 4 ranks, others are repeated.
    if not mixed:
        documents.check_epoch([each for batch in whole for each in batch], SIZES["a"], LENGTH, split=split)


def test_a_state_of_a_packed_dataset_has_a_number_and_no_tokens(files: dict[str, Path]) -> None:
    data = _data(files, mixed=False, split=False)
    _, state = _global_batches(data, 1, None, 3)
    plain = make_loader(make_dataset(files["a"], cache=False), GLOBAL, world=World(0, 1)).state_dict()
    assert state.keys() == plain.keys()
    assert state["cursor"] == 3 * GLOBAL


def _train(
    files: dict[str, Path], cache: Path, kind: dict[str, bool], state: Path, out: Path, steps: int, dying: int
) -> None:
    """Write the documents and the state of each step, as a rank. The rank `dying` is killed after five."""
    world = World.detect()
    data = _data(files, **kind, cache=CacheConfig(str(cache), "1GB"))
    loader = make_loader(data, GLOBAL // world.world_size, world=world)
    if state.exists():
        loader.load_state_dict(json.loads(state.read_text()))
    else:
        loader.set_epoch(1)
    with (out / str(world.rank)).open("w") as lines:
        for number, batch in enumerate(islice(loader, steps), 1):
            lines.write(json.dumps([documents.segments_of(batch, LENGTH), loader.state_dict()]) + "\n")
            lines.flush()
            if number == 5 and world.rank == dying:
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    "kind",
    [
        {"mixed": True, "split": False},
        pytest.param({"mixed": False, "split": True}, marks=pytest.mark.slow),
        pytest.param({"mixed": True, "split": True}, marks=pytest.mark.slow),
    ],
    ids=["mixed whole", "split", "mixed split"],
)
def test_a_killed_run_goes_on_with_the_same_documents_on_other_ranks(
    ranks: Any, files: dict[str, Path], tmp_path: Path, kind: dict[str, bool]
) -> None:
    whole, _ = _global_batches(_data(files, **kind), 1, None, 10**6)
    state, seen = tmp_path / "state.json", []
    for size, steps, dying in ((4, 9, 2), (3, 6, -1), (1, 10**6, -1)):
        out = tmp_path / str(size)
        taken = steps_of(ranks, size, dying, out, _train, files, tmp_path / "cache", kind, state, out, steps, dying)
        assert len(taken) == (5 if dying >= 0 else min(steps, len(taken)))
        for step in taken:
            [after] = {json.dumps(after) for _, after in step}  # the same on all ranks
            seen.append([[tuple(piece) for piece in pieces] for found, _ in step for pieces in found])
        state.write_text(after)
    assert seen == whole
