"""Which backend runs, and why.

reference   the specification as dense torch: any device, any dtype; holds T x E scores per head.
cpu         CPU tensors in bounded memory, the default there: native kernels for float32 and bfloat16 where they can be built, else torch.
cpu-torch   the same in torch alone: chunks of queries.
cpu-native  the same with the native kernels or an error.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch

from .. import checks

NAMES = ("reference", "cpu", "cpu-torch", "cpu-native")
_MODULES = {"cpu-torch": "cpu.chunked", "cpu-native": "cpu.native"}

_forced: tuple[str, int] | None = None


class backend:
    """Forces a backend inside `with csakit.backend(name): ...`; an explicit choice runs or raises why it cannot.

    Args:
        name: "reference", "cpu", "cpu-torch" or "cpu-native".
        tile: queries per chunk (tests, tuning); results differ by rounding only. With "cpu" it asks for the chunks of "cpu-torch".

    Raises:
        ValueError: an unknown name, or a tile for a backend that has none.
    """

    def __init__(self, name: str, *, tile: int | None = None) -> None:
        if name not in NAMES:
            raise ValueError(f"backend must be one of {', '.join(NAMES)}; got {name!r}")
        if tile is not None:
            checks.whole("tile", tile, at_least=1)
            if name not in ("cpu", "cpu-torch"):
                raise ValueError(f"tile is for backends that work in chunks; {'the reference' if name == 'reference' else name} has none")
        self._choice = (name, tile or 0)

    def __enter__(self) -> backend:
        global _forced
        self._before = _forced
        _forced = self._choice
        return self

    def __exit__(self, *_: object) -> None:
        global _forced
        _forced = self._before


def choose(device: torch.device) -> tuple[str, int]:
    """(name, tile) of the backend for tensors on this device; tile 0 leaves the choice to the backend.

    Raises:
        RuntimeError: the backend asked for cannot run there.
    """
    if _forced is None:
        return ("cpu" if device.type == "cpu" else "reference"), 0
    if _forced[0] != "reference" and device.type != "cpu":
        raise RuntimeError(
            f"backend {_forced[0]!r} was asked for, but the tensors are on {device}. Move them, or leave the choice to csakit"
        )
    return _forced


@functools.cache
def load(name: str) -> ModuleType:
    """The module of a backend."""
    return importlib.import_module(f"{__name__}.{_MODULES.get(name, name)}")
