"""Logits and gradients of a small DeepSeek-V4 in fp32: the stock model of Transformers beside the same with csakit in it.

    python examples/compare_with_stock.py

One document of 512 tokens per row, so that the stock model computes the same thing; the indexers' loss is off.
"""

import torch
from small_v4 import small_model

from csakit.integrations.transformers import install


def logits_and_gradients(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    out = model(ids, labels=ids, use_cache=False)
    model.zero_grad()
    out.loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"logits": out.logits.detach(), **gradients}


def main() -> tuple[float, float]:
    model = small_model()
    with torch.no_grad():  # sinks and biases start at 0 and would not show a mistake; larger weights give logits of size 1 to 10
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter)) if name.endswith(("sinks", "position_bias")) else None
            parameter.mul_(5 if parameter.ndim > 1 and "hc" not in name else 1)
    ids = torch.randint(1, 64, (2, 512), generator=torch.Generator().manual_seed(0))
    stock = logits_and_gradients(model, ids)
    with install(model, objective="off"):
        ours = logits_and_gradients(model, ids)
    assert ours.keys() == stock.keys()
    differences = {name: float((ours[name] - stock[name]).abs().max()) for name in stock}
    logits = differences.pop("logits")
    worst = max(differences, key=lambda name: differences[name])
    print(f"logits: greatest difference {logits:.1e}, greatest value {stock['logits'].abs().max():.1e}")
    print(f"gradients of {len(differences)} tensors: greatest difference {differences[worst]:.1e} ({worst},", end=" ")
    print(f"greatest value {stock[worst].abs().max():.1e})")
    return logits, differences[worst]


if __name__ == "__main__":
    main()
