"""Medians, quantiles, ratios, noise: on data whose answers are known."""

from __future__ import annotations

import math

import pytest

from csakit.bench.figures import Figure, beyond_noise, crossing, quantile, ratio, summary


def test_median_and_quantiles_lie_linearly_between_neighbours():
    assert summary([5, 1, 2, 4, 3, 6]) == pytest.approx((3.5, 2, 5))
    assert summary([7]) == (7, 7, 7)
    assert quantile([0, 10], 0.2) == pytest.approx(2)


def test_one_disturbed_round_moves_neither_median_nor_ratio():
    assert summary([1, 1, 1, 1, 100]).value == 1
    assert ratio([4, 4, 400, 4, 4], [2, 2, 200, 2, 2]) == (2, 2, 2)


def test_ratios_are_taken_pair_by_pair():
    found = ratio([10, 20, 30], [5, 5, 5])
    assert found.value == 4 and found.low == pytest.approx(2.8) and found.high == pytest.approx(5.2)


def test_throughput_changes_the_sides_of_the_quantiles():
    assert Figure(2, 1, 4).under(8) == (4, 2, 8)
    assert Figure(2, 1, 4).times(10) == (20, 10, 40)


def test_only_ranges_that_do_not_touch_are_beyond_the_noise():
    assert not beyond_noise(Figure(10, 9, 11), Figure(11.5, 11, 12))
    assert beyond_noise(Figure(10, 9, 11), Figure(12, 11.1, 13))
    assert beyond_noise(Figure(10, 9, 11), Figure(8, 7, 8.9))


def test_curves_cross_where_their_logarithms_do():
    tokens = [1024, 2048, 4096, 8192]
    linear, quadratic = [n / 1000 for n in tokens], [n * n / 3e6 for n in tokens]
    found = crossing(tokens, linear, quadratic)
    assert found is not None and math.isclose(found, 3000, rel_tol=1e-9)
    assert crossing(tokens, linear, [0.1 * y for y in linear]) is None
    assert crossing(tokens, linear, [10 * y for y in linear]) is None  # above from the start: no crossing in sight


def test_empty_and_unpaired_samples_are_refused():
    with pytest.raises(ValueError, match="samples must not be empty"):
        summary([])
    with pytest.raises(ValueError, match="got 2 and 1"):
        ratio([1, 2], [1])
