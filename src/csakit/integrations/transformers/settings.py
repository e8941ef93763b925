"""The settings of an installation, checked, and the three stages of the recipe."""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class Stage(NamedTuple):
    """What a stage sets: attention, objective and who trains, together."""

    selects: bool  # attention over the indexer's picks; else over every visible entry
    objective: str
    trains: str  # "everything", "indexer" or "backbone"


STAGES = {
    "dense": Stage(selects=False, objective="off", trains="backbone"),
    "warmup": Stage(selects=False, objective="dense", trains="indexer"),
    "sparse": Stage(selects=True, objective="sparse", trains="everything"),
}
OBJECTIVES = ("off", "dense", "sparse")
DENOMINATORS = ("attended", "visible")
FREEZES = ("none", "backbone")


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """The value, if it is one of the allowed words.

    Raises:
        ValueError: anything else.
    """
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
    return value


def coefficient(value: Any) -> float:
    """The coefficient of the indexer's loss as a float; None is 0.0, and 0.0 means no loss work at all.

    Raises:
        TypeError: not a number.
        ValueError: negative, infinite or NaN.
    """
    if value is None:
        return 0.0
    number = finite_number("coef", value)
    if number < 0:
        raise ValueError(f"coef must not be negative; got {number}. None or 0 turns the loss off")
    return number


def finite_number(name: str, value: Any) -> float:
    """The value as a float.

    Raises:
        TypeError: not a number.
        ValueError: infinite or NaN.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number; got {type(value).__name__} {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite; got {value}")
    return float(value)


def check_share(value: Any) -> None:
    """Raises ValueError unless every indexer serves its own layer."""
    one_of("share", value, ("own", "served"))
    if value == "served":
        raise ValueError(
            "share='served' is for models whose layers share a selection; each CSA layer of DeepSeek-V4 has its own indexer. Use 'own'"
        )
