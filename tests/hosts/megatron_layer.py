"""A small CSA layer of a real Megatron-LM checkout on the CPU, random inputs, and what the layer should give, in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import csakit
from csakit import Layout

HEADS, WIDTH, ROPE, HIDDEN, LATENT, WINDOW, RATIO, TOPK = 4, 8, 4, 12, 10, 5, 4, 3
COEFFICIENT = 0.7


class Plain(nn.Linear):
    """A linear layer with Megatron's arguments and its pair of results."""

    def __init__(self, inputs: int, outputs: int, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


class Norm(nn.RMSNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)


class Data(NamedTuple):
    """Inputs of a layer for rows of T tokens, SBHD."""

    query: Tensor  # [T, B, H, D]
    key: Tensor  # [T, B, 1, D]
    x: Tensor  # [T, B, hidden]
    qr: Tensor  # [T, B, latent]


ONE_RANK = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def make_layer(csa: Any, monkeypatch: Any, tp: Any = ONE_RANK, cp: Any = ONE_RANK, mtp: bool = False, **settings: Any) -> Any:
    """A CSA layer in float64 and training mode; with tp one rank's heads of it."""
    from megatron.core.models.common.embeddings import RotaryEmbedding
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    # the Hadamard rotation needs a CUDA package; it turns index queries and keys alike, so no score depends on it
    monkeypatch.setattr(csa, "rotate_activation", lambda x: x)
    monkeypatch.setattr(csa.DSAIndexerLossAutoScaler, "main_loss_backward_scale", None)
    monkeypatch.setattr(csa.DSAIndexerLossLoggingHelper, "tracker", {})
    heads = HEADS // tp.size()
    config = MLATransformerConfig(num_layers=2, hidden_size=HIDDEN, num_attention_heads=heads, use_cpu_initialization=True)
    chosen = {
        "csa_window_size": WINDOW, "v_head_dim": WIDTH, "qk_pos_emb_head_dim": ROPE, "q_lora_rank": LATENT, "init_method": nn.init.normal_,
        "dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 6, "dsa_indexer_topk": TOPK, "dsa_indexer_loss_coeff": COEFFICIENT,
        "dsa_indexer_use_sparse_loss": True, "calculate_per_token_loss": False, "attention_backend": "unfused",
    }  # fmt: skip
    for name, value in (chosen | settings).items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    compressor = csa.ModuleSpec(csa.Compressor, submodules=csa.CompressorSubmodules(linear_wkv=Plain, linear_wgate=Plain, norm=Norm))
    indexer = csa.ModuleSpec(
        csa.CSAIndexer, submodules=csa.CSAIndexerSubmodules(linear_wq_b=Plain, linear_weights_proj=Plain, compressor=compressor)
    )
    torch.manual_seed(0)
    layer = csa.CompressedSparseAttention(
        config,
        csa.CompressedSparseAttentionSubmodules(compressor=compressor, indexer=indexer),
        layer_number=1,
        attn_mask_type=None,
        attention_type="self",
        pg_collection=SimpleNamespace(tp=tp, cp=cp),
        rotary_pos_emb=RotaryEmbedding(ROPE, rotary_percent=1.0, use_cpu_initialization=True, cp_group=cp),
        compress_ratio=RATIO,
        is_mtp_layer=mtp,
    )
    with torch.no_grad():
        layer.attn_sink.copy_(torch.tensor([0.5, -1.0, 2.0, 0.0]).chunk(tp.size())[tp.rank()])
    return layer.double().train()


def make_data(tokens: int, rows: int, seed: int = 1) -> Data:
    random = torch.Generator().manual_seed(seed)
    shapes = ((tokens, rows, HEADS, WIDTH), (tokens, rows, 1, WIDTH), (tokens, rows, HIDDEN), (tokens, rows, LATENT))
    query, *rest = (torch.randn(*shape, generator=random, dtype=torch.float64) for shape in shapes)
    return Data(*(x.requires_grad_() for x in (3 * query, *rest)))


def run(layer: Any, data: Data, packed: Any = None, boundary: Any = (None, None)) -> Tensor:
    """The layer's own forward; with PackedSeqParams the queries come as [T, H, D]. boundary: what lies before a context-parallel rank."""
    query = data.query if packed is None else data.query.squeeze(1)
    hidden, kv = boundary
    return layer(
        query, data.key, data.key, None, x=data.x, qr=data.qr, packed_seq_params=packed, boundary_hidden=hidden, boundary_kv=kv
    )  # fmt: skip


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def packed_params(real: list[int], room: list[int], **settings: Any) -> Any:
    """Documents of `real` tokens, each in `room` tokens of the row."""
    from megatron.core.packed_seq_params import PackedSeqParams

    padded = offsets(room) if room != real else None
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=offsets(real), cu_seqlens_kv=offsets(real), cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded,
        max_seqlen_q=max(room), max_seqlen_kv=max(room), **settings,
    )  # fmt: skip


def expected(layer: Any, data: Data, sparse: bool = True, denominator: str = "attended") -> tuple[Tensor, Tensor]:
    """(out [T, B, H * D], the sum of KL over tokens) of rows that are one document each, by the dense reference."""
    tokens, rows = data.query.shape[:2]
    kv_full, entries, _ = layer._build_kv_full(data.key.squeeze(2), data.x)
    if entries is None:  # too short: window only
        layout, kv = Layout.batch(rows, tokens, ratio=RATIO, window=WINDOW), kv_full.transpose(0, 1)
        seen = csakit.attend(data.query.transpose(0, 1), kv, None, layout, sink=layer.attn_sink, scale=layer.softmax_scale)
        return seen.out.flatten(2).transpose(0, 1), kv.new_zeros(())
    index_q, index_k, weights = (x.transpose(0, 1) for x in layer.indexer.forward_before_topk(data.x.detach(), data.qr.detach()))
    layout = Layout.batch(rows, tokens, ratio=RATIO, window=WINDOW)
    q, kv, entries = data.query.transpose(0, 1), kv_full[:tokens].transpose(0, 1), entries.transpose(0, 1)
    options = {"sink": layer.attn_sink, "scale": layer.softmax_scale}
    with csakit.backend("reference"):
        picked = csakit.select(index_q, index_k, weights, TOPK, layout, scale=layer.indexer.softmax_scale)
        seen = csakit.attend(q, kv, entries, layout, indices=picked.indices, **options)
        visible = csakit.attend(q, kv, entries, layout, **options).lse
        scores = picked.scores if sparse else csakit.index_scores(index_q, index_k, weights, layout, scale=layer.indexer.softmax_scale)
        lse = seen.lse if sparse and denominator == "attended" else visible
        if denominator.endswith("entries"):  # the mistake: neither window nor sink; over the selected or over all visible entries
            bare = Layout.batch(rows, tokens, ratio=RATIO, window=0)
            among = picked.indices if sparse and denominator == "selected entries" else None
            lse = csakit.attend(q, None, entries, bare, indices=among, scale=layer.softmax_scale).lse
        mass = csakit.teacher_log_mass(q, entries, lse, layout, indices=picked.indices if sparse else None, scale=layer.softmax_scale)
        loss = csakit.distill(scores, mass, layout, divisor=1.0).loss
    return seen.out.flatten(2).transpose(0, 1), loss


def by_document(layer: Any, data: Data, real: list[int], room: list[int], sparse: bool = True) -> tuple[Tensor, Tensor]:
    """What `expected` gives for each packed document by itself, 0 on padding: (out, the sum of KL)."""
    parts, total, begin = [], data.query.new_zeros(()), 0
    for length, space in zip(real, room):
        if length:
            part, kl = expected(layer, Data(*(x[begin : begin + length] for x in data)), sparse)
            parts.append(part)
            total = total + kl
        parts.append(data.query.new_zeros(space - length, 1, HEADS * WIDTH))
        begin += space
    parts.append(data.query.new_zeros(data.query.shape[0] - begin, 1, HEADS * WIDTH))
    return torch.cat(parts), total


def gradients(total: Tensor, layer: Any, data: Data) -> dict[str, Tensor]:
    names = dict(layer.named_parameters()) | data._asdict()
    found = torch.autograd.grad(total, list(names.values()), allow_unused=True, retain_graph=True)
    return {name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(names.items(), found)}
