"""What a probe is: a question to a candidate whose answer is one number, with the limit that a right candidate keeps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..case import Form
from ..subject import Subject

MOVED = 1e-3  # something has moved when it moves by this share; in these cases a right candidate moves by 6e-3 and more


class Measure(NamedTuple):
    """A measured number, the limit it is held to, in words, whether it keeps it, and what else is worth telling when it does not."""

    value: float
    limit: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True)
class Probe:
    """A named question. `holds` is what is true of a right candidate, `broken` what is wrong with one that fails."""

    name: str
    holds: str
    broken: str
    measure: Callable[[Subject], Measure]
    forms: tuple[Form, ...] = ("csa", "dsa")  # of attention that it has a question for


PROBES: dict[str, Probe] = {}


def probe(
    name: str, holds: str, broken: str, *, forms: tuple[Form, ...] = ("csa", "dsa")
) -> Callable[[Callable[[Subject], Measure]], Callable[[Subject], Measure]]:
    """Enters the decorated function in `PROBES`, in the order of definition."""

    def enter(measure: Callable[[Subject], Measure]) -> Callable[[Subject], Measure]:
        PROBES[name] = Probe(name, holds, broken, measure, forms)
        return measure

    return enter


def at_most(value: float, limit: float) -> Measure:
    """The measure of something that should be nil."""
    return Measure(value, f"<= {limit:.3g}", value <= limit)


def at_least(value: float, limit: float) -> Measure:
    """The measure of something that must move; a number that is not finite has not moved, it has broken."""
    return Measure(value, f">= {limit:.3g}", math.isfinite(value) and value >= limit)
