"""What went wrong for others, each as its kind: shapes, seeds and positions vary, so that no special case passes.

The name of a test says the kind; the comment above it says whose reports it answers.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import LAYOUT_FIELDS, Sizes, assert_close, chain, gap, gradients, normalise, random_inputs, visible
from torch.utils.checkpoint import checkpoint

import csakit
from csakit import Layout

INF = float("inf")
LN3 = math.log(3)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def ragged_indices(layout: Layout, topk: int, *, seed: int = 0) -> torch.Tensor:
    """Random distinct visible entries in random slots, -1 elsewhere: [B, T, K] int32."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand(*layout.positions.shape, layout.num_entries, generator=generator).masked_fill(~visible(layout), 2.0)
    taken = keys.sort(-1)
    indices = torch.where((taken.values < 1) & (taken.values > 0.15), taken.indices, -1)[..., :topk].to(torch.int32)
    return torch.nn.functional.pad(indices, (0, topk - indices.shape[-1]), value=-1)


def plain_attention(q, kv, entries, sink, indices, layout, scale):
    """(out, lse, log_mass) by autograd over a mask of everything: an oracle of two lines for the tests below."""
    token = torch.arange(kv.shape[1])
    window = (token >= layout.window_start[..., None]) & (token <= torch.arange(q.shape[1])[:, None])
    chosen = (indices[..., None] == torch.arange(entries.shape[1])).any(-2)
    keys, mask = torch.cat([kv, entries], 1), torch.cat([window, chosen], -1) & layout.valid[..., None]
    logits = (scale * torch.einsum("bthd,bnd->bthn", q, keys)).masked_fill(~mask[:, :, None], -INF)
    lse = torch.cat([logits, sink.expand(*logits.shape[:3])[..., None]], -1).logsumexp(-1)
    p = (logits - lse[..., None]).exp()
    mass = (logits[..., kv.shape[1] :] - lse[..., None]).logsumexp(2)
    taken = torch.where(indices >= 0, mass.gather(-1, indices.clamp(min=0).long()), -INF)
    return torch.einsum("bthn,bnd->bthd", p, keys), lse, taken


# ---- the teacher and its loss ----------------------------------------------------------------------------------------


# 1
@pytest.mark.parametrize("width", [2, 5])
def test_window_and_sink_mass_weigh_the_heads_of_the_teacher(width: int, backend: str) -> None:
    """Two heads with entry masses (1, 3) and (3, 1) and everything else 1 and 4, wherever that mass comes from."""
    layout = Layout.batch(1, 4, ratio=2, window=1)
    for from_sink in ((1.0, 4.0), (0.25, 3.0), (0.0, 0.0)):
        q = torch.zeros(1, 4, 2, width, dtype=torch.float64)
        entries, kv = torch.zeros(1, 2, width, dtype=torch.float64), torch.zeros(1, 4, width, dtype=torch.float64)
        q[..., 0, 0] = q[..., 1, 1] = 1
        entries[0, 0, 1] = entries[0, 1, 0] = LN3
        sink = torch.tensor(from_sink, dtype=torch.float64).log()
        kv[..., :2] = (torch.tensor([1.0, 4.0], dtype=torch.float64) - sink.exp()).log().clamp(min=-1e4)
        indices = torch.tensor([0, 1], dtype=torch.int32).expand(1, 4, 2).masked_fill(~visible(layout), -1)
        attention = csakit.attend(q, kv, entries, layout, indices=indices, sink=sink, scale=1.0, teacher=True)
        assert normalise(attention.log_mass)[0, 3].tolist() == pytest.approx([23 / 52, 29 / 52], abs=1e-12)
        scores = torch.full((1, 4, 2), 0.7, dtype=torch.float64).masked_fill(indices < 0, -INF).requires_grad_()
        result = csakit.distill(scores, attention.log_mass, layout, divisor=1)
        (grad,) = torch.autograd.grad(result.loss, scores)
        assert result.loss.item() == pytest.approx(0.00667165, abs=1e-8)
        assert grad[0, 3].tolist() == pytest.approx([3 / 52, -3 / 52], abs=1e-12)


# 3
@pytest.mark.parametrize("seed", range(3))
def test_the_teacher_weighs_heads_by_the_share_they_send_to_entries(seed: int, backend: str) -> None:
    """sum_h share_h * conditional_h, then one normalisation, is the direct full-denominator teacher."""
    sizes = Sizes(heads=4, ratio=2, window=4, topk=3)
    inputs, layout = random_inputs(1, 17, sizes, seed), Layout.batch(1, 17, ratio=2, window=4)
    entries = inputs["kv"][:, :8] - 1
    indices = ragged_indices(layout, 3, seed=seed)
    attention = csakit.attend(inputs["q"], inputs["kv"], entries, layout, indices=indices, sink=inputs["sink"], teacher=True)
    logits = torch.einsum("bthd,bed->bthe", inputs["q"], entries) * 4**-0.5
    logits = torch.where(indices[:, :, None] >= 0, logits.gather(-1, indices.clamp(min=0).long()[:, :, None].expand(1, 17, 4, 3)), -INF)
    lse_entries = logits.logsumexp(-1)
    share, conditional = (lse_entries - attention.lse).exp(), normalise(logits)
    mixed = (share[..., None] * conditional).sum(2)
    assert_close(mixed / mixed.sum(-1, keepdim=True).clamp(min=1e-300), normalise(attention.log_mass))


# 12
@pytest.mark.parametrize("masses", [[[0.2, 0.6], [0.375, 0.125]], [[0.9, 0.1], [1e-30, 3e-30]], [[0.5, 0.0], [0.0, 0.01]]])
def test_ranks_add_mass_first_and_normalise_once(masses) -> None:
    layout = Layout.batch(1, 2, ratio=1, window=1)
    per_rank = torch.tensor(masses, dtype=torch.float64).log().reshape(2, 1, 1, 2).expand(2, 1, 2, 2)
    total = torch.tensor(masses, dtype=torch.float64).sum(0)
    scores = torch.zeros(1, 2, 2, dtype=torch.float64).requires_grad_()
    result = csakit.distill(scores, per_rank.logsumexp(0), layout, divisor=1)
    (grad,) = torch.autograd.grad(result.loss, scores)
    assert (0.5 - grad[0, 1]).tolist() == pytest.approx((total / total.sum()).tolist(), abs=1e-12)


# 6
@pytest.mark.parametrize("ratio, tokens", [(4, 16), (2, 9), (1, 5)])
def test_sparse_and_dense_differ_exactly_when_k_leaves_something_out(ratio: int, tokens: int, backend: str) -> None:
    layout, entries = Layout.batch(1, tokens, ratio=ratio, window=2), tokens // ratio
    for topk in (entries - 1, entries, entries + 1):
        sizes = Sizes(ratio=ratio, window=2, topk=topk)
        inputs = random_inputs(1, tokens, sizes)
        sparse, dense = (chain(inputs, layout, replace(sizes, objective=o)) for o in ("sparse", "dense"))
        assert gap(sparse["loss"], dense["loss"]) < 1e-12 if topk >= entries else gap(sparse["loss"], dense["loss"]) > 1e-5


# 7
def test_an_indexer_overfits_one_batch_under_the_dense_objective() -> None:
    layout = Layout.batch(1, 32, ratio=1, window=4)
    q, kv, sink = normal(1, 32, 4, 8, dtype=torch.float32), normal(1, 32, 8, seed=1, dtype=torch.float32), torch.zeros(4)
    entries = layout.to_entries(normal(1, 32, 8, seed=2, dtype=torch.float32))
    lse = csakit.attend(q, kv, entries, layout, sink=sink).lse
    parameters = [normal(1, 32, *shape, seed=3 + n, dtype=torch.float32).requires_grad_() for n, shape in enumerate(((8, 8), (8,), (8,)))]
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    losses = []
    for _ in range(100):
        q_index, k_index, weights = parameters
        result = csakit.distill_dense(q_index, k_index, weights, q, entries, lse, layout)
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        losses.append(result.loss.item())
    assert losses[-1] < 0.1 * losses[0]


# 8, 9
@pytest.mark.parametrize("objective", ["sparse", "dense"])
@pytest.mark.parametrize("parts", [2, 4])
def test_micro_batches_and_context_parallel_halves_give_the_gradients_of_the_whole(parts: int, objective: str, backend: str) -> None:
    """One global divisor; documents dealt to equal or unequal micro-batches."""
    sizes = Sizes(ratio=2, window=3, topk=2, objective=objective)
    inputs = random_inputs(8, 11, sizes)
    whole = chain(inputs, Layout.batch(8, 11, ratio=2, window=3), sizes, divisor=inputs["weight"].sum().item())
    default = chain(inputs, Layout.batch(8, 11, ratio=2, window=3), sizes, divisor=None)
    assert_close(default, whole)
    for cuts in ([8 // parts] * parts, [1] * (parts - 1) + [9 - parts]):
        runs, begin = [], 0
        for rows in cuts:
            part = {n: x[begin : begin + rows] if x.shape[:2] == (8, 11) else x for n, x in inputs.items()}
            runs.append(chain(part, Layout.batch(rows, 11, ratio=2, window=3), sizes, divisor=inputs["weight"].sum().item()))
            begin += rows
        assert_close(sum(r["loss"] for r in runs), whole["loss"])
        for name in (n for n in whole if n.startswith("d_")):
            together = torch.cat([r[name] for r in runs]) if whole[name].shape[:2] == (8, 11) else sum(r[name] for r in runs)
            assert_close(together, whole[name], label=name)


# 11
def test_the_divisor_is_stated_and_either_convention_can_be_had() -> None:
    """KL rows [1, 2, 3] and [5]: the mean over tokens is 2.75, the mean of means 3.5."""
    objectives = []
    for values in ([1.0, 2.0, 3.0], [5.0]):
        scores = torch.tensor([[[-v, 0.0] for v in values]], dtype=torch.float64)
        log_mass = torch.tensor([[[0.0, -INF] for _ in values]], dtype=torch.float64)
        layout = Layout.batch(1, len(values), ratio=1, window=1)
        objectives.append((scores, log_mass, layout))
        assert csakit.distill(*objectives[-1]).divisor == len(values)
    extra = [math.log1p(math.exp(-v)) for v in (1.0, 2.0, 3.0, 5.0)]  # KL([1, 0] || softmax([-v, 0])) = v + ln(1 + e^-v)
    per_token = sum(csakit.distill(*o, divisor=4.0).loss.item() for o in objectives)
    mean_of_means = sum(csakit.distill(*o).loss.item() for o in objectives) / 2
    assert per_token == pytest.approx(2.75 + sum(extra) / 4, abs=1e-12)
    assert mean_of_means == pytest.approx(3.5 + (sum(extra[:3]) / 3 + extra[3]) / 2, abs=1e-12)


# ---- what trains, and what does not ----------------------------------------------------------------------------------


# 18, 25
@pytest.mark.parametrize("objective", ["sparse", "dense"])
def test_the_indexer_loss_reaches_the_indexer_and_nothing_else(objective: str, backend: str) -> None:
    layout, sizes = Layout.batch(2, 13, ratio=2, window=3), Sizes()
    x = {n: t.requires_grad_() for n, t in random_inputs(2, 13, sizes).items() if n in ("q", "kv", "sink", "q_index", "weights")}
    x["entries"], x["k_index"] = normal(2, 6, 4, seed=1).requires_grad_(), normal(2, 6, 3, seed=2).requires_grad_()
    index, memory = (x["q_index"], x["k_index"], x["weights"]), (x["q"], x["kv"], x["entries"])
    if objective == "sparse":
        selection = csakit.select(*index, 2, layout)
        attention = csakit.attend(*memory, layout, indices=selection.indices, sink=x["sink"], teacher=True)
        result = csakit.distill(selection.scores, attention.log_mass, layout)
        assert not attention.log_mass.requires_grad and selection.scores.requires_grad
    else:
        attention = csakit.attend(*memory, layout, sink=x["sink"])
        result = csakit.distill_dense(*index, x["q"], x["entries"], attention.lse, layout)
    assert not attention.lse.requires_grad and not result.kl.requires_grad
    for loss, trained in ((result.loss, ("q_index", "k_index", "weights")), (attention.out.square().sum(), ("q", "kv", "sink", "entries"))):
        found = torch.autograd.grad(loss, list(x.values()), allow_unused=True, retain_graph=True)
        for name, g in zip(x, found):
            assert (g is not None and g.isfinite().all() and g.any()) if name in trained else g is None, name


# 20, 22
def test_a_loss_without_any_candidate_still_reaches_the_indexer_with_zeros(backend: str) -> None:
    """No visible entry, no teacher, no weight, divisor 0: parameters get gradients of zeros, so that bookkeeping stays whole."""
    for tokens, ratio, weight, divisor in ((3, 4, None, None), (9, 2, 0.0, None), (9, 2, None, 0), (9, 2, 0.0, 0.0)):
        layout = Layout.batch(2, tokens, ratio=ratio, window=2)
        for objective in ("sparse", "dense"):
            q_index, k_index, weights = (
                normal(*s, seed=n).requires_grad_() for n, s in enumerate(((2, tokens, 2, 3), (2, tokens // ratio, 3), (2, tokens, 2)))
            )
            rows = dict(weight=None if weight is None else torch.full((2, tokens), weight, dtype=torch.float64), divisor=divisor)
            q, entries = normal(2, tokens, 2, 4), normal(2, tokens // ratio, 4, seed=1)
            if objective == "sparse":
                selection = csakit.select(q_index, k_index, weights, 2, layout)
                mass = csakit.teacher_log_mass(
                    q, entries, torch.zeros(2, tokens, 2, dtype=torch.float64), layout, indices=selection.indices
                )
                loss = csakit.distill(selection.scores, mass, layout, **rows).loss
            else:
                lse = torch.zeros(2, tokens, 2, dtype=torch.float64)
                loss = csakit.distill_dense(q_index, k_index, weights, q, entries, lse, layout, **rows).loss
            assert loss.item() == 0
            loss.backward()
            for parameter in (q_index, k_index, weights):
                assert parameter.grad is not None and not parameter.grad.any()


# 21
def test_no_gradient_means_nothing_is_kept_for_backward(backend: str) -> None:
    inputs, layout = random_inputs(1, 16, Sizes()), Layout.batch(1, 16, ratio=2, window=3)
    entries = normal(1, 8, 4)
    kept: list = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        selection = csakit.select(inputs["q_index"], normal(1, 8, 3), inputs["weights"], 2, layout)
        attention = csakit.attend(inputs["q"], inputs["kv"], entries, layout, indices=selection.indices, teacher=True)
        assert not csakit.distill(selection.scores, attention.log_mass, layout).loss.requires_grad
    assert not kept


# 21, 83
@pytest.mark.parametrize("objective", ["sparse", "dense"])
def test_backward_keeps_inputs_and_row_statistics_only(objective: str) -> None:
    """Bytes kept beyond the inputs and the returned tensors: a few per row, nothing per (query, key) pair or gathered key."""
    tokens, ratio, topk = 256, 2, 8
    layout = Layout.batch(1, tokens, ratio=ratio, window=16)
    x = dict(
        q=(1, tokens, 2, 32),
        kv=(1, tokens, 32),
        entries=(1, 128, 32),
        sink=(2,),
        q_index=(1, tokens, 4, 16),
        k_index=(1, 128, 16),
        weights=(1, tokens, 4),
    )
    x = {name: normal(*s, dtype=torch.float32).requires_grad_() for name, s in x.items()}
    kept: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        index, memory = (x["q_index"], x["k_index"], x["weights"]), (x["q"], x["kv"], x["entries"])
        returned = [*x.values(), *(getattr(layout, f) for f in LAYOUT_FIELDS)]
        if objective == "sparse":
            selection = csakit.select(*index, topk, layout)
            attention = csakit.attend(*memory, layout, indices=selection.indices, sink=x["sink"], teacher=True)
            result = csakit.distill(selection.scores, attention.log_mass, layout)
            returned += [*selection, *attention, result.loss, result.kl]
        else:
            attention = csakit.attend(*memory, layout, sink=x["sink"])
            result = csakit.distill_dense(*index, x["q"], x["entries"], attention.lse, layout)
            returned += [attention.out, attention.lse, result.loss, result.kl]
    for t in returned:
        kept.pop(t.untyped_storage().data_ptr(), None)
    per_row = {"sparse": topk, "dense": 3}[objective] * 4 * 4
    assert sum(kept.values()) <= tokens * per_row, kept


# 24, 65
@pytest.mark.parametrize("ratio, tokens, window, seed", [(2, 13, 3, 0), (4, 18, 5, 1), (1, 9, 0, 2)])
def test_the_gradient_through_the_denominator_is_complete(ratio: int, tokens: int, window: int, seed: int, backend: str) -> None:
    """out and all gradients equal those of autograd through one explicit softmax, also for losses on the first token alone."""
    layout = Layout.batch(2, tokens, ratio=ratio, window=window)
    x = dict(q=normal(2, tokens, 3, 4, seed=seed), kv=normal(2, tokens, 4, seed=seed + 1))
    x |= dict(entries=normal(2, tokens // ratio, 4, seed=seed + 2), sink=normal(3, seed=seed + 3))
    x = {name: t.requires_grad_() for name, t in x.items()}
    indices = ragged_indices(layout, 3, seed=seed)
    out, lse, mass = plain_attention(x["q"], x["kv"], x["entries"], x["sink"], indices, layout, 0.6)
    kv = x["kv"] if window else None
    got = csakit.attend(x["q"], kv, x["entries"], layout, indices=indices, sink=x["sink"], scale=0.6, teacher=True)
    assert_close(got.out, out)
    assert_close(got.lse, lse)
    assert_close(got.log_mass, mass)
    first_token = torch.zeros_like(out)
    first_token[:, 0] = 1
    for upstream in (normal(*out.shape, seed=9), first_token):
        assert_close(gradients(got.out, upstream, x), gradients(out, upstream, x))


# 65
def test_the_sink_is_one_term_of_the_denominator(backend: str) -> None:
    layout = Layout.batch(1, 1, ratio=1, window=1)
    for window_value, entry_value, logit in ((3.0, 6.0, 0.0), (-1.0, 5.0, 2.0)):
        q, kv, entries = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1), logit), torch.full((1, 1, 1), logit)
        values = dict(values=torch.full((1, 1, 1), window_value), entry_values=torch.full((1, 1, 1), entry_value))
        for sink, terms in ((torch.full((1,), logit), 3), (None, 2), (torch.full((1,), -INF), 2)):
            out = csakit.attend(q, kv, entries, layout, sink=sink, scale=1.0, **values).out
            assert out.item() == pytest.approx((window_value + entry_value) / terms, abs=1e-6)


# ---- selection -------------------------------------------------------------------------------------------------------


# 27, 36, 87
@pytest.mark.parametrize("topk", [1, 3, 7, 64, 705])
def test_any_k_works_and_the_shape_is_always_k(topk: int, backend: str) -> None:
    for tokens, ratio in ((1000, 1), (5, 4), (3, 4)):
        entries = tokens // ratio
        layout = Layout.batch(1, tokens, ratio=ratio, window=1).shard(tokens - 1, tokens)  # the last query
        q, k, w = normal(1, 1, 2, 3), normal(1, entries, 3, seed=1), normal(1, 1, 2, seed=2)
        selection = csakit.select(q, k, w, topk, layout)
        scores = csakit.index_scores(q, k, w, layout)[0, 0]
        order = sorted(range(int(layout.entry_stop)), key=lambda e: (-scores[e].item(), e))
        want = sorted(order[:topk])
        assert selection.indices.tolist() == [[want + [-1] * (topk - len(want))]]
        assert_close(selection.scores[0, 0, : len(want)], scores[want])
        assert (selection.scores[0, 0, len(want) :] == -INF).all()


# 87
def test_a_row_of_262144_entries_selects_exactly() -> None:
    entries, topk = 262_144, 1024
    k = normal(1, entries, 2, dtype=torch.float32)
    one = torch.ones(1, 1, dtype=torch.int32)
    layout = Layout(
        ratio=1, window=0, num_entries=entries, positions=one * (entries - 1), valid=one.bool(), window_start=one, entry_start=one * 0,
        entry_stop=one * entries, entry_token=torch.arange(entries, dtype=torch.int32)[None],
    )  # fmt: skip
    q, w = torch.tensor([[[[1.0, -0.5]]]]), torch.ones(1, 1, 1)
    indices = csakit.select(q, k, w, topk, layout).indices[0, 0]
    scores = csakit.index_scores(q, k, w, layout)[0, 0]
    want = scores.sort(descending=True, stable=True).indices[:topk].sort().values
    assert torch.equal(indices.long(), want)


# 33, 34, 79
@pytest.mark.parametrize("plateau", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_selection_is_bit_equal_in_every_mode_and_every_run(dtype: torch.dtype, plateau: bool, backend: str) -> None:
    """Training, no_grad, inference_mode, inside a checkpoint and its recomputation, repeated, interleaved with other selections."""
    layout = Layout.batch(2, 64, ratio=2, window=4)
    q, k, w = normal(2, 64, 3, 4, dtype=dtype), normal(2, 32, 4, seed=1, dtype=dtype), normal(2, 64, 3, seed=2, dtype=dtype)
    if plateau:
        q, k = -q.abs(), k.abs()  # every product is negative: all scores are exactly 0
    seen: list[torch.Tensor] = []

    def run(q: torch.Tensor) -> torch.Tensor:
        selection = csakit.select(q, k, w, 5, layout)
        seen.append(selection.indices.clone())
        return selection.scores.clamp(min=-1e4).sum()

    run(q)
    with torch.no_grad():
        run(q)
    with torch.inference_mode():
        run(q)
    trained = q.clone().requires_grad_()
    run(trained).backward()
    for reentrant in (False, True):
        checkpoint(run, trained, use_reentrant=reentrant).backward()
    other = csakit.select(q.flip(1), k, w, 5, layout)
    for _ in range(5):
        run(q)
    assert len(seen) >= 12
    assert all(torch.equal(indices, seen[0]) for indices in seen)
    assert plateau or not torch.equal(other.indices, seen[0])
    if plateau:
        count = (layout.entry_stop - layout.entry_start).clamp(max=5)
        lowest = torch.arange(5).expand(2, 64, 5)
        assert torch.equal(seen[0].long(), torch.where(lowest < count[..., None], lowest, -1))


# 79
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_repeats_its_own_forward_not_a_later_one(reentrant: bool, backend: str) -> None:
    """Order F1, F2, B1, B2: nothing of a call outlives it."""
    sizes = Sizes()
    layout = Layout.batch(1, 16, ratio=2, window=3)
    seen: list[torch.Tensor] = []

    def layer(q_index: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        selection = csakit.select(q_index, kv[:, :8, :3], None, 2, layout)
        seen.append(selection.indices.clone())
        attention = csakit.attend(q, kv, kv[:, 1::2], layout, indices=selection.indices, teacher=True)
        return csakit.attach_loss(attention.out, csakit.distill(selection.scores, attention.log_mass, layout).loss)

    batches = [
        {n: x.requires_grad_() for n, x in random_inputs(1, 16, sizes, seed).items() if n in ("q_index", "q", "kv")} for seed in (1, 2)
    ]
    plain = [layer(*b.values()) for b in batches]
    want = [gradients(out.square().sum(), None, b) for out, b in zip(plain, batches)]
    first = list(seen)
    seen.clear()
    outs = [checkpoint(layer, *b.values(), use_reentrant=reentrant) for b in batches]
    for out in outs:
        out.square().sum().backward()
    assert not torch.equal(first[0], first[1])
    assert [torch.equal(a, b) for a, b in zip(seen, [*first, *first])] == [True] * 4
    for b, w in zip(batches, want):
        assert_close({f"d_{n}": t.grad for n, t in b.items()}, w)


# 37
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_a_later_token_never_changes_an_earlier_selection_or_output(ratio: int, backend: str) -> None:
    sizes = Sizes(ratio=ratio, topk=2)
    layout, inputs = Layout.batch(2, 17, ratio=ratio, window=3), random_inputs(2, 17, sizes)
    before = chain(inputs, layout, sizes)
    for token in (7, 11, 16):
        changed = {n: x.clone() for n, x in inputs.items()}
        for name, x in changed.items():
            if x.shape[:2] == (2, 17):
                x[:, token] += 3.0
        after = chain(changed, layout, sizes)
        for name in ("out", "lse", "picked", "scores", "log_mass", "kl"):
            assert torch.equal(after[name][:, :token], before[name][:, :token]), (token, name)
        assert not torch.equal(after["out"][:, token], before["out"][:, token])


# 39
def test_every_query_attends_its_own_picks_and_not_those_of_others(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    layout = Layout.batch(2, 24, ratio=1, window=0)
    entries = normal(2, 24, 5)
    picks = (torch.rand(2, 24, generator=generator) * torch.arange(1, 25)).long()
    out = csakit.attend(normal(2, 24, 3, 5, seed=1), None, entries, layout, indices=picks[..., None].int()).out
    assert_close(out, entries.gather(1, picks[..., None].expand(2, 24, 5))[:, :, None].expand(2, 24, 3, 5))


# 71, 72
def test_relu_comes_before_the_head_sum_and_weights_may_be_negative(backend: str) -> None:
    layout = Layout.batch(1, 2, ratio=1, window=1)
    k = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    q = torch.tensor([[[[0.0, 0.0], [0.0, 0.0]], [[5.0, 2.0], [-4.0, 0.0]]]])
    for weights, relu, want in (
        ([1.0, 1.0], True, [5, 2]),
        ([1.0, 1.0], False, [1, 2]),
        ([-1.0, 2.0], True, [-5, -2]),
        (None, True, [5, 2]),
    ):
        w = None if weights is None else torch.tensor(weights).expand(1, 2, 2)
        options = dict(scale=1.0, relu=relu)
        assert csakit.index_scores(q, k, w, layout, **options)[0, 1].tolist() == want
        assert csakit.select(q, k, w, 1, layout, **options).indices[0, 1, 0] == want.index(max(want))


# 72
@pytest.mark.parametrize("heads, width, sets", [(4, 16, 1), (2, 5, 1), (6, 3, 3), (4, 16, 2)])
def test_the_score_scale_is_the_temperature_of_the_student_and_not_a_choice(heads: int, width: int, sets: int, backend: str) -> None:
    """scale None is C**-0.5 * (I/S)**-0.5, without weights C**-0.5; any positive scale selects the same entries."""
    layout = Layout.batch(1, 12, ratio=1, window=1)
    q, k, w = normal(1, 12, heads, width), normal(1, 12, width, seed=1), normal(1, 12, heads, seed=2)
    unit, default = (csakit.select(q, k, w, 3, layout, scale=s, sets=sets) for s in (1.0, None))
    assert torch.equal(unit.indices, default.indices)
    assert_close(default.scores, unit.scores * width**-0.5 * (heads / sets) ** -0.5)
    unit, default = (csakit.index_scores(q, k, None, layout, scale=s, sets=sets) for s in (1.0, None))
    assert_close(default, unit * width**-0.5)
    if (heads, width, sets) == (4, 16, 1):
        student = (torch.tensor([8.0, 0.0]) * width**-0.5 * heads**-0.5).softmax(0)
        assert student.tolist() == pytest.approx([0.731059, 0.268941], abs=1e-6)


# 74, 77
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_that_differ_below_16_bit_resolution_are_still_told_apart(dtype: torch.dtype, backend: str) -> None:
    """Sums of exact 16-bit products that round to the same 16-bit number: the greater one is selected, wherever it stands."""
    for place in range(6):
        k = torch.tensor([1.0, 0.0]).expand(1, 8, 2).clone()
        k[0, place, 1] = 2.0**-11
        q, w = torch.tensor([1.0, 1.0]).expand(1, 8, 1, 2), torch.ones(1, 8, 1)
        layout = Layout.batch(1, 8, ratio=1, window=1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=place % 2 == 1):
            selection = csakit.select(q.to(dtype), k.to(dtype), w.to(dtype), 1, layout, scale=1.0)
        assert selection.scores.dtype is torch.float32
        assert selection.indices[0, place:, 0].tolist() == [place] * (8 - place)
        assert selection.scores[0, -1, 0].item() == 1 + 2.0**-11


# ---- memory nobody may read, indices and padding ---------------------------------------------------------------------


# 29
@pytest.mark.parametrize("spread", [1, 2, 8])
def test_gradients_add_up_when_many_queries_pick_the_same_entries(spread: int, backend: str) -> None:
    layout = Layout.batch(1, 40, ratio=1, window=0)
    q, entries, sink = normal(1, 40, 2, 4).requires_grad_(), normal(1, 40, 4, seed=1).requires_grad_(), normal(2, seed=2).requires_grad_()
    picks = torch.arange(spread).expand(1, 40, spread)
    indices = torch.where(picks <= torch.arange(40)[:, None], picks, -1)
    x = dict(q=q, entries=entries, sink=sink)
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


# 31, 60
@pytest.mark.parametrize("empty", [1, 4, 16, 64])
def test_empty_slots_anywhere_are_as_if_they_were_not_there(empty: int, backend: str) -> None:
    """Empty slots before, between and after the picks; entries nobody picks hold NaN."""
    layout = Layout.batch(1, 12, ratio=1, window=2)
    q, kv, entries = normal(1, 12, 2, 3), normal(1, 12, 3, seed=1), normal(1, 12, 3, seed=2)
    entries[:, 7] = math.nan
    picks = torch.tensor([3, 1], dtype=torch.int32).expand(1, 12, 2).masked_fill(torch.arange(12)[None, :, None] < 3, -1)
    none = torch.full((1, 12, empty), -1, dtype=torch.int32)
    variants = dict(before=[none, picks], after=[picks, none], between=[picks[..., :1], none, picks[..., 1:]])
    x = dict(q=q.requires_grad_(), kv=kv.requires_grad_(), entries=entries.requires_grad_())
    runs = {}
    for name, parts in dict(plain=[picks], **variants).items():
        indices = torch.cat(parts, -1)
        attention = csakit.attend(q, kv, entries, layout, indices=indices, teacher=True)
        mass = torch.cat([attention.log_mass[indices == e].reshape(1, -1) for e in (3, 1)])
        assert (attention.log_mass[indices < 0] == -INF).all()
        runs[name] = dict(out=attention.out, lse=attention.lse, mass=mass, **gradients(attention.out, normal(1, 12, 2, 3, seed=4), x))
        assert_close(runs[name], runs["plain"], label=name)
        assert runs[name]["out"].isfinite().all()


# 53, 57
@pytest.mark.parametrize("kind", ["empty rows", "all mass on the sink", "logits of 300", "logits of -300"])
def test_extreme_rows_have_finite_gradients_equal_to_autograd(kind: str, backend: str) -> None:
    layout = Layout.batch(2, 14, ratio=2, window=0 if kind == "empty rows" else 3)
    x = dict(q=normal(2, 14, 2, 3), kv=normal(2, 14, 3, seed=1), entries=normal(2, 7, 3, seed=2), sink=normal(2, seed=3))
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
    assert_close(dict(out=got.out, lse=got.lse, log_mass=got.log_mass), dict(out=out, lse=lse, log_mass=mass))
    found = gradients(got.out, upstream, x)
    assert all(g.isfinite().all() for g in found.values())
    assert_close(found, gradients(out, upstream, x))


# 40, 49
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


# 49
def test_the_first_block_of_a_document_has_no_previous_half(backend: str) -> None:
    """Not the previous document's (50.5), not zeros with a weight (0.5): the own block alone."""
    for first in (5, 4, 8):
        layout = Layout.packed(torch.tensor([0, first, first + 4]), ratio=4, window=1)
        values = torch.tensor([100.0, 1.0]).expand(1, first + 4, 2)
        got = csakit.compress(values, torch.zeros_like(values), torch.zeros(4, 2), layout)
        assert got[0, first // 4, 0] == 1.0 and got[0, 0, 0] == 1.0
        if first == 8:
            assert got[0, 1, 0] == 50.5


# 42
def test_padding_is_what_the_mask_says_whatever_the_tokens_hold(backend: str) -> None:
    sizes = Sizes()
    inputs = random_inputs(2, 12, sizes)
    layout = Layout.from_mask(torch.tensor([[1] * 12, [0] * 12]), ratio=2, window=3)
    for name in ("q", "kv", "values", "q_index"):
        inputs[name][0, 4:7] = 0  # zeros in the middle are content
    results = chain(inputs, layout, sizes)
    assert results["lse"][0].isfinite().all() and results["out"][0, 4:7].any()
    assert (results["lse"][1] == -INF).all() and not results["out"][1].any() and not results["d_q"][1].any()


# 43
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


# 44
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


# 46
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
                slots, weights = slots + [values[0, previous, :2]], weights + [gates[0, previous, :2] + bias[:, :2]]
            assert_close(got[0, e], (torch.cat(weights).softmax(0) * torch.cat(slots)).sum(0))


# 47
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


# 51
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_repeated_offsets_are_empty_documents(dtype: torch.dtype) -> None:
    for repeated, plain in (([0, 16, 40, 40, 40], [0, 16, 40]), ([0, 2, 2, 4], [0, 2, 4]), ([0, 0, 0, 3], [0, 3]), ([0, 0], [0])):
        a, b = (Layout.packed(torch.tensor(o, dtype=dtype), ratio=2, window=3) for o in (repeated, plain))
        assert all(torch.equal(getattr(a, f), getattr(b, f)) for f in LAYOUT_FIELDS)


# 51
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


# 54, 85 (offsets)
@pytest.mark.parametrize("cut", [1, 5, 8, 11])
def test_query_slices_with_explicit_ranges_equal_the_whole(cut: int, backend: str) -> None:
    """Unequal slices of a layout's own integers, with all earlier rows of kv (chunked prefill): window_start is a row of kv."""
    whole = Layout.batch(1, 12, ratio=2, window=4)
    x = dict(q=normal(1, 12, 2, 3), kv=normal(1, 12, 3, seed=1), entries=normal(1, 6, 3, seed=2))
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


# 56
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


# 59
def test_an_empty_row_has_output_zero_lse_minus_infinity_and_gradient_zero(backend: str) -> None:
    layout = Layout.batch(1, 8, ratio=4, window=0)
    q, entries = normal(1, 8, 2, 3).requires_grad_(), normal(1, 2, 3, seed=1).requires_grad_()
    for indices in (None, torch.full((1, 8, 2), -1, dtype=torch.int32)):
        attention = csakit.attend(q, None, entries, layout, indices=indices)
        empty = slice(0, 3) if indices is None else slice(None)
        assert not attention.out[:, empty].any() and (attention.lse[:, empty] == -INF).all()
        d = gradients(attention.out, normal(1, 8, 2, 3, seed=2), dict(q=q, entries=entries))
        assert not d["d_q"][:, empty].any() and all(g.isfinite().all() for g in d.values())
        sink = torch.tensor([0.5, -2.0], dtype=torch.float64)
        with_sink = csakit.attend(q, None, entries, layout, indices=indices, sink=sink)
        assert torch.equal(with_sink.lse[:, empty], sink.expand_as(with_sink.lse[:, empty])) and not with_sink.out[:, empty].any()
        mass = csakit.teacher_log_mass(q, entries, attention.lse, layout, indices=indices)
        assert not mass.isnan().any()


# 59, 64
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


# 77
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


# 81
def test_strided_and_sliced_inputs_give_the_same_result(backend: str) -> None:
    """Sequence-first views, heads-first views, channels of a wider tensor, every second row, and broadcast upstream gradients."""
    layout = Layout.batch(2, 12, ratio=2, window=3)
    plain = dict(q=normal(2, 12, 3, 4), kv=normal(2, 12, 4, seed=1), entries=normal(2, 6, 4, seed=2), sink=normal(3, seed=3))
    plain |= dict(q_index=normal(2, 12, 2, 3, seed=4), k_index=normal(2, 6, 3, seed=5), weights=normal(2, 12, 2, seed=6))

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


# 81
def test_an_upstream_gradient_of_two_doubles_every_gradient(backend: str) -> None:
    sizes, layout = Sizes(), Layout.batch(1, 12, ratio=2, window=3)
    x = {name: t.requires_grad_() for name, t in random_inputs(1, 12, sizes).items() if name in ("q_index", "weights", "q", "kv")}
    selection = csakit.select(x["q_index"], x["kv"][:, 1::2, :3], x["weights"], 2, layout)
    attention = csakit.attend(x["q"], x["kv"], x["kv"][:, ::2], layout, indices=selection.indices, teacher=True)
    loss = csakit.distill(selection.scores, attention.log_mass, layout).loss
    for result in (loss, attention.out):
        one, two = (gradients(result, u, x) for u in (1.0, 2.0))
        assert_close(two, {name: 2 * g for name, g in one.items()})


# 83
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


# 85
def test_rows_beyond_two_to_the_31_are_addressed_in_64_bits() -> None:
    """Three rows of 2**30 tokens: their flat numbers pass 2**31. The memory is expanded, so that nothing of that size is there."""
    tokens = 2**30
    none = torch.zeros(1, 1, dtype=torch.int32).expand(3, tokens)
    last = torch.full((3, 1), tokens - 1, dtype=torch.int32)
    layout = Layout(
        ratio=tokens, window=1, num_entries=1, positions=none, valid=none, window_start=none, entry_start=none, entry_stop=none, entry_token=last
    )  # fmt: skip
    assert layout.to_entries(torch.full((1, 1, 1), 7.0).expand(3, tokens, 1)).tolist() == [[[7.0]]] * 3
