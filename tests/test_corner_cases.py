"""The corner cases of the mathematics (section 8 of the specification), one after another, on every backend."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import (
    BACKENDS,
    Sizes,
    assert_close,
    assert_token_split_equals_whole,
    chain,
    gap,
    gradients,
    normalise,
    on,
    random_inputs,
    visible,
)

import csakit
from csakit import Layout

INF = float("inf")
INDEXER = ("d_q_index", "d_weights", "d_index_values", "d_index_gates", "d_index_bias")
SPARSE = Sizes(ratio=2, window=3, topk=2, heads=3)


def whole(sizes: Sizes, tokens: int = 15, rows: int = 2) -> Layout:
    return Layout.batch(rows, tokens, ratio=sizes.ratio, window=sizes.window)


def teacher_and_objective(results: dict) -> dict:
    return dict(teacher=normalise(results["log_mass"]), loss=results["loss"], **{name: results[name] for name in INDEXER})


# ---- 1: what the teacher depends on ----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["window keys", "one sink"])
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_window_keys_and_one_sink_move_the_teacher_unless_there_is_one_head(what: str, heads: int, backend: str) -> None:
    sizes = replace(SPARSE, heads=heads)
    inputs = random_inputs(2, 15, sizes, seed=heads)
    moved = {name: x.clone() for name, x in inputs.items()}
    if what == "one sink":
        moved["sink"][0] += 2
    else:
        moved["kv"] += torch.randn(moved["kv"].shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    before, after = (chain(x, whole(sizes), sizes) for x in (inputs, moved))
    assert torch.equal(before["picked"], after["picked"])
    assert gap(after["out"], before["out"]) > 1e-2
    for name, want in teacher_and_objective(before).items():
        change = gap(teacher_and_objective(after)[name], want)
        assert change < 1e-12 if heads == 1 else change > 1e-4, f"{name} changed by {change}"


# ---- 2 to 4: sinks and shifts ----------------------------------------------------------------------------------------


def test_one_constant_on_all_logits_of_a_head_changes_nothing_but_its_lse(backend: str) -> None:
    """An extra channel of 1 in every key and of the constant in one head's query shifts that head's window and entry logits."""
    sizes = replace(SPARSE, width=5)
    inputs, constant = random_inputs(2, 15, sizes), 3.25
    inputs["q"][..., -1] = 0
    layout, sink = whole(sizes), inputs["sink"]
    keys = torch.cat([inputs["kv"][..., :-1], torch.ones(2, 15, 1, dtype=torch.float64)], -1)
    entries = keys[:, : layout.num_entries] * torch.tensor([0.5, -1, 2, 1, 1])
    selected = csakit.select(inputs["q_index"], inputs["index_values"][:, : layout.num_entries, :3], inputs["weights"], 2, layout)
    shifted_q, shifted_sink = inputs["q"].clone(), sink.clone()
    shifted_q[:, :, 1, -1] += constant / 0.5
    shifted_sink[1] += constant
    before, after = (
        csakit.attend(q, keys, entries, layout, indices=selected.indices, sink=s, scale=0.5, teacher=True)
        for q, s in ((inputs["q"], sink), (shifted_q, shifted_sink))
    )
    assert_close(after.out, before.out)
    assert_close(after.log_mass, before.log_mass)
    assert_close(after.lse, before.lse + torch.tensor([0, constant, 0]))


@pytest.mark.parametrize("limit", ["no sink and no window", "sink -inf and no window", "window far below"])
def test_without_sink_and_window_the_head_is_the_softmax_over_its_entries(limit: str, backend: str) -> None:
    sizes = replace(SPARSE, window=0 if "no window" in limit else 1, sink=limit != "no sink and no window")
    inputs, layout = random_inputs(2, 15, sizes), whole(sizes)
    entries = torch.randn(2, layout.num_entries, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    entries[..., -1] = 0
    q, sink, kv = inputs["q"], None, None
    q[..., -1] = 500.0
    if limit == "window far below":
        kv = torch.tensor([0, 0, 0, -1.0], dtype=torch.float64).expand(2, 15, 4)
    if limit != "no sink and no window":
        sink = torch.full((3,), -INF, dtype=torch.float64)
    got = csakit.attend(q, kv, entries, layout, sink=sink, scale=1.0)
    logits = torch.einsum("bthd,bed->bthe", q, entries).masked_fill(~visible(layout)[:, :, None], -INF)
    sees = layout.entry_stop > layout.entry_start
    want = torch.einsum("bthe,bed->bthd", logits.softmax(-1), entries)
    assert_close(got.out[sees], want[sees])
    assert_close(got.lse[sees], logits.logsumexp(-1)[sees])
    assert got.out.isfinite().all()
    if limit != "window far below":
        assert not got.out[~sees].any() and (got.lse[~sees] == -INF).all()


def test_a_large_sink_takes_its_head_out_of_the_teacher(backend: str) -> None:
    inputs = random_inputs(2, 15, SPARSE)
    without = {name: x[:, :, 1:] if name in ("q", "d_out") else x for name, x in inputs.items()} | {"sink": inputs["sink"][1:]}
    rest = teacher_and_objective(chain(without, whole(SPARSE), replace(SPARSE, heads=2)))
    previous = INF
    for sink in (0.0, 10.0, 60.0, 300.0, INF):
        inputs["sink"][0] = sink
        results = chain(inputs, whole(SPARSE), SPARSE)
        distance = gap(teacher_and_objective(results)["teacher"], rest["teacher"])
        assert distance < previous or distance < 1e-12
        previous = distance
        assert all(results[name].isfinite().all() for name in results if name.startswith("d_"))
    assert_close(teacher_and_objective(results), rest)
    assert not results["out"][:, :, 0].any() and (results["lse"][:, :, 0] == INF).all() and not results["d_q"][:, :, 0].any()


def test_sinks_of_150_on_all_heads_leave_a_teacher_that_sums_to_one(backend: str) -> None:
    inputs = random_inputs(2, 15, SPARSE)
    for dtype in (torch.float64, torch.float32):
        x = {name: t.to(dtype) for name, t in inputs.items()}
        x["sink"] = torch.tensor([150.0, 151.0, 149.5], dtype=dtype)
        results = chain(x, whole(SPARSE), SPARSE)
        taught = (results["picked"] >= 0).any(-1)
        scores, mass = (results[name][taught][None] for name in ("scores", "log_mass"))
        layout = Layout.batch(1, scores.shape[1], ratio=2, window=1)
        (direction,) = torch.autograd.grad(csakit.distill(scores.requires_grad_(), mass, layout, divisor=1).loss, scores)
        teacher = scores.detach().softmax(-1) - direction
        assert_close(teacher.sum(-1), torch.ones_like(teacher[..., 0]), 1e-6 if dtype is torch.float32 else 1e-12)
        # in the limit lse is the sink
        indices = absolute(results["picked"], whole(SPARSE))
        limit = csakit.teacher_log_mass(x["q"], results["entries"], x["sink"].expand(2, 15, 3), whole(SPARSE), indices=indices)
        assert_close(teacher, limit[taught][None].softmax(-1), 1e-4 if dtype is torch.float32 else 1e-12)
        assert all(results[name].isfinite().all() for name in results if name.startswith("d_"))
        assert results["loss"] > 0


def absolute(picked: torch.Tensor, layout: Layout) -> torch.Tensor:
    return torch.where(picked >= 0, picked + layout.entry_start[..., None], -1)


def test_a_sink_of_plus_infinity_on_every_head_means_no_teacher_and_no_gradient(backend: str) -> None:
    for objective in ("sparse", "dense"):
        sizes = replace(SPARSE, objective=objective)
        inputs = random_inputs(2, 15, sizes)
        inputs["sink"][:] = INF
        results = chain(inputs, whole(sizes), sizes)
        assert results["loss"] == 0 and not results["kl"].any() and not results["out"].any()
        assert not any(results[name].any() for name in results if name.startswith("d_"))


# ---- 5 and 6: who sees whom ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 7])
def test_the_query_that_closes_a_block_is_the_first_to_see_it(ratio: int, backend: str) -> None:
    sizes = replace(SPARSE, ratio=ratio, topk=3)
    tokens = 4 * ratio + 2
    layout = whole(sizes, tokens)
    assert layout.entry_stop[0].tolist() == [(p + 1) // ratio for p in range(tokens)]
    for entry in range(layout.num_entries):
        closing = ratio * entry + ratio - 1
        assert visible(layout)[0, :, entry].tolist() == [p >= closing for p in range(tokens)]
    results = chain(random_inputs(2, tokens, sizes), layout, sizes)
    early = slice(0, ratio - 1)
    for name in ("kl", "d_q_index", "d_weights"):
        assert not results[name][:, early].any(), name
    assert not results["kl"][:, ratio - 1].any(), "one candidate has KL 0"
    assert (results["picked"][:, ratio - 1] >= 0).sum(-1).eq(1).all()
    assert results["kl"][:, 2 * ratio - 1].all()


@pytest.mark.parametrize("extra", [0, 1, 5])
def test_sparse_equals_dense_when_k_covers_every_visible_entry(extra: int, backend: str) -> None:
    sizes = replace(SPARSE, topk=15 // 2 + extra)
    inputs = random_inputs(2, 15, sizes)
    results = [chain(inputs, whole(sizes), replace(sizes, objective=o), divisor=None) for o in ("sparse", "dense")]
    assert_close(*results, keys=list(results[1]))
    fewer = chain(inputs, whole(sizes), replace(sizes, topk=3), divisor=None)
    assert gap(fewer["loss"], results[1]["loss"]) > 1e-3


def test_one_candidate_teaches_nothing(backend: str) -> None:
    sizes = replace(SPARSE, topk=1)
    results = chain(random_inputs(2, 15, sizes), whole(sizes), sizes)
    assert results["loss"] == 0
    assert not any(results[name].any() for name in INDEXER)


# ---- 7 to 9: scores --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_ties_go_to_the_lowest_entry(seed: int, backend: str) -> None:
    """Small whole numbers and ReLU make most scores equal; the expected choice comes from plain Python sorting."""
    generator = torch.Generator().manual_seed(seed)
    layout = Layout.batch(1, 24, ratio=2, window=3)
    q = torch.randint(-1, 2, (1, 24, 2, 3), generator=generator).double()
    k = torch.randint(-1, 2, (1, 12, 3), generator=generator).double()
    weights = torch.randint(-1, 2, (1, 24, 2), generator=generator).double()
    ties = 0
    for topk in (1, 3, 7, 12, 20):
        indices = csakit.select(q, k, weights, topk, layout, scale=1.0).indices
        for t in range(24):
            scores = [sum(float(w) * max(float(a @ k[0, e]), 0) for w, a in zip(weights[0, t], q[0, t])) for e in range((t + 1) // 2)]
            order = sorted(range(len(scores)), key=lambda e: (-scores[e], e))
            want = sorted(order[:topk])
            ties += len(order) > topk and scores[order[topk - 1]] == scores[order[topk]]
            assert indices[0, t].tolist() == want + [-1] * (topk - len(want))
    assert ties > 20, "the case is about ties at the border of the selection"


def test_negative_weights_still_select_visible_entries_only(backend: str) -> None:
    sizes = replace(SPARSE, topk=4)
    inputs = random_inputs(2, 15, sizes)
    inputs["weights"] = -inputs["weights"].abs() - 0.1
    layout = Layout.packed(torch.tensor([0, 6, 15]), ratio=2, window=3)
    inputs = {name: x[:1] if x.ndim > 1 and x.shape[:2] == (2, 15) else x for name, x in inputs.items()}
    results = chain(inputs, layout, sizes)
    seen = (layout.entry_stop - layout.entry_start).clamp(max=4)
    assert torch.equal((results["picked"] >= 0).sum(-1), seen)
    assert (results["picked"] < (layout.entry_stop - layout.entry_start)[..., None]).all()
    assert (results["scores"].isfinite() == (results["picked"] >= 0)).all()


def test_scores_of_any_magnitude_have_an_exact_loss_and_gradient() -> None:
    layout = Layout.batch(1, 4, ratio=2, window=1)
    for magnitude in (200.0, 1e3, 1e4):
        scores = torch.full((1, 4, 2), -INF)
        scores[0, 3] = torch.tensor([-magnitude, 0.0])
        scores[0, 1, 0] = magnitude
        scores.requires_grad_()
        log_mass = torch.full((1, 4, 2), -INF)
        log_mass[0, 3, 0], log_mass[0, 1, 0] = -100.0, 5.0
        result = csakit.distill(scores, log_mass, layout, divisor=1)
        (grad,) = torch.autograd.grad(result.loss, scores)
        assert result.loss.item() == magnitude
        assert grad[0, 3].tolist() == [-1, 1] and not grad[0, :3].any()


# ---- 10 to 12: memory nobody may read --------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, INF, -INF])
def test_entries_a_query_does_not_see_have_no_influence_even_when_not_finite(poison: float, backend: str) -> None:
    """The upstream gradient of the rows that do see the poisoned entry is 0 and their own gradients are not looked at."""
    layout = Layout.batch(1, 16, ratio=2, window=3)
    generator = torch.Generator().manual_seed(0)
    q, kv, entries = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((1, 16, 2, 4), (1, 16, 4), (1, 8, 4)))
    hidden = entries.clone()
    hidden[:, 5:] = poison
    early = slice(0, 11)  # token 11 closes block 5
    for indices in (None, torch.arange(8, dtype=torch.int32).expand(1, 16, 8).masked_fill(~visible(layout), -1)):
        clean, dirty = (csakit.attend(q, kv, e, layout, indices=indices) for e in (entries, hidden))
        assert torch.equal(dirty.out[:, early], clean.out[:, early]) or gap(dirty.out[:, early], clean.out[:, early]) < 1e-12
        assert_close(dirty.lse[:, early], clean.lse[:, early])


@pytest.mark.parametrize("poison", [math.nan, INF, -INF])
@pytest.mark.parametrize("topk", [2, 7])
def test_entries_nobody_attends_have_no_influence_even_when_not_finite(poison: float, topk: int, backend: str) -> None:
    """Results and all gradients equal those with zeros in the entries that no query selected."""
    layout = Layout.batch(1, 16, ratio=2, window=3)
    generator = torch.Generator().manual_seed(1)
    shapes = {"q": (1, 16, 2, 4), "kv": (1, 16, 4), "entries": (1, 8, 4)}
    inputs = {name: torch.randn(s, generator=generator, dtype=torch.float64) for name, s in shapes.items()}
    unused = torch.tensor([1, 4, 7])
    indices = torch.arange(8, dtype=torch.int32).expand(1, 16, 8).masked_fill(~visible(layout), -1)
    indices = indices.masked_fill(torch.isin(indices, unused), -1).sort(descending=True).values[..., :topk]
    runs = []
    for value in (0.0, poison):
        x = {name: t.clone() for name, t in inputs.items()}
        x["entries"][:, unused] = value
        x = {name: t.requires_grad_() for name, t in x.items()}
        attention = csakit.attend(*x.values(), layout, indices=indices, teacher=True)
        runs.append(
            {"out": attention.out, "lse": attention.lse, "log_mass": attention.log_mass} | gradients(attention.out.square().sum(), None, x)
        )
    assert_close(runs[1], runs[0])


def test_other_documents_padding_and_spare_capacity_have_no_influence(backend: str) -> None:
    """Everything outside the second document is replaced by NaN: its results do not change."""
    sizes = replace(SPARSE, ratio=3)
    layout = Layout.packed(torch.tensor([0, 7, 18]), ratio=3, window=3, tokens=21)
    inputs = random_inputs(1, 21, sizes)
    clean = chain(inputs, layout, sizes)
    own = slice(7, 18)
    poisoned = {}
    for name, x in inputs.items():
        poisoned[name] = x.clone()
        if x.shape[:2] == (1, 21) and name not in ("d_out", "weight"):
            poisoned[name][:, :7] = math.nan
            poisoned[name][:, 18:] = math.nan
    dirty = chain(poisoned, layout, sizes)
    for name in ("out", "lse", "picked", "scores", "log_mass", "kl"):
        assert_close(dirty[name][:, own], clean[name][:, own], label=name)
    for name in ("d_q", "d_kv", "d_values", "d_gates", "d_q_index", "d_weights", "d_index_values", "d_index_gates"):
        assert_close(dirty[name][:, own], clean[name][:, own], label=name)


# ---- 13 to 18 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_log_mass_of_head_ranks_combines_before_it_is_normalised(ranks: int, backend: str) -> None:
    sizes = replace(SPARSE, heads=4)
    inputs, layout = random_inputs(2, 15, sizes), whole(sizes)
    results = chain(inputs, layout, sizes)
    indices = absolute(results["picked"], layout)
    parts = [
        csakit.attend(q, inputs["kv"], results["entries"], layout, indices=indices, sink=sink, teacher=True)
        for q, sink in zip(inputs["q"].chunk(ranks, 2), inputs["sink"].chunk(ranks))
    ]
    assert_close(torch.cat([p.out for p in parts], 2), results["out"])
    together = torch.stack([p.log_mass for p in parts]).logsumexp(0)
    assert_close(together, results["log_mass"])
    mean = torch.stack([normalise(p.log_mass) for p in parts]).mean(0)
    assert gap(mean, normalise(results["log_mass"])) < 1e-12 if ranks == 1 else gap(mean, normalise(results["log_mass"])) > 1e-3


@pytest.mark.parametrize("objective", ["sparse", "dense"])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_token_ranks_add_up_with_cuts_inside_a_block_and_inside_a_document(world: int, objective: str, backend: str) -> None:
    sizes = Sizes(ratio=3, window=4, topk=2, objective=objective)
    layout = Layout.packed(torch.tensor([0, 5, 5, 16, 23]), ratio=3, window=4, tokens=24)
    assert_token_split_equals_whole(random_inputs(1, 24, sizes), layout, sizes, world)


@pytest.mark.parametrize("weight", [0, 0.0, torch.tensor(0.0), lambda: 0.0])
def test_an_attached_loss_of_weight_zero_gives_gradients_of_zeros_not_none(weight) -> None:
    scores = torch.randn(1, 6, 2, requires_grad=True)
    out = torch.randn(1, 6, 3, requires_grad=True)
    layout = Layout.batch(1, 6, ratio=1, window=1)
    loss = csakit.distill(scores, torch.randn(1, 6, 2), layout).loss
    csakit.attach_loss(out, loss, weight=weight).square().sum().backward()
    assert torch.equal(out.grad, 2 * out.detach())
    assert scores.grad is not None and not scores.grad.any()


@pytest.mark.parametrize("objective", ["sparse", "dense"])
def test_a_batch_of_padding_has_loss_zero_and_finite_results(objective: str, backend: str) -> None:
    sizes = replace(SPARSE, objective=objective)
    layout = Layout.from_mask(torch.zeros(2, 9, dtype=torch.bool), ratio=2, window=3)
    inputs = {
        name: x if name in ("d_out", "weight") or x.shape[:2] != (2, 9) else torch.full_like(x, math.nan)
        for name, x in random_inputs(2, 9, sizes).items()
    }
    results = chain(inputs, layout, sizes, divisor=None)
    assert results["loss"] == 0 and results["divisor"] == 0 and not results["kl"].any() and not results["out"].any()
    assert (results["lse"] == -INF).all()
    assert not any(results[name].any() for name in results if name.startswith("d_"))


@pytest.mark.parametrize("objective", ["sparse", "dense"])
def test_a_row_of_padding_beside_a_real_row_changes_nothing_there(objective: str, backend: str) -> None:
    sizes = replace(SPARSE, objective=objective)
    inputs = random_inputs(2, 9, sizes)
    mask = torch.tensor([[True] * 9, [False] * 9])
    both = chain(inputs, Layout.from_mask(mask, ratio=2, window=3), sizes, divisor=None)
    first = chain({n: x[:1] if x.shape[:2] == (2, 9) else x for n, x in inputs.items()}, whole(sizes, 9, 1), sizes, divisor=None)
    for name, want in first.items():
        assert_close(both[name][:1] if want.shape[:1] == (1,) else both[name], want)
    assert not any(both[name][1].any() for name in ("out", "kl", "d_q", "d_kv", "d_values", "d_q_index"))


@pytest.mark.parametrize("objective", ["sparse", "dense"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_keep_statistics_scores_selection_and_loss_in_float32(dtype: torch.dtype, objective: str, backend: str) -> None:
    """Inputs exact in 16 bits: everything but the returned 16-bit values equals the float64 run."""
    sizes = replace(SPARSE, objective=objective)
    generator = torch.Generator().manual_seed(2)
    layout = whole(sizes)
    shapes = {
        "q_index": (2, 15, 2, 3),
        "k_index": (2, 7, 3),
        "weights": (2, 15, 2),
        "q": (2, 15, 3, 4),
        "kv": (2, 15, 4),
        "entries": (2, 7, 4),
        "sink": (3,),
    }
    inputs = {name: torch.randint(-64, 65, s, generator=generator).double() / 32 for name, s in shapes.items()}
    exact, low = ({name: x.to(d).requires_grad_() for name, x in inputs.items()} for d in (torch.float64, dtype))
    results = []
    for x in (exact, low):
        index, memory = (x["q_index"], x["k_index"], x["weights"]), (x["q"], x["kv"], x["entries"])
        if objective == "sparse":
            selection = csakit.select(*index, 2, layout)
            attention = csakit.attend(*memory, layout, indices=selection.indices, sink=x["sink"], teacher=True)
            loss = csakit.distill(selection.scores, attention.log_mass, layout)
            statistics = {"scores": selection.scores, "log_mass": attention.log_mass, "indices": selection.indices}
        else:
            attention = csakit.attend(*memory, layout, sink=x["sink"])
            loss = csakit.distill_dense(*index, x["q"], x["entries"], attention.lse, layout)
            statistics = {
                "scores": csakit.index_scores(*index, layout),
                "log_mass": csakit.teacher_log_mass(x["q"], x["entries"], attention.lse, layout),
            }
        statistics.update(lse=attention.lse, loss=loss.loss, kl=loss.kl)
        results.append((statistics, dict(out=attention.out, **gradients(loss.loss + attention.out.double().square().sum(), None, x))))
    (want, want16), (got, got16) = results
    assert all(t.dtype in (torch.float32, torch.int32) for t in got.values())
    assert_close(got, want, 2e-6)
    assert all(t.dtype is dtype for t in got16.values())
    indexer = ("d_q_index", "d_k_index", "d_weights")  # these depend on float32 statistics alone: one rounding
    assert_close(got16, want16, torch.finfo(dtype).eps / 2 + 2e-6, keys=("out", *indexer))
    assert_close(got16, want16, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("objective", ["sparse", "dense"])
def test_the_tile_never_changes_a_result_beyond_rounding(objective: str) -> None:
    sizes = Sizes(ratio=4, window=5, topk=3, objective=objective)
    layout = Layout.packed(torch.tensor([0, 3, 21, 40]), ratio=4, window=5, tokens=43)
    inputs = random_inputs(1, 43, sizes)
    with on("reference"):
        want = chain(inputs, layout, sizes)
    for backend in BACKENDS:
        with on(backend):
            assert_close(chain(inputs, layout, sizes), want)
    for tile in (2, 7, 43, 64):
        with csakit.backend("cpu", tile=tile):
            assert_close(chain(inputs, layout, sizes), want)


def test_one_key_has_a_complete_gradient_through_lse(backend: str) -> None:
    """P = sigmoid(1). The key is an entry or the window, the value another tensor."""
    p = 1 / (1 + math.exp(-1))
    for where in ("window", "entry"):
        one = {name: torch.ones(1, 1, 1, 1, dtype=torch.float64) for name in ("q", "key", "value")}
        one["value"] *= 2
        one["sink"] = torch.zeros(1, dtype=torch.float64)
        one = {name: x.requires_grad_() for name, x in one.items()}
        layout = Layout.batch(1, 1, ratio=1, window=1 if where == "window" else 0)
        memory = (one["key"], None) if where == "window" else (None, one["key"])
        values = {"values": one["value"]} if where == "window" else {"entry_values": one["value"]}
        attention = csakit.attend(one["q"], *memory, layout, sink=one["sink"], scale=1.0, **values)
        found = {name: g.item() for name, g in gradients(attention.out, torch.ones_like(attention.out), one).items()}
        assert attention.out.item() == pytest.approx(2 * p, abs=1e-12)
        want = {"d_q": 2 * p * (1 - p), "d_key": 2 * p * (1 - p), "d_value": p, "d_sink": -2 * p * (1 - p)}
        assert found == pytest.approx(want, abs=1e-12)
        assert found["d_value"] == pytest.approx(0.731059, abs=1e-6) and found["d_q"] == pytest.approx(0.393224, abs=1e-6)
