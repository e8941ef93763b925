"""Argument checks. Each names the argument, what was expected, what came, and the likely fix."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_KINDS = {
    "floating": ("a floating-point tensor", lambda dtype: dtype.is_floating_point),
    "index": ("an int32 or int64 tensor", lambda dtype: dtype in (torch.int32, torch.int64)),
    "real": (
        "a floating-point, integer or bool tensor",
        lambda dtype: not dtype.is_complex,
    ),
}

_debug = False


class debug:
    """Turns value checks of tensors on (or off): `with csakit.debug(True): ...`, or `csakit.debug(True)` as a switch.

    Value checks read tensors back to the host. They find repeated, invisible or out-of-range indices in `attend`, and
    decreasing offsets or holes in a mask on devices other than the CPU.
    """

    def __init__(self, on: bool) -> None:
        global _debug
        if not isinstance(on, bool):
            raise TypeError(f"debug takes True or False; got {on!r}")
        self._before = _debug
        _debug = on

    def __enter__(self) -> debug:
        return self

    def __exit__(self, *_: object) -> None:
        global _debug
        _debug = self._before


def debugging() -> bool:
    """Whether value checks are on and can run (a traced program has no values to check)."""
    return _debug and not torch.compiler.is_compiling()


def values_readable(x: Tensor) -> bool:
    """Whether the values of x may be checked: on the CPU in eager mode they cost nothing, elsewhere only when debugging."""
    return (
        not torch.compiler.is_compiling()
        and (_debug or x.device.type == "cpu")
        and x.device.type != "meta"
        and type(x) in (Tensor, torch.nn.Parameter)
    )


def describe(x: Any) -> str:
    """A short text for an argument that did not fit: dtype and shape of a tensor, else type and value."""
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
    return f"{type(x).__name__} {x!r}"


def tensor(name: str, x: Any, letters: str, sizes: tuple[int | None, ...], *, kind: str = "floating", fix: str = "") -> None:
    """Raises unless x is a tensor of this kind and shape; None in sizes allows any length.

    Raises:
        TypeError: not a tensor, or another kind of dtype.
        ValueError: another shape.
    """
    words, fits = _KINDS[kind]
    if not isinstance(x, Tensor) or not fits(x.dtype):
        raise TypeError(f"{name} must be {words} {letters}; got {describe(x)}{_hint(fix)}")
    if not _has_shape(x.shape, sizes):
        wanted = "[" + ", ".join("any" if size is None else str(size) for size in sizes) + "]"
        raise ValueError(f"{name} must have shape {letters} = {wanted}; got {list(x.shape)}{_hint(fix)}")


def _has_shape(shape: torch.Size, sizes: tuple[int | None, ...]) -> bool:
    if len(shape) != len(sizes):
        return False
    for have, want in zip(shape, sizes):  # noqa: SIM110  (all() takes twice as long, in a call of microseconds)
        if want is not None and have != want:
            return False
    return True


def whole(name: str, x: Any, *, at_least: int) -> None:
    """Raises unless x is a whole number of at least this size (bool is not a number)."""
    if isinstance(x, bool) or not isinstance(x, (int, torch.SymInt)):
        raise TypeError(f"{name} must be a whole number; got {describe(x)}")
    if x < at_least:
        raise ValueError(f"{name} must be at least {at_least}; got {x}")


def number(name: str, x: Any) -> None:
    """Raises unless x is a finite Python number."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise TypeError(f"{name} must be a number; got {describe(x)}")
    if not torch.compiler.is_compiling() and not math.isfinite(x):
        raise ValueError(f"{name} must be finite; got {x}")


def flag(name: str, x: Any) -> None:
    """Raises unless x is True or False (text would count as True)."""
    if not isinstance(x, bool):
        raise TypeError(f"{name} must be True or False; got {describe(x)}")


def divides(small: str, a: int, large: str, b: int) -> None:
    """Raises unless a divides b."""
    if a < 1 or b % a:
        raise ValueError(f"the number of {small} must divide the number of {large}; got {a} and {b}")


def _hint(fix: str) -> str:
    return f". {fix}" if fix else ""
