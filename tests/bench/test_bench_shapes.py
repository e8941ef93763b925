"""Shapes, useful work, selections and problems."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from csakit import Layout
from csakit.bench import problem, selections
from csakit.bench.shapes import ATTENTION, KERNELS, Case, Shape, useful_flops
from csakit.bench.suites import SUITES, Contest, alone, parse_shape


def test_pairs_are_those_of_the_layout():
    shape = Shape(37, 2, 8, 4, window=5, ratio=4)
    layout = Layout.batch(1, shape.tokens, ratio=shape.ratio, window=shape.window)
    visible = layout.entry_stop - layout.entry_start
    assert shape.visible_pairs == int(visible.sum())
    assert shape.selected_pairs == int(visible.clamp(max=4).sum())
    assert shape.window_pairs == int((torch.arange(37) - layout.window_start + 1).sum())


def test_useful_work_counts_valid_pairs_only():
    shape = Shape(3, 2, 8, 4, window=2, ratio=1, index_heads=3, index_width=5)  # pairs: window 1+2+2, entries 1+2+3
    expected = {
        "attend": 4 * 16 * 11,
        "attend-teacher": 4 * 16 * 11,
        "attend-backward": 14 * 16 * 11,
        "select": 2 * 15 * 6,
        "distill": 6 * 15 * 6,
        "dense": (6 * 15 + 2 * 16) * 6,
    }
    assert {name: useful_flops(Case(name, shape)) for name in KERNELS} == expected
    assert useful_flops(Case("step", shape)) is None


@pytest.mark.parametrize("operation", ["sliding", "csa", "hca"])
def test_useful_work_of_a_layer_is_that_of_its_weights_and_pairs(operation):
    shape = Shape(300, 4, 32, 8, window=16, index_heads=3, index_width=32)
    weights = problem.make(Case(operation, shape)).inputs
    matrices = sum(x.numel() for name, x in weights.items() if name != "hidden" and x.ndim == 2 and not name.endswith("ape"))
    entries = {"sliding": 0, "csa": shape.selected_pairs, "hca": sum((token + 1) // 128 for token in range(300))}[operation]
    scoring = 2 * 3 * 32 * shape.visible_pairs if operation == "csa" else 0
    pairs = 4 * 32 * (shape.window_pairs + entries)
    assert useful_flops(Case(operation, shape)) == 2 * 300 * matrices + 4 * pairs + scoring
    objective = 6 * 3 * 32 * shape.selected_pairs if operation == "csa" else 0
    assert useful_flops(Case(f"{operation}-backward", shape)) == 3 * 2 * 300 * matrices + 14 * pairs + scoring + objective


def test_selections_multiply_attention_cases_only():
    found = [contest.cases for contest in alone(("attend", "select"), (Shape(8, 1, 4, 2),), ("uniform", "clustered"))]
    assert [(case.operation, case.selection) for (case,) in found] == [
        ("attend", "uniform"),
        ("attend", "clustered"),
        ("select", "uniform"),
    ]


def test_suites_cover_every_operation_and_the_promised_shapes():
    assert {case.operation for case in SUITES["smoke"].cases} == set(KERNELS)
    sizes = {str(case.shape) for case in SUITES["targets"].cases}
    assert {"2048x16x128x256", "4096x16x128x256", "2048x64x512x512", "8192x64x128x512"} <= sizes
    assert [case.shape.tokens for case in SUITES["growth"].cases if case.operation == "select"] == [1024 << n for n in range(7)]


def test_a_shape_reads_as_it_prints():
    assert str(parse_shape("2048x16x128x256")) == "2048x16x128x256"
    assert parse_shape("64x2x8x4:3x5") == Shape(64, 2, 8, 4, index_heads=3, index_width=5)
    for text in ("2048x16x128", "2048x16x128x256:64", "fast"):
        with pytest.raises(ValueError, match="a shape must read TOKENSxHEADSxWIDTHxK"):
            parse_shape(text)
    with pytest.raises(ValueError, match="at least 1"):
        parse_shape("2048x0x128x256")


@pytest.mark.parametrize("kind", ["uniform", "clustered"])
def test_a_selection_is_full_distinct_visible_and_ascending(kind):
    layout = Layout.batch(1, 300, ratio=2, window=4)
    picked = selections.make(kind, layout, 24, torch.Generator().manual_seed(1))
    live = picked >= 0
    assert picked.dtype == torch.int32 and picked.shape == (1, 300, 24)
    assert torch.equal(live.sum(-1), layout.entry_stop.clamp(max=24))
    assert (picked < layout.entry_stop[..., None]).all()
    assert ((picked.diff(dim=-1) > 0) | ~live[..., 1:]).all()
    assert (live[..., :-1] | ~live[..., 1:]).all()  # empty slots come last


def test_clustered_picks_are_those_of_a_trained_indexer():
    """Within what was measured on trained ones (benchmarks/README.md); uniform ones are far from it."""
    layout = Layout.batch(1, 2048, ratio=4, window=8)
    uniform, clustered = (
        selections.statistics(selections.make(kind, layout, 64, torch.Generator().manual_seed(0)), layout)
        for kind in ("uniform", "clustered")
    )
    measured = {
        "picks shared with the query 1 before": (0.49, 0.7),
        "picks shared with the query 16 before": (0.3, 0.5),
        "picks whose next entry is picked too": (0.35, 0.55),
        "picks that fall on a tenth of the entries": (0.3, 0.5),
    }
    for name, (low, high) in measured.items():
        assert low < clustered[name] < high, (name, clustered[name])
        assert uniform[name] < low
    assert 0.3 < clustered["median distance, of what is visible"] < 0.7


def test_uniform_picks_use_the_whole_range_alike():
    layout = Layout.batch(1, 4096, ratio=4, window=8)
    picked = selections.make("uniform", layout, 64, torch.Generator().manual_seed(0))[0, -512:]
    place = picked / layout.entry_stop[0, -512:, None]
    assert torch.allclose(torch.histc(place, 4, 0, 1) / place.numel(), torch.full((4,), 0.25), atol=0.02)


def test_the_same_seed_gives_the_same_problem():
    case = Case("distill", Shape(32, 2, 8, 4, window=4, index_heads=2, index_width=4))
    first, second, other = problem.make(case), problem.make(case), problem.make(case, seed=1)
    assert all(torch.equal(first.inputs[name], second.inputs[name]) for name in first.inputs)
    assert not torch.equal(first.inputs["q_index"], other.inputs["q_index"])


def test_contests_say_in_what_their_cases_differ():
    found = {contest.difference for contest in SUITES["variants"].contests}
    assert found == {("attend", "attend-teacher"), ("1 thread", "2 threads"), ("float32", "bfloat16")}
    assert all(contest.own for contest in SUITES["variants"].contests)
    assert Contest((Case("attend", Shape(8, 1, 4, 2)),)).difference == (
        "attend: 8 tokens, 1 heads x 4, K 2, window 128, uniform selection, float32",
    )


@pytest.mark.parametrize("operation", KERNELS)
def test_a_probe_takes_its_gradients_from_the_chosen_queries_alone(operation):
    case = Case(operation, replace(Shape(32, 2, 8, 4, window=4), index_heads=2, index_width=4))
    whole = problem.make(case)
    probe = whole.only([slice(4, 9)])
    name = "d_out" if operation in ATTENTION else "weight"
    if name in whole.inputs:
        assert torch.equal(probe.inputs[name][:, 4:9], whole.inputs[name][:, 4:9])
        assert not probe.inputs[name][:, :4].any() and not probe.inputs[name][:, 9:].any()
    assert all(probe.inputs[key] is whole.inputs[key] for key in whole.inputs if key != name)
