"""What a run starts with: weights in every format a folder may have, and clear words for those that do not fit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import micro
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from csakit.checkpoints import quantize
from csakit.train import ModelConfig, RunConfig, StartConfig, model
from csakit.train.weights import WeightsError, dequantize_fp4, place_of

KINDS = model.KINDS
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# The official name of each tensor outside attention, by its name in memory.
OFFICIAL = [
    (r"model\.embed_tokens\.weight", "embed.weight"),
    (r"lm_head\.weight", "head.weight"),
    (r"model\.norm\.weight", "norm.weight"),
    (r"model\.hc_head\.hc_(\w+)", r"hc_head_\1"),
    (r"model\.(layers\.\d+)\.input_layernorm\.weight", r"\1.attn_norm.weight"),
    (r"model\.(layers\.\d+)\.post_attention_layernorm\.weight", r"\1.ffn_norm.weight"),
    (r"model\.(layers\.\d+)\.(attn|ffn)_hc\.(\w+)", r"\1.hc_\2_\3"),
    (r"model\.(layers\.\d+)\.mlp\.gate\.weight", r"\1.ffn.gate.weight"),
    (r"model\.(layers\.\d+)\.mlp\.gate\.tid2eid", r"\1.ffn.gate.tid2eid"),
    (r"model\.(layers\.\d+)\.mlp\.gate\.e_score_correction_bias", r"\1.ffn.gate.bias"),
    (r"model\.(layers\.\d+)\.mlp\.shared_experts\.gate_proj\.weight", r"\1.ffn.shared_experts.w1.weight"),
    (r"model\.(layers\.\d+)\.mlp\.shared_experts\.down_proj\.weight", r"\1.ffn.shared_experts.w2.weight"),
    (r"model\.(layers\.\d+)\.mlp\.shared_experts\.up_proj\.weight", r"\1.ffn.shared_experts.w3.weight"),
    (r"model\.(layers\.\d+)\.self_attn\.sinks", r"\1.attn.attn_sink"),
    (r"model\.(layers\.\d+)\.self_attn\.q_a_proj\.weight", r"\1.attn.wq_a.weight"),
    (r"model\.(layers\.\d+)\.self_attn\.q_a_norm\.weight", r"\1.attn.q_norm.weight"),
    (r"model\.(layers\.\d+)\.self_attn\.q_b_proj\.weight", r"\1.attn.wq_b.weight"),
    (r"model\.(layers\.\d+)\.self_attn\.kv_proj\.weight", r"\1.attn.wkv.weight"),
    (r"model\.(layers\.\d+)\.self_attn\.kv_norm\.weight", r"\1.attn.kv_norm.weight"),
    (r"model\.(layers\.\d+)\.self_attn\.o_([ab])_proj\.weight", r"\1.attn.wo_\2.weight"),
    (r"model\.(layers\.\d+)\.self_attn\.compressor\.position_bias", r"\1.attn.compressor.ape"),
    (r"model\.(layers\.\d+)\.self_attn\.compressor\.kv_proj\.weight", r"\1.attn.compressor.wkv.weight"),
    (r"model\.(layers\.\d+)\.self_attn\.compressor\.gate_proj\.weight", r"\1.attn.compressor.wgate.weight"),
    (r"model\.(layers\.\d+)\.self_attn\.compressor\.kv_norm\.weight", r"\1.attn.compressor.norm.weight"),
    (r"model\.(layers\.\d+)\.self_attn\.compressor\.indexer\.position_bias", r"\1.attn.indexer.compressor.ape"),
    (r"model\.(layers\.\d+)\.self_attn\.compressor\.indexer\.kv_proj\.weight", r"\1.attn.indexer.compressor.wkv.weight"),
    (r"model\.(layers\.\d+)\.self_attn\.compressor\.indexer\.gate_proj\.weight", r"\1.attn.indexer.compressor.wgate.weight"),
    (r"model\.(layers\.\d+)\.self_attn\.compressor\.indexer\.kv_norm\.weight", r"\1.attn.indexer.compressor.norm.weight"),
    (r"model\.(layers\.\d+)\.self_attn\.compressor\.indexer\.q_b_proj\.weight", r"\1.attn.indexer.wq_b.weight"),
    (r"model\.(layers\.\d+)\.self_attn\.compressor\.indexer\.scorer\.weights_proj\.weight", r"\1.attn.indexer.weights_proj.weight"),
]
FP8 = re.compile(r".*\.(wq_a|attn\.wq_b|attn\.wkv|wo_a|wo_b|indexer\.wq_b|shared_experts\.w[123])\.weight")


def stock() -> DeepseekV4ForCausalLM:
    """A model with every kind of layer and of router, every tensor random, on a grid that FP8 and FP4 hold exactly where they are used."""
    torch.manual_seed(1)
    config = DeepseekV4Config(
        vocab_size=257,
        bos_token_id=256,
        eos_token_id=256,
        num_hidden_layers=4,
        layer_types=[KINDS[kind] for kind in ("sliding", "csa", "hca", "csa")],
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        compress_rates={KINDS["csa"]: 4, KINDS["hca"]: 128},
        partial_rotary_factor=0.5,
        max_position_embeddings=64,
        hidden_size=32,
        num_attention_heads=2,
        head_dim=16,
        q_lora_rank=16,
        o_groups=2,
        o_lora_rank=16,
        sliding_window=8,
        index_n_heads=16,
        index_head_dim=16,
        index_topk=4,
        moe_intermediate_size=32,
        n_routed_experts=2,
        num_experts_per_tok=1,
        hc_mult=2,
        hc_sinkhorn_iters=4,
    )
    made = DeepseekV4ForCausalLM(config)
    for name, tensor in made.state_dict().items():
        if tensor.dtype == torch.int64:
            tensor.random_(0, 2)
        elif "experts.gate_up" in name or "experts.down" in name:
            signs, codes = torch.randint(0, 2, tensor.shape) * 2 - 1, torch.randint(0, 8, tensor.shape)
            tensor.copy_(signs * E2M1[codes] / 16)
        else:
            # E4M3 values below 240 * 2**-9, of which each block has one: the scale of a block is then known
            tensor.copy_((torch.randn_like(tensor) * 8).clamp(-200, 200).to(torch.float8_e4m3fn).float() / 512)
    return made


def official_state(made: DeepseekV4ForCausalLM, *, quantized: bool) -> dict[str, torch.Tensor]:
    """The tensors under their official names; large ones in FP8 and experts in FP4, or all as they are."""
    state: dict[str, torch.Tensor] = {}
    for name, tensor in made.state_dict().items():
        experts = re.fullmatch(r"model\.(layers\.\d+)\.mlp\.experts\.(gate_up_proj|down_proj)", name)
        if experts:
            for number, expert in enumerate(tensor):
                parts = [("w1", expert.chunk(2)[0]), ("w3", expert.chunk(2)[1])] if experts[2] == "gate_up_proj" else [("w2", expert)]
                for part, matrix in parts:
                    key = f"{experts[1]}.ffn.experts.{number}.{part}"
                    if quantized:
                        state[f"{key}.weight"], state[f"{key}.scale"] = packed_fp4(matrix)
                    else:
                        state[f"{key}.weight"] = matrix.contiguous()
            continue
        (key,) = [re.sub(pattern, official, name) for pattern, official in OFFICIAL if re.fullmatch(pattern, name)]
        if quantized and FP8.fullmatch(key):
            state[key], state[key.removesuffix("weight") + "scale"] = quantize(tensor)
        else:
            state[key] = tensor.clone()
    return state


def packed_fp4(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two values a byte, the first in the low half, with the scale 2**-4 for each 32 of a row."""
    codes = torch.argmin(((matrix * 16).abs()[..., None] - E2M1).abs(), -1) + 8 * (matrix < 0)
    first, second = codes[:, 0::2], codes[:, 1::2]
    scale = torch.full((matrix.shape[0], matrix.shape[1] // 32), 2.0**-4).to(torch.float8_e8m0fnu)
    return (first + 16 * second).to(torch.uint8).view(torch.int8), scale


def official_config(made: DeepseekV4ForCausalLM) -> dict:
    """A config.json as DeepSeek releases it."""
    plain = json.loads(made.config.to_json_string())
    for name in ("layer_types", "mlp_layer_types", "compress_rates", "partial_rotary_factor", "rope_parameters", "dtype"):
        plain.pop(name, None)
    return {
        **plain,
        "compress_ratios": [0, 4, 128, 4, 0],  # the last one is that of multi-token prediction
        "num_hash_layers": 1,
        "qk_rope_head_dim": 8,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "expert_dtype": "fp4",
    }


def write(folder: Path, config: dict, state: dict[str, torch.Tensor], *, shards: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = [f"model-{number}.safetensors" for number in range(shards)] if shards > 1 else ["model.safetensors"]
    for number, name in enumerate(names):
        save_file({key: state[key] for key in sorted(state)[number::shards]}, folder / name)
    if shards > 1:
        where = {key: name for number, name in enumerate(names) for key in sorted(state)[number::shards]}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def settings(path: Path, **changes) -> RunConfig:
    return micro.config(model=ModelConfig(), start=StartConfig(path=str(path)), **changes)


@pytest.fixture(scope="module")
def made() -> DeepseekV4ForCausalLM:
    return stock()


@pytest.fixture(scope="module")
def official(made, tmp_path_factory) -> Path:
    """A folder in the official format: FP8, FP4, two shards, and a layer for multi-token prediction."""
    state = official_state(made, quantized=True) | {"mtp.0.attn.wq_a.weight": torch.zeros(4, 4)}
    return write(tmp_path_factory.mktemp("official"), official_config(made), state, shards=2)


def same(built: model.Model, made: DeepseekV4ForCausalLM) -> bool:
    mine, theirs = built.model.state_dict(), made.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_folder_in_the_official_format_gives_its_weights_fp8_and_fp4_and_all(made, official):
    built = model.build(settings(official))
    assert same(built, made) and built.notes == [] and (built.ratio, built.topk) == (4, 4)
    stored = load_file(official / "model-0.safetensors") | load_file(official / "model-1.safetensors")
    assert {tensor.dtype for tensor in stored.values()} >= {torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8}


def test_the_official_names_are_those_that_transformers_itself_reads(made, tmp_path):
    config = {
        key: value for key, value in official_config(made).items() if key not in ("quantization_config", "expert_dtype", "torch_dtype")
    }
    folder = write(tmp_path / "plain", config, official_state(made, quantized=False))
    theirs = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert same(model.build(settings(folder)), theirs)


def test_a_folder_that_transformers_saved_gives_its_weights(made, tmp_path):
    made.save_pretrained(tmp_path / "saved")
    assert same(model.build(settings(tmp_path / "saved")), made)


def test_names_in_memory_give_their_weights(made, tmp_path):
    state = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    folder = write(tmp_path / "memory", json.loads(made.config.to_json_string()), state)
    assert same(model.build(settings(folder)), made)


def test_a_config_alone_gives_random_weights_of_its_shape(made, official):
    built = model.build(settings(official / "config.json"))
    mine, theirs = built.model.state_dict(), made.state_dict()
    assert {name: tensor.shape for name, tensor in mine.items()} == {name: tensor.shape for name, tensor in theirs.items()}
    assert not same(built, made)


def test_indexers_that_a_folder_lacks_start_at_random_and_the_run_says_so(made, tmp_path):
    state = {key: tensor for key, tensor in official_state(made, quantized=False).items() if ".indexer." not in key}
    built = model.build(settings(write(tmp_path / "x", official_config(made), state)))
    assert len(built.notes) == 1 and "it has no weights for 12 tensors of indexers, which start at random" in built.notes[0]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda state: state.pop("layers.1.attn.wkv.weight"), r"do not fit .* 1 missing: model\.layers\.1\.self_attn\.kv_proj\.weight"),
        (lambda state: state.pop("layers.0.ffn.experts.1.w3.weight"), r"1 missing: model\.layers\.0\.mlp\.experts\.gate_up_proj"),
        (lambda state: state.update({"layers.9.attn_norm.weight": torch.ones(32), "x": torch.ones(1)}), r"2 unexpected: layers\.9\..*, x"),
        (lambda state: state.update({"layers.0.x.scale": torch.ones(1)}), r"1 unexpected: layers\.0\.x\.scale"),
        (
            lambda state: state.update({"lm_head.weight": torch.ones(257, 32)}),
            r"1 unexpected: lm_head\.weight \(a second spelling of lm_head",
        ),
        (lambda state: state.update({"norm.weight": torch.ones(31)}), r"norm\.weight is \[31\], the model of its config\.json has \[32\]"),
        (
            lambda state: state.update({"layers.0.attn.wq_a.weight": torch.zeros(16, 32).to(torch.float8_e4m3fn)}),
            r"layers\.0\.attn\.wq_a\.weight is torch\.float8_e4m3fn without block scales",
        ),
        (
            lambda state: state.update(
                {f"layers.0.ffn.experts.0.w2.{k}": torch.zeros(32, 16, dtype=torch.int8) for k in ("weight", "scale")}
            ),
            r"scale must be \[N, K / 32\], for \[N, K\] = \[32, 32\] with K a multiple of 32; got \[32, 16\]",
        ),
    ],
)
def test_weights_that_do_not_fit_are_listed(made, tmp_path, change, message):
    state = official_state(made, quantized=False)
    change(state)
    folder = write(tmp_path / "x", official_config(made), state)
    with pytest.raises(WeightsError, match=message):
        model.build(settings(folder))


def test_files_that_are_damaged_or_of_another_model_are_named(made, tmp_path):
    folder = write(tmp_path / "x", official_config(made), official_state(made, quantized=False))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightsError, match=r"x: the weights cannot be read: "):
        model.build(settings(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"the weights cannot be read: .* is no safetensors file, nor a folder with"):
        model.build(settings(folder))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(WeightsError, match=r"expected a config\.json of model_type 'deepseek_v4', got 'llama'"):
        model.build(settings(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(WeightsError, match=r"start\.path: expected a config\.json, alone or in a folder with weights"):
        model.build(settings(folder))


def test_rows_too_short_for_the_model_of_the_start_are_refused(official):
    with pytest.raises(ValueError, match=r"4 \* 4 = 16, got 16: every query would select all it sees"):
        model.build(settings(official, data=replace(micro.config().data, sequence_length=16)))


def test_a_stage_that_needs_an_indexer_is_refused_for_a_model_without_one(made, tmp_path):
    config = {**official_config(made), "compress_ratios": [0, 128, 128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"warmup\.attention: expected a model with an indexer"):
        micro.trainer(tmp_path / "run", settings(tmp_path / "config.json"))


def test_a_key_of_no_part_of_the_model_has_no_place():
    assert place_of("model.layers.0.attn.nothing.weight") is None and place_of("layers.0.ffn.experts.x.w1.weight") is None


def test_packed_values_are_read_low_half_first():
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes | (15 - codes) << 4)[None].view(torch.int8)
    found = dequantize_fp4(packed, torch.tensor([[2.0]]))[0]
    values = torch.cat([E2M1, -E2M1])
    assert torch.equal(found[0::2], 2 * values) and torch.equal(found[1::2], 2 * values.flip(0))
    bytes_of_scale = torch.tensor([[128]], dtype=torch.uint8)  # UE8M0: 2**(128 - 127)
    assert torch.equal(dequantize_fp4(packed, bytes_of_scale)[0], found)


def test_only_the_indexers_of_a_frozen_model_train_and_are_stored_and_the_result_is_a_start_again(official, made, tmp_path):
    config = settings(official, stages=("warmup",), export=True)
    config = replace(config, warmup=replace(config.warmup, steps=2))
    run = micro.trainer(tmp_path, config)
    run.run()
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert all(".indexer." in name for name in load_file(saved / "weights.safetensors"))
    again = model.build(settings(tmp_path / "model")).model.state_dict()
    moved = {name for name, tensor in made.state_dict().items() if not torch.equal(again[name], tensor)}
    assert moved and all(".indexer." in name for name in moved)
    before = micro.metrics(tmp_path)
    micro.trainer(tmp_path, config).run(resume=True)
    assert micro.metrics(tmp_path) == before
    exported = model.build(settings(tmp_path / "model")).model.state_dict()
    assert all(torch.equal(exported[name], again[name]) for name in again)
