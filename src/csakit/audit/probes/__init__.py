"""The probes, in the order in which a report lists them."""

from __future__ import annotations

from . import teacher, documents, objective, layer  # isort: skip  (importing enters them in PROBES)
from .probe import PROBES, Measure, Probe

__all__ = ["PROBES", "Measure", "Probe", "documents", "layer", "objective", "teacher"]
