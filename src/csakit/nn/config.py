"""HybridAttentionConfig: the shapes of DeepSeek-V4's attention layers, in the words of its config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from csakit import checks

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RELEASED_RATIO = {SLIDING: 0, CSA: 4, HCA: 128}
OBJECTIVES = ("off", "dense", "sparse")
DENOMINATORS = ("attended", "visible")

_YARN_KEYS = {"type", "rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"}
_V4_YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
_SIZES = ("hidden_size", "num_attention_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank")
_INDEX_SIZES = ("index_n_heads", "index_head_dim", "index_topk")


@dataclass(frozen=True)
class HybridAttentionConfig:
    """The shapes, rotations and objective of hybrid attention layers. Field names are those of the released config.json.

    Defaults are V4-Flash's. Every layer of a model is built from one config; `dataclasses.replace` makes another.

    Attributes:
        hidden_size: d. num_attention_heads: H. head_dim: D. qk_rope_head_dim: trailing channels that are rotated.
        q_lora_rank: width of the query latent. o_groups, o_lora_rank: groups of the output projection, rank of each.
        index_n_heads: I. index_head_dim: C. index_topk: K, entries a query selects.
        sliding_window: W, counting the query itself.
        compress_ratio: tokens per entry of the layer that is built. None: that of the layer's kind in `compress_ratios`, or else the
            released one (4 for compressed sparse, 128 for heavily compressed layers).
        compress_ratios: the ratio of every layer of a model, 0 for sliding-only layers. layer_types: their kinds, in the words of
            Transformers. One is derived from the other when only one is given (4 is compressed sparse, another ratio heavily compressed).
        rope_theta, compress_rope_theta: bases of the rotations of sliding-only and of compressed layers.
        rope_scaling: YaRN of the compressed layers, with keys type, factor, original_max_position_embeddings, beta_fast, beta_slow;
            None: no scaling.
        rms_norm_eps: inside the square root of every norm.
        indexer_loss: what a compressed sparse layer does. "sparse": attend the selection and distill over it. "dense", the warm-up:
            attend every visible entry and distill over all of them. "off": attend the selection, no loss.
        indexer_loss_coef: weight with which the loss is attached to the layer's output. None, 0 and 0.0: no loss work at all.
        denominator: of the sparse teacher. "attended": the layer's own; "visible": that of a dense pass, which costs another attention.

    Raises:
        TypeError, ValueError: a value of another kind or size, naming the field and what it may be.
    """

    hidden_size: int = 4096
    num_attention_heads: int = 64
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1024
    o_groups: int = 8
    o_lora_rank: int = 1024
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    sliding_window: int = 128
    compress_ratio: int | None = None
    compress_ratios: tuple[int, ...] = ()
    layer_types: tuple[str, ...] = ()
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: Mapping[str, Any] | None = field(default_factory=lambda: dict(_V4_YARN), hash=False)
    rms_norm_eps: float = 1e-6
    indexer_loss: Literal["off", "dense", "sparse"] = "sparse"
    indexer_loss_coef: float | None = 1.0
    denominator: Literal["attended", "visible"] = "attended"

    def __post_init__(self) -> None:
        for name in (*_SIZES, *_INDEX_SIZES, "sliding_window"):
            checks.whole(name, getattr(self, name), at_least=1)
        if self.compress_ratio is not None:
            checks.whole("compress_ratio", self.compress_ratio, at_least=0)
        checks.divides("o_groups", self.o_groups, "heads", self.num_attention_heads)
        smallest = min(self.head_dim, self.index_head_dim)
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > smallest:
            raise ValueError(
                f"qk_rope_head_dim must be even and at most head_dim and index_head_dim ({smallest}); got {self.qk_rope_head_dim}"
            )
        for name in ("rope_theta", "compress_rope_theta", "rms_norm_eps"):
            checks.number(name, getattr(self, name))
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        _one_of("indexer_loss", self.indexer_loss, OBJECTIVES)
        _one_of("denominator", self.denominator, DENOMINATORS)
        if self.indexer_loss_coef is not None:
            checks.number("indexer_loss_coef", self.indexer_loss_coef)
            if self.indexer_loss_coef < 0:
                raise ValueError(f"indexer_loss_coef must not be negative; got {self.indexer_loss_coef}. None or 0 turns the loss off")
        _check_scaling(self.rope_scaling)
        self._settle_schedule()

    def _settle_schedule(self) -> None:
        """Derives the missing one of compress_ratios and layer_types, and makes them tuples."""
        ratios, kinds = tuple(self.compress_ratios), tuple(self.layer_types)
        for ratio in ratios:
            checks.whole("compress_ratios", ratio, at_least=0)
        for kind in kinds:
            _one_of("layer_types", kind, tuple(RELEASED_RATIO))
        kinds = kinds or tuple(SLIDING if ratio == 0 else CSA if ratio == RELEASED_RATIO[CSA] else HCA for ratio in ratios)
        ratios = ratios or tuple(RELEASED_RATIO[kind] for kind in kinds)
        if len(ratios) != len(kinds) or any((kind == SLIDING) != (ratio == 0) for kind, ratio in zip(kinds, ratios)):
            raise ValueError(
                "compress_ratios and layer_types must describe the same layers, with ratio 0 where a layer is sliding only; "
                f"got {list(ratios)} and {list(kinds)}"
            )
        object.__setattr__(self, "compress_ratios", ratios)
        object.__setattr__(self, "layer_types", kinds)

    @classmethod
    def from_pretrained_config(cls, config: Mapping[str, Any]) -> HybridAttentionConfig:
        """The config of a released config.json, or of a Transformers config (`config.to_dict()`).

        Only the first num_hidden_layers of compress_ratios are taken: what follows belongs to the multi-token-prediction layers.
        The objective keeps its defaults; change it with `dataclasses.replace`.

        Raises:
            TypeError: not a mapping.
            ValueError: another model_type, a missing key, or something these layers do not have (bias, dropout, several KV heads).
        """
        if not isinstance(config, Mapping):
            raise TypeError(f"config must be a dict; got {type(config).__name__}. Pass json.load(file) or config.to_dict()")
        if config.get("model_type", "deepseek_v4") != "deepseek_v4":
            raise ValueError(f"model_type must be 'deepseek_v4'; got {config['model_type']!r}")
        for name, allowed in (("attention_bias", False), ("attention_dropout", 0.0), ("num_key_value_heads", 1)):
            if config.get(name, allowed) != allowed:
                raise ValueError(f"{name} must be {allowed}, these layers have nothing else; got {config[name]!r}")
        needed = [name for name in (*_SIZES, *_INDEX_SIZES, "sliding_window") if name != "qk_rope_head_dim"]
        missing = [name for name in needed if name not in config]
        if missing:
            raise ValueError(f"config lacks {', '.join(missing)}: not the config of a DeepSeek-V4 model")
        ratios, kinds = _schedule(config)
        main, compressed, scaling = _rotations(config)
        return cls(
            **{name: config[name] for name in needed},
            qk_rope_head_dim=_rotated_channels(config),
            compress_ratios=ratios,
            layer_types=kinds,
            rope_theta=main,
            compress_rope_theta=compressed,
            rope_scaling=scaling,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        )

    @classmethod
    def v4_flash(cls) -> HybridAttentionConfig:
        """DeepSeek-V4-Flash: 43 layers, 2 sliding only, 21 compressed sparse, 20 heavily compressed."""
        return cls(compress_ratios=(0, 0, *(4, 128) * 20, 4))

    @classmethod
    def v4_pro(cls) -> HybridAttentionConfig:
        """DeepSeek-V4-Pro: 61 layers, 30 compressed sparse, 31 heavily compressed."""
        return cls(
            hidden_size=7168,
            num_attention_heads=128,
            q_lora_rank=1536,
            o_groups=16,
            index_topk=1024,
            compress_ratios=(128, 128, *(4, 128) * 29, 4),
        )

    def ratio(self, kind: str) -> int:
        """Tokens per entry of a layer of this kind: compress_ratio, else the first of this kind in the schedule, else the released one.

        Raises:
            ValueError: a compressed kind of layer with compress_ratio 0.
        """
        if self.compress_ratio is not None:
            if self.compress_ratio == 0 and kind != SLIDING:
                raise ValueError(f"compress_ratio must be at least 1 in a {kind} layer; got 0, that of sliding-only layers")
            return 0 if kind == SLIDING else self.compress_ratio
        return next((ratio for ratio, own in zip(self.compress_ratios, self.layer_types) if own == kind), RELEASED_RATIO[kind])

    @property
    def distills(self) -> bool:
        """Whether a compressed sparse layer computes its indexer's loss."""
        return self.indexer_loss != "off" and bool(self.indexer_loss_coef)


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def _check_scaling(scaling: Any) -> None:
    if scaling is None:
        return
    if not isinstance(scaling, Mapping):
        raise TypeError(f"rope_scaling must be a dict or None; got {checks.describe(scaling)}")
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "yarn":
        raise ValueError(f"rope_scaling must be of type 'yarn', or None; got {kind!r}")
    unknown = sorted(set(scaling) - _YARN_KEYS)
    if unknown:
        raise ValueError(f"rope_scaling has keys that these layers would ignore: {', '.join(unknown)}")
    if scaling.get("attention_factor", 1.0) != 1.0:
        raise ValueError(f"rope_scaling must have attention_factor 1.0, as DeepSeek-V4 does; got {scaling['attention_factor']}")
    for name in ("factor", "original_max_position_embeddings"):
        if name not in scaling:
            raise ValueError(f"rope_scaling needs {name}")
        checks.number(f"rope_scaling[{name!r}]", scaling[name])


def _schedule(config: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """compress_ratios and layer_types of the main layers."""
    count = config.get("num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None:
        ratios = config.get("compress_ratios") or ()
        if count is not None and ratios and len(ratios) < count:
            raise ValueError(f"compress_ratios must cover the {count} layers; got {len(ratios)}")
        return tuple(ratios[:count]), ()
    rates = {**RELEASED_RATIO, **(config.get("compress_rates") or {})}
    return tuple(rates[kind] for kind in kinds[:count]), tuple(kinds[:count])


def _rotations(config: Mapping[str, Any]) -> tuple[float, float, dict[str, Any] | None]:
    """rope_theta, compress_rope_theta and rope_scaling, from flat keys or from Transformers' nested rope_parameters."""
    main, compressed = config.get("rope_theta", 10000.0), config.get("compress_rope_theta", 160000.0)
    scaling = config.get("rope_scaling")
    nested = config.get("rope_parameters") or {}
    if "compress" in nested:
        main = nested.get("main", {}).get("rope_theta", main)
        compressed = nested["compress"].get("rope_theta", compressed)
        scaling = nested["compress"]
    elif nested:
        scaling = nested
    if scaling is None or scaling.get("rope_type", scaling.get("type", "default")) == "default":
        return main, compressed, None
    return main, compressed, {name: value for name, value in scaling.items() if name not in ("rope_theta", "partial_rotary_factor")}


def _rotated_channels(config: Mapping[str, Any]) -> int:
    if "qk_rope_head_dim" in config:
        return config["qk_rope_head_dim"]
    factor = config.get("partial_rotary_factor")
    if factor is None or not math.isfinite(factor):
        raise ValueError("config lacks qk_rope_head_dim: not the config of a DeepSeek-V4 model")
    return int(config["head_dim"] * factor)
