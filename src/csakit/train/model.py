"""The model of a run: a DeepSeek-V4 of the Transformers library, with csakit in its attention layers.

Its weights are random, of the shape of the model section or of a config.json, or come from a folder: what Transformers saves, or the
official format.
"""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from csakit.train import tokens, weights
from csakit.train.config import RunConfig, StageConfig

KINDS = {"sliding": "sliding_attention", "csa": "compressed_sparse_attention", "hca": "heavily_compressed_attention"}
# Small matrices whose rounding would move every layer: fp32 in the released files and in Transformers, whatever the rest is.
FP32 = ("attn_hc", "ffn_hc", "hc_head", "position_bias")


class Model(NamedTuple):
    """The model of a run and what goes with it."""

    model: Any  # DeepseekV4ForCausalLM
    handle: Any  # csakit.integrations.transformers.Handle
    tokenizer: tokens.Tokenizer
    ratio: int  # tokens of an entry of the layers that select
    topk: int
    notes: list[str]  # what the user should know of its weights


def build(config: RunConfig) -> Model:
    """The model, filled, on its device, with csakit installed.

    Raises: ImportError naming the extra when transformers is missing; DataError, WeightsError for a start that cannot be used; ValueError
        when its shape does not go with the settings.
    """
    try:
        from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
    except ImportError as error:
        raise ImportError("csakit train needs transformers 5.24: pip install 'csakit[train]'") from error
    start = Path(config.start.path) if config.start.path else None
    folder = start if start is not None and start.is_dir() else None
    released = None if start is None else _read_config(start if folder is None else start / "config.json")
    tokenizer = tokens.open_tokenizer(
        config.data.tokenizer,
        config.data.separator,
        start=start and (folder or start.parent),
        bos=None if released is None else released.get("bos_token_id"),
        vocabulary=None if released is None else released.get("vocab_size", DeepseekV4Config().vocab_size),
    )
    device = _device(config.device)
    settings = DeepseekV4Config.from_dict(_shape(config, tokenizer) if released is None else released)
    torch.manual_seed(config.seed)
    model: Any = DeepseekV4ForCausalLM(settings)
    notes = []
    if folder is not None:
        fresh = weights.load(model, folder)
        notes = [f"{folder}: it has no weights for {len(fresh)} tensors of indexers, which start at random"] if fresh else []
    assert settings.compress_rates is not None
    ratio, topk = settings.compress_rates[KINDS["csa"]], settings.index_topk
    config.check_reach(ratio, topk)
    return Model(model.to(device), _install(model), tokenizer, ratio, topk, notes)


def set_stage(built: Model, stage: StageConfig) -> None:
    """Give the model the attention, objective and trainable parameters of a stage, which `trains` found good."""
    from csakit.integrations import transformers as integration

    if stage.attention == "dense" and stage.objective == "off":
        built.handle.stage("dense")
    else:
        integration.install(built.model, objective=stage.objective, coef=stage.coef, denominator=stage.denominator)
    trained = trains(built, stage)
    for name, parameter in built.model.named_parameters():
        parameter.requires_grad_(name in trained)
        if name not in trained:
            parameter.grad = None


def trains(built: Model, stage: StageConfig) -> set[str]:
    """The names of the parameters that train in a stage.

    Raises: ValueError when a pattern of `freeze` fits no parameter, or the stage needs an indexer and the model has none.
    """
    names = [name for name, parameter in built.model.named_parameters() if parameter.is_floating_point()]
    for pattern in stage.freeze:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"freeze: expected patterns of parameter names such as {names[0]}, got {pattern!r}, which fits none")
    indexer = {name for name, _ in built.handle.indexer_parameters()}
    if not indexer and (stage.attention, stage.objective) != ("dense", "off"):
        raise ValueError("attention: expected a model with an indexer, this one has no compressed sparse attention")
    return {
        name
        for name in names
        if stage.trains in ("everything", "indexer" if name in indexer else "backbone")
        and not any(fnmatchcase(name, pattern) for pattern in stage.freeze)
    }


def store_as_bf16(model: nn.Module, trained: set[str]) -> None:
    """Turn the matrices that never train into bf16: they lose nothing by autocast, and half their memory."""
    for name, parameter in model.named_parameters():
        if name not in trained and parameter.ndim > 1 and not any(part in name for part in FP32):
            parameter.data = parameter.data.bfloat16()


def attention_layers(built: Model) -> list[nn.Module]:
    """The attention module of every layer."""
    return [layer.self_attn for layer in built.model.model.layers]


def set_checkpointing(built: Model, wanted: bool) -> None:
    """Recompute the layers in the backward pass, or keep their activations."""
    if wanted:
        built.model.activation_checkpointing_enable()
    else:
        built.model.activation_checkpointing_disable()
    # Enabling makes the embeddings' output require a gradient, for a kind of recomputation that is not used here. Where only the indexers
    # train, it would tie the graphs of all layers together.
    built.model.disable_input_require_grads()


def export(built: Model, folder: Path) -> None:
    """Save the model as a folder that Transformers and `start.path` load, its tokenizer beside it, and give the stock model back.

    The folder is written under another name and then renamed.
    """
    built.handle.remove()
    unfinished = folder.with_name(folder.name + ".unfinished")
    for remains in (unfinished, folder):
        shutil.rmtree(remains, ignore_errors=True)
    built.model.save_pretrained(str(unfinished))
    built.tokenizer.save(unfinished)
    unfinished.rename(folder)


def _install(model: Any) -> Any:
    from csakit.integrations import transformers as integration

    return integration.install(model, objective="off")


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # what torch raises for a device it does not know, or was not built for
        reason = str(error).splitlines()[0]
        raise ValueError(f"device: expected a torch device of this machine, got {name!r}: {reason}") from error


def _read_config(path: Path) -> dict[str, Any]:
    """The config.json of a model, without what concerns how its files are stored.

    Raises: WeightsError when it cannot be read or is of another model.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise weights.WeightsError(f"start.path: expected a config.json, alone or in a folder with weights: {path}: {error}") from error
    if not isinstance(found, dict) or found.get("model_type") != "deepseek_v4":
        kind = found.get("model_type") if isinstance(found, dict) else None
        raise weights.WeightsError(f"start.path: expected a config.json of model_type 'deepseek_v4', got {kind!r} in {path}")
    for name in ("quantization_config", "expert_dtype", "dtype", "torch_dtype", "transformers_version", "architectures", "auto_map"):
        found.pop(name, None)
    return found


def _shape(config: RunConfig, tokenizer: tokens.Tokenizer) -> dict[str, Any]:
    shape = config.model
    return {
        "vocab_size": tokenizer.vocabulary,
        "bos_token_id": tokenizer.separator,
        "eos_token_id": tokenizer.separator,
        "num_hidden_layers": len(shape.layers),
        "layer_types": [KINDS[kind] for kind in shape.layers],
        "mlp_layer_types": ["moe"] * len(shape.layers),
        "compress_rates": {KINDS["csa"]: shape.csa_ratio, KINDS["hca"]: shape.hca_ratio},
        "partial_rotary_factor": shape.qk_rope_head_dim / shape.head_dim,
        "max_position_embeddings": config.data.sequence_length,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "head_dim": shape.head_dim,
        "q_lora_rank": shape.q_lora_rank,
        "o_groups": shape.o_groups,
        "o_lora_rank": shape.o_lora_rank,
        "sliding_window": shape.sliding_window,
        "index_n_heads": shape.index_n_heads,
        "index_head_dim": shape.index_head_dim,
        "index_topk": shape.index_topk,
        "moe_intermediate_size": shape.moe_intermediate_size,
        "n_routed_experts": shape.n_routed_experts,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "hc_mult": shape.hc_mult,
        "hc_sinkhorn_iters": shape.hc_sinkhorn_iters,
    }
