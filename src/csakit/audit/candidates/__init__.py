"""Who can be audited: csakit, the plain right one, every known mistake, and whatever an import path leads to."""

from __future__ import annotations

import importlib
from typing import Any

from .plain import MISTAKES, PlainTorch

WRONG = {name: PlainTorch(name) for name in MISTAKES}
"""A candidate for each known mistake, by the mistake's name: negative controls for any test."""

RIGHT = ("csakit", "torch")


def load(name: str) -> Any:
    """The candidate of a name: "csakit", "torch", a mistake of `WRONG`, or an import path "package.module:attribute".

    A class is instantiated without arguments.

    Raises:
        ValueError: no candidate has this name, the module cannot be imported, or it has no such attribute.
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
        raise ValueError(f'candidate must be one of {", ".join((*RIGHT, *WRONG))}, or an import path "module:attribute"; got {name!r}')
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"candidate {name!r}: module {module!r} cannot be imported ({error})") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"candidate {name!r}: {found!r} has no attribute {part!r}")
        found = getattr(found, part)
    return found() if isinstance(found, type) else found


__all__ = ["MISTAKES", "RIGHT", "WRONG", "PlainTorch", "load"]
