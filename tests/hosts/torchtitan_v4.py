"""The overrides for torchtitan's DeepSeek-V4 model, applied by torchtitan's own mechanism to a twin of that model's attentions.

The release 0.3.0 has no DeepSeek-V4. The twin has what the overrides meet there: three inner attentions with their configurations
and the parameters of their forwards. Where torchtitan has the model, its own classes are used.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, make_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

import csakit
from csakit import Layout

ROWS, TOKENS, HEADS, WIDTH, INDEX_HEADS, INDEX_WIDTH, WINDOW, RATIO, TOPK, STEP = 2, 23, 3, 8, 2, 4, 5, 4, 2, 4 * 46
PLACE = "csakit.integrations.torchtitan.deepseek_v4"


def twin() -> None:
    """Registers a stand-in for torchtitan.models.deepseek_v4.attention, unless torchtitan has it."""
    try:
        import torchtitan.models.deepseek_v4.attention  # noqa: F401

        return
    except ModuleNotFoundError:
        pass
    from torchtitan.models.common.attention import FlexAttention

    module = ModuleType("torchtitan.models.deepseek_v4.attention")

    class Inner(FlexAttention):
        @dataclass(kw_only=True, slots=True)
        class Config(FlexAttention.Config):
            window_size: int
            compress_ratio: int
            softmax_scale: float
            index_topk: int

    class SlidingWindowAttention(Inner):
        @dataclass(kw_only=True, slots=True)
        class Config(Inner.Config):
            pass

        def forward(self, q, swa_k, attn_sink, *, attention_masks=None):
            raise AssertionError("the stock attention ran")

    class HeavilyCompressedAttention(Inner):
        @dataclass(kw_only=True, slots=True)
        class Config(Inner.Config):
            pass

        def forward(self, q, swa_k, cmp_k, attn_sink, *, attention_masks=None):
            raise AssertionError("the stock attention ran")

    class CompressedSparseAttention(Inner):
        @dataclass(kw_only=True, slots=True)
        class Config(Inner.Config):
            pass

        def forward(self, q, swa_k, cmp_k, idx_q, idx_k, idx_w, attn_sink, *, attention_masks=None):
            raise AssertionError("the stock attention ran")

    for kind in (SlidingWindowAttention, HeavilyCompressedAttention, CompressedSparseAttention):
        setattr(module, kind.__name__, kind)
    package = ModuleType("torchtitan.models.deepseek_v4")
    package.attention = module
    package.__path__ = []
    sys.modules |= {package.__name__: package, module.__name__: module}


def overridden(**options: Any) -> dict[str, Any]:
    """The three attentions, built from a tree of configurations to which torchtitan applied the overrides."""
    from torchtitan.config import OverrideConfig
    from torchtitan.config.override import apply_overrides
    from torchtitan.models.deepseek_v4 import attention as stock
    from torchtitan.protocols.module import Module

    class Tree(Module):
        @dataclass(kw_only=True, slots=True)
        class Config(Module.Config):
            layers: list

    sizes = {"window_size": WINDOW, "softmax_scale": WIDTH**-0.5, "index_topk": TOPK}
    kinds = {
        "csa": ("CompressedSparseAttention", RATIO),
        "hca": ("HeavilyCompressedAttention", 2),
        "sliding": ("SlidingWindowAttention", 0),
    }
    tree = Tree.Config(layers=[getattr(stock, name).Config(compress_ratio=ratio, **sizes) for name, ratio in kinds.values()])
    entry = {"tokens_per_step": STEP, "coef": 0.5, **options}
    apply_overrides(OverrideConfig(imports=[(f"{PLACE}.csa", entry), f"{PLACE}.hca", f"{PLACE}.sliding"]), tree)
    return {name: config.build() for name, config in zip(kinds, tree.layers)}


def tensors() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).requires_grad_()

    entries = TOKENS // RATIO
    return {
        "q": normal(ROWS, TOKENS, HEADS, WIDTH),
        "swa_k": normal(ROWS, TOKENS, WIDTH),
        "cmp_k": normal(ROWS, entries, WIDTH),
        "idx_q": normal(ROWS, TOKENS, INDEX_HEADS, INDEX_WIDTH),
        "idx_k": normal(ROWS, entries, INDEX_WIDTH),
        "idx_w": normal(ROWS, TOKENS, INDEX_HEADS),
        "attn_sink": normal(HEADS),
    }


def reference(x: dict[str, torch.Tensor], objective: str, denominator: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, mean KL per token, and what the indexer's gradients are those of, in dense float64."""
    layout = Layout.batch(ROWS, TOKENS, ratio=RATIO, window=WINDOW)
    with csakit.backend("reference"):
        chosen = csakit.select(x["idx_q"], x["idx_k"], x["idx_w"], TOPK, layout, scale=1.0).indices.long()
        indices = None if objective == "dense" else chosen
        attention = csakit.attend(x["q"], x["swa_k"], x["cmp_k"], layout, indices=indices, sink=x["attn_sink"])
        lse = csakit.attend(x["q"], x["swa_k"], x["cmp_k"], layout, sink=x["attn_sink"]).lse if denominator == "visible" else attention.lse
    seen = torch.arange(TOKENS // RATIO) < layout.entry_stop[..., None]
    if objective == "sparse":
        seen = (chosen[..., None] == torch.arange(TOKENS // RATIO)).any(2)
    mass = torch.einsum("bthd,bed->bteh", x["q"], x["cmp_k"]) * WIDTH**-0.5 - lse[:, :, None]
    some = seen.any(-1, keepdim=True)
    teacher = mass.logsumexp(-1).masked_fill(~seen, -torch.inf).masked_fill(~some, 0).softmax(-1).detach()
    scores = (torch.einsum("btic,bec->btei", x["idx_q"], x["idx_k"]).relu() * x["idx_w"][:, :, None]).sum(-1)
    student = scores.masked_fill(~seen, -torch.inf).masked_fill(~some, 0).log_softmax(-1)
    kl = torch.where(seen, torch.xlogy(teacher, teacher) - teacher * student.masked_fill(~seen, 0), 0).sum(-1)
    return attention.out, kl.mean(), 0.5 * kl.sum() / STEP


def check() -> dict[str, Any]:
    """What the tests compare: pairs (found, expected), and the words of errors."""
    twin()
    found: dict[str, Any] = {"pairs": {}, "errors": {}, "eval loss": None}
    for objective, denominator, folded in (("sparse", "attended", False), ("sparse", "visible", False), ("dense", "attended", True)):
        x = tensors()
        module = overridden(objective=objective, denominator=denominator)["csa"]
        if folded:  # one row, without its axis
            found["pairs"][f"{objective}, folded"] = folded_pair(module, x)
        out = module(*x.values())
        upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        grads = torch.autograd.grad((out * upstream).sum(), list(x.values()))
        y = {name: value.detach().clone().requires_grad_() for name, value in x.items()}
        want, kl, loss = reference(y, objective, denominator)
        expected = torch.autograd.grad((want * upstream).sum() + loss, list(y.values()), allow_unused=True)
        pairs = {"out": (out, want), "kl": (module.indexer_loss, kl)} | {f"d {n}": p for n, p in zip(x, zip(grads, expected))}
        found["pairs"] |= {f"{objective}, {denominator}: {name}": pair for name, pair in pairs.items()}
    x, modules = tensors(), overridden()
    cmp_k = x["swa_k"][:, ::2][:, : TOKENS // 2].detach()
    for name, given, ratio in (
        ("hca", (x["q"], x["swa_k"], cmp_k, x["attn_sink"]), 2),
        ("sliding", (x["q"], x["swa_k"], x["attn_sink"]), 1),
    ):
        layout = Layout.batch(ROWS, TOKENS, ratio=ratio, window=WINDOW)
        entries = cmp_k if name == "hca" else None
        want = csakit.attend(x["q"], x["swa_k"], entries, layout, sink=x["attn_sink"], scale=WIDTH**-0.5).out
        found["pairs"][name] = (modules[name](*given), want)
    module = modules["csa"].eval()
    module(*x.values())
    found["eval loss"] = module.indexer_loss
    found["errors"] = errors(x)
    found["pairs"] = {name: tuple(t.detach() for t in pair) for name, pair in found["pairs"].items()}
    return found


def folded_pair(module: Any, x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    row = {name: value if name == "attn_sink" else value[0] for name, value in x.items()}
    one = {name: value if name == "attn_sink" else value[:1] for name, value in x.items()}
    return module(*row.values()), module(*one.values())[0]


def errors(x: dict[str, torch.Tensor]) -> dict[str, str]:
    """What is said about what does not fit, in both models."""
    from torchtitan.models.deepseek_v4 import attention as stock

    from csakit.integrations.torchtitan import deepseek_v3, deepseek_v4

    def other(forward: Any, names: set[str]) -> ModuleType:
        kinds = {name: getattr(stock, name) for name in deepseek_v4._ARGUMENTS}
        config = make_dataclass("Config", [(name, int) for name in sorted(names)])
        kinds["CompressedSparseAttention"] = SimpleNamespace(forward=forward, Config=config)
        return SimpleNamespace(__name__="fork", **kinds)

    def parallel(**options: Any) -> SimpleNamespace:
        return SimpleNamespace(**{"tp_enabled": False, "cp_enabled": False, "spmd_backend": "spmd_types", **options})

    def grouped() -> torch.Tensor:
        mesh = SimpleNamespace(get_group=lambda: "the heads' group")
        module = overridden()["csa"]
        module.parallelize(SimpleNamespace(get_optional_mesh=lambda name: mesh if name == "tp" else None))
        return module(*x.values())

    known = {field.name for field in fields(stock.CompressedSparseAttention.Config)}
    right = stock.CompressedSparseAttention.forward
    calls = {
        "forward": lambda: deepseek_v4.check_stock(other(lambda self, q, kv, topk: None, known)),
        "fields": lambda: deepseek_v4.check_stock(other(right, known | {"aux_loss"})),
        "missing": lambda: deepseek_v4.check_stock(SimpleNamespace(__name__="fork")),
        "masks": lambda: overridden()["csa"](*x.values(), attention_masks=1),
        "tokens": lambda: overridden(tokens_per_step=None),
        "share": lambda: overridden(tokens_per_step=50)["csa"](*x.values()),
        "objective": lambda: overridden(objective="spare"),
        "denominator": lambda: overridden(denominator="all"),
        "coef": lambda: overridden(coef="1"),
        "group": grouped,
        "v3 forward": lambda: deepseek_v3.check_stock(SimpleNamespace(forward=lambda self, hidden: None)),
        "v3 layer": lambda: deepseek_v3.hybrid_attention(None, layer=[1]),
        "tensor parallel": lambda: deepseek_v3.HybridAttention.parallelize(None, parallel(tp_enabled=True)),
        "context parallel": lambda: deepseek_v3.HybridAttention.parallelize(None, parallel(cp_enabled=True)),
        "full dtensor": lambda: deepseek_v3.HybridAttention.parallelize(None, parallel(spmd_backend="full_dtensor")),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = "nothing"
        except (ImportError, TypeError, ValueError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said
