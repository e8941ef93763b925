"""A training loop of your own with `accelerate`: gradient accumulation in which both losses mean the same however a step is split.

    python examples/accelerate_loop.py
    accelerate launch --num_processes 2 --cpu examples/accelerate_loop.py

`accelerator.backward` divides the loss it is given by the micro-batches of a step, and processes average their gradients. The loss
that csakit attaches is not among its arguments, so one line says what it is divided by: `handle.divisor`.
"""

import torch
from accelerate import Accelerator
from small_v4 import small_model

from csakit.integrations.transformers import install

STEPS, ROWS, TOKENS = 3, 8, 64


def main(micro_batches: int = 4) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(gradient_accumulation_steps=micro_batches, cpu=True)
    model = small_model()
    handle = install(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.randint(1, 64, (STEPS, ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    lengths = torch.randint(20, TOKENS + 1, (STEPS, ROWS), generator=torch.Generator().manual_seed(1))
    masks = (torch.arange(TOKENS) < lengths[..., None]).long()

    for step_ids, step_mask in zip(ids, masks):
        # both counts are of the whole step, over all processes; each process then works on its own rows
        labels = step_ids.masked_fill(step_mask == 0, -100)
        targets, world = int((labels[:, 1:] != -100).sum()), accelerator.num_processes
        handle.divisor = step_mask.sum() / world
        own = slice(accelerator.process_index, None, world)
        total = 0.0
        for rows, mask, target in zip(*(x[own].chunk(micro_batches) for x in (step_ids, step_mask, labels))):
            with accelerator.accumulate(model):
                loss = model(rows, attention_mask=mask, labels=target, num_items_in_batch=targets).loss * world
                accelerator.backward(loss * micro_batches)
                total += sum(float(value) for value in handle.losses.values())
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"indexer loss of the step, nats per token: {accelerator.reduce(torch.tensor(total), 'mean'):.4f}")
    trained = {name: parameter.detach().clone() for name, parameter in accelerator.unwrap_model(model).named_parameters()}
    handle.remove()
    return trained


if __name__ == "__main__":
    main()
