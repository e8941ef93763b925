"""save_attention: attention weights into a new folder of safetensors shards, in a chosen dialect."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from csakit import checks

from .files import ShardWriter, plain
from .keys import check_dialect, format_key
from .quantization import quantize

# what the released files hold in FP8 with block scales
_FP8_NAMES = {"wq_a.weight", "wq_b.weight", "wkv.weight", "wo_a.weight", "wo_b.weight", "indexer.wq_b.weight"}

Layer = nn.Module | Mapping[str, Tensor]


def save_attention(
    layers: Mapping[int, Layer] | Iterable[Layer],
    folder: str | os.PathLike[str],
    *,
    dialect: str = "official",
    fp8: bool = False,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes attention weights as safetensors shards with an index; loading them again gives the same bits.

    A folder of another name is filled and then renamed, so a half-written checkpoint is never mistaken for a whole one. One shard at a
    time is copied; tensors keep their dtype.

    Args:
        layers: number of the layer -> module of `csakit.nn`, or state dict with official names; or those of layers 0, 1, ...
        folder: where to; must not exist, or be empty.
        dialect: "official", "transformers" or "transformers_saved".
        fp8: write the big projections as the released files have them, E4M3 with UE8M0 block scales. Rounds, unless they came from there.
        max_shard_bytes: a new shard begins where the next tensor would exceed it.

    Raises:
        FileExistsError: the folder has content.
        ImportError: safetensors is not installed.
        ValueError: an unknown dialect, a name no attention layer has, or a tensor without memory (meta device).
    """
    check_dialect(dialect)
    checks.whole("max_shard_bytes", max_shard_bytes, at_least=1)
    tensors = _tensors(layers)
    keys = {place: format_key(*place, dialect=dialect) for place in tensors}
    unmade = [keys[place] for place, tensor in tensors.items() if tensor.is_meta]
    if unmade:
        raise ValueError(f"these tensors are on the meta device and have no values: {', '.join(unmade)}")
    shards = _shards(tensors, fp8, max_shard_bytes)
    writer = ShardWriter(Path(folder), len(shards))
    try:
        for shard in shards:
            content: dict[str, Tensor] = {}
            for layer, name in shard:
                tensor, scale = _stored(tensors[layer, name], fp8 and name in _FP8_NAMES)
                content[keys[layer, name]] = tensor
                if scale is not None:
                    content[format_key(layer, name, dialect=dialect, scale=True)] = scale
            writer.write(content)
        writer.finish()
    except BaseException:
        writer.discard()
        raise


def _tensors(layers: Mapping[int, Layer] | Iterable[Layer]) -> dict[tuple[int, str], Tensor]:
    numbered = dict(layers) if isinstance(layers, Mapping) else dict(enumerate(layers))
    states = {number: layer.state_dict() if isinstance(layer, nn.Module) else layer for number, layer in numbered.items()}
    return {(number, name): tensor for number, state in states.items() for name, tensor in state.items()}


def _shards(tensors: Mapping[tuple[int, str], Tensor], fp8: bool, limit: int) -> list[list[tuple[int, str]]]:
    """The tensors of each shard, in order; at least one shard."""
    shards: list[list[tuple[int, str]]] = [[]]
    room = limit
    for place, tensor in tensors.items():
        size = tensor.numel() * (1 if fp8 and place[1] in _FP8_NAMES else tensor.element_size())
        if size > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(place)
        room -= size
    return shards


def _stored(tensor: Tensor, fp8: bool) -> tuple[Tensor, Tensor | None]:
    if not fp8:
        return plain(tensor), None
    weight, scale = quantize(plain(tensor), scale_dtype=torch.float8_e8m0fnu)
    return weight, scale
