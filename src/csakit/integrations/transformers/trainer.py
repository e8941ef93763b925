"""The library's Trainer for models whose indexers train: the two losses keep one scale, and both are logged.

    install(model)
    trainer = IndexerTrainer(model=model, args=args, train_dataset=data)

It composes with other trainers: `class Mine(IndexerTrainer, SFTTrainer): ...`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

from .handle import Handle, handle_of


class IndexerTrainer(Trainer):
    """Scales the indexers' loss as the Trainer scales its own, and logs it as `indexer_loss`.

    The Trainer divides the language model's loss by one count for the whole optimizer step, `num_items_in_batch`, which the model hands
    on to csakit. Over several processes it multiplies by their number, because gradients are averaged; without the count it divides by
    the micro-batches of a step; a gradient scaler multiplies in backward. The attached loss sees none of that: `handle.step_weight` is
    set here before every forward. `handle.divisor`, if set, is left as it is.

    `indexer_loss` is in nats per token, the mean over layers, averaged over the optimizer steps since the last log.
    """

    _indexer_loss: Tensor | float = 0.0
    _counted_from: int | None = None  # the optimizer steps that had been made when counting began

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """The language model's loss of one micro-batch, detached; both losses have been through backward.

        Raises:
            RuntimeError: csakit is not installed in the model.
        """
        handle = handle_of(model)
        factor, scaler = self._factor(handle, num_items_in_batch), self.accelerator.scaler
        handle.step_weight = factor if scaler is None else lambda: factor * scaler.get_scale()
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self._counted_from is None:
            self._counted_from = self.state.global_step
        losses = list(handle.losses.values())
        if losses:
            self._indexer_loss = self._indexer_loss + factor * torch.stack(losses).mean()
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs, with `indexer_loss` beside a training `loss`."""
        if "loss" in logs and self._counted_from is not None:
            steps = max(1, self.state.global_step - self._counted_from)
            total = torch.as_tensor(self._indexer_loss, device=self.accelerator.device) / steps
            logs["indexer_loss"] = float(self.accelerator.reduce(total, "mean"))
            self._indexer_loss, self._counted_from = 0.0, None
        super().log(logs, start_time)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Loads the weights that `save_pretrained` wrote under other names than the model's own, which the Trainer compares by name."""
        model = self.model if model is None else model
        if not isinstance(model, PreTrainedModel) or self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        # in fp32, which holds every saved precision; the copy gives each parameter its own again
        model.load_state_dict(type(model).from_pretrained(resume_from_checkpoint, dtype=torch.float32).state_dict())

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _factor(self, handle: Handle, count: Tensor | int | None) -> float:
        if handle.divisor is not None:
            return 1.0
        if count is None or not self.model_accepts_loss_kwargs:
            return 1.0 / self.current_gradient_accumulation_steps
        return float(self.accelerator.num_processes) if self.args.average_tokens_across_devices else 1.0
