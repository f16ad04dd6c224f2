"""Permutations are bijective, uniform and reproducible for ever."""

from __future__ import annotations

import itertools
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dataload.errors import ConfigError
from dataload.samplers.keys import derive_key, mix
from dataload.samplers.permutation import KeyedPermutation, Permutation

SIZES = [1, 2, 3, 10, 255, 1000, 65_535, 65_536, 65_537, 80_000, 98_304, 131_072, 200_001]
HUGE = [10**9, 2**40 + 1, 2**62 + 3, 2**63 - 1]


def z_score(counts: np.ndarray) -> float:
    """Return the chi-square of equal expected counts, in standard deviations from its mean."""
    expected = counts.sum() / counts.size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return (chi_square - (counts.size - 1)) / np.sqrt(2 * (counts.size - 1))


def joint_counts(first: np.ndarray, second: np.ndarray, n: int, bins: int) -> np.ndarray:
    return np.bincount(first * bins // n * bins + second * bins // n, minlength=bins * bins)


def test_keys_are_golden():
    assert derive_key() == 12934250142242556887
    assert derive_key("order", 0, 1) == 3827546630819043733
    assert derive_key("order", 1, 0) == 4484051196254958365
    assert derive_key(b"a", "bc", -7) == 1769657298566866909


def test_mix_is_splitmix64():
    # Published outputs of the reference implementation for these two seeds.
    assert mix(0, np.arange(2, dtype=np.uint64)).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert mix(1234567, np.arange(5, dtype=np.uint64)).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_keys_tell_tuples_apart():
    tuples = [(), ("",), (b"",), (0,), ("0",), (b"0",), ("ab", "c"), ("a", "bc"), ("abc",), (1, 2), (12,), (-1,), (1,)]
    assert len({derive_key(*parts) for parts in tuples}) == len(tuples)
    assert derive_key(np.int64(3)) == derive_key(3)
    with pytest.raises(TypeError):
        derive_key(0.5)


@pytest.mark.parametrize(
    ("n", "first", "last"),
    [
        (10, [0, 2, 6, 7, 4], 8),
        (65_535, [52370, 53246, 18007, 40498, 24820], 57249),
        (65_536, [2482, 9329, 7378, 3566, 60235], 33299),
        (98_305, [7410, 56709, 4810, 16176, 77419], 31597),
        (2**32 + 1, [3093161596, 1939690365, 1856567286, 1350839733, 3138354611], 3669541524),
        (10**9, [459178374, 729950073, 511032225, 484394791, 62172969], 845577833),
        (
            2**62 + 3,
            [
                2040117212730519360,
                3557432329472006577,
                4158602119930840388,
                2860455782863546393,
                2935962475038285523,
            ],
            2188176838869550637,
        ),
    ],
)
def test_permutations_are_golden(n, first, last):
    permutation = Permutation(n, seed=0, epoch=1)
    assert permutation[:5].tolist() == first
    assert permutation[n - 1] == last


@pytest.mark.parametrize("n", [65_536, 98_305, 10**6, 2**32 + 1, 2**40 + 1, 2**63 - 1])
def test_both_halves_of_a_number_move(n):
    """A row moves by a third of n on average, and its high half is uniform."""
    numbers = np.arange(0, n, -(-n // 40_000))
    images = KeyedPermutation(n, derive_key(0))[numbers]
    assert np.mean(np.abs(images - numbers) / n) == pytest.approx(1 / 3, rel=0.02)
    assert abs(z_score(np.bincount(images // (n // 64 + 1), minlength=64))) < 4


@pytest.mark.parametrize("n", SIZES)
def test_bijective_with_exact_inverse(n):
    permutation = Permutation(n, 3, 5)
    images = permutation[:]
    assert np.array_equal(np.sort(images), np.arange(n))
    assert np.array_equal(permutation.inverse[images], np.arange(n))
    assert np.array_equal(permutation[permutation.inverse[:]], np.arange(n))


@given(st.integers(1, 10**7), st.integers(-(2**70), 2**70), st.integers(0, 2**40))
@example(10**7, 0, 0)
def test_bijective_at_any_size(n, seed, epoch):
    """Images are in range and the inverse is exact, so no two are equal. Checks all, or 50,000 of many."""
    permutation = Permutation(n, seed, epoch)
    indices = np.arange(n) if n < 10**6 or n == 10**7 else np.random.default_rng(epoch).integers(0, n, 50_000)
    images = permutation[indices]
    assert images.min() >= 0
    assert images.max() < n
    assert np.array_equal(permutation.inverse[images], indices)


@pytest.mark.parametrize("n", HUGE)
def test_inverse_of_huge_permutations(n):
    indices = np.append(np.random.default_rng(0).integers(0, n, 50_000), [0, n - 1])
    permutation = Permutation(n, 3, 5)
    images = permutation[indices]
    assert images.min() >= 0
    assert images.max() < n
    assert np.array_equal(permutation.inverse[images], indices)
    assert not np.array_equal(images, indices)


@pytest.mark.parametrize("n", [10, 65_536])
def test_indexing_like_an_array(n):
    permutation = Permutation(n, 0, 0)
    images = permutation[:]
    assert len(permutation) == len(permutation.inverse) == n
    assert images.dtype == np.int64
    assert type(permutation[3]) is int
    assert permutation[3] == permutation[np.int32(3)] == images[3]
    assert permutation[-1] == images[-1]
    assert np.array_equal(permutation[[3, -2]], images[[3, -2]])
    assert np.array_equal(permutation[2:8:3], images[2:8:3])
    assert permutation[np.arange(6).reshape(2, 3)].shape == (2, 3)
    assert permutation[[]].shape == (0,)
    assert list(itertools.islice(permutation, 5)) == images[:5].tolist()


@pytest.mark.parametrize("n", [0, 10, 65_536])
def test_out_of_range(n):
    permutation = Permutation(n, 0, 0)
    for index in (n, -n - 1, np.array([0, n]), np.array([-n - 1]), 10**30, 0.5, np.array([True])):
        with pytest.raises(IndexError):
            permutation[index]
        with pytest.raises(IndexError):
            permutation.inverse[index]


def test_empty_and_negative():
    assert len(Permutation(0, 0, 0)) == 0
    assert Permutation(0, 0, 0)[:].tolist() == []
    for n in (-1, np.int64(-1), 2.5):
        with pytest.raises(ConfigError, match="n="):
            Permutation(n, 0, 0)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint64])
@pytest.mark.parametrize("n", [65_535, 65_536, 80_000, 2**31 - 1])
def test_integers_of_numpy(n, kind):
    found, expected = Permutation(kind(n), 0, 0), Permutation(n, 0, 0)
    numbers = [0, 1, n // 2, n - 1]
    assert found[numbers].tolist() == expected[numbers].tolist()
    assert found.inverse[numbers].tolist() == expected.inverse[numbers].tolist()
    assert len(found) == n


@pytest.mark.parametrize("n", [1000, 10**6])
def test_seed_and_epoch_do_not_add_up(n):
    drawn = {(seed, epoch): tuple(Permutation(n, seed, epoch)[:100]) for seed in range(4) for epoch in range(4)}
    assert len(set(drawn.values())) == 16


def test_pickled_copies_agree():
    for n in (100, 10**6):
        permutation = Permutation(n, 1, 2)
        copy = pickle.loads(pickle.dumps(permutation))
        assert np.array_equal(copy[:100], permutation[:100])
        assert np.array_equal(copy.inverse[:100], permutation.inverse[:100])


def test_memory_does_not_grow_with_n():
    tracemalloc.start()
    permutation = Permutation(10**12, 0, 0)
    permutation.inverse[permutation[:1000]]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 500_000


@pytest.mark.parametrize("n", [100, 10_000, 65_536, 10**6])
def test_epochs_do_not_resemble_each_other(n):
    """Return Spearman's correlation of the ranks in two epochs."""
    epochs = [Permutation(n, 5, epoch)[:] for epoch in range(3)]
    for first, second in itertools.combinations(epochs, 2):
        assert abs(np.corrcoef(first, second)[0, 1]) < 3 / np.sqrt(n)


@pytest.mark.parametrize("n", [7, 20, 100])
def test_few_go_everywhere(n):
    counts = np.zeros((n, n), np.int64)
    for seed in range(3000):
        counts[np.arange(n), Permutation(n, seed, seed % 5)[:]] += 1
    # Only (n - 1)**2 of the n * n counts are free: all rows and columns have the same sum.
    chi_square = ((counts - 3000 / n) ** 2 / (3000 / n)).sum() * (n - 1) / n
    assert abs(chi_square - (n - 1) ** 2) / np.sqrt(2 * (n - 1) ** 2) < 4


@pytest.mark.variants
@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_all_permutations_of_few_are_equally_likely(n):
    numbers = {images: number for number, images in enumerate(itertools.permutations(range(n)))}
    draws = [numbers[tuple(Permutation(n, draw % 7, draw // 7)[:].tolist())] for draw in range(60 * len(numbers))]
    assert abs(z_score(np.bincount(draws, minlength=len(numbers)))) < 4


@pytest.mark.parametrize("n", [1000, 65_536, 80_000, 10**9])
def test_an_index_goes_everywhere(n):
    # 16 x 16 bins for the images of the first two numbers, over seeds.
    images = np.array([Permutation(n, seed, 0)[:2] for seed in range(2560)])
    assert abs(z_score(joint_counts(images[:, 0], images[:, 1], n, 16))) < 4
    assert abs(z_score(np.bincount(images[:, 0] % 32, minlength=32))) < 4


@pytest.mark.parametrize("n", [65_536, 80_000, 131_072, 10**6, 10**9])
def test_neighbours_part(n):
    for key, lag in itertools.product(range(4), (1, 2, 256, 512, 32_768)):
        permutation = KeyedPermutation(n, derive_key(key))
        first, second = permutation[:30_000], permutation[lag : 30_000 + lag]
        assert z_score(joint_counts(first, second, n, 32)) < 4.5
        assert abs(z_score(np.bincount((first - second) % n * 64 // n, minlength=64))) < 4.5
