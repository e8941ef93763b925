"""PEFT: adapters on the indexers take their loss, adapters beside them the language model's, and both come back from a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from v4_model import gap, gradients, tiny, tokens

from csakit.integrations.transformers import install

INDEXER = r"indexer\.(q_b_proj|kv_proj|gate_proj|scorer\.weights_proj)"
BESIDE = r"self_attn\.(q_a_proj|q_b_proj|kv_proj|compressor\.gate_proj)"
TARGETS = {"on the indexer": rf".*\.{INDEXER}", "beside it": rf".*\.{BESIDE}", "both": rf".*\.({INDEXER}|{BESIDE})"}


def adapted(where: str, **options) -> PeftModel:
    """A tiny model with adapters that already do something: PEFT starts them at nothing."""
    model = get_peft_model(tiny(), LoraConfig(r=4, target_modules=TARGETS[where], **options))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("where", TARGETS)
def test_each_loss_reaches_its_own_adapters(where: str) -> None:
    model, ids = adapted(where), tokens(2, 45)
    with install(model) as handle:
        model(input_ids=ids, labels=ids).loss.backward()
        both = gradients(model)
        handle.coef = 0.0
        loss = model(input_ids=ids, labels=ids).loss
        if loss.requires_grad:
            loss.backward()
        language = gradients(model)
    assert all("lora_" in name and value.any() for name, value in both.items())
    assert both.keys() - language.keys() == {name for name in both if ".indexer." in name}
    assert all(torch.equal(both[name], value) for name, value in language.items())
    assert bool(both.keys() - language.keys()) is (where != "beside it") and bool(language) is (where != "on the indexer")


def test_stages_choose_among_the_adapters() -> None:
    model = adapted("both")
    everything = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    with install(model) as handle:
        for stage, wanted in (("warmup", True), ("dense", False), ("sparse", None)):
            handle.stage(stage)
            found = {name for name, _ in handle.trainable_parameters()}
            assert found == {name for name in everything if wanted is None or (".indexer." in name) is wanted}
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == everything


def test_a_whole_indexer_trains_and_is_saved_beside_adapters(tmp_path: Path) -> None:
    model, ids = adapted("beside it", modules_to_save=["indexer"]), tokens(2, 45)
    with install(model) as handle:
        model(input_ids=ids, labels=ids).loss.backward()
        found = {name: value for name, value in gradients(model).items() if ".indexer." in name}
        assert len(found) == 6 and all(value.any() for value in found.values())
        with torch.no_grad():
            for _, parameter in handle.indexer_parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
            before = model(input_ids=ids).logits
        model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny(), tmp_path)
    with install(again), torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, before)


def test_saved_adapters_come_back_and_merged_ones_select_alike(tmp_path: Path) -> None:
    model, ids = adapted("both"), tokens(2, 45)
    with install(model), torch.no_grad():
        wanted = model(input_ids=ids).logits
        model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny(), tmp_path)
    with install(again), torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, wanted)
    merged = again.merge_and_unload()
    with install(merged), torch.no_grad():
        assert gap(merged(ids).logits, wanted) < 1e-4


def test_adapters_generate_with_a_cache_on_padded_prompts() -> None:
    model = adapted("both").eval()
    ids, mask = tokens(2, 21), torch.tensor([[1] * 21, [0] * 8 + [1] * 13])
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with install(model):
        alone = model.generate(input_ids=ids[1:, 8:], **options)[0, 13:]
        assert torch.equal(model.generate(input_ids=ids * mask, attention_mask=mask, **options)[1, 21:], alone)
