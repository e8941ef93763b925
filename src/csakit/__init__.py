"""Training of DeepSeek-style sparse attention: one Layout, four verbs, `compress -> select -> attend -> distill`.

The names below are imported when they are first used, so that the command line answers `--help` without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import metrics as metrics
    from .attention import Attention, attend, lse_with_sink, teacher_log_mass
    from .backends import backend
    from .checks import debug
    from .compression import compress
    from .distillation import IndexerLoss, attach_loss, distill, distill_dense
    from .layout import Layout
    from .selection import Selection, index_scores, select, validate_indices

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "IndexerLoss",
    "Layout",
    "Selection",
    "attach_loss",
    "attend",
    "backend",
    "compress",
    "debug",
    "distill",
    "distill_dense",
    "index_scores",
    "lse_with_sink",
    "metrics",
    "select",
    "teacher_log_mass",
    "validate_indices",
]

_HOMES = {
    "attention": ("Attention", "attend", "lse_with_sink", "teacher_log_mass"),
    "backends": ("backend",),
    "checks": ("debug",),
    "compression": ("compress",),
    "distillation": ("IndexerLoss", "attach_loss", "distill", "distill_dense"),
    "layout": ("Layout",),
    "selection": ("Selection", "index_scores", "select", "validate_indices"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_SUBMODULES = frozenset({"audit", "backends", "bench", "checkpoints", "integrations", "metrics", "nn"})


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
