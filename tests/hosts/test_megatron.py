"""csakit inside a real Megatron-LM checkout: output, loss and gradients are the float64 reference's; patches are listed and reversible.

Needs `--megatron PATH`; known checkouts: the commit of Megatron-LM issue 5776's report (fd1121b8) and the dev branch of August 2026.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_close
from megatron_layer import COEFFICIENT, HEADS, WIDTH, Data, expected, gradients, make_data, make_layer, run

from csakit.integrations import megatron as csakit_megatron

SCALE = 128.0
REAL, ROOM = [9, 0, 13, 3], [12, 0, 14, 6]
FUSED_SWITCHES = ("use_fused_kernels", "apply_dsa_kernel_fusion")


@pytest.fixture
def handle(megatron):
    with csakit_megatron.install() as handle:
        yield handle


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def packed_params(real: list[int], room: list[int]):
    from megatron.core.packed_seq_params import PackedSeqParams

    padded = offsets(room) if room != real else None
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=offsets(real), cu_seqlens_kv=offsets(real), cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded,
        max_seqlen_q=max(room), max_seqlen_kv=max(room),
    )  # fmt: skip


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


def by_document(layer, data: Data, room: list[int], sparse: bool = True):
    """What `expected` gives for each packed document by itself, 0 on padding: (out, the sum of KL)."""
    parts, total, begin = [], 0.0, 0
    for real, space in zip(REAL, room):
        if real:
            part, kl = expected(layer, Data(*(x[begin : begin + real] for x in data)), sparse)
            parts.append(part)
            total = total + kl
        parts.append(data.query.new_zeros(space - real, 1, HEADS * WIDTH))
        begin += space
    return torch.cat(parts), total


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
    want_out, total = by_document(layer, data, room, sparse)
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
    kl, tokens = (expected(layer, data, sparse)[1], 44) if room is None else (by_document(layer, data, room, sparse)[1], sum(REAL))
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
    if moved == host:
        want = expected(layer, data, sparse, denominator="entries")[1]
    else:
        want = expected(layer, data, sparse)[1]
    assert abs(host - COEFFICIENT * want.item() / 44) < 1e-6


def test_the_audit_finds_megatrons_defects_and_none_with_csakit(megatron) -> None:
    """At the commit of the report: compressed-only. In the dev branch: right on ordinary rows, but the teacher can underflow."""
    from csakit import audit

    assert audit.run(audit.candidates.load("csakit.audit.candidates.megatron:WithCsakit")).passed
    report = audit.run(audit.candidates.load("csakit.audit.candidates.megatron:Megatron"))
    found = {verdict.probe: verdict.measured for verdict in report.verdicts}
    if "window" in report.failed:
        assert found["window"] == found["sink"] == 0 and "sparse-loss" in report.failed
        assert report.fits is not None and "compressed-only" in report.fits
    else:
        assert set(report.failed) == {"underflow", "tie-rule"}


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


def test_context_parallel_training_is_refused(megatron, handle, monkeypatch) -> None:
    layer = make_layer(megatron, monkeypatch)
    with pytest.raises(RuntimeError, match="does not serve Megatron's context-parallel CSA path"):
        layer._forward_thd_cp(None, None, None, None, None, None, None)


def loss_scale(config: SimpleNamespace, micro_batches: int, csa) -> float:
    from megatron.core.pipeline_parallel import schedules

    out = torch.ones(1)
    schedules.forward_step_calc_loss(
        None, out, lambda x: (x, {}), config, None, False, micro_batches, [], cp_group_size=1, is_last_stage=True
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
    assert loss_scale(config, 4, megatron) == (512 if per_token else 128)
    assert handle.scale_cured in (True, False)
    config.grad_scale_func = None
    assert loss_scale(config, 4, megatron) == (1 if per_token else 0.25), "a second step, another scale"


def test_every_patched_place_is_listed_and_remove_puts_all_back(megatron) -> None:
    from megatron.core.pipeline_parallel import schedules

    before = dict(vars(megatron.CompressedSparseAttention)), schedules.forward_step_calc_loss
    handle = csakit_megatron.install()
    names = {site.name.rsplit(".", 1)[1] for site in handle.sites}
    changed = {name for name, value in vars(megatron.CompressedSparseAttention).items() if value is not before[0].get(name)}
    assert names == changed | {"forward_step_calc_loss"} and len(handle.sites) == 6
    assert "csa.py:" in str(handle) and "installed" in str(handle)
    with pytest.raises(RuntimeError, match="is patched already; if that is an installation of csakit, remove"):
        csakit_megatron.install()
    handle.remove()
    handle.remove()
    assert before == (dict(vars(megatron.CompressedSparseAttention)), schedules.forward_step_calc_loss)
    assert "removed" in str(handle)


def test_a_checkout_with_other_parameters_is_refused_as_a_whole(megatron, monkeypatch) -> None:
    def other(self, query, something_else):
        raise AssertionError("never called")

    monkeypatch.setattr(megatron.CompressedSparseAttention, "_forward_unfused_csa_thd", other)
    before = dict(vars(megatron.CompressedSparseAttention))
    with pytest.raises(RuntimeError, match=r"nothing was changed:\n  .*\._forward_unfused_csa_thd takes .*something_else"):
        csakit_megatron.install()
    assert dict(vars(megatron.CompressedSparseAttention)) == before


def test_a_patch_on_top_of_csakits_must_go_first(megatron, monkeypatch) -> None:
    handle = csakit_megatron.install()
    with monkeypatch.context() as patch:
        patch.setattr(megatron.CompressedSparseAttention, "_forward_unfused_csa", lambda self: None)
        with pytest.raises(RuntimeError, match=r"CompressedSparseAttention._forward_unfused_csa was patched again after csakit"):
            handle.remove()
    handle.remove()
