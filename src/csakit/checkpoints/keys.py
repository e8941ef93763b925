"""The names of attention weights in the three dialects, and from one to another.

| dialect | a key of layer 2 |
| --- | --- |
| official: DeepSeek's released files | `layers.2.attn.indexer.weights_proj.weight` |
| transformers: a model in memory | `model.layers.2.self_attn.compressor.indexer.scorer.weights_proj.weight` |
| transformers_saved: its `save_pretrained` | `model.layers.2.attn.indexer.weights_proj.weight` |

The third one is official below `attn.`, but for the norm of the window keys, `attn.norm` instead of `attn.kv_norm`. A name in csakit is
the official one relative to `attn.`, which is also the name of the parameter in `csakit.nn`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from csakit import checks

DIALECTS = ("official", "transformers", "transformers_saved")

_TRANSFORMERS = {
    "wq_a.weight": "q_a_proj.weight",
    "q_norm.weight": "q_a_norm.weight",
    "wq_b.weight": "q_b_proj.weight",
    "wkv.weight": "kv_proj.weight",
    "kv_norm.weight": "kv_norm.weight",
    "attn_sink": "sinks",
    "wo_a.weight": "o_a_proj.weight",
    "wo_b.weight": "o_b_proj.weight",
    "compressor.wkv.weight": "compressor.kv_proj.weight",
    "compressor.wgate.weight": "compressor.gate_proj.weight",
    "compressor.ape": "compressor.position_bias",
    "compressor.norm.weight": "compressor.kv_norm.weight",
    "indexer.wq_b.weight": "compressor.indexer.q_b_proj.weight",
    "indexer.weights_proj.weight": "compressor.indexer.scorer.weights_proj.weight",
    "indexer.compressor.wkv.weight": "compressor.indexer.kv_proj.weight",
    "indexer.compressor.wgate.weight": "compressor.indexer.gate_proj.weight",
    "indexer.compressor.ape": "compressor.indexer.position_bias",
    "indexer.compressor.norm.weight": "compressor.indexer.kv_norm.weight",
}
_SAVED = {"kv_norm.weight": "norm.weight"}
_OLDER = {"compressor.indexer.weights_proj.weight": "indexer.weights_proj.weight"}  # before the scorer was a module
_OFFICIAL = {
    **{name: name for name in _TRANSFORMERS},
    **{theirs: name for name, theirs in _TRANSFORMERS.items()},
    **{theirs: name for name, theirs in _SAVED.items()},
    **_OLDER,
}

_KEY = re.compile(r"(?:model\.)?layers\.(\d+)\.(?:self_attn|attn)\.(.+)")
_SCALE = re.compile(r"\.(?:scale|weight_scale_inv)$")


class AttentionKey(NamedTuple):
    """A key of a checkpoint that belongs to an attention layer.

    Attributes:
        layer: number of the layer.
        name: official name relative to `attn.`; the key's own rest where it is none.
        known: whether these layers have such a tensor.
        scale: whether the key holds the block scales of the FP8 tensor `name`.
    """

    layer: int
    name: str
    known: bool
    scale: bool


def parse_key(key: str) -> AttentionKey | None:
    """What a key of any dialect, with or without `model.`, stands for; None when it is not of an attention layer."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    layer, rest = int(match[1]), match[2]
    weight = _SCALE.sub(".weight", rest)
    name = _OFFICIAL.get(weight)
    return AttentionKey(layer, name or rest, name is not None, weight != rest)


def format_key(layer: int, name: str, *, dialect: str = "official", scale: bool = False) -> str:
    """The key of an attention tensor, or of its block scales, in a dialect.

    Args:
        layer: number of the layer.
        name: official name relative to `attn.`, `wq_a.weight`.

    Raises:
        ValueError: an unknown name or dialect.
    """
    checks.whole("layer", layer, at_least=0)
    check_dialect(dialect)
    if name not in _TRANSFORMERS:
        raise ValueError(f"name must be that of an attention tensor, such as 'wq_a.weight'; got {name!r}")
    if dialect == "transformers":
        key = f"model.layers.{layer}.self_attn.{_TRANSFORMERS[name]}"
        return key + "_scale_inv" if scale else key
    prefix, leaf = ("", name) if dialect == "official" else ("model.", _SAVED.get(name, name))
    key = f"{prefix}layers.{layer}.attn.{leaf}"
    return key.removesuffix("weight") + "scale" if scale else key


def official_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of one attention module, in any dialect, with official names: what a layer of `csakit.nn` loads.

    Raises:
        ValueError: names that are none of these layers', all of them listed.
    """
    unknown = [name for name in state if name not in _OFFICIAL]
    if unknown:
        raise ValueError(f"state has names that attention layers do not have: {', '.join(sorted(unknown))}")
    return {_OFFICIAL[name]: tensor for name, tensor in state.items()}


def check_dialect(dialect: str) -> None:
    if dialect not in DIALECTS:
        raise ValueError(f"dialect must be one of {', '.join(map(repr, DIALECTS))}; got {dialect!r}")
