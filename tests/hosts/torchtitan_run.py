"""Optimizer steps of a tiny DeepSeek-V3 model with csakit's attention, by torchtitan's own Trainer, on the CPU.

    python tests/hosts/torchtitan_run.py WHAT.json RESULT.pt          # {"steps": [OPTIONS, ..], "refusals": [OPTIONS, ..], "v4": true}

For each set of options (`OPTIONS`) one fresh trainer and one step: writes what went into each attention layer, all gradients, the
parameters before the step, and losses.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import sys
import tempfile
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch.distributed.fsdp import FSDPModule

TOKENS, ROWS, VOCABULARY = 24, 4, 64  # of a row; rows of a step
LAYER = {"head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 12, "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 4, "index_head_dim": 8}
LAYER |= {"index_topk": 2, "sliding_window": 5, "rope_scaling": None}
OPTIONS = {
    "rank": 0,
    "world": 1,
    "port": None,
    "local_rows": 2,  # of a micro-batch on a rank
    "kind": "compressed_sparse_attention",
    "coef": 1.0,
    "objective": "sparse",
    "denominator": "attended",
    "tokens_per_step": ROWS * TOKENS,
    "layer": {},
    "checkpointing": None,
    "compiled": False,
    "precision": "float32",
    "ignored": 0,  # labels at the head of each row
}


class Memory:
    """Stands for torchtitan's monitor of the device's memory, which a CPU has not."""

    device_name = "cpu"

    def get_peak_stats(self) -> SimpleNamespace:
        return SimpleNamespace(max_active_gib=0, max_active_pct=0, max_reserved_gib=0, max_reserved_pct=0, num_alloc_retries=0, num_ooms=0)

    def reset_peak_stats(self) -> None:
        pass


def rows_of_step() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [ROWS, TOKENS + 1] and positions of packed documents [ROWS, TOKENS]."""
    random = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (ROWS, TOKENS + 1), generator=random)
    lengths = ([24], [9, 15], [13, 2, 9], [17, 7])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return tokens, positions


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def build(options: dict, folder: str):
    """The trainer. torchtitan decides at import which kind of device it runs on, so it is told before."""
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"
    os.environ.update(LOCAL_RANK=str(options["rank"]), RANK=str(options["rank"]), WORLD_SIZE=str(options["world"]))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options["port"] or free_port()))
    from torchtitan.components import metrics
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import CompileConfig, OverrideConfig
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel

    class Rows(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            ignored: int = 0

        def __init__(self, config, *, dp_world_size, dp_rank, local_batch_size, **_):
            self.world, self.rank, self.local, self.ignored = dp_world_size, dp_rank, local_batch_size, config.ignored

        def __iter__(self):
            tokens, positions = rows_of_step()
            labels = tokens[:, 1:].clone()
            labels[:, : self.ignored] = -100
            mine = slice(self.rank * ROWS // self.world, (self.rank + 1) * ROWS // self.world)
            for row in range(mine.start, mine.stop, self.local):
                part = slice(row, row + self.local)
                yield {"input": tokens[part, :-1], "positions": positions[part]}, labels[part]

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config, **_):
            super().__init__()

        def encode(self, *_):
            return []

        def decode(self, *_):
            return ""

        def get_vocab_size(self):
            return VOCABULARY

    metrics.build_device_memory_monitor = Memory
    config = deepseek_v3_debugmodel()
    shrink(config.model_spec.model)
    config.loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    config.dataloader, config.tokenizer = Rows.Config(ignored=options["ignored"]), NoTokenizer.Config()
    config.checkpoint = CheckpointManager.Config(enable=False)
    config.dump_folder = folder
    config.debug.seed = 7
    training = config.training
    training.local_batch_size, training.global_batch_size, training.seq_len = options["local_rows"], ROWS, TOKENS
    training.max_norm, training.steps, training.disable_cuda_graphs = 1e9, 1, True
    training.mixed_precision_param = options["precision"]
    if options["world"] > 1:  # the default asks more of FSDP than PyTorch 2.13 has
        config.parallelism.spmd_backend = "partial_dtensor"
    config.activation_checkpoint = {None: None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}[options["checkpointing"]]
    config.compile = CompileConfig(enable=options["compiled"], components=["model"], backend="aot_eager")
    objective = {"indexer_loss": options["objective"], "indexer_loss_coef": options["coef"], "denominator": options["denominator"]}
    layer = {**LAYER, **objective, **options["layer"]}
    entry = {"kind": options["kind"], "layer": layer, "tokens_per_step": options["tokens_per_step"]}
    config.override = OverrideConfig(imports=[("csakit.integrations.torchtitan.deepseek_v3.hybrid_attention", entry)])
    return config.build()


def shrink(model) -> None:
    """Makes torchtitan's debug model smaller still: two dense layers of width 32."""
    dense = next(layer for layer in model.layers if layer.feed_forward is not None)
    model.dim, model.vocab_size = 32, VOCABULARY
    model.tok_embeddings.num_embeddings = model.lm_head.out_features = VOCABULARY
    model.tok_embeddings.embedding_dim = model.lm_head.in_features = model.norm.normalized_shape = 32
    for norm in (dense.attention_norm, dense.ffn_norm):
        norm.normalized_shape = 32
    dense.attention.dim, dense.attention.n_heads = 32, 4
    ffn = dense.feed_forward
    ffn.w1.in_features = ffn.w3.in_features = ffn.w2.out_features = 32
    ffn.w1.out_features = ffn.w3.out_features = ffn.w2.in_features = 48
    model.layers = [copy.deepcopy(dense) for _ in range(2)]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().detach().clone()


def clean(name: str) -> str:
    """A parameter's name without the wrappers of checkpointing."""
    return name.replace("_checkpoint_wrapped_module.", "")


def refusal(options: dict) -> str:
    """What is said when a trainer is built that cannot be."""
    try:
        step(options)
    except (TypeError, ValueError) as error:
        torch.distributed.destroy_process_group()
        return f"{type(error).__name__}: {error}"
    return "nothing"


def step(options: dict) -> dict:
    """What went in and came out of one optimizer step."""
    from csakit.integrations.torchtitan import indexer_losses

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build({**OPTIONS, **options}, folder)
    model = trainer.model_parts[0]
    if trainer.parallel_dims.world_size > 1:  # gloo sums, and cannot also multiply
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    first = {clean(name): plain(parameter) for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # what starts at 0 or 1 hides mistakes
            if name.endswith(("ape", "attn_sink", "norm.weight")):
                part = parameter.to_local()
                part.add_(0.5 * torch.sin(torch.arange(part.numel()).view(part.shape) + 1.0))
    before = {clean(name): plain(parameter) for name, parameter in model.named_parameters()}
    seen: dict[str, list] = {}

    def keep(name: str, x: torch.Tensor, positions: torch.Tensor) -> None:
        if torch._C._current_graph_task_id() == -1:  # not while a checkpointed block is recomputed
            seen.setdefault(name, []).append((x.detach().clone(), positions.clone()))

    if not options.get("compiled"):
        for name, module in model.named_modules():
            if type(module).__name__ == "HybridAttention":
                module.register_forward_pre_hook(lambda _, given, name=name: keep(clean(name), given[0], given[2]))
    losses: list[float] = []
    micro_batch = trainer.forward_backward_step
    trainer.forward_backward_step = lambda **given: losses.append(float((loss := micro_batch(**given)).detach())) or loss
    trainer.train_step(trainer.batch_generator(trainer.dataloader))
    gradients = {clean(name): plain(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    indexer = {name: float(loss) for name, loss in indexer_losses(trainer.model_parts).items()}
    result = {"first": first, "before": before, "gradients": gradients, "inputs": seen, "loss": sum(losses), "indexer": indexer}
    result["state"] = [clean(name) for name in model.state_dict()]
    torch.distributed.destroy_process_group()
    return result


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        given = json.load(file)
    found = {
        "steps": [step(options) for options in given["steps"]],
        "refusals": [refusal(options) for options in given.get("refusals", [])],
    }
    if given.get("v4"):
        import torchtitan_v4

        found["v4"] = torchtitan_v4.check()
    torch.save(found, sys.argv[2])
