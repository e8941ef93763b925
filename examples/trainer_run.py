"""The Transformers Trainer teaches a small DeepSeek-V4 to repeat itself and, apart from that, its indexers where attention looks.

    python examples/trainer_run.py

First the indexers of the model as it is (warm-up), then everything. The weights are random and the data is made up: put
`DeepseekV4ForCausalLM.from_pretrained(...)` and your data set in their place.
"""

import sys
import tempfile

import torch
from small_v4 import small_model
from transformers import TrainingArguments

from csakit.integrations.transformers import install
from csakit.integrations.transformers.trainer import IndexerTrainer


def repeated_sequences(count: int) -> list[dict[str, torch.Tensor]]:
    """Random tokens, twice: the second half can be read off the first, far outside the window."""
    halves = torch.randint(1, 64, (count, 32), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": ids, "labels": ids} for ids in torch.cat([halves, halves], 1)]


def main(folder: str) -> list[dict[str, float]]:
    model, data = small_model(), repeated_sequences(16)
    handle = install(model)
    history: list[dict[str, float]] = []
    for stage, steps, rate in (("warmup", 16, 3e-2), ("sparse", 8, 3e-3)):
        handle.stage(stage)
        args = TrainingArguments(
            folder, max_steps=steps, learning_rate=rate, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            activation_checkpointing=True, logging_steps=4, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = IndexerTrainer(model=model, args=args, train_dataset=data)  # one per stage: its optimizer holds what trains in it
        trainer.train()
        history += [{"stage": stage, **entry} for entry in trainer.state.log_history if "indexer_loss" in entry]
    for entry in history:
        print("{stage:>8} loss {loss:.4f}   indexer_loss {indexer_loss:.4f} nats".format(**entry))
    handle.remove()
    return history


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
