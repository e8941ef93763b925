"""Training the indexers of a frozen model: no gradient, no optimizer state and no graph for anything else; and bf16."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import micro
import pytest
import torch

from csakit.train import backward, model, stages
from csakit.train.evaluation import language_loss


def warmup_only(layers: tuple[str, ...] = ("sliding", "csa", "hca", "csa"), **changes):
    config = micro.config(stages=("warmup",), **changes)
    return replace(config, model=replace(config.model, layers=layers), warmup=replace(config.warmup, steps=1))


def size_of(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Kept:
    """A tensor that a graph keeps for its backward pass; counts the bytes that are kept at one time."""

    now = most = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.size = tensor, tensor.numel() * tensor.element_size()
        Kept.now += self.size
        Kept.most = max(Kept.most, Kept.now)

    def __del__(self) -> None:
        Kept.now -= self.size


def kept_by_a_step(folder, layers: tuple[str, ...], *, within_forward: bool) -> int:
    """The most bytes that graphs keep at one time in a forward pass of the warm-up."""
    run = micro.trainer(folder, warmup_only(layers))
    model.set_stage(run.built, run.config.warmup)
    run.built.model.train()
    batch = run.rows.batch([0, 1])
    Kept.now = Kept.most = 0
    hooks = torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor)
    with hooks, backward.within_forward(model.attention_layers(run.built)) if within_forward else nullcontext():
        language_loss(run.built.model, batch, "fp32")
    return Kept.most


def test_frozen_weights_have_no_gradient_and_no_optimizer_state(tmp_path):
    run = micro.trainer(tmp_path, warmup_only())
    optimizers = []
    make = stages.make_optimizer
    stages.make_optimizer = lambda *given: optimizers.append(make(*given)) or optimizers[-1]
    zero, run.built.model.zero_grad = run.built.model.zero_grad, lambda: None  # the end of a stage
    try:
        run.run()
    finally:
        stages.make_optimizer, run.built.model.zero_grad = make, zero
    indexer = {name for name, _ in run.built.handle.indexer_parameters()}
    parameters = dict(run.built.model.named_parameters())
    assert {name for name, parameter in parameters.items() if parameter.grad is not None} == indexer
    assert {name for name, parameter in parameters.items() if parameter.requires_grad} == indexer
    state = [tensor for values in optimizers[0].state.values() for tensor in values.values() if tensor.ndim]
    assert size_of(state) == 2 * size_of(parameters[name] for name in indexer)
    assert size_of(parameters[name] for name in indexer) < 0.5 * size_of(parameters.values())


def test_in_a_frozen_model_no_graph_outlives_its_layer(tmp_path):
    """What is kept is one indexer's, however many layers there are; without the pass inside the forward it grows with each."""
    few, many = ("sliding", "csa"), ("sliding", *["csa"] * 3)
    assert kept_by_a_step(tmp_path / "a", many, within_forward=True) < 1.1 * kept_by_a_step(tmp_path / "b", few, within_forward=True)
    assert Kept.now == 0
    assert kept_by_a_step(tmp_path / "c", many, within_forward=False) > 3 * kept_by_a_step(tmp_path / "d", many, within_forward=True)


def test_the_pass_inside_the_forward_gives_the_gradients_of_an_ordinary_one(tmp_path):
    run = micro.trainer(tmp_path, warmup_only())
    model.set_stage(run.built, replace(run.config.warmup, coef=0.5))
    run.built.model.train()
    found = []
    for context in (nullcontext(), backward.within_forward(model.attention_layers(run.built))):
        run.built.model.zero_grad()
        with context:
            total = language_loss(run.built.model, run.rows.batch([0, 1]), "fp32")
        if total.requires_grad:
            total.backward()
        found.append({name: parameter.grad.clone() for name, parameter in run.built.handle.indexer_parameters()})
    assert all(torch.equal(found[0][name], found[1][name]) and found[0][name].any() for name in found[0])


def test_parameters_can_be_left_out_by_name(tmp_path):
    config = micro.config(stages=("sparse",))
    run = micro.trainer(
        tmp_path, replace(config, sparse=replace(config.sparse, steps=1, freeze=("model.embed_tokens.*", "*.indexer.q_b_proj.*")))
    )
    before = {name: parameter.detach().clone() for name, parameter in run.built.model.named_parameters()}
    run.run()
    still = {name for name, parameter in run.built.model.named_parameters() if torch.equal(parameter, before[name])}
    assert still == {"model.embed_tokens.weight"} | {f"model.layers.{n}.self_attn.compressor.indexer.q_b_proj.weight" for n in (1, 3)}


def test_a_pattern_that_fits_no_parameter_is_refused(tmp_path):
    config = micro.config()
    with pytest.raises(
        ValueError, match=r"sparse\.freeze: expected patterns of parameter names such as model\.embed.*, got 'lm_heda\.\*', which fits none"
    ):
        micro.trainer(tmp_path, replace(config, sparse=replace(config.sparse, freeze=("lm_heda.*",))))


@pytest.mark.parametrize(
    "changes, changed",
    [
        ({"trains": "indexer"}, {"indexer"}),
        ({"trains": "backbone", "objective": "off"}, {"backbone"}),
        ({"attention": "dense", "objective": "dense"}, {"backbone", "indexer"}),
    ],
)
def test_a_stage_can_have_another_attention_objective_and_trainable_set(tmp_path, changes, changed):
    config = micro.config(stages=("sparse",))
    run = micro.trainer(tmp_path, replace(config, sparse=replace(config.sparse, steps=1, **changes)))
    before = {name: parameter.detach().clone() for name, parameter in run.built.model.named_parameters()}
    run.run()
    moved = {name for name, parameter in run.built.model.named_parameters() if not torch.equal(parameter, before[name])}
    assert {stages.part_of(name) for name in moved} == changed


def test_denominator_and_coefficient_reach_the_objective(tmp_path):
    norms = {}
    for name, changes in (("attended", {}), ("visible", {"denominator": "visible"}), ("half", {"coef": 0.5})):
        config = micro.config(stages=("sparse",))
        micro.trainer(tmp_path / name, replace(config, sparse=replace(config.sparse, steps=1, **changes))).run()
        (step,) = [record for record in micro.metrics(tmp_path / name) if record["kind"] == "step"]
        norms[name] = step["gradient_norms"]["indexer"]
    assert norms["half"] == pytest.approx(0.5 * norms["attended"], rel=1e-5)
    assert norms["visible"] != pytest.approx(norms["attended"], rel=1e-6)


def test_under_bf16_what_trains_is_fp32_and_the_matrices_of_the_frozen_rest_are_bf16(tmp_path):
    run = micro.trainer(tmp_path, warmup_only(precision="bf16"))
    run.run()
    indexer = {name for name, _ in run.built.handle.indexer_parameters()}
    for name, parameter in run.built.model.named_parameters():
        small = name in indexer or parameter.ndim == 1 or any(part in name for part in model.FP32)
        assert parameter.dtype == (torch.float32 if small else torch.bfloat16), name
    before, step, after = micro.metrics(tmp_path)
    assert all(after["layers"][name]["kl"] != before["layers"][name]["kl"] for name in before["layers"]) and step["kl"] > 0


def test_bf16_is_near_fp32(tmp_path):
    for precision in ("fp32", "bf16"):
        config = micro.config(stages=("dense",), precision=precision)
        micro.trainer(tmp_path / precision, replace(config, dense=replace(config.dense, steps=2))).run()
    full, half = ([record["bits_per_byte"] for record in micro.metrics(tmp_path / precision)] for precision in ("fp32", "bf16"))
    assert half == pytest.approx(full, rel=2e-3) and half != full
