"""Where nothing is padded or packed the installed model is the stock one, to fp32 rounding; a misreading of the model is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from v4_model import CSA, HCA, KINDS, SLIDING, TOPK, gap, gradients, next_token_loss, tiny, tokens, worst_gap

import csakit
from csakit.integrations.transformers import deepseek_v4, install
from csakit.integrations.transformers.forwards import Call
from csakit.nn.rotary import Angles

TOLERANCE = 1e-5  # fp32 rounding through the layers: the greatest seen is 2e-6


def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize(
    "layers", [(SLIDING,), (CSA,), (HCA,), KINDS, (CSA, HCA, CSA)], ids=lambda layers: "+".join(kind[:3] for kind in layers)
)
@pytest.mark.parametrize("length", [1, 3, 4, 16, 75])
def test_logits_are_those_of_the_stock_model_in_every_layer_kind(layers: tuple[str, ...], length: int) -> None:
    model, ids = tiny(layers).eval(), tokens(2, length)
    stock = logits(model, ids)
    with install(model, objective="off"):
        assert gap(logits(model, ids), stock) < TOLERANCE


def test_gradients_of_the_language_model_are_those_of_the_stock_model() -> None:
    model, ids = tiny(), tokens(1, 75)
    next_token_loss(model(ids, use_cache=False).logits[0], ids[0]).backward()
    stock = gradients(model)
    assert not any(".indexer." in name for name in stock), "the stock model is known to train no indexer"
    with install(model, objective="off"):
        next_token_loss(model(ids).logits[0], ids[0]).backward()
        worst = worst_gap(gradients(model), stock)
    assert worst[0] < 1e-4, worst


def test_yarn_scaled_rotations_are_the_models_own() -> None:
    model = tiny(rope_parameters={"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}).eval()
    ids = tokens(1, 90)
    stock = logits(model, ids)
    with install(model):
        assert gap(logits(model, ids), stock) < TOLERANCE


def test_the_indexers_loss_is_the_objective_computed_from_the_stock_models_own_weights_and_scores() -> None:
    """The oracle sees only stock tensors: eager attention probabilities and the scorer's output."""
    model, ids = tiny(), tokens(2, 75)
    seen: dict[str, torch.Tensor] = {}
    attention = model.model.layers[1].self_attn
    hooks = [
        attention.register_forward_hook(lambda module, args, out: seen.update(weights=out[1])),
        attention.compressor.indexer.scorer.register_forward_hook(lambda module, args, out: seen.update(scores=out)),
        attention.compressor.indexer.register_forward_hook(lambda module, args, out: seen.update(picks=out)),
    ]
    with torch.no_grad():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    picked = torch.zeros(2, 75, 18 + 1, dtype=torch.bool).scatter_(2, seen["picks"].where(seen["picks"] >= 0, 18), True)[..., :18]
    mass = seen["weights"][..., 75:].double().sum(1) * picked
    teacher = mass / mass.sum(-1, keepdim=True).clamp(min=1e-300)
    student = seen["scores"].double().masked_fill(~picked, float("-inf")).log_softmax(-1)
    kl = torch.where(teacher > 0, teacher * (teacher.clamp(min=1e-300).log() - student), 0).sum(-1)
    with install(model) as handle:
        model(ids)
        assert float(handle.losses["layers.1"]) == pytest.approx(float(kl.sum() / ids.numel()), rel=1e-5)


# ---- misreadings of the model --------------------------------------------------------------------------------------------

_compress, _attend, _select, _call = csakit.compress, csakit.attend, csakit.select, Call.__init__


def _swap(x: torch.Tensor) -> torch.Tensor:
    return torch.cat(x.chunk(2, -1)[::-1], -1)


def _half_split(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    cos, sin = (torch.cat([angle, angle], -1).unflatten(1, (-1, *(1,) * (x.ndim - 3))) for angle in angles)
    rest, turned = x[..., : -cos.shape[-1]], x[..., -cos.shape[-1] :]
    low, high = turned.chunk(2, -1)
    return torch.cat([rest, turned * cos + torch.cat([-high, low], -1) * sin], -1)


def _moved_entries(monkeypatch: pytest.MonkeyPatch, move) -> None:
    original = csakit.Layout.to_entries
    monkeypatch.setattr(csakit.Layout, "to_entries", lambda layout, rows: move(original(layout, rows), layout.ratio))


def _other_layout(monkeypatch: pytest.MonkeyPatch, change) -> None:
    def init(self, forward, site):
        _call(self, forward, site)
        self.layout = replace(self.layout, **change(self.layout))

    monkeypatch.setattr(Call, "__init__", init)


def _before_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    def entries(module, hidden, call, *, name, overlap):
        values, gates = module.kv_proj(hidden), module.gate_proj(hidden)
        pooled = csakit.compress(values, gates, module.position_bias, call.layout, overlap=overlap)
        at = call.layout.to_entries(call.position_ids)
        return module.kv_norm(deepseek_v4._rotate(module, pooled, at, like=pooled))

    monkeypatch.setattr(deepseek_v4, "_entries", entries)


MISREADINGS = {
    "overlap halves swapped": lambda m: m.setattr(
        csakit,
        "compress",
        lambda v, g, b, layout, overlap: _compress(*((_swap(v), _swap(g), _swap(b)) if overlap else (v, g, b)), layout, overlap=overlap),
    ),
    "no overlap": lambda m: m.setattr(
        csakit,
        "compress",
        lambda v, g, b, layout, overlap: _compress(
            *((x.chunk(2, -1)[1] for x in (v, g, b)) if overlap else (v, g, b)), layout, overlap=False
        ),
    ),
    "no position bias": lambda m: m.setattr(
        csakit, "compress", lambda v, g, b, layout, overlap: _compress(v, g, torch.zeros_like(b), layout, overlap=overlap)
    ),
    "entries rotated at the end of their block": lambda m: _moved_entries(m, lambda at, ratio: at + ratio - 1),
    "entries rotated at their number": lambda m: _moved_entries(m, lambda at, ratio: at // ratio),
    "rotation before the norm": _before_norm,
    "half-split rotation": lambda m: m.setattr(deepseek_v4, "rotate", _half_split),
    "an entry visible one token late": lambda m: _other_layout(
        m, lambda layout: {"entry_stop": torch.where((layout.positions + 1) % layout.ratio == 0, layout.entry_stop - 1, layout.entry_stop)}
    ),
    "window one token wider": lambda m: _other_layout(m, lambda layout: {"window_start": (layout.window_start - 1).clamp(min=0)}),
    "no sink": lambda m: m.setattr(csakit, "attend", lambda *a, sink, **k: _attend(*a, sink=None, **k)),
    "index scores without ReLU": lambda m: m.setattr(csakit, "select", lambda *a, **k: _select(*a, relu=False, **k)),
}


@pytest.mark.parametrize("misreading", MISREADINGS)
def test_a_misreading_of_the_model_breaks_the_agreement(misreading: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny().eval(), tokens(2, 75)
    stock = logits(model, ids)
    with install(model):
        MISREADINGS[misreading](monkeypatch)
        assert gap(logits(model, ids), stock) > 1000 * TOLERANCE


def test_the_selection_is_sparse_where_it_is_compared() -> None:
    model, ids = tiny((CSA,)).eval(), tokens(2, 75)
    with install(model) as handle:
        sparse = logits(model, ids)
        handle.stage("dense")
        assert gap(logits(model, ids), sparse) > 1000 * TOLERANCE
        assert TOPK < 75 // 4
