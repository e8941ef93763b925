"""Names of attention weights: each dialect into each, against what Transformers itself names and saves."""

from __future__ import annotations

import json
import re

import pytest
import torch
from attention_weights import CONFIG, random_layers
from safetensors import safe_open
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

from csakit.checkpoints import DIALECTS, format_key, load_attention, official_names, parse_key
from csakit.nn import HybridAttentionConfig, attention_layer

NAMES = sorted({name for layer in random_layers().values() for name in layer.state_dict()})


@pytest.fixture(scope="module")
def model() -> DeepseekV4ForCausalLM:
    torch.manual_seed(0)
    shapes = ("hidden_size", "num_attention_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank")
    shapes += ("index_n_heads", "index_head_dim", "index_topk", "sliding_window")
    config = DeepseekV4Config(
        **{name: getattr(CONFIG, name) for name in shapes},
        compress_ratios=[0, 4, 128, 0],
        num_hidden_layers=3,
        vocab_size=32,
        n_routed_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        hc_mult=2,
    )
    return DeepseekV4ForCausalLM(config)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", NAMES)
def test_every_name_goes_into_every_dialect_and_comes_back(name: str, dialect: str) -> None:
    for scale in (False, True) if name.endswith("weight") else (False,):
        key = format_key(7, name, dialect=dialect, scale=scale)
        for spelling in (key, key.removeprefix("model."), f"model.{key.removeprefix('model.')}"):
            assert parse_key(spelling) == (7, name, True, scale)


def test_the_names_of_the_released_files() -> None:
    assert format_key(3, "wq_a.weight") == "layers.3.attn.wq_a.weight"
    assert format_key(3, "wq_a.weight", scale=True) == "layers.3.attn.wq_a.scale"
    assert format_key(3, "wq_a.weight", scale=True, dialect="transformers") == "model.layers.3.self_attn.q_a_proj.weight_scale_inv"
    assert format_key(3, "kv_norm.weight", dialect="transformers_saved") == "model.layers.3.attn.norm.weight"


def test_names_in_memory_are_those_of_the_model(model: DeepseekV4ForCausalLM) -> None:
    own = {format_key(number, name, dialect="transformers") for number, layer in random_layers().items() for name in layer.state_dict()}
    assert own == {key for key in model.state_dict() if ".self_attn." in key}


def test_names_in_a_saved_folder_are_those_of_save_pretrained(model: DeepseekV4ForCausalLM, tmp_path) -> None:
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = {key for key in file.keys() if ".attn." in key}  # noqa: SIM118
    assert saved == {
        format_key(number, name, dialect="transformers_saved") for number, layer in random_layers().items() for name in layer.state_dict()
    }


def test_a_saved_transformers_folder_and_a_model_in_memory_load_into_the_layers(model: DeepseekV4ForCausalLM, tmp_path) -> None:
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    config = HybridAttentionConfig.from_pretrained_config(json.loads((tmp_path / "config.json").read_text()))
    for source in (tmp_path, model.state_dict()):
        layers = {number: attention_layer(config, number) for number in range(3)}
        report = load_attention(layers, source)
        assert report == ([], [])
        for number, layer in layers.items():
            want = official_names(model.model.layers[number].self_attn.state_dict())
            assert all(torch.equal(value, want[name]) for name, value in layer.state_dict().items())


def test_the_older_name_of_the_gate_is_known() -> None:
    key = "model.layers.2.self_attn.compressor.indexer.weights_proj.weight"
    assert parse_key(key) == (2, "indexer.weights_proj.weight", True, False)


@pytest.mark.parametrize(
    "key",
    [
        "embed.weight",
        "mtp.0.attn.wq_a.weight",
        "layers.2.attn_norm.weight",
        "layers.2.ffn.experts.0.w1.weight",
        "model.layers.2.mlp.gate.weight",
        "layers.x.attn.wq_a.weight",
    ],
)
def test_keys_outside_attention_are_none(key: str) -> None:
    assert parse_key(key) is None


def test_unknown_names_are_kept_apart_or_refused() -> None:
    assert parse_key("layers.2.attn.indexer.wk.weight") == (2, "indexer.wk.weight", False, False)
    with pytest.raises(ValueError, match=re.escape("state has names that attention layers do not have: wk.weight, wz.weight")):
        official_names({"wz.weight": 0, "wk.weight": 0, "sinks": 0})
    with pytest.raises(ValueError, match="name must be that of an attention tensor"):
        format_key(0, "wk.weight")
    with pytest.raises(ValueError, match="dialect must be one of 'official', 'transformers', 'transformers_saved'; got 'hf'"):
        format_key(0, "wq_a.weight", dialect="hf")
    with pytest.raises(ValueError, match="layer must be at least 0"):
        format_key(-1, "wq_a.weight")
