"""Blobs with valid checksums that no writer of ours wrote: they are made again, and nothing else happens."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import valkey
from clusters import Server
from planted import Places, Reading, blobs_in, changed, offsets_of, plant, proven, sealed, write_files
from tiers import end, start

from dataload import CacheConfig
from dataload.cache import blob_file
from dataload.cache.tier import PROOF_BYTES
from dataload.errors import DataError
from dataload.formats.schema import Layout

pytestmark = pytest.mark.timeout(900)

Blob = tuple[Path, str, bytes, bytes]
HANGS = 600  # seconds
SEEDS = [(0, 20), *(pytest.param(seed, 1000, marks=pytest.mark.slow) for seed in range(1, 6))]  # and how many blobs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path / "data")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "server") as running:
        yield running


def done(*call: Any) -> int:
    """Run a function in a process of its own, which a signal may end. Return the exit code."""
    process = start(*call)
    process.join(HANGS)
    return end(process)


def places_in(name: str, payload: bytes) -> Places:
    """Return the numbers of a blob of metadata that are no values."""
    count = 0
    if name.endswith("#footers"):
        count = int.from_bytes(payload[PROOF_BYTES:][:8], "little") // 8
    elif "#matches" in name:
        groups, blocks = (int.from_bytes(payload[PROOF_BYTES:][start:][:8], "little") for start in (0, 8))
        count = 2 + groups + 3 * blocks
    return [(place, 8) for place in range(PROOF_BYTES, PROOF_BYTES + 8 * count, 8)]


def planted(blobs: list[Blob], layouts: dict[bytes, tuple[int, Layout]], dice: random.Random) -> Iterator[Blob]:
    """Yield another payload for most blobs."""
    payloads = [payload for *_, payload in blobs]
    for path, name, digest, payload in blobs:
        if digest in layouts:
            yield path, name, digest, changed(payload, offsets_of(payload, *layouts[digest]), dice, payloads)
        else:
            places = places_in(name, payload)
            bad = changed(payload, places, dice, payloads)
            # Who knows the format may prove other data.
            is_proven = places and len(bad) == len(payload) and dice.random() < 0.7
            yield path, name, digest, proven(bad, digest) if is_proven else bad


def layouts_of(reading: Reading) -> dict[bytes, tuple[int, Layout]]:
    return {key.digest: (rows, layout) for key, rows, layout in reading.records()}


def read_planted(folder: Path, cache: Path, seed: int, count: int) -> None:
    config = CacheConfig(cache_dir=str(cache), cache_bytes="1GB")
    expected, again, dice = Reading(folder, config).rows(), Reading(folder, config), random.Random(seed)
    assert again.rows() == expected
    assert again.blocks.stats()["errors"]["local"] == 0
    layouts = layouts_of(again)
    while count > 0:
        for path, name, digest, payload in planted(list(blobs_in(cache)), layouts, dice):
            plant(path, payload, digest, name)
            count -= 1
        assert Reading(folder, config).rows() == expected


@pytest.mark.parametrize(("seed", "count"), SEEDS)
def test_blobs_with_wild_offsets_are_made_again(folder: Path, tmp_path: Path, seed: int, count: int) -> None:
    assert done(read_planted, folder, tmp_path / "cache", seed, count) == 0


def read_planted_values(folder: Path, caches: Path, url: str, seed: int, count: int) -> None:
    dice, config = random.Random(seed), CacheConfig(cache_dir=str(caches / "first"), cache_bytes="1GB", cluster=url)
    first = Reading(folder, config)
    expected, layouts = first.rows(), layouts_of(first)
    first.blocks.settle()
    blobs = list(blobs_in(caches / "first"))
    client = valkey.Valkey.from_url(url.replace("valkey://", "redis://"))
    while count > 0:
        for _, name, digest, payload in planted(blobs, layouts, dice):
            value = f"dataload:{blob_file.VERSION}:{digest.hex()}"
            if client.exists(value):
                client.set(value, sealed(payload, digest, name, caches / "draft"))
                count -= 1
        host = CacheConfig(cache_dir=str(caches / "next"), cache_bytes="1GB", cluster=url)
        reading = Reading(folder, host)
        assert reading.rows() == expected
        reading.blocks.settle()
        shutil.rmtree(caches / "next")


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "count"), SEEDS)
def test_values_of_a_cluster_with_wild_offsets_are_made_again(
    folder: Path, tmp_path: Path, server: Server, seed: int, count: int
) -> None:
    (tmp_path / "caches").mkdir()
    assert done(read_planted_values, folder, tmp_path / "caches", server.url, seed, count) == 0


def read_damaged_values(folder: Path, cache: Path, seed: int, count: int) -> None:
    config = CacheConfig(cache_dir=str(cache), cache_bytes="1GB")
    rows, dice = len(Reading(folder, config).rows()), random.Random(seed)
    while count > 0:
        for path, name, digest, payload in list(blobs_in(cache)):
            whole = bytearray(payload)
            whole[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
            plant(path, bytes(whole), digest, name)
            count -= 1
        try:
            assert len(Reading(folder, config).rows()) == rows
        except DataError as error:
            assert "UTF-8" in str(error)
            shutil.rmtree(cache)


@pytest.mark.parametrize(("seed", "count"), SEEDS[1:])
def test_other_values_with_valid_checksums_do_no_more_than_other_values_in_a_file(
    folder: Path, tmp_path: Path, seed: int, count: int
) -> None:
    """Nothing tells them apart; the reader lives on."""
    assert done(read_damaged_values, folder, tmp_path / "cache", seed, count) == 0
