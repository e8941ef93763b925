"""The adapter of DeepSeek-V4 (`DeepseekV4ForCausalLM`, transformers 5.24).

The model pools its compressed entries from the start of the row, over padding and across packed documents. Here the same
projections, norms and rotations run on the documents of the row: `csakit.nn.functional` pools them inside documents, and an entry is
rotated at the position the host gives its first token, so that only relative positions matter, whatever they start with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from csakit import Layout
from csakit.backends.rows import accumulator
from csakit.nn.functional import AttendInputs, IndexInputs, compressed_entries, index_inputs
from csakit.nn.rotary import Angles, rotate

from .forwards import Call
from .protocol import LayerSite, Tap


class DeepseekV4Adapter:
    """Sliding, compressed sparse (CSA) and heavily compressed (HCA) layers; every CSA layer owns an indexer."""

    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v4",)
    carrier: ClassVar[str] = "position_ids"
    expected: ClassVar[Mapping[str, str]] = {
        "DeepseekV4Attention.forward": "7e61a222ad0603b7",
        "DeepseekV4CSACompressor.forward": "3644b0ea966e20d2",
        "DeepseekV4DecoderLayer.forward": "a46984c70748a453",
        "DeepseekV4HCACompressor.forward": "3fb94114cb4ed493",
        "DeepseekV4Indexer.forward": "428c5223ef907ac9",
        "DeepseekV4IndexerScorer.forward": "7e1489dad5000d02",
        "DeepseekV4Model.forward": "935e374990a41231",
        "apply_rotary_pos_emb": "d938fef910b008b2",
    }

    def backbone(self, model: nn.Module) -> Any:
        """The `DeepseekV4Model` inside."""
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Model

        found = [module for module in model.modules() if isinstance(module, DeepseekV4Model)]
        if len(found) != 1:
            raise TypeError(f"install needs a model with one DeepseekV4Model inside; got {len(found)} in {type(model).__name__}")
        return found[0]

    def check(self, backbone: Any) -> None:
        """Raises ValueError for attention dropout: csakit's attention has none, and the teacher is the undropped softmax."""
        dropout = max((layer.self_attn.attention_dropout for layer in backbone.layers), default=0.0)
        if dropout:
            raise ValueError(
                f"attention_dropout must be 0: csakit's attention has no dropout and its teacher is the undropped softmax; got {dropout}. "
                "Set config.attention_dropout = 0 before the model is built"
            )

    def layers(self, backbone: Any) -> list[LayerSite]:
        """One site per decoder layer."""
        return [self._site(f"layers.{number}", layer.self_attn) for number, layer in enumerate(backbone.layers)]

    def taps(self, site: LayerSite) -> list[Tap]:
        """The forwards of the compressor and of its indexer."""
        compressor = site.attention.compressor
        if compressor is None:
            return []
        taps = [Tap(compressor, partial(self._compress, compressor))]
        return taps if site.indexer is None else [*taps, Tap(site.indexer, partial(self._index, site.indexer))]

    def sources(self, backbone: Any) -> list[Callable[..., Any]]:
        """Every function csakit replaces, calls between, or takes arguments through."""
        host = _host()
        kinds = {
            host.DeepseekV4CSACompressor,
            host.DeepseekV4HCACompressor,
            host.DeepseekV4Indexer,
            host.DeepseekV4IndexerScorer,
            type(backbone),
        }
        for layer in backbone.layers:
            attention = layer.self_attn
            used = (layer, attention, attention.compressor, _indexer(attention.compressor))
            kinds |= {type(module) for module in used if module is not None}
        return [*(kind.forward for kind in kinds), host.apply_rotary_pos_emb]

    def views(self, call: Call, query: Tensor, key: Tensor, sink: Tensor, scaling: float) -> AttendInputs:
        """The host's [B, H, T, D] queries and [B, 1, kv rows + E, D] keys, as views: keys are values, entries lie behind the kv rows."""
        kv = key[:, 0]
        if call.site.attention.compressor is None:
            return AttendInputs(query.transpose(1, 2), kv, None, sink, scaling)
        rows = kv.shape[1] - call.layout.num_entries
        return AttendInputs(query.transpose(1, 2), kv[:, :rows], kv[:, rows:], sink, scaling)

    def _site(self, name: str, attention: Any) -> LayerSite:
        compressor = attention.compressor
        indexer = _indexer(compressor)
        ratio = 1 if compressor is None else compressor.compress_rate
        return LayerSite(name, attention, indexer, ratio, 0 if indexer is None else indexer.index_topk)

    def _compress(
        self, module: Any, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor | Call, cache: Any, layer_idx: int
    ) -> tuple[Tensor, Tensor | None]:
        """The compressor's forward: ([B, 1, E, D] entries, no mask). Without a call it is the stock one."""
        call = position_ids
        if not isinstance(call, Call):
            return type(module).forward(module, hidden_states, q_residual, call, cache, layer_idx)
        entries = _entries(module, hidden_states, call, name="compressor", overlap=call.site.indexer is not None)
        if call.needs_indexer:
            module.indexer(hidden_states, q_residual, call, cache, layer_idx)
        return entries.unsqueeze(1), None

    def _index(
        self, module: Any, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor | Call, cache: Any, layer_idx: int
    ) -> Tensor | None:
        """The indexer's forward: the picks [B, T, K], -1 where empty. Without a call it is the stock one."""
        call = position_ids
        if not isinstance(call, Call):
            return type(module).forward(module, hidden_states, q_residual, call, cache, layer_idx)
        return call.run_indexer(lambda: _project(module, hidden_states, q_residual, call))


def _indexer(compressor: Any) -> Any:
    """The indexer that runs, None where there is none. PEFT's `modules_to_save` wraps it together with copies, one of which does."""
    indexer = getattr(compressor, "indexer", None)
    if indexer is None or getattr(indexer, "modules_to_save", None) is None:
        return indexer
    return indexer.modules_to_save[indexer.active_adapters[0]]


def _project(module: Any, hidden_states: Tensor, q_residual: Tensor, call: Call) -> IndexInputs:
    return index_inputs(
        hidden_states,
        q_residual,
        call.position_ids,
        queries=module.q_b_proj,
        keys=lambda hidden: _entries(module, hidden, call, name="indexer", overlap=True),
        gate=module.scorer.weights_proj,
        rotate=lambda q, positions: _rotate(module, q, positions, like=hidden_states),
        width=module.head_dim,
        scale=module.scorer.softmax_scale * module.scorer.weights_scaling,
    )


def _entries(module: Any, hidden_states: Tensor, call: Call, *, name: str, overlap: bool) -> Tensor:
    """The compressed entries [B, E, D] of a compressor or an indexer: pooled inside documents, normed, rotated at their first token.

    With a cache, those of the whole row; `name` is what it keeps them under.
    """

    def pool(values: Tensor, gates: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        return compressed_entries(
            values,
            gates,
            module.position_bias,
            positions,
            layout,
            norm=module.kv_norm,
            rotate=lambda entries, at: _rotate(module, entries, at, like=entries),
            overlap=overlap,
        )

    values, gates = module.kv_proj(hidden_states), module.gate_proj(hidden_states)
    past, site = call.forward.past, call.site
    if past is None:
        return pool(values, gates, call.position_ids, call.layout)
    return past.entries(site.attention.layer_idx, name, values, gates, pool, ratio=site.ratio, overlap=overlap)


def _rotate(module: Any, x: Tensor, position_ids: Tensor, *, like: Tensor) -> Tensor:
    """The host's rotation (`apply_rotary_pos_emb`) of x [B, N, (I,) C]. `like` gives angles their dtype, as in the host."""
    angles = module.rotary_emb(like, position_ids=position_ids, layer_type=module.rope_layer_type)
    return rotate(x, Angles(*(angle.to(accumulator(angle)) for angle in angles)))


def _host() -> Any:
    from transformers.models.deepseek_v4 import modeling_deepseek_v4

    return modeling_deepseek_v4
