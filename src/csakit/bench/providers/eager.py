"""What a good author writes by hand in eager PyTorch, with autograd for the gradients.

Attention: one index_select brings window and picks together, one softmax, and the teacher comes from the same probabilities. Indexer: the
scores [T, I, E] of all heads are there at once; the sparse objective gathers the picked keys.

T tokens, H heads, D width, W window, K slots, E entries, I index heads, C index width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..problem import Problem
from ..shapes import ATTENTION, KERNELS, Case
from . import Results, Unsupported


class Eager:
    """The good eager author."""

    name = "eager"
    version = str(torch.__version__)

    def bytes_needed(self, case: Case) -> int:
        shape = case.shape
        size = 4 if case.dtype == "float32" else 8
        if case.operation in ATTENTION:
            gathered = shape.tokens * (shape.window + shape.topk) * (shape.width + 4 * shape.heads)
            return size * gathered * (3 if case.operation == "attend-backward" else 1)
        if case.operation == "distill":
            return 3 * size * shape.tokens * shape.topk * (shape.index_width + 2 * shape.index_heads)
        scores = shape.tokens * shape.entries * (shape.index_heads + (shape.heads if case.operation == "dense" else 0))
        return size * scores * (2 if case.operation == "select" else 5)

    def prepare(self, problem: Problem) -> Callable[[], Results]:
        if problem.case.operation in ATTENTION:
            return _attention(problem)
        if problem.case.operation not in KERNELS:
            raise Unsupported("the eager author wrote kernels only")
        return {"select": _select, "distill": _distill, "dense": _dense}[problem.case.operation](problem)


def _attention(problem: Problem) -> Callable[[], Results]:
    x = problem.leaves()
    tokens, _, width = x["q"].shape[1:]
    window = problem.case.shape.window
    own = torch.arange(tokens, device=x["q"].device)[:, None]
    recent = own - torch.arange(window - 1, -1, -1, device=own.device)
    near = torch.where(recent >= 0, recent, -1)  # the same for every layer
    operation = problem.case.operation

    def run() -> Results:
        picks = x["indices"][0].long()
        rows = torch.cat([near, torch.where(picks >= 0, picks + tokens, -1)], 1)
        memory = torch.cat([x["kv"][0], x["entries"][0]])
        keys = memory.index_select(0, rows.clamp(min=0).flatten()).view(tokens, -1, width)  # [T, W + K, D]
        logits = ((x["q"][0] * width**-0.5) @ keys.transpose(1, 2)).to(x["sink"].dtype)
        logits = logits.masked_fill((rows < 0)[:, None], -torch.inf)
        shares = torch.cat([logits, x["sink"].expand(tokens, -1)[..., None]], -1).softmax(-1)[..., :-1]  # [T, H, W + K]
        out = (shares.to(keys.dtype) @ keys)[None]
        results = {"out": out}
        if operation != "attend":
            mass = shares.detach()[..., window:].sum(1)
            results["teacher"] = (mass / mass.sum(-1, keepdim=True).clamp(min=1e-30))[None]
        if operation == "attend-backward":
            results |= problem.gradients(out, x["d_out"], x)
        return results

    return run


def _scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """[T, N] in fp32 from q [T, I, C], k [N, C] or [T, N, C], weights [T, I]."""
    heads, width = q.shape[1:]
    dots = torch.relu(_wide(q) @ _wide(k).transpose(-1, -2))
    return (width**-0.5 * heads**-0.5) * (_wide(weights)[..., None] * dots).sum(1)


def _wide(x: Tensor) -> Tensor:
    """x in the precision of scores: fp32, and fp64 for fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _hidden(problem: Problem) -> Tensor:
    """[T, E] bool: which entries a query does not see."""
    entry = torch.arange(problem.case.shape.entries, device=problem.layout.entry_stop.device)
    return entry >= problem.layout.entry_stop[0, :, None]


def _select(problem: Problem) -> Callable[[], Results]:
    x, topk = problem.inputs, min(problem.case.shape.topk, problem.case.shape.entries)
    hidden = _hidden(problem)

    def run() -> Results:
        scores = _scores(x["q_index"][0], x["k_index"][0], x["weights"][0]).masked_fill(hidden, -torch.inf)
        values, indices = scores.topk(topk, -1)
        return {"indices": torch.where(values == -torch.inf, -1, indices)[None], "scores": values[None]}

    return run


def _loss(scores: Tensor, log_mass: Tensor, hidden: Tensor, weight: Tensor, divisor: float) -> Tensor:
    """sum of weight * KL(softmax(log_mass) || softmax(scores)) / divisor over [T, N]; a row without candidates counts 0."""
    nothing = hidden.all(-1, keepdim=True)
    fill = torch.where(nothing, 0, -torch.inf)
    student = torch.where(hidden, fill, scores).log_softmax(-1)
    teacher = torch.where(hidden, fill, log_mass).log_softmax(-1)
    terms = torch.where(hidden, 0, teacher.exp() * (teacher - student))
    return (weight * terms.sum(-1)).sum() / divisor


def _distill(problem: Problem) -> Callable[[], Results]:
    x = problem.leaves()
    tokens, slots = x["picked"].shape[1:]

    def run() -> Results:
        picked = x["picked"][0]
        keys = x["k_index"][0].index_select(0, picked.clamp(min=0).flatten()).view(tokens, slots, -1)
        loss = _loss(_scores(x["q_index"][0], keys, x["weights"][0]), x["log_mass"][0], picked < 0, x["weight"][0], problem.divisor)
        return {"loss": loss, **problem.gradients(loss, None, x)}

    return run


def _dense(problem: Problem) -> Callable[[], Results]:
    x, hidden = problem.leaves(), _hidden(problem)

    def run() -> Results:
        with torch.no_grad():
            logits = _wide(x["q"][0] * x["q"].shape[3] ** -0.5) @ _wide(x["entries"][0]).T  # [T, H, E]
            log_mass = (logits - x["lse"][0][..., None]).logsumexp(1)
        loss = _loss(_scores(x["q_index"][0], x["k_index"][0], x["weights"][0]), log_mass, hidden, x["weight"][0], problem.divisor)
        return {"loss": loss, **problem.gradients(loss, None, x)}

    return run
