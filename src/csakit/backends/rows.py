"""What backends share: the ranges they work on, the precision they work in, and the objective of given scores and log-mass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

INF = float("inf")


class Ranges(NamedTuple):
    """The part of a Layout that decides who sees whom."""

    valid: Tensor  # [B, T] bool
    window_start: Tensor  # [B, T] first kv row of the window
    entry_start: Tensor  # [B, T] first visible entry
    entry_stop: Tensor  # [B, T] one past the last
    kv_offset: int  # query t is kv row t + kv_offset


def accumulator(*tensors: Tensor | None) -> torch.dtype:
    """The dtype of scores, statistics and sums: fp64 when an input is fp64, else fp32."""
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in tensors) else torch.float32


def subtrahend(lse: Tensor) -> Tensor:
    """lse, ready for exp(logit - lse): a row that attends nothing (-inf) gets +inf, so that its probabilities are 0 and never NaN."""
    return torch.where(lse == -INF, INF, lse)


def kl_rows(scores: Tensor, log_mass: Tensor) -> tuple[Tensor, Tensor]:
    """KL(teacher || student) of each token and its gradient for the scores.

    scores, log_mass [.., S, N] -> kl [..], the mean over the S sets, and direction [.., S, N], the gradient of kl:
    (student - teacher) / S. A slot is empty where its score is -inf; a set without teacher has KL 0 and gradient 0.

        teacher = softmax(log_mass), student = softmax(scores), KL = sum teacher * (ln teacher - ln student)   (V3.2 eq. 3, 4)
    """
    live = scores != -INF
    log_teacher = log_normalised(torch.where(live, log_mass, -INF))
    taught = live & (log_teacher != -INF).any(-1, keepdim=True)
    log_student = torch.where(taught, log_normalised(scores), -INF)
    teacher = log_teacher.exp()
    terms = torch.where(teacher == 0, 0, teacher * (log_teacher - log_student))  # 0 ln 0 = 0
    sets = scores.shape[-2]
    return terms.sum((-1, -2)) / sets, (log_student.exp() - teacher) / sets


def objective(scores: Tensor, log_mass: Tensor, valid: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(kl [B,T], 0 on padding; the gradient of sum factor * kl for the scores [B,T,S,N], or None without factor [B,T])."""
    dtype = accumulator(scores, log_mass, factor)
    scores, log_mass = scores.to(dtype), log_mass.to(dtype)
    kl = scores.new_empty(scores.shape[:2])
    gradient = None if factor is None else torch.empty_like(scores, memory_format=torch.contiguous_format)
    rows, tokens = scores.shape[:2]
    step = max(1, (1 << 18) // max(1, scores.shape[2] * scores.shape[3]))  # some ten temporaries of a step: they stay small
    for row in range(rows):
        for begin in range(0, tokens, step):
            at = (row, slice(begin, begin + step))
            divergence, direction = kl_rows(scores[at], log_mass[at])
            kl[at] = torch.where(valid[at], divergence, 0)
            if gradient is not None and factor is not None:
                gradient[at] = torch.where(valid[at][:, None, None], direction * factor[at][:, None, None], 0)
    return kl, gradient


def log_normalised(x: Tensor) -> Tensor:
    """x - logsumexp(x) over the last dimension, -inf where all are. Shifted by the greatest first: x of magnitude 1e3 loses no digits."""
    if not x.shape[-1]:
        return x
    greatest = x.amax(-1, keepdim=True)
    shifted = x - torch.where(greatest.isinf(), 0, greatest)
    return shifted - torch.where(greatest == -INF, 0, shifted.logsumexp(-1, keepdim=True))


def over_ranks(log_mass: Tensor, group: str) -> Tensor:
    """The log-mass of all heads, when they are sharded over a process group ("": they are not).

    One row maximum, one sum: logsumexp over the ranks. Whoever normalises does so afterwards, once.
    """
    if not group:
        return log_mass
    from torch import distributed
    from torch.distributed import distributed_c10d

    ranks = distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    greatest = log_mass.amax(-1, keepdim=True) if log_mass.shape[-1] else log_mass.new_full((*log_mass.shape[:-1], 1), -INF)
    distributed.all_reduce(greatest, distributed.ReduceOp.MAX, group=ranks)
    greatest = torch.where(greatest.isfinite(), greatest, 0)
    total = (log_mass - greatest).exp()
    distributed.all_reduce(total, group=ranks)
    return total.log() + greatest
