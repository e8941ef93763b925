"""The settings of a run: what is accepted, what is refused and in which words."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError, replace

import pytest

from csakit.train.config import DataConfig, ModelConfig, RunConfig, StageConfig, all_settings, flat, from_dict, parse, to_dict, updated
from csakit.train.presets import PRESETS


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_survives_the_way_through_json(name):
    assert from_dict(json.loads(json.dumps(to_dict(PRESETS[name])))) == PRESETS[name]


def test_a_configuration_cannot_be_changed_behind_its_checks():
    with pytest.raises(FrozenInstanceError):
        RunConfig().seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "build, error, message",
    [
        (lambda: StageConfig(steps="false"), TypeError, "steps: expected an integer of at least 0, got 'false'"),
        (lambda: StageConfig(steps=True), TypeError, "steps: expected an integer of at least 0, got True"),
        (lambda: StageConfig(steps=-1), ValueError, "steps: expected an integer of at least 0, got -1"),
        (lambda: StageConfig(steps=1.5), TypeError, "steps: expected an integer"),
        (lambda: StageConfig(learning_rate=math.nan), ValueError, "learning_rate: expected a finite number of at least 0, got nan"),
        (lambda: StageConfig(clip=0.0), ValueError, "clip: expected a finite number above 0, got 0.0"),
        (lambda: StageConfig(floor=1.5), ValueError, "floor: expected a share of the peak, at most 1, got 1.5"),
        (lambda: DataConfig(heldout=1.0), ValueError, "heldout: expected a share below 1, got 1.0"),
        (lambda: ModelConfig(layers=()), TypeError, "layers: expected a tuple of sliding, csa, hca"),
        (lambda: ModelConfig(layers=("sparse",)), ValueError, "layers: expected one of sliding, csa, hca, got 'sparse'"),
        (lambda: ModelConfig(qk_rope_head_dim=48), ValueError, "qk_rope_head_dim: expected at most head_dim"),
        (lambda: ModelConfig(qk_rope_head_dim=15), ValueError, "qk_rope_head_dim: expected an even number"),
        (lambda: ModelConfig(o_groups=3), ValueError, "o_groups: expected a divisor of num_attention_heads"),
        (lambda: ModelConfig(num_experts_per_tok=9), ValueError, "num_experts_per_tok: expected at most n_routed_experts"),
        (lambda: RunConfig(coef=-1.0), ValueError, "coef: expected a finite number of at least 0"),
        (lambda: RunConfig(denominator="compressed"), ValueError, "denominator: expected one of attended, visible, got 'compressed'"),
        (lambda: RunConfig(gradient_checkpointing="false"), TypeError, "gradient_checkpointing: expected true or false, got 'false'"),
        (lambda: RunConfig(seed=2**32), ValueError, "seed: expected an integer below"),
        (lambda: RunConfig(model={}), TypeError, "model: expected ModelConfig"),
        (
            lambda: RunConfig(stages=("sparse", "dense")),
            ValueError,
            "stages: expected each of dense, warmup, sparse at most once and in this order",
        ),
        (lambda: RunConfig(stages=("dense",), dense=StageConfig(steps=0)), ValueError, "at least one stage with steps"),
        (lambda: RunConfig(model=ModelConfig(layers=("hca",))), ValueError, "model.layers: expected at least one csa layer"),
    ],
)
def test_a_wrong_value_is_refused_by_name_with_what_is_allowed(build, error, message):
    with pytest.raises(error, match=message):
        build()


@pytest.mark.parametrize("length", [64, 32])
def test_rows_so_short_that_every_entry_is_selected_are_refused_with_the_reason(length):
    with pytest.raises(
        ValueError, match=r"4 \* 16 = 64, got \d+: every query would select all it sees, so the sparse stage would not be sparse"
    ):
        RunConfig(data=DataConfig(sequence_length=length))


def test_the_same_short_rows_are_fine_without_a_sparse_stage():
    assert RunConfig(stages=("dense", "warmup"), data=DataConfig(sequence_length=64)).data.sequence_length == 64


@pytest.mark.parametrize(
    "key, text, value",
    [
        ("warmup.steps", "12", 12),
        ("dense.learning_rate", "3e-4", 3e-4),
        ("gradient_checkpointing", "false", False),
        ("stages", "warmup, sparse", ("warmup", "sparse")),
        ("data.path", "a=b", "a=b"),
    ],
)
def test_a_text_becomes_a_value_of_the_settings_type(key, text, value):
    assert parse(key, text) == value and type(parse(key, text)) is type(value)


@pytest.mark.parametrize(
    "key, text, message",
    [
        ("warmup.stepz", "12", r"warmup\.stepz: unknown setting, did you mean warmup\.steps or .*\? csakit train --help lists them all"),
        ("warmup.steps", "1e3", "warmup.steps: expected an integer of at least 0, got '1e3'"),
        ("gradient_checkpointing", "no", "gradient_checkpointing: expected true or false, got 'no'"),
    ],
)
def test_a_text_of_the_wrong_type_is_refused(key, text, message):
    with pytest.raises(ValueError, match=message):
        parse(key, text)


def test_a_change_is_checked_together_with_the_rest_and_named_in_full():
    tiny = PRESETS["tiny"]
    assert updated(tiny, {"warmup.steps": 3}) == replace(tiny, warmup=replace(tiny.warmup, steps=3))
    with pytest.raises(ValueError, match=r"warmup\.steps: expected an integer of at least 0, got -3"):
        updated(tiny, {"warmup.steps": -3})
    with pytest.raises(ValueError, match="colour: unknown setting; csakit train --help lists them all"):
        updated(tiny, {"colour": 3})
    with pytest.raises(ValueError, match=r"model\.colour: unknown setting"):
        from_dict({"model": {"colour": "red"}})


def test_every_setting_has_a_help_text_and_a_value():
    assert all(entry.metadata["help"] for entry, _ in all_settings().values())
    assert set(flat(PRESETS["tiny"])) == set(all_settings())
