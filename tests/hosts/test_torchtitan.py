"""torchtitan: its own Trainer, on the CPU, trains a model whose attention is csakit's; the indexers' gradients are the reference's."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan_run import LAYER, ROWS, TOKENS

import csakit
from csakit import Layout, nn
from csakit.integrations.torchtitan import indexer_losses, scale

RUN = Path(__file__).parent / "torchtitan_run.py"
STEPS: dict[str, dict[str, Any]] = {
    "sparse": {},
    "no loss": {"coef": 0.0, "tokens_per_step": None},
    "dense, full checkpointing": {"objective": "dense", "checkpointing": "full"},
    "visible, one micro-batch, ignored labels": {"denominator": "visible", "local_rows": 4, "ignored": 6, "coef": 0.25},
    "selective checkpointing, compiled": {"checkpointing": "selective", "compiled": True},
    "bfloat16": {"precision": "bfloat16"},
}
REFUSALS: dict[str, dict[str, Any]] = {
    r"ValueError: tokens_per_step is needed .*global_batch_size \* training.seq_len": {"tokens_per_step": None},
    "ValueError: tokens_per_step must be a multiple of the 48 tokens of a micro-batch; got 50": {"tokens_per_step": 50},
    "ValueError: kind must be one of .*'sliding_attention'.*; got 'dense'": {"kind": "dense"},
    "ValueError: layer has fields that HybridAttentionConfig has not: top_k": {"layer": {"top_k": 3}},
    "ValueError: qk_rope_head_dim must be even": {"layer": {"qk_rope_head_dim": 7}},
}
FIRST = "layers.0.attention.layer."

needs_torchtitan = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torchtitan", "torchdata", "spmd_types", "tyro", "triton")),
    reason="torchtitan and its requirements are not installed: pip install torchtitan==0.3.0 triton",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What torchtitan_run.py found, in a process of its own: torchtitan is told at import that it runs on a CPU, and changes torch."""
    folder = tmp_path_factory.mktemp("torchtitan")
    (folder / "what.json").write_text(json.dumps({"steps": list(STEPS.values()), "refusals": list(REFUSALS.values()), "v4": True}))
    command = [sys.executable, str(RUN), str(folder / "what.json"), str(folder / "result.pt")]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert finished.returncode == 0, finished.stderr[-4000:]
    result = torch.load(folder / "result.pt")
    return result | {"steps": dict(zip(STEPS, result["steps"])), "refusals": dict(zip(REFUSALS, result["refusals"]))}


def reference(step: dict, *, objective: str = "sparse", denominator: str = "attended", coef: float = 1.0, **_: Any) -> dict:
    """The indexers' gradients in float64, from what went into the layers: of coef * sum of KL / tokens of the step; and the mean KL."""
    config = nn.HybridAttentionConfig(hidden_size=32, num_attention_heads=4, rms_norm_eps=1e-5, **LAYER)
    result = {}
    for name, calls in step["inputs"].items():
        layer, prefix = nn.CompressedSparseAttention(config).double(), f"{name}.layer."
        layer.load_state_dict({key.removeprefix(prefix): value for key, value in step["before"].items() if key.startswith(prefix)})
        total = torch.zeros((), dtype=torch.float64)
        for x, positions in calls:
            layout = Layout.from_document_ids((positions == 0).cumsum(1), ratio=4, window=LAYER["sliding_window"])
            kl = divergence(layer, x.double(), layout, objective, denominator)
            total = total + coef * kl.sum() / (ROWS * TOKENS)
            result[name] = kl.mean().detach()
        names, leaves = zip(*layer.indexer.named_parameters())
        result |= {f"{prefix}indexer.{key}": g for key, g in zip(names, torch.autograd.grad(total, leaves))}
    return result


def divergence(layer: nn.CompressedSparseAttention, x: torch.Tensor, layout: Layout, objective: str, denominator: str) -> torch.Tensor:
    """KL [B, T] of a layer by dense float64 torch."""
    with csakit.backend("reference"):
        (q, kv, entries, sink, factor), latent, _ = layer.project(x, layout)
        index = layer.indexer(x, latent, layout)
        chosen = csakit.select(index.q, index.k, index.weights, LAYER["index_topk"], layout, scale=index.scale).indices.long()
        indices = chosen if (objective, denominator) == ("sparse", "attended") else None
        lse = csakit.attend(q, kv, entries, layout, indices=indices, sink=sink, scale=factor).lse
    number = torch.arange(entries.shape[1])
    seen = (number >= layout.entry_start[..., None]) & (number < layout.entry_stop[..., None])
    if objective == "sparse":
        seen = (chosen[..., None] == number).any(2)
    some = seen.any(-1, keepdim=True)
    mass = (factor * torch.einsum("bthd,bed->bteh", q, entries) - lse[:, :, None]).logsumexp(-1).detach()
    teacher = mass.masked_fill(~seen, -torch.inf).masked_fill(~some, 0).softmax(-1)
    scores = index.scale * (torch.einsum("btic,bec->btei", index.q, index.k).relu() * index.weights[:, :, None]).sum(-1)
    student = scores.masked_fill(~seen, -torch.inf).masked_fill(~some, 0).log_softmax(-1).masked_fill(~seen, 0)
    return torch.where(seen, torch.xlogy(teacher, teacher) - teacher * student, 0).sum(-1)


def relative(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.double() - want).norm() / want.norm())


@needs_torchtitan
@pytest.mark.parametrize("name", [name for name, options in STEPS.items() if not options.get("compiled") and name != "no loss"])
def test_the_indexers_gradients_after_a_step_are_those_of_the_float64_reference(found: dict, name: str) -> None:
    """FSDP, gradient accumulation, checkpointing, ignored labels: the sum of the KL over the tokens of the step, times the coefficient."""
    step = found["steps"][name]
    want = reference(step, **STEPS[name])
    tolerance = 4e-2 if name == "bfloat16" else 2e-5
    indexer = [key for key in step["gradients"] if ".indexer." in key]
    assert len(indexer) == 12
    gaps = {key: relative(step["gradients"][key], want[key]) for key in indexer}
    assert max(gaps.values()) < tolerance, gaps
    for layer, loss in step["indexer"].items():
        assert loss == pytest.approx(float(want[layer]), rel=tolerance)


@needs_torchtitan
def test_compiled_blocks_give_the_gradients_of_eager_ones(found: dict) -> None:
    eager, compiled = (found["steps"][name] for name in ("sparse", "selective checkpointing, compiled"))
    assert compiled["gradients"].keys() == eager["gradients"].keys()
    gaps = {key: relative(compiled["gradients"][key], value.double()) for key, value in eager["gradients"].items()}
    assert max(gaps.values()) < 2e-5, gaps
    assert compiled["indexer"] == pytest.approx(eager["indexer"], rel=1e-5)


@needs_torchtitan
def test_the_two_losses_do_not_mix(found: dict) -> None:
    """The same step without the indexer's loss: the same loss and the same gradients everywhere else, and none at the indexers."""
    with_loss, without = (found["steps"][name] for name in ("sparse", "no loss"))
    assert with_loss["loss"] == without["loss"]
    rest = {key: value for key, value in with_loss["gradients"].items() if ".indexer." not in key}
    assert rest.keys() == without["gradients"].keys()
    assert all(torch.equal(value, without["gradients"][key]) for key, value in rest.items())
    assert without["indexer"] == {}


@needs_torchtitan
def test_parameters_have_the_official_names_and_torchtitans_initial_values(found: dict) -> None:
    """After building on the meta device: torchtitan's own standard deviations, 0 for sinks and position biases, 1 for norms."""
    step = found["steps"]["no loss"]
    own = {name.removeprefix(FIRST) for name in step["state"] if name.startswith(FIRST)}
    assert own == set(nn.CompressedSparseAttention(nn.HybridAttentionConfig.v4_flash(), device="meta").state_dict())
    first = {name.removeprefix(FIRST): value for name, value in step["first"].items() if name.startswith(FIRST)}
    assert first["wq_b.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert first["indexer.wq_b.weight"].std() == pytest.approx(0.02, rel=0.2)
    assert first["wo_b.weight"].std() == pytest.approx(0.02 / 2**0.5, rel=0.2)  # torchtitan's scaling by depth
    assert not first["attn_sink"].any() and not first["compressor.ape"].any()
    assert torch.equal(first["indexer.compressor.norm.weight"], torch.ones(LAYER["index_head_dim"]))


@needs_torchtitan
@pytest.mark.parametrize("match", REFUSALS)
def test_what_does_not_fit_is_refused_when_the_trainer_is_built(found: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        raise ValueError(found["refusals"][match])


@needs_torchtitan
def test_overrides_for_deepseek_v4_give_output_loss_and_gradients_of_the_float64_reference(found: dict) -> None:
    pairs = found["v4"]["pairs"]
    assert {name.split(":")[0] for name in pairs} >= {"sparse, attended", "sparse, visible", "dense, attended", "hca", "sliding"}
    gaps = {name: float((got - want).abs().max()) for name, (got, want) in pairs.items()}
    assert max(gaps.values()) < 1e-10, gaps
    assert found["v4"]["eval loss"] is None


@needs_torchtitan
@pytest.mark.parametrize(
    "name, match",
    {
        "forward": r"ImportError: CompressedSparseAttention.forward takes \['q', 'kv', 'topk'\]; csakit knows .*not supported",
        "fields": r"ImportError: CompressedSparseAttention.Config has \['aux_loss', .*not supported",
        "missing": "ImportError: fork has no SlidingWindowAttention",
        "masks": "ValueError: attention_masks must be None",
        "tokens": "ValueError: tokens_per_step is needed",
        "share": "ValueError: tokens_per_step must be a multiple of the 46 tokens",
        "objective": "ValueError: objective must be one of .*; got 'spare'",
        "denominator": "ValueError: denominator must be one of .*; got 'all'",
        "coef": "TypeError: coef must be a number",
        "group": "TypeError: group must be .* process group; .*the heads' group",  # so it arrives where the teacher is made
        "v3 forward": r"ImportError: Attention.forward takes \['hidden'\]; csakit knows .*not supported",
        "v3 layer": "TypeError: layer must be a dict",
        "tensor parallel": "ValueError: hybrid_attention does not run under tensor or context parallelism",
        "context parallel": "ValueError: hybrid_attention does not run under tensor or context parallelism",
        "full dtensor": "ValueError: hybrid_attention needs local tensors",
    }.items(),
)
def test_unknown_models_parallelism_and_wrong_options_are_refused(found: dict, name: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        raise ValueError(found["v4"]["errors"][name])


@pytest.mark.parametrize(
    "module, match", {"deepseek_v3": r"pip install torchtitan==0.3.0 triton", "deepseek_v4": "the release 0.3.0 has none"}.items()
)
def test_without_torchtitan_the_error_says_what_to_install(module: str, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchtitan", "spmd_types"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=match):
        importlib.import_module(f"csakit.integrations.torchtitan.{module}")


def test_losses_are_listed_by_the_layers_name_and_wrappers_left_out() -> None:
    model = torch.nn.ModuleDict({"_checkpoint_wrapped_module": torch.nn.Linear(1, 1), "other": torch.nn.Linear(1, 1)})
    model["_checkpoint_wrapped_module"].inner = torch.nn.Linear(1, 1)
    model["_checkpoint_wrapped_module"].inner.indexer_loss = torch.tensor(0.5)
    model["other"].indexer_loss = None
    assert indexer_losses(model) == {"inner": torch.tensor(0.5)}
    assert indexer_losses([model, model["other"]]) == {"inner": torch.tensor(0.5)}


@pytest.mark.parametrize("value, error", {0: ValueError, 1.5: TypeError, True: TypeError}.items())
def test_tokens_per_step_is_a_whole_number(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="tokens_per_step must be"):
        scale.check_tokens_per_step(value)
