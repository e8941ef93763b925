"""A DeepSeek-V4 layer of Transformers as a candidate, stock and with csakit installed in it.

A real `DeepseekV4ForCausalLM` with one CSA layer runs. Its projections and norms give the case's tensors and its rotations turn by
nothing, so that window, compression, selection, masks and attention are the host's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..case import Case, NoLoss, NotSupported, Result

_MODULE = "transformers.models.deepseek_v4.modeling_deepseek_v4"
_CSA = "compressed_sparse_attention"


class Stock:
    """The layer as it is: it selects with its indexer and has no loss to train it.

    Raises:
        ImportError: transformers is missing or has no DeepSeek-V4.
    """

    name, dtype = "Transformers DeepSeek-V4, stock", torch.float32

    def __init__(self) -> None:
        try:
            self._host = importlib.import_module(_MODULE)
        except ImportError as error:
            raise ImportError(f"transformers needs {_MODULE} ({error}): pip install csakit[hf]") from error

    def loss(self, case: Case) -> Result:
        """Nothing: raises NoLoss with what a backward from the model's output brings the indexer."""
        out = _Run(self._host, case).attend()
        names = ("q_index", "k_index", "weights")
        wanted = [x for name in names if (x := getattr(case, name)).requires_grad]
        found = torch.autograd.grad(out.square().sum(), wanted, allow_unused=True) if wanted and out.requires_grad else []
        reached = [name for name, gradient in zip(names, found) if gradient is not None]
        grads = (
            f"a gradient reaches {', '.join(reached)} alone" if reached else "its queries, keys and weights have grad None after backward"
        )
        raise NoLoss(f"there is no loss for the indexer: {grads}")

    def attend(self, case: Case) -> Tensor:
        """The layer's output [B, T, H, D]."""
        if case.objective == "dense":
            raise NotSupported("a stock layer always attends its selection")
        return _Run(self._host, case).attend()

    def select(self, case: Case) -> Tensor:
        """What its indexer selects [B, T, K]."""
        run = _Run(self._host, case)
        run.attend()
        return run.selected[0]

    def compress(self, case: Case) -> Tensor:
        """What its compressor pools [B, E, D]."""
        run = _Run(self._host, case)
        run.attend()
        return run.pooled[0]


class WithCsakit(Stock):
    """The layer with `csakit.integrations.transformers.install`."""

    name = "Transformers DeepSeek-V4 with csakit"

    def loss(self, case: Case) -> Result:
        """The loss the handle reports, with the gradients that a backward through the model's output brings."""
        return Result(self.with_coefficient(case, 1.0))

    def with_coefficient(self, case: Case, coefficient: float | None) -> Tensor:
        """The loss times the coefficient `install` was given."""
        if case.weight is not None:
            raise NotSupported("the handle takes no row weights")
        run = _Run(self._host, case)
        with self._installed(run, case, coefficient) as handle:
            nothing = run.attend().sum() * 0.0  # its backward brings the attached loss, and nothing else
            losses = list(handle.losses.values())
        value = losses[0] if losses else nothing.detach()
        return nothing + (coefficient or 0.0) * value

    def attend(self, case: Case) -> Tensor:
        """The layer's output [B, T, H, D]."""
        run = _Run(self._host, case)
        with self._installed(run, case, 0.0) as handle:
            if case.objective == "dense":
                handle.stage("dense")
            return run.attend()

    def select(self, case: Case) -> Tensor:
        """What csakit selects with its indexer [B, T, K]."""
        run = _Run(self._host, case)
        with self._installed(run, case, None):
            run.attend()
        return run.selected[0]

    def compress(self, case: Case) -> Tensor:
        """What csakit pools with its compressor [B, E, D]."""
        run = _Run(self._host, case)
        with self._installed(run, case, None):
            run.attend()
        return run.pooled[0]

    @contextmanager
    def _installed(self, run: _Run, case: Case, coefficient: float | None) -> Iterator[Any]:
        from csakit.integrations.transformers import install

        with install(run.model, objective=case.objective, coef=coefficient, denominator=case.denominator) as handle:
            handle.divisor = case.divisor
            yield handle


class _Given(nn.Module):
    """A module that gives a tensor, whatever it is called with."""

    def __init__(self, give: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.give = give

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return self.give(x)


class _NoRotation(nn.Module):
    """Angles of 0 for every position."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        cos = x.new_ones(*position_ids.shape, 1)
        return cos, torch.zeros_like(cos)


class _Run:
    """One forward of a model that is made for one case."""

    def __init__(self, host: Any, case: Case) -> None:
        self.width = case.q.shape[3]
        case = _with_even_widths(case)
        self.case = case
        self.selected: list[Tensor] = []
        self.pooled: list[Tensor] = []
        self._out: list[Tensor] = []
        heads, width = case.q.shape[2:]
        index_heads, index_width = case.q_index.shape[2:]
        config = host.DeepseekV4Config(
            vocab_size=8, hidden_size=8, num_hidden_layers=1, layer_types=[_CSA], mlp_layer_types=["moe"], num_attention_heads=heads,
            head_dim=width, partial_rotary_factor=2 / width, q_lora_rank=8, o_groups=1, o_lora_rank=4, index_n_heads=index_heads,
            index_head_dim=index_width, index_topk=case.topk, sliding_window=case.window,
            compress_rates={_CSA: case.ratio, "heavily_compressed_attention": 128}, n_routed_experts=2, num_experts_per_tok=1,
            moe_intermediate_size=4, hc_mult=1, hc_sinkhorn_iters=1, attn_implementation="eager", attention_dropout=0.0,
        )  # fmt: skip
        self.model = host.DeepseekV4ForCausalLM(config).to(case.q.dtype).train()
        self._fill(self.model.model.layers[0].self_attn)

    def attend(self) -> Tensor:
        """The attention output [B, T, H, D] of a forward of the whole model."""
        case = self.case
        rows, tokens = case.kv.shape[:2]
        documents: dict[str, Tensor] = {}
        if case.cu_seqlens is not None:
            ids = case.document_ids
            documents["position_ids"] = torch.arange(tokens)[None] - torch.searchsorted(ids[0].contiguous(), ids[0].contiguous())[None]
        if case.mask is not None:
            documents["attention_mask"] = case.mask.long()
            documents["position_ids"] = (case.mask.cumsum(1) - 1).clamp(min=0)  # what generation gives the model for padded rows
        self.model(input_ids=torch.ones(rows, tokens, dtype=torch.long), use_cache=False, **documents)
        return self._out[0][..., : self.width]

    def _fill(self, attention: Any) -> None:
        case, compressor = self.case, attention.compressor
        indexer = compressor.indexer
        for module in (attention, compressor, indexer):
            if hasattr(module, "rotary_emb"):
                module.rotary_emb = _NoRotation()
        self.model.model.rotary_emb = _NoRotation()

        def entries(pooled: Tensor) -> Tensor:
            self.pooled.append(pooled)
            return case.entries[:, : pooled.shape[1]]

        def captured(grouped: Tensor) -> Tensor:
            self._out.append(grouped.reshape(case.q.shape))
            return grouped.new_zeros(*grouped.shape[:2], 1, self.model.config.o_lora_rank)

        attention.q_b_proj, attention.q_b_norm = _Given(lambda _: case.q.flatten(2)), nn.Identity()
        attention.kv_proj, attention.kv_norm = _Given(lambda _: case.kv), nn.Identity()
        attention.o_a_proj = _Given(captured)
        attention.__dict__["sinks"] = case.sink
        del attention._parameters["sinks"]
        attention.scaling = case.scale
        compressor.kv_proj, compressor.gate_proj = _Given(lambda _: case.values), _Given(lambda _: case.gates)
        compressor.position_bias.data = case.bias.detach().clone()
        compressor.kv_norm = _Given(entries)
        blank = case.kv.new_zeros(*case.kv.shape[:2], 2 * case.k_index.shape[2])
        indexer.scorer.softmax_scale = case.index_scale / indexer.scorer.weights_scaling
        indexer.kv_proj, indexer.gate_proj = _Given(lambda _: blank), _Given(lambda _: blank)
        indexer.position_bias.data = torch.zeros_like(indexer.position_bias)
        indexer.kv_norm = _Given(lambda pooled: case.k_index[:, : pooled.shape[1]])
        indexer.q_b_proj = _Given(lambda _: case.q_index.flatten(2))
        indexer.scorer.weights_proj = _Given(lambda _: case.weights)
        indexer.register_forward_hook(lambda module, arguments, picks: self.selected.append(picks))


def _with_even_widths(case: Case) -> Case:
    """The case with a channel of zeros more where a width is odd: rotations turn pairs. Logits stay as they are."""
    odd, odd_index = case.q.shape[3] % 2, case.q_index.shape[3] % 2
    pads = {"q": odd, "kv": odd, "entries": odd, "q_index": odd_index, "k_index": odd_index}
    padded = {name: nn.functional.pad(getattr(case, name), (0, pad)) for name, pad in pads.items()}
    case = case.with_tensors(padded)
    pooled = 2 * case.q.shape[3]
    if case.values.shape[2] == pooled:
        return case
    blank = case.kv.new_zeros(*case.kv.shape[:2], pooled)
    return case.with_tensors({"values": blank, "gates": blank, "bias": case.kv.new_zeros(case.ratio, pooled)})
