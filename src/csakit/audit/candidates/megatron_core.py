"""The DeepSeek-V3.2 indexer loss of the released megatron-core package (`compute_dsa_indexer_loss`, 0.16.1) as a candidate."""

from __future__ import annotations

import importlib
import inspect
import warnings
from types import SimpleNamespace

import torch
from torch import Tensor

from ..case import Case, NotSupported

_MODULE = "megatron.core.transformer.experimental_attention_variant.dsa"
_PARAMETERS = ["index_scores", "topk_indices", "query", "key", "softmax_scale", "loss_coeff", "sparse_loss", "pg_collection"]


class DSA:
    """Index scores and their topk in plain PyTorch, teacher and loss from megatron-core.

    Raises:
        ImportError: megatron-core is not installed, or its function takes other arguments than that of 0.16.1.
    """

    name, dtype, form = "megatron-core compute_dsa_indexer_loss", torch.float32, "dsa"

    def __init__(self) -> None:
        hint = "pip install --no-deps megatron-core==0.16.1"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._loss = importlib.import_module(_MODULE).compute_dsa_indexer_loss
        except (ImportError, AttributeError) as error:
            raise ImportError(f"megatron-core-dsa needs {_MODULE}.compute_dsa_indexer_loss ({error}): {hint}") from error
        found = list(inspect.signature(self._loss).parameters)
        if found != _PARAMETERS:
            raise ImportError(f"megatron-core-dsa knows compute_dsa_indexer_loss{_PARAMETERS}; this Megatron's takes {found}: {hint}")

    def loss(self, case: Case) -> Tensor:
        """The loss with coefficient 1."""
        return self.with_coefficient(case, 1.0)

    def with_coefficient(self, case: Case, coefficient: float | None) -> Tensor:
        """The loss with this loss_coeff."""
        if case.cu_seqlens is not None or case.mask is not None:
            raise NotSupported("compute_dsa_indexer_loss knows neither packed rows nor padding")
        if case.divisor is not None or case.weight is not None:
            raise NotSupported("compute_dsa_indexer_loss has no row weights and no divisor of the caller's")
        scores = self._scores(case)
        keys = case.entries[:, :, None].expand(-1, -1, case.q.shape[2], -1).transpose(0, 1)
        picked = scores.topk(min(case.topk, scores.shape[-1]), dim=-1).indices
        group = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
        # its caller detaches queries and keys; the function adds to its scores in place
        return self._loss(
            scores.clone(),
            picked,
            case.q.detach().transpose(0, 1),
            keys.detach(),
            case.scale,
            coefficient,
            case.objective == "sparse",
            group,
        )

    @staticmethod
    def _scores(case: Case) -> Tensor:
        """Index scores [B, T, T], -inf in the future."""
        products = torch.einsum("btic,bec->btie", case.q_index, case.k_index).relu()
        scores = case.index_scale * torch.einsum("bti,btie->bte", case.weights, products)
        return scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
