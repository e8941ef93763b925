"""csakit in a real Megatron-LM checkout while it trains: micro-batches, loss scale, recomputation, MTP layers. Needs `--megatron PATH`."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close
from megatron_layer import COEFFICIENT, expected, make_data, make_layer, run
from megatron_stage import by_hand, make_stages, schedule

from csakit.integrations import megatron as csakit_megatron


@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per token"])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_megatrons_schedule_gives_the_indexer_the_gradient_of_the_whole_batch(megatron, monkeypatch, micro_batches, per_token) -> None:
    """grad_scale_func is 512: the indexer's gradient has it as the main loss has, and does not grow with the micro-batches."""
    with csakit_megatron.install() as handle:
        (stage,) = make_stages(megatron, monkeypatch, 1, per_token)
        got = schedule(megatron, monkeypatch, stage, micro_batches)
        (want,) = by_hand(megatron, make_stages(megatron, monkeypatch, 1, per_token))
    assert handle.scale_cured is not None
    assert got["layer.indexer.linear_wq_b.weight"].abs().max() > 0
    assert_close(got, want, 1e-6, label="gradient")  # Megatron's compressor has a softmax in float32, whose rounding goes with the batch


@pytest.mark.parametrize("how", ["megatron", "reentrant", "non-reentrant"])
def test_a_recomputed_layer_has_the_gradients_of_a_kept_one(megatron, monkeypatch, how) -> None:
    from megatron.core.tensor_parallel import random

    monkeypatch.setattr(random, "_get_all_rng_states", lambda: ())  # they are CUDA's; the layer draws nothing
    monkeypatch.setattr(random, "_set_all_rng_states", lambda: None)

    def once(recompute: bool) -> tuple[dict[str, torch.Tensor], float]:
        layer, data = make_layer(megatron, monkeypatch), make_data(22, 2)
        megatron.DSAIndexerLossAutoScaler.set_loss_scale(torch.tensor(128.0, dtype=torch.float64))

        def forward(*tensors: torch.Tensor) -> torch.Tensor:
            return run(layer, data._replace(**dict(zip(data._fields, tensors))))

        if not recompute:
            out = forward(*data)
        elif how == "megatron":
            out = random.checkpoint(forward, False, *data)
        else:
            out = torch.utils.checkpoint.checkpoint(forward, *data, use_reentrant=how == "reentrant")
        out.square().sum().backward()
        found = {name: parameter.grad for name, parameter in layer.named_parameters()} | {
            name: x.grad for name, x in data._asdict().items()
        }
        found = {name: torch.zeros(()) if gradient is None else gradient for name, gradient in found.items()}
        return found, float(megatron.DSAIndexerLossLoggingHelper.tracker["values"][0])

    with csakit_megatron.install():
        (want, loss), (got, logged) = once(False), once(True)
    assert got["indexer.linear_wq_b.weight"].abs().max() > 0
    assert_close(got, want, 1e-12, label="gradient")
    # a first pass without gradients, as Megatron's and reentrant ones are, takes no loss; PyTorch's other kind logs twice
    assert logged == pytest.approx(loss * (2 if how == "non-reentrant" else 1))


def test_an_mtp_layer_has_its_own_place_in_the_tracker(megatron, monkeypatch) -> None:
    layer = make_layer(megatron, monkeypatch, mtp=True, mtp_num_layers=1)
    data = make_data(22, 2)
    with csakit_megatron.install():
        run(layer, data)
    values = megatron.DSAIndexerLossLoggingHelper.tracker["values"].tolist()
    assert values == pytest.approx([0, 0, COEFFICIENT * expected(layer, data)[1].item() / 44], rel=1e-6)
