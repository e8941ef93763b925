"""The settings of a training run: frozen dataclasses, checked when they are built.

The same fields are the Python API, the keys of a TOML file, the `--set key=value` options of `csakit train` and its `--help`
(settings.py). Needs no torch, so that help and usage errors come at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from csakit.train.settings import check_fields, inherited, option

STAGES = ("dense", "warmup", "sparse")
LAYER_KINDS = ("sliding", "csa", "hca")
DENOMINATORS = ("attended", "visible")
ATTENTIONS = ("dense", "sparse")
OBJECTIVES = ("off", "dense", "sparse")
PARTS = ("backbone", "indexer")
TRAINS = (*PARTS, "everything")
SCHEDULES = ("cosine", "linear", "constant")
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek-V4 model with random weights, in the names of the released config.json.

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
class StartConfig:
    """What a run begins with, in place of the random weights of the model section."""

    path: str = option(
        "",
        "folder with config.json and safetensors, as Transformers saves it or in the official format; or a config.json "
        "alone: random weights of its shape; empty: random weights of the model section",
        path=True,
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from, how it becomes tokens, and how it is cut into rows.

    Raises: as ModelConfig.
    """

    path: str = option("", "folder, text file, .zip, .jsonl or .parquet; empty: the source of Python's standard library", path=True)
    text_key: str = option("text", "key of the text in a .jsonl line, column of the text in a .parquet file")
    tokenizer: str = option(
        "", "tokenizer.json of the tokenizers library; empty: the one beside the weights of start.path, otherwise bytes", path=True
    )
    separator: str = option(
        "", "token that begins each document; empty: the bos token of start.path, otherwise a token of its own behind all others"
    )
    sequence_length: int = option(512, "tokens of a row", minimum=2)
    heldout: float = option(0.1, "share of the documents kept for evaluation", above=0)
    heldout_rows: int = option(16, "rows of an evaluation", minimum=1)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.heldout >= 1:
            raise ValueError(f"heldout: expected a share below 1, got {self.heldout}")


@dataclass(frozen=True)
class StageConfig:
    """One stage: how long, how fast, who trains and for what.

    Raises: as ModelConfig; ValueError as well when attention, objective and trains contradict each other.
    """

    steps: int = option(1000, "optimizer steps; 0 leaves the stage out", minimum=0)
    rows: int = option(4, "rows of a micro-batch", minimum=1)
    accumulation: int = option(1, "micro-batches of a step", minimum=1)
    learning_rate: float = option(1e-3, "peak learning rate of the backbone", minimum=0)
    indexer_learning_rate: float = option(1e-3, "peak learning rate of the indexer", minimum=0)
    schedule: str = option("cosine", "course of the learning rate after the ramp", choices=SCHEDULES)
    ramp: int = option(10, "steps of linear rise of the learning rate", minimum=0)
    floor: float = option(0.1, "learning rate at the end of a falling schedule, as a share of the peak", minimum=0)
    weight_decay: float = option(0.1, "AdamW weight decay of matrices", minimum=0)
    clip: float = option(1.0, "largest gradient norm, of backbone and indexer apart", above=0)
    attention: str = option("dense", "what a query attends to: every visible entry, or the indexer's selection", choices=ATTENTIONS)
    objective: str = option("off", "candidates of the indexer's loss: those of the attention, or no loss", choices=OBJECTIVES)
    denominator: str = option("attended", "softmax denominator of the teacher of the sparse objective", choices=DENOMINATORS)
    coef: float = option(1.0, "factor of the indexer's loss", above=0)
    trains: str = option("backbone", "who trains: the backbone for language, the indexer for its objective, or both", choices=TRAINS)
    freeze: tuple[str, ...] = option((), "parameters that do not train all the same, as name patterns (model.embed_tokens.*)")
    evaluate_every: int = option(0, "steps between evaluations inside the stage; 0: before and after it only", minimum=0)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.floor > 1:
            raise ValueError(f"floor: expected a share of the peak, at most 1, got {self.floor}")
        if self.objective not in ("off", self.attention):
            raise ValueError(f"objective: expected off or that of the attention ({self.attention}), got {self.objective!r}")
        if (self.trains == "backbone") != (self.objective == "off"):
            fix = "set an objective, or trains = backbone" if self.objective == "off" else "set objective = off, or trains otherwise"
            raise ValueError(f"trains: objective {self.objective!r} does not go with {self.trains!r}; {fix}")


@dataclass(frozen=True)
class DenseStage(StageConfig):
    """Attention over every visible entry; everything but the indexer learns language."""


@dataclass(frozen=True)
class WarmupStage(StageConfig):
    """The same attention; the indexer alone learns its teacher. Defaults: DeepSeek-V3.2, 1000 steps of 16 sequences at 1e-3."""

    rows: int = inherited(StageConfig, "rows", 1)
    accumulation: int = inherited(StageConfig, "accumulation", 16)
    schedule: str = inherited(StageConfig, "schedule", "constant")
    objective: str = inherited(StageConfig, "objective", "dense")
    trains: str = inherited(StageConfig, "trains", "indexer")


@dataclass(frozen=True)
class SparseStage(StageConfig):
    """Attention over the selection; everything learns. Defaults: DeepSeek-V3.2, 15000 steps of 480 sequences at 7.3e-6."""

    steps: int = inherited(StageConfig, "steps", 15000)
    rows: int = inherited(StageConfig, "rows", 1)
    accumulation: int = inherited(StageConfig, "accumulation", 480)
    learning_rate: float = inherited(StageConfig, "learning_rate", 7.3e-6)
    indexer_learning_rate: float = inherited(StageConfig, "indexer_learning_rate", 7.3e-6)
    schedule: str = inherited(StageConfig, "schedule", "constant")
    attention: str = inherited(StageConfig, "attention", "sparse")
    objective: str = inherited(StageConfig, "objective", "sparse")
    trains: str = inherited(StageConfig, "trains", "everything")


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides the numbers of a run.

    Raises: as ModelConfig; ValueError as well when the parts do not fit together, above all when no query of a sparse
    stage could have more entries than it selects.
    """

    stages: tuple[str, ...] = option(STAGES, "stages to run, in this order", choices=STAGES)
    seed: int = option(0, "seed of the weights and of the order of the text", minimum=0)
    precision: str = option(
        "fp32",
        "bf16: autocast; what trains stays fp32, AdamW's state too; matrices that train in no stage are bf16",
        choices=PRECISIONS,
    )
    device: str = option("cpu", "torch device of the model, e.g. cuda")
    gradient_checkpointing: bool = option(False, "recompute the layers in the backward pass instead of keeping their activations")
    save_every: int = option(100, "steps between checkpoints", minimum=1)
    keep: int = option(2, "checkpoints kept", minimum=1)
    tensorboard: bool = option(False, "write the numbers of metrics.jsonl for TensorBoard too")
    export: bool = option(False, "save the trained model as a Transformers folder at the end")
    start: StartConfig = field(default_factory=StartConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    dense: DenseStage = field(default_factory=DenseStage)
    warmup: WarmupStage = field(default_factory=WarmupStage)
    sparse: SparseStage = field(default_factory=SparseStage)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.seed >= 2**32:
            raise ValueError(f"seed: expected an integer below 2**32, got {self.seed}")
        if not self.stages or list(self.stages) != [name for name in STAGES if name in self.stages]:
            raise ValueError(f"stages: expected each of {', '.join(STAGES)} at most once and in this order, got {','.join(self.stages)}")
        if not self.active():
            raise ValueError("stages: expected at least one stage with steps above 0")
        if self.start.path:
            if self.model != ModelConfig():
                raise ValueError("model: expected no settings, the shape of the model is that of start.path; leave the section out")
            return
        needed = any((stage.objective, stage.attention) != ("off", "dense") for stage in self.active().values())
        if needed and "csa" not in self.model.layers:
            raise ValueError("model.layers: expected at least one csa layer, only these have an indexer to train")
        self.check_reach(self.model.csa_ratio, self.model.index_topk)

    def stage(self, name: str) -> StageConfig:
        """The settings of one stage."""
        return {"dense": self.dense, "warmup": self.warmup, "sparse": self.sparse}[name]

    def active(self) -> dict[str, StageConfig]:
        """The stages that run, by name: those listed that have steps."""
        return {name: self.stage(name) for name in self.stages if self.stage(name).steps}

    def selects(self) -> bool:
        """Whether any stage attends to a selection."""
        return any(stage.attention == "sparse" for stage in self.active().values())

    def check_reach(self, ratio: int, topk: int) -> None:
        """Raise ValueError when a stage selects and no row is long enough for a query with more entries than it selects."""
        if self.selects() and self.data.sequence_length <= ratio * topk:
            raise ValueError(
                f"data.sequence_length: expected more than model.csa_ratio * model.index_topk = {ratio} * "
                f"{topk} = {ratio * topk}, got {self.data.sequence_length}: every query would select all it sees, so the sparse "
                "stage would not be sparse and would teach nothing about selection; lengthen the rows or lower index_topk"
            )
