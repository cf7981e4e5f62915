"""The interval holds the true difference about as often as it says."""

import math

import numpy as np
import pytest

from modelopt_v4_patches.quality.intervals import mean_difference, perplexity_difference


def test_equal_losses_differ_by_exactly_nothing() -> None:
    losses = np.random.default_rng(0).exponential(size=(4, 1023))
    found = perplexity_difference(losses, losses)
    assert (found.value, found.low, found.high) == (0.0, 0.0, 0.0)


def test_value_is_the_difference_of_the_perplexities() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.exponential(size=(2, 3, 500))
    found = perplexity_difference(a, b)
    assert found.value == pytest.approx(math.exp(a.mean()) - math.exp(b.mean()), abs=1e-12)
    assert found.low < found.value < found.high


def test_pairing_cancels_what_both_share() -> None:
    rng = np.random.default_rng(2)
    text = rng.exponential(2.0, size=(4, 2048))
    found = perplexity_difference(text + 0.01 + rng.normal(0, 0.01, text.shape), text)
    expected = math.exp(text.mean()) * math.expm1(0.01)
    assert found.low < expected < found.high
    # Unpaired, the text alone would make this 50 times wider.
    assert found.high - found.low < 0.2 * expected


def test_interval_covers_the_truth_about_95_times_in_100() -> None:
    rng = np.random.default_rng(3)
    reference = np.zeros((8, 1024))
    hits = 0
    for _ in range(100):
        # Neighbours are alike: one common part for every 32 tokens.
        shared = np.repeat(rng.normal(0, 0.05, (8, 32)), 32, axis=1)
        losses = 0.02 + shared + rng.normal(0, 0.05, reference.shape)
        found = perplexity_difference(losses, reference, block=128)
        hits += found.low <= math.expm1(0.02) <= found.high
    assert 86 <= hits <= 100


def test_the_seed_decides() -> None:
    losses, reference = np.random.default_rng(4).exponential(size=(2, 2, 700))
    first = perplexity_difference(losses, reference, seed=1)
    assert first == perplexity_difference(losses, reference, seed=1)
    assert first != perplexity_difference(losses, reference, seed=2)


def test_a_model_that_overflows_is_infinitely_worse() -> None:
    reference = np.ones((2, 512))
    found = perplexity_difference(np.full((2, 512), 2000.0), reference)
    assert found.value == math.inf


def test_losses_of_other_windows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 5\), the reference's \(2, 6\)"):
        perplexity_difference(np.ones((2, 5)), np.ones((2, 6)))


def test_means_are_compared_likewise() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.normal(size=(2, 16, 2048))
    found = mean_difference(a + 1, b)
    assert found.value == pytest.approx(1 + a.mean() - b.mean(), abs=1e-12)
    assert found.low < found.value < found.high
    # Independent tokens: the interval is that of the central limit theorem.
    assert found.high - found.low == pytest.approx(2 * 1.96 * np.sqrt(2 / a.size), rel=0.25)
