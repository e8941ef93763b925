"""A pipeline stage around a CSA layer, and Megatron's own schedules over it on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron_layer import HEADS, HIDDEN, LATENT, ONE_RANK, WIDTH, Data, make_layer, run
from torch import Tensor, nn

TOKENS, ROWS, LOSS_SCALE = 14, 4, 512.0


class Stage(nn.Module):
    """hidden [T, B, hidden] + CSA(hidden)."""

    model_type = None  # the schedules ask

    def __init__(self, layer: Any, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer, self.config, self.received = layer, layer.config, None
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.5)
        self.query, self.key, self.latent, self.back = (
            nn.Linear(a, b, bias=False, dtype=torch.float64)
            for a, b in ((HIDDEN, HEADS * WIDTH), (HIDDEN, WIDTH), (HIDDEN, LATENT), (HEADS * WIDTH, HIDDEN))
        )
        self.latent.requires_grad_(False)  # it serves the indexer alone, whose input is detached

    def set_input_tensor(self, received: list[Tensor | None]) -> None:
        self.received = received[0]

    def forward(self, hidden: Tensor) -> Tensor:
        query, key = self.query(hidden).unflatten(2, (HEADS, WIDTH)), self.key(hidden).unsqueeze(2)
        return hidden + self.back(run(self.layer, Data(3 * query, key, hidden, self.latent(hidden))))


def make_stages(csa: Any, patch: Any, count: int, per_token: bool = False) -> list[Stage]:
    stages = [Stage(make_layer(csa, patch, calculate_per_token_loss=per_token), seed) for seed in range(count)]
    for stage in stages:
        stage.config.grad_scale_func = lambda loss: LOSS_SCALE * loss
        stage.config.pipeline_dtype = torch.float64
        stage.config.experimental_attention_variant = "dsv4_hybrid"
        stage.config.deallocate_pipeline_outputs = False
    return stages


def batches() -> Tensor:
    """[T, B, hidden]"""
    return torch.randn(TOKENS, ROWS, HIDDEN, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def main_loss(config: Any) -> Any:
    """Megatron's loss function: the mean, or with per-token loss (sum, tokens, log)."""

    def loss(out: Tensor) -> tuple:
        if config.calculate_per_token_loss:
            return out.square().sum(), torch.tensor(out.shape[0] * out.shape[1], dtype=torch.int), {}
        return out.square().mean(), {}

    return loss


def schedule(csa: Any, patch: Any, stage: Stage, micro_batches: int, group: Any = None) -> dict[str, Tensor]:
    """Gradients after Megatron's schedule: without a pipeline, or with one stage per rank of the group."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.process_groups_config import ProcessGroupCollection

    zeros = torch.zeros
    patch.setattr(torch, "zeros", lambda *size, device=None, **other: zeros(*size, device=None if device == "cuda" else device, **other))
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = ONE_RANK
    groups.pp = groups.embd = groups.pos_embd = groups.dp_cp = groups.tp_dp_cp = ONE_RANK if group is None else group

    def step(data: Iterator[Tensor], model: Stage) -> tuple[Tensor, Any]:
        return model(next(data) if model.received is None else model.received), main_loss(model.config)

    arguments: dict[str, Any] = {
        "forward_step_func": step, "data_iterator": iter(batches().chunk(micro_batches, 1)), "model": stage, "pg_collection": groups,
        "num_microbatches": micro_batches, "seq_length": TOKENS, "micro_batch_size": ROWS // micro_batches, "forward_only": False,
    }  # fmt: skip
    if group is None:
        schedules.forward_backward_no_pipelining(**arguments)
    else:
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

        stage.config.pipeline_model_parallel_size = group.size()
        communicator = P2PCommunicator(pp_group=group, config=stage.config)
        schedules.forward_backward_pipelining_without_interleaving(**arguments, p2p_communicator=communicator)
    return gradients(stage)


def by_hand(csa: Any, stages: list[Stage]) -> list[dict[str, Tensor]]:
    """The gradients of the main loss and of every layer's indexer loss over the whole batch, both times the loss scale."""
    csa.DSAIndexerLossAutoScaler.main_loss_backward_scale = torch.tensor([LOSS_SCALE])
    hidden = batches()
    for stage in stages:
        hidden = stage(hidden)
    (LOSS_SCALE * main_loss(stages[0].config)(hidden)[0]).backward()
    return [gradients(stage) for stage in stages]


def gradients(stage: Stage) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in stage.named_parameters() if parameter.requires_grad}
