"""The fast backend for CPU tensors: chunks of queries, bounded memory, hand-derived backward that recomputes.

parts.py      the keys a chunk of queries reaches: a block of consecutive rows, or gathered rows
attention.py  attend, its backward, log_mass
scoring.py    index_scores, select, their backward, the dense objective
"""

from .attention import attend, attend_backward, log_mass
from .scoring import dense_kl, dense_kl_backward, index_scores, scores_backward, select

__all__ = ["attend", "attend_backward", "dense_kl", "dense_kl_backward", "index_scores", "log_mass", "scores_backward", "select"]
