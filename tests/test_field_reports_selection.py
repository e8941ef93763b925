"""What went wrong for others, each as its kind. Selection.

Shapes, seeds and positions vary, so that no special case passes. The name of a test says the kind; above it stand the
public reports that it answers.
"""

from __future__ import annotations

import pytest
import torch
from helpers import (
    Sizes,
    assert_close,
    chain,
    gradients,
    normal,
    random_inputs,
)
from torch.utils.checkpoint import checkpoint

import csakit
from csakit import Layout

INF = float("inf")


# lucidrains/native-sparse-attention-pytorch#18, NVIDIA/cudnn-frontend#407, NVIDIA/Megatron-LM#7463
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


# NVIDIA/Megatron-LM#7463
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


# flashinfer-ai/flashinfer#2584, NVIDIA/Megatron-LM#7169, NVIDIA/Megatron-LM#6793
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


# NVIDIA/Megatron-LM#6793
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


# huggingface/transformers#45820
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_a_later_token_never_changes_an_earlier_selection_or_output(ratio: int, backend: str) -> None:
    sizes = Sizes(ratio=ratio, topk=2)
    layout, inputs = Layout.batch(2, 17, ratio=ratio, window=3), random_inputs(2, 17, sizes)
    before = chain(inputs, layout, sizes)
    for token in (7, 11, 16):
        changed = {n: x.clone() for n, x in inputs.items()}
        for x in changed.values():
            if x.shape[:2] == (2, 17):
                x[:, token] += 3.0
        after = chain(changed, layout, sizes)
        for name in ("out", "lse", "picked", "scores", "log_mass", "kl"):
            assert torch.equal(after[name][:, :token], before[name][:, :token]), (token, name)
        assert not torch.equal(after["out"][:, token], before["out"][:, token])


# huggingface/transformers#45758
def test_every_query_attends_its_own_picks_and_not_those_of_others(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    layout = Layout.batch(2, 24, ratio=1, window=0)
    entries = normal(2, 24, 5)
    picks = (torch.rand(2, 24, generator=generator) * torch.arange(1, 25)).long()
    out = csakit.attend(normal(2, 24, 3, 5, seed=1), None, entries, layout, indices=picks[..., None].int()).out
    assert_close(out, entries.gather(1, picks[..., None].expand(2, 24, 5))[:, :, None].expand(2, 24, 3, 5))


# ml-explore/mlx-lm#512, deepseek-ai/DeepSeek-V3.2-Exp#57
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
        options = {"scale": 1.0, "relu": relu}
        assert csakit.index_scores(q, k, w, layout, **options)[0, 1].tolist() == want
        assert csakit.select(q, k, w, 1, layout, **options).indices[0, 1, 0] == want.index(max(want))


# deepseek-ai/DeepSeek-V3.2-Exp#57
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


# sgl-project/sglang#13459, kohya-ss/musubi-tuner#1037
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
