"""csakit inside the stock models of the Transformers library.

    handle = install(model)                 # csakit's attention, and the indexer's loss in every backward
    handle.stage("warmup")                  # dense attention, dense objective, only the indexers train
    model(input_ids, labels=labels).loss.backward()
    handle.metrics()
    handle.remove()                         # the stock model again

Documents come from what the model is called with: `attention_mask`, `position_ids` that restart, `cu_seq_lens_q`, `seq_idx`, or
`handle.layout`. Forwards build no cache unless asked to (`use_cache=True` or `cache=...`), as `generate` does.

    with handle.record() as record:         # a rollout
        model.generate(...)
    with handle.replay(record):             # the same picks in training
        model(...)

`csakit.integrations.transformers.trainer` has the library's Trainer with both losses at one scale.
"""

from .handle import Handle
from .installation import install
from .selections import Selections

__all__ = ["Handle", "Selections", "install"]
