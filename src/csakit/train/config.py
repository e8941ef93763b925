"""The settings of a training run: frozen dataclasses, checked when they are built, and the presets.

The same fields are the Python API, the `--set key=value` options of `csakit train`, its `--help` and the `config.json` of
a run. Needs no torch, so that help and usage errors come at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass, field
from typing import Any, get_origin, get_type_hints

VOCABULARY = 257
SEPARATOR = 256
STAGES = ("dense", "warmup", "sparse")
LAYER_KINDS = ("sliding", "csa", "hca")
DENOMINATORS = ("attended", "visible")


def option(default: Any, text: str, *, minimum: float | None = None, above: float | None = None, choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field with its help text and its bounds: `minimum` is included, `above` is not."""
    return field(default=default, metadata={"help": text, "minimum": minimum, "above": above, "choices": choices})


@dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek-V4 model over bytes, in the names of the released config.json.

    Raises: ValueError or TypeError for a value outside its bounds, naming the field, what was expected and what was given.
    """

    layers: tuple[str, ...] = option(("sliding", "csa", "hca", "csa"), "attention of each layer", choices=LAYER_KINDS)
    hidden_size: int = option(128, "width of the residual stream", minimum=1)
    num_attention_heads: int = option(8, "attention heads", minimum=1)
    head_dim: int = option(32, "width of a head", minimum=2)
    qk_rope_head_dim: int = option(16, "rotated channels of a head and of an index head", minimum=2)
    q_lora_rank: int = option(64, "width of the query latent", minimum=1)
    o_groups: int = option(2, "groups of the output projection", minimum=1)
    o_lora_rank: int = option(64, "width of a group of the output projection", minimum=1)
    sliding_window: int = option(32, "tokens of the window, the query itself included", minimum=1)
    csa_ratio: int = option(4, "tokens of a compressed entry in CSA layers", minimum=1)
    hca_ratio: int = option(32, "tokens of a compressed entry in HCA layers", minimum=1)
    index_n_heads: int = option(16, "heads of the indexer", minimum=1)
    index_head_dim: int = option(32, "width of an index head", minimum=2)
    index_topk: int = option(16, "entries a query selects in CSA layers", minimum=1)
    moe_intermediate_size: int = option(256, "width of an expert", minimum=1)
    n_routed_experts: int = option(2, "routed experts of a layer", minimum=1)
    num_experts_per_tok: int = option(1, "routed experts a token visits", minimum=1)
    hc_mult: int = option(2, "streams of the hyper-connections", minimum=1)
    hc_sinkhorn_iters: int = option(4, "Sinkhorn iterations of the hyper-connections", minimum=1)

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("head_dim", "index_head_dim"):
            if self.qk_rope_head_dim > getattr(self, name):
                raise ValueError(f"qk_rope_head_dim: expected at most {name} ({getattr(self, name)}), got {self.qk_rope_head_dim}")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim: expected an even number, channels rotate in pairs, got {self.qk_rope_head_dim}")
        if self.num_attention_heads % self.o_groups:
            raise ValueError(f"o_groups: expected a divisor of num_attention_heads ({self.num_attention_heads}), got {self.o_groups}")
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok: expected at most n_routed_experts ({self.n_routed_experts}), got {self.num_experts_per_tok}"
            )


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it is cut into rows.

    Raises: as ModelConfig.
    """

    path: str = option("", "folder, file, .zip or .jsonl of text; empty: the source of Python's standard library")
    text_key: str = option("text", "key of the text in a line of a .jsonl file")
    sequence_length: int = option(512, "tokens of a row", minimum=2)
    heldout: float = option(0.1, "share of the documents kept for evaluation", above=0)
    heldout_rows: int = option(16, "rows of an evaluation", minimum=1)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.heldout >= 1:
            raise ValueError(f"heldout: expected a share below 1, got {self.heldout}")


@dataclass(frozen=True)
class StageConfig:
    """One stage: how long, how fast. What it trains and which loss it has follows from its name.

    Raises: as ModelConfig.
    """

    steps: int = option(100, "optimizer steps; 0 leaves the stage out", minimum=0)
    rows: int = option(4, "rows of a micro-batch", minimum=1)
    accumulation: int = option(1, "micro-batches of a step", minimum=1)
    learning_rate: float = option(1e-3, "peak learning rate of the backbone", minimum=0)
    indexer_learning_rate: float = option(1e-3, "peak learning rate of the indexer", minimum=0)
    ramp: int = option(10, "steps of linear rise of the learning rate", minimum=0)
    floor: float = option(0.1, "learning rate at the end of the cosine, as a share of the peak", minimum=0)
    weight_decay: float = option(0.1, "AdamW weight decay of matrices", minimum=0)
    clip: float = option(1.0, "largest gradient norm, of backbone and indexer apart", above=0)
    evaluate_every: int = option(0, "steps between evaluations inside the stage; 0: before and after it only", minimum=0)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.floor > 1:
            raise ValueError(f"floor: expected a share of the peak, at most 1, got {self.floor}")


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides the numbers of a run.

    Raises: as ModelConfig; ValueError as well when the parts do not fit together, above all when no query of the sparse
    stage could have more entries than it selects.
    """

    stages: tuple[str, ...] = option(STAGES, "stages to run, in this order", choices=STAGES)
    seed: int = option(0, "seed of the weights and of the order of the text", minimum=0)
    coef: float = option(1.0, "factor of the indexer loss", minimum=0)
    denominator: str = option("attended", "softmax denominator of the teacher in the sparse stage", choices=DENOMINATORS)
    gradient_checkpointing: bool = option(False, "recompute the layers in the backward pass instead of keeping their activations")
    save_every: int = option(100, "steps between checkpoints", minimum=1)
    keep: int = option(2, "checkpoints kept", minimum=1)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    dense: StageConfig = field(default_factory=StageConfig)
    warmup: StageConfig = field(default_factory=StageConfig)
    sparse: StageConfig = field(default_factory=StageConfig)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.seed >= 2**32:
            raise ValueError(f"seed: expected an integer below 2**32, got {self.seed}")
        if list(self.stages) != [name for name in STAGES if name in self.stages]:
            raise ValueError(f"stages: expected each of {', '.join(STAGES)} at most once and in this order, got {','.join(self.stages)}")
        if not any(self.stage(name).steps for name in self.stages):
            raise ValueError("stages: expected at least one stage with steps above 0")
        if "csa" not in self.model.layers and {"warmup", "sparse"} & set(self.stages):
            raise ValueError("model.layers: expected at least one csa layer, only these have an indexer to train")
        reach = self.model.csa_ratio * self.model.index_topk
        if "sparse" in self.stages and self.sparse.steps and self.data.sequence_length <= reach:
            raise ValueError(
                f"data.sequence_length: expected more than model.csa_ratio * model.index_topk = {self.model.csa_ratio} * "
                f"{self.model.index_topk} = {reach}, got {self.data.sequence_length}: every query would select all it sees, so the sparse "
                "stage would not be sparse and would teach nothing about selection; lengthen the rows or lower index_topk"
            )

    def stage(self, name: str) -> StageConfig:
        """The settings of one stage."""
        return {"dense": self.dense, "warmup": self.warmup, "sparse": self.sparse}[name]


def check_fields(config: Any) -> None:
    """Raise unless every field has its declared type and lies within its bounds."""
    hints = get_type_hints(type(config))
    for entry in dataclasses.fields(config):
        value, hint = getattr(config, entry.name), hints[entry.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            if not isinstance(value, hint):
                raise TypeError(f"{entry.name}: expected {hint.__name__}, got {value!r}")
        elif get_origin(hint) is tuple:
            if not isinstance(value, tuple) or not value:
                raise TypeError(f"{entry.name}: expected a tuple of {', '.join(entry.metadata['choices'])}, got {value!r}")
            for item in value:
                _check_value(entry, str, item)
        else:
            _check_value(entry, hint, value)


def _check_value(entry: dataclasses.Field[Any], hint: type, value: Any) -> None:
    accepted = (int, float) if hint is float else (hint,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise TypeError(f"{entry.name}: expected {_describe(entry, hint)}, got {value!r}")
    minimum, above, choices = (entry.metadata[key] for key in ("minimum", "above", "choices"))
    if choices and value not in choices:
        raise ValueError(f"{entry.name}: expected one of {', '.join(choices)}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{entry.name}: expected {_describe(entry, hint)}, got {value!r}")
    if (minimum is not None and value < minimum) or (above is not None and value <= above):
        raise ValueError(f"{entry.name}: expected {_describe(entry, hint)}, got {value!r}")


def _describe(entry: dataclasses.Field[Any], hint: type) -> str:
    minimum, above, choices = (entry.metadata[key] for key in ("minimum", "above", "choices"))
    kind = {bool: "true or false", int: "an integer", float: "a finite number", str: "text"}[hint]
    if choices:
        return f"one of {', '.join(choices)}"
    if minimum is not None:
        return f"{kind} of at least {minimum:g}"
    return kind if above is None else f"{kind} above {above:g}"


def all_settings(config: type = RunConfig, prefix: str = "") -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    """Every settable key in dotted form, with its field and its type."""
    found: dict[str, tuple[dataclasses.Field[Any], Any]] = {}
    hints = get_type_hints(config)
    for entry in dataclasses.fields(config):
        hint = hints[entry.name]
        if dataclasses.is_dataclass(hint):
            found |= all_settings(hint, f"{prefix}{entry.name}.")  # type: ignore[arg-type]
        else:
            found[prefix + entry.name] = (entry, hint)
    return found


def parse(key: str, text: str) -> Any:
    """The value a text stands for under a dotted key.

    Raises: ValueError for an unknown key, or for a text that is not of the key's type.
    """
    known = all_settings()
    if key not in known:
        raise ValueError(_unknown(key))
    entry, hint = known[key]
    if get_origin(hint) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if hint is bool:
        if text not in ("true", "false"):
            raise ValueError(f"{key}: expected true or false, got {text!r}")
        return text == "true"
    try:
        return hint(text)
    except ValueError:
        raise ValueError(f"{key}: expected {_describe(entry, hint)}, got {text!r}") from None


def _unknown(key: str) -> str:
    near = difflib.get_close_matches(key, all_settings(), n=3, cutoff=0.5)
    return f"{key}: unknown setting{', did you mean ' + ' or '.join(near) + '?' if near else ';'} csakit train --help lists them all"


def updated(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    """The settings with some dotted keys replaced.

    Raises: ValueError or TypeError naming the dotted key.
    """
    values = to_dict(config)
    known = all_settings()
    for key, value in changes.items():
        if key not in known:
            raise ValueError(_unknown(key))
        *sections, name = key.split(".")
        target = values
        for section in sections:
            target = target[section]
        target[name] = value
    return from_dict(values)


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every setting by its dotted key."""
    found: dict[str, Any] = {}
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        found |= flat(value, f"{prefix}{entry.name}.") if dataclasses.is_dataclass(value) else {prefix + entry.name: value}
    return found


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The settings as nested dictionaries, ready for JSON."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any], config: type = RunConfig, prefix: str = "") -> Any:
    """The settings from nested dictionaries; what is left out keeps its default.

    Raises: ValueError or TypeError naming the dotted key that is unknown or wrong.
    """
    hints = get_type_hints(config)
    unknown = [key for key in values if key not in hints]
    if unknown:
        raise ValueError(_unknown(prefix + unknown[0]))
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        hint = hints[name]
        if dataclasses.is_dataclass(hint) and isinstance(value, dict):
            value = from_dict(value, hint, f"{prefix}{name}.")  # type: ignore[arg-type]
        elif get_origin(hint) is tuple and isinstance(value, list):
            value = tuple(value)
        arguments[name] = value
    try:
        return config(**arguments)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{prefix}{error}") from None
