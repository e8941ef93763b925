"""The language model of the study: bytes with hashed n-grams, attention layers of csakit.nn, and a function that says how to attend."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import csakit
from csakit import Layout
from csakit.nn import SlidingWindowAttention
from csakit.nn.config import CSA
from csakit.nn.functional import AttendInputs
from csakit.nn.layers import HeavilyCompressedAttention
from csakit.nn.parts import RMSNorm

from .presets import Preset

N_GRAMS = (2, 3, 4, 6)


class LayerView(NamedTuple):
    """What a compressed layer shows to those who choose how it attends."""

    number: int  # of the compressed layer, from 0
    hidden: Tensor  # [B, T, d], normed
    latent: Tensor  # [B, T, r]
    inputs: AttendInputs
    layout: Layout

    def attend(self, indices: Tensor | None = None, *, compressed: bool = True, teacher: bool = False) -> csakit.Attention:
        """The layer's attention over its window, its sink, and the selected entries (None: every visible one)."""
        q, kv, entries, sink, scale = self.inputs
        return csakit.attend(q, kv, entries if compressed else None, self.layout, indices=indices, sink=sink, scale=scale, teacher=teacher)


Policy = Callable[[LayerView], Tensor]  # the output of the heads [B, T, H, D]


def dense(view: LayerView) -> Tensor:
    """Attention over every visible entry."""
    return view.attend().out


def without_entries(view: LayerView) -> Tensor:
    """Attention over the window alone."""
    return view.attend(compressed=False).out


class CompressedAttention(HeavilyCompressedAttention):
    """A compressed sparse layer without its indexer: the study brings its own."""

    kind = CSA


class Block(nn.Module):
    def __init__(self, preset: Preset, kind: str) -> None:
        super().__init__()
        config = preset.attention()
        self.attention = (CompressedAttention if kind == "csa" else SlidingWindowAttention)(config)
        self.attention_norm, self.inner_norm = RMSNorm(preset.hidden, 1e-6), RMSNorm(preset.hidden, 1e-6)
        self.up = nn.Linear(preset.hidden, preset.inner, bias=False)
        self.down = nn.Linear(preset.inner, preset.hidden, bias=False)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.attention.wo_b.weight)


class LanguageModel(nn.Module):
    """Bytes in, logits of the next byte out.

    Hashed embeddings of the last 2, 3, 4 and 6 bytes take local work off the attention: after minutes of training it uses the past.
    """

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        self.preset = preset
        self.bytes = nn.Embedding(256, preset.hidden)
        self.n_grams = nn.ModuleList(nn.Embedding(preset.tables, preset.hidden // len(N_GRAMS)) for _ in N_GRAMS)
        self.blocks = nn.ModuleList(Block(preset, kind) for kind in preset.layers)
        self.norm = RMSNorm(preset.hidden, 1e-6)
        self.head = nn.Linear(preset.hidden, 256, bias=False)
        nn.init.normal_(self.bytes.weight, std=0.5)
        for table in self.n_grams:
            nn.init.normal_(table.weight, std=0.05)  # most n-grams of held-out text are rare: what is not trained must stay quiet
        nn.init.zeros_(self.head.weight)

    def forward(self, ids: Tensor, policy: Policy = dense) -> Tensor:
        """Logits [B, T, 256] of bytes [B, T]; `policy` attends in the compressed layers."""
        layout = Layout.batch(*ids.shape, ratio=self.preset.ratio, window=self.preset.window)
        x = self.bytes(ids) + torch.cat([table(self._hash(ids, n)) for table, n in zip(self.n_grams, N_GRAMS)], -1)
        compressed = 0
        for block in self.blocks:
            hidden = block.attention_norm(x)
            inputs, latent, angles = block.attention.project(hidden, layout)
            view = LayerView(compressed, hidden, latent, inputs, layout)
            if inputs.entries is None:
                heads = without_entries(view)
            else:
                heads, compressed = policy(view), compressed + 1
            x = x + block.attention.output(heads, angles)
            x = x + block.down(F.relu(block.up(block.inner_norm(x))).square())
        return self.head(self.norm(x))

    def bits(self, row: Tensor, policy: Policy = dense) -> Tensor:
        """[B, T] bits that each following byte of rows [B, T + 1] costs."""
        logits = self(row[:, :-1], policy)
        return F.cross_entropy(logits.transpose(1, 2), row[:, 1:], reduction="none") / 0.6931471805599453

    @property
    def compressed_layers(self) -> int:
        return self.preset.layers.count("csa")

    def sinks(self) -> list[nn.Parameter]:
        """The sinks [H] of the compressed layers."""
        return [block.attention.attn_sink for block, kind in zip(self.blocks, self.preset.layers) if kind == "csa"]

    def _hash(self, ids: Tensor, n: int) -> Tensor:
        mixed = ids
        for back in range(1, n):
            mixed = mixed * 1_000_003 + F.pad(ids, (back, 0))[:, : ids.shape[1]] + back
        return (mixed ^ (mixed >> 17)) % self.preset.tables
