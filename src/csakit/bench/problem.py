"""The tensors of one case, the same for every provider."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import csakit
from csakit import Layout

from . import layers, selections
from .shapes import ATTENTION, HCA_RATIO, LAYERS, Case

BYTES = 256  # the vocabulary of a step

DIFFERENTIABLE = {
    "attend-backward": ("q", "kv", "entries", "sink"),
    "distill": ("q_index", "k_index", "weights"),
    "dense": ("q_index", "k_index", "weights"),
}


@dataclass(frozen=True)
class Problem:
    """The inputs of a case: one row, one document.

    Attributes:
        inputs: attention: q [1, T, H, D], kv [1, T, D], entries [1, E, D], sink [H], indices [1, T, K] int32, and d_out [1, T, H, D], the
            gradient of the output. Indexer: q_index [1, T, I, C], k_index [1, E, C], weights [1, T, I]; for the objectives weight [1, T]
            (of each token's KL); for the sparse one picked [1, T, K] int32 and log_mass [1, T, K] fp32; for the dense one q, entries, and
            an lse [1, T, H]. Layers: hidden [1, T, d], the weights by their official names, and with backward d_out [1, T, d]. Step:
            input_ids [2, T / 2] int64, one document per row.
    """

    case: Case
    layout: Layout
    inputs: dict[str, Tensor]

    @property
    def divisor(self) -> float:
        """What an objective's sum over tokens is divided by."""
        return float(self.case.shape.tokens)

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The inputs that get a gradient."""
        if self.case.operation in LAYERS:
            return tuple(name for name in self.inputs if name != "d_out") if self.case.backward else ()
        return DIFFERENTIABLE.get(self.case.operation, ())

    def leaves(self) -> dict[str, Tensor]:
        """The inputs, those that get a gradient as fresh leaves."""
        wanted = self.differentiable
        return {name: x.detach().requires_grad_(name in wanted) for name, x in self.inputs.items()}

    def gradients(self, result: Tensor, upstream: Tensor | None, leaves: dict[str, Tensor], *, keep: bool = False) -> dict[str, Tensor]:
        """{"d_name": gradient} of the leaves that get one; those of entries that are not there get none. keep: the graph is used again."""
        names = [name for name in self.differentiable if name in leaves]
        found = torch.autograd.grad(result, [leaves[name] for name in names], upstream, retain_graph=keep, allow_unused=True)
        return {f"d_{name}": gradient for name, gradient in zip(names, found) if gradient is not None}

    def only(self, queries: Sequence[slice]) -> Problem:
        """The same problem with gradients from these queries alone: the rest has upstream gradient and weight 0."""
        inputs = dict(self.inputs)
        for name in ("d_out", "weight"):
            if name in inputs:
                inputs[name] = torch.zeros_like(inputs[name])
                for piece in queries:
                    inputs[name][:, piece] = self.inputs[name][:, piece]
        return replace(self, inputs=inputs)


def make(case: Case, *, device: str = "cpu", seed: int = 0) -> Problem:
    """The problem of a case: normal random numbers, logits of about 1. The same seed gives the same problem on every device."""
    shape, generator = case.shape, torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    layout = Layout.batch(1, shape.tokens, ratio=shape.ratio, window=shape.window, device=device)

    def normal(*sizes: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device=device, dtype=kind)

    if case.operation == "step":
        return Problem(case, layout, {"input_ids": torch.randint(BYTES, (2, shape.tokens // 2), generator=generator).to(device)})
    if case.operation in LAYERS:
        layout = layout.with_ratio(HCA_RATIO if case.kind == "hca" else shape.ratio)
        weights = layers.weights(shape, case.kind, generator)
        kept = {name: x.to(device=device, dtype=x.dtype if _stays_wide(name) else dtype) for name, x in weights.items()}
        hidden = {name: normal(1, shape.tokens, shape.hidden) for name in ("hidden", *(("d_out",) if case.backward else ()))}
        return Problem(case, layout, hidden | kept)
    inputs: dict[str, Tensor] = {}
    if case.operation in (*ATTENTION, "dense"):
        inputs["q"] = normal(1, shape.tokens, shape.heads, shape.width)
        inputs["entries"] = normal(1, shape.entries, shape.width)
    if case.operation in ATTENTION:
        inputs["kv"] = normal(1, shape.tokens, shape.width)
        inputs["sink"] = normal(shape.heads, kind=torch.promote_types(dtype, torch.float32))
        inputs["indices"] = selections.make(case.selection, layout, shape.topk, generator).to(device)
        if case.operation == "attend-backward":
            inputs["d_out"] = normal(1, shape.tokens, shape.heads, shape.width)
        return Problem(case, layout, inputs)
    statistics = torch.promote_types(dtype, torch.float32)
    inputs["q_index"] = normal(1, shape.tokens, shape.index_heads, shape.index_width)
    inputs["k_index"] = normal(1, shape.entries, shape.index_width)
    inputs["weights"] = normal(1, shape.tokens, shape.index_heads)
    if case.operation != "select":
        inputs["weight"] = torch.rand(1, shape.tokens, generator=generator).to(device=device, dtype=statistics) + 0.5
    if case.operation == "distill":
        with torch.no_grad():
            inputs["picked"] = csakit.select(inputs["q_index"], inputs["k_index"], inputs["weights"], shape.topk, layout).indices
        mass = 2 * normal(*inputs["picked"].shape, kind=statistics)
        inputs["log_mass"] = mass.masked_fill(inputs["picked"] < 0, -torch.inf)
    if case.operation == "dense":
        inputs["lse"] = 5 + normal(1, shape.tokens, shape.heads, kind=statistics)  # any denominator will do
    return Problem(case, layout, inputs)


def _stays_wide(name: str) -> bool:
    """Whether a layer keeps this weight in fp32 whatever the others are."""
    return name.endswith(("attn_sink", "ape", "weights_proj.weight"))
