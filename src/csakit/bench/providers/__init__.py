"""Who is measured. A provider computes an operation of a Problem its own way; `find` gives one by name.

csakit-NAME         csakit's backend of that name, for every name it has
csakit-nn           layers of csakit.nn
csakit-installed    stock layers and models with csakit installed
eager               what a good author writes by hand
transformers        the functions, layers and models of stock DeepSeek-V4 in Transformers
megatron            Megatron-LM's unfused functions, from a checkout
module:attribute    your own: an object like `Provider`
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from csakit import backends

from ..problem import Problem
from ..shapes import KERNELS, LAYERS, Case

Results = dict[str, Tensor]

OTHERS = ("csakit-nn", "csakit-installed", "eager", "transformers", "megatron")
ORACLE = "reference"  # the backend everybody is compared with; it is measured only when asked for


class Unsupported(Exception):
    """The provider does not do this, or cannot do it here. The message says why."""


class Provider(Protocol):
    """One way to compute the operations.

    Attributes:
        name: as in the table.
        version: of the code behind it.
    """

    name: str
    version: str

    def bytes_needed(self, case: Case) -> int:
        """About how much memory it will take beside inputs and results; what would not fit is not run. 0: never mind."""
        ...

    def prepare(self, problem: Problem) -> Callable[[], Results]:
        """The function to be timed. What is done here is not: converting indices, building masks that all layers share.

        The function returns, by operation:
            attend*          out [1, T, H, D]; with the teacher also log_mass [1, T, K] or, normalised, teacher [1, T, K], for the slots of
                             `indices`; with backward d_q, d_kv, d_entries, d_sink
            select           indices [1, T, K], any order, -1 empty
            layers           out [1, T, d]; with backward d_hidden, and d_NAME of each weight that it trains
            step             loss, nats per predicted token
            distill, dense   loss = sum of weight * KL / problem.divisor; d_q_index, d_k_index, d_weights. A provider that distils another
                             selection than `picked` returns it as indices

        Raises:
            Unsupported: not this operation, or not here.
        """
        ...


def names(operation: str, *, megatron: bool = False) -> list[str]:
    """The providers measured when none is named."""
    if operation in LAYERS:
        return ["csakit-nn", "csakit-installed", "transformers"]
    if operation not in KERNELS:
        return ["csakit-installed", "transformers"]
    return [f"csakit-{name}" for name in backends.NAMES if name != ORACLE] + ["eager", "transformers"] + ["megatron"] * megatron


def find(name: str, *, megatron: str | None = None) -> Provider:
    """The provider of that name.

    Args:
        name: one of the names above.
        megatron: path of a Megatron-LM checkout.

    Raises:
        ValueError: an unknown name, or megatron without a checkout.
        Unsupported: what it needs is not installed.
    """
    known = [f"csakit-{backend}" for backend in backends.NAMES]
    if name in known:
        from .own import Own

        return Own(name.removeprefix("csakit-"))
    if name in ("csakit-nn", "csakit-installed"):
        from .modules import Installed, Module

        return Module() if name == "csakit-nn" else Installed()
    if name == "eager":
        from .eager import Eager

        return Eager()
    if name == "transformers":
        from .stock import Stock

        return Stock()
    if name == "megatron":
        if megatron is None:
            raise ValueError("provider megatron needs a checkout of Megatron-LM; give its path with --megatron")
        from .megatron import Megatron

        return Megatron(megatron)
    if ":" in name:
        return _custom(name)
    raise ValueError(f"provider must be one of {', '.join([*known, *OTHERS])}, or module:attribute; got {name!r}")


def _custom(name: str) -> Provider:
    module, attribute = name.split(":", 1)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"provider {name!r} was not found: {error}") from error
    missing = [part for part in ("name", "version", "bytes_needed", "prepare") if not hasattr(found, part)]
    if missing:
        raise ValueError(f"provider {name!r} must have name, version, bytes_needed and prepare; it lacks {', '.join(missing)}")
    return found
