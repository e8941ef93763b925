"""Medians, quantiles and ratios of repeated measurements, and what moved beyond the noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

LOW, HIGH = 0.2, 0.8


class Figure(NamedTuple):
    """A median and the 20 and 80 % quantiles around it."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Figure:
        return Figure(*(factor * x for x in self))

    def under(self, numerator: float) -> Figure:
        """numerator / self; the quantiles change sides."""
        return Figure(numerator / self.value, numerator / self.high, numerator / self.low)


def quantile(samples: Sequence[float], part: float) -> float:
    """The quantile of samples, linear between neighbours."""
    if not samples:
        raise ValueError("samples must not be empty")
    ordered = sorted(samples)
    place = part * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def summary(samples: Sequence[float]) -> Figure:
    """Median and quantiles."""
    return Figure(quantile(samples, 0.5), quantile(samples, LOW), quantile(samples, HIGH))


def ratio(baseline: Sequence[float], samples: Sequence[float]) -> Figure:
    """How many times longer the baseline took, pair by pair: measurements of one round share what else the machine was doing.

    Raises:
        ValueError: another number of samples.
    """
    if len(baseline) != len(samples):
        raise ValueError(f"pairs need as many baseline samples as samples; got {len(baseline)} and {len(samples)}")
    return summary([a / b for a, b in zip(baseline, samples)])


def beyond_noise(old: Figure, new: Figure) -> bool:
    """Whether two medians differ by more than their quantiles explain: the ranges from 20 to 80 % do not touch."""
    return new.low > old.high or new.high < old.low


def crossing(xs: Sequence[float], first: Sequence[float], second: Sequence[float]) -> float | None:
    """The x at which the second curve overtakes the first, by a straight line between logarithms; None: not within xs."""
    gaps = [math.log(b / a) for a, b in zip(first, second)]
    for number in range(1, len(gaps)):
        before, after = gaps[number - 1], gaps[number]
        if before < 0 <= after:
            part = before / (before - after)
            return math.exp(math.log(xs[number - 1]) + part * (math.log(xs[number]) - math.log(xs[number - 1])))
    return None


def slope(curve: Mapping[int, float]) -> float:
    """The power with which a curve {x: y} grows over the longer half of its xs, at least three: a straight line through logarithms."""
    xs = sorted(curve)[-max(3, len(curve) // 2 + 1) :]
    points = [(math.log(x), math.log(curve[x])) for x in xs]
    middle = [sum(axis) / len(points) for axis in zip(*points)]
    return sum((x - middle[0]) * (y - middle[1]) for x, y in points) / sum((x - middle[0]) ** 2 for x, _ in points)
