"""Megatron-LM's own CSA code as candidates: `csakit audit megatron --path CHECKOUT`, or with the checkout on the Python path by name.

Its real methods run on the CPU, on a layer that holds the case's tensors in place of projections.
"""

from __future__ import annotations

from .context import ContextParallel, FusedContextParallel
from .unfused import Megatron, WithCsakit

__all__ = ["ContextParallel", "FusedContextParallel", "Megatron", "WithCsakit"]
