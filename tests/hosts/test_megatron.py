"""csakit inside a real Megatron-LM checkout: output, loss and gradients are the float64 reference's; patches are listed and reversible.

Needs `--megatron PATH`; known checkouts: the commit of Megatron-LM issue 5776's report (fd1121b8) and the dev branch of August 2026.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_close
from megatron_layer import COEFFICIENT, TOPK, Data, by_document, expected, gradients, make_data, make_layer, packed_params, run

from csakit.integrations import megatron as csakit_megatron

SCALE = 128.0
REAL, ROOM = [9, 0, 13, 3], [12, 0, 14, 6]
FUSED_SWITCHES = ("use_fused_kernels", "apply_dsa_kernel_fusion")


@pytest.fixture
def handle(megatron):
    with csakit_megatron.install() as handle:
        yield handle


def tracked(csa) -> float:
    return float(csa.DSAIndexerLossLoggingHelper.tracker["values"][0])


def compare(csa, layer, data: Data, out, want_out, want_loss, upstream, tolerance: float = 1e-9) -> None:
    """Output, tracked loss, and every gradient of sum(upstream * out) + SCALE * loss."""
    csa.DSAIndexerLossAutoScaler.set_loss_scale(torch.tensor(SCALE, dtype=torch.float64))
    assert_close(out, want_out, tolerance / 10, label="output")
    assert_close(torch.tensor(tracked(csa)), want_loss.float(), max(tolerance, 1e-6), label="loss")
    got = gradients((out * upstream).sum(), layer, data)
    want = gradients((want_out * upstream).sum() + SCALE * want_loss, layer, data)
    assert got["indexer.linear_wq_b.weight"].abs().max() > 0
    assert_close(got, want, tolerance, label="gradient")


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per token"])
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_sbhd_output_loss_and_gradients_are_the_references(megatron, handle, monkeypatch, sparse, per_token, fused) -> None:
    layer = make_layer(megatron, monkeypatch, dsa_indexer_use_sparse_loss=sparse, calculate_per_token_loss=per_token)
    for switch in FUSED_SWITCHES:
        setattr(layer, switch, fused)
    data = make_data(22, 2)
    out = run(layer, data)
    want_out, kl = expected(layer, data, sparse)
    loss = COEFFICIENT * kl / (1 if per_token else 22 * 2)
    compare(megatron, layer, data, out, want_out, loss, torch.randn_like(out))


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per token"])
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("room", [REAL, ROOM], ids=["packed", "padded segments"])
def test_thd_is_every_document_by_itself(megatron, handle, monkeypatch, room, sparse, per_token, fused) -> None:
    layer = make_layer(megatron, monkeypatch, dsa_indexer_use_sparse_loss=sparse, calculate_per_token_loss=per_token)
    for switch in FUSED_SWITCHES:
        setattr(layer, switch, fused)
    data = make_data(sum(room), 1)
    out = run(layer, data, packed_params(REAL, room))
    want_out, total = by_document(layer, data, REAL, room, sparse)
    loss = COEFFICIENT * total / (1 if per_token else sum(REAL))
    compare(megatron, layer, data, out, want_out, loss, torch.randn_like(out))


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("room", [None, ROOM], ids=["sbhd", "thd"])
def test_megatrons_own_attention_can_stay_and_only_the_loss_be_csakits(megatron, monkeypatch, room, sparse) -> None:
    settings = {"dsa_indexer_use_sparse_loss": sparse, "dsa_indexer_n_heads": 8}  # so many index heads that scores do not tie
    layer, packed = make_layer(megatron, monkeypatch, **settings).float(), None if room is None else packed_params(REAL, room)
    data = make_data(22, 2) if room is None else make_data(sum(room), 1)
    data = Data(*(x.detach().float().requires_grad_() for x in data))
    own = run(layer.eval(), data, packed)
    layer.train()
    with csakit_megatron.install(attention="megatron"):
        out = run(layer, data, packed)
        assert torch.equal(run(layer.eval(), data, packed), own) and torch.equal(out, own)
    kl, tokens = (expected(layer, data, sparse)[1], 44) if room is None else (by_document(layer, data, REAL, room, sparse)[1], sum(REAL))
    compare(megatron, layer, data, out, own, COEFFICIENT * kl / tokens, torch.randn_like(out), tolerance=5e-5)


@pytest.mark.parametrize("packed", [False, True], ids=["sbhd", "thd"])
def test_in_fused_training_megatrons_inference_path_gives_the_output(megatron, monkeypatch, packed) -> None:
    """The fused kernels need a GPU; here a marker stands for their output, and the arguments must bind to the real method."""
    layer, data = make_layer(megatron, monkeypatch), make_data(22, 1)
    for switch in FUSED_SWITCHES:
        setattr(layer, switch, True)
    params = packed_params([22], [22]) if packed else None
    name = "_forward_fused_indexer_inference" + "_thd" * packed
    signature, calls = inspect.signature(getattr(megatron.CompressedSparseAttention, name)), []
    with csakit_megatron.install(attention="megatron"):

        def marker(*arguments):
            calls.append(signature.bind(layer, *arguments).arguments)
            return data.query.flatten(2) * 2

        monkeypatch.setattr(layer, name, marker)
        out = run(layer, data, params)
        assert torch.equal(out, data.query.flatten(2) * 2)
    assert calls[0]["window_idxs"].shape[-1] == layer.window_size and calls[0]["qr"] is data.qr
    kl = expected(layer, data)[1]
    compare(megatron, layer, data, out, data.query.flatten(2) * 2, COEFFICIENT * kl / 22, torch.randn_like(out))


def test_the_visible_denominator_can_be_chosen(megatron, monkeypatch) -> None:
    layer, data = make_layer(megatron, monkeypatch), make_data(22, 2)
    with csakit_megatron.install(denominator="visible"):
        out = run(layer, data)
    want_out, kl = expected(layer, data, denominator="visible")
    compare(megatron, layer, data, out, want_out, COEFFICIENT * kl / 44, torch.randn_like(out))
    assert abs(float(kl) - float(expected(layer, data)[1])) > 1e-3, "the two denominators differ here"


def test_the_window_and_the_sink_move_the_loss(megatron, handle, monkeypatch) -> None:
    layer, data = make_layer(megatron, monkeypatch), make_data(22, 1)

    def loss(**changed) -> float:
        megatron.DSAIndexerLossLoggingHelper.tracker.clear()
        run(layer, data._replace(**changed))
        return tracked(megatron)

    before = loss()
    assert abs(loss(key=data.key.detach() * 2) - before) > 1e-3
    with torch.no_grad():
        layer.attn_sink[2] += 3
    assert abs(loss() - before) > 1e-3


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_without_csakit_the_loss_is_the_same_or_that_of_a_teacher_that_sees_entries_only(megatron, monkeypatch, sparse) -> None:
    """The first in the dev branch since its correction, the second at the commit of the report."""
    layer = make_layer(megatron, monkeypatch, dsa_indexer_use_sparse_loss=sparse, dsa_indexer_n_heads=8)  # so many that scores do not tie
    data = make_data(22, 2)

    def loss(data: Data) -> float:
        megatron.DSAIndexerLossLoggingHelper.tracker.clear()
        run(layer, data)
        return tracked(megatron)

    host, moved = loss(data), loss(data._replace(key=2 * data.key))
    want = {
        name: COEFFICIENT * expected(layer, data, sparse, name)[1].item() / 44 for name in ("attended", "selected entries", "all entries")
    }
    teacher = "selected entries" if moved == host else "attended"
    assert abs(host - want[teacher]) < 1e-6
    # the report's top-k concern: the mask of the selection comes before the softmax, not a softmax over all entries before the gather
    assert (abs(want["selected entries"] - want["all entries"]) > 1e-3) is sparse


def test_where_the_selection_takes_everything_the_two_denominators_agree_and_elsewhere_they_do_not(megatron, monkeypatch) -> None:
    """The layer's own softmax is over what it attends; the report's alternative is over everything visible, then a gather."""
    layer, data = make_layer(megatron, monkeypatch, dsa_indexer_n_heads=8), make_data(22, 2)
    found = {}
    for topk in (TOPK, 5):
        layer.indexer.index_topk = topk
        for denominator in ("attended", "visible"):
            with csakit_megatron.install(denominator=denominator):
                megatron.DSAIndexerLossLoggingHelper.tracker.clear()
                run(layer, data)
                found[topk, denominator] = tracked(megatron)
    assert abs(found[5, "attended"] - found[5, "visible"]) < 1e-7
    assert abs(found[TOPK, "attended"] - found[TOPK, "visible"]) > 1e-3


def test_the_audit_finds_megatrons_defects_and_none_with_csakit(megatron) -> None:
    """At the commit of the report: compressed-only. In the dev branch: right on ordinary rows, but the teacher can underflow."""
    from csakit import audit

    assert audit.run(audit.candidates.load("csakit.audit.candidates.megatron:WithCsakit")).passed
    with csakit_megatron.install():
        assert audit.run(audit.candidates.load("csakit.audit.candidates.megatron:Megatron")).passed
    report = audit.run(audit.candidates.load("csakit.audit.candidates.megatron:Megatron"))  # csakit is gone again: it must fail
    found = {verdict.probe: verdict.measured for verdict in report.verdicts}
    if "window" in report.failed:
        assert found["window"] == found["sink"] == 0 and "sparse-loss" in report.failed
        assert report.fits is not None and "compressed-only" in report.fits
    else:
        assert {"underflow", "tie-rule"} <= set(report.failed) and not {"sink", "sparse-loss", "dense-loss"} & set(report.failed)


@pytest.mark.parametrize("coefficient", [None, 0, 0.0])
@pytest.mark.parametrize("packed", [False, True], ids=["sbhd", "thd"])
def test_without_a_coefficient_there_is_no_loss_and_the_indexer_gets_zero_gradients(
    megatron, handle, monkeypatch, coefficient, packed
) -> None:
    layer = make_layer(megatron, monkeypatch, dsa_indexer_loss_coeff=coefficient)
    out = run(layer, make_data(16, 1), packed_params([16], [16]) if packed else None)
    out.sum().backward()
    assert "values" not in megatron.DSAIndexerLossLoggingHelper.tracker
    for name, parameter in layer.indexer.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_evaluation_gives_the_same_output_and_no_loss(megatron, handle, monkeypatch) -> None:
    layer, data = make_layer(megatron, monkeypatch), make_data(22, 2)
    out = run(layer, data)
    megatron.DSAIndexerLossLoggingHelper.tracker.clear()
    with torch.no_grad():
        assert torch.equal(run(layer, data), out)
        assert torch.equal(run(layer.eval(), data), out)
    assert "values" not in megatron.DSAIndexerLossLoggingHelper.tracker


def test_layers_without_an_indexer_or_without_entries_stay_megatrons(megatron, monkeypatch) -> None:
    layer, short = make_layer(megatron, monkeypatch), make_data(3, 2)
    no_indexer, data = make_layer(megatron, monkeypatch), make_data(22, 1)
    no_indexer.indexer = None
    before = run(layer, short), run(no_indexer, data)
    with csakit_megatron.install():
        assert torch.equal(run(layer, short), before[0])
        assert torch.equal(run(no_indexer, data), before[1])


def loss_scale(config: SimpleNamespace, micro_batches: int, csa, context_parallel: int = 1) -> float:
    """The gradient that an indexer's loss gets after a step."""
    from megatron.core.pipeline_parallel import schedules

    out = torch.ones(1)
    schedules.forward_step_calc_loss(
        None, out, lambda x: (x, {}), config, None, False, micro_batches, [], cp_group_size=context_parallel, is_last_stage=True
    )
    loss = torch.zeros((), requires_grad=True)
    csa.DSAIndexerLossAutoScaler.apply(torch.ones(2, requires_grad=True), loss).sum().backward()
    return float(loss.grad)


@pytest.mark.parametrize("per_token", [False, True])
def test_the_loss_gets_the_scale_of_the_main_loss(megatron, handle, monkeypatch, per_token) -> None:
    make_layer(megatron, monkeypatch)  # also resets the scale
    config = SimpleNamespace(
        timers=None, calculate_per_token_loss=per_token, grad_scale_func=lambda x: 512 * x, experimental_attention_variant="dsv4_hybrid",
        dsa_indexer_loss_coeff=COEFFICIENT, num_moe_experts=None, mtp_num_layers=None,
    )  # fmt: skip
    assert handle.scale_cured is None
    assert loss_scale(config, 4, megatron, context_parallel=2) == (512 if per_token else 256)
    assert handle.scale_cured or per_token, "neither known checkout reckons with the context-parallel size here"
    assert loss_scale(config, 4, megatron) == (512 if per_token else 128)
    config.grad_scale_func = None
    assert loss_scale(config, 4, megatron) == (1 if per_token else 0.25), "a second step, another scale"


def test_every_patched_place_is_listed_with_its_line_and_remove_puts_all_back(megatron) -> None:
    from megatron.core.pipeline_parallel import schedules

    owners = megatron, megatron.cp_utils, megatron.CompressedSparseAttention, schedules
    before = [dict(vars(owner)) for owner in owners]
    handle = csakit_megatron.install()
    changed = {
        name
        for owner, stock in zip(owners, before)
        for name, value in vars(owner).items()
        if name not in ("__builtins__", "__warningregistry__") and value is not stock.get(name)
    }
    assert {site.name.rsplit(".", 1)[1] for site in handle.sites} == changed and len(handle.sites) == 9
    for site in handle.sites:
        assert f"def {site.name.rsplit('.', 1)[1]}(" in source_line(site.file)
        assert all("ndexer" in source_line(call) for call in site.calls)
    teachers = [site.name.rsplit(".", 1)[1] for site in handle.sites if site.calls]
    assert teachers == [
        "_forward_unfused_csa", "_forward_unfused_csa_thd", "_forward_fused_indexer_training", "_forward_fused_indexer_training_thd",
        "_forward_thd_cp",
    ]  # fmt: skip
    assert csakit_megatron.install() is handle
    handle.remove()
    for owner, stock in zip(owners, before):
        assert {name: vars(owner)[name] for name in changed & set(stock)} == {name: stock[name] for name in changed & set(stock)}
    assert str(handle).startswith("csakit in Megatron-LM, removed")


def source_line(place: str) -> str:
    path, line = place.rsplit(":", 1)
    return Path(path).read_text().splitlines()[int(line) - 1]


def test_a_checkout_with_other_parameters_is_refused_as_a_whole(megatron, monkeypatch) -> None:
    def other(self, query, something_else):
        raise AssertionError("never called")

    monkeypatch.setattr(megatron.CompressedSparseAttention, "_forward_unfused_csa_thd", other)
    before = dict(vars(megatron.CompressedSparseAttention))
    with pytest.raises(RuntimeError, match=r"nothing was changed:\n  .*\._forward_unfused_csa_thd takes .*something_else"):
        csakit_megatron.install()
    assert dict(vars(megatron.CompressedSparseAttention)) == before
