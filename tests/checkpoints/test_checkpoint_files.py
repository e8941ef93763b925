"""Loading and saving: dialects, FP8 with block scales, shards, what is missing or unexpected, and files cut off half way."""

from __future__ import annotations

import builtins
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from attention_weights import CONFIG, empty_layers, random_layers, same_bits, tensors
from safetensors.torch import load_file, save_file

from csakit.checkpoints import DIALECTS, dequantize, files, format_key, load_attention, quantize, read_attention, save_attention
from csakit.nn import HybridAttentionConfig, attention_layer

FP8_NAMES = ("wq_a.weight", "wq_b.weight", "wkv.weight", "wo_a.weight", "wo_b.weight", "indexer.wq_b.weight")


def state(layers, dialect: str = "official") -> dict[str, torch.Tensor]:
    """A checkpoint in memory, with a few tensors outside attention."""
    other = {"embed.weight": torch.zeros(2), "layers.0.ffn.experts.0.w1.weight": torch.zeros(2), "mtp.0.attn.wq_a.weight": torch.zeros(2)}
    return other | {format_key(number, name, dialect=dialect): value for (number, name), value in tensors(layers).items()}


# ---- round trips ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 9_000])
def test_saving_and_loading_gives_the_same_bits(dialect: str, dtype: torch.dtype, shard_bytes: int, tmp_path) -> None:
    layers = random_layers(dtype)
    save_attention(layers, tmp_path / "out", dialect=dialect, max_shard_bytes=shard_bytes)
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert (shards == ["model.safetensors"]) == (shard_bytes > 10_000) and shards[0] in (
        "model.safetensors",
        f"model-00001-of-{len(shards):05d}.safetensors",
    )
    back = empty_layers(dtype)
    assert load_attention(back, tmp_path / "out") == ([], [])
    assert same_bits(tensors(back), tensors(layers))
    assert same_bits({(number, name): value for number, name, value in read_attention(tmp_path / "out")}, tensors(layers))


def test_the_index_lists_every_tensor_with_its_shard_and_the_total_size(tmp_path) -> None:
    save_attention(random_layers(), tmp_path / "out", max_shard_bytes=9_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found = {path.name: load_file(path) for path in (tmp_path / "out").glob("*.safetensors")}
    assert index["weight_map"] == {key: name for name, shard in found.items() for key in shard}
    assert index["metadata"]["total_size"] == sum(value.nbytes for shard in found.values() for value in shard.values())


def test_fp8_tensors_that_came_from_fp8_come_back_with_the_same_values(tmp_path) -> None:
    save_attention(random_layers(), tmp_path / "first", fp8=True)
    first = empty_layers()
    load_attention(first, tmp_path / "first")
    save_attention(first, tmp_path / "second", fp8=True)
    second = empty_layers()
    load_attention(second, tmp_path / "second")
    assert same_bits(tensors(second), tensors(first))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_fp8_files_have_the_dtypes_of_the_released_ones(dialect: str, tmp_path) -> None:
    save_attention({1: random_layers()[1]}, tmp_path / "out", fp8=True, dialect=dialect)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name in FP8_NAMES:
        weight, scale = (stored.pop(format_key(1, name, dialect=dialect, scale=scale)) for scale in (False, True))
        assert weight.dtype == torch.float8_e4m3fn and scale.dtype == torch.float8_e8m0fnu
    narrow = {key for key, value in stored.items() if value.dtype == torch.bfloat16}
    wide = {format_key(1, name, dialect=dialect) for name in ("attn_sink", "compressor.ape", "indexer.compressor.ape")}
    wide.add(format_key(1, "indexer.weights_proj.weight", dialect=dialect))  # fp32 in csakit's layers
    assert narrow == set(stored) - wide


# ---- FP8 -----------------------------------------------------------------------------------------------------------------


def by_hand(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight * scale, element by element."""
    result = torch.empty(weight.shape, dtype=torch.float64)
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            result[row, column] = float(weight[row, column]) * float(scale[row // 128, column // 128])
    return result


@pytest.mark.parametrize("shape", [(128, 128), (129, 127), (1, 300), (260, 5), (0, 64)])
@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32])
def test_blocks_are_dequantized_with_their_own_scale_at_sizes_that_are_no_multiple_of_128(shape, scale_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    blocks = [-(-size // 128) for size in shape]
    scale = torch.exp2(torch.randint(-9, 3, blocks, generator=generator).float())
    if scale_dtype == torch.float32:
        scale = scale * torch.rand(blocks, generator=generator)
    scale = scale.to(scale_dtype)
    want = by_hand(weight, scale)
    assert torch.equal(dequantize(weight, scale), want.float())
    assert torch.equal(dequantize(weight, scale, dtype=torch.bfloat16), want.bfloat16())
    if scale_dtype == torch.float8_e8m0fnu:
        assert torch.equal(dequantize(weight, scale, dtype=torch.bfloat16).double(), want), "a power of two rounds nothing"
        assert torch.equal(dequantize(weight, scale.view(torch.uint8)), want.float())


@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32])
def test_quantizing_rounds_to_fp8_with_the_smallest_scale_that_holds_each_block(scale_dtype: torch.dtype) -> None:
    weight = torch.randn(200, 150, generator=torch.Generator().manual_seed(0))
    weight[:128, 128:] = 0
    weight[150, 20] = 448.0 * 2**-3  # its block is scaled by exactly 2^-3
    weight[128:, :128].clamp_(-56, 56)
    values, scale = quantize(weight, scale_dtype=scale_dtype)
    assert values.shape == weight.shape and scale.shape == (2, 2) and scale.dtype == scale_dtype
    assert float(scale[0, 1]) == 1 and float(scale[1, 0]) == 2**-3
    restored = dequantize(values, scale)
    for rows, columns in ((slice(128), slice(128)), (slice(128, None), slice(128)), (slice(128, None), slice(128, None))):
        block = weight[rows, columns]
        error = (restored[rows, columns] - block).abs()
        step = float(block.abs().max()) / 448 * (2 if scale_dtype == torch.float8_e8m0fnu else 1)
        assert (error <= block.abs() / 16 + step * 2**-10).all()  # half a unit of 4 significant bits, or half the least subnormal
    again, same = quantize(restored, scale_dtype=scale_dtype)
    if scale_dtype == torch.float8_e8m0fnu:
        assert torch.equal(dequantize(again, same), restored)


@pytest.mark.parametrize("scale_key", ["layers.0.attn.wq_a.scale", "layers.0.attn.wq_a.weight_scale_inv", "model.layers.0.attn.wq_a.scale"])
def test_scales_are_found_under_either_name_and_in_another_shard(scale_key: str, tmp_path) -> None:
    layers = {0: random_layers()[0]}
    full = state(layers)
    weight, scale = quantize(full.pop("layers.0.attn.wq_a.weight"))
    save_file({**full, "layers.0.attn.wq_a.weight": weight}, tmp_path / "a.safetensors")
    save_file({scale_key: scale}, tmp_path / "b.safetensors")
    index = dict.fromkeys([*full, "layers.0.attn.wq_a.weight"], "a.safetensors") | {scale_key: "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    back = {0: empty_layers()[0]}
    load_attention(back, tmp_path)
    assert torch.equal(back[0].wq_a.weight, dequantize(weight, scale, dtype=torch.bfloat16))


def test_fp8_without_scales_and_scales_without_fp8_are_refused() -> None:
    full = state({0: random_layers()[0]})
    weight, scale = quantize(full["layers.0.attn.wkv.weight"])
    with pytest.raises(ValueError, match=re.escape("layers.0.attn.wkv.weight is FP8 without block scales")):
        dict_of(read_attention({**full, "layers.0.attn.wkv.weight": weight}))
    with pytest.raises(ValueError, match=re.escape("layers.0.attn.wkv.weight is torch.bfloat16, but the checkpoint has block scales")):
        dict_of(read_attention({**full, "layers.0.attn.wkv.scale": scale}))
    with pytest.raises(ValueError, match="scale must have shape"):
        dequantize(weight, scale.float().repeat(2, 1))
    with pytest.raises(TypeError, match="weight must be a float8_e4m3fn tensor"):
        dequantize(weight.float(), scale)
    with pytest.raises(ValueError, match=r"scale_dtype must be .*; got torch.bfloat16"):
        quantize(weight.float(), scale_dtype=torch.bfloat16)


def dict_of(stream) -> dict[tuple[int, str], torch.Tensor]:
    return {(layer, name): value for layer, name, value in stream}


# ---- what does not match -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
def test_missing_and_unexpected_tensors_are_all_listed_and_nothing_is_loaded(dialect: str) -> None:
    full = state(random_layers(), dialect)
    del full[format_key(1, "indexer.wq_b.weight", dialect=dialect)], full[format_key(2, "attn_sink", dialect=dialect)]
    full[format_key(0, "indexer.wq_b.weight", dialect=dialect)] = torch.zeros(2, 2)
    full["layers.2.attn.wk.weight"] = torch.zeros(2)
    layers = random_layers(seed=1)
    before = {key: value.clone() for key, value in tensors(layers).items()}
    message = (
        "the checkpoint does not fit the layers, nothing was loaded. "
        "2 missing: layers.1.attn.indexer.wq_b.weight, layers.2.attn.attn_sink; "
        "2 unexpected: layers.0.attn.indexer.wq_b.weight, layers.2.attn.wk.weight"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        load_attention(layers, full)
    assert same_bits(tensors(layers), before)
    report = load_attention(layers, full, strict=False)
    assert report.missing == ["layers.1.attn.indexer.wq_b.weight", "layers.2.attn.attn_sink"]
    assert report.unexpected == ["layers.0.attn.indexer.wq_b.weight", "layers.2.attn.wk.weight"]
    assert torch.equal(layers[1].wq_a.weight, full[format_key(1, "wq_a.weight", dialect=dialect)])


def test_layers_without_an_indexer_need_none_and_layers_not_asked_for_are_left_alone() -> None:
    layers = random_layers()
    full = {key: value for key, value in state(layers).items() if "layers.1." not in key}
    assert not any("indexer" in key for key in full)
    back = {number: layer for number, layer in empty_layers().items() if number != 1}
    assert load_attention(back, full) == ([], [])
    assert load_attention({2: empty_layers()[2]}, state(layers)) == ([], [])


def test_a_list_of_modules_is_layers_zero_and_on() -> None:
    layers = random_layers()
    back = torch.nn.ModuleList(attention_layer(CONFIG, number, dtype=torch.bfloat16) for number in range(3))
    load_attention(back, state(layers))
    assert same_bits(tensors(dict(enumerate(back))), tensors(layers))


def test_shapes_are_compared_before_anything_is_loaded() -> None:
    full = state(random_layers())
    full["layers.2.attn.wo_b.weight"] = torch.zeros(3, 3)
    layers = random_layers(seed=1)
    before = layers[0].wq_a.weight.clone()
    with pytest.raises(ValueError, match=re.escape("layers.2.attn.wo_b.weight is [3, 3], the layer has [48, 16]")):
        load_attention(layers, full)
    assert torch.equal(layers[0].wq_a.weight, before)


def test_one_tensor_under_two_keys_is_refused() -> None:
    full = state(random_layers())
    full["model.layers.0.self_attn.sinks"] = torch.zeros(4)
    with pytest.raises(
        ValueError, match=re.escape("layers.0.attn.attn_sink and model.layers.0.self_attn.sinks are two keys of one tensor")
    ):
        load_attention(random_layers(), full)


def test_sources_that_are_not_there_are_named(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="is no safetensors file, nor a folder with model"):
        load_attention(random_layers(), tmp_path)
    with pytest.raises(TypeError, match="source must be a path or a state dict; got int"):
        load_attention(random_layers(), 3)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="has no weight_map"):
        load_attention(random_layers(), tmp_path)
    save_attention(random_layers(), tmp_path / "out", max_shard_bytes=9_000)
    (tmp_path / "out" / "model-00002-of-00005.safetensors").unlink(missing_ok=True)
    next(iter((tmp_path / "out").glob("model-00001-*"))).unlink()
    with pytest.raises(FileNotFoundError, match=r"names shards that are not there: .*model-00001-of-"):
        load_attention(random_layers(), tmp_path / "out")


# ---- writing -------------------------------------------------------------------------------------------------------------


def test_a_save_that_fails_leaves_nothing_that_could_be_mistaken_for_a_checkpoint(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = files.ShardWriter.write

    def write(self, tensors) -> None:
        if any(self.folder.with_name("out.unfinished").iterdir()):
            raise OSError(28, "No space left on device")
        original(self, tensors)

    monkeypatch.setattr(files.ShardWriter, "write", write)
    with pytest.raises(OSError, match="No space left on device"):
        save_attention(random_layers(), tmp_path / "out", max_shard_bytes=9_000)
    assert not list(tmp_path.iterdir())


def test_a_killed_save_has_another_name_and_the_next_one_replaces_it(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(files.ShardWriter, "finish", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(files.ShardWriter, "discard", lambda self: None)
        with pytest.raises(KeyboardInterrupt):
            save_attention(random_layers(), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out.unfinished"]
    with pytest.raises(FileNotFoundError):
        load_attention(random_layers(), tmp_path / "out")
    save_attention(random_layers(), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_cannot_be_saved_is_refused(tmp_path) -> None:
    save_attention(random_layers(), tmp_path / "out")
    with pytest.raises(FileExistsError, match="exists and is not empty; save into a new folder"):
        save_attention(random_layers(), tmp_path / "out")
    with pytest.raises(ValueError, match=re.escape("on the meta device and have no values: layers.0.attn.attn_sink")):
        save_attention(empty_layers(), tmp_path / "other")
    with pytest.raises(ValueError, match="dialect must be one of"):
        save_attention(random_layers(), tmp_path / "other", dialect="v4")
    with pytest.raises(ValueError, match="name must be that of an attention tensor"):
        save_attention({0: {"wk.weight": torch.zeros(2)}}, tmp_path / "other")
    with pytest.raises(ValueError, match="max_shard_bytes must be at least 1"):
        save_attention(random_layers(), tmp_path / "other", max_shard_bytes=0)
    assert not (tmp_path / "other").exists()


def test_without_safetensors_the_error_names_the_extra(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def no_safetensors(name, *arguments, **options):
        if name.split(".")[0] == "safetensors":
            raise ImportError(name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", no_safetensors)
    with pytest.raises(ImportError, match=re.escape("pip install 'csakit[hf]'")):
        save_attention(random_layers(), tmp_path / "out")
    assert load_attention(random_layers(), state(random_layers())) == ([], [])


MEMORY = """
import json, sys
from csakit.checkpoints import load_attention
from csakit.nn import HybridAttentionConfig, attention_layer

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

config = HybridAttentionConfig(**json.loads(sys.argv[2]))
layers = {number: attention_layer(config, number, device="meta") for number in range(5)}
before = peak()
load_attention(layers, sys.argv[1])
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory of a process where Linux keeps it")
@pytest.mark.parametrize("fp8", [False, True])
def test_loading_a_sharded_checkpoint_needs_its_size_once(fp8: bool, tmp_path) -> None:
    shapes = {"hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128, "o_lora_rank": 256, "compress_ratios": (0,) * 5}
    config = HybridAttentionConfig(**shapes)
    layers = {number: attention_layer(config, number) for number in range(5)}
    size = sum(parameter.nbytes for layer in layers.values() for parameter in layer.parameters())
    assert size > 100e6
    save_attention(layers, tmp_path / "out", fp8=fp8, max_shard_bytes=size // 16)
    arguments = [sys.executable, "-c", MEMORY, str(tmp_path / "out"), json.dumps(shapes)]
    run = subprocess.run(arguments, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert 0.9 * size < int(run.stdout) < 1.35 * size  # the layers, two open shards, and room
