"""Megatron-LM's unfused CSA and DSA functions, imported from a checkout.

    attend            csa.unfused_compressed_sparse_attn, packed (THD) layout
    attend-teacher    the same, and its three teacher functions as its sparse loss calls them: the window and sink mass
                      (csa._compute_unfused_csa_non_compressed_lse), the probabilities of the picks and their normalisation
                      (dsa._compute_indexer_teacher_probabilities, dsa._normalize_indexer_teacher_target)
    select            dsa.fused_qk_topk_naive

Nothing of Megatron-LM is part of csakit. Its development branch imports triton.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..problem import Problem
from ..shapes import ATTENTION, Case
from . import Results, Unsupported

PACKAGE = "megatron.core.transformer.experimental_attention_variant"
CSA = ("unfused_compressed_sparse_attn", "_compute_unfused_csa_non_compressed_lse")
DSA = ("fused_qk_topk_naive", "_compute_indexer_teacher_probabilities", "_normalize_indexer_teacher_target")


class Megatron:
    """The functions of a checkout.

    Raises:
        ValueError: the path holds no Megatron-LM.
        Unsupported: it does not import here, or lacks one of the functions.
    """

    name = "megatron"

    def __init__(self, path: str) -> None:
        root = Path(path).expanduser().resolve()
        if not (root / "megatron" / "core").is_dir():
            raise ValueError(f"--megatron must be the root of a Megatron-LM checkout (it holds megatron/core); got {path}")
        if str(root) not in sys.path:
            sys.path.insert(0, str(root))
        try:
            self._csa: Any = importlib.import_module(f"{PACKAGE}.csa")
            self._dsa: Any = importlib.import_module(f"{PACKAGE}.dsa")
            self.version = importlib.import_module("megatron.core").__version__
        except ImportError as error:
            raise Unsupported(f"Megatron-LM in {root} does not import here: {error}") from error
        missing = [name for module, names in ((self._csa, CSA), (self._dsa, DSA)) for name in names if not hasattr(module, name)]
        if missing:
            raise Unsupported(f"Megatron-LM in {root} has no {', '.join(missing)}; the functions are on its development branch")

    def bytes_needed(self, case: Case) -> int:
        shape = case.shape
        if case.operation in ATTENTION:
            gathered = 4 * shape.tokens * (shape.window + shape.topk) * (shape.width + 4 * shape.heads)
            # the backward of its gather fills zeros of [tokens, tokens + entries, width]
            return 3 * gathered + 4 * shape.tokens * (shape.tokens + shape.entries) * shape.width * (case.operation == "attend-backward")
        return 3 * 4 * shape.tokens * shape.entries * shape.index_heads

    def prepare(self, problem: Problem) -> Callable[[], Results]:
        if problem.case.operation in ATTENTION:
            return self._attention(problem)
        if problem.case.operation == "select":
            return self._select(problem)
        raise Unsupported("Megatron-LM has no function for this objective alone")

    def _attention(self, problem: Problem) -> Callable[[], Results]:
        shape, operation, x = problem.case.shape, problem.case.operation, problem.leaves()
        scale = shape.width**-0.5
        back = torch.arange(shape.window - 1, -1, -1, device=x["q"].device)
        near = torch.arange(shape.tokens, device=back.device)[:, None] - back
        near = torch.where(near >= 0, near, -1).int()  # the same for every layer

        def run() -> Results:
            picks = x["indices"][0]
            query, memory = x["q"][0], torch.cat([x["kv"][0], x["entries"][0]])
            rows = torch.cat([torch.where(picks >= 0, picks + shape.tokens, -1), near], 1)
            out = self._csa.unfused_compressed_sparse_attn(query, memory, x["sink"], rows, scale).view(x["q"].shape)
            results = {"out": out}
            if operation != "attend":
                results["teacher"] = self._teacher(query.detach(), memory.detach(), x["entries"][0].detach(), x["sink"], picks, near, scale)
            if operation == "attend-backward":
                results |= problem.gradients(out, x["d_out"], x)
            return results

        return run

    def _teacher(self, query: Tensor, memory: Tensor, entries: Tensor, sink: Tensor, picks: Tensor, near: Tensor, scale: float) -> Tensor:
        """[1, T, K]: their functions, in the order of their sparse loss."""
        rest = self._csa._compute_unfused_csa_non_compressed_lse(query, memory, sink, near, scale)
        keys = entries.index_select(0, picks.clamp(min=0).flatten()).view(*picks.shape, -1)
        live = picks >= 0
        logits = (torch.einsum("rhd,rkd->rhk", query.float(), keys.float()) * scale).masked_fill(~live[:, None], -torch.inf)
        shares = self._dsa._compute_indexer_teacher_probabilities(logits.transpose(0, 1)[None], live[None], non_compressed_lse=rest)
        return self._dsa._normalize_indexer_teacher_target(shares.sum(1), rest)

    def _select(self, problem: Problem) -> Callable[[], Results]:
        shape, x = problem.case.shape, problem.inputs
        entry = torch.arange(shape.entries, device=x["q_index"].device)
        hidden = torch.where(entry >= problem.layout.entry_stop[..., None], -torch.inf, 0.0)
        scale = shape.index_width**-0.5 * shape.index_heads**-0.5

        def run() -> Results:
            q, k, weights = (x[name].transpose(0, 1) for name in ("q_index", "k_index", "weights"))
            return {"indices": self._dsa.fused_qk_topk_naive(q, k, weights * scale, shape.topk, mask=hidden)[1]}

        return run
