"""Put your own indexer loss under the audit: `python examples/audit_your_own_loss.py`, or `csakit audit your_module:your_loss`.

Leave the sink out of the denominator, or widen the window by one token, and see which probes name the mistake.
"""

from __future__ import annotations

import torch

from csakit import audit


def your_loss(case: audit.Case) -> torch.Tensor:
    """Sparse objective on whole rows: KL between the attention over the selected entries and the index scores."""
    if case.cu_seqlens is not None or case.mask is not None or case.objective == "dense":
        raise audit.NotSupported("only whole rows and the sparse objective")
    query, key, entry = torch.arange(case.kv.shape[1])[:, None], torch.arange(case.kv.shape[1]), torch.arange(case.entries.shape[1])
    outside = (key > query) | (key <= query - case.window)
    hidden = entry >= (query + 1) // case.ratio
    products = torch.einsum("btic,bec->btie", case.q_index, case.k_index).relu()
    scores = case.index_scale * torch.einsum("bti,btie->bte", case.weights, products).masked_fill(hidden, -torch.inf)
    best = scores.argsort(dim=-1, descending=True, stable=True)[..., : case.topk]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & ~hidden
    with torch.no_grad():
        near = case.scale * torch.einsum("bthd,bsd->bths", case.q, case.kv).masked_fill(outside[:, None], -torch.inf)
        far = case.scale * torch.einsum("bthd,bed->bthe", case.q, case.entries).masked_fill(~chosen[:, :, None], -torch.inf)
        sink = case.sink.expand(*near.shape[:3])[..., None]
        log_mass = (far - torch.cat([near, far, sink], -1).logsumexp(-1, keepdim=True)).logsumexp(2)
    empty = ~chosen.any(-1, keepdim=True)  # a row that sees no entry has no softmax
    teacher, student = (x.masked_fill(~chosen, -torch.inf).masked_fill(empty, 0).log_softmax(-1) for x in (log_mass, scores))
    kl = (teacher.exp() * (teacher - student).masked_fill(~chosen, 0)).sum(-1)
    weight = torch.ones_like(kl) if case.weight is None else case.weight
    return (weight * kl).sum() / (weight.sum() if case.divisor is None else case.divisor)


if __name__ == "__main__":
    print(audit.run(your_loss))
