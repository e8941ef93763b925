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
    "epsilon-in-logarithm": {"extreme-scores"},
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
    "packed-as-one": {"packed-leak", "compression"},
    "left-padding-as-text": {"padding-side"},
    "masked-by-score-only": {"padding-poison"},
    "softmax-of-nothing": {"empty-rows"},
    "padding-in-divisor": {"row-divisor"},
    "candidates-in-divisor": {"row-divisor"},
    "divisor-ignored": {"loss-scale"},
    "weights-ignored": {"row-weights"},
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


def test_a_candidate_of_the_other_denominator_must_say_so():
    class Undeclared(Library):
        def loss(self, case: audit.Case) -> audit.Result:
            return super().loss(replace(case, denominator="visible"))

    assert audit.run(Undeclared(), ["sparse-loss"]).failed == ("sparse-loss",)
