"""The candidate protocol: what is optional, what is reported, what is refused."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from csakit import audit
from csakit.audit.candidates import PlainTorch, load

RIGHT = PlainTorch()
OPTIONAL = {
    "head-split": "loss_over_ranks",
    "loss-off": "with_coefficient",
    "attention": "attend",
    "attention-packed": "attend",
    "attention-padding": "attend",
    "compression": "compress",
    "selection": "select",
}


def loss_alone(case: audit.Case) -> torch.Tensor:
    """A candidate that is nothing but a function with a scalar."""
    return RIGHT.loss(case).loss


def test_a_bare_function_is_a_candidate_and_probes_that_need_more_say_what_they_miss():
    report = audit.run(loss_alone)
    untested = {verdict.probe: verdict for verdict in report.verdicts if verdict.status == "not tested"}
    assert report.candidate == "loss_alone"
    assert set(untested) == set(OPTIONAL)
    for probe, member in OPTIONAL.items():
        assert f"no {member}()" in untested[probe].explanation
        assert untested[probe].measured is None
    assert report.passed, str(report)


def test_indices_in_the_result_stand_in_for_a_select_member():
    def with_indices(case: audit.Case) -> audit.Result:
        return RIGHT.loss(case)

    assert audit.run(with_indices, ["selection"]).passed


def test_a_case_that_a_candidate_cannot_express_is_not_tested_and_gives_the_reason():
    def whole_rows_only(case: audit.Case) -> torch.Tensor:
        if case.cu_seqlens is not None:
            raise audit.NotSupported("no packed documents here")
        return loss_alone(case)

    verdict = audit.run(whole_rows_only, ["packed-leak"]).verdicts[0]
    assert (verdict.status, verdict.explanation) == ("not tested", "no packed documents here")


def test_a_report_in_which_nothing_was_tested_has_not_passed():
    def nothing(case: audit.Case) -> torch.Tensor:
        raise audit.NotSupported("nothing at all")

    report = audit.run(nothing)
    assert not report.failed
    assert not report.passed


def test_what_a_candidate_reports_about_itself_is_checked_too():
    for wrong in ("kl", "teacher", "indices"):

        def misreporting(case: audit.Case, wrong: str = wrong) -> audit.Result:
            result = RIGHT.loss(case)
            return result._replace(**{wrong: torch.zeros_like(getattr(result, wrong))})

        assert audit.run(misreporting, ["sparse-loss"]).failed == ("sparse-loss",), wrong


def test_a_crash_fails_the_probe_and_says_where():
    def crashing(case: audit.Case) -> torch.Tensor:
        if case.cu_seqlens is not None:
            raise RuntimeError("lengths must be positive")
        return loss_alone(case)

    report = audit.run(crashing, ["window", "packed-leak"])
    assert report.failed == ("packed-leak",)
    assert "RuntimeError at " in report.verdicts[1].explanation
    assert "test_audit_protocol.py" in report.verdicts[1].explanation
    assert report.verdicts[1].explanation.endswith("lengths must be positive")
    assert report.fits == "on ordinary rows its loss is right"


def test_a_candidate_that_only_crashes_gives_nothing_to_compare():
    def crashing(case: audit.Case) -> torch.Tensor:
        raise RuntimeError("out of order")

    assert audit.run(crashing, ["window"]).fits == "it gives no loss to compare with known mistakes"


def test_a_loss_that_is_not_a_number_fails_and_its_json_has_null():
    report = audit.run(lambda case: loss_alone(case) * math.nan, ["window", "sparse-loss", "row-divisor", "indexer-trains"])
    assert report.failed == ("window", "indexer-trains", "sparse-loss", "row-divisor")
    assert [verdict["measured"] for verdict in report.as_dict()["verdicts"]] == [None] * 4


def test_a_loss_far_from_everything_fits_no_known_mistake():
    fits = audit.run(lambda case: -loss_alone(case) - 5, ["sparse-loss"]).fits
    assert fits is not None
    assert fits.startswith("none of the known mistakes")


def test_a_loss_without_a_graph_leaves_the_indexer_untrained():
    assert audit.run(lambda case: loss_alone(case).detach(), ["window", "indexer-trains"]).failed == ("indexer-trains",)


def test_a_candidate_that_writes_into_its_case_spoils_nothing_for_the_next():
    def vandal(case: audit.Case) -> torch.Tensor:
        indices = RIGHT.select(case)
        for x in case.tensors().values():
            x.detach().zero_()
        return indices

    assert audit.run(SimpleNamespace(loss=loss_alone, select=vandal, name="vandal"), ["selection"]).passed
    assert audit.run(RIGHT, ["selection", "sparse-loss"]).passed


def test_probes_run_in_their_own_order_whatever_the_order_of_the_names():
    report = audit.run(RIGHT, ["tie-rule", "window"])
    assert [verdict.probe for verdict in report.verdicts] == ["window", "tie-rule"]


def test_the_text_of_a_report_has_a_line_for_each_probe_and_a_summary():
    lines = str(audit.run(PlainTorch("compressed-only"), ["window", "tie-rule"])).splitlines()
    assert lines[0].split() == ["probe", "verdict", "measured", "limit", "what", "it", "says"]
    assert lines[1].split()[:3] == ["window", "fail", "0"]
    assert lines[2].split()[:3] == ["tie-rule", "pass", "0"]
    assert lines[3].startswith("compressed-only: 1 passed, 1 failed, 0 not tested; its loss is that of compressed-only")
    assert lines[4] == "verdict: wrong: window"
    assert lines[5].startswith("convention, top-k: the mask stands before each head's softmax")


def test_a_candidate_without_any_loss_leaves_its_indexer_untrained():
    def nothing(case: audit.Case) -> torch.Tensor:
        raise audit.NoLoss("scores are thrown away")

    report = audit.run(nothing, ["window", "indexer-trains"])
    assert report.failed == ("indexer-trains",)
    assert "scores are thrown away" in report.verdicts[1].explanation
    assert report.verdict == "wrong"


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        (3, "must be a function loss\\(case\\) or an object with a method loss\\(case\\); got 3"),
        (PlainTorch, "make an instance of the class"),
        (lambda case: 0.0, "must return a scalar tensor or a csakit.audit.Result with one; got 0.0"),
        (lambda case: case.sink, "got a tensor of shape \\[3\\]"),
    ],
    ids=["number", "class", "float", "vector"],
)
def test_what_is_no_candidate_is_refused(candidate: object, message: str):
    with pytest.raises(TypeError, match=message):
        audit.run(candidate, ["window"])


def test_unknown_names_and_conventions_are_refused_with_what_is_allowed():
    with pytest.raises(ValueError, match=r"probes must be names from window, sink.*got 'colour'"):
        audit.run(RIGHT, ["colour"])
    with pytest.raises(ValueError, match=r"mistake must be None or one of compressed-only.*got 'colour'"):
        PlainTorch("colour")
    for member, value, message in (
        ("dtype", torch.int32, "dtype must be one of torch.float64.*got torch.int32"),
        ("denominator", "half", 'denominator must be "attended" or "visible"; got \'half\''),
        ("divisor", "half", "divisor must be one of tokens, candidates, positions, one; got 'half'"),
        ("form", "half", 'form must be "csa" or "dsa"; got \'half\''),
    ):
        candidate = SimpleNamespace(loss=loss_alone, **{member: value})
        with pytest.raises(ValueError, match=message):
            audit.run(candidate)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("colour", "candidate must be one of csakit, torch, megatron.*compressed-only.*or an import path.*got 'colour'"),
        ("module:", "or an import path"),
        ("no_such_module:loss", "module 'no_such_module' cannot be imported"),
        ("csakit.audit:no_such_loss", "has no attribute 'no_such_loss'"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(name: str, message: str):
    with pytest.raises(ValueError, match=message):
        load(name)


def test_an_import_path_may_lead_to_an_object_a_class_or_a_nested_attribute():
    assert load("csakit.audit.candidates:PlainTorch") == PlainTorch()
    assert load("csakit.audit.candidates.plain:PlainTorch.loss") is PlainTorch.loss


def test_the_case_of_a_rank_holds_its_heads_and_the_whole_indexer():
    case = audit.random_case(heads=4)
    shard = case.heads(2, 4)
    assert torch.equal(shard.q, case.q[:, :, 2:])
    assert torch.equal(shard.sink, case.sink[2:])
    assert shard.q_index is case.q_index
    assert {f.name for f in dataclasses.fields(shard) if getattr(shard, f.name) is not getattr(case, f.name)} == {"q", "sink"}


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="heads of a size must be a whole number of at least 1; got -1"):
        audit.Size(heads=-1)
    with pytest.raises(ValueError, match="width of a size must be a whole number of at least 1; got 0"):
        audit.Size(width=0)


def test_a_coefficient_that_crashes_is_reported_where_it_crashes():
    def crashing(case: audit.Case, coefficient: float | None) -> torch.Tensor:
        return coefficient * loss_alone(case)  # type: ignore[operator]

    report = audit.run(SimpleNamespace(loss=loss_alone, with_coefficient=crashing, name="own"), ["loss-off"])
    assert report.failed == ("loss-off",)
    assert "test_audit_protocol.py" in report.verdicts[0].explanation
    assert "coefficient None: TypeError" in report.verdicts[0].explanation
