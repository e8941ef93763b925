"""The audit's oracle against the golden vectors: a judge has to be right itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from golden.read_golden import Case as Golden
from golden.read_golden import hide, load

from csakit.audit import Case, oracle, random_case
from csakit.audit.candidates import PlainTorch
from csakit.audit.case import ATTENTION_INPUTS, INDEX_INPUTS
from csakit.audit.subject import Subject, gap

INF = float("inf")


def expressible(golden: Golden) -> bool:
    """Whether an audit case can say it: an objective, and no gaps between the documents of a row."""
    layout = golden.options["layout"]
    if layout["kind"] == "packed":
        simple = "cu_seqlens_padded" not in layout and layout.get("tokens", layout["cu_seqlens"][-1]) == layout["cu_seqlens"][-1]
    else:
        simple = layout["kind"] in ("batch", "mask")
    return bool(golden.options["objective"]) and simple


CASES = [golden for golden in load() if expressible(golden)]


def audit_case(golden: Golden) -> Case:
    """The golden case as an audit case, with NaN wherever nobody may read."""
    options, layout = golden.options, golden.options["layout"]
    inputs = hide(golden.inputs, golden.expected["valid"], golden.expected["entry_token"]) if golden.nan_in_padding else golden.inputs
    x = {name: torch.tensor(np.asarray(value), dtype=torch.float64) for name, value in inputs.items()}
    rows, tokens, heads, width = x["q"].shape
    unused = {
        "values": torch.zeros(rows, tokens, 2 * width),
        "gates": torch.zeros(rows, tokens, 2 * width),
        "bias": torch.zeros(options["ratio"], 2 * width),
    }
    return Case(
        **{name: x[name] for name in ("q", "kv", "entries", "q_index", "k_index", "weights")},
        **{name: x.get(name, default) for name, default in unused.items()},
        **{name: options[name] for name in ("ratio", "window", "scale", "index_scale", "objective", "denominator", "divisor")},
        sink=x.get("sink", torch.full((heads,), -INF, dtype=torch.float64)),
        topk=options["topk"] or 1,
        weight=x.get("weight"),
        cu_seqlens=torch.tensor(layout["cu_seqlens"], dtype=torch.int32) if layout["kind"] == "packed" else None,
        mask=torch.tensor(layout["mask"]).bool() if layout["kind"] == "mask" else None,
    )


def test_the_golden_vectors_that_an_audit_case_can_express_are_most_of_them():
    assert len(CASES) >= 27


@pytest.mark.parametrize("golden", CASES, ids=lambda golden: golden.name)
def test_the_oracle_gives_the_golden_loss_teacher_selection_and_gradients(golden: Golden):
    answer, expected = oracle.solve(audit_case(golden)), {name: torch.tensor(x) for name, x in golden.expected.items()}
    assert gap(answer.loss, expected["loss"]) <= 1e-12
    assert gap(answer.kl, expected["kl"]) <= 1e-12
    if golden.options["objective"] == "sparse":
        assert torch.equal(answer.indices, expected["indices"].long())
        filled = torch.gather(answer.teacher, 2, answer.indices.clamp_min(0)) if answer.teacher.shape[2] else expected["teacher"]
        assert gap(torch.where(answer.indices < 0, 0, filled), expected["teacher"]) <= 1e-12
    else:
        assert gap(answer.teacher, expected["teacher"]) <= 1e-12
    for name in INDEX_INPUTS:
        assert gap(golden.options["d_loss"] * answer.gradients[name], expected[f"d_{name}"]) <= 1e-12, name


@pytest.mark.parametrize("golden", [golden for golden in CASES if golden.name != "sink_plus_inf"], ids=lambda golden: golden.name)
def test_the_oracle_gives_the_golden_attention_and_its_gradients(golden: Golden):
    case, expected = audit_case(golden), {name: torch.tensor(x) for name, x in golden.expected.items()}
    out, gradients = oracle.attend(case, torch.tensor(golden.inputs["d_out"]))
    assert gap(out, expected["out"]) <= 1e-12
    for name in ATTENTION_INPUTS:
        if f"d_{name}" in expected:
            assert gap(gradients[name], expected[f"d_{name}"]) <= 1e-12, name


@pytest.mark.parametrize(
    "golden", [golden for golden in CASES if "values" in golden.inputs and golden.options["overlap"]], ids=lambda golden: golden.name
)
def test_the_oracle_gives_the_golden_entries(golden: Golden):
    assert gap(oracle.compress(audit_case(golden)), torch.tensor(golden.expected["compressed"])) <= 1e-12


@pytest.mark.parametrize("golden", CASES, ids=lambda golden: golden.name)
def test_the_plain_candidate_gives_the_golden_loss_and_gradients(golden: Golden):
    subject = Subject(PlainTorch())
    subject.denominator = golden.options["denominator"]
    answer = subject.answer(audit_case(golden))
    assert gap(answer.loss, torch.tensor(golden.expected["loss"])) <= 1e-12
    for name in INDEX_INPUTS:
        assert gap(golden.options["d_loss"] * answer.gradients[name], torch.tensor(golden.expected[f"d_{name}"])) <= 1e-12, name


ORDINARY = [random_case(), random_case(2), random_case(2, 14), random_case(2, 18), random_case(2, 18, topk=3), random_case(3, 12)]
OTHER = [random_case(heads=1), random_case(heads=4), random_case(tokens=20, ratio=4), random_case(lengths=(0, 5, 1, 7, 2, 0, 9))]


@pytest.mark.parametrize("case", [*ORDINARY, *OTHER])
def test_random_cases_are_exact_in_bfloat16_and_no_tie_decides_a_selection(case: Case):
    for name, x in case.tensors().items():
        assert torch.equal(x, x.to(torch.bfloat16).to(x.dtype)), name
    for query in oracle.queries(case):
        ranked = oracle.scores_of(case, query).sort(descending=True).values
        assert len(ranked) <= case.topk or ranked[case.topk - 1] - ranked[case.topk] > 1e-3


def test_document_ids_number_the_documents_and_mark_padding():
    assert random_case(lengths=(0, 2, 0, 3)).document_ids.tolist() == [[0, 0, 1, 1, 1]]
    padded = random_case(3, 4).with_tensors({"mask": torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]]).bool()})
    assert padded.document_ids.tolist() == [[0, 0, -1, -1], [-1] * 4, [-1, 1, 1, 1]]
    assert random_case(2, 2).document_ids.tolist() == [[0, 0], [1, 1]]
