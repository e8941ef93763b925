"""Negative controls: the suite, run on csakit with one known mistake put in, fails. CAUGHT says which part catches which mistake.

Each mistake replaces one public verb, or the integers of every layout. Each judge is a part of the suite itself, called as it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import test_corner_cases as corner
import test_field_reports as field
import test_field_reports_memory as memory
import test_field_reports_selection as selection
import test_golden as golden
import test_properties as properties
import torch

import csakit
from csakit import Layout
from csakit import layout as layouts

INF = float("inf")
BUILD, PACKED = layouts._from_positions, Layout.packed
ATTEND, SELECT, COMPRESS, DISTILL, DISTILL_DENSE = csakit.attend, csakit.select, csakit.compress, csakit.distill, csakit.distill_dense


# ---- judges ----------------------------------------------------------------------------------------------------------


def golden_vectors() -> None:
    for case in golden.CASES.values():
        assert not golden.disagreements(case, golden.evaluate(case, torch.float64), torch.float64), case.name


def documents_alone() -> None:
    problem = ([7, 3, 0, 11], properties.Sizes(ratio=3, window=4, topk=2))
    properties.test_documents_give_the_same_results_in_every_arrangement_as_alone.hypothesis.inner_test(problem, 2, 5, None)


JUDGES: dict[str, Callable[[], None]] = {
    "golden vectors": golden_vectors,
    "worked teacher": lambda: field.test_window_and_sink_mass_weigh_the_heads_of_the_teacher(3, ""),
    "head shares": lambda: field.test_the_teacher_weighs_heads_by_the_share_they_send_to_entries(1, ""),
    "window keys move it": lambda: corner.test_window_keys_and_one_sink_move_the_teacher_unless_there_is_one_head("window keys", 2, ""),
    "a sink moves it": lambda: corner.test_window_keys_and_one_sink_move_the_teacher_unless_there_is_one_head("one sink", 2, ""),
    "head ranks": lambda: corner.test_log_mass_of_head_ranks_combines_before_it_is_normalised(2, ""),
    "sinks of 150": lambda: corner.test_sinks_of_150_on_all_heads_leave_a_teacher_that_sums_to_one(""),
    "scores of 1e3": lambda: corner.test_scores_of_any_magnitude_have_an_exact_loss_and_gradient(),
    "closing query": lambda: corner.test_the_query_that_closes_a_block_is_the_first_to_see_it(3, ""),
    "window width": lambda: memory.test_the_window_is_w_tokens_counting_the_query(3, ""),
    "ties": lambda: corner.test_ties_go_to_the_lowest_entry(0, ""),
    "score scale": lambda: selection.test_the_score_scale_is_the_temperature_of_the_student_and_not_a_choice(4, 16, 1, ""),
    "first block": lambda: memory.test_the_first_block_of_a_document_has_no_previous_half(""),
    "documents alone": documents_alone,
    "padding row": lambda: corner.test_a_row_of_padding_beside_a_real_row_changes_nothing_there("sparse", ""),
    "relu": lambda: selection.test_relu_comes_before_the_head_sum_and_weights_may_be_negative(""),
    "isolation": lambda: field.test_the_indexer_loss_reaches_the_indexer_and_nothing_else("sparse", ""),
    "sparse and dense": lambda: field.test_sparse_and_dense_differ_exactly_when_k_leaves_something_out(2, 9, ""),
}


# ---- mistakes --------------------------------------------------------------------------------------------------------


def wrong_log_mass(teacher: Callable) -> Callable:
    """attend, whose log_mass is what `teacher(attention, arguments)` says."""

    def attend(q, kv, entries, layout, **options):
        attention = ATTEND(q, kv, entries, layout, **options)
        if attention.log_mass is None:
            return attention
        arguments = dict(options, q=q, kv=kv, entries=entries, layout=layout)
        return attention._replace(log_mass=teacher(attention, arguments))

    return attend


def with_lse_of(**changes) -> Callable:
    """A teacher whose denominator is that of other attention: another sink, no window."""

    def teacher(attention, given):
        q, kv, entries, layout = (given[name] for name in ("q", "kv", "entries", "layout"))
        if changes.get("kv", kv) is None and kv is not None:
            after = torch.arange(1, q.shape[1] + 1, dtype=torch.int32).expand_as(layout.window_start)
            without = replace(layout, window=0, window_start=after + layout.kv_offset)
        else:
            without = layout
        kept = {name: given.get(name) for name in ("indices", "scale", "value_width", "entry_values", "sink")}
        kept["values"] = None if without.window == 0 else given.get("values")
        lse = ATTEND(q, None if without.window == 0 else kv, entries, without, **kept | {n: v for n, v in changes.items() if n != "kv"}).lse
        return csakit.teacher_log_mass(q, entries, lse, layout, indices=given["indices"], scale=given.get("scale"))

    return teacher


def mean_of_rank_teachers(attention, given):
    q, entries, layout = given["q"], given["entries"], given["layout"]
    indices, ranks = given["indices"], q.shape[2]
    if indices.ndim == 4 or entries.ndim == 4 or ranks == 1:
        return attention.log_mass
    per_rank = [
        csakit.teacher_log_mass(
            q[:, :, h : h + 1], entries, attention.lse[:, :, h : h + 1], layout, indices=indices, scale=given.get("scale")
        )
        for h in range(ranks)
    ]
    return torch.stack([golden.normalise(mass) for mass in per_rank]).mean(0).log()


def epsilon_in_the_logarithm(scores, log_mass, layout, **options):
    live = scores != -INF
    teacher, student = golden.normalise(log_mass.masked_fill(~live, -INF)), golden.normalise(scores)
    result = DISTILL(scores, log_mass, layout, **options)
    kl = torch.where(live, teacher * ((teacher + 1e-10).log() - (student + 1e-10).log()), 0).sum(-1)
    kl = kl.mean(-1) if kl.ndim > 2 else kl
    weight = torch.where(layout.valid, 1.0 if options.get("weight") is None else options["weight"], 0)
    loss = (kl * weight).sum() / result.divisor if result.divisor else 0 * kl.sum()
    return result._replace(loss=loss, kl=kl.detach())


def divisor_of(counted: Callable[[Layout], torch.Tensor]) -> dict[str, Callable]:
    """Both objectives, whose default divisor is the weight of other tokens."""

    def wrong(verb: Callable) -> Callable:
        def distill(*args, **options):
            layout = next(a for a in args if isinstance(a, Layout))
            if options.get("divisor") is None:
                weight = torch.ones(layout.valid.shape) if options.get("weight") is None else options["weight"]
                options["divisor"] = (weight * counted(layout)).sum()
            return verb(*args, **options)

        return distill

    return {"distill": wrong(DISTILL), "distill_dense": wrong(DISTILL_DENSE)}


def layout_with(**changes: Callable) -> Callable:
    """The integers of every layout, one of them by another rule."""

    def build(positions, valid, ratio, window):
        right = BUILD(positions, valid, ratio, window)
        return replace(right, **{name: torch.where(valid, rule(right), getattr(right, name)).int() for name, rule in changes.items()})

    return build


def token_of(layout: Layout) -> torch.Tensor:
    return torch.arange(layout.positions.shape[1]).expand_as(layout.positions)


def later_entries(layout: Layout) -> torch.Tensor:
    return (layout.entry_start + (layout.positions + 2) // layout.ratio).clamp(max=layout.num_entries)


def wider_window(by: int) -> Callable:
    def start(layout: Layout) -> torch.Tensor:
        first = token_of(layout) - layout.positions
        return torch.maximum(first, token_of(layout) + 1 - max(layout.window + by, 0)) if layout.window else layout.window_start

    return start


def swapped_halves(values, gates, bias, layout, *, overlap=True):
    swap = (lambda x: torch.cat(x.chunk(2, -1)[::-1], -1)) if overlap else (lambda x: x)
    return COMPRESS(swap(values), swap(gates), swap(bias), layout, overlap=overlap)


def one_document(cu_seqlens, *, ratio, window, tokens=None, cu_seqlens_padded=None):
    last = int((cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded)[-1])
    return Layout.batch(1, last if tokens is None else tokens, ratio=ratio, window=window)


def highest_tie_first(q, k, weights, topk, layout, **options):
    scores = csakit.index_scores(q, k, weights, layout, **options)
    order = scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :topk]
    taken = (k.shape[1] - 1 - order).sort(-1).values
    seen = scores.gather(-1, taken) > -INF
    taken = torch.where(seen, taken, k.shape[1]).sort(-1).values
    indices = torch.nn.functional.pad(torch.where(taken < k.shape[1], taken, -1), (0, topk - taken.shape[-1]), value=-1).int()
    padded = torch.nn.functional.pad(scores, (0, 1), value=-INF)
    return csakit.Selection(indices, padded.gather(-1, torch.where(indices >= 0, indices, k.shape[1]).long()))


def without_default_scale(q, k, weights, topk, layout, *, scale=None, **options):
    return SELECT(q, k, weights, topk, layout, scale=1.0 if scale is None else scale, **options)


def without_relu(q, k, weights, topk, layout, **options):
    return SELECT(q, k, weights, topk, layout, **options | {"relu": False})


def detached_scores(*args, **options):
    selection = SELECT(*args, **options)
    return selection._replace(scores=selection.scores.detach().requires_grad_())


MISTAKES: dict[str, dict[str, object]] = {
    "compressed-only teacher": {"attend": wrong_log_mass(with_lse_of(kv=None, sink=None))},
    "sink without window": {"attend": wrong_log_mass(with_lse_of(kv=None))},
    "window without sink": {"attend": wrong_log_mass(with_lse_of(sink=None))},
    "selected-prefix lse": {"attend": wrong_log_mass(lambda attention, given: prefix_log_mass(given))},
    "per-rank normalisation": {"attend": wrong_log_mass(mean_of_rank_teachers)},
    "epsilon in the logarithm": {"distill": epsilon_in_the_logarithm},
    "candidates in the divisor": divisor_of(lambda layout: layout.entry_stop > layout.entry_start),
    "padding in the divisor": divisor_of(lambda layout: torch.ones_like(layout.valid)),
    "visible one query late": {"layout": layout_with(entry_stop=lambda a: a.entry_start + a.positions // a.ratio)},
    "visible one query early": {"layout": layout_with(entry_stop=later_entries)},
    "window W + 1": {"layout": layout_with(window_start=wider_window(1))},
    "window W - 1": {"layout": layout_with(window_start=wider_window(-1))},
    "swapped compression halves": {"compress": swapped_halves},
    "packed as one document": {"packed": one_document},
    "highest tie first": {"select": highest_tie_first},
    "no default score scale": {"select": without_default_scale},
    "no ReLU": {"select": without_relu},
    "scores cut from the graph": {"select": detached_scores},
}


def prefix_log_mass(given: dict) -> torch.Tensor:
    """The denominator of the first half of the selected slots."""
    half = given["indices"].clone()
    half[..., (half.shape[-1] + 1) // 2 :] = -1
    kept = {name: given.get(name) for name in ("scale", "sink", "values", "entry_values", "value_width")}
    lse = ATTEND(given["q"], given["kv"], given["entries"], given["layout"], indices=half, **kept).lse
    return csakit.teacher_log_mass(given["q"], given["entries"], lse, given["layout"], indices=given["indices"], scale=given.get("scale"))


TEACHER = {"golden vectors", "worked teacher", "head shares", "sparse and dense"}
CAUGHT: dict[str, set[str]] = {
    "compressed-only teacher": {*TEACHER, "window keys move it", "a sink moves it", "head ranks", "sinks of 150"},
    "sink without window": {*TEACHER, "window keys move it"},
    "window without sink": {*TEACHER, "a sink moves it", "sinks of 150"},
    "selected-prefix lse": {*TEACHER},
    "per-rank normalisation": {*TEACHER, "window keys move it", "a sink moves it", "head ranks", "sinks of 150"},
    "epsilon in the logarithm": {"golden vectors", "worked teacher", "sinks of 150", "scores of 1e3", "sparse and dense"},
    "candidates in the divisor": {"golden vectors"},
    "padding in the divisor": {"golden vectors", "padding row"},
    "visible one query late": {"golden vectors", "worked teacher", "closing query", "ties", "relu"},
    "visible one query early": {"golden vectors", "worked teacher", "closing query", "ties", "documents alone"},
    "window W + 1": {"golden vectors", "worked teacher", "window width"},
    "window W - 1": {"golden vectors", "worked teacher", "window width"},
    "swapped compression halves": {"golden vectors", "first block"},
    "packed as one document": {"golden vectors", "window width", "first block", "documents alone"},
    "highest tie first": {"golden vectors", "ties"},
    "no default score scale": {"score scale", "sparse and dense"},
    "no ReLU": {"golden vectors", "ties", "relu", "sparse and dense"},
    "scores cut from the graph": {"golden vectors", "window keys move it", "a sink moves it", "isolation"},
}


def put_in(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, wrong in MISTAKES[mistake].items():
        if place == "layout":
            monkeypatch.setattr(layouts, "_from_positions", wrong)
        elif place == "packed":
            monkeypatch.setattr(Layout, "packed", staticmethod(wrong))
        else:
            monkeypatch.setattr(csakit, place, wrong)


def fails(judge: Callable[[], None]) -> bool:
    try:
        judge()
    except (AssertionError, RuntimeError):  # a wrong result, or one of another shape or outside the graph
        return True
    return False


@pytest.mark.parametrize("judge", JUDGES)
def test_every_judge_accepts_csakit_as_it_is(judge: str) -> None:
    JUDGES[judge]()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught_by_the_parts_of_the_suite_that_name_it(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(mistake, monkeypatch)
    assert {name for name, judge in JUDGES.items() if fails(judge)} == CAUGHT[mistake]
