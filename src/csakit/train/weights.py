"""The weights of a whole DeepSeek-V4 model out of a folder of safetensors, in any of the three key dialects.

Attention keys are csakit.checkpoints' matter; here are those beside it: embeddings, norms, hyper-connections, router and experts. One
tensor at a time is read and written into the model, so that a large checkpoint is never in memory twice. FP8 tensors (one scale per
128 x 128 block) and FP4 experts (two E2M1 values a byte, one scale per 32 of a row) are dequantized on the way.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from csakit.checkpoints import dequantize, format_key, parse_key
from csakit.checkpoints.files import Tensors, open_tensors

FP4_BLOCK = 32
PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE = re.compile(r"\.(?:scale|weight_scale_inv)$")
_EXPERT = re.compile(r"layers\.(\d+)\.(?:ffn|mlp)\.experts\.(\d+)\.(w[123]|gate_proj|up_proj|down_proj)\.weight")
_SPELLINGS = [
    (re.compile(spelling), name)
    for spelling, name in (
        (r"(?:embed|embed_tokens)\.weight", r"model.embed_tokens.weight"),
        (r"(?:head|lm_head)\.weight", r"lm_head.weight"),
        (r"norm\.weight", r"model.norm.weight"),
        (r"(?:hc_head_|hc_head\.hc_)(fn|base|scale)", r"model.hc_head.hc_\1"),
        (r"layers\.(\d+)\.(?:attn_norm|input_layernorm)\.weight", r"model.layers.\1.input_layernorm.weight"),
        (r"layers\.(\d+)\.(?:ffn_norm|post_attention_layernorm)\.weight", r"model.layers.\1.post_attention_layernorm.weight"),
        (r"layers\.(\d+)\.(?:hc_(attn|ffn)_)(fn|base|scale)", r"model.layers.\1.\2_hc.\3"),
        (r"layers\.(\d+)\.(attn|ffn)_hc\.(fn|base|scale)", r"model.layers.\1.\2_hc.\3"),
        (r"layers\.(\d+)\.(?:ffn|mlp)\.gate\.(weight|tid2eid)", r"model.layers.\1.mlp.gate.\2"),
        (r"layers\.(\d+)\.(?:ffn|mlp)\.gate\.(?:bias|e_score_correction_bias)", r"model.layers.\1.mlp.gate.e_score_correction_bias"),
        (r"layers\.(\d+)\.(?:ffn|mlp)\.shared_experts\.(?:w1|gate_proj)\.weight", r"model.layers.\1.mlp.shared_experts.gate_proj.weight"),
        (r"layers\.(\d+)\.(?:ffn|mlp)\.shared_experts\.(?:w2|down_proj)\.weight", r"model.layers.\1.mlp.shared_experts.down_proj.weight"),
        (r"layers\.(\d+)\.(?:ffn|mlp)\.shared_experts\.(?:w3|up_proj)\.weight", r"model.layers.\1.mlp.shared_experts.up_proj.weight"),
        (r"layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)", r"model.layers.\1.mlp.experts.\2"),
    )
]
# What a released folder holds beside the model: layers that predict further tokens.
_ELSEWHERE = re.compile(r"mtp\.")


class WeightsError(Exception):
    """The weights of a folder are not those of the model. The message lists what does not fit."""


class Place(NamedTuple):
    """Where a tensor of a checkpoint goes: a name in the state dict, and for a single expert its number and its part."""

    name: str
    expert: int = -1
    part: int = 0  # of gate_up_proj: 0 gate, 1 up


def place_of(key: str) -> Place | None:
    """Where the tensor of a key goes, in any dialect and with or without `model.`; None for a key of no part of the model."""
    attention = parse_key(key)
    if attention is not None:
        return Place(format_key(attention.layer, attention.name, dialect="transformers")) if attention.known else None
    key = key.removeprefix("model.")
    expert = _EXPERT.fullmatch(key)
    if expert:
        layer, number, matrix = expert.groups()
        fused = "down_proj" if matrix in ("w2", "down_proj") else "gate_up_proj"
        return Place(f"model.layers.{layer}.mlp.experts.{fused}", int(number), int(matrix in ("w3", "up_proj")))
    for spelling, name in _SPELLINGS:
        match = spelling.fullmatch(key)
        if match:
            return Place(match.expand(name))
    return None


def load(model: nn.Module, folder: Path) -> list[str]:
    """Fill the model with the weights in a folder, and return the names of indexer tensors that it lacks: they keep their random weights.

    Raises: WeightsError when tensors are missing, left over, or of another shape, all of them listed; and when a file cannot be read.
    """
    from safetensors import SafetensorError

    try:
        with open_tensors(folder) as tensors:
            return _load(model, folder, tensors)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise WeightsError(f"{folder}: the weights cannot be read: {error}") from error


@torch.no_grad()
def _load(model: nn.Module, folder: Path, tensors: Tensors) -> list[str]:
    state = model.state_dict()
    keys = {key for key in tensors.keys() if not _ELSEWHERE.match(key.removeprefix("model."))}  # noqa: SIM118, not a dict
    # Block scales are those of a weight: a hyper-connection has a `scale` too, which is a tensor of its own.
    scales = {weight: key for key in keys if _SCALE.search(key) and (weight := _SCALE.sub(".weight", key)) in keys}
    places = {key: place_of(key) for key in sorted(keys - set(scales.values()))}
    found: dict[str, list[str]] = {}
    unexpected = []
    for key, place in places.items():
        if place is None or place.name not in state:
            unexpected.append(key)
        elif place in [places[other] for other in found.get(place.name, ())]:
            unexpected.append(f"{key} (a second spelling of {place.name})")
        else:
            found.setdefault(place.name, []).append(key)
    missing = [name for name in state if len(found.get(name, ())) < _expected(state[name], [places[key] for key in found.get(name, ())])]
    fresh = [name for name in missing if ".indexer." in name]
    missing = [name for name in missing if name not in fresh and not _is_tied(model, name)]
    if missing or unexpected:
        lists = [f"{len(names)} {word}: {', '.join(names)}" for word, names in (("missing", missing), ("unexpected", unexpected)) if names]
        raise WeightsError(f"{folder}: the weights do not fit the model of its config.json. {'; '.join(lists)}")
    for name, sources in found.items():
        for key in sources:
            place = places[key]
            assert place is not None
            target = _target(state[name], place)
            tensor = _read(tensors, key, scales.get(key))
            if tensor.shape != target.shape:
                raise WeightsError(f"{folder}: {key} is {list(tensor.shape)}, the model of its config.json has {list(target.shape)}")
            target.copy_(tensor)
    return fresh


def _expected(tensor: Tensor, places: list[Place | None]) -> int:
    """How many tensors of the checkpoint fill one of the model, judged by those there are."""
    single = any(place is not None and place.expert >= 0 for place in places)
    parts = 2 if any(place is not None and place.name.endswith("gate_up_proj") for place in places) else 1
    return len(tensor) * parts if single else 1


def _is_tied(model: nn.Module, name: str) -> bool:
    return name == "lm_head.weight" and bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))


def _target(tensor: Tensor, place: Place) -> Tensor:
    """The part of a tensor of the model that a tensor of the checkpoint fills."""
    if place.expert < 0:
        return tensor
    expert = tensor[place.expert]
    return expert.chunk(2)[place.part] if place.name.endswith("gate_up_proj") else expert


def _read(tensors: Tensors, key: str, scale_key: str | None) -> Tensor:
    tensor = tensors.read(key)
    if scale_key is not None:
        scale = tensors.read(scale_key)
        return dequantize_fp4(tensor, scale) if tensor.dtype in (torch.int8, torch.uint8) else dequantize(tensor, scale)
    if tensor.dtype not in PLAIN:
        raise ValueError(f"{key} is {tensor.dtype} without block scales")
    return tensor


def dequantize_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """The fp32 matrix [N, K] of packed E2M1 values.

    Args:
        packed: [N, K / 2] int8 or uint8; the low four bits of a byte are the earlier value.
        scale: [N, K / 32], float8_e8m0fnu or a floating-point dtype; uint8 are UE8M0 bytes.

    Raises: ValueError when the shapes do not belong together.
    """
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    if columns % FP4_BLOCK or tuple(scale.shape) != (rows, columns // FP4_BLOCK):
        raise ValueError(
            f"scale must be [N, K / {FP4_BLOCK}], for [N, K] = {[rows, columns]} with K a multiple of {FP4_BLOCK}; got {list(scale.shape)}"
        )
    codes = packed.view(torch.uint8)
    codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()
    values = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)])[codes]
    factors = (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()
    return (values.unflatten(1, (-1, FP4_BLOCK)) * factors[..., None]).flatten(1)
