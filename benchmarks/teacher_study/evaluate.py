"""What is measured on held-out rows: how heads differ, what selections capture, and the bits per byte of restricted attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

import csakit
from csakit import metrics

from .indexers import index, select
from .model import LanguageModel, LayerView, Policy
from .records import Tally
from .teachers import denominators, greatest, log_mass, reference_ranks

CV_EDGES = (0.0, 0.3, 0.6, 1.0, 1.5, 2.0, float("inf"))
RANKED = ("full", "compressed-only")  # the teachers that the oracles select by
WRONG = ("compressed-only", "sink-only", "window-only")


def bin_name(number: int) -> str:
    """The name of a bin of the coefficient of variation."""
    low, high = CV_EDGES[number], CV_EDGES[number + 1]
    return f"CV {low:g}-{high:g}" if high < float("inf") else f"CV over {low:g}"


def heads(model: LanguageModel, rows: Tensor, tally: Tally) -> None:
    """How far the heads of each compressed layer differ, and how far that drives the teachers apart."""

    def look(view: LayerView, late: slice) -> Tensor:
        q, kv, entries, sink, scale = view.inputs
        assert entries is not None
        lse = denominators(view)
        attention = view.attend()
        shares = metrics.branch_shares(q, kv, entries, lse["full"], view.layout, sink=sink, scale=scale)
        add = partial(tally.add, layer=layer_number(model, view))
        ones = torch.ones(lse["full"][:, late].shape[:2])
        for head in range(q.shape[2]):
            add(shares.entries[:, late, head], ones, arm=f"head {head}", metric="compressed share")
            add(shares.sink[:, late, head], ones, arm=f"head {head}", metric="sink share")
        spread = variation(shares.entries)[:, late]
        add(spread, ones, arm="heads", metric="CV of compressed share")
        masses = {name: log_mass(view, lse[name]) for name in ("full", *WRONG)}
        add(metrics.teacher_entropy(masses["full"])[:, late].exp(), ones, arm="full", metric="effective entries")
        for name in WRONG:
            add(_divergence(masses["full"], masses[name], view)[:, late], ones, arm=name, metric="KL from the full teacher")
        return attention.out

    _walk(model, rows, look)


def lone_heads(model: LanguageModel, rows: Tensor, tally: Tally) -> None:
    """How far the full and the compressed-only teacher of every single head lie apart: not at all, its denominator cancels."""

    def look(view: LayerView, late: slice) -> Tensor:
        lse, q = denominators(view, arms=RANKED), view.inputs.q
        for head in range(q.shape[2]):
            own = slice(head, head + 1)
            lone = view._replace(inputs=view.inputs._replace(q=q[:, :, own]))
            right, wrong = (log_mass(lone, lse[name][:, :, own]) for name in RANKED)
            kl = _divergence(right, wrong, view)[:, late]
            tally.add(kl, torch.ones_like(kl), layer=layer_number(model, view), arm=f"head {head}", metric="KL of its own two teachers")
        return view.attend().out

    _walk(model, rows, look)


def captures(
    model: LanguageModel, rows: Tensor, students: dict[str, nn.ModuleList], topks: tuple[int, ...], tally: Tally, *, seed: int = 0
) -> None:
    """Captured mass, recall and KL of every student; without students, those of the selections that need no indexer."""
    generator = torch.Generator().manual_seed(seed)

    def look(view: LayerView, late: slice) -> Tensor:
        lse = denominators(view, arms=RANKED)
        true = log_mass(view, lse["full"])
        seen, mass = true[:, late], compressed_mass(true[:, late])
        add = partial(tally.add, layer=layer_number(model, view))
        bins = _bins(view, lse["full"], late)

        def score(arm: str, topk: int, rank: Tensor) -> None:
            indices = greatest(rank[:, late], topk)
            captured = metrics.captured_mass(seen, indices)
            ones = torch.ones_like(captured)
            add(captured, mass, arm=arm, topk=topk, metric="mass-weighted capture")
            add(captured, ones, arm=arm, topk=topk, metric="capture")
            add(metrics.topk_recall(seen, indices), ones, arm=arm, topk=topk, metric="recall")
            for number, inside in enumerate(bins):
                add(captured, inside, arm=arm, topk=topk, metric=f"capture, {bin_name(number)}")

        if not students:
            for number, inside in enumerate(bins):
                add(inside, torch.ones_like(inside), arm="queries", metric=f"share, {bin_name(number)}")
                add(inside, mass, arm="mass", metric=f"share, {bin_name(number)}")
            ranks = reference_ranks(view, {"full": true, "compressed-only": log_mass(view, lse["compressed-only"])}, generator)
            for name, rank in ranks.items():
                for topk in topks:
                    score(name, topk, rank)
        for arm, own in students.items():
            q, k, weights, scale = index(own, view)
            scores = csakit.index_scores(q, k, weights, view.layout, scale=scale)
            kl = csakit.distill(scores, true, view.layout).kl[:, late]
            add(kl, torch.ones_like(kl), arm=arm, metric="KL to the true teacher")
            for topk in topks:
                score(arm, topk, scores)
        return view.attend().out

    _walk(model, rows, look)


def bits(model: LanguageModel, rows: Tensor, policy: Policy, tally: Tally, *, arm: str, topk: int = 0) -> None:
    """Bits per byte with the compressed layers attending as the policy says, of all positions and of the second half."""
    for batch in rows.split(4):
        with torch.no_grad():
            cost = model.bits(batch, policy)
        half = cost.shape[1] // 2
        for queries, part in (("all", cost), ("late", cost[:, half:])):
            tally.add(part, torch.ones_like(part), arm=arm, topk=topk, queries=queries, metric="bits per byte")


def indexed(students: nn.ModuleList, topk: int) -> Policy:
    """Attention over what the indexers select."""
    return lambda view: view.attend(select(students, view, topk).indices).out


def referred(name: str, topk: int, seed: int = 0) -> Policy:
    """Attention over a selection that needs no indexer; the oracles look at the layer's own dense attention."""
    generator = torch.Generator().manual_seed(seed)

    def attend(view: LayerView) -> Tensor:
        masses = {arm: log_mass(view, lse) for arm, lse in denominators(view, arms=RANKED).items()}
        return view.attend(greatest(reference_ranks(view, masses, generator)[name], topk)).out

    return attend


def variation(shares: Tensor) -> Tensor:
    """The coefficient of variation over heads of shares [B, T, H]; 0 where nothing is attended."""
    mean = shares.mean(-1)
    return torch.where(mean > 0, shares.std(-1, unbiased=False) / mean.clamp(min=1e-30), 0)


def compressed_mass(mass: Tensor) -> Tensor:
    """The compressed mass [B, T] of all heads together, from log_mass [B, T, E]."""
    return mass.logsumexp(-1).exp()


def layer_number(model: LanguageModel, view: LayerView) -> int:
    """The number of a compressed layer in the whole model."""
    return [number for number, kind in enumerate(model.preset.layers) if kind == "csa"][view.number]


def _bins(view: LayerView, lse: Tensor, late: slice) -> list[Tensor]:
    """1 for the queries of each bin of the coefficient of variation, else 0; [B, N] each."""
    q, kv, entries, _, scale = view.inputs
    spread = variation(metrics.branch_shares(q, kv, entries, lse, view.layout, scale=scale).entries)[:, late]
    return [((spread >= low) & (spread < high)).to(lse.dtype) for low, high in pairwise(CV_EDGES)]


def _divergence(right: Tensor, wrong: Tensor, view: LayerView) -> Tensor:
    """KL [B, T] of one teacher from another, from their log_mass."""
    return csakit.distill(wrong, right, view.layout).kl


def _walk(model: LanguageModel, rows: Tensor, look: Callable[[LayerView, slice], Tensor]) -> None:
    late = slice((rows.shape[1] - 1) // 2, None)
    with torch.no_grad():
        for batch in rows.split(4):
            model(batch[:, :-1], lambda view: look(view, late))
