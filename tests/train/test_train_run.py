"""Whole runs of seconds: what each stage trains, and that a run broken off anywhere ends with the same numbers."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import micro
import pytest
import torch

from csakit.train import DataConfig, checkpoint, log, model
from csakit.train.checkpoint import CheckpointError
from csakit.train.corpus import DataError
from csakit.train.loop import Interrupted, TrainingError
from csakit.train.stages import part_of


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    micro.trainer(folder, micro.config()).run()
    return folder


def test_the_log_has_a_line_for_each_step_and_an_evaluation_before_and_after_each_stage(finished):
    records = micro.metrics(finished)
    steps = [(record["stage"], record["step"], record["total_steps"]) for record in records if record["kind"] == "step"]
    stages = ("dense", "warmup", "sparse")
    assert steps == [(stage, step + 1, 4 * number + step + 1) for number, stage in enumerate(stages) for step in range(4)]
    evaluations = [(record["stage"], record["when"]) for record in records if record["kind"] == "evaluation"]
    assert evaluations == [(stage, when) for stage in stages for when in ("before", "after")]


def test_the_untrained_model_knows_nothing_and_learns_in_the_dense_stage(finished):
    before, after = [record for record in micro.metrics(finished) if record["kind"] == "evaluation" and record["stage"] == "dense"]
    assert before["bits_per_byte"] == pytest.approx(math.log2(257), abs=0.2)
    assert after["bits_per_byte"] < before["bits_per_byte"] - 0.3


def test_warm_up_brings_the_indexer_nearer_to_its_teacher_and_leaves_the_model_alone(finished):
    before, after = [record for record in micro.metrics(finished) if record["kind"] == "evaluation" and record["stage"] == "warmup"]
    assert after["bits_per_byte"] == before["bits_per_byte"]
    for name, values in before["layers"].items():
        assert after["layers"][name]["kl"] < values["kl"] and after["layers"][name]["uniform_kl"] == values["uniform_kl"]


def test_an_evaluation_shows_queries_with_teacher_student_and_picks_in_their_text(finished):
    record = next(record for record in micro.metrics(finished) if record["kind"] == "evaluation" and record["stage"] == "sparse")
    query = record["queries"][0]
    assert query["position"] == 62 and len(query["entries"]) == 15 and len(query["target"]) == 1
    for values in query["layers"].values():
        assert len(values["teacher"]) == len(values["student"]) == 15
        assert sum(values["teacher"]) == pytest.approx(1, abs=1e-4) and sum(values["student"]) == pytest.approx(1, abs=1e-4)
        assert len(values["picked"]) == 4 and values["picked"] == sorted(values["student"].index(x) for x in sorted(values["student"])[-4:])
    assert 4 / 15 < record["random"] < 4 / 5


@pytest.mark.parametrize("stage, trains", [("dense", {"backbone"}), ("warmup", {"indexer"}), ("sparse", {"backbone", "indexer"})])
def test_a_stage_changes_what_it_trains_and_nothing_else(tmp_path, stage, trains):
    config = micro.config(stages=(stage,))
    run = micro.trainer(tmp_path, replace(config, **{stage: replace(config.stage(stage), steps=1)}))
    before = {name: parameter.detach().clone() for name, parameter in run.built.model.named_parameters()}
    run.run()
    changed = {part_of(name) for name, parameter in run.built.model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == trains
    steps = [record for record in micro.metrics(tmp_path) if record["kind"] == "step"]
    assert all(set(record["learning_rates"]) == set(record["gradient_norms"]) == trains for record in steps)
    assert all((record["kl"] is None) == (stage == "dense") for record in steps)


def test_the_parts_are_the_parameters_the_handle_calls_the_indexers(tmp_path):
    run = micro.trainer(tmp_path, micro.config())
    assert {name for name, _ in run.built.handle.indexer_parameters()} == {
        name for name, _ in run.built.model.named_parameters() if part_of(name) == "indexer"
    }


FIRST_TWO = ("dense", "warmup")


def of_first_two(folder) -> list[dict]:
    return [record for record in micro.metrics(folder) if record["stage"] in FIRST_TWO]


def stopped(folder, steps: int) -> None:
    """Go on with the run of this folder until a step, and stop in order there."""
    run = micro.trainer(folder, micro.config(stages=FIRST_TWO))
    run.stop = lambda: run.progress.total_steps == steps
    with pytest.raises(Interrupted, match=f"step-{steps:08d}"):
        run.run(resume=True)


def test_a_run_stopped_again_and_again_has_the_numbers_of_an_unbroken_one(tmp_path, finished):
    """Where a checkpoint is due anyway (3), at the last step of a stage, before its evaluation (4, 8), and inside a stage."""
    for steps in (3, 4, 6, 8):
        stopped(tmp_path, steps)
    micro.trainer(tmp_path, micro.config(stages=FIRST_TWO)).run(resume=True)
    assert micro.metrics(tmp_path) == of_first_two(finished)


def test_resuming_a_finished_run_changes_nothing(finished):
    before = micro.metrics(finished)
    micro.trainer(finished, micro.config()).run(resume=True)
    assert micro.metrics(finished) == before


def test_four_micro_batches_give_the_gradients_of_one(tmp_path):
    """Each tensor's gradient of language and indexer together, to the rounding of another order of summation; rows are unequally full."""
    config = micro.config(stages=("sparse",))
    run = micro.trainer(tmp_path, config)
    model.set_stage(run.built, config.sparse)
    emptiest = min(range(len(run.rows.rows)), key=lambda number: int(run.rows.batch([number]).real.sum()))
    numbers = [0, 1, 2, emptiest]
    found = []
    for batches in ([run.rows.batch(numbers)], [run.rows.batch([number]) for number in numbers]):
        run.built.model.zero_grad()
        predicted, real = (sum(int(mask.sum()) for mask in masks) for masks in zip(*((b.predicted, b.real) for b in batches)))
        nats, layers = run._gradients(config.sparse, batches, predicted, real)
        found.append((nats, layers, {name: parameter.grad.clone() for name, parameter in run.built.model.named_parameters()}))
    assert real < 4 * 64
    (nats, layers, whole), (nats_of_parts, layers_of_parts, parts) = found
    assert nats_of_parts == pytest.approx(nats, rel=1e-6) and layers_of_parts == pytest.approx(layers, rel=1e-5)
    for name, gradient in whole.items():
        scale = float(gradient.abs().max())
        assert scale > 0 and float((parts[name] - gradient).abs().max()) < 2e-5 * scale, name


def test_gradient_checkpointing_changes_no_number(tmp_path, finished):
    micro.trainer(tmp_path, micro.config(stages=FIRST_TWO, gradient_checkpointing=True)).run()
    assert len(micro.metrics(tmp_path)) == len(of_first_two(finished))
    for a, b in zip(of_first_two(finished), micro.metrics(tmp_path)):
        assert b["bits_per_byte"] == pytest.approx(a["bits_per_byte"], rel=1e-4)
        assert b.get("layers") == pytest.approx(a.get("layers"), rel=1e-3) if a["kind"] == "step" else True


def test_gradient_checkpointing_recomputes_the_layers_where_they_have_a_backward_pass(tmp_path):
    for stage, recomputed in (("warmup", 0), ("sparse", 4)):
        config = micro.config(stages=(stage,), gradient_checkpointing=True)
        run = micro.trainer(tmp_path / stage, config)
        model.set_stage(run.built, config.stage(stage))
        model.set_checkpointing(run.built, config.stage(stage).trains != "indexer")
        run.built.model.train()
        calls = []
        for layer in model.attention_layers(run.built):
            layer.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        run._gradients(config.stage(stage), [run.rows.batch([0])], 1, 1)
        assert len(calls) == 4 + recomputed


def test_the_same_seed_gives_the_same_run(tmp_path, finished):
    micro.trainer(tmp_path, micro.config(stages=("dense",))).run()
    again, first = ([r for r in micro.metrics(folder) if r["stage"] == "dense"] for folder in (tmp_path, finished))
    assert again == first


def test_another_seed_gives_another_run(tmp_path, finished):
    micro.trainer(tmp_path, micro.config(stages=("dense",), seed=1)).run()
    assert micro.metrics(tmp_path)[1]["bits_per_byte"] != micro.metrics(finished)[1]["bits_per_byte"]


def test_an_evaluation_inside_a_stage_does_not_disturb_its_steps(tmp_path, finished):
    settings = micro.config(stages=("dense",))
    micro.trainer(tmp_path, replace(settings, dense=replace(settings.dense, evaluate_every=2))).run()
    records = micro.metrics(tmp_path)
    assert [(r["stage"], r["step"]) for r in records if r.get("when") == "during"] == [("dense", 2)]
    assert [r for r in records if r.get("when") != "during"] == [r for r in micro.metrics(finished) if r["stage"] == "dense"]


def test_an_evaluation_tells_how_far_the_heads_of_each_layer_differ(finished):
    for record in micro.metrics(finished):
        for values in record["layers"].values() if record["kind"] == "evaluation" else ():
            assert len(values["heads_entries"]) == 2 and values["heads_cv"] > 0
            assert sum(values["heads_entries"]) / 2 == pytest.approx(values["entries"]) and 0 < values["entries"] < 1


def test_tensorboard_has_the_numbers_of_the_log_and_those_a_resumed_run_repeats_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = micro.config(stages=("warmup",), tensorboard=True)
    first = micro.trainer(tmp_path, settings)
    first.console.step = lambda record, total: first.folder.joinpath("missing").stat() if record["step"] == 4 else None
    with pytest.raises(TrainingError, match=r"missing.*; the last good checkpoint is .*step-00000003"):
        first.run()
    micro.trainer(tmp_path, settings).run(resume=True)
    board = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    records = micro.metrics(tmp_path)
    steps = [(r["total_steps"], r["layers"]["layers.1"]) for r in records if r["kind"] == "step"]
    shown = [(event.step, event.value) for event in board.Scalars("training/layers/layers.1")]
    assert [step for step, _ in shown] == [1, 2, 3, 4] and shown == [(step, pytest.approx(value)) for step, value in steps]
    last = records[-1]["layers"]["layers.3"]
    assert board.Scalars("held-out/layers/layers.3/heads_entries/1")[-1].value == pytest.approx(last["heads_entries"][1])
    assert board.Scalars("held-out/layers/layers.3/recall")[-1].value == pytest.approx(last["recall"])


def test_tensorboard_that_is_asked_for_and_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"tensorboard = true needs the package tensorboard: pip install 'csakit\[tensorboard\]'"):
        log.Board(tmp_path, 0)


def test_a_checkpoint_of_the_right_size_that_cannot_be_read_is_named(tmp_path, finished):
    stopped(tmp_path, 5)
    weights = checkpoint.newest(tmp_path / "checkpoints") / "weights.safetensors"
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    with pytest.raises(CheckpointError, match=r"step-00000005-1: the checkpoint cannot be read: .*delete it to go on from the one before"):
        micro.trainer(tmp_path, micro.config(stages=FIRST_TWO)).run(resume=True)


def test_a_loss_that_is_not_finite_ends_the_run_with_the_reason(tmp_path):
    settings = micro.config(stages=("dense",))
    with pytest.raises(TrainingError, match=r"dense, step \d: loss or gradient is not finite .*lower dense\.learning_rate"):
        micro.trainer(tmp_path, replace(settings, dense=replace(settings.dense, learning_rate=1e30, ramp=0))).run()


def test_text_without_a_document_long_enough_for_a_choice_is_refused(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(5):
        (texts / f"{number}.txt").write_text(f"short text {number}")
    with pytest.raises(DataError, match=r"no document is longer than .* = 16 tokens, .*the sparse stage would not be sparse"):
        micro.trainer(tmp_path / "run", micro.config(data=DataConfig(path=str(texts), sequence_length=64)))
