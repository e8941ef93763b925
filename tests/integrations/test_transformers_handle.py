"""Coming and going: what install changes, what it refuses, and that remove gives the stock model back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as host
from v4_model import HCA, SLIDING, gap, gradients, indexer_part, tiny, tokens

from csakit.integrations.transformers import Handle, install


def fingerprint_of(model: nn.Module) -> dict[str, object]:
    """Everything install may touch: instance attributes, hooks, configuration objects, requires_grad, bits of the weights."""
    found: dict[str, object] = {}
    for name, module in model.named_modules():
        found[name] = {key: id(value) for key, value in module.__dict__.items() if not key.startswith("_")}
        found[name + "/private"] = sorted(key for key in module.__dict__ if key.startswith("_"))
        found[name + "/hooks"] = [len(value) for key, value in sorted(module.__dict__.items()) if key.endswith("_hooks")]
        found[name + "/hooks_with"] = [len(value) for key, value in sorted(module.__dict__.items()) if "_hooks_" in key]
    for name, parameter in model.named_parameters():
        found[name] = (id(parameter), parameter.requires_grad, parameter.detach().double().sum().item())
    found["config"] = copy.deepcopy(model.config.to_dict()), model.config._attn_implementation
    return found


def test_remove_gives_the_stock_model_back_bit_for_bit() -> None:
    model, ids = tiny(), tokens(2, 45)
    model.lm_head.requires_grad_(False)
    before, logits = fingerprint_of(model), model(ids, use_cache=False).logits
    handle = install(model)
    for stage in ("warmup", "dense"):
        handle.stage(stage)
        model(ids).logits.sum().backward()
    with handle.measure(), torch.no_grad():
        model(ids)
    model.zero_grad()
    handle.remove()
    assert fingerprint_of(model) == before
    assert torch.equal(model(ids, use_cache=False).logits, logits)
    handle.remove()
    with pytest.raises(RuntimeError, match=r"this handle was removed; call install\(model\) again"):
        handle.stage("sparse")


def test_the_context_manager_removes_also_after_an_error() -> None:
    model = tiny()
    before = fingerprint_of(model)
    with pytest.raises(ValueError, match="output_attentions"), install(model):
        model(tokens(1, 20), output_attentions=True)
    assert fingerprint_of(model) == before


def test_a_failed_install_leaves_nothing_behind() -> None:
    model = tiny()
    model.model.layers[2].self_attn.compressor.forward = model.model.layers[2].self_attn.compressor.forward
    before = fingerprint_of(model)
    with pytest.raises(RuntimeError, match="forward of a DeepseekV4HCACompressor is already replaced"):
        install(model, freeze="backbone")
    assert fingerprint_of(model) == before


def test_installing_again_returns_the_same_handle_with_the_new_settings() -> None:
    model, ids = tiny(), tokens(1, 45)
    with install(model) as handle:
        model(ids)
        sparse = float(handle.losses["layers.1"])
        assert install(model.model, objective="dense", coef=0.5) is handle
        model(ids)
        assert handle.coef == 0.5 and float(handle.losses["layers.1"]) != sparse
    assert install(model) is not handle


def test_installing_around_an_installed_part_is_refused() -> None:
    model = tiny()
    with install(model.model), pytest.raises(RuntimeError, match="already installed in a part of this DeepseekV4ForCausalLM"):
        install(model)


def test_a_configuration_shared_with_another_model_is_not_touched() -> None:
    model = tiny()
    other = host.DeepseekV4ForCausalLM(model.config)
    with install(model):
        assert (model.config._attn_implementation, model.model.layers[0].self_attn.config._attn_implementation) == ("csakit", "csakit")
        assert other.config._attn_implementation == "eager"
    assert model.config is other.config


def test_a_configuration_changed_while_installed_keeps_the_change() -> None:
    model = tiny()
    with install(model):
        model.resize_token_embeddings(70)
    assert (model.config.vocab_size, model.config._attn_implementation) == (70, "eager")
    assert model.model.config is model.config


def test_two_models_are_installed_side_by_side() -> None:
    one, two, ids = tiny(seed=1), tiny(seed=2), tokens(1, 45)
    with install(one) as first:
        one(ids)
        loss = float(first.losses["layers.1"])
        with install(two, objective="dense") as second:
            two(ids)
            one(ids)
            assert float(first.losses["layers.1"]) == loss != float(second.losses["layers.1"])


def test_a_deep_copy_is_a_model_with_a_handle_of_its_own() -> None:
    model, ids = tiny(), tokens(1, 45)
    with install(model) as handle:
        twin = copy.deepcopy(model)
        own = install(twin)
        assert own is not handle
        twin(ids).logits.sum().backward()
        assert indexer_part(gradients(twin)) and not gradients(model) and not handle.losses
        own.remove()
        model(ids).logits.sum().backward()
        assert indexer_part(gradients(model))
        with torch.no_grad():
            assert gap(model(ids).logits, twin(ids, use_cache=False).logits) < 1e-5


def test_the_weights_and_their_names_are_untouched() -> None:
    model = tiny()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with install(model):
        after = model.state_dict()
        assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_a_wrapped_model_is_found_inside() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.inner(ids).logits

    model, ids = Wrapper(tiny()), tokens(1, 45)
    with install(model) as handle:
        model(ids).sum().backward()
        assert set(handle.losses) == {"layers.1"}
        assert all(name.startswith("inner.model.layers.1") for name, _ in handle.indexer_parameters())


def test_positional_arguments_and_inputs_embeds_work() -> None:
    model, ids = tiny().eval(), tokens(1, 45)
    embeds = model.model.embed_tokens(ids).detach()
    with install(model), torch.no_grad():
        by_name = model(input_ids=ids).logits
        assert torch.equal(model(ids, torch.ones_like(ids), torch.arange(45)[None]).logits, by_name)
        assert torch.equal(model(inputs_embeds=embeds).logits, by_name)
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            model()


# ---- what is refused -----------------------------------------------------------------------------------------------------

REFUSED_SETTINGS = {
    "objective": ({"objective": "kl"}, ValueError, "objective must be one of 'off', 'dense', 'sparse'; got 'kl'"),
    "objective as text": ({"objective": True}, ValueError, "objective must be one of"),
    "denominator": ({"denominator": "full"}, ValueError, "denominator must be one of 'attended', 'visible'; got 'full'"),
    "freeze": ({"freeze": "indexer"}, ValueError, "freeze must be one of 'none', 'backbone'; got 'indexer'"),
    "share": ({"share": "all"}, ValueError, "share must be one of 'own', 'served'"),
    "served": ({"share": "served"}, ValueError, "each CSA layer of DeepSeek-V4 has its own indexer"),
    "negative coef": ({"coef": -0.1}, ValueError, "coef must not be negative; got -0.1"),
    "coef NaN": ({"coef": float("nan")}, ValueError, "coef must be finite; got nan"),
    "coef infinite": ({"coef": float("inf")}, ValueError, "coef must be finite"),
    "coef text": ({"coef": "false"}, TypeError, "coef must be a number; got str 'false'"),
    "coef bool": ({"coef": True}, TypeError, "coef must be a number; got bool True"),
}


@pytest.mark.parametrize("case", REFUSED_SETTINGS)
def test_unknown_settings_are_refused_and_change_nothing(case: str) -> None:
    settings, error, message = REFUSED_SETTINGS[case]
    model = tiny()
    before = fingerprint_of(model)
    with pytest.raises(error, match=message):
        install(model, **settings)
    assert fingerprint_of(model) == before


def test_the_handles_own_settings_are_checked() -> None:
    with install(tiny()) as handle:
        with pytest.raises(ValueError, match="stage must be one of 'dense', 'warmup', 'sparse'; got 'train'"):
            handle.stage("train")
        with pytest.raises(ValueError, match="coef must not be negative"):
            handle.coef = -1.0
        with pytest.raises(ValueError, match="step_weight must be finite; got nan"):
            handle.step_weight = float("nan")
        with pytest.raises(TypeError, match="step_weight must be a number; got str 'auto'"):
            handle.step_weight = "auto"


def test_an_unknown_model_is_refused_by_name() -> None:
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1))
    with pytest.raises(TypeError, match="install knows the model types deepseek_v4; got LlamaForCausalLM of model type 'llama'"):
        install(llama)
    with pytest.raises(TypeError, match="got Linear of model type None"):
        install(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="got str of model type None"):
        install("deepseek_v4")


def test_two_models_in_one_module_are_refused() -> None:
    with pytest.raises(TypeError, match="one DeepseekV4Model inside; got 2 in ModuleList"):
        install(nn.ModuleList([tiny((SLIDING,)), tiny((SLIDING,))]))


def test_a_changed_library_function_is_refused_unless_strict_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    original = host.DeepseekV4Indexer.forward

    def forward(self, hidden_states, q_residual, position_ids, cache, layer_idx):
        return original(self, hidden_states, q_residual, position_ids, cache, layer_idx)

    forward.__qualname__ = "DeepseekV4Indexer.forward"
    monkeypatch.setattr(host.DeepseekV4Indexer, "forward", forward)
    model = tiny()
    with pytest.raises(RuntimeError, match=r"changed DeepseekV4Indexer\.forward,.*strict=False"):
        install(model)
    with install(model, strict=False) as handle:
        model(tokens(1, 45))
        assert handle.losses


def test_a_subclass_with_its_own_forward_is_refused_by_name() -> None:
    class Compressor(host.DeepseekV4CSACompressor):
        def forward(self, *args):
            return super().forward(*args)

    model = tiny()
    model.model.layers[1].self_attn.compressor.__class__ = Compressor
    with pytest.raises(RuntimeError, match=r"Compressor\.forward"):
        install(model)


def test_attention_dropout_is_refused_at_install_and_when_it_is_switched_on_later() -> None:
    with pytest.raises(ValueError, match=r"attention_dropout must be 0.*got 0\.1"):
        install(tiny(attention_dropout=0.1))
    with install(tiny()) as handle:
        handle.model.model.layers[2].self_attn.attention_dropout = 0.2
        with pytest.raises(ValueError, match=r"attention_dropout must be 0.*got 0\.2"):
            handle.model(tokens(1, 20))


def test_attention_weights_and_attention_to_the_future_are_refused() -> None:
    with install(tiny()) as handle:
        with pytest.raises(ValueError, match="output_attentions is not available"):
            handle.model(tokens(1, 20), output_attentions=True)
        with pytest.raises(ValueError, match="is_causal=False is not available"):
            handle.model(tokens(1, 20), is_causal=False)


def test_a_changed_attention_implementation_is_noticed() -> None:
    with install(tiny()) as handle:
        handle.model.set_attn_implementation("eager")
        with pytest.raises(RuntimeError, match="changed to 'eager' after install"):
            handle.model(tokens(1, 20))


def test_a_layer_called_outside_its_models_forward_is_noticed() -> None:
    model = tiny((SLIDING,))
    hidden = torch.randn(1, 20, 64)
    positions = torch.arange(20)[None]
    angles = {"main": model.model.rotary_emb(hidden, positions, layer_type="main")}
    arguments = {"position_embeddings": angles, "position_ids": positions, "attention_mask": None}
    with install(model, objective="off"):
        with pytest.raises(RuntimeError, match="outside its model's forward"):
            model.model.layers[0].self_attn(hidden, **arguments)
        with torch.no_grad():
            out = model.model.layers[0].self_attn(hidden, **arguments)[0]
    with torch.no_grad():
        assert torch.equal(model.model.layers[0].self_attn(hidden, **arguments)[0], out)


@pytest.mark.parametrize("objective", ["dense", "sparse"])
def test_an_objective_without_an_indexer_to_train_is_refused(objective: str) -> None:
    model = tiny((SLIDING, HCA))
    before = fingerprint_of(model)
    with pytest.raises(ValueError, match="needs a layer with an indexer; this model has none"):
        install(model, objective=objective)
    assert fingerprint_of(model) == before
    with install(model, objective="off") as handle:
        model(tokens(1, 45)).logits.sum().backward()
        assert isinstance(handle, Handle) and handle.metrics() == {"loss": None, "layers": {}}
