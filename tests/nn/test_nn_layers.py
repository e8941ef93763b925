"""What csakit's layers promise beyond the numbers: documents, the objective and where it goes, dtypes, and the usual tools."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from stock_layers import CSA, HCA, HIDDEN, KINDS, SLIDING, TOPK, WINDOW, gap, hidden_states, one_document, own_layer, stock_layer
from torch.utils.checkpoint import checkpoint

import csakit
from csakit import Layout
from csakit.nn import CompressedSparseAttention, Compressor, LayerOutput, LightningIndexer, SlidingWindowAttention

TOLERANCE = 1e-5
LENGTHS = (21, 3, 0, 40, 16)


def layer_of(kind: str = CSA, **changes) -> SlidingWindowAttention:
    return own_layer(kind, stock_layer(kind), **{"indexer_loss": "sparse", **changes})


def gradients(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad.clone() for name, parameter in layer.named_parameters() if parameter.grad is not None}
    layer.zero_grad()
    return found


def step(layer: torch.nn.Module, hidden: torch.Tensor, layout: Layout, **options) -> tuple[LayerOutput, dict[str, torch.Tensor]]:
    """One forward and backward of a loss on the output; the output and the gradients."""
    result = layer(hidden, layout, **options)
    (result.out * torch.linspace(-1, 1, HIDDEN)).sum().backward()
    return result, gradients(layer)


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float = TOLERANCE) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert gap(got[name], want[name]) < tolerance, name


# ---- documents -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_separate_documents_in_output_loss_and_gradients(kind: str) -> None:
    layer = layer_of(kind)
    hidden = hidden_states(1, sum(LENGTHS))
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    total = float(sum(LENGTHS))
    packed, want = step(layer, hidden, Layout.packed(offsets, ratio=4, window=WINDOW), divisor=total)
    got: dict[str, torch.Tensor] = {}
    outs, loss = [], 0.0
    for part in hidden.split(LENGTHS, 1):
        alone, grads = step(layer, part, one_document(1, part.shape[1]), divisor=total)
        outs.append(alone.out)
        loss += 0.0 if alone.indexer_loss is None else float(alone.indexer_loss.loss)
        got = {name: got.get(name, 0) + grads.get(name, 0) for name in {*got, *grads}}
    assert gap(packed.out, torch.cat(outs, 1)) < TOLERANCE
    same(got, want)
    assert (packed.indexer_loss is None) == (kind != CSA)
    if kind == CSA:
        assert float(packed.indexer_loss.loss) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_holding_nan_changes_nothing_and_its_output_is_zero(kind: str) -> None:
    layer = layer_of(kind)
    hidden = hidden_states(1, 30)
    alone, want = step(layer, hidden, one_document(1, 30))
    for left, right in ((7, 0), (0, 5)):
        padded = torch.full((1, left + 30 + right, HIDDEN), float("nan"))
        padded[:, left : left + 30] = hidden
        mask = torch.zeros(1, left + 30 + right, dtype=torch.bool)
        mask[:, left : left + 30] = True
        result, got = step(layer, padded, Layout.from_mask(mask, ratio=4, window=WINDOW))
        assert gap(result.out[mask], alone.out[0]) < TOLERANCE
        assert not result.out[~mask].any()
        same(got, want)


def test_a_layout_of_another_ratio_serves_every_kind() -> None:
    hidden = hidden_states(1, 40)
    for kind in KINDS:
        layer = layer_of(kind)
        outs = [layer(hidden, Layout.batch(1, 40, ratio=ratio, window=WINDOW)).out for ratio in (1, 4, 16)]
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


# ---- the objective -------------------------------------------------------------------------------------------------------


def index_and_attention(layer: CompressedSparseAttention, hidden: torch.Tensor, layout: Layout) -> dict:
    """What the layer hands to csakit.attend, and the selection made of what its indexer returns."""
    seen: dict = {}
    handle = layer.indexer.register_forward_hook(lambda module, args, out: seen.update(index=out))
    original = csakit.attend

    def attend(q, kv, entries, layout, **options):
        seen.update(q=q, kv=kv, entries=entries, **options)
        return original(q, kv, entries, layout, **options)

    csakit.attend = attend
    try:
        layer(hidden, layout)
    finally:
        csakit.attend = original
        handle.remove()
    return seen


@pytest.mark.parametrize("denominator", ["attended", "visible"])
def test_the_sparse_loss_is_the_kl_of_the_selected_entries_from_the_whole_softmax(denominator: str) -> None:
    layer = layer_of(denominator=denominator)
    hidden, layout = hidden_states(2, 40), one_document(2, 40)
    result = layer(hidden, layout)
    seen = index_and_attention(layer_of(), hidden, layout)
    q, k, weights, scale = (x.double() if isinstance(x, torch.Tensor) else x for x in seen["index"])
    scores = csakit.index_scores(q, k, weights, layout, scale=scale)
    picks = csakit.select(q, k, weights, TOPK, layout, scale=scale).indices
    assert torch.equal(result.stats.indices, picks)
    taken = torch.zeros_like(scores, dtype=torch.bool).scatter(2, picks.clamp(min=0).long(), True) & (scores > -torch.inf)
    attended = taken if denominator == "attended" else scores > -torch.inf
    heads = {name: seen[name].double() for name in ("q", "kv", "entries", "sink")}
    logits = seen["scale"] * torch.einsum("bthd,bed->bthe", heads["q"], heads["entries"])
    window = seen["scale"] * torch.einsum("bthd,bsd->bths", heads["q"], heads["kv"])
    token = torch.arange(40)
    inside = (token <= token[:, None]) & (token > token[:, None] - WINDOW)
    everything = torch.cat(
        [
            window.masked_fill(~inside[:, None], -torch.inf),
            logits.masked_fill(~attended[:, :, None], -torch.inf),
            heads["sink"].expand(2, 40, -1)[..., None],
        ],
        -1,
    )
    mass = (logits - everything.logsumexp(-1, keepdim=True)).exp().sum(2) * taken
    teacher = mass / mass.sum(-1, keepdim=True).clamp(min=1e-300)
    student = scores.masked_fill(~taken, -torch.inf).log_softmax(-1)
    kl = torch.where(teacher > 0, teacher * (teacher.clamp(min=1e-300).log() - student), 0).sum(-1)
    torch.testing.assert_close(result.indexer_loss.kl.double(), kl, rtol=1e-4, atol=1e-6)
    assert float(result.indexer_loss.loss) == pytest.approx(float(kl.detach().sum() / 80), rel=1e-5)


def test_the_two_denominators_differ_where_the_selection_is_sparse() -> None:
    hidden, layout = hidden_states(1, 75), one_document(1, 75)
    attended, visible = (layer_of(denominator=word)(hidden, layout).indexer_loss.loss for word in ("attended", "visible"))
    assert abs(float(attended - visible)) > 1e-4 * float(attended)


def test_the_dense_objective_is_the_sparse_one_when_every_visible_entry_is_selected() -> None:
    hidden, layout = hidden_states(1, 40), one_document(1, 40)
    dense, dense_grads = step(layer_of(indexer_loss="dense"), hidden, layout)
    sparse, sparse_grads = step(layer_of(index_topk=10), hidden, layout)
    assert gap(dense.out, sparse.out) < TOLERANCE
    assert float(dense.indexer_loss.loss) == pytest.approx(float(sparse.indexer_loss.loss), rel=1e-5)
    same(dense_grads, sparse_grads)
    assert dense.stats.indices is None and sparse.stats.indices is not None


@pytest.mark.parametrize("objective", ["dense", "sparse"])
def test_the_loss_reaches_exactly_the_indexer_and_nothing_else_reaches_it(objective: str) -> None:
    hidden, layout = hidden_states(2, 40), one_document(2, 40)
    inputs = [hidden.clone().requires_grad_() for _ in range(2)]
    layer = layer_of(indexer_loss=objective)
    _, with_loss = step(layer, inputs[0], layout)
    layer.config = replace(layer.config, indexer_loss_coef=0)
    _, without = step(layer, inputs[1], layout)
    assert {name for name in with_loss if name not in without} == {name for name, _ in layer.named_parameters() if "indexer." in name}
    assert all(with_loss[name].abs().max() > 0 for name in with_loss)
    assert all(torch.equal(with_loss[name], grad) for name, grad in without.items())
    assert torch.equal(inputs[0].grad, inputs[1].grad)


@pytest.mark.parametrize("objective", ["dense", "sparse"])
@pytest.mark.parametrize("coef", [None, 0, 0.0])
def test_a_coefficient_of_nothing_does_no_loss_work(objective: str, coef: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("distill", "distill_dense", "teacher_log_mass", "attach_loss"):
        monkeypatch.setattr(csakit, name, lambda *a, name=name, **k: pytest.fail(f"{name} was called"))
    layer = layer_of(indexer_loss=objective, indexer_loss_coef=coef)
    calls = []
    layer.indexer.register_forward_hook(lambda *args: calls.append(torch.is_grad_enabled()))
    result = layer(hidden_states(1, 40), one_document(1, 40))
    assert result.indexer_loss is None and result.stats.log_mass is None
    assert calls == ([] if objective == "dense" else [False])


def test_the_attached_loss_has_the_weight_of_the_coefficient_and_the_returned_one_cannot_be_counted_again() -> None:
    hidden, layout = hidden_states(1, 40), one_document(1, 40)
    once, grads = step(layer_of(), hidden, layout)
    _, tripled = step(layer_of(indexer_loss_coef=3.0), hidden, layout)
    for name, grad in grads.items():
        assert gap(tripled[name], 3 * grad if "indexer." in name else grad) < TOLERANCE
    with pytest.raises(RuntimeError, match="does not require grad"):
        once.indexer_loss.loss.backward()


def test_micro_batches_with_one_divisor_give_the_gradient_of_the_whole_batch() -> None:
    layer = layer_of()
    hidden = hidden_states(4, 24)
    _, whole = step(layer, hidden, one_document(4, 24))
    for row in hidden:
        (layer(row[None], one_document(1, 24), divisor=96).out * torch.linspace(-1, 1, HIDDEN)).sum().backward()
    same(gradients(layer), whole)


def test_token_weights_choose_the_rows_of_the_loss() -> None:
    layer, hidden, layout = layer_of(), hidden_states(1, 40), one_document(1, 40)
    weight = (torch.arange(40) % 3 == 0).float()[None]
    result = layer(hidden, layout, token_weight=weight)
    kl = layer(hidden, layout).indexer_loss.kl
    assert float(result.indexer_loss.loss) == pytest.approx(float((kl * weight).sum() / weight.sum()), rel=1e-5)


def test_assigning_a_config_changes_the_stage() -> None:
    layer, hidden, layout = layer_of(indexer_loss="dense"), hidden_states(1, 40), one_document(1, 40)
    assert layer(hidden, layout).stats.indices is None
    layer.config = replace(layer.config, indexer_loss="sparse")
    assert layer(hidden, layout).stats.indices.shape == (1, 40, TOPK)


# ---- the usual tools -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("objective", ["dense", "sparse"])
def test_gradient_checkpointing_gives_the_same_gradients_and_counts_the_loss_once(objective: str, reentrant: bool) -> None:
    layer, layout = layer_of(indexer_loss=objective), one_document(1, 40)
    hidden = hidden_states(1, 40).requires_grad_()
    _, want = step(layer, hidden, layout)
    result = checkpoint(layer, hidden, layout, use_reentrant=reentrant)
    (result[0] * torch.linspace(-1, 1, HIDDEN)).sum().backward()
    same(gradients(layer), want, 1e-7)
    assert not result[1].loss.requires_grad


@pytest.mark.parametrize("objective", ["dense", "sparse"])
def test_a_layer_compiles_whole_with_the_same_result_and_gradients(objective: str) -> None:
    torch.compiler.reset()
    layer, layout, hidden = layer_of(indexer_loss=objective), one_document(1, 24), hidden_states(1, 24)
    eager, want = step(layer, hidden, layout)
    compiled, got = step(torch.compile(layer, fullgraph=True, backend="aot_eager"), hidden, layout)
    assert gap(compiled.out, eager.out) < TOLERANCE
    same({name.removeprefix("_orig_mod."): grad for name, grad in got.items()}, want)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_and_autocast_stay_near_fp32_and_train_the_indexer(kind: str) -> None:
    hidden, layout = hidden_states(1, 64), one_document(1, 64)
    layer = layer_of(kind, index_topk=16)  # every visible entry: a pick that differs is no rounding
    exact, _ = step(layer, hidden, layout)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer(hidden, layout)
    assert mixed.out.dtype == torch.bfloat16 and gap(mixed.out.float(), exact.out) < 0.05
    low = copy.deepcopy(layer).bfloat16()
    result = low(hidden.bfloat16(), layout)
    assert result.out.dtype == torch.bfloat16 and gap(result.out.float(), exact.out) < 0.05
    result.out.float().square().sum().backward()
    assert all(parameter.grad.isfinite().all() and parameter.grad.dtype == parameter.dtype for parameter in low.parameters())
    if kind == CSA:
        for loss in (mixed.indexer_loss.loss, result.indexer_loss.loss):
            assert loss.dtype == torch.float32
            assert float(loss) == pytest.approx(float(exact.indexer_loss.loss), rel=0.1)


def test_sink_position_biases_and_the_gate_stay_fp32_when_a_layer_is_cast() -> None:
    layer = CompressedSparseAttention(layer_of().config, dtype=torch.bfloat16)
    wide = {"attn_sink", "compressor.ape", "indexer.compressor.ape", "indexer.weights_proj.weight"}
    for cast in (layer, layer_of().bfloat16(), layer_of().half(), layer_of().to(torch.bfloat16)):
        assert {name for name, parameter in cast.named_parameters() if parameter.dtype == torch.float32} == wide
    kept = layer_of()
    sink = kept.attn_sink.detach().clone()
    assert torch.equal(kept.bfloat16().attn_sink, sink)
    assert all(parameter.dtype == torch.float64 for parameter in layer_of().double().parameters())


def test_the_gate_is_fp32_under_autocast_and_in_bf16() -> None:
    layer, hidden, layout = layer_of(), hidden_states(1, 24), one_document(1, 24)
    seen = []
    layer.indexer.weights_proj.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        layer(hidden, layout)
    layer.bfloat16()(hidden.bfloat16(), layout)
    assert seen == [torch.float32, torch.float32]


def test_a_pre_hook_that_swaps_weights_in_fires_once_per_projection_and_forward() -> None:
    layer, hidden, layout = layer_of(), hidden_states(1, 24), one_document(1, 24)
    want = layer(hidden, layout).out
    counts: dict[str, int] = {}
    for name, module in layer.named_modules():
        if isinstance(module, torch.nn.Linear):
            weight = module.weight.detach().clone()
            with torch.no_grad():
                module.weight.fill_(float("nan"))

            def gather(module, args, name=name, weight=weight) -> None:
                counts[name] = counts.get(name, 0) + 1
                module.weight.data = weight

            module.register_forward_pre_hook(gather)
    assert torch.equal(layer(hidden, layout).out, want)
    assert set(counts.values()) == {1} and len(counts) == 11 and counts["indexer.weights_proj"] == 1


class Adapter(torch.nn.Module):
    """A LoRA-like wrapper: the frozen base and two small matrices."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Linear(base.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def test_adapters_on_the_indexer_train_through_the_loss_and_change_the_selection() -> None:
    layer, hidden, layout = layer_of(), hidden_states(1, 75), one_document(1, 75)
    before = layer(hidden, layout).stats.indices
    torch.manual_seed(0)
    indexer = layer.indexer.requires_grad_(False)
    indexer.wq_b, indexer.weights_proj = Adapter(indexer.wq_b), Adapter(indexer.weights_proj)
    indexer.compressor.wkv = Adapter(indexer.compressor.wkv)
    result, grads = step(layer, hidden, layout)
    assert {name for name in grads if "indexer." in name} == {
        f"indexer.{name}.{part}.weight" for name in ("wq_b", "weights_proj", "compressor.wkv") for part in ("down", "up")
    }
    assert not torch.equal(result.stats.indices, before)


def test_a_frozen_backbone_trains_the_indexer_alone_also_when_nothing_else_needs_gradients() -> None:
    layer = layer_of()
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_("indexer." in name)
    result, grads = step(layer, hidden_states(1, 40), one_document(1, 40))
    assert set(grads) == {name for name, _ in layer.named_parameters() if "indexer." in name}
    assert result.indexer_loss is not None


def test_a_layer_made_on_the_meta_device_runs_after_it_got_memory_and_weights() -> None:
    real = layer_of()
    with torch.device("meta"):
        layer = CompressedSparseAttention(real.config)
    assert all(parameter.is_meta for parameter in layer.parameters()) and not list(layer.buffers())
    layer.to_empty(device="cpu")
    layer.load_state_dict(real.state_dict())
    hidden, layout = hidden_states(1, 24), one_document(1, 24)
    assert torch.equal(layer(hidden, layout).out, real(hidden, layout).out)
    layer.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
    assert not layer.attn_sink.any() and not layer.compressor.ape.any() and (layer.q_norm.weight == 1).all()


def test_parameters_have_the_official_names_and_shapes() -> None:
    config = csakit.nn.HybridAttentionConfig.v4_flash()
    shapes = {
        "wq_a.weight": (1024, 4096),
        "q_norm.weight": (1024,),
        "wq_b.weight": (32768, 1024),
        "wkv.weight": (512, 4096),
        "kv_norm.weight": (512,),
        "attn_sink": (64,),
        "wo_a.weight": (8192, 4096),
        "wo_b.weight": (4096, 8192),
    }
    compressed = {"wkv.weight": (512, 4096), "wgate.weight": (512, 4096), "ape": (128, 512), "norm.weight": (512,)}
    doubled = {"wkv.weight": (1024, 4096), "wgate.weight": (1024, 4096), "ape": (4, 1024), "norm.weight": (512,)}
    indexer = {"wq_b.weight": (8192, 1024), "weights_proj.weight": (64, 4096)}
    indexer |= {"compressor.wkv.weight": (256, 4096), "compressor.wgate.weight": (256, 4096)}
    indexer |= {"compressor.ape": (4, 256), "compressor.norm.weight": (128,)}
    with torch.device("meta"):
        made = {kind: csakit.nn.attention_layer(config, number) for number, kind in ((0, SLIDING), (2, CSA), (3, HCA))}
    want = {
        SLIDING: shapes,
        HCA: shapes | {f"compressor.{name}": shape for name, shape in compressed.items()},
        CSA: shapes
        | {f"compressor.{name}": shape for name, shape in doubled.items()}
        | {f"indexer.{name}": shape for name, shape in indexer.items()},
    }
    for kind, layer in made.items():
        assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == want[kind]
    sizes = {kind: sum(parameter.numel() for parameter in layer.parameters()) for kind, layer in made.items()}
    assert [round(sizes[kind] / 1e6, 2) for kind in (SLIDING, CSA, HCA)] == [106.96, 126.10, 111.22]
    assert sum(parameter.numel() for parameter in made[CSA].indexer.parameters()) == 10_749_056


# ---- what does not fit ---------------------------------------------------------------------------------------------------


def test_the_compressor_and_the_indexer_stand_alone() -> None:
    layer, hidden, layout = layer_of(), hidden_states(1, 24), one_document(1, 24)
    entries = Compressor(layer.config)
    entries.load_state_dict(layer.compressor.state_dict())
    assert torch.equal(entries(hidden, layout), layer.compressor(hidden, layout)) and entries(hidden, layout).shape == (1, 6, 32)
    latent = torch.randn(1, 24, 32, requires_grad=True)
    index = LightningIndexer(layer.config)(hidden, latent, layout)
    assert csakit.select(index.q, index.k, index.weights, TOPK, layout, scale=index.scale).indices.shape == (1, 24, TOPK)
    (index.q.sum() + index.k.sum() + index.weights.sum()).backward()
    assert latent.grad is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (lambda x, layout: (x[..., :5], layout), ValueError, r"hidden must have shape \[B, T, hidden_size\]"),
        (lambda x, layout: (x[:, :5], layout), ValueError, "hidden must have shape"),
        (lambda x, layout: (x.int(), layout), TypeError, "hidden must be a floating-point tensor"),
        (lambda x, layout: (x, None), TypeError, "layout must be a csakit.Layout"),
        (lambda x, layout: (x, Layout.batch(1, 24, ratio=4, window=9)), ValueError, "layout.window must be sliding_window = 8; got 9"),
        (lambda x, layout: (x[:, :12], layout.shard(1, 2)), ValueError, "layout must describe whole rows"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_that_do_not_fit_are_refused(kind: str, arguments, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        layer_of(kind)(*arguments(hidden_states(1, 24), one_document(1, 24)))


def test_a_layer_takes_a_config_and_a_number_of_its_schedule() -> None:
    with pytest.raises(TypeError, match="config must be a HybridAttentionConfig; got dict"):
        CompressedSparseAttention({"hidden_size": 4})
    with pytest.raises(ValueError, match="number must be below the 43 layers of compress_ratios; got 43"):
        csakit.nn.attention_layer(csakit.nn.HybridAttentionConfig.v4_flash(), 43)
    with pytest.raises(ValueError, match="compress_ratio must be at least 1 in a compressed_sparse_attention layer; got 0"):
        CompressedSparseAttention(replace(layer_of().config, compress_ratio=0))
    with pytest.raises(ValueError, match="width must be at least 8; got 4"):
        Compressor(layer_of().config, width=4)


def test_the_gate_multiplies_in_fp32_also_with_a_weight_handed_over_in_a_lower_precision() -> None:
    """As FSDP's mixed precision does, which casts every parameter."""
    gate = own_layer(CSA, stock_layer(CSA)).indexer.weights_proj
    gate.weight = torch.nn.Parameter(gate.weight.detach().bfloat16())
    x = torch.randn(1, 3, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(gate(x), torch.nn.functional.linear(x.float(), gate.weight.float()))
