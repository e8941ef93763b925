"""The cpu backend in torch alone: chunks of queries, any float dtype."""

from .attention import attend, attend_backward, log_mass
from .scoring import dense_kl, dense_kl_backward, index_scores, scores_backward, select

__all__ = ["attend", "attend_backward", "dense_kl", "dense_kl_backward", "index_scores", "log_mass", "scores_backward", "select"]
