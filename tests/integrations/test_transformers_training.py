"""Training: the loss reaches the indexers and nothing else, once, however the forward is recomputed, split or scaled."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from v4_model import CSA, HCA, KINDS, SLIDING, gradients, indexer_part, tiny, tokens, worst_gap

import csakit
from csakit.integrations.transformers import install

MODES = {
    "sparse": {"objective": "sparse"},
    "sparse, visible denominator": {"objective": "sparse", "denominator": "visible"},
    "dense": {"objective": "dense"},
}
TWO_CSA = (CSA, SLIDING, CSA, HCA)


def backward(model: torch.nn.Module, ids: Tensor, **arguments) -> dict[str, Tensor]:
    model(ids, labels=ids, **arguments).loss.backward()
    return gradients(model)


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_reaches_exactly_the_indexers_and_leaves_all_other_gradients_bit_equal(mode: str) -> None:
    model, ids = tiny(TWO_CSA), tokens(2, 45)
    with install(model, **MODES[mode]) as handle:
        with_loss = backward(model, ids)
        handle.coef = 0.0
        without = backward(model, ids)
        indexers = {name for name, _ in handle.indexer_parameters()}
        assert len(indexers) == 12
        assert with_loss.keys() - without.keys() == indexers
        assert all(torch.equal(with_loss[name], without[name]) for name in without)
        assert all(with_loss[name].abs().max() > 0 for name in indexers)
        assert {name for name, _ in model.named_parameters()} == with_loss.keys()


@pytest.mark.parametrize("coef", [None, 0, 0.0])
def test_no_coefficient_means_no_loss_work(coef, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny(), tokens(1, 45)
    with install(model, coef=coef) as handle:
        for name in ("distill", "distill_dense", "teacher_log_mass", "attach_loss"):
            monkeypatch.setattr(csakit, name, lambda *a, **k: pytest.fail("loss work without a coefficient"))
        assert not indexer_part(backward(model, ids))
        assert handle.losses == {} and handle.metrics()["loss"] is None


def test_forwards_without_gradients_compute_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny(), tokens(1, 45)
    with install(model) as handle:
        model(ids)
        before = dict(handle.losses)
        monkeypatch.setattr(csakit, "distill", lambda *a, **k: pytest.fail("loss work without gradients"))
        with torch.no_grad():
            model(ids)
        assert handle.losses == before, "losses are those of the last forward with gradients"


def test_the_two_denominators_give_different_losses_and_agree_where_everything_is_selected() -> None:
    ids = tokens(1, 45)
    losses = {}
    for topk in (4, 64):
        for denominator in ("attended", "visible"):
            with install(tiny(index_topk=topk), denominator=denominator) as handle:
                handle.model(ids)
                losses[topk, denominator] = float(handle.losses["layers.1"])
    assert abs(losses[4, "attended"] / losses[4, "visible"] - 1) > 1e-4
    assert losses[64, "attended"] == pytest.approx(losses[64, "visible"], rel=1e-5)


def test_the_dense_objective_is_the_sparse_one_where_everything_is_selected() -> None:
    model, ids = tiny(index_topk=64), tokens(1, 45)
    with install(model) as handle:
        sparse, sparse_loss = indexer_part(backward(model, ids)), handle.losses["layers.1"]
        install(model, objective="dense")
        dense, dense_loss = indexer_part(backward(model, ids)), handle.losses["layers.1"]
    assert float(dense_loss) == pytest.approx(float(sparse_loss), rel=1e-5)
    worst = worst_gap(dense, sparse)
    assert worst[0] < 1e-4, worst


# ---- stages --------------------------------------------------------------------------------------------------------------

STAGES = {  # who has a gradient, which objective ran, whether attention selected
    "dense": ({"backbone"}, None, False),
    "warmup": ({"indexer"}, "distill_dense", False),
    "sparse": ({"backbone", "indexer"}, "distill", True),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_sets_who_trains_the_objective_and_the_attention(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trains, objective, selects = STAGES[stage]
    called: list[str] = []
    for name in ("distill", "distill_dense", "select"):
        original = getattr(csakit, name)
        monkeypatch.setattr(csakit, name, lambda *a, _f=original, _n=name, **k: called.append(_n) or _f(*a, **k))
    model, ids = tiny(), tokens(1, 45)
    with install(model) as handle:
        assert handle.stage(stage) is handle
        found = {"indexer" if ".indexer." in name else "backbone" for name in backward(model, ids)}
        assert found == trains
        assert {"indexer" if ".indexer." in name else "backbone" for name, _ in handle.trainable_parameters()} == trains
        assert set(called) == {name for name in (objective, "select" if selects else None) if name}


def test_stages_follow_each_other_in_any_order() -> None:
    model = tiny()
    everything = {name for name, _ in model.named_parameters()}
    with install(model) as handle:
        for stage in ("dense", "warmup", "sparse", "dense", "sparse"):
            handle.stage(stage)
        assert {name for name, _ in handle.trainable_parameters()} == everything


def test_parameters_that_were_frozen_before_stay_frozen_in_every_stage() -> None:
    model = tiny()
    model.lm_head.requires_grad_(False)
    frozen = model.model.layers[1].self_attn.compressor.indexer.kv_norm.weight.requires_grad_(False)
    with install(model) as handle:
        for stage in STAGES:
            handle.stage(stage)
            assert not model.lm_head.weight.requires_grad and not frozen.requires_grad


def test_a_model_that_was_frozen_whole_trains_its_indexers_when_a_stage_asks_for_them() -> None:
    model = tiny().requires_grad_(False)
    with install(model) as handle:
        assert not list(handle.trainable_parameters())
        handle.stage("warmup")
        assert dict(handle.trainable_parameters()).keys() == dict(handle.indexer_parameters()).keys()
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_parameter_that_came_later_is_frozen_with_the_others() -> None:
    model = tiny()
    with install(model) as handle:
        model.resize_token_embeddings(70)
        handle.stage("warmup")
        assert dict(handle.trainable_parameters()).keys() == dict(handle.indexer_parameters()).keys()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_freezing_takes_the_gradients_away_that_an_optimizer_would_still_apply() -> None:
    model, ids = tiny(), tokens(1, 45)
    with install(model) as handle:
        model(ids, labels=ids).loss.backward()
        handle.stage("warmup")
        assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)


def test_freeze_backbone_is_the_trainable_set_of_warmup() -> None:
    with install(tiny(), objective="dense", freeze="backbone") as handle:
        assert dict(handle.trainable_parameters()).keys() == dict(handle.indexer_parameters()).keys()


# ---- gradient checkpointing ----------------------------------------------------------------------------------------------


def checkpointing(model: torch.nn.Module, reentrant: bool) -> None:
    model.activation_checkpointing_enable({"use_reentrant": reentrant})


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("stage", ["warmup", "sparse"])
def test_checkpointing_gives_the_same_gradients_and_counts_the_loss_once(stage: str, reentrant: bool) -> None:
    model, ids = tiny(TWO_CSA), tokens(2, 45)
    with install(model) as handle:
        handle.stage(stage)
        plain, losses = backward(model, ids), handle.losses
        checkpointing(model, reentrant)
        again = backward(model, ids)
        worst = worst_gap(again, plain)
        assert worst[0] < 1e-6, worst
        assert handle.losses.keys() == losses.keys() == {"layers.0", "layers.2"}
        assert all(torch.equal(handle.losses[name], losses[name]) for name in losses)


@pytest.mark.parametrize("reentrant", [True, False])
def test_warmup_trains_under_checkpointing_with_inputs_embeds(reentrant: bool) -> None:
    model = tiny()
    embeds = torch.randn(1, 45, 64, generator=torch.Generator().manual_seed(0))
    with install(model) as handle:
        handle.stage("warmup")
        model(inputs_embeds=embeds).logits.sum().backward()
        plain = gradients(model)
        checkpointing(model, reentrant)
        model(inputs_embeds=embeds).logits.sum().backward()
        assert worst_gap(gradients(model), plain)[0] < 1e-6
        assert embeds.grad is None and not embeds.requires_grad


@pytest.mark.parametrize("reentrant", [True, False])
def test_two_forwards_before_two_backwards_recompute_with_their_own_documents_and_settings(reentrant: bool) -> None:
    model, first, second = tiny(), tokens(1, 45, seed=1), tokens(1, 45, seed=2)
    packed = {"position_ids": torch.cat([torch.arange(18), torch.arange(27)])[None]}
    with install(model) as handle:
        checkpointing(model, reentrant)
        wanted = backward(model, first, **packed)
        handle.divisor = 7.0
        alone = backward(model, second)
        last = handle.losses["layers.1"]
        for name, value in alone.items():
            wanted[name] = wanted[name] + value
        handle.divisor = None
        one = model(first, labels=first, **packed).loss
        handle.divisor = 7.0
        two = model(second, labels=second).loss
        handle.divisor = 100.0
        one.backward()
        two.backward()
        assert worst_gap(gradients(model), wanted)[0] < 1e-5
        assert torch.equal(handle.losses["layers.1"], last), "the losses of the last forward, not of the last recomputation"


# ---- scale ---------------------------------------------------------------------------------------------------------------


def test_four_micro_batches_with_one_divisor_give_the_gradients_of_one_batch() -> None:
    model, ids = tiny(), tokens(4, 45)
    mask = torch.ones_like(ids)
    mask[1, 30:] = 0
    mask[2, :9] = 0
    with install(model) as handle:
        handle.divisor = mask.sum()
        handle_loss = backward(model, ids, attention_mask=mask)
        for row, keep in zip(ids.split(1), mask.split(1)):
            model(row, attention_mask=keep, labels=row).loss.backward()
        assert worst_gap(indexer_part(gradients(model)), indexer_part(handle_loss))[0] < 1e-5


@pytest.mark.parametrize("form", ["number", "tensor", "callable", "callable tensor"])
def test_four_equal_micro_batches_with_a_step_weight_give_the_gradients_of_one_batch(form: str) -> None:
    forms = {"number": 0.25, "tensor": torch.tensor(0.25), "callable": lambda: 0.25, "callable tensor": lambda: torch.tensor(0.25)}
    model, ids = tiny(), tokens(4, 45)
    with install(model) as handle:
        whole = indexer_part(backward(model, ids))
        handle.step_weight = forms[form]
        for row in ids.split(1):
            model(row, labels=row).loss.backward()
        assert worst_gap(indexer_part(gradients(model)), whole)[0] < 1e-5


def test_step_weight_is_read_in_backward_and_multiplied_with_coef() -> None:
    model, ids = tiny(), tokens(1, 45)
    with install(model) as handle:
        plain = indexer_part(backward(model, ids))
        handle.coef = 0.5
        loss = model(ids, labels=ids).loss
        handle.step_weight = 6.0  # a gradient scaler changes between forward and backward
        (loss * 123.0).backward()
        tripled = indexer_part(gradients(model))
        assert worst_gap({name: value / 3 for name, value in tripled.items()}, plain)[0] < 1e-6
        assert float(handle.losses["layers.1"]) > 0


class Greatest(TorchDispatchMode):
    """The number of elements of the greatest tensor that any operation outside csakit's own returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


@pytest.mark.parametrize("stage", ["warmup", "sparse"])
def test_nothing_of_token_by_token_or_token_by_entry_by_head_size_is_built(stage: str) -> None:
    model, ids = tiny(hidden_size=32), tokens(1, 1024)
    with install(model) as handle:
        handle.stage(stage)
        with Greatest() as greatest:
            model(ids, attention_mask=torch.ones_like(ids)).logits.sum().backward()
    # the greatest are the index queries, 1024 x 16 x 16; masks would be 1024 x 1024, scores 1024 x 256 x 16, weights 4 x 1024 x 1280
    assert greatest.elements <= 1024 * 16 * 16


# ---- precision and learning ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["model in bf16", "autocast"])
@pytest.mark.parametrize("stage", ["warmup", "sparse"])
def test_low_precision_runs_and_stays_near_the_loss_of_fp32(mode: str, stage: str) -> None:
    model, ids = tiny(), tokens(2, 45)
    with install(model) as handle:
        handle.stage(stage)
        backward(model, ids)
        wanted = float(handle.losses["layers.1"])
        if mode == "model in bf16":
            model.bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "autocast"):
            loss = model(ids, labels=ids).loss
        loss.backward()
        assert all(torch.isfinite(value).all() for value in gradients(model).values())
        assert handle.losses["layers.1"].dtype == torch.float32
        assert float(handle.losses["layers.1"]) == pytest.approx(wanted, rel=0.05)


def test_the_indexer_learns_the_teacher_of_one_batch() -> None:
    """All of the KL is reducible: the teacher of a frozen backbone is fixed, and 16 heads can draw 8 scores per token freely."""
    model, ids = tiny((CSA,)), tokens(1, 32)
    with install(model) as handle:
        handle.stage("warmup")
        optimizer = torch.optim.Adam([parameter for _, parameter in handle.indexer_parameters()], lr=1e-2)
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            model(ids).logits.sum().backward()
            losses.append(float(handle.losses["layers.0"]))
            optimizer.step()
        assert losses[-1] < 0.01 * losses[0]


def test_measured_values_are_those_of_the_verbs_and_name_what_they_average() -> None:
    model, ids = tiny(KINDS).eval(), tokens(2, 45)
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    with install(model) as handle:
        handle.stage("warmup")
        model(ids, attention_mask=mask)
        dense_loss = float(handle.losses["layers.1"])
        handle.stage("sparse")
        with torch.no_grad(), handle.measure(queries=[(0, 44), (1, 20)]):
            model(ids, attention_mask=mask)
        found = handle.metrics()["layers"]["layers.1"]
    visible = torch.cat([(torch.arange(45) + 1) // 4, (torch.arange(32) + 1) // 4])
    assert found["tokens"] == int((visible > 4).sum()) and found["tokens_all"] == int((visible > 0).sum())
    assert found["kl_all"] * found["tokens_all"] / int(mask.sum()) == pytest.approx(dense_loss, rel=1e-5), "the dense objective's own value"
    for suffix in ("", "_all"):
        assert sum(found[branch + suffix] for branch in ("window", "entries", "sink")) == pytest.approx(1, abs=1e-5)
        heads = torch.tensor(found["heads_entries" + suffix])
        assert float(heads.mean()) == pytest.approx(found["entries" + suffix], rel=1e-6)
        # per query heads differ at least as much as their averages over queries do
        assert float(heads.std(correction=0) / heads.mean()) < found["heads_cv" + suffix] < 1
        assert 0 < found["captured" + suffix] <= 1 and 0 < found["recall" + suffix] <= 1 and 0 <= found["top1" + suffix] <= 1
    last, padded = found["queries"]
    assert (last["visible"], last["position"], len(last["picked"])) == ([0, 11], 44, 4)
    assert (padded["visible"], padded["position"]) == ([0, 2], 7)
    for query in (last, padded):
        assert math.isclose(sum(query["teacher"]), 1, rel_tol=1e-5) and math.isclose(sum(query["student"]), 1, rel_tol=1e-5)
        assert not any(query["teacher"][query["visible"][1] :])
    strongest = sorted(range(11), key=lambda entry: -last["student"][entry])[:4]
    assert sorted(strongest) == last["picked"]


def test_measuring_changes_neither_output_nor_losses_and_sums_over_forwards() -> None:
    model, ids = tiny(), tokens(2, 45)
    with install(model) as handle:
        out, loss = model(ids).logits, handle.losses["layers.1"]
        with handle.measure():
            assert torch.equal(model(ids).logits, out) and torch.equal(handle.losses["layers.1"], loss)
        once = handle.metrics()["layers"]["layers.1"]
        with handle.measure(), torch.no_grad():
            model(ids)
            model(ids)
        twice = handle.metrics()["layers"]["layers.1"]
        assert twice["tokens"] == 2 * once["tokens"] and twice["kl"] == pytest.approx(once["kl"])
        with handle.measure(), torch.no_grad():
            model(ids[:, :9])
        short = handle.metrics()["layers"]["layers.1"]
        assert short["tokens"] == 0 and short["kl"] is None and short["kl_all"] is not None


def test_metrics_average_over_the_layers_that_own_an_indexer() -> None:
    model, ids = tiny(TWO_CSA), tokens(1, 45)
    with install(model) as handle:
        model(ids)
        found, losses = handle.metrics(), [float(loss) for loss in handle.losses.values()]
        assert found["layers"].keys() == {"layers.0", "layers.2"} and len(losses) == 2
        assert found["loss"] == pytest.approx(sum(losses) / 2) and type(found["loss"]) is float


def test_a_query_outside_the_batch_is_refused() -> None:
    with (
        install(tiny()) as handle,
        handle.measure([(0, 45)]),
        pytest.raises(ValueError, match=r"queries must lie inside \[1, 45\].*\(0, 45\)"),
    ):
        handle.model(tokens(1, 45))


def test_a_compiled_attention_layer_is_one_graph_and_gives_the_same_loss_and_gradients() -> None:
    model, ids = tiny((CSA,)), tokens(1, 45)
    with install(model) as handle:
        plain, loss = backward(model, ids), handle.losses["layers.0"]
        model.model.layers[0].self_attn.compile(backend="eager", fullgraph=True)
        compiled = backward(model, ids)
        assert float(handle.losses["layers.0"]) == pytest.approx(float(loss), rel=1e-6)
        assert worst_gap(compiled, plain)[0] < 1e-5
