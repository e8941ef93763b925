"""HybridAttentionConfig: released and Transformers configs, presets, and what is refused."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
from stock_layers import CSA, HCA, KINDS, SLIDING, stock_config

from csakit.nn import HybridAttentionConfig

RELEASED = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 43,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1},
    "rms_norm_eps": 1e-6,
    "n_routed_experts": 256,
}


def test_the_released_config_is_the_flash_preset_and_its_ratios_may_outnumber_its_layers() -> None:
    assert HybridAttentionConfig.from_pretrained_config(RELEASED) == HybridAttentionConfig.v4_flash()
    longer = {**RELEASED, "compress_ratios": [*RELEASED["compress_ratios"], 0, 0]}
    assert HybridAttentionConfig.from_pretrained_config(longer) == HybridAttentionConfig.v4_flash()


def test_presets_have_the_released_schedules() -> None:
    flash, pro = HybridAttentionConfig.v4_flash(), HybridAttentionConfig.v4_pro()
    assert [flash.layer_types.count(kind) for kind in KINDS] == [2, 21, 20]
    assert [pro.layer_types.count(kind) for kind in KINDS] == [0, 30, 31]
    assert (len(pro.layer_types), pro.hidden_size, pro.index_topk, pro.q_lora_rank, pro.o_groups) == (61, 7168, 1024, 1536, 16)
    assert (flash.ratio(SLIDING), flash.ratio(CSA), flash.ratio(HCA)) == (0, 4, 128)


def test_a_transformers_config_gives_the_same_as_the_released_one() -> None:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Config

    stock = DeepseekV4Config(**deepcopy(RELEASED)).to_dict()  # it writes into what it is given
    config = HybridAttentionConfig.from_pretrained_config(stock)
    scaling = {name: config.rope_scaling[name] for name in RELEASED["rope_scaling"]}
    assert replace(config, rope_scaling=scaling) == HybridAttentionConfig.v4_flash()


def test_a_transformers_config_with_rates_of_its_own_keeps_them() -> None:
    config = HybridAttentionConfig.from_pretrained_config(stock_config().to_dict())
    assert config.layer_types == KINDS and config.compress_ratios == (0, 4, 16) and config.qk_rope_head_dim == 8
    assert config.ratio(HCA) == 16 and replace(config, compress_ratio=32).ratio(HCA) == 32


def test_a_config_is_hashable_and_equal_by_value() -> None:
    assert len({HybridAttentionConfig.v4_flash(), HybridAttentionConfig.v4_flash(), HybridAttentionConfig.v4_pro()}) == 2


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_size": 0}, ValueError, "hidden_size must be at least 1; got 0"),
        ({"index_topk": 2.5}, TypeError, "index_topk must be a whole number"),
        ({"o_groups": 7}, ValueError, "the number of o_groups must divide the number of heads; got 7 and 64"),
        ({"qk_rope_head_dim": 63}, ValueError, "qk_rope_head_dim must be even and at most"),
        ({"qk_rope_head_dim": 256}, ValueError, "qk_rope_head_dim must be even and at most"),
        ({"compress_ratio": -1}, ValueError, "compress_ratio must be at least 0; got -1"),
        ({"compress_ratios": (4, -1)}, ValueError, "compress_ratios must be at least 0"),
        ({"layer_types": ("full_attention",)}, ValueError, "layer_types must be one of .*; got 'full_attention'"),
        ({"layer_types": (SLIDING,), "compress_ratios": (4,)}, ValueError, "must describe the same layers"),
        ({"rms_norm_eps": 0.0}, ValueError, "rms_norm_eps must be positive; got 0.0"),
        ({"rope_theta": float("nan")}, ValueError, "rope_theta must be finite"),
        ({"rope_scaling": "yarn"}, TypeError, "rope_scaling must be a dict or None"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, ValueError, "rope_scaling must be of type 'yarn', or None; got 'linear'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, ValueError, "rope_scaling needs original_max_position_embeddings"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 9, "mscale": 1}},
            ValueError,
            "rope_scaling has keys that these layers would ignore: mscale",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 9, "attention_factor": 1.2}},
            ValueError,
            "rope_scaling must have attention_factor 1.0",
        ),
        ({"indexer_loss": "true"}, ValueError, "indexer_loss must be one of 'off', 'dense', 'sparse'; got 'true'"),
        ({"denominator": "compressed"}, ValueError, "denominator must be one of 'attended', 'visible'; got 'compressed'"),
        ({"indexer_loss_coef": -0.1}, ValueError, "indexer_loss_coef must not be negative; got -0.1"),
        ({"indexer_loss_coef": "0.1"}, TypeError, "indexer_loss_coef must be a number"),
        ({"indexer_loss_coef": float("inf")}, ValueError, "indexer_loss_coef must be finite"),
    ],
)
def test_values_that_make_no_sense_are_refused(changes: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        HybridAttentionConfig(**changes)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (stock_config(), TypeError, "config must be a dict; got DeepseekV4Config. Pass json.load"),
        ({"model_type": "deepseek_v32"}, ValueError, "model_type must be 'deepseek_v4'; got 'deepseek_v32'"),
        ({**RELEASED, "attention_bias": True}, ValueError, "attention_bias must be False"),
        ({**RELEASED, "attention_dropout": 0.1}, ValueError, "attention_dropout must be 0.0"),
        ({**RELEASED, "num_key_value_heads": 8}, ValueError, "num_key_value_heads must be 1"),
        ({"hidden_size": 4}, ValueError, "config lacks num_attention_heads, head_dim"),
        ({**RELEASED, "compress_ratios": [0, 4]}, ValueError, "compress_ratios must cover the 43 layers; got 2"),
        ({name: value for name, value in RELEASED.items() if name != "qk_rope_head_dim"}, ValueError, "config lacks qk_rope_head_dim"),
    ],
)
def test_configs_of_other_models_are_refused(config: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        HybridAttentionConfig.from_pretrained_config(config)
