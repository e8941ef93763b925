"""LoRA (PEFT) on the indexers and beside them: two adapters' worth of weights, two losses, each with its own part.

    python examples/lora_indexer.py

PEFT comes first, csakit second: what trains in a stage is chosen among what PEFT left trainable.
"""

import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from small_v4 import small_model

from csakit.integrations.transformers import install

INDEXER = r"indexer\.(q_b_proj|kv_proj|gate_proj|scorer\.weights_proj)"
BESIDE = r"self_attn\.(q_a_proj|q_b_proj|kv_proj)"


def main(folder: str) -> list[float]:
    model = get_peft_model(small_model(), LoraConfig(r=8, target_modules=rf".*\.({INDEXER}|{BESIDE})"))
    ids = torch.randint(1, 64, (4, 64), generator=torch.Generator().manual_seed(0))
    losses = []
    with install(model) as handle:
        for stage, rate in (("warmup", 3e-2), ("sparse", 3e-3)):
            handle.stage(stage)
            trained = [parameter for _, parameter in handle.trainable_parameters()]
            print(f"{stage}: {sum(parameter.numel() for parameter in trained)} adapter weights train")
            optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
            for _ in range(15):
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(handle.metrics()["loss"])
            print(f"{stage}: indexer loss {losses[-15]:.4f} -> {losses[-1]:.4f} nats per token")
        with torch.no_grad():
            before = model.eval()(input_ids=ids).logits
        model.save_pretrained(folder)
    again = PeftModel.from_pretrained(small_model(), folder)
    with install(again), torch.no_grad():
        assert torch.equal(again.eval()(input_ids=ids).logits, before), "the adapters hold everything that was trained"
    return losses


if __name__ == "__main__":
    main(tempfile.mkdtemp())
