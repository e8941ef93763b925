"""What catches what: right candidates pass every probe, each known mistake fails those that name it, each probe can fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import csakit
from csakit import audit
from csakit.audit.candidates import MISTAKES, WRONG, PlainTorch
from csakit.audit.candidates.library import Library

DOCUMENT = Path(__file__).parents[2] / "docs" / "audit_matrix.md"

# The probes of which each mistake must fail at least these; the rest of its row follows from them.
NAMED_BY = {
    "compressed-only": {"window", "sink", "worked-teacher"},
    "selected-prefix-lse": {"window", "sink", "worked-teacher", "dense-is-all-selected"},
    "sink-without-window": {"window", "worked-teacher"},
    "window-without-sink": {"sink", "worked-teacher"},
    "per-rank-normalisation": {"head-split"},
    "teacher-without-scale": {"shift-invariance", "sparse-loss", "dense-loss"},
    "epsilon-in-logarithm": {"extreme-scores"},
    "clamped-student": {"extreme-scores"},
    "reverse-kl": {"extreme-scores", "sparse-loss", "dense-loss"},
    "probability-space": {"underflow"},
    "unnormalised-teacher": {"single-head-control"},
    "base-2-lse": {"shift-invariance", "worked-teacher"},
    "teacher-with-gradient": {"gradient-isolation"},
    "late-visibility": {"visibility", "selection", "attention"},
    "early-visibility": {"visibility", "causality", "selection", "attention"},
    "window-plus-one": {"window-width", "attention"},
    "swapped-halves": {"compression"},
    "highest-tie-first": {"tie-rule"},
    "sparse-is-dense": {"top-k-below-visible"},
    "student-without-scale": {"sparse-loss", "dense-loss"},
    "detached-scores": {"indexer-trains"},
    "packed-as-one": {"packed-leak", "attention-packed", "compression"},
    "left-padding-as-text": {"padding-side", "attention-padding"},
    "masked-by-score-only": {"padding-poison"},
    "softmax-of-nothing": {"empty-rows"},
    "padding-in-divisor": {"row-divisor"},
    "candidates-in-divisor": {"row-divisor"},
    "divisor-ignored": {"loss-scale"},
    "weights-ignored": {"row-weights"},
    "coefficient-none": {"loss-off"},
}
# What must not be blamed on a mistake that leaves it right.
SPARED = {
    "compressed-only": {"single-head-control", "visibility", "causality", "packed-leak", "padding-poison", "loss-scale", "selection"},
    "sink-without-window": {"sink", "single-head-control", "visibility"},
    "window-without-sink": {"window", "window-width", "visibility"},
    "per-rank-normalisation": {"sparse-loss", "dense-loss", "worked-teacher"},
    "late-visibility": {"causality", "window", "sink", "packed-leak"},
    "window-plus-one": {"window", "visibility", "causality"},
    "padding-in-divisor": {"sparse-loss", "padding-poison", "packed-leak"},
}


def test_right_candidates_pass_every_probe_and_nothing_goes_untested(table: audit.Matrix):
    for report in table.right:
        assert [verdict.status for verdict in report.verdicts] == ["pass"] * len(audit.PROBES), str(report)
    assert [report.candidate for report in table.right] == ["csakit", "torch"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_known_mistake_is_caught_by_the_probes_that_name_it(table: audit.Matrix, mistake: str):
    report = next(report for report in table.wrong if report.candidate == mistake)
    assert set(report.failed) >= NAMED_BY[mistake], str(report)
    assert not set(report.failed) & SPARED.get(mistake, set()), str(report)


def test_every_probe_fails_on_some_mistake_so_that_none_is_idle(table: audit.Matrix):
    assert {name for report in table.wrong for name in report.failed} == set(audit.PROBES)


def test_the_table_holds_when_every_candidate_is_as_it_should_be(table: audit.Matrix):
    assert table.passed
    assert not audit.Matrix(table.right, (*table.wrong, table.right[0])).passed, "a mistake that nothing catches"
    assert not audit.Matrix(table.wrong[:1], table.wrong).passed, "a right candidate that fails"


def test_the_documented_table_is_the_one_the_code_prints(table: audit.Matrix):
    printed = table.markdown({name: probe.holds for name, probe in audit.PROBES.items()}, MISTAKES)
    assert printed in DOCUMENT.read_text(), "run `csakit audit all --markdown` and paste what it prints into docs/audit_matrix.md"


def test_the_text_table_marks_each_failed_probe_once(table: audit.Matrix):
    lines = str(table).splitlines()
    for number, report in enumerate((*table.right, *table.wrong), start=1):
        assert lines[number].startswith(report.candidate)
        assert lines[number][len(report.candidate) :].count("x") == len(report.failed)


@pytest.mark.parametrize("mistake", ["compressed-only", "selected-prefix-lse", "sink-without-window", "window-plus-one", "late-visibility"])
def test_a_wrong_loss_is_recognised_as_the_mistake_it_is(table: audit.Matrix, mistake: str):
    report = next(report for report in table.wrong if report.candidate == mistake)
    assert report.fits is not None
    assert report.fits.startswith(f"its loss is that of {mistake} (")


def test_a_loss_near_a_known_mistake_is_named_as_near_to_it():
    report = audit.run(lambda case: WRONG["sink-without-window"].loss(case).loss * 1.001, ["window"])
    assert report.fits is not None
    assert report.fits.startswith("nearest known mistake: sink-without-window")


def test_under_the_sparse_objective_alone_two_mistakes_are_the_same():
    def sparse_only(case: audit.Case) -> audit.Result:
        if case.objective == "dense":
            raise audit.NotSupported("sparse only")
        return WRONG["compressed-only"].loss(case)

    fits = audit.run(sparse_only, ["window"]).fits
    assert fits is not None
    assert fits.startswith("its loss is that of compressed-only or selected-prefix-lse (")


def test_a_mistake_outside_ordinary_rows_is_not_blamed_on_the_loss(table: audit.Matrix):
    report = next(report for report in table.wrong if report.candidate == "highest-tie-first")
    assert report.fits == "on ordinary rows its loss is right"


@pytest.mark.parametrize("options", [{"name": "reference"}, {"name": "cpu", "tile": 3}], ids=["reference", "cpu"])
def test_csakit_passes_on_each_backend_and_tile(options: dict):
    with csakit.backend(**options):
        report = audit.run(Library())
    assert report.passed, str(report)


class InPrecision(Library):
    """csakit in another precision, with a convention of its own."""

    def __init__(self, dtype: torch.dtype, denominator: str):
        self.dtype, self.denominator = dtype, denominator


@pytest.mark.parametrize(
    ("dtype", "denominator"), [(torch.float64, "visible"), (torch.float32, "attended"), (torch.bfloat16, "attended")], ids=str
)
def test_csakit_passes_in_each_precision_and_with_either_denominator(dtype: torch.dtype, denominator: str):
    report = audit.run(InPrecision(dtype, denominator))
    assert report.passed, str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_hides_no_wrong_teacher(dtype: torch.dtype):
    candidate = SimpleNamespace(loss=PlainTorch("compressed-only").loss, dtype=dtype)
    assert set(audit.run(candidate).failed) >= NAMED_BY["compressed-only"]


def test_statistics_in_bfloat16_lose_the_teacher_and_are_found():
    candidate = SimpleNamespace(loss=PlainTorch().loss, dtype=torch.bfloat16)
    assert audit.run(candidate, ["underflow"]).failed == ("underflow",)


class OfConvention(Library):
    """csakit under a convention of its own, whatever the case says; no member but the loss."""

    select = attend = compress = loss_over_ranks = with_coefficient = None  # type: ignore[assignment]

    def __init__(self, convention: str, declared: bool):
        self._convention = convention
        if declared:
            self.divisor = convention

    def loss(self, case: audit.Case) -> audit.Result:
        if self._convention == "visible":
            return super().loss(replace(case, denominator="visible"))
        result, lengths = super().loss(case), [length for _, _, length in case.documents]
        if case.divisor is not None:
            return result
        weight = torch.ones(case.kv.shape[:2]) if case.weight is None else case.weight
        rows = [weight[row, first : first + length] for row, first, length in case.documents]
        tokens = sum(float(row.sum()) for row in rows)
        other = {
            "candidates": sum(float(row[case.ratio - 1 :].sum()) for row in rows),
            "positions": float(weight.sum()),
            "one": 1.0,
        }[self._convention]
        return result._replace(loss=result.loss * (tokens / other if other and lengths else 1.0))


def test_the_visible_denominator_is_a_convention_that_the_audit_finds_by_itself():
    report = audit.run(OfConvention("visible", declared=False))
    assert report.verdict == "correct", str(report)
    assert "runs over all visible entries" in report.conventions["top-k"]
    assert "stands before each head's softmax" in audit.run(Library(), ["window"]).conventions["top-k"]


@pytest.mark.parametrize("divisor", ["candidates", "positions", "one"])
def test_another_divisor_is_right_when_it_is_declared_and_named_when_it_is_not(divisor: str):
    declared = audit.run(OfConvention(divisor, declared=True))
    assert declared.verdict == "correct", str(declared)
    undeclared = audit.run(OfConvention(divisor, declared=False), ["row-divisor"])
    assert undeclared.failed == ("row-divisor",)
    assert f'declare divisor = "{divisor}"' in undeclared.verdicts[0].explanation


def test_the_order_and_the_empty_slots_of_a_selection_are_a_convention():
    class Backwards(Library):
        def select(self, case: audit.Case) -> torch.Tensor:
            return torch.nn.functional.pad(super().select(case).flip(-1), (2, 1), value=-1)

    assert audit.run(Backwards(), ["selection"]).passed


@pytest.mark.parametrize("name", ["csakit", "torch"])
def test_right_candidates_are_right_for_tokens_alone_and_at_a_larger_size(name: str):
    candidate = audit.candidates.load(name)
    alone = SimpleNamespace(**{member: getattr(candidate, member) for member in ("loss", "select", "attend")}, form="dsa", name=name)
    report = audit.run(alone)
    assert report.verdict == "correct", str(report)
    assert "window" in {verdict.probe for verdict in report.verdicts if verdict.status == "not tested"}
    size = audit.Size(times=3, heads=6, window=5, width=16, index_heads=12, index_width=8)
    larger = audit.run(candidate, size=size)
    assert larger.verdict == "correct", str(larger)
    assert audit.run(WRONG["compressed-only"], ["sparse-loss", "dense-loss"], size=size).failed == ("sparse-loss", "dense-loss")


def test_a_corner_has_its_own_mistake_and_the_loss_is_called_right_on_ordinary_rows():
    for mistake, corner in (("clamped-student", "extreme scores"), ("probability-space", "e^-800"), ("padding-in-divisor", "padding")):
        report = audit.run(WRONG[mistake], [next(iter(NAMED_BY[mistake])), "sparse-loss", "dense-loss"])
        assert report.verdict == "defects"
        assert report.fits is not None
        assert report.fits.startswith("on ordinary rows its loss is right; ")
        assert corner in report.fits
        assert report.fit is not None
        assert mistake in report.fit.mistakes


def test_underflow_says_from_where_on_the_teacher_is_lost():
    candidate = SimpleNamespace(loss=PlainTorch("probability-space").loss)
    verdict = audit.run(candidate, ["underflow"]).verdicts[0]
    assert "lost where every head puts less than e^-" in verdict.explanation
    shift = int(verdict.explanation.split("e^-")[-1].split()[0])
    assert 2 < shift < 30, "max(sum, 1e-10) loses it from about e^-23 on"


def test_where_to_look_names_lines_of_the_candidates_own_code():
    report = audit.run(PlainTorch("compressed-only"), ["window", "sink"])
    assert report.places
    assert all(place.file.endswith("plain.py") for place in report.places)
    assert any("logsumexp" in place.code for place in report.places)
    assert f"{report.places[0].file}:{report.places[0].line}" in str(report)


def test_the_runner_up_and_its_distance_are_told():
    fit = audit.run(WRONG["compressed-only"], ["window"]).fit
    assert fit is not None
    assert fit.mistakes == ("compressed-only",)
    assert fit.runner_up_distance is not None
    assert fit.distance is not None
    assert fit.distance < 1e-10 < 0.01 < fit.runner_up_distance
    assert str(fit.runner_up) in fit.text
