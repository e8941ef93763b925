"""Hand-derived backward passes against difference quotients, in float64, for every input of every verb."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers import Sizes, gradients, random_inputs
from torch.autograd import gradcheck as full_gradcheck

import csakit
from csakit import Layout

PACKED = Layout.packed(torch.tensor([0, 1, 4, 4, 9]), ratio=2, window=3, tokens=10)
PADDED = Layout.from_mask(torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0]]), ratio=2, window=2)
NO_WINDOW = Layout.from_document_ids(torch.tensor([[0, 0, 0, 1, 1, -1, 2, 2]]), ratio=1, window=0)


def gradcheck(function, inputs: tuple) -> bool:
    """Difference quotients along random directions; the complete Jacobian where it is small."""
    return full_gradcheck(function, inputs, fast_mode=sum(x.numel() for x in inputs) > 150)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Memory:
    """The inputs of one way to call attend."""

    layout: Layout
    heads: int = 2
    kv_heads: int | None = None
    sets: int = 1
    sink: bool = True
    values: bool = False
    value_width: int | None = None
    dense: bool = False
    entries: bool = True


ATTEND = {
    "shared key and value": Memory(PACKED),
    "no sink": Memory(PACKED, sink=False),
    "padding": Memory(PADDED),
    "every visible entry": Memory(PADDED, dense=True),
    "sliding only": Memory(PADDED, entries=False),
    "separate values": Memory(PACKED, values=True),
    "kv heads": Memory(PACKED, heads=4, kv_heads=2, values=True),
    "kv heads of shared key and value": Memory(PADDED, heads=4, kv_heads=2),
    "sets": Memory(PACKED, heads=4, sets=2),
    "sets and kv heads": Memory(PADDED, heads=4, kv_heads=2, sets=4, values=True),
    "value width": Memory(PACKED, value_width=2),
    "value width of kv heads": Memory(PADDED, heads=4, kv_heads=2, value_width=2, dense=True),
    "no window": Memory(NO_WINDOW, value_width=2, sink=False),
    "no window, sets": Memory(NO_WINDOW, heads=4, sets=2, values=True),
}


@pytest.mark.parametrize("case", ATTEND)
def test_attend(case: str, backend: str) -> None:
    m = ATTEND[case]
    layout, (rows, tokens), width, value_width = m.layout, m.layout.positions.shape, 3, 2
    per_head = () if m.kv_heads is None else (m.kv_heads,)
    x = {"q": normal(rows, tokens, m.heads, width, seed=0)}
    if layout.window:
        x["kv"] = normal(rows, tokens, *per_head, width, seed=1)
    if m.entries:
        x["entries"] = normal(rows, layout.num_entries, *per_head, width, seed=2)
    if m.values:
        x |= {b: normal(*x[a].shape[:-1], value_width, seed=3) for a, b in (("kv", "values"), ("entries", "entry_values")) if a in x}
    if m.sink:
        x["sink"] = normal(m.heads, seed=4)
    indices = None
    if m.entries and not m.dense:
        index = normal(rows, tokens, m.sets, 3, seed=5), normal(rows, layout.num_entries, 3, seed=6)
        indices = csakit.select(*index, None, 2, layout, sets=m.sets).indices
    x = {name: t.requires_grad_() for name, t in x.items()}

    def out(*tensors: torch.Tensor) -> torch.Tensor:
        given = {"q": None, "kv": None, "entries": None} | dict(zip(x, tensors))
        return csakit.attend(**given, layout=layout, indices=indices, value_width=m.value_width, teacher=indices is not None).out

    assert gradcheck(out, tuple(x.values()))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("layout", [PACKED, PADDED, NO_WINDOW])
def test_compress(layout: Layout, overlap: bool, backend: str) -> None:
    width = 4 if overlap else 2
    x = [normal(*layout.positions.shape, width, seed=n).requires_grad_() for n in (0, 1)]
    bias = normal(layout.ratio, width, seed=2).requires_grad_()
    assert gradcheck(lambda *t: csakit.compress(*t, layout, overlap=overlap), (*x, bias))


@pytest.mark.parametrize("options", [{}, {"relu": False}, {"sets": 2}, {"sets": 2, "relu": False, "scale": 0.3}], ids=str)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("layout", [PACKED, PADDED])
def test_scores_of_select_and_index_scores(layout: Layout, weighted: bool, options: dict, backend: str) -> None:
    rows, tokens = layout.positions.shape
    x = [normal(rows, tokens, 4, 3, seed=0).requires_grad_(), normal(rows, layout.num_entries, 3, seed=1).requires_grad_()]
    if weighted:
        x.append(normal(rows, tokens, 4, seed=2).requires_grad_())

    def selected(q, k, w=None):
        selection = csakit.select(q, k, w, 2, layout, **options)
        return selection.scores[selection.indices >= 0]

    def every(q, k, w=None):
        scores = csakit.index_scores(q, k, w, layout, **options)
        return scores[scores.isfinite()]

    assert gradcheck(selected, tuple(x))
    assert gradcheck(every, tuple(x))


@pytest.mark.parametrize("sets", [1, 2])
@pytest.mark.parametrize("layout", [PACKED, PADDED])
def test_distill(layout: Layout, sets: int, backend: str) -> None:
    shape = (*layout.positions.shape, *((sets,) if sets > 1 else ()), 3)
    count = (layout.entry_stop - layout.entry_start).clamp(max=3)
    live = torch.arange(3) < count[..., None]
    live = live[:, :, None].expand(shape) if sets > 1 else live
    mass, weight = normal(*shape, seed=1).masked_fill(~live, -torch.inf), normal(*layout.positions.shape, seed=2).abs()
    scores = normal(*shape, seed=0).requires_grad_()
    assert gradcheck(lambda s: csakit.distill(s.masked_fill(~live, -torch.inf), mass, layout, weight=weight).loss, (scores,))


@pytest.mark.parametrize("sets", [1, 2])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("layout", [PACKED, PADDED])
def test_distill_dense(layout: Layout, relu: bool, sets: int, backend: str) -> None:
    rows, tokens = layout.positions.shape
    index = (normal(rows, tokens, 4, 3, seed=0), normal(rows, layout.num_entries, 3, seed=1), normal(rows, tokens, 4, seed=2))
    q, kv, entries, sink = (
        normal(rows, tokens, 4, 3, seed=3),
        normal(rows, tokens, 3, seed=4),
        normal(rows, layout.num_entries, 3, seed=5),
        normal(4, seed=6),
    )
    lse = csakit.attend(q, kv, entries, layout, sink=sink).lse
    options = {"relu": relu, "sets": sets, "weight": normal(rows, tokens, seed=7).abs(), "divisor": 3.0}
    for inputs in (index, index[:2]):
        x = tuple(t.requires_grad_() for t in inputs)
        assert gradcheck(lambda a, b, w=None: csakit.distill_dense(a, b, w, q, entries, lse, layout, **options).loss, x)


def test_attach_loss() -> None:
    """The backward of out + weight * loss, whatever arrives from above."""
    out, scores = normal(2, 3, seed=0).requires_grad_(), normal(4, seed=1).requires_grad_()
    for weight in (1.0, 0.25, torch.tensor(3.0), lambda: 2.0, lambda: torch.tensor(-1.5)):
        factor = float(weight() if callable(weight) else weight)
        for upstream in (1.0, 1e4):
            x = {"out": out, "scores": scores}
            result = csakit.attach_loss(out, scores.square().sum(), weight=weight)
            assert torch.equal(result, out)
            found = gradients(result, upstream, x)
            assert torch.equal(found["d_out"], torch.full_like(out, upstream))
            assert torch.allclose(found["d_scores"], factor * 2 * scores.detach(), rtol=1e-12)


def test_attach_loss_reads_a_callable_in_backward_and_needs_no_gradient_of_out() -> None:
    scale = [2.0]
    scores = normal(4, seed=1).requires_grad_()
    result = csakit.attach_loss(normal(2, 3, seed=0), scores.sum(), weight=lambda: scale[0])
    assert result.requires_grad
    scale[0] = 16.0
    result.sum().backward()
    assert scores.grad.tolist() == [16.0] * 4


def test_attach_loss_gives_the_same_gradients_under_both_kinds_of_checkpointing() -> None:
    sizes, layout = Sizes(), Layout.batch(1, 10, ratio=2, window=3)

    def layer(q_index: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        selection = csakit.select(q_index, kv[:, ::2, :3].detach(), None, 2, layout)
        attention = csakit.attend(q, kv, kv[:, 1::2], layout, indices=selection.indices, teacher=True)
        return csakit.attach_loss(attention.out, csakit.distill(selection.scores, attention.log_mass, layout).loss, weight=0.5)

    found = []
    for how in (None, False, True):
        x = {n: t.requires_grad_() for n, t in random_inputs(1, 10, sizes).items() if n in ("q_index", "q", "kv")}
        out = layer(*x.values()) if how is None else torch.utils.checkpoint.checkpoint(layer, *x.values(), use_reentrant=how)
        out.square().sum().backward()
        found.append({n: t.grad for n, t in x.items()})
    assert found[0]["q_index"].any()
    for other in found[1:]:
        assert all(torch.equal(other[n], g) for n, g in found[0].items())


@pytest.mark.parametrize("verb", ["attend", "select", "distill", "distill_dense", "compress"])
def test_a_second_derivative_is_right_or_refused(verb: str, backend: str) -> None:
    """A backward that cannot be differentiated says so; it never passes for a constant."""
    layout, sizes = Layout.batch(1, 8, ratio=2, window=3), Sizes()
    x = {n: t.requires_grad_() for n, t in random_inputs(1, 8, sizes).items() if n not in ("d_out", "weight")}
    entries, k_index = normal(1, 4, 4, seed=1).requires_grad_(), normal(1, 4, 3, seed=2).requires_grad_()
    index = x["q_index"], k_index, x["weights"]

    def result(leaf: torch.Tensor) -> torch.Tensor:
        if verb == "compress":
            return csakit.compress(leaf, x["gates"], x["bias"], layout)
        if verb == "attend":
            return csakit.attend(leaf, x["kv"], entries, layout).out
        if verb == "select":
            scores = csakit.select(leaf, *index[1:], 2, layout).scores
            return scores[scores.isfinite()]
        mass = torch.randn(1, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        if verb == "distill":
            return csakit.distill(leaf, mass, layout).loss
        return csakit.distill_dense(leaf, *index[1:], x["q"], entries, torch.zeros(1, 8, 3, dtype=torch.float64), layout).loss

    leaf = {
        "compress": x["values"],
        "attend": x["q"],
        "select": x["q_index"],
        "distill": normal(1, 8, 4, seed=4).requires_grad_(),
        "distill_dense": x["q_index"],
    }[verb]
    (first,) = torch.autograd.grad(result(leaf).sin().sum(), leaf, create_graph=True)
    leaf.grad = None
    try:
        first.sin().sum().backward()
    except RuntimeError as error:
        assert "once_differentiable" in str(error)
        return
    second = leaf.grad
    step = 1e-6
    direction = normal(*leaf.shape, seed=11)
    ends = []
    for sign in (1, -1):
        moved = (leaf.detach() + sign * step * direction).requires_grad_()
        ends.append(torch.autograd.grad(result(moved).sin().sum(), moved)[0].sin().sum())
    assert torch.allclose((ends[0] - ends[1]) / (2 * step), (second * direction).sum(), rtol=1e-4, atol=1e-7)
