"""The cpu backend in torch alone: chunks of queries, any float dtype."""

from ..rows import objective
from .attention import attend, attend_backward, log_mass
from .dense import Dense
from .scoring import index_scores, scores_backward, select

_dense = Dense(index_scores, log_mass, objective, scores_backward)
dense_kl, dense_kl_backward = _dense.kl, _dense.backward

__all__ = [
    "attend", "attend_backward", "dense_kl", "dense_kl_backward", "index_scores", "log_mass", "objective", "scores_backward", "select",
]  # fmt: skip
