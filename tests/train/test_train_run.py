"""Whole runs of seconds: what each stage trains, and that a run broken off anywhere ends with the same numbers."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import micro
import pytest
import torch

from csakit.train import checkpoint
from csakit.train.config import DataConfig
from csakit.train.corpus import DataError
from csakit.train.log import Console
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
    run = micro.trainer(tmp_path, micro.config(stages=(stage,)))
    before = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
    run.run()
    changed = {part_of(name) for name, parameter in run.model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == trains
    steps = [record for record in micro.metrics(tmp_path) if record["kind"] == "step"]
    assert all(set(record["learning_rates"]) == set(record["gradient_norms"]) == trains for record in steps)
    assert all((record["kl"] is None) == (stage == "dense") for record in steps)


def test_the_parts_are_the_parameters_the_handle_calls_the_indexers(tmp_path):
    run = micro.trainer(tmp_path, micro.config())
    assert {name for name, _ in run.handle.indexer_parameters()} == {
        name for name, _ in run.model.named_parameters() if part_of(name) == "indexer"
    }


class Killed(BaseException):
    """Stands for the process ending without a word."""


class Deadly(Console):
    """A console at which the process ends after a step."""

    def __init__(self, steps: int) -> None:
        super().__init__(io.StringIO())
        self._steps = steps

    def step(self, record, total):
        if record["total_steps"] == self._steps:
            raise Killed


def run_until(folder, steps: int, how: str) -> None:
    """Go on with the run of this folder until a step, and stop in order or be killed there."""
    if how == "killed":
        with pytest.raises(Killed):
            micro.trainer(folder, micro.config(), console=Deadly(steps)).run(resume=True)
    else:
        run = micro.trainer(folder, micro.config())
        run.stop = lambda: run.progress.total_steps == steps
        with pytest.raises(Interrupted, match=f"step-{steps:08d}"):
            run.run(resume=True)


@pytest.mark.parametrize(
    "breaks",
    [
        # inside each stage, and 3: where a checkpoint is due anyway
        [(2, "stopped"), (3, "stopped"), (5, "stopped"), (10, "stopped")],
        # at the last step of each stage, before its evaluation
        [(4, "stopped"), (8, "stopped"), (12, "stopped")],
        # without any checkpoint, some steps after one, and right after a stage boundary
        [(1, "killed"), (7, "killed"), (9, "killed"), (12, "killed")],
    ],
)
def test_a_run_broken_off_again_and_again_has_the_numbers_of_an_unbroken_one(tmp_path, finished, breaks):
    for steps, how in breaks:
        run_until(tmp_path, steps, how)
    micro.trainer(tmp_path, micro.config()).run(resume=True)
    assert micro.metrics(tmp_path) == micro.metrics(finished)


def test_a_resumed_run_passes_over_a_half_written_checkpoint(tmp_path, finished):
    run_until(tmp_path, 5, "stopped")
    weights = checkpoint.newest(tmp_path / "checkpoints") / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    micro.trainer(tmp_path, micro.config()).run(resume=True)
    assert micro.metrics(tmp_path) == micro.metrics(finished)


def test_resuming_a_finished_run_changes_nothing(finished):
    before = micro.metrics(finished)
    micro.trainer(finished, micro.config()).run(resume=True)
    assert micro.metrics(finished) == before


def test_micro_batches_give_the_gradients_of_the_whole_batch(tmp_path):
    """Bits per byte, KL and gradient norms of each step, whether its rows come at once or one by one."""
    whole = micro.config(stages=("sparse",))
    parts = replace(whole, sparse=replace(whole.sparse, rows=1, accumulation=2))
    for name, settings in (("whole", whole), ("parts", parts)):
        micro.trainer(tmp_path / name, settings).run()
    for a, b in zip(*([record for record in micro.metrics(tmp_path / name) if record["kind"] == "step"] for name in ("whole", "parts"))):
        assert (b["bits_per_byte"], b["kl"]) == pytest.approx((a["bits_per_byte"], a["kl"]), rel=1e-4)
        assert b["gradient_norms"] == pytest.approx(a["gradient_norms"], rel=1e-3)


def test_gradient_checkpointing_changes_no_number(tmp_path, finished):
    micro.trainer(tmp_path, micro.config(gradient_checkpointing=True)).run()
    for a, b in zip(micro.metrics(finished), micro.metrics(tmp_path)):
        assert b["bits_per_byte"] == pytest.approx(a["bits_per_byte"], rel=1e-4)
        assert b.get("layers") == pytest.approx(a.get("layers"), rel=1e-3) if a["kind"] == "step" else True


def test_another_seed_gives_another_run(tmp_path, finished):
    micro.trainer(tmp_path, micro.config(stages=("dense",), seed=1)).run()
    assert micro.metrics(tmp_path)[1]["bits_per_byte"] != micro.metrics(finished)[1]["bits_per_byte"]


def test_an_evaluation_inside_a_stage_does_not_disturb_its_steps(tmp_path, finished):
    settings = micro.config()
    micro.trainer(tmp_path, replace(settings, warmup=replace(settings.warmup, evaluate_every=2))).run()
    records = micro.metrics(tmp_path)
    assert [(r["stage"], r["step"]) for r in records if r.get("when") == "during"] == [("warmup", 2)]
    assert [r for r in records if r.get("when") != "during"] == micro.metrics(finished)


def test_a_loss_that_is_not_finite_ends_the_run_with_the_reason(tmp_path):
    settings = micro.config(stages=("dense",))
    with pytest.raises(TrainingError, match=r"dense, step \d: loss or gradient is not finite .*lower dense\.learning_rate"):
        micro.trainer(tmp_path, replace(settings, dense=replace(settings.dense, learning_rate=1e30, ramp=0))).run()


def test_text_without_a_document_long_enough_for_a_choice_is_refused(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(5):
        (texts / f"{number}.txt").write_text(f"short text {number}")
    with pytest.raises(DataError, match=r"no document is longer than .* = 16 bytes, .*the sparse stage would not be sparse"):
        micro.trainer(tmp_path / "run", micro.config(data=DataConfig(path=str(texts), sequence_length=64)))
