"""Overrides for the attentions of torchtitan's DeepSeek-V4 model: `csa` (with the indexer's loss), `hca`, `sliding`.

torchtitan's layer projects queries, window keys, compressed keys and the indexer's inputs, and hands them to its `inner_attention`;
that is what is replaced. Parameters, their names, their initialisation and their sharding stay torchtitan's.
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import csakit
from csakit import Layout
from csakit.nn.config import DENOMINATORS, OBJECTIVES
from csakit.nn.functional import AttendInputs, IndexInputs, Objective, attend_and_distill

from .scale import check_share, check_tokens_per_step

try:
    import spmd_types as spmd
    from torchtitan.config import derive, override
    from torchtitan.models.deepseek_v4 import attention as stock
    from torchtitan.protocols.module import Module
except ImportError as error:
    raise ImportError(
        f"torchtitan with its DeepSeek-V4 model is needed (torchtitan.models.deepseek_v4; the release 0.3.0 has none): {error}. "
        "csakit.integrations.torchtitan.deepseek_v3 works with the release"
    ) from error

_ARGUMENTS = {
    "SlidingWindowAttention": ["self", "q", "swa_k", "attn_sink", "attention_masks"],
    "HeavilyCompressedAttention": ["self", "q", "swa_k", "cmp_k", "attn_sink", "attention_masks"],
    "CompressedSparseAttention": ["self", "q", "swa_k", "cmp_k", "idx_q", "idx_k", "idx_w", "attn_sink", "attention_masks"],
}
_FIELDS = {"window_size", "compress_ratio", "softmax_scale", "index_topk"}
_IGNORED = {"param_init", "sharding_config", "block_size", "kernel_options"}  # of the module protocol, and of the kernel that is replaced


def check_stock(module: ModuleType) -> None:
    """Raises unless the attentions are called and configured in the way these overrides know.

    Raises:
        ImportError: they are not; what differs is named.
    """
    for name, known in _ARGUMENTS.items():
        found = getattr(module, name, None)
        if found is None:
            raise ImportError(f"{module.__name__} has no {name}: not a DeepSeek-V4 model that csakit knows")
        arguments = list(inspect.signature(found.forward).parameters)
        if arguments != known:
            raise ImportError(f"{name}.forward takes {arguments[1:]}; csakit knows {known[1:]}. This torchtitan is not supported")
        fields = {field.name for field in dataclasses.fields(found.Config)}
        if not fields - _IGNORED == _FIELDS:
            raise ImportError(
                f"{name}.Config has {sorted(fields - _IGNORED)}; csakit knows {sorted(_FIELDS)}. This torchtitan is not supported"
            )


check_stock(stock)


class _InnerAttention(Module):
    """What the three kinds share: attention by csakit over the stock layer's tensors.

    Tensors are [B, T, ..], or [T, ..] where torchtitan folds its rows into one; every row is then one document, as in the stock layers.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        window_size: int
        compress_ratio: int
        softmax_scale: float
        index_topk: int
        objective: str = "off"
        coef: float = 0.0
        denominator: str = "attended"
        tokens_per_step: int = 0

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.indexer_loss: Tensor | None = None
        self.head_group: Any = None

    def parallelize(self, parallel_dims: Any) -> None:
        """As every module's; heads are sharded over the tensor-parallel group, over which the teacher is combined."""
        mesh = parallel_dims.get_optional_mesh("tp")
        self.head_group = None if mesh is None else mesh.get_group()
        super().parallelize(parallel_dims)

    def _attend(
        self, q: Tensor, swa_k: Tensor, cmp_k: Tensor | None, attn_sink: Tensor, masks: Any, index: IndexInputs | None = None
    ) -> Tensor:
        if masks is not None:
            raise ValueError("attention_masks must be None: csakit's attention takes windows and visible entries from the configuration")
        config, folded = self.config, q.ndim == 3
        if folded:
            q, swa_k, cmp_k = q[None], swa_k[None], None if cmp_k is None else cmp_k[None]
            index = None if index is None else IndexInputs(index.q[None], index.k[None], index.weights[None], index.scale)
        rows, tokens = q.shape[:2]
        layout = Layout.batch(rows, tokens, ratio=max(config.compress_ratio, 1), window=config.window_size, device=q.device)
        inputs = AttendInputs(q, swa_k, cmp_k, attn_sink, config.softmax_scale)
        with spmd.no_typecheck():
            out = self._run(inputs, layout, index)
        return out[0] if folded else out

    def _run(self, inputs: AttendInputs, layout: Layout, index: IndexInputs | None) -> Tensor:
        config = self.config
        trains = self.training and config.objective != "off" and config.coef != 0
        objective = Objective("off")
        if trains:
            check_share(config.tokens_per_step, layout.positions.numel())
            objective = Objective(config.objective, config.denominator, divisor=config.tokens_per_step, group=self.head_group)
        selection = None
        if index is not None and config.objective != "dense":
            with torch.set_grad_enabled(torch.is_grad_enabled() and trains):
                selection = csakit.select(index.q, index.k, index.weights, config.index_topk, layout, scale=index.scale)
        attention, loss = attend_and_distill(inputs, layout, index=index, selection=selection, objective=objective)
        if loss is None:
            return attention.out
        self.indexer_loss = loss.kl.mean()
        return csakit.attach_loss(attention.out, loss.loss, weight=config.coef)


class SlidingWindowAttention(_InnerAttention):
    """Window and sink."""

    @dataclass(kw_only=True, slots=True)
    class Config(_InnerAttention.Config):
        pass

    def forward(self, q: Tensor, swa_k: Tensor, attn_sink: Tensor, *, attention_masks: Any = None) -> Tensor:
        return self._attend(q, swa_k, None, attn_sink, attention_masks)


class HeavilyCompressedAttention(_InnerAttention):
    """Window, every visible entry, and sink."""

    @dataclass(kw_only=True, slots=True)
    class Config(_InnerAttention.Config):
        pass

    def forward(self, q: Tensor, swa_k: Tensor, cmp_k: Tensor, attn_sink: Tensor, *, attention_masks: Any = None) -> Tensor:
        return self._attend(q, swa_k, cmp_k, attn_sink, attention_masks)


class CompressedSparseAttention(_InnerAttention):
    """Window, selected entries (with objective "dense" every visible one), and sink; in training also the indexer's loss.

    Attributes:
        indexer_loss: nats per token in the last training forward; None before it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_InnerAttention.Config):
        pass

    def forward(
        self,
        q: Tensor,
        swa_k: Tensor,
        cmp_k: Tensor,
        idx_q: Tensor,
        idx_k: Tensor,
        idx_w: Tensor,
        attn_sink: Tensor,
        *,
        attention_masks: Any = None,
    ) -> Tensor:
        index = IndexInputs(idx_q, idx_k, idx_w, 1.0)  # the stock indexer has its scale in idx_w
        return self._attend(q, swa_k, cmp_k, attn_sink, attention_masks, index)


@override(target=stock.CompressedSparseAttention.Config, description="csakit: compressed sparse attention whose indexer is trained")
def csa(
    cfg: Any,
    *,
    tokens_per_step: int | None = None,
    coef: float | None = 1.0,
    objective: str = "sparse",
    denominator: str = "attended",
) -> CompressedSparseAttention.Config:
    """csakit's compressed sparse attention in place of torchtitan's.

    Args:
        tokens_per_step: training.global_batch_size * training.seq_len, by which the sum of the KL is divided. Needed if there is a loss.
        coef: of the loss. None and 0: no loss.
        objective: "sparse", "dense" (the warm-up: every visible entry is attended), or "off".
        denominator: of the sparse teacher, "attended" or "visible".

    Raises:
        TypeError, ValueError: an argument of another kind; tokens_per_step is missing.
    """
    for name, value, allowed in (("objective", objective, OBJECTIVES), ("denominator", denominator, DENOMINATORS)):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
    if coef is not None:
        csakit.checks.number("coef", coef)
    if coef and objective != "off":
        check_tokens_per_step(tokens_per_step)
    return derive(
        cfg,
        CompressedSparseAttention.Config,
        objective=objective,
        coef=coef or 0.0,
        denominator=denominator,
        tokens_per_step=tokens_per_step or 0,
    )


@override(target=stock.HeavilyCompressedAttention.Config, description="csakit: heavily compressed attention")
def hca(cfg: Any) -> HeavilyCompressedAttention.Config:
    """csakit's heavily compressed attention in place of torchtitan's."""
    return derive(cfg, HeavilyCompressedAttention.Config)


@override(target=stock.SlidingWindowAttention.Config, description="csakit: sliding window attention")
def sliding(cfg: Any) -> SlidingWindowAttention.Config:
    """csakit's sliding window attention in place of torchtitan's."""
    return derive(cfg, SlidingWindowAttention.Config)
