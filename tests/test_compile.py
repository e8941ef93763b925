"""Layouts and verbs under torch.compile(fullgraph=True), under fake and meta tensors, equal to eager."""

from __future__ import annotations

import pytest
import torch
from helpers import LAYOUT_FIELDS, Sizes, assert_close, chain, random_inputs
from torch._subclasses.fake_tensor import FakeTensorMode

import csakit
from csakit import Layout

MASK = torch.tensor([[1] * 9 + [0] * 3, [0] * 2 + [1] * 10])
BUILD = {
    "batch": lambda t: Layout.batch(2, t, ratio=2, window=3),
    "packed": lambda t: Layout.packed(torch.tensor([0, 5, 5, t - 1]), ratio=2, window=3, tokens=t),
    "packed with room": lambda t: Layout.packed(
        torch.tensor([0, 4, 8]), ratio=2, window=3, tokens=t, cu_seqlens_padded=torch.tensor([0, 5, t])
    ),
    "mask": lambda t: Layout.from_mask(torch.arange(t).expand(2, t) > torch.tensor([[1], [-1]]), ratio=2, window=3),
    "document ids": lambda t: Layout.from_document_ids((torch.arange(t) // 5).expand(2, t), ratio=2, window=3),
    "another ratio": lambda t: Layout.batch(2, t, ratio=4, window=3).with_ratio(2),
    "shard": lambda t: Layout.batch(2, 2 * t, ratio=2, window=3).shard(0, 2),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def verbs(x: dict[str, torch.Tensor], layout: Layout, objective: str) -> dict[str, torch.Tensor]:
    """Forward results of all verbs; `total` leads backward to every input."""
    entries = csakit.compress(x["values"], x["gates"], x["bias"], layout)
    k_index = csakit.compress(x["index_values"], x["index_gates"], x["index_bias"], layout)
    index = x["q_index"], k_index, x["weights"]
    if objective == "sparse":
        selection = csakit.select(*index, 2, layout)
        attention = csakit.attend(x["q"], x["kv"], entries, layout, indices=selection.indices, sink=x["sink"], teacher=True)
        result = csakit.distill(selection.scores, attention.log_mass, layout, weight=x["weight"])
        found = {"indices": selection.indices, "scores": selection.scores, "log_mass": attention.log_mass}
    else:
        attention = csakit.attend(x["q"], x["kv"], entries, layout, sink=x["sink"])
        result = csakit.distill_dense(*index, x["q"], entries, attention.lse, layout, weight=x["weight"], divisor=5.0)
        found = {}
    out = csakit.attach_loss(attention.out, result.loss, weight=0.5)
    return dict(found, out=attention.out, lse=attention.lse, kl=result.kl, loss=result.loss, total=(x["d_out"] * out).sum())


def run(function, x: dict[str, torch.Tensor], *args) -> dict[str, torch.Tensor]:
    x = {name: t.detach().clone().requires_grad_(name not in ("d_out", "weight")) for name, t in x.items()}
    results = function(x, *args)
    results["total"].backward()
    found = {f"d_{name}": t.grad for name, t in x.items() if t.grad is not None}
    return {name: t.detach() for name, t in results.items()} | found


@pytest.mark.parametrize("objective", ["sparse", "dense"])
@pytest.mark.parametrize("kind", [k for k in BUILD if k != "shard"])
def test_layout_and_verbs_compile_whole_and_equal_eager(kind: str, objective: str) -> None:
    def step(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        layout = BUILD[kind](x["q"].shape[1])
        return verbs(x, layout, objective) | {f: getattr(layout, f) for f in LAYOUT_FIELDS}

    rows = BUILD[kind](12).positions.shape[0]
    x = random_inputs(rows, 12, Sizes(), seed=3)
    assert_close(run(torch.compile(step, fullgraph=True, backend="aot_eager"), x), run(step, x))


def test_one_compiled_function_serves_growing_lengths_and_both_modes() -> None:
    """Dynamic token count, with and without gradient, one selection."""

    def step(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return verbs(x, Layout.batch(2, x["q"].shape[1], ratio=2, window=3), "sparse")

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (12, 21):
        x = random_inputs(2, tokens, Sizes(), seed=tokens)
        want = run(step, x)
        assert_close(run(compiled, x), want)
        with torch.no_grad():
            assert torch.equal(compiled(x)["indices"], want["indices"])


def test_inductor_equals_eager() -> None:
    layout = Layout.packed(torch.tensor([0, 4, 9]), ratio=2, window=3)

    def step(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        selection = csakit.select(x["q_index"], x["k_index"], x["weights"], 2, layout)
        attention = csakit.attend(x["q"], x["kv"], x["entries"], layout, indices=selection.indices, sink=x["sink"], teacher=True)
        loss = csakit.distill(selection.scores, attention.log_mass, layout).loss
        return dict(selection._asdict(), **attention._asdict(), total=csakit.attach_loss(attention.out, loss).sum())

    inputs = random_inputs(1, 9, Sizes(), seed=1)
    x = {name: inputs[name] for name in ("q_index", "weights", "q", "kv", "sink")}
    x |= {"entries": inputs["values"][:, :4, :4], "k_index": inputs["index_values"][:, :4, :3]}
    assert_close(run(torch.compile(step, fullgraph=True), x), run(step, x))


def test_scales_made_from_dynamic_shapes_are_numbers_too() -> None:
    def step(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        layout = Layout.batch(x["q"].shape[0], x["q"].shape[1], ratio=2, window=3)
        selection = csakit.select(
            x["q_index"], x["values"][:, : layout.num_entries, :3], None, 2, layout, scale=x["q_index"].shape[3] ** -0.5
        )
        scale = x["q"].shape[3] ** -0.5
        attention = csakit.attend(x["q"], x["kv"], None, layout, scale=scale)
        return {"scores": selection.scores, "out": attention.out, "total": attention.out.sum() + selection.scores.clamp(min=-9).sum()}

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, tokens in ((2, 12), (3, 17)):
        x = random_inputs(rows, tokens, Sizes(), seed=tokens)
        assert_close(run(compiled, x), run(step, x))


def test_general_attention_compiles_whole() -> None:
    """KV heads, sets, separate values, and value_width with no window."""

    def step(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        layout = Layout.from_mask(MASK.to(torch.bool), ratio=2, window=3)
        selection = csakit.select(x["q_index"], x["k_index"], None, 2, layout, sets=2, relu=False)
        options = {"indices": selection.indices, "values": x["values"], "entry_values": x["entry_values"], "teacher": True}
        attention = csakit.attend(x["q"], x["kv"], x["entries"], layout, **options)
        loss = csakit.distill(selection.scores, attention.log_mass, layout).loss
        rows = Layout.from_mask(MASK.to(torch.bool), ratio=1, window=0)
        absorbed = csakit.attend(x["q"], None, rows.to_entries(x["kv"]), rows, value_width=2)
        return {"out": attention.out, "absorbed": absorbed.out, "total": loss + attention.out.square().sum() + absorbed.out.square().sum()}

    shapes = {
        "q": (2, 12, 4, 3), "kv": (2, 12, 2, 3), "entries": (2, 6, 2, 3), "values": (2, 12, 2, 5),
        "entry_values": (2, 6, 2, 5), "q_index": (2, 12, 4, 3), "k_index": (2, 6, 3)
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    x = {name: torch.randn(s, generator=generator, dtype=torch.float64) for name, s in shapes.items()}
    assert_close(run(torch.compile(step, fullgraph=True, backend="aot_eager"), x), run(step, x))


@pytest.mark.parametrize("kind", BUILD)
def test_layouts_are_built_without_reading_a_tensor_back(kind: str) -> None:
    """On fake and on meta tensors, from which nothing can be read, with the shapes and dtypes of real ones."""
    want = BUILD[kind](12)
    with FakeTensorMode():
        fake = BUILD[kind](12)
    with torch.device("meta"):
        meta = BUILD[kind](12)
    for layout in (fake, meta):
        for name in LAYOUT_FIELDS:
            a, b = getattr(layout, name), getattr(want, name)
            assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        assert (layout.num_entries, layout.kv_offset) == (want.num_entries, want.kv_offset)
    assert all(getattr(meta, name).is_meta for name in LAYOUT_FIELDS)


@pytest.mark.parametrize("objective", ["sparse", "dense"])
def test_the_whole_chain_runs_on_fake_tensors_forward_and_backward(objective: str) -> None:
    """Nothing in the verbs or their backward depends on a value: shapes and dtypes come out without data."""
    sizes = Sizes(objective=objective)
    layout = Layout.batch(2, 12, ratio=2, window=3)
    inputs = {name: t.bfloat16() for name, t in random_inputs(2, 12, sizes).items()}
    want = chain(inputs, layout, sizes)
    with FakeTensorMode():
        fake_inputs = {name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for name, t in inputs.items()}
        got = chain(fake_inputs, Layout.batch(2, 12, ratio=2, window=3), sizes)
    for name, t in want.items():
        assert (got[name].shape, got[name].dtype) == (t.shape, t.dtype), name


def test_the_dtypes_of_results_follow_the_inputs() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        for objective in ("sparse", "dense"):
            sizes = Sizes(objective=objective)
            inputs = {name: t.to(dtype) for name, t in random_inputs(1, 12, sizes).items()}
            results = chain(inputs, Layout.batch(1, 12, ratio=2, window=3), sizes)
            statistics = {"lse", "kl", "loss", "scores", "log_mass", "divisor"} & set(results)
            assert {results[name].dtype for name in statistics} == {wide}
            assert {results[name].dtype for name in ("out", "entries", *(n for n in results if n.startswith("d_")))} == {dtype}
