"""The study of the teacher: what it trains and measures is what it says, and one command runs it through."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.teacher_study import indexers, model, presets, records, stages, teachers, text
from benchmarks.teacher_study.__main__ import main
from csakit import Layout, metrics
from csakit.audit import Case, random_case
from csakit.audit.candidates import PlainTorch
from csakit.nn.functional import AttendInputs

SMOKE = presets.PRESETS["smoke"]
MISTAKES = {"full": None, "compressed-only": "compressed-only", "sink-only": "sink-without-window", "window-only": "window-without-sink"}


def view_of(case: Case) -> model.LayerView:
    """A compressed layer that attends what an audit case holds."""
    layout = Layout.batch(*case.kv.shape[:2], ratio=case.ratio, window=case.window)
    return model.LayerView(0, case.kv, case.kv, AttendInputs(case.q, case.kv, case.entries, case.sink, case.scale), layout)


@pytest.mark.parametrize("objective", ["dense", "sparse"])
@pytest.mark.parametrize("arm", presets.ARMS)
def test_each_teacher_is_the_audit_s_candidate_with_the_mistake_of_that_name(arm: str, objective: str) -> None:
    case = replace(random_case(2, 24, heads=4, ratio=4, window=5, topk=3), objective=objective)
    expected = PlainTorch(MISTAKES[arm]).loss(case)
    view = view_of(case)
    indices = None if objective == "dense" else expected.indices
    mass = teachers.log_mass(view, teachers.denominators(view, indices)[arm], indices)
    teacher = mass.softmax(-1).nan_to_num()
    if indices is not None:
        full = torch.zeros(*teacher.shape[:2], case.entries.shape[1] + 1, dtype=teacher.dtype)
        teacher = full.scatter(-1, torch.where(indices < 0, case.entries.shape[1], indices).long(), teacher)[..., :-1]
    torch.testing.assert_close(teacher, expected.teacher, atol=1e-12, rtol=0)


def test_with_one_head_all_four_teachers_coincide_and_with_two_they_do_not() -> None:
    """With one head the denominator cancels; it does not where heads differ."""
    for heads, alike in ((1, True), (2, False)):
        view = view_of(random_case(2, 24, heads=heads, ratio=4, window=5))
        lse = teachers.denominators(view)
        right = teachers.log_mass(view, lse["full"]).softmax(-1).nan_to_num()
        for arm in presets.ARMS[1:]:
            wrong = teachers.log_mass(view, lse[arm]).softmax(-1).nan_to_num()
            assert bool((right - wrong).abs().max() < 1e-12) is alike, (heads, arm)


@pytest.fixture(scope="module")
def trained() -> model.LanguageModel:
    """A one-headed language model after a few steps."""
    preset = replace(SMOKE, heads=1)
    torch.manual_seed(0)
    return model.LanguageModel(preset).requires_grad_(False)


def test_indexers_of_a_one_headed_model_learn_the_same_from_every_teacher(trained: model.LanguageModel) -> None:
    students = {arm: indexers.new_indexers(trained.preset, 0) for arm in presets.ARMS}
    before = [parameter.clone() for parameter in students["full"].parameters()]
    indexers.train(trained, students, indexers.random_parts(trained.preset, presets.ARMS, 0), teachers=presets.ARMS, steps=3, seed=0)
    assert not all(torch.equal(*pair) for pair in zip(before, students["full"].parameters()))
    for arm in presets.ARMS[1:]:
        for right, wrong in zip(students["full"].parameters(), students[arm].parameters()):
            torch.testing.assert_close(right, wrong, atol=1e-4, rtol=0)


def test_the_loss_of_a_part_of_the_queries_is_their_part_of_the_dense_loss() -> None:
    preset = replace(SMOKE, heads=2)
    torch.manual_seed(0)
    network = model.LanguageModel(preset)
    own = indexers.new_indexers(preset, 0)
    losses = []

    def look(view: model.LayerView) -> torch.Tensor:
        lse, inputs = teachers.denominators(view), indexers.index(own, view)
        losses.append(indexers.dense_loss("full")(inputs, view, lse))
        losses.append(torch.stack([indexers.dense_loss("full", which, 4)(inputs, view, lse) for which in range(4)]).mean())
        return model.dense(view)

    network(text.training_rows(0, 0, 2, preset.tokens)[:, :-1], look)
    torch.testing.assert_close(losses[0], losses[1])


def test_the_model_does_not_see_the_future_and_uses_its_past() -> None:
    torch.manual_seed(0)
    network = model.LanguageModel(SMOKE)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ids = text.training_rows(0, 0, 1, SMOKE.tokens)[:, :-1]
    other = ids.clone()
    other[:, 32] += 1
    moved = (network(ids % 256) - network(other % 256)).abs().amax(-1)[0]
    assert not moved[:32].any() and moved[32:].any() and moved[-1] > 0


def test_greatest_is_the_selection_of_the_verbs() -> None:
    """Ascending, -1 in empty slots, and the same set as the oracle's greatest mass."""
    view = view_of(random_case(2, 24, heads=4, ratio=4, window=5))
    mass = teachers.log_mass(view, teachers.denominators(view)["full"])
    for topk in (1, 3, 9):
        chosen = teachers.greatest(mass, topk)
        assert torch.equal(metrics.topk_recall(mass, chosen), (view.layout.entry_stop > 0).to(mass.dtype))
        view.attend(chosen)
    ranks = teachers.reference_ranks(view, {"full": mass, "compressed-only": mass}, torch.Generator())
    recent = teachers.greatest(ranks["recent"], 2)
    assert recent[0, -1].tolist() == [4, 5] and recent[0, 3].tolist() == [0, -1] and recent[0, 2].tolist() == [-1, -1]


def test_a_ratio_s_error_is_that_of_a_mean_where_weights_are_equal() -> None:
    x = torch.tensor([1.0, 2.0, 4.0, 9.0])
    value, error = records.ratio(x * 2, torch.full((4,), 2.0))
    assert value == pytest.approx(4.0) and error == pytest.approx(float(x.std() / 2))
    assert records.ratio(3 * x, x) == pytest.approx((3.0, 0.0))  # rows that agree have no error, whatever they weigh


def test_rows_lie_inside_documents_and_follow_from_seed_and_step() -> None:
    first, again, other = (text.training_rows(*at, 3, 64) for at in ((0, 5), (0, 5), (0, 6)))
    assert torch.equal(first, again) and not torch.equal(first, other) and first.shape == (3, 65)
    training = [document.text for document in text.corpus().training]
    assert all(any(bytes(row.tolist()) in document for document in training) for row in first)
    with pytest.raises(ValueError, match="held-out stretches"):
        text.heldout_rows(10**6, 64)


def test_one_command_runs_the_study_and_a_second_run_has_nothing_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", "--preset", "smoke", "--out", str(tmp_path)])
    study = stages.Study("smoke", tmp_path)
    found = {task: records.read(study.file(task, ".csv")) for task in stages.tasks(study)}
    assert "index-0-1: done" in capsys.readouterr().out
    main(["run", "--preset", "smoke", "--out", str(tmp_path)])
    assert capsys.readouterr().out == ""

    lone = [r.value for r in found["gates-0"] if r.metric == "KL of its own two teachers"]
    assert len(lone) == SMOKE.heads and max(map(abs, lone)) < 1e-5
    capture = {(r.arm, r.topk): r.value for r in found["gates-0"] if r.metric == "mass-weighted capture" and not r.against}
    assert all(capture["oracle", topk] >= capture[name, topk] for name in presets.REFERENCES for topk in SMOKE.capture_topks)
    cost = {(r.arm, r.topk): r.value for r in found["index-0-0"] if r.metric == "bits per byte" and r.queries == "late" and not r.against}
    paired = {r.arm: r for r in found["index-0-0"] if r.metric == "bits per byte" and r.queries == "late" and r.against == "full"}
    for arm in presets.ARMS[1:]:
        assert paired[arm].value == pytest.approx(cost[arm, 2] - cost["full", 2], abs=1e-5)
    gaps = {r.arm: r.value for r in found["index-0-0"] if r.metric == "KL to the true teacher" and r.against == "full"}
    assert all(gaps[arm] for arm in ("sink-only", "compressed-only")), "every arm has a teacher of its own"
    assert {r.arm for r in found["sparse-0"] if r.metric == "recall"} >= {"full, visible", "compressed-only, attended"}
    assert {r.stage for task in found.values() for r in task} == {"language", "frozen", "control", "sparse objective", "joint"}
