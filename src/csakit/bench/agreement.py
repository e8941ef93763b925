"""Is a provider right? Its results against csakit's reference in float64, at the full size of the case, before anything is timed.

The reference holds everything densely, so it runs for a few stretches of queries: the first, the last and two between. Upstream
gradients and weights are 0 for all other queries, which makes gradients of shared inputs (keys, sink) exact sums over those stretches; and
every other query must have gradient 0. Layers are compared whole, on a short row with few picks and few heads; a step by its loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import csakit
from csakit import Layout

from . import layers
from . import problem as problems
from .problem import Problem
from .shapes import ATTENTION, LAYERS

if TYPE_CHECKING:
    from .providers import Provider

QUERIES = 12  # per stretch
HEADS = 16  # at a time, so that the reference stays small
ROW, PICKS = 256, 16  # tokens and picks of the row on which layers are compared, with HEADS heads: a whole layer in float64 takes a minute
TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}


class Agreement(NamedTuple):
    """The worst result: its name, its error (relative; inf where shapes or non-finite values differ), and what is allowed."""

    name: str
    error: float
    allowed: float

    @property
    def holds(self) -> bool:
        return self.error <= self.allowed


def judge(provider: Provider, whole: Problem) -> tuple[dict[str, Any], Callable[[], Any] | None]:
    """({status, note, error, version}, the function to time): whether a provider agrees, before it is timed.

    Status: ok; disagrees; skipped: it does not do this here; failed: it raised. The function is there when all is well.
    """
    from .providers import Unsupported

    def verdict(status: str, note: str, error: float | None = None) -> dict[str, Any]:
        return {"status": status, "note": note, "error": error, "version": provider.version}

    try:
        checked = _checked(provider, whole)
        ready = provider.prepare(whole) if checked.holds else None
    except Unsupported as reason:
        return verdict("skipped", str(reason)), None
    except Exception as error:  # whatever a provider raises is its result
        return verdict("failed", f"{type(error).__name__}: {error}".splitlines()[0]), None
    if ready is None:
        return verdict("disagrees", f"{checked.name} is off by {checked.error:.1e}, {checked.allowed:.0e} is allowed", checked.error), None
    return verdict("ok", f"worst: {checked.name}", checked.error), ready


def _checked(provider: Provider, whole: Problem) -> Agreement:
    case = whole.case
    if case.operation == "step":
        return check(whole, provider.prepare(whole)(), [])
    if case.operation in LAYERS:
        small = {"tokens": ROW, "topk": PICKS, "heads": HEADS}
        shape = replace(case.shape, **{name: min(getattr(case.shape, name), most) for name, most in small.items()})
        row = problems.make(replace(case, shape=shape), device=str(whole.layout.positions.device))
        return check(row, provider.prepare(row)(), [])
    queries = stretches(case.shape.tokens)
    probe = whole.only(queries)
    return check(probe, provider.prepare(probe)(), queries)


def stretches(tokens: int) -> list[slice]:
    """The queries that are compared; all of them when there are few. Stretches do not overlap."""
    if tokens <= 6 * QUERIES:
        return [slice(0, tokens)]
    starts = [0, tokens // 3, 2 * tokens // 3, tokens - QUERIES]
    return [slice(start, start + QUERIES) for start in starts]


def check(problem: Problem, results: dict[str, Tensor], queries: Sequence[slice]) -> Agreement:
    """How far results, computed for `problem.only(queries)`, are from the reference."""
    allowed = TOLERANCES[problem.case.dtype]
    if problem.case.operation == "select":
        return Agreement("indices", selection_error(problem, results["indices"], queries), allowed)
    got = dict(results)
    if problem.case.operation in ATTENTION:
        want = _attention(problem, queries)
        if "log_mass" in got:
            got["teacher"] = _normalised(got["log_mass"].double())
        worst = ("out", 0.0)
        for name, expected in want.items():
            if name == "lse" and name not in got:
                continue
            found = got.get(name)
            error = (
                math.inf
                if found is None
                else _error(found, expected, queries if name in ("out", "lse", "teacher") else None, rows=name == "teacher")
            )
            worst = max(worst, (name, error), key=lambda pair: pair[1])
        return Agreement(*worst, allowed)
    if problem.case.operation in LAYERS:
        want = _layer(problem)
        if not any(name.startswith("d_indexer") for name in got):  # stock has no objective, so its indexer gets no gradient
            want = {name: x for name, x in want.items() if not name.startswith("d_indexer")}
    elif problem.case.operation == "step":
        want = {"loss": _step_loss(problem)}
    else:
        want = _objective(problem, got.get("indices"), queries)
    errors = {name: _error(got[name], expected) if name in got else math.inf for name, expected in want.items()}
    name = max(errors, key=lambda key: errors[key])
    return Agreement(name, errors[name], allowed)


def selection_error(problem: Problem, indices: Tensor, queries: Sequence[slice]) -> float:
    """How much score a selection gives away against the greatest scores, relative to the greatest of all; inf when it is no selection.

    Rounding may swap entries whose scores are all but equal: that costs next to nothing here. An entry twice, one that is not visible, or
    one too few is no selection.
    """
    topk, worst = problem.case.shape.topk, 0.0
    for part in queries:
        layout = _part(problem.layout, part, 0)
        x = problem.inputs
        weights, q = x["weights"][:, part].double(), x["q_index"][:, part].double()
        with csakit.backend("reference"):
            scores = csakit.index_scores(q, x["k_index"].double(), weights, layout)[0]
        picked = indices[0, part].long()
        picked = torch.nn.functional.pad(picked, (0, max(0, topk - picked.shape[-1])), value=-1)
        live = picked >= 0
        try:
            csakit.validate_indices(picked[None], layout)
        except ValueError:
            return math.inf
        visible = (layout.entry_stop - layout.entry_start)[0].clamp(max=topk)
        if (live.sum(-1) != visible).any():
            return math.inf
        if not scores.shape[-1]:
            continue
        greatest = scores.topk(min(topk, scores.shape[-1]), -1).values
        best = greatest.masked_fill(greatest == -torch.inf, 0).sum(-1)
        got = torch.where(live, scores.gather(-1, picked.clamp(min=0)), 0).sum(-1)
        scale = scores.masked_fill(scores == -torch.inf, 0).abs().max().clamp(min=1e-30)
        worst = max(worst, float((best - got).abs().max() / scale))
    return worst


def _attention(problem: Problem, queries: Sequence[slice]) -> dict[str, Tensor]:
    """out, lse, teacher and gradients in float64; gradients of q are whole, with 0 elsewhere."""
    x = {name: t if name == "indices" else t.double() for name, t in problem.inputs.items()}
    backward, teacher = "d_out" in x, problem.case.operation != "attend"
    heads = x["q"].shape[2]
    pieces: dict[str, list[Tensor]] = {"out": [], "lse": [], "teacher": []}
    gradients = {f"d_{name}": torch.zeros_like(x[name]) for name in ("q", "kv", "entries", "sink")} if backward else {}
    for part in queries:
        first = max(0, part.start - problem.case.shape.window + 1)
        layout = _part(problem.layout, part, first)
        out, lse, mass = [], [], []
        for begin in range(0, heads, HEADS):
            group = slice(begin, begin + HEADS)
            leaves = [
                t.detach().requires_grad_(backward)
                for t in (x["q"][:, part, group], x["kv"][:, first : part.stop], x["entries"], x["sink"][group])
            ]
            q, kv, entries, sink = leaves
            with csakit.backend("reference"):
                attention = csakit.attend(q, kv, entries, layout, indices=x["indices"][:, part], sink=sink, teacher=teacher)
            out.append(attention.out.detach())
            lse.append(attention.lse)
            if attention.log_mass is not None:
                mass.append(attention.log_mass)
            if backward:
                d_q, d_kv, d_entries, d_sink = torch.autograd.grad(attention.out, leaves, x["d_out"][:, part, group])
                gradients["d_q"][:, part, group] += d_q
                gradients["d_kv"][:, first : part.stop] += d_kv
                gradients["d_entries"] += d_entries
                gradients["d_sink"][group] += d_sink
        pieces["out"].append(torch.cat(out, 2))
        pieces["lse"].append(torch.cat(lse, 2))
        if teacher:
            pieces["teacher"].append(_normalised(torch.stack(mass).logsumexp(0)))
    return {name: torch.cat(parts, 1) for name, parts in pieces.items() if parts} | gradients


def _objective(problem: Problem, indices: Tensor | None, queries: Sequence[slice]) -> dict[str, Tensor]:
    """loss and gradients in float64, of the objective over the picked or over every visible entry."""
    x = {name: t if name == "picked" else t.double() for name, t in problem.inputs.items()}
    names = ("q_index", "k_index", "weights")
    want = {"loss": torch.zeros((), dtype=torch.float64, device=x["weight"].device)} | {
        f"d_{name}": torch.zeros_like(x[name]) for name in names
    }
    for part in queries:
        layout = _part(problem.layout, part, 0)
        q, k, weights = (x[name].detach().requires_grad_() for name in names)
        with csakit.backend("reference"):
            scores = csakit.index_scores(q[:, part], k, weights[:, part], layout)
            if problem.case.operation == "dense":
                mass = csakit.teacher_log_mass(x["q"][:, part], x["entries"], x["lse"][:, part], layout)
            else:
                picked = (x["picked"] if indices is None else indices)[:, part].long()
                padded = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf)
                scores, mass = padded.gather(-1, torch.where(picked >= 0, picked, scores.shape[-1])), x["log_mass"][:, part]
            loss = csakit.distill(scores, mass, layout, weight=x["weight"][:, part], divisor=problem.divisor).loss
        want["loss"] += loss.detach()
        for name, gradient in zip(names, torch.autograd.grad(loss, (q, k, weights))):
            want[f"d_{name}"] += gradient
    return want


def _layer(problem: Problem) -> dict[str, Tensor]:
    """out, and the gradients of the hidden states and of every weight, of csakit's layer in float64 on the reference."""
    x = {name: t.double() for name, t in problem.inputs.items()}
    layer = layers.own(problem.case.shape, problem.case.kind, x, trains=problem.case.backward)
    hidden = x["hidden"].requires_grad_(problem.case.backward)
    with csakit.backend("reference"), torch.set_grad_enabled(problem.case.backward):
        out = layer(hidden, problem.layout).out
        leaves = {"hidden": hidden, **dict(layer.named_parameters())}
        gradients = problem.gradients(out, x["d_out"], leaves) if problem.case.backward else {}
    return {"out": out.detach()} | gradients


def _step_loss(problem: Problem) -> Tensor:
    """The language-model loss of the first step, nats per token, on the reference; in float32, as the stock experts have no float64."""
    from .steps import Step

    step = Step(problem, own=True)
    with csakit.backend("reference"), torch.no_grad():
        return step.loss()


def _part(layout: Layout, part: slice, first: int) -> Layout:
    """The layout of a stretch of queries, whose kv rows begin at `first`."""
    cut = {name: getattr(layout, name)[:, part] for name in ("positions", "valid", "entry_start", "entry_stop")}
    return replace(layout, **cut, window_start=layout.window_start[:, part] - first, kv_offset=part.start - first)


def _normalised(log_mass: Tensor) -> Tensor:
    """The teacher: softmax over slots, 0 in rows without mass."""
    total = log_mass.logsumexp(-1, keepdim=True)
    return (log_mass - torch.where(total == -torch.inf, torch.inf, total)).exp()


def _error(got: Tensor, want: Tensor, queries: Sequence[slice] | None = None, *, rows: bool = False) -> float:
    """The greatest difference relative to the greatest expected value, of all or (rows) of its row."""
    got = got.detach().double()
    if queries is not None:
        got = torch.cat([got[:, part] for part in queries], 1)
    live = want.isfinite()
    if got.shape != want.shape or not torch.equal(got[~live], want[~live]) or not got[live].isfinite().all():
        return math.inf
    if not want.numel():
        return 0.0
    difference, size = (got - want).masked_fill(~live, 0).abs(), want.masked_fill(~live, 0).abs()
    if rows:
        return float((difference.amax(-1) / size.amax(-1).clamp(min=1e-30)).max())
    return float(difference.max() / size.max().clamp(min=1e-30))
