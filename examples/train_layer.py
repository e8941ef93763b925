"""One compressed sparse layer teaches its indexer what its own attention looks at, on random data.

    python examples/train_layer.py

The layer's output carries the indexer's loss, so `out.mean().backward()` trains the indexer; the backbone is frozen here.
"""

import torch

import csakit
from csakit.nn import CompressedSparseAttention, HybridAttentionConfig

STEPS = 60


def main() -> tuple[float, float]:
    torch.manual_seed(0)
    config = HybridAttentionConfig(
        hidden_size=64, num_attention_heads=4, head_dim=32, qk_rope_head_dim=8, q_lora_rank=32, o_groups=2, o_lora_rank=16,
        index_n_heads=16, index_head_dim=16, index_topk=8, sliding_window=16, indexer_loss="dense",
    )  # fmt: skip
    layer = CompressedSparseAttention(config).requires_grad_(False)
    layer.indexer.requires_grad_(True)
    hidden = torch.randn(2, 128, config.hidden_size)
    layout = csakit.Layout.batch(2, 128, ratio=4, window=config.sliding_window)

    optimizer = torch.optim.AdamW(layer.indexer.parameters(), lr=1e-2, weight_decay=0.0)
    history = []
    for _ in range(STEPS):
        out, indexer_loss, _ = layer(hidden, layout)
        out.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(float(indexer_loss.loss))
    print(f"KL of attention from indexer, nats per token: {history[0]:.4f} before, {history[-1]:.4f} after {STEPS} steps")
    return history[0], history[-1]


if __name__ == "__main__":
    main()
