"""Metrics of the indexer against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import Sizes, assert_close, random_inputs

import csakit
from csakit import Layout, metrics

INF = float("inf")
# token p of one row sees p + 1 entries (ratio 1); masses are unnormalised on purpose
MASS = torch.tensor([[1.0, 0, 0, 0], [1, 3, 0, 0], [2, 2, 4, 0], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64) * 0.25
LOG_MASS = MASS.log()[None]
LAYOUT = Layout.batch(1, 4, ratio=1, window=1)
PICKED = torch.tensor([[[0, -1], [0, -1], [1, 2], [0, 3]]], dtype=torch.int32)


def values(x: torch.Tensor) -> list[float]:
    return x[0].tolist()


def test_captured_mass_is_the_share_of_the_selected_entries() -> None:
    assert values(metrics.captured_mass(LOG_MASS, PICKED)) == pytest.approx([1, 0.25, 0.75, 0.5])


def test_recall_counts_the_teachers_own_greatest_among_the_selected() -> None:
    """One selected against the greatest one, two against the greatest two; a tie goes to the lowest entry."""
    assert values(metrics.topk_recall(LOG_MASS, PICKED)) == pytest.approx([1, 0, 0.5, 0.5])
    assert values(metrics.topk_recall(LOG_MASS, torch.tensor([[[0], [1], [2], [3]]]))) == pytest.approx([1, 1, 1, 1])


def test_top1_hit_says_whether_the_greatest_entry_is_selected() -> None:
    assert values(metrics.top1_hit(LOG_MASS, PICKED)) == [1, 0, 1, 1]


def test_entropy_is_in_nats() -> None:
    want = [0, -0.25 * math.log(0.25) - 0.75 * math.log(0.75), 1.5 * math.log(2), -sum(p * math.log(p) for p in (0.1, 0.2, 0.3, 0.4))]
    assert values(metrics.teacher_entropy(LOG_MASS)) == pytest.approx(want)


def test_uniform_kl_is_what_an_indexer_without_knowledge_pays() -> None:
    """ln(visible) - entropy; the KL of constant scores is the same number."""
    entropy = metrics.teacher_entropy(LOG_MASS)
    uniform = metrics.uniform_kl(LOG_MASS)
    assert_close(uniform, torch.tensor([[1.0, 2, 3, 4]]).log() - entropy, 1e-6)
    scores = torch.where(LOG_MASS > -INF, 0.3, -INF)
    assert_close(csakit.distill(scores, LOG_MASS, LAYOUT).kl, uniform)


def test_look_back_is_the_distance_to_the_first_token_of_an_entry() -> None:
    """Weighted by the teacher, or plainly over a selection; at ratio 2 entries begin at tokens 0, 2, 4."""
    assert values(metrics.look_back(LOG_MASS, LAYOUT)) == pytest.approx([0, 0.25, 0.25 * 2 + 0.25 * 1, 0.1 * 3 + 0.2 * 2 + 0.3])
    assert values(metrics.look_back(PICKED, LAYOUT)) == pytest.approx([0, 1, 0.5, 1.5])
    layout = Layout.from_mask(torch.tensor([[0, 1, 1, 1, 1, 1, 1]]), ratio=2, window=1)
    mass = torch.full((1, 7, 3), -INF)
    mass[0, 6] = torch.tensor([1.0, 1.0, 2.0]).log()
    assert values(metrics.look_back(mass, layout)) == pytest.approx([0] * 6 + [0.25 * 5 + 0.25 * 3 + 0.5 * 1])


def test_look_back_of_a_shard_counts_from_the_queries_own_place_in_the_row() -> None:
    """Entries keep the coordinates of the whole row, so the distances of a rank's queries are those of the whole."""
    whole = Layout.batch(1, 8, ratio=1, window=3)
    mass = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(0)).masked_fill(torch.ones(8, 8).triu(1).bool(), -INF)
    parts = [metrics.look_back(mass[:, 4 * r : 4 * r + 4], whole.shard(r, 2)) for r in range(2)]
    assert_close(torch.cat(parts, 1), metrics.look_back(mass, whole), 1e-6)


@pytest.mark.parametrize("kv_heads", [None, 3])
def test_shares_are_the_mass_of_window_entries_and_sink(kv_heads: int | None, backend: str) -> None:
    """From one explicit softmax; they sum to 1 on real tokens."""
    sizes, layout = Sizes(), Layout.packed(torch.tensor([0, 4, 11]), ratio=2, window=3, tokens=12)
    inputs = random_inputs(1, 12, sizes)
    q, kv, entries, sink = inputs["q"], inputs["kv"], inputs["values"][:, :6, :4], inputs["sink"]
    indices = csakit.select(inputs["q_index"], inputs["index_values"][:, :6, :3], inputs["weights"], 2, layout).indices
    heads = (kv, entries) if kv_heads is None else tuple(x[:, :, None].expand(-1, -1, kv_heads, -1) for x in (kv, entries))
    for chosen in (None, indices):
        lse = csakit.attend(q, *heads, layout, indices=chosen, sink=sink).lse
        shares = metrics.branch_shares(q, *heads, lse, layout, indices=chosen, sink=sink)
        real = layout.valid[0]
        assert_close(sum(shares)[0, real], torch.ones(11, 3, dtype=torch.float64))
        assert not any(s[0, ~real].any() for s in shares)
        assert_close(shares.sink[0, real], (sink - lse[0, real]).exp())
        for t in range(11):
            window = torch.einsum("hd,nd->hn", q[0, t], kv[0, int(layout.window_start[0, t]) : t + 1]) / 2
            assert_close(shares.window[0, t], (window - lse[0, t, :, None]).exp().sum(-1))
    no_sink = csakit.attend(q, *heads, layout).lse
    assert_close(sum(metrics.branch_shares(q, *heads, no_sink, layout))[0, real], torch.ones(11, 3, dtype=torch.float64))
    infinite = torch.tensor([0.0, INF, -INF], dtype=torch.float64)
    shares = metrics.branch_shares(q, *heads, csakit.attend(q, *heads, layout, sink=infinite).lse, layout, sink=infinite)
    assert torch.equal(shares.sink[0, real][:, 1], torch.ones(11, dtype=torch.float64)) and not shares.sink[0, :, 2].any()
    assert not any(s.isnan().any() for s in shares)


def test_shares_of_a_window_or_entries_alone() -> None:
    inputs = random_inputs(1, 6, Sizes())
    for window, kv, entries, names in ((3, inputs["kv"], None, {"window"}), (0, None, inputs["kv"][:, :3], {"entries"})):
        layout = Layout.batch(1, 6, ratio=2, window=window)
        lse = csakit.attend(inputs["q"], kv, entries, layout).lse
        shares = metrics.branch_shares(inputs["q"], kv, entries, lse, layout)
        attended = layout.entry_stop > 0 if window == 0 else layout.valid
        for name, share in shares._asdict().items():
            want = attended[..., None].expand_as(share).double() if name in names else torch.zeros_like(share)
            assert_close(share, want)


def test_pairs_count_what_each_objective_touches() -> None:
    """Tokens 0..9 at ratio 2 see 0 1 1 2 2 3 3 4 4 5 - 1 entries of their document; two documents and padding add up."""
    dense, sparse = metrics.attention_pairs(Layout.batch(1, 10, ratio=2, window=1), 2)
    assert (int(dense), int(sparse)) == (25, 16)
    dense, sparse = metrics.attention_pairs(Layout.packed(torch.tensor([0, 5, 9]), ratio=2, window=1, tokens=12), 1)
    assert (int(dense), int(sparse)) == (0 + 1 + 1 + 2 + 2 + 0 + 1 + 1 + 2, 7)


def test_metrics_of_rows_without_mass_are_zero_and_never_nan() -> None:
    nothing, empty = torch.full((1, 4, 3), -INF), torch.full((1, 4, 2), -1)
    layout = Layout.from_mask(torch.zeros(1, 4, dtype=torch.bool), ratio=1, window=1)
    results = [f(nothing, empty) for f in (metrics.captured_mass, metrics.topk_recall, metrics.top1_hit)]
    results += [metrics.teacher_entropy(nothing), metrics.uniform_kl(nothing), metrics.look_back(empty, layout)]
    results.append(metrics.look_back(torch.full((1, 4, 4), -INF), layout))
    for result in results:
        assert result.shape == (1, 4) and not result.any()
    no_entries = torch.zeros(1, 4, 0)
    assert not metrics.captured_mass(no_entries, empty).any() and not metrics.top1_hit(no_entries, empty).any()


def test_metrics_accept_the_set_axis() -> None:
    """Each set is measured by itself."""
    log_mass = torch.stack([LOG_MASS, LOG_MASS.flip(-1).masked_fill(LOG_MASS == -INF, -INF)], 2)
    indices = torch.stack([PICKED, PICKED], 2)
    for f in (metrics.captured_mass, metrics.topk_recall, metrics.top1_hit):
        both = f(log_mass, indices)
        assert both.shape == (1, 4, 2)
        for s in range(2):
            assert_close(both[:, :, s], f(log_mass[:, :, s], PICKED))
    for f in (metrics.teacher_entropy, metrics.uniform_kl, lambda m: metrics.look_back(m, LAYOUT)):
        assert_close(f(log_mass)[:, :, 1], f(log_mass[:, :, 1]))
    assert_close(metrics.look_back(indices, LAYOUT)[:, :, 1], metrics.look_back(PICKED, LAYOUT))


def test_what_an_indexer_has_learnt_is_one_minus_kl_over_uniform_kl(backend: str) -> None:
    """A student equal to the teacher has learnt everything, constant scores nothing."""
    layout, sizes = Layout.batch(2, 13, ratio=2, window=3), Sizes()
    inputs = random_inputs(2, 13, sizes)
    entries = inputs["values"][:, :6, :4]
    lse = csakit.attend(inputs["q"], inputs["kv"], entries, layout, sink=inputs["sink"]).lse
    mass = csakit.teacher_log_mass(inputs["q"], entries, lse, layout)
    uniform = metrics.uniform_kl(mass)
    for scores, learnt in ((mass + 3.0, 1.0), (torch.where(mass > -INF, 0.0, -INF), 0.0)):
        kl = csakit.distill(scores, mass, layout).kl
        several = layout.entry_stop > layout.entry_start + 1
        assert_close(1 - (kl / uniform)[several], torch.full((int(several.sum()),), learnt, dtype=torch.float64), 1e-9)
