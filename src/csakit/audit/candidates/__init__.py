"""Who can be audited: csakit, the plain right one, every known mistake, and whatever an import path leads to."""

from __future__ import annotations

import importlib
from typing import Any

from .plain import MISTAKES, PlainTorch

WRONG = {name: PlainTorch(name) for name in MISTAKES}
"""A candidate for each known mistake, by the mistake's name: negative controls for any test."""

RIGHT = ("csakit", "torch")

_HERE = "csakit.audit.candidates"
HOSTS = {
    "megatron": (
        "Megatron-LM's compressed sparse attention as it stands, path by path (--path CHECKOUT)",
        [f"{_HERE}.megatron:{name}" for name in ("Megatron", "ContextParallel", "FusedContextParallel")],
    ),
    "megatron-csakit": ("the same code with csakit installed in it (--path CHECKOUT)", [f"{_HERE}.megatron:WithCsakit"]),
    "megatron-core-dsa": ("DeepSeek-V3.2's indexer loss in the released megatron-core", [f"{_HERE}.megatron_core:DSA"]),
    "transformers": ("a stock DeepSeek-V4 layer of Transformers", [f"{_HERE}.transformers:Stock"]),
    "transformers-csakit": ("the same layer with csakit installed in it", [f"{_HERE}.transformers:WithCsakit"]),
    "flash-mla": ("csakit beside a fused kernel, of which plain PyTorch keeps the contract", [f"{_HERE}.flash_mla:BesideKernel"]),
}
"""Real code that can be audited by name: what it is, and the candidates, one for each of its paths."""


def load(name: str) -> Any:
    """The candidate of a name: "csakit", "torch", a mistake of `WRONG`, or an import path "package.module:attribute".

    A class is instantiated without arguments.

    Raises:
        ValueError: no candidate has this name, the module cannot be imported, it has no such attribute, or what it needs is missing.
    """
    if name == "csakit":
        from .library import Library

        return Library()
    if name == "torch":
        return PlainTorch()
    if name in WRONG:
        return WRONG[name]
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        known = ", ".join((*RIGHT, *HOSTS, *WRONG))
        raise ValueError(f'candidate must be one of {known}, or an import path "module:attribute"; got {name!r}')
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"candidate {name!r}: module {module!r} cannot be imported ({error})") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"candidate {name!r}: {found!r} has no attribute {part!r}")
        found = getattr(found, part)
    if not isinstance(found, type):
        return found
    try:
        return found()
    except ImportError as error:
        raise ValueError(f"candidate {name!r}: {error}") from error


def load_all(name: str) -> list[Any]:
    """The candidates of a name: one, or for a host of `HOSTS` one for each of its paths.

    Raises:
        ValueError: as `load`.
    """
    return [load(part) for part in HOSTS[name][1]] if name in HOSTS else [load(name)]


__all__ = ["HOSTS", "MISTAKES", "RIGHT", "WRONG", "PlainTorch", "load", "load_all"]
