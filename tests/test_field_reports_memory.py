"""What went wrong for others, each as its kind. Padding, packing, memory and dtypes.

Shapes, seeds and positions vary, so that no special case passes. The name of a test says the kind; above it stand the
public reports that it answers.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import (
    LAYOUT_FIELDS,
    Sizes,
    assert_close,
    chain,
    gradients,
    normal,
    plain_attention,
    ragged_indices,
    random_inputs,
    visible,
)

import csakit
from csakit import Layout

INF = float("inf")


# ---- memory nobody may read, indices and padding ---------------------------------------------------------------------


# NVIDIA/cudnn-frontend#384
@pytest.mark.parametrize("spread", [1, 2, 8])
def test_gradients_add_up_when_many_queries_pick_the_same_entries(spread: int, backend: str) -> None:
    layout = Layout.batch(1, 40, ratio=1, window=0)
    q, entries, sink = normal(1, 40, 2, 4).requires_grad_(), normal(1, 40, 4, seed=1).requires_grad_(), normal(2, seed=2).requires_grad_()
    picks = torch.arange(spread).expand(1, 40, spread)
    indices = torch.where(picks <= torch.arange(40)[:, None], picks, -1)
    x = {"q": q, "entries": entries, "sink": sink}
    upstream = normal(1, 40, 2, 4, seed=3)
    kv = torch.zeros(1, 40, 4, dtype=torch.float64)
    out = plain_attention(q, kv, entries, sink, indices, layout, 0.5)[0]
    got = csakit.attend(q, None, entries, layout, indices=indices, sink=sink)
    assert_close(gradients(got.out, upstream, x), gradients(out, upstream, x))
    if spread == 1:  # one key and no sink: the value is copied, and its gradient counts the queries
        alone = csakit.attend(q, None, entries, layout, indices=indices)
        d = gradients(alone.out, torch.ones_like(upstream), x)
        assert_close(d["d_entries"][0, 0], torch.full((4,), 80.0, dtype=torch.float64))
        assert not d["d_entries"][0, 1:].any() and d["d_q"].abs().max() < 1e-12


# flashinfer-ai/flashinfer#5095, vllm-project/vllm#48364
@pytest.mark.parametrize("empty", [1, 4, 16, 64])
def test_empty_slots_anywhere_are_as_if_they_were_not_there(empty: int, backend: str) -> None:
    """Empty slots before, between and after the picks; entries nobody picks hold NaN."""
    layout = Layout.batch(1, 12, ratio=1, window=2)
    q, kv, entries = normal(1, 12, 2, 3), normal(1, 12, 3, seed=1), normal(1, 12, 3, seed=2)
    entries[:, 7] = math.nan
    picks = torch.tensor([3, 1], dtype=torch.int32).expand(1, 12, 2).masked_fill(torch.arange(12)[None, :, None] < 3, -1)
    none = torch.full((1, 12, empty), -1, dtype=torch.int32)
    variants = {"before": [none, picks], "after": [picks, none], "between": [picks[..., :1], none, picks[..., 1:]]}
    x = {"q": q.requires_grad_(), "kv": kv.requires_grad_(), "entries": entries.requires_grad_()}
    runs = {}
    for name, parts in dict(plain=[picks], **variants).items():
        indices = torch.cat(parts, -1)
        attention = csakit.attend(q, kv, entries, layout, indices=indices, teacher=True)
        mass = torch.cat([attention.log_mass[indices == e].reshape(1, -1) for e in (3, 1)])
        assert (attention.log_mass[indices < 0] == -INF).all()
        runs[name] = dict(out=attention.out, lse=attention.lse, mass=mass, **gradients(attention.out, normal(1, 12, 2, 3, seed=4), x))
        assert_close(runs[name], runs["plain"], label=name)
        assert runs[name]["out"].isfinite().all()


# NVIDIA/cudnn-frontend#624, NVIDIA/cudnn-frontend#676
@pytest.mark.parametrize("kind", ["empty rows", "all mass on the sink", "logits of 300", "logits of -300"])
def test_extreme_rows_have_finite_gradients_equal_to_autograd(kind: str, backend: str) -> None:
    layout = Layout.batch(2, 14, ratio=2, window=0 if kind == "empty rows" else 3)
    x = {"q": normal(2, 14, 2, 3), "kv": normal(2, 14, 3, seed=1), "entries": normal(2, 7, 3, seed=2), "sink": normal(2, seed=3)}
    indices = ragged_indices(layout, 3)
    if kind == "empty rows":
        indices[:, ::2] = -1
    if kind == "all mass on the sink":
        x["sink"] += 80
        x["q"] *= 0
    if "300" in kind:
        x["q"], x["kv"], x["entries"] = (
            t * 300 if "-" not in kind or n else -300 * t for n, t in enumerate((x["q"], x["kv"].sign(), x["entries"].sign()))
        )
        x["kv"], x["entries"] = x["kv"] / 300, x["entries"] / 300
    x = {name: t.requires_grad_() for name, t in x.items()}
    out, lse, mass = plain_attention(*x.values(), indices, layout, 1.0)
    got = csakit.attend(
        x["q"], x["kv"] if layout.window else None, x["entries"], layout, indices=indices, sink=x["sink"], scale=1.0, teacher=True
    )
    upstream = normal(*out.shape, seed=5)
    assert_close({"out": got.out, "lse": got.lse, "log_mass": got.log_mass}, {"out": out, "lse": lse, "log_mass": mass})
    found = gradients(got.out, upstream, x)
    assert all(g.isfinite().all() for g in found.values())
    assert_close(found, gradients(out, upstream, x))


# huggingface/transformers#45938, NVIDIA-NeMo/Automodel#2696
@pytest.mark.parametrize("ratio", [2, 3, 4])
@pytest.mark.parametrize("overlap", [True, False])
def test_pooling_takes_complete_blocks_of_one_document_only(ratio: int, overlap: bool, backend: str) -> None:
    """Gates 0: an entry is a mean of its own document's values, however large the values beside them are."""
    lengths = [2 * ratio + 1, ratio - 1, ratio, 3 * ratio]
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    layout = Layout.packed(offsets, ratio=ratio, window=1, tokens=int(offsets[-1]) + 2)
    halves = 2 if overlap else 1
    document = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    values = torch.full((1, int(offsets[-1]) + 2, halves), 1e6)
    values[0, : len(document), -1] = 1.0 + document
    if overlap:
        values[0, : len(document), 0] = 1.0 + document
    got = csakit.compress(values, torch.zeros_like(values), torch.zeros(ratio, halves), layout, overlap=overlap)
    want = [1.0] * 2 + [3.0] + [4.0] * 3
    assert got[0, :, 0].tolist() == pytest.approx(want + [0.0] * (layout.num_entries - len(want)))


# NVIDIA-NeMo/Automodel#2696
def test_the_first_block_of_a_document_has_no_previous_half(backend: str) -> None:
    """Not the previous document's (50.5), not zeros with a weight (0.5): the own block alone."""
    for first in (5, 4, 8):
        layout = Layout.packed(torch.tensor([0, first, first + 4]), ratio=4, window=1)
        values = torch.tensor([100.0, 1.0]).expand(1, first + 4, 2)
        got = csakit.compress(values, torch.zeros_like(values), torch.zeros(4, 2), layout)
        assert got[0, first // 4, 0] == 1.0 and got[0, 0, 0] == 1.0
        if first == 8:
            assert got[0, 1, 0] == 50.5


# NVIDIA-NeMo/Automodel#2633
def test_padding_is_what_the_mask_says_whatever_the_tokens_hold(backend: str) -> None:
    sizes = Sizes()
    inputs = random_inputs(2, 12, sizes)
    layout = Layout.from_mask(torch.tensor([[1] * 12, [0] * 12]), ratio=2, window=3)
    for name in ("q", "kv", "values", "q_index"):
        inputs[name][0, 4:7] = 0  # zeros in the middle are content
    results = chain(inputs, layout, sizes)
    assert results["lse"][0].isfinite().all() and results["out"][0, 4:7].any()
    assert (results["lse"][1] == -INF).all() and not results["out"][1].any() and not results["d_q"][1].any()


# onnxruntime/mobius#596
@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 20])
def test_the_window_is_w_tokens_counting_the_query(window: int, backend: str) -> None:
    """Which keys a query depends on, measured by its gradient; in a batch, in a second document, and behind left padding."""
    layouts = [
        (Layout.batch(1, 12, ratio=4, window=window), [0]),
        (Layout.packed(torch.tensor([0, 5, 12]), ratio=4, window=window), [0, 5]),
        (Layout.from_mask(torch.tensor([[0, 0, 0] + [1] * 9]), ratio=4, window=window), [3]),
    ]
    for layout, firsts in layouts:
        kv, q = normal(1, 12, 3).requires_grad_(), normal(1, 12, 1, 3, seed=1)
        out = csakit.attend(q, kv, None, layout).out
        for t in range(12):
            (grad,) = torch.autograd.grad(out[0, t].sum(), kv, retain_graph=True)
            first = max((f for f in firsts if f <= t), default=None)
            want = [] if first is None else list(range(max(first, t - window + 1), t + 1))
            assert grad[0].abs().sum(-1).nonzero().flatten().tolist() == want


# ml-explore/mlx-lm#1189
def test_what_only_an_entry_can_tell_reaches_every_query_that_sees_it(backend: str) -> None:
    """A needle past the window: dense and selected attention both depend on it, measured at every query."""
    layout = Layout.batch(1, 24, ratio=4, window=2)
    q, kv = normal(1, 24, 2, 3), normal(1, 24, 3, seed=1)
    for entry in (0, 2, 5):
        entries = normal(1, 6, 3, seed=2).requires_grad_()
        picked = torch.full((1, 24, 1), entry, dtype=torch.int32).masked_fill(~visible(layout)[..., entry : entry + 1], -1)
        for indices in (None, picked):
            out = csakit.attend(q, kv, entries, layout, indices=indices).out
            sees = [bool(torch.autograd.grad(out[0, t].sum(), entries, retain_graph=True)[0][0, entry].any()) for t in range(24)]
            assert sees == [t >= 4 * entry + 3 for t in range(24)]


# GDzhu01/vllm-ascend-deepseekv4#76
@pytest.mark.parametrize("ratio", [1, 3, 4, 128])
def test_every_length_has_its_complete_blocks_and_the_entries_of_a_loop(ratio: int, backend: str) -> None:
    for tokens in (1, ratio - 1, ratio, ratio + 1, 2 * ratio - 1, 2 * ratio, 2 * ratio + 1):
        layout = Layout.batch(1, tokens, ratio=ratio, window=1)
        values, gates, bias = normal(1, tokens, 4), normal(1, tokens, 4, seed=1), normal(ratio, 4, seed=2)
        got = csakit.compress(values, gates, bias, layout)
        assert got.shape == (1, tokens // ratio, 2)
        for e in range(tokens // ratio):
            own, previous = slice(e * ratio, (e + 1) * ratio), slice((e - 1) * ratio, e * ratio)
            slots, weights = [values[0, own, 2:]], [gates[0, own, 2:] + bias[:, 2:]]
            if e > 0:
                slots, weights = [*slots, values[0, previous, :2]], [*weights, gates[0, previous, :2] + bias[:, :2]]
            assert_close(got[0, e], (torch.cat(weights).softmax(0) * torch.cat(slots)).sum(0))


# PrimeIntellect-ai/prime-rl#3504
@pytest.mark.parametrize("objective", ["sparse", "dense"])
def test_rows_of_different_lengths_equal_rows_of_their_own(objective: str, backend: str) -> None:
    sizes = Sizes(objective=objective)
    lengths = [13, 4, 9, 1]
    mask = torch.arange(13) < torch.tensor(lengths)[:, None]
    inputs = random_inputs(4, 13, sizes)
    together = chain(inputs, Layout.from_mask(mask, ratio=2, window=3), sizes)
    for row, n in enumerate(lengths):
        alone = {name: x[row : row + 1, :n] if x.shape[:2] == (4, 13) else x for name, x in inputs.items()}
        want = chain(alone, Layout.batch(1, n, ratio=2, window=3), sizes)
        for name in ("out", "lse", "kl", "d_q", "d_kv", "d_values", "d_gates", "d_q_index", "d_weights", "d_index_values"):
            assert_close(together[name][row : row + 1, :n], want[name], label=name)


# NVIDIA/Megatron-LM#3282
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_repeated_offsets_are_empty_documents(dtype: torch.dtype) -> None:
    for repeated, plain in (([0, 16, 40, 40, 40], [0, 16, 40]), ([0, 2, 2, 4], [0, 2, 4]), ([0, 0, 0, 3], [0, 3]), ([0, 0], [0])):
        a, b = (Layout.packed(torch.tensor(o, dtype=dtype), ratio=2, window=3) for o in (repeated, plain))
        assert all(torch.equal(getattr(a, f), getattr(b, f)) for f in LAYOUT_FIELDS)


# NVIDIA/Megatron-LM#3282
def test_rows_without_tokens_run_through_all_verbs(backend: str) -> None:
    for layout in (
        Layout.packed(torch.tensor([0, 0]), ratio=2, window=3),
        Layout.batch(0, 6, ratio=2, window=3),
        Layout.batch(2, 0, ratio=2, window=3),
    ):
        for objective in ("sparse", "dense"):
            sizes = Sizes(objective=objective)
            results = chain(random_inputs(*layout.positions.shape, sizes), layout, sizes, divisor=None)
            assert results["loss"] == 0 and results["out"].shape == (*layout.positions.shape, 3, 4)


# NVIDIA-NeMo/Automodel#2731, NVIDIA-NeMo/Automodel#3802
@pytest.mark.parametrize("cut", [1, 5, 8, 11])
def test_query_slices_with_explicit_ranges_equal_the_whole(cut: int, backend: str) -> None:
    """Unequal slices of a layout's own integers, with all earlier rows of kv (chunked prefill): window_start is a row of kv."""
    whole = Layout.batch(1, 12, ratio=2, window=4)
    x = {"q": normal(1, 12, 2, 3), "kv": normal(1, 12, 3, seed=1), "entries": normal(1, 6, 3, seed=2)}
    x = {name: t.requires_grad_() for name, t in x.items()}
    indices = ragged_indices(whole, 2)
    want = csakit.attend(*x.values(), whole, indices=indices, teacher=True)
    parts = []
    for queries in (slice(0, cut), slice(cut, 12)):
        ranges = {f: getattr(whole, f)[:, queries] for f in ("positions", "valid", "window_start", "entry_start", "entry_stop")}
        part = replace(whole, **ranges, kv_offset=queries.start)
        parts.append(
            csakit.attend(x["q"][:, queries], x["kv"][:, : queries.stop], x["entries"], part, indices=indices[:, queries], teacher=True)
        )
    for name in ("out", "lse", "log_mass"):
        assert_close(torch.cat([getattr(p, name) for p in parts], 1), getattr(want, name))
    upstream = normal(1, 12, 2, 3, seed=3)
    assert_close(gradients(torch.cat([p.out for p in parts], 1), upstream, x), gradients(want.out, upstream, x))


# NVIDIA-NeMo/Automodel#3231
def test_offsets_padded_offsets_ids_and_masks_say_the_same() -> None:
    lengths, room = [5, 1, 8], [7, 2, 11]
    padded = torch.tensor([0, 7, 9, 20])
    a = Layout.packed(torch.tensor([0, 5, 6, 14]), ratio=3, window=4, cu_seqlens_padded=padded)
    ids = torch.cat([torch.cat([torch.full((n,), i), torch.full((r - n,), -1)]) for i, (n, r) in enumerate(zip(lengths, room))])
    b = Layout.from_document_ids(ids[None], ratio=3, window=4)
    c = Layout.packed(torch.tensor([0, 5, 6, 14]), ratio=3, window=4, cu_seqlens_padded=padded, tokens=20)
    d = Layout.from_document_ids((ids * 7 + 6 * ids.sign())[None].clamp(min=-1), ratio=3, window=4)
    for other in (b, c, d):
        assert all(torch.equal(getattr(a, f), getattr(other, f)) for f in LAYOUT_FIELDS)


# ---- lse, dtypes, memory layout --------------------------------------------------------------------------------------


# NVIDIA/Megatron-LM#7434
def test_an_empty_row_has_output_zero_lse_minus_infinity_and_gradient_zero(backend: str) -> None:
    layout = Layout.batch(1, 8, ratio=4, window=0)
    q, entries = normal(1, 8, 2, 3).requires_grad_(), normal(1, 2, 3, seed=1).requires_grad_()
    for indices in (None, torch.full((1, 8, 2), -1, dtype=torch.int32)):
        attention = csakit.attend(q, None, entries, layout, indices=indices)
        empty = slice(0, 3) if indices is None else slice(None)
        assert not attention.out[:, empty].any() and (attention.lse[:, empty] == -INF).all()
        d = gradients(attention.out, normal(1, 8, 2, 3, seed=2), {"q": q, "entries": entries})
        assert not d["d_q"][:, empty].any() and all(g.isfinite().all() for g in d.values())
        sink = torch.tensor([0.5, -2.0], dtype=torch.float64)
        with_sink = csakit.attend(q, None, entries, layout, indices=indices, sink=sink)
        assert torch.equal(with_sink.lse[:, empty], sink.expand_as(with_sink.lse[:, empty])) and not with_sink.out[:, empty].any()
        mass = csakit.teacher_log_mass(q, entries, attention.lse, layout, indices=indices)
        assert not mass.isnan().any()


# NVIDIA/Megatron-LM#7434, flashinfer-ai/flashinfer#4485
@pytest.mark.parametrize("base", ["e", "2"])
def test_other_kernels_lse_becomes_ours_in_either_base_and_empty_row_convention(base: str, backend: str) -> None:
    layout = Layout.batch(2, 9, ratio=2, window=3)
    q, kv, entries, sink = normal(2, 9, 3, 4), normal(2, 9, 4, seed=1), normal(2, 4, 4, seed=2), normal(3, seed=3)
    without = csakit.attend(q, kv, entries, layout).lse / (math.log(2) if base == "2" else 1)
    assert_close(csakit.lse_with_sink(without, sink, base=base), csakit.attend(q, kv, entries, layout, sink=sink).lse)
    zeros = torch.zeros(1, 4, 1, 1, dtype=torch.float64)
    four = csakit.attend(zeros, torch.zeros(1, 4, 1, dtype=torch.float64), None, Layout.batch(1, 4, ratio=4, window=4)).lse[0, 3, 0]
    assert four.item() == pytest.approx(1.386294, abs=1e-6)
    for empty in (INF, -INF):
        given = torch.full((2, 9, 3), empty, dtype=torch.float64)
        assert torch.equal(csakit.lse_with_sink(given, sink, base=base), sink.expand(2, 9, 3))
    no_sink = torch.full((3,), -INF, dtype=torch.float64)
    assert_close(csakit.lse_with_sink(without, no_sink, base=base), csakit.attend(q, kv, entries, layout).lse)
    assert (csakit.lse_with_sink(without, -no_sink, base=base) == INF).all()


# kohya-ss/musubi-tuner#1037
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype: torch.dtype, backend: str) -> None:
    for input_dtype in (torch.float32, torch.bfloat16, torch.float64):
        for objective in ("sparse", "dense"):
            sizes = Sizes(objective=objective, topk=3)
            layout = Layout.batch(2, 21, ratio=2, window=3)
            inputs = {name: t.to(input_dtype) for name, t in random_inputs(2, 21, sizes).items()}
            inputs["weight"] = inputs["weight"].float()
            plain = chain(inputs, layout, sizes)
            with torch.autocast("cpu", dtype=dtype):
                cast = chain(inputs, layout, sizes)
            for name, want in plain.items():
                assert cast[name].dtype is want.dtype and torch.equal(cast[name], want), name


# kohya-ss/musubi-tuner#1037
def test_inputs_of_several_precisions_are_unified_and_gradients_come_back_in_their_own(backend: str) -> None:
    """The widest decides: every mixture gives the result of its inputs converted to float64 or float32 beforehand."""
    layout = Layout.batch(1, 12, ratio=2, window=3)
    shapes = {
        "q": (1, 12, 2, 4),
        "kv": (1, 12, 4),
        "entries": (1, 6, 4),
        "q_index": (1, 12, 2, 3),
        "k_index": (1, 6, 3),
        "weights": (1, 12, 2),
    }
    exact = {n: torch.randint(-16, 17, s, generator=torch.Generator().manual_seed(5)).double() / 8 for n, s in shapes.items()}

    def run(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        index = x["q_index"], x["k_index"], x["weights"]
        selection = csakit.select(*index, 2, layout)
        attention = csakit.attend(x["q"], x["kv"], x["entries"], layout, indices=selection.indices, teacher=True)
        loss = csakit.distill(selection.scores, attention.log_mass, layout).loss
        dense = csakit.distill_dense(*index, x["q"], x["entries"], attention.lse, layout).loss
        found = gradients(loss + dense.to(loss.dtype) + attention.out.double().sum().to(loss.dtype), None, x)
        return dict(scores=selection.scores, lse=attention.lse, loss=loss, dense=dense, **found)

    want = run({name: t.clone().requires_grad_() for name, t in exact.items()})
    for wide, narrow in (
        (torch.float64, torch.float32),
        (torch.float64, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
    ):
        for number in range(2 ** len(shapes)):
            if number % 5 == 1:  # every fifth of the mixtures
                mixed = {n: t.to(wide if number >> i & 1 else narrow).requires_grad_() for i, (n, t) in enumerate(exact.items())}
                got = run(mixed)
                assert all(got[f"d_{n}"].dtype is t.dtype for n, t in mixed.items())
                assert_close(got, want, 2e-6, keys=("scores", "lse", "loss", "dense"))
                assert_close(got, want, 4 * torch.finfo(narrow).eps)


# NVIDIA/cudnn-frontend#354
def test_strided_and_sliced_inputs_give_the_same_result(backend: str) -> None:
    """Sequence-first views, heads-first views, channels of a wider tensor, every second row, and broadcast upstream gradients."""
    layout = Layout.batch(2, 12, ratio=2, window=3)
    plain = {"q": normal(2, 12, 3, 4), "kv": normal(2, 12, 4, seed=1), "entries": normal(2, 6, 4, seed=2), "sink": normal(3, seed=3)}
    plain |= {"q_index": normal(2, 12, 2, 3, seed=4), "k_index": normal(2, 6, 3, seed=5), "weights": normal(2, 12, 2, seed=6)}

    def sequence_first(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 2 else x

    def heads_first(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, -1).contiguous().transpose(1, -1) if x.ndim > 2 else x

    def wider(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.full_like(x, math.nan), x, torch.full_like(x, math.nan)], -1)[..., x.shape[-1] : 2 * x.shape[-1]]

    def every_second(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, torch.full_like(x, math.nan)], -1)[..., 0]

    def run(view) -> dict:
        x = {name: view(t).detach().requires_grad_() for name, t in plain.items()}
        selection = csakit.select(x["q_index"], x["k_index"], x["weights"], 2, layout)
        attention = csakit.attend(x["q"], x["kv"], x["entries"], layout, indices=selection.indices, sink=x["sink"], teacher=True)
        loss = csakit.distill(selection.scores, attention.log_mass, layout).loss
        dense = csakit.distill_dense(x["q_index"], x["k_index"], x["weights"], x["q"], x["entries"], attention.lse, layout).loss
        found = gradients(loss + dense + attention.out.sum(), None, x)  # sum: an expanded upstream gradient
        return dict(out=attention.out, loss=loss, dense=dense, **found)

    want = run(lambda x: x)
    for view in (sequence_first, heads_first, wider, every_second):
        assert_close(run(view), want, label=view.__name__)


# NVIDIA/cudnn-frontend#354
def test_an_upstream_gradient_of_two_doubles_every_gradient(backend: str) -> None:
    sizes, layout = Sizes(), Layout.batch(1, 12, ratio=2, window=3)
    x = {name: t.requires_grad_() for name, t in random_inputs(1, 12, sizes).items() if name in ("q_index", "weights", "q", "kv")}
    selection = csakit.select(x["q_index"], x["kv"][:, 1::2, :3], x["weights"], 2, layout)
    attention = csakit.attend(x["q"], x["kv"], x["kv"][:, ::2], layout, indices=selection.indices, teacher=True)
    loss = csakit.distill(selection.scores, attention.log_mass, layout).loss
    for result in (loss, attention.out):
        one, two = (gradients(result, u, x) for u in (1.0, 2.0))
        assert_close(two, {name: 2 * g for name, g in one.items()})


# modelscope/mcore-bridge#36
@pytest.mark.parametrize("tile", [1, 7, 64, 96])
def test_the_chunked_scorer_equals_the_whole_matrix(tile: int) -> None:
    layout = Layout.batch(1, 96, ratio=1, window=1)
    q, k, w = normal(1, 96, 8, 4), normal(1, 96, 4, seed=1), normal(1, 96, 8, seed=2)
    with csakit.backend("reference"):
        want = csakit.select(q, k, w, 5, layout)
    with csakit.backend("cpu", tile=tile):
        got = csakit.select(q, k, w, 5, layout)
    assert torch.equal(got.indices, want.indices)
    assert_close(got.scores, want.scores)


# NVIDIA-NeMo/Automodel#3802
def test_rows_beyond_two_to_the_31_are_addressed_in_64_bits() -> None:
    """Three rows of 2**30 tokens: their flat numbers pass 2**31. The memory is expanded, so that nothing of that size is there."""
    tokens = 2**30
    none = torch.zeros(1, 1, dtype=torch.int32).expand(3, tokens)
    last = torch.full((3, 1), tokens - 1, dtype=torch.int32)
    layout = Layout(
        ratio=tokens, window=1, num_entries=1, entry_token=last,
        positions=none, valid=none, window_start=none, entry_start=none, entry_stop=none,
    )  # fmt: skip
    assert layout.to_entries(torch.full((1, 1, 1), 7.0).expand(3, tokens, 1)).tolist() == [[[7.0]]] * 3
