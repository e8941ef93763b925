"""On rows of one document csakit's layers are the stock Transformers layers, to 1e-6; a misreading of the model is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from stock_layers import CSA, HCA, KINDS, TOPK, gap, hidden_states, one_document, own_layer, stock_config, stock_forward, stock_layer

import csakit
from csakit.checkpoints import official_names
from csakit.nn import layers, parts, rotary
from csakit.nn.rotary import Angles

TOLERANCE = 1e-6  # of the greatest value; the greatest seen is 4e-7 for outputs, 8e-7 for gradients


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 3, 4, 16, 75])
def test_outputs_are_those_of_the_stock_layer(kind: str, length: int) -> None:
    stock = stock_layer(kind)
    hidden = hidden_states(2, length)
    assert gap(own_layer(kind, stock)(hidden, one_document(2, length)).out, stock_forward(stock, hidden)) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_stock_layer(kind: str) -> None:
    stock = stock_layer(kind)
    own = own_layer(kind, stock)
    theirs, ours = (hidden_states(2, 75).requires_grad_() for _ in range(2))
    out = stock_forward(stock, theirs)
    above = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(above)
    own(ours, one_document(2, 75)).out.backward(above)
    want = official_names({name: parameter.grad for name, parameter in stock.named_parameters()})
    assert gap(ours.grad, theirs.grad) < TOLERANCE
    for name, parameter in own.named_parameters():
        if name.startswith("indexer."):
            assert parameter.grad is None and want[name] is None
        else:
            assert gap(parameter.grad, want[name]) < 2 * TOLERANCE, name


def test_rotations_without_yarn_are_those_of_the_stock_layer() -> None:
    stock = stock_layer(CSA, stock_config(rope_parameters=None))
    hidden = hidden_states(1, 40)
    own = own_layer(CSA, stock)
    assert own.config.rope_scaling is None
    assert gap(own(hidden, one_document(1, 40)).out, stock_forward(stock, hidden)) < TOLERANCE


def test_the_released_frequencies_keep_pairs_up_to_15_and_slow_pairs_from_25_down_16_times() -> None:
    config = csakit.nn.HybridAttentionConfig.v4_flash()
    device, dtype = torch.device("cpu"), torch.float64
    scaled = rotary.frequencies(config, compressed=True, device=device, dtype=dtype)
    plain = rotary.frequencies(replace(config, rope_scaling=None), compressed=True, device=device, dtype=dtype)
    slowed = plain / scaled
    torch.testing.assert_close(slowed[:16], torch.ones(16, dtype=dtype))
    torch.testing.assert_close(slowed[25:], torch.full((7,), 16.0, dtype=dtype))
    assert (slowed[16:25].diff() > 0).all()


# ---- misreadings of the model --------------------------------------------------------------------------------------------

_compress, _attend, _select = csakit.compress, csakit.attend, csakit.select
_rotate, _frequencies, _layout_of_layer = rotary.rotate, rotary.frequencies, parts.layout_of_layer


def _swap(x: torch.Tensor) -> torch.Tensor:
    return torch.cat(x.chunk(2, -1)[::-1], -1)


def _half_split(x: torch.Tensor, angles: Angles, *, inverse: bool = False) -> torch.Tensor:
    cos, sin = (angle.unflatten(1, (-1, *(1,) * (x.ndim - 3))) for angle in angles)
    sin = -sin if inverse else sin
    rest, low, high = x.split([x.shape[-1] - 2 * cos.shape[-1], cos.shape[-1], cos.shape[-1]], -1)
    return torch.cat([rest, low * cos - high * sin, high * cos + low * sin], -1)


def _rotations(monkeypatch: pytest.MonkeyPatch, rotate) -> None:
    for module in (layers, parts):
        monkeypatch.setattr(module, "rotate", rotate)
    monkeypatch.setattr(layers, "rotate_unit_rows", lambda x, angles, eps: rotate(parts.unit_rows(x, eps), angles))


def _moved_entries(monkeypatch: pytest.MonkeyPatch, move) -> None:
    original = csakit.Layout.to_entries
    monkeypatch.setattr(csakit.Layout, "to_entries", lambda layout, rows: move(original(layout, rows), layout.ratio))


def _other_layout(monkeypatch: pytest.MonkeyPatch, change) -> None:
    def layout_of_layer(*arguments):
        layout = _layout_of_layer(*arguments)
        return replace(layout, **change(layout))

    monkeypatch.setattr(layers, "layout_of_layer", layout_of_layer)
    monkeypatch.setattr(parts, "layout_of_layer", lambda hidden, layout, config, ratio: layout)


def _compressed(monkeypatch: pytest.MonkeyPatch, change) -> None:
    def compress(values, gates, bias, layout, *, overlap):
        return change(values, gates, bias, layout, overlap)

    monkeypatch.setattr(csakit, "compress", compress)


def _before_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    def entries(values, gates, bias, positions, layout, *, norm, rotate, overlap):
        return norm(rotate(_compress(values, gates, bias, layout, overlap=overlap), layout.to_entries(positions)))

    monkeypatch.setattr(parts, "compressed_entries", entries)


def _late(layout: csakit.Layout) -> dict[str, torch.Tensor]:
    closes = (layout.positions + 1) % layout.ratio == 0
    return {"entry_stop": torch.where(closes, layout.entry_stop - 1, layout.entry_stop)}


MISREADINGS = {
    "overlap halves swapped": lambda m: _compressed(
        m, lambda v, g, b, layout, overlap: _compress(*(map(_swap, (v, g, b)) if overlap else (v, g, b)), layout, overlap=overlap)
    ),
    "no overlap": lambda m: _compressed(
        m,
        lambda v, g, b, layout, overlap: _compress(
            *((x.chunk(2, -1)[1] for x in (v, g, b)) if overlap else (v, g, b)), layout, overlap=False
        ),
    ),
    "no position bias": lambda m: _compressed(
        m, lambda v, g, b, layout, overlap: _compress(v, g, torch.zeros_like(b), layout, overlap=overlap)
    ),
    "entries rotated at the end of their block": lambda m: _moved_entries(m, lambda at, ratio: at + ratio - 1),
    "entries rotated at their number": lambda m: _moved_entries(m, lambda at, ratio: at // ratio),
    "rotation before the norm": _before_norm,
    "half-split rotation": lambda m: _rotations(m, _half_split),
    "output not rotated back": lambda m: _rotations(m, lambda x, angles, *, inverse=False: x if inverse else _rotate(x, angles)),
    "YaRN left out": lambda m: m.setattr(
        rotary, "frequencies", lambda config, **options: _frequencies(replace(config, rope_scaling=None), **options)
    ),
    "an entry visible one token late": lambda m: _other_layout(m, _late),
    "window one token wider": lambda m: _other_layout(m, lambda layout: {"window_start": (layout.window_start - 1).clamp(min=0)}),
    "no sink": lambda m: m.setattr(csakit, "attend", lambda *a, sink, **k: _attend(*a, sink=None, **k)),
    "queries without their norm": lambda m: m.setattr(layers, "rotate_unit_rows", lambda x, angles, eps: _rotate(x, angles)),
    "index scores without ReLU": lambda m: m.setattr(csakit, "select", lambda *a, **k: _select(*a, relu=False, **k)),
}
CSA_ONLY = {"overlap halves swapped", "no overlap", "index scores without ReLU"}  # HCA has neither overlap nor indexer
CASES = [(name, kind) for name in MISREADINGS for kind in (CSA, HCA) if kind == CSA or name not in CSA_ONLY]


@pytest.mark.parametrize(("misreading", "kind"), CASES)
def test_a_misreading_of_the_model_breaks_the_agreement(misreading: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = stock_layer(kind)
    hidden = hidden_states(2, 75)
    own = own_layer(kind, stock)
    MISREADINGS[misreading](monkeypatch)
    assert gap(own(hidden, one_document(2, 75)).out, stock_forward(stock, hidden)) > 1000 * TOLERANCE


def test_the_selection_is_sparse_where_it_is_compared() -> None:
    stock = stock_layer(CSA)
    hidden = hidden_states(2, 75)
    out, dense = (
        own_layer(CSA, stock, indexer_loss=kind, indexer_loss_coef=0)(hidden, one_document(2, 75)).out for kind in ("sparse", "dense")
    )
    assert gap(dense, out) > 1000 * TOLERANCE
    assert TOPK < 75 // 4
