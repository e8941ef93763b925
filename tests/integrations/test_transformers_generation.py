"""Generation: prefill, chunks and decode with a cache are one long forward, cut anywhere, padded or not."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from v4_model import CSA, KINDS, SLIDING, gap, tiny, tokens

from csakit import Layout
from csakit.integrations.transformers import install

OPTIONS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
LEFT = (0, 13, 40 - 3)  # padding of the three rows of a batch; one prompt shorter than a block
MASK = (torch.arange(40) >= torch.tensor(LEFT)[:, None]).long()
CUTS = {
    "prefill": [40],
    "chunks": [7, 9, 20, 4],
    "chunks that end with blocks": [16, 16, 8],
    "prefill and decode": [30, *[1] * 10],
    "decode alone": [1] * 40,
}


@cache
def stock() -> tuple[torch.nn.Module, Tensor, list[Tensor]]:
    """The model, three padded prompts of 40, 27 and 3 tokens, and the stock logits of each alone."""
    model, ids = tiny().eval(), tokens(3, 40)
    with torch.no_grad():
        alone = [model(ids[row : row + 1, left:], use_cache=False).logits[0] for row, left in enumerate(LEFT)]
    return model, ids * MASK, alone


def chunks(model: torch.nn.Module, ids: Tensor, sizes: list[int], mask: Tensor | None = None, **arguments) -> Tensor:
    """The logits of forwards over pieces of the rows, one cache through all of them."""
    past, parts, stop = None, [], 0
    with torch.no_grad():
        for part in ids.split(sizes, 1):
            start, stop = stop, stop + part.shape[1]
            said = {} if mask is None else {"attention_mask": mask[:, :stop]}
            said |= {name: value[:, start:stop] for name, value in arguments.items()}
            out = model(part, cache=past, use_cache=True, **said)
            past = out.cache
            parts.append(out.logits)
    assert past.get_seq_length() == stop
    return torch.cat(parts, 1)


def positions(mask: Tensor) -> Tensor:
    """As the library's generation makes them."""
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)


@pytest.mark.parametrize("cut", CUTS)
def test_rows_cut_anywhere_give_the_stock_logits(cut: str) -> None:
    model, ids, alone = stock()
    with install(model):
        assert gap(chunks(model, ids[:1], CUTS[cut])[0], alone[0]) < 1e-5


@pytest.mark.parametrize("said", ["mask", "mask and positions", "mask and row positions"])
@pytest.mark.parametrize("cut", CUTS)
def test_left_padded_rows_cut_anywhere_give_the_stock_logits_of_each_prompt_alone(cut: str, said: str) -> None:
    model, ids, alone = stock()
    given = {"mask": {}, "mask and positions": {"position_ids": positions(MASK)}, "mask and row positions": {"position_ids": MASK * 0 + 7}}
    given["mask and row positions"]["position_ids"] = torch.arange(40).expand(3, 40)
    with install(model):
        out = chunks(model, ids, CUTS[cut], MASK, **given[said])
        for row, left in enumerate(LEFT):
            assert gap(out[row, left:], alone[row]) < 1e-5


@pytest.mark.parametrize("sizes", [[40], [7, 9, 20, 4], [1] * 40])
@pytest.mark.parametrize("window", [1, 3, 64])
def test_windows_of_any_width_are_kept_between_forwards(window: int, sizes: list[int]) -> None:
    model, ids = tiny((CSA, SLIDING), sliding_window=window).eval(), tokens(2, 40)
    with install(model), torch.no_grad():
        assert gap(chunks(model, ids, sizes), model(ids).logits) < 1e-5


def test_attention_over_every_visible_entry_is_cached_too() -> None:
    model, ids = tiny().eval(), tokens(2, 40)
    with install(model) as handle, torch.no_grad():
        handle.stage("dense")
        assert gap(chunks(model, ids, CUTS["chunks"]), model(ids).logits) < 1e-5


def test_unpadded_generation_gives_the_stock_tokens_with_and_without_the_cache() -> None:
    model, ids = tiny().eval(), tokens(2, 21)
    wanted = model.generate(ids, **OPTIONS)
    with install(model):
        assert torch.equal(model.generate(ids, **OPTIONS), wanted)
        assert torch.equal(model.generate(ids, prefill_chunk_size=8, **OPTIONS), wanted)
        assert torch.equal(model.generate(ids, use_cache=False, **OPTIONS), wanted)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("arguments", [{}, {"prefill_chunk_size": 9}, {"use_cache": False}], ids=str)
def test_left_padded_generation_gives_what_stock_gives_each_prompt_alone(arguments: dict, beams: int) -> None:
    model, ids, _ = stock()
    alone = [model.generate(ids[row : row + 1, left:], num_beams=beams, **OPTIONS)[0, 40 - left :] for row, left in enumerate(LEFT)]
    with install(model):
        together = model.generate(ids, attention_mask=MASK, num_beams=beams, **OPTIONS, **arguments)[:, 40:]
    assert torch.equal(together, torch.stack(alone))


def test_generation_goes_on_from_a_cache_that_is_handed_back() -> None:
    """Two turns of a conversation: the second prompt holds the first one, its answer, and more."""
    model, ids = tiny().eval(), tokens(1, 21)
    with install(model):
        first = model.generate(ids, return_dict_in_generate=True, **OPTIONS)
        longer = torch.cat([first.sequences, tokens(1, 5, seed=3)], 1)
        assert torch.equal(model.generate(longer, cache=first.cache, **OPTIONS), model.generate(longer, **OPTIONS))


def test_generation_from_inputs_embeds_gives_the_tokens_of_the_ids() -> None:
    model, ids, _ = stock()
    with install(model):
        wanted = model.generate(ids, attention_mask=MASK, **OPTIONS)[:, 40:]
        assert torch.equal(model.generate(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=MASK, **OPTIONS), wanted)


def test_right_padding_is_fine_where_nothing_follows() -> None:
    model, ids, alone = stock()
    turned = torch.nn.functional.pad(ids[1:2, 13:], (0, 13), value=5)
    with install(model), torch.no_grad():
        out = model(turned, attention_mask=MASK[1:2].flip(1), use_cache=True).logits
        assert gap(out[0, :27], alone[1]) < 1e-5


def test_the_cached_rows_are_repeated_and_chosen_together() -> None:
    model, ids, alone = stock()
    with install(model), torch.no_grad():
        past = model(ids[:, :-1], attention_mask=MASK[:, :-1], use_cache=True).cache
        past.batch_repeat_interleave(2)
        past.batch_select_indices(torch.tensor([5, 2]))
        out = model(ids[[2, 1], -1:], attention_mask=MASK[[2, 1]], cache=past).logits
        assert gap(out[0, 0], alone[2][-1]) < 1e-5 and gap(out[1, 0], alone[1][-1]) < 1e-5
        past.reset()
        assert gap(model(ids[:1], cache=past).logits[0], alone[0]) < 1e-5


def test_what_is_kept_does_not_grow_with_the_row_but_for_its_entries() -> None:
    model, ids = tiny(KINDS).eval(), tokens(1, 200)
    with install(model), torch.no_grad():
        layers = model(ids, use_cache=True).cache.layers
    assert [layer.keys.shape[2] for layer in layers] == [7, 7, 7]
    assert {name: x.shape[1] for name, x in layers[1].rows.items()} == {
        **{f"{part}.{what}": 7 for part in ("compressor", "indexer") for what in ("values", "gates")},
        **{f"{part}.entries": 50 for part in ("compressor", "indexer")},
    }
    assert {name: x.shape[1] for name, x in layers[2].rows.items()} == {
        "compressor.values": 15,
        "compressor.gates": 15,
        "compressor.entries": 12,
    }
    for layer in layers:
        for x in (layer.keys, *layer.rows.values()):
            assert x.untyped_storage().nbytes() <= 2 * x.numel() * x.element_size(), "no view of a whole prefill is kept"


def test_measuring_works_with_a_cache() -> None:
    model, ids = tiny().eval(), tokens(2, 40)
    with install(model) as handle:
        with handle.measure(), torch.no_grad():
            model(ids)
        whole = handle.metrics()["layers"]["layers.1"]
        with handle.measure():
            chunks(model, ids, CUTS["chunks"])
        pieces = handle.metrics()["layers"]["layers.1"]
        assert pieces["tokens"] == whole["tokens"] and pieces["kl"] == pytest.approx(whole["kl"], rel=1e-5)


def test_a_forward_builds_a_cache_only_when_asked() -> None:
    model, ids = tiny(), tokens(1, 20)
    with install(model):
        assert model(ids).cache is None
        with torch.no_grad():
            assert model.eval()(ids).cache is None
            assert model(ids, use_cache=True).cache.get_seq_length() == 20
            with pytest.warns(FutureWarning, match="past_key_values"):
                assert model(ids, past_key_values=DynamicCache()).cache.get_seq_length() == 20, "the old name of it"


def test_the_losses_stay_those_of_the_last_training_forward() -> None:
    model, ids = tiny(), tokens(1, 40)
    with install(model) as handle:
        model(ids)
        before = handle.losses
        model.eval()(ids[:, :30], use_cache=True)  # with gradients, as an evaluation without no_grad has them
        assert handle.losses == before


# ---- what is refused -----------------------------------------------------------------------------------------------------


def _filled(model: torch.nn.Module) -> DynamicCache:
    with torch.no_grad():
        return model(tokens(2, 20), use_cache=True, attention_mask=torch.tensor([[0] * 4 + [1] * 16] * 2)).cache


REFUSED = {
    "packed": ({"cu_seqlens": torch.tensor([0, 1])}, ValueError, "one document per row; pass use_cache=False for packed"),
    "numbered": ({"seq_idx": torch.zeros(2, 1, dtype=torch.long)}, ValueError, "one document per row"),
    "mask of the new token alone": ({"attention_mask": torch.ones(2, 1)}, ValueError, r"attention_mask must be .*\[2, 21\]; got \[2, 1\]"),
    "another mask": ({"attention_mask": torch.ones(2, 21).long()}, ValueError, "must repeat the mask of the 20 cached tokens"),
    "float mask": ({"attention_mask": torch.ones(2, 21)}, TypeError, r"mask\.bool\(\)"),
    "positions that start again": ({"position_ids": torch.zeros(2, 1).long()}, ValueError, "position_ids must continue the row by ones"),
    "another batch": ({"input_ids": tokens(1, 1)}, ValueError, "the cache holds 2 rows, the model was given 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_forward_that_does_not_continue_its_cache_is_refused(case: str) -> None:
    arguments, error, message = REFUSED[case]
    with install(tiny().eval()) as handle, pytest.raises(error, match=message):
        handle.model(**{"input_ids": tokens(2, 1), "cache": _filled(handle.model), **arguments})


def test_padding_between_what_is_cached_and_what_follows_is_refused() -> None:
    mask = torch.tensor([[1] * 16 + [0] * 4] * 2)
    with install(tiny().eval()) as handle, torch.no_grad():
        past = handle.model(tokens(2, 20), attention_mask=mask, use_cache=True).cache
        with pytest.raises(ValueError, match="padding inside a row; with a cache pad on the left"):
            handle.model(tokens(2, 1), attention_mask=torch.nn.functional.pad(mask, (0, 1), value=1), cache=past)


def test_packed_positions_in_a_prefill_are_refused() -> None:
    packed = torch.cat([torch.arange(8), torch.arange(12)])[None]
    with install(tiny().eval()) as handle, pytest.raises(ValueError, match="a cache holds one document per row"):
        handle.model(tokens(1, 20), position_ids=packed, use_cache=True)


def test_a_layout_and_a_cache_are_refused() -> None:
    with install(tiny().eval()) as handle, pytest.raises(ValueError, match=r"set handle\.layout to None, or pass use_cache=False"):
        handle.layout = Layout.batch(2, 20, ratio=4, window=8)
        handle.model(tokens(2, 20), use_cache=True)


def test_a_cache_of_another_kind_stage_or_model_is_refused() -> None:
    model, ids = tiny().eval(), tokens(2, 20)
    with torch.no_grad():
        stock_cache = model(ids, use_cache=True).cache
    with install(model) as handle, torch.no_grad():
        with pytest.raises(TypeError, match=r"csakit fills a DynamicCache, .* got list"):
            model(ids, cache=[1])
        with pytest.raises(ValueError, match="filled by the stock layers"):
            model(ids[:, :1], cache=stock_cache)
        past = _filled(model)
        with pytest.raises(ValueError, match="this cache cannot be cropped"):
            past.crop(-1)
        handle.stage("dense")
        with pytest.raises(ValueError, match="filled in a stage with another attention"):
            model(ids[:, :1], cache=past)
    with install(tiny((CSA,)).eval()) as other, pytest.raises(ValueError, match="filled by a model of 3 layers, this one has 1"):
        other.model(ids[:, :1], cache=past)
    with pytest.raises(AttributeError, match="store_compression_weights"):
        model(ids[:, :1], cache=past)  # the stock layers do not take it for theirs


def test_training_with_a_cache_is_refused() -> None:
    with install(tiny()) as handle, pytest.raises(ValueError, match="trains no indexer"):
        handle.model(tokens(2, 20), use_cache=True)
