"""The settings of a run: what is accepted, what is refused and in which words."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path

import pytest

from csakit.train import DataConfig, DenseStage, ModelConfig, RunConfig, SparseStage, StageConfig, StartConfig, WarmupStage
from csakit.train.presets import PRESETS, settings_of
from csakit.train.settings import all_settings, flat, merged, nested, parse, read_toml, to_toml, updated, with_absolute_paths

GUIDE = Path(__file__).parents[2] / "docs" / "training.md"


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_survives_the_way_through_json_and_through_toml(name, tmp_path):
    assert updated(RunConfig(), json.loads(json.dumps(asdict(PRESETS[name])))) == PRESETS[name]
    (tmp_path / "run.toml").write_text(to_toml(PRESETS[name]), encoding="utf-8")
    assert settings_of(None, read_toml(tmp_path / "run.toml")) == PRESETS[name]


def test_any_text_survives_the_way_through_toml(tmp_path):
    data = DataConfig(path='a "b" \\ \n\t\x7f\x01 größer 😀')
    config = RunConfig(data=data, dense=DenseStage(freeze=("a.*", "b"), learning_rate=1e-300))
    (tmp_path / "run.toml").write_text(to_toml(config), encoding="utf-8")
    assert settings_of(None, read_toml(tmp_path / "run.toml")) == config


def test_the_defaults_of_warm_up_and_sparse_training_are_those_of_deepseek_v32():
    warmup, sparse = RunConfig().warmup, RunConfig().sparse
    assert (warmup.steps, warmup.rows * warmup.accumulation, warmup.indexer_learning_rate, warmup.schedule) == (1000, 16, 1e-3, "constant")
    assert (warmup.attention, warmup.objective, warmup.trains) == ("dense", "dense", "indexer")
    assert (sparse.steps, sparse.rows * sparse.accumulation, sparse.learning_rate) == (15000, 480, 7.3e-6)
    assert (sparse.attention, sparse.objective, sparse.trains) == ("sparse", "sparse", "everything")


def test_the_example_of_the_guide_is_a_file_that_loads_and_shows_every_setting_but_the_shape_of_the_model(tmp_path):
    text = GUIDE.read_text(encoding="utf-8").split("```toml\n")[1].split("```")[0]
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    values = read_toml(tmp_path / "run.toml")
    assert set(settings_of(None, values).active()) == {"warmup", "sparse"}
    shown = set(all_settings(RunConfig)) - {key for key in all_settings(RunConfig) if key.startswith(("model.", "dense."))}
    assert {key for key in shown if key not in dotted(values)} == set()


def dotted(values: dict, prefix: str = "") -> set[str]:
    return {
        found
        for key, value in values.items()
        for found in (dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key})
    }


def test_a_file_keeps_what_it_leaves_out_at_its_preset_or_at_the_defaults():
    assert settings_of(None, {"warmup": {"steps": 3}}) == replace(RunConfig(), warmup=WarmupStage(steps=3))
    tiny = PRESETS["tiny"]
    assert settings_of("tiny", {"warmup": {"steps": 3}}) == replace(tiny, warmup=replace(tiny.warmup, steps=3))
    with pytest.raises(ValueError, match="preset: expected one of small, tiny, got 'huge'"):
        settings_of("huge", {})


def test_with_a_start_the_model_is_not_that_of_the_preset():
    config = settings_of("tiny", {"start": {"path": "/weights"}})
    assert config.model == ModelConfig() and config.dense == PRESETS["tiny"].dense
    with pytest.raises(ValueError, match=r"model: expected no settings, the shape of the model is that of start\.path"):
        settings_of("tiny", {"start": {"path": "/weights"}, "model": {"hidden_size": 64}})


def test_relative_paths_of_a_file_are_taken_from_its_folder(tmp_path):
    values = {"data": {"path": "texts", "text_key": "body", "tokenizer": ""}, "start": {"path": "/weights"}, "seed": 3}
    assert with_absolute_paths(RunConfig, values, tmp_path) == {**values, "data": {**values["data"], "path": str(tmp_path / "texts")}}


def test_later_settings_are_merged_into_earlier_ones():
    later = nested({"a.b": 4, "e": 5})
    assert merged({"a": {"b": 1, "c": 2}, "d": 3}, later) == {"a": {"b": 4, "c": 2}, "d": 3, "e": 5}


def test_a_file_that_is_no_toml_or_not_there_is_named(tmp_path):
    (tmp_path / "run.toml").write_text("steps = ")
    with pytest.raises(ValueError, match=r"run\.toml: not TOML: "):
        read_toml(tmp_path / "run.toml")
    with pytest.raises(ValueError, match=r"nowhere\.toml: cannot be read: No such file"):
        read_toml(tmp_path / "nowhere.toml")


def test_python_310_without_tomli_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    monkeypatch.setitem(sys.modules, "tomli", None)
    with pytest.raises(ImportError, match=r"TOML files need tomli on Python 3\.10: pip install 'csakit\[train\]'"):
        read_toml(tmp_path / "run.toml")


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
        (lambda: StageConfig(coef=0.0), ValueError, "coef: expected a finite number above 0"),
        (lambda: StageConfig(denominator="compressed"), ValueError, "denominator: expected one of attended, visible, got 'compressed'"),
        (lambda: StageConfig(schedule="step"), ValueError, "schedule: expected one of cosine, linear, constant, got 'step'"),
        (lambda: StageConfig(freeze="a"), TypeError, "freeze: expected a tuple of texts, got 'a'"),
        (lambda: SparseStage(attention="dense"), ValueError, r"objective: expected off or that of the attention \(dense\), got 'sparse'"),
        (lambda: SparseStage(objective="off"), ValueError, "objective 'off' does not go with 'everything'; set an objective"),
        (lambda: SparseStage(trains="backbone"), ValueError, "objective 'sparse' does not go with 'backbone'; set objective = off"),
        (lambda: StartConfig(path=3), TypeError, "path: expected text, got 3"),
        (lambda: RunConfig(gradient_checkpointing="false"), TypeError, "gradient_checkpointing: expected true or false, got 'false'"),
        (lambda: RunConfig(seed=2**32), ValueError, "seed: expected an integer below"),
        (lambda: RunConfig(model={}), TypeError, "model: expected ModelConfig"),
        (
            lambda: RunConfig(stages=("sparse", "dense")),
            ValueError,
            "stages: expected each of dense, warmup, sparse at most once and in this order",
        ),
        (lambda: RunConfig(stages=("dense",), dense=DenseStage(steps=0)), ValueError, "at least one stage with steps"),
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
        ("dense.freeze", "", ()),
    ],
)
def test_a_text_becomes_a_value_of_the_settings_type(key, text, value):
    assert parse(RunConfig, key, text) == value and type(parse(RunConfig, key, text)) is type(value)


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
        parse(RunConfig, key, text)


def test_a_change_is_checked_together_with_the_rest_and_named_in_full():
    tiny = PRESETS["tiny"]
    assert updated(tiny, {"warmup": {"steps": 3}}) == replace(tiny, warmup=replace(tiny.warmup, steps=3))
    with pytest.raises(ValueError, match=r"warmup\.steps: expected an integer of at least 0, got -3"):
        updated(tiny, {"warmup": {"steps": -3}})
    with pytest.raises(ValueError, match="colour: unknown setting; csakit train --help lists them all"):
        updated(tiny, {"colour": 3})
    with pytest.raises(ValueError, match=r"model\.colour: unknown setting"):
        updated(tiny, {"model": {"colour": "red"}})
    with pytest.raises(TypeError, match="warmup: expected a section of settings, got 3"):
        updated(tiny, {"warmup": 3})


def test_every_setting_has_a_help_text_and_a_value():
    assert all(entry.metadata["help"] for entry, _ in all_settings(RunConfig).values())
    assert set(flat(PRESETS["tiny"])) == set(all_settings(RunConfig))
