"""Training of DeepSeek-style sparse attention: one Layout, four verbs, `compress -> select -> attend -> distill`."""

from . import metrics
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
