"""What went wrong for others, each as its kind. Teacher, loss and training.

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
    gap,
    gradients,
    normal,
    normalise,
    plain_attention,
    ragged_indices,
    random_inputs,
    visible,
)

import csakit
from csakit import Layout

INF = float("inf")
LN3 = math.log(3)


# ---- the teacher and its loss ----------------------------------------------------------------------------------------


# NVIDIA/Megatron-LM#5776
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


# AMD-AGI/Primus#992
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


# NVIDIA/Megatron-LM#5960
@pytest.mark.parametrize("masses", [[[0.2, 0.6], [0.375, 0.125]], [[0.9, 0.1], [1e-30, 3e-30]], [[0.5, 0.0], [0.0, 0.01]]])
def test_ranks_add_mass_first_and_normalise_once(masses) -> None:
    layout = Layout.batch(1, 2, ratio=1, window=1)
    per_rank = torch.tensor(masses, dtype=torch.float64).log().reshape(2, 1, 1, 2).expand(2, 1, 2, 2)
    total = torch.tensor(masses, dtype=torch.float64).sum(0)
    scores = torch.zeros(1, 2, 2, dtype=torch.float64).requires_grad_()
    result = csakit.distill(scores, per_rank.logsumexp(0), layout, divisor=1)
    (grad,) = torch.autograd.grad(result.loss, scores)
    assert (0.5 - grad[0, 1]).tolist() == pytest.approx((total / total.sum()).tolist(), abs=1e-12)


# ByteDance-Seed/VeOmni#1134
@pytest.mark.parametrize("ratio, tokens", [(4, 16), (2, 9), (1, 5)])
def test_sparse_and_dense_differ_exactly_when_k_leaves_something_out(ratio: int, tokens: int, backend: str) -> None:
    layout, entries = Layout.batch(1, tokens, ratio=ratio, window=2), tokens // ratio
    for topk in (entries - 1, entries, entries + 1):
        sizes = Sizes(ratio=ratio, window=2, topk=topk)
        inputs = random_inputs(1, tokens, sizes)
        sparse, dense = (chain(inputs, layout, replace(sizes, objective=o)) for o in ("sparse", "dense"))
        assert gap(sparse["loss"], dense["loss"]) < 1e-12 if topk >= entries else gap(sparse["loss"], dense["loss"]) > 1e-5


# Open-Superintelligence-Lab/deepseek-sparse-attention-research#7
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


# NVIDIA/Megatron-LM#4070, NVIDIA/Megatron-LM#3674
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


# NVIDIA/Megatron-LM#936
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


# pytorch/torchtitan#4802, AI-Hypercomputer/maxtext#3415
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


# NVIDIA/Megatron-LM#5643, NVIDIA/Megatron-LM#6058
def test_a_loss_without_any_candidate_still_reaches_the_indexer_with_zeros(backend: str) -> None:
    """No visible entry, no teacher, no weight, divisor 0: parameters get gradients of zeros, so that bookkeeping stays whole."""
    for tokens, ratio, weight, divisor in ((3, 4, None, None), (9, 2, 0.0, None), (9, 2, None, 0), (9, 2, 0.0, 0.0)):
        layout = Layout.batch(2, tokens, ratio=ratio, window=2)
        for objective in ("sparse", "dense"):
            q_index, k_index, weights = (
                normal(*s, seed=n).requires_grad_() for n, s in enumerate(((2, tokens, 2, 3), (2, tokens // ratio, 3), (2, tokens, 2)))
            )
            rows = {"weight": None if weight is None else torch.full((2, tokens), weight, dtype=torch.float64), "divisor": divisor}
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


# NVIDIA/Megatron-LM#5099
def test_no_gradient_means_nothing_is_kept_for_backward(backend: str) -> None:
    inputs, layout = random_inputs(1, 16, Sizes()), Layout.batch(1, 16, ratio=2, window=3)
    entries = normal(1, 8, 4)
    kept: list = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        selection = csakit.select(inputs["q_index"], normal(1, 8, 3), inputs["weights"], 2, layout)
        attention = csakit.attend(inputs["q"], inputs["kv"], entries, layout, indices=selection.indices, teacher=True)
        assert not csakit.distill(selection.scores, attention.log_mass, layout).loss.requires_grad
    assert not kept


# NVIDIA/Megatron-LM#5099, modelscope/mcore-bridge#36
@pytest.mark.parametrize("objective", ["sparse", "dense"])
def test_backward_keeps_inputs_and_row_statistics_only(objective: str) -> None:
    """Bytes kept beyond the inputs and the returned tensors: a few per row, nothing per (query, key) pair or gathered key."""
    tokens, ratio, topk = 256, 2, 8
    layout = Layout.batch(1, tokens, ratio=ratio, window=16)
    x = {
        "q": (1, tokens, 2, 32),
        "kv": (1, tokens, 32),
        "entries": (1, 128, 32),
        "sink": (2,),
        "q_index": (1, tokens, 4, 16),
        "k_index": (1, 128, 16),
        "weights": (1, tokens, 4),
    }
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


# pytorch/torchtitan#4796, huggingface/transformers#41083
@pytest.mark.parametrize("ratio, tokens, window, seed", [(2, 13, 3, 0), (4, 18, 5, 1), (1, 9, 0, 2)])
def test_the_gradient_through_the_denominator_is_complete(ratio: int, tokens: int, window: int, seed: int, backend: str) -> None:
    """out and all gradients equal those of autograd through one explicit softmax, also for losses on the first token alone."""
    layout = Layout.batch(2, tokens, ratio=ratio, window=window)
    x = {"q": normal(2, tokens, 3, 4, seed=seed), "kv": normal(2, tokens, 4, seed=seed + 1)}
    x |= {"entries": normal(2, tokens // ratio, 4, seed=seed + 2), "sink": normal(3, seed=seed + 3)}
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


# huggingface/transformers#41083
def test_the_sink_is_one_term_of_the_denominator(backend: str) -> None:
    layout = Layout.batch(1, 1, ratio=1, window=1)
    for window_value, entry_value, logit in ((3.0, 6.0, 0.0), (-1.0, 5.0, 2.0)):
        q, kv, entries = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1), logit), torch.full((1, 1, 1), logit)
        values = {"values": torch.full((1, 1, 1), window_value), "entry_values": torch.full((1, 1, 1), entry_value)}
        for sink, terms in ((torch.full((1,), logit), 3), (None, 2), (torch.full((1,), -INF), 2)):
            out = csakit.attend(q, kv, entries, layout, sink=sink, scale=1.0, **values).out
            assert out.item() == pytest.approx((window_value + entry_value) / terms, abs=1e-6)
