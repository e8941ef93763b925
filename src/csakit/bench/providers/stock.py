"""Stock DeepSeek-V4 in Transformers: its eager attention, its index scorer, and its layers and models as they stand.

The attention function is called as the attention module calls it, on one key row for window and entries together and a mask that the
compressor's bias extends; the scorer is the module itself, with an identity in place of its weight projection. What lies between (the bias
of the picks, the causal mask of the scores, the greatest of them) follows the stock modules. The teacher is taken from the attention
weights it returns.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..problem import Problem
from ..shapes import ATTENTION, HCA_RATIO, KERNELS, LAYERS, Case
from . import Results, Unsupported
from .modules import hosted


class Stock:
    """Transformers' DeepSeek-V4, eager attention."""

    name = "transformers"

    def __init__(self) -> None:
        try:
            from transformers.models.deepseek_v4 import modeling_deepseek_v4
        except ImportError as error:
            raise Unsupported(f"Transformers with DeepSeek-V4 is not installed ({error}); install csakit[hf]") from error
        self._stock: Any = modeling_deepseek_v4
        self.version = importlib.metadata.version("transformers")

    def bytes_needed(self, case: Case) -> int:
        shape = case.shape
        if case.operation in LAYERS:
            entries = {"sliding": 0, "csa": shape.entries, "hca": shape.tokens // HCA_RATIO}[case.kind]
            return 4 * shape.heads * shape.tokens * (shape.tokens + entries) * (30 if case.backward else 17) // 5
        if case.operation == "step":
            return 0
        if case.operation in ATTENTION:
            size = 4 if case.dtype == "float32" else 8
            scores = size * shape.heads * (shape.tokens + shape.entries) * (shape.tokens + shape.width)
            return scores * (9 if case.operation == "attend-backward" else 5)
        return 4 * shape.tokens * shape.entries * shape.index_heads * (3 if case.operation == "select" else 6)

    def prepare(self, problem: Problem) -> Callable[[], Results]:
        if problem.case.operation in ATTENTION:
            return self._attention(problem)
        if problem.case.operation == "select":
            return self._select(problem)
        if problem.case.operation in KERNELS:
            raise Unsupported("stock Transformers has no indexer objective")
        return hosted(problem, own=False)

    def _attention(self, problem: Problem) -> Callable[[], Results]:
        shape, operation, x = problem.case.shape, problem.case.operation, problem.leaves()
        module = self._stock.DeepseekV4Attention(self._config(problem), layer_idx=0).to(x["q"].device)
        module.sinks = torch.nn.Parameter(x["sink"].detach())
        x["sink"] = module.sinks
        token = torch.arange(shape.tokens, device=x["q"].device)
        back = token[:, None] - token
        near = torch.where((back >= 0) & (back < shape.window), 0.0, -torch.inf).to(x["q"].dtype)[None, None]  # made once per forward

        def run() -> Results:
            picks = x["indices"]
            memory = torch.cat([x["kv"], x["entries"]], 1)[:, None]
            bias = memory.new_full((1, 1, shape.tokens, shape.entries + 1), -torch.inf)
            bias.scatter_(-1, torch.where(picks >= 0, picks, shape.entries).long()[:, None], 0.0)
            mask = torch.cat([near, bias[..., :-1]], -1)
            out, shares = self._stock.eager_attention_forward(
                module, x["q"].transpose(1, 2), memory, memory, mask, scaling=shape.width**-0.5
            )
            results = {"out": out}
            if operation != "attend":
                results["teacher"] = _teacher(shares.detach(), picks, shape.tokens)
            if operation == "attend-backward":
                results |= problem.gradients(out, x["d_out"], x)
            return results

        return run

    def _select(self, problem: Problem) -> Callable[[], Results]:
        shape, x = problem.case.shape, problem.inputs
        scorer = self._stock.DeepseekV4IndexerScorer(self._config(problem)).to(x["q_index"].device, x["q_index"].dtype)
        scorer.weights_proj = torch.nn.Identity()  # the hidden state we hand it is the weights
        topk = min(shape.topk, shape.entries)
        visible = problem.layout.entry_stop[..., None]
        entry = torch.arange(shape.entries, device=visible.device)

        def run() -> Results:
            with torch.no_grad():
                scores = scorer(x["q_index"], x["k_index"], x["weights"]).masked_fill(entry >= visible, -torch.inf)
                indices = scores.topk(topk, -1).indices
                return {"indices": torch.where(indices >= visible, -1, indices)}

        return run

    def _config(self, problem: Problem) -> Any:
        """A config of the case's attention, and as little as possible around it."""
        shape = problem.case.shape
        return self._stock.DeepseekV4Config(
            hidden_size=8,
            q_lora_rank=8,
            o_lora_rank=8,
            o_groups=1,
            num_hidden_layers=1,
            num_attention_heads=shape.heads,
            head_dim=shape.width,
            sliding_window=shape.window,
            index_n_heads=shape.index_heads,
            index_head_dim=shape.index_width,
            layer_types=["sliding_attention"],
        )


def _teacher(shares: Tensor, picks: Tensor, tokens: int) -> Tensor:
    """[1, T, K] from attention weights [1, H, T, T + E]."""
    mass = shares[..., tokens:].sum(1, dtype=torch.promote_types(shares.dtype, torch.float32))
    at = torch.where(picks >= 0, mass.gather(-1, picks.clamp(min=0).long()), 0)
    return at / at.sum(-1, keepdim=True).clamp(min=1e-30)
