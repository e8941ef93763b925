"""The pieces of a hybrid attention layer: norm, grouped projection, compressor and indexer, with the official parameter names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from csakit import Layout, checks
from csakit.backends.rows import accumulator

from .config import CSA, HybridAttentionConfig
from .functional import IndexInputs, compressed_entries, index_inputs
from .rotary import angles_at, rotate


class Float32Parameters(nn.Module):
    """A module whose own parameters stay in fp32 when it is cast to a lower precision; its children are cast as usual."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if recurse:
            for child in self.children():
                child._apply(fn)

        def keep(x: Tensor) -> Tensor:
            moved = fn(x)
            return x.to(moved.device) if moved.dtype in (torch.bfloat16, torch.float16) else moved

        return super()._apply(keep, recurse=False)


class Float32Linear(Float32Parameters, nn.Linear):
    """A linear map, without bias, that stays in fp32, also under autocast: the gate of the indexer decides near-ties.

    Sharding libraries may hand the weight over in a lower precision; the product is fp32 then too.
    """

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            rows = x.to(accumulator(x))
            return nn.functional.linear(rows, self.weight.to(rows.dtype), self.bias)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, worked in fp32, in x's dtype."""

    def __init__(self, width: int, eps: float, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.to(accumulator(x))
        return (self.weight * unit_rows(rows, self.eps)).to(x.dtype)


def unit_rows(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, worked in fp32 (fp64 for fp64), in x's dtype."""
    rows = x.to(accumulator(x))
    return (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class GroupedLinear(nn.Linear):
    """Linear maps of groups: [B, T, G, n] -> [B, T, G, r], group g with rows g * r .. (g + 1) * r - 1 of the weight [G * r, n]."""

    def __init__(
        self, groups: int, width: int, rank: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(width, groups * rank, bias=False, device=device, dtype=dtype)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        return _GroupedProduct.apply(x, self.weight.unflatten(0, (self.groups, -1)))


class _GroupedProduct(torch.autograd.Function):
    """x [B, T, G, n] and weight [G, r, n] -> [B, T, G, r]. (Autograd's own gradient of the weight would come transposed and be copied.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.einsum("btgn,grn->btgr", x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        d_x = torch.einsum("btgr,grn->btgn", d_out, weight.to(d_out.dtype)).to(x.dtype) if needs_x else None
        d_weight = torch.einsum("btgr,btgn->grn", d_out, x.to(d_out.dtype)).to(weight.dtype) if needs_weight else None
        return d_x, d_weight


class Compressor(Float32Parameters):
    """Compressed entries of hidden states: `Compressor(config)(hidden, layout)` is [B, E, D].

    Projections, pooling inside documents, norm, rotation at the position of the entry's first own token (V4 eq. 9-12, 20-23). Parameters
    wkv.weight, wgate.weight, ape (fp32, the bias of the gates by position inside the block), norm.weight.

    Args:
        config: shapes and rotations.
        width: D; None: config.head_dim.
        ratio: tokens per entry; None: that of compressed sparse layers.
        overlap: entries also pool the block before their own, as compressed sparse layers and indexers do.
    """

    def __init__(
        self,
        config: HybridAttentionConfig,
        *,
        width: int | None = None,
        ratio: int | None = None,
        overlap: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_config(config)
        self.config = config
        self.width = config.head_dim if width is None else width
        self.ratio = config.ratio(CSA) if ratio is None else ratio
        self.overlap = overlap
        checks.whole("width", self.width, at_least=config.qk_rope_head_dim)
        checks.whole("ratio", self.ratio, at_least=1)
        columns = self.width * (2 if overlap else 1)
        self.wkv = nn.Linear(config.hidden_size, columns, bias=False, device=device, dtype=dtype)
        self.wgate = nn.Linear(config.hidden_size, columns, bias=False, device=device, dtype=dtype)
        self.ape = nn.Parameter(torch.empty(self.ratio, columns, device=device, dtype=torch.float32))
        self.norm = RMSNorm(self.width, config.rms_norm_eps, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.ape)

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        """The entries [B, E, D] of hidden [B, T, d], in the dtype of the projections; spare capacity holds 0.

        Raises:
            TypeError, ValueError: hidden does not fit, or the layout is not one of whole rows of tokens.
        """
        layout = layout_of_layer(hidden, layout, self.config, self.ratio)
        return compressed_entries(
            self.wkv(hidden),
            self.wgate(hidden),
            self.ape,
            layout.positions,
            layout,
            norm=self.norm,
            rotate=partial(rotate_at, config=self.config, compressed=True),
            overlap=self.overlap,
        )


class LightningIndexer(nn.Module):
    """The inputs of the index scores: `LightningIndexer(config)(hidden, latent, layout)` is what `csakit.select` takes.

    Both inputs are detached at the entrance. Parameters wq_b.weight, weights_proj.weight (fp32) and those of `compressor`.
    """

    def __init__(
        self, config: HybridAttentionConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        check_config(config)
        self.config = config
        heads, width = config.index_n_heads, config.index_head_dim
        self.wq_b = nn.Linear(config.q_lora_rank, heads * width, bias=False, device=device, dtype=dtype)
        self.weights_proj = Float32Linear(config.hidden_size, heads, bias=False, device=device)
        self.compressor = Compressor(config, width=width, ratio=config.ratio(CSA), device=device, dtype=dtype)

    def forward(self, hidden: Tensor, latent: Tensor, layout: Layout) -> IndexInputs:
        """q [B, T, I, C], k [B, E, C], weights [B, T, I] (fp32) and the scale of `csakit.select` and `csakit.distill_dense`.

        Args:
            hidden: [B, T, d], the layer's input.
            latent: [B, T, q_lora_rank], the normed query latent.

        Raises:
            TypeError, ValueError: hidden does not fit, or the layout is not one of whole rows of tokens.
        """
        config = self.config
        layout = layout_of_layer(hidden, layout, config, self.compressor.ratio)
        return index_inputs(
            hidden,
            latent,
            layout.positions,
            queries=self.wq_b,
            keys=partial(self.compressor, layout=layout),
            gate=self.weights_proj,
            rotate=partial(rotate_at, config=config, compressed=True),
            width=config.index_head_dim,
            scale=config.index_head_dim**-0.5 * config.index_n_heads**-0.5,
        )


def rotate_at(x: Tensor, positions: Tensor, *, config: HybridAttentionConfig, compressed: bool) -> Tensor:
    """x [B, N, (H,) D] rotated at positions [B, N]."""
    return rotate(x, angles_at(positions, x, config, compressed=compressed))


def layout_of_layer(hidden: Tensor, layout: Layout, config: HybridAttentionConfig, ratio: int) -> Layout:
    """The layout with a layer's own ratio (0: whatever it has), after checking that it and hidden [B, T, d] fit the layer.

    Raises:
        TypeError, ValueError: they do not fit.
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be a csakit.Layout; got {checks.describe(layout)}")
    rows, tokens = layout.positions.shape
    checks.tensor("hidden", hidden, "[B, T, hidden_size]", (rows, tokens, config.hidden_size))
    if layout.window != config.sliding_window:
        raise ValueError(f"layout.window must be sliding_window = {config.sliding_window}; got {layout.window}")
    if layout.block or layout.kv_offset:
        raise ValueError("layout must describe whole rows of tokens; got a layout of blocks or of a part of the row")
    return layout.with_ratio(ratio) if ratio else layout


def check_config(config: HybridAttentionConfig) -> None:
    if not isinstance(config, HybridAttentionConfig):
        raise TypeError(f"config must be a HybridAttentionConfig; got {type(config).__name__}. Use from_pretrained_config for a dict")
