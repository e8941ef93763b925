"""Installing csakit in Megatron-LM, without a checkout: what it recognises and refuses, the handle, the scale of the loss.

The host here has Megatron's names and parameters and nothing behind them; `test_megatron.py` has the real one.
"""

from __future__ import annotations

import inspect
import linecache
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from csakit.integrations import megatron
from csakit.integrations.megatron import handle as handles
from csakit.integrations.megatron.scale import with_loss_scale


class Scaler:
    main_loss_backward_scale: Tensor | None = None

    @classmethod
    def set_loss_scale(cls, scale: Tensor) -> None:
        if cls.main_loss_backward_scale is None:
            cls.main_loss_backward_scale = scale.clone()
        else:
            cls.main_loss_backward_scale.copy_(scale)


def stub(names: list[str]):
    """A function with these parameters and a source that inspect finds."""
    source, file = f"def function({', '.join(names)}): ...\n", f"<host {len(linecache.cache)}>"
    linecache.cache[file] = (len(source), None, [source], file)
    scope: dict = {}
    exec(compile(source, file, "exec"), scope)
    return scope["function"]


@pytest.fixture
def host(monkeypatch) -> SimpleNamespace:
    """Megatron's modules csa and schedules, with every function that csakit replaces or calls."""

    def step(output, config, num_microbatches, cp_group_size=None, is_last_stage=None):
        return output, 0

    csa, schedules, ranks = ModuleType("csa"), ModuleType("schedules"), ModuleType("cp_utils")
    csa.cp_utils, csa.DSAIndexerLossAutoScaler = ranks, Scaler
    csa.CompressedSparseAttention = type("CompressedSparseAttention", (), {"__module__": "csa"})
    csa.CSAIndexer = csa.DSAIndexerLossLoggingHelper = None
    for path, names in (handles._CALLED | handles._CALLED_TO_ATTEND).items():
        owner, _, name = path.rpartition(".")
        if owner and getattr(csa, owner) is None:
            setattr(csa, owner, type(owner, (), {}))
        if not hasattr(getattr(csa, owner) if owner else csa, name):
            setattr(getattr(csa, owner) if owner else csa, name, stub(names))
    for owner, name, make in handles._places(csa, "csakit", "attended"):
        setattr(owner, name, stub(handles.parameters(make(stub([])))))
    schedules.forward_step_calc_loss = step
    schedules.parallel_state = SimpleNamespace(get_context_parallel_world_size=lambda: 2)
    monkeypatch.setattr(handles, "import_megatron", lambda: (csa, schedules))
    return SimpleNamespace(csa=csa, schedules=schedules, ranks=ranks, layer=csa.CompressedSparseAttention)


def places(host: SimpleNamespace) -> list[dict]:
    return [dict(vars(owner)) for owner in (host.csa, host.schedules, host.ranks, host.layer)]


def test_every_patched_place_is_listed_with_its_line_and_removed_again(host) -> None:
    before = places(host)
    handle = megatron.install()
    assert len(handle.sites) == 9 and all(site.file.startswith("<host ") and site.file.endswith(">:1") for site in handle.sites[:-1])
    assert str(handle).count("\n") == 9 and "csa.CompressedSparseAttention._forward_thd_cp" in str(handle)
    assert places(host) != before
    handle.remove()
    handle.remove()
    assert places(host) == before and str(handle).startswith("csakit in Megatron-LM, removed")


def test_megatrons_own_teachers_are_found_in_what_is_replaced() -> None:
    def method() -> None:
        FusedDSAIndexerLoss.apply()  # noqa: F821
        fused_csa_indexer_sparse_attn()  # noqa: F821
        unrelated()  # noqa: F821

    first = inspect.getsourcelines(method)[1]
    assert [int(call.rsplit(":", 1)[1]) for call in handles._teacher_calls(method)] == [first + 1, first + 2]


def test_installing_again_gives_the_same_handle_and_an_inner_context_leaves_the_outer_installation(host) -> None:
    before = places(host)
    with megatron.install() as outer:
        with megatron.install() as inner:
            assert inner is outer
        assert places(host) != before, "the outer installation stays"
        with pytest.raises(RuntimeError, match=r"installed already, with attention and denominator \('csakit', 'attended'\); remove\(\)"):
            megatron.install(denominator="visible")
    assert places(host) == before


@pytest.mark.parametrize("owner", ["csa", "ranks", "layer"])
def test_a_function_with_other_parameters_is_refused_and_nothing_is_changed(host, owner) -> None:
    holder = getattr(host, owner)
    name = next(name for where, name, _ in handles._places(host.csa, "csakit", "attended") if where is holder)
    setattr(holder, name, stub(["self", "something_else"]))
    before = places(host)
    with pytest.raises(RuntimeError, match=rf"nothing was changed:\n  .*{name} takes \['self', 'something_else'\], known is"):
        megatron.install()
    assert places(host) == before


def test_an_older_checkout_whose_function_lacks_an_optional_parameter_is_known(host) -> None:
    names = handles.parameters(host.csa._unfused_indexer_sparse_attn_from_topk)
    assert names[-1] == "tp_group"
    host.csa._unfused_indexer_sparse_attn_from_topk = stub(names[:-1])
    megatron.install().remove()


def test_what_is_missing_is_named(host) -> None:
    del host.layer._forward_unfused_csa, host.ranks.compute_cp_indexer_topk
    host.csa.CSAIndexer.forward_before_topk = stub(["self", "x"])
    host.schedules.forward_step_calc_loss = stub(["output"])
    del host.csa.DSAIndexerLossAutoScaler
    host.csa.DSAIndexerLossAutoScaler = type("Other", (), {"set_loss_scale": stub(["scale"])})
    with pytest.raises(RuntimeError, match="nothing was changed") as error:
        megatron.install()
    for text in (
        "CompressedSparseAttention._forward_unfused_csa does not exist", "cp_utils.compute_cp_indexer_topk does not exist",
        "CSAIndexer.forward_before_topk should take ['self', 'x', 'qr', 'packed_seq_params']",
        "DSAIndexerLossAutoScaler has no main_loss_backward_scale", "forward_step_calc_loss takes ['output']",
    ):  # fmt: skip
        assert text in str(error.value)


def test_what_only_megatrons_attention_needs_is_asked_for_with_it_alone(host) -> None:
    host.csa.unfused_compressed_sparse_attn = stub(["query"])
    megatron.install().remove()
    with pytest.raises(RuntimeError, match=r"unfused_compressed_sparse_attn should take \['query', 'kv_full'"):
        megatron.install(attention="megatron")


def test_a_patch_under_or_over_csakits_is_refused(host, monkeypatch) -> None:
    handle = megatron.install()
    with monkeypatch.context() as patch:
        patch.setattr(host.layer, "_forward_unfused_csa", lambda self: None)
        with pytest.raises(RuntimeError, match=r"CompressedSparseAttention._forward_unfused_csa was patched again after csakit"):
            handle.remove()
    handle.remove()
    host.layer._forward_unfused_csa.__wrapped__ = None
    with pytest.raises(RuntimeError, match="_forward_unfused_csa is patched already, not by csakit"):
        megatron.install()


def test_without_a_megatron_that_has_csa_the_error_says_what_is_needed(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    for name in [name for name in sys.modules if name.startswith("megatron.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="put a checkout of its dev branch on the Python path"):
        megatron.install()
    with pytest.raises(ValueError, match="denominator must be 'attended' or 'visible'; got 'full'"):
        megatron.install(denominator="full")
    with pytest.raises(ValueError, match="attention must be 'csakit' or 'megatron'; got 'host'"):
        megatron.install(attention="host")


def scaled_steps(config, stock_scale: float | None, *, calls: int = 2, **arguments) -> tuple[list[float], list[bool]]:
    """The scale after each step of a host that sets its own (or none), and what was said about it."""
    said: list[bool] = []

    def step(output, config, num_microbatches, cp_group_size=None, is_last_stage=None):
        if stock_scale is not None:
            Scaler.set_loss_scale(torch.tensor([stock_scale]))
        return output, 0

    Scaler.main_loss_backward_scale = torch.tensor(1.0)  # left over from an earlier backward
    scaled, found = with_loss_scale(step, Scaler, lambda: 2, said.append), []
    for _ in range(calls):
        scaled(torch.zeros(1), config, num_microbatches=4, **arguments)
        assert Scaler.main_loss_backward_scale is not None
        found.append(float(Scaler.main_loss_backward_scale))
    return found, said


def settings(per_token: bool = False, hook=None) -> SimpleNamespace:
    return SimpleNamespace(
        calculate_per_token_loss=per_token, grad_scale_func=lambda one: 512 * one, experimental_attention_variant_loss_scale_func=hook
    )


@pytest.mark.parametrize(
    "per_token, arguments, due",
    [
        (False, {"cp_group_size": None, "is_last_stage": False}, 128.0),
        (False, {"cp_group_size": 2, "is_last_stage": True}, 256.0),
        (False, {}, 256.0),  # the caller leaves the size to Megatron
        (True, {"cp_group_size": 2, "is_last_stage": True}, 512.0),
    ],
)
@pytest.mark.parametrize("theirs", [None, 1.0, "due"])
def test_the_scale_is_that_of_the_main_loss_whatever_the_host_sets(per_token, arguments, due, theirs) -> None:
    found, said = scaled_steps(settings(per_token), due if theirs == "due" else theirs, **arguments)
    assert found == [due, due] and said == [theirs != "due"]


def test_a_scale_function_of_the_users_is_kept_and_one_that_sets_nothing_is_not() -> None:
    assert scaled_steps(settings(hook=Scaler.set_loss_scale), 7.0, cp_group_size=1) == ([7.0, 7.0], [False])
    assert scaled_steps(settings(hook=print), None, cp_group_size=1) == ([128.0, 128.0], [True])


@pytest.mark.parametrize("output", [[torch.zeros(2)], {"hidden": torch.zeros(2)}], ids=["list", "dictionary"])
def test_a_pipeline_stage_may_give_several_tensors(output) -> None:
    Scaler.main_loss_backward_scale = None
    scaled = with_loss_scale(lambda output, config, num_microbatches, cp_group_size: (output, 0), Scaler, lambda: 1, lambda wrong: None)
    assert scaled(output, settings(), 4, 1)[0] is output and float(Scaler.main_loss_backward_scale) == 128


def test_the_scale_is_written_in_place_after_the_first_step() -> None:
    Scaler.main_loss_backward_scale = None
    scaled = with_loss_scale(lambda output, config, num_microbatches, cp_group_size: (output, 0), Scaler, lambda: 1, lambda wrong: None)
    scaled(torch.zeros(1), settings(), 4, 1)
    address = Scaler.main_loss_backward_scale.data_ptr()
    scaled(torch.zeros(1), settings(), 2, 1)
    assert Scaler.main_loss_backward_scale.data_ptr() == address and float(Scaler.main_loss_backward_scale) == 256
