"""Documents: however a row says where they begin and end, each gives what it gives alone."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening
from v4_model import WINDOW, gap, gradients, next_token_loss, tiny, tokens, worst_gap

from csakit import Layout
from csakit.integrations.transformers import install

LENGTHS = (13, 22, 3, 37)  # none a multiple of the ratio 4, one shorter than it
TOTAL = sum(LENGTHS)
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0)
NUMBERS = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
RESTARTING = torch.cat([torch.arange(length) for length in LENGTHS])[None]

PACKED = {
    "position_ids that restart": lambda handle: {"position_ids": RESTARTING},
    "position_ids and an all-ones mask": lambda handle: {
        "position_ids": RESTARTING,
        "attention_mask": torch.ones(1, TOTAL, dtype=torch.long),
    },
    "cu_seq_lens_q": lambda handle: {
        "cu_seq_lens_q": OFFSETS.int(),
        "cu_seq_lens_k": OFFSETS.int(),
        "max_length_q": 37,
        "max_length_k": 37,
    },
    "cu_seqlens": lambda handle: {"cu_seqlens": OFFSETS},
    "seq_idx": lambda handle: {"seq_idx": NUMBERS.int()},
    "an explicit layout": lambda handle: setattr(handle, "layout", Layout.packed(OFFSETS, ratio=4, window=WINDOW)) or {},
}


@cache
def separate(stage: str) -> tuple[torch.nn.Module, list[Tensor], float, dict[str, Tensor]]:
    """An installed model, and logits, summed indexer loss and gradients of one forward per document."""
    model, logits, losses = tiny(), [], 0.0
    handle = install(model).stage(stage)
    handle.divisor = float(TOTAL)  # one count for all documents, packed or not
    for ids in tokens(1, TOTAL).split(LENGTHS, 1):
        out = model(ids).logits[0]
        next_token_loss(out, ids[0]).backward()
        logits.append(out.detach())
        losses += float(sum(handle.losses.values()))
    return model, logits, losses, gradients(model)


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
@pytest.mark.parametrize("form", PACKED)
def test_packed_documents_give_the_logits_kl_and_gradients_of_separate_runs(form: str, stage: str) -> None:
    model, logits, loss, wanted = separate(stage)
    handle, ids = install(model), tokens(1, TOTAL)
    try:
        handle.stage(stage)
        out = model(ids, **PACKED[form](handle)).logits[0].split(LENGTHS)
        sum(next_token_loss(part, part_ids) for part, part_ids in zip(out, ids[0].split(LENGTHS))).backward()
        assert max(gap(part.detach(), alone) for part, alone in zip(out, logits)) < 1e-5
        assert float(sum(handle.losses.values())) == pytest.approx(loss, rel=1e-5)
        worst = worst_gap(gradients(model), wanted)
        assert worst[0] < 2e-4, worst
    finally:
        handle.layout = None


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("numbered", [False, True])
def test_every_form_of_the_librarys_flattening_collator_is_understood(flash: bool, numbered: bool) -> None:
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=flash, return_seq_idx=numbered, return_tensors="pt")
    documents = tokens(1, TOTAL)[0].split(LENGTHS)
    batch = collate([{"input_ids": ids.tolist()} for ids in documents])
    _, logits, loss, _ = separate("sparse")
    model = tiny()
    with install(model) as handle:
        out = model(**batch)
        assert max(gap(part.detach(), alone) for part, alone in zip(out.logits[0].split(LENGTHS), logits)) < 1e-5
        assert float(sum(handle.losses.values())) == pytest.approx(loss, rel=1e-5)


def test_no_gradient_crosses_from_one_document_to_another() -> None:
    model = tiny()
    embeds = torch.randn(1, TOTAL, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with install(model, coef=0.0):
        for number, (start, stop) in enumerate(zip(OFFSETS[:-1].tolist(), OFFSETS[1:].tolist())):
            embeds.grad = None
            model(inputs_embeds=embeds, position_ids=RESTARTING).logits[0, start:stop].square().sum().backward()
            reached = embeds.grad[0].abs().sum(-1) > 0
            assert torch.equal(reached, NUMBERS[0] == number)


def test_rows_that_are_packed_differently_stay_apart() -> None:
    model, ids = tiny().eval(), tokens(2, 40)
    positions = torch.stack([torch.cat([torch.arange(17), torch.arange(23)]), torch.arange(40)])
    with install(model), torch.no_grad():
        both = model(ids, position_ids=positions).logits
        assert gap(both[0, 17:], model(ids[:1, 17:]).logits[0]) < 1e-5
        assert gap(both[1], model(ids[1:]).logits[0]) < 1e-5


def _positions(mask: Tensor) -> dict[str, Tensor]:
    """position_ids as the library's own generation makes them."""
    return {"attention_mask": mask, "position_ids": (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 1)}


FORMS = {
    "mask only": lambda mask: {"attention_mask": mask},
    "bool mask": lambda mask: {"attention_mask": mask.bool()},
    "mask and counted position_ids": _positions,
    "mask and row positions": lambda mask: {"attention_mask": mask, "position_ids": torch.arange(mask.shape[1])[None]},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("left", "right"), [(16, 0), (0, 21), (5, 6)])
def test_a_padded_row_gives_what_it_gives_without_padding(left: int, right: int, form: str) -> None:
    model, ids = tiny(), tokens(1, 45)
    with install(model) as handle:
        alone = model(ids).logits[0]
        next_token_loss(alone, ids[0]).backward()
        loss, wanted = float(handle.losses["layers.1"]), gradients(model)
        padded = torch.nn.functional.pad(ids, (left, right), value=7)
        mask = torch.nn.functional.pad(torch.ones_like(ids), (left, right))
        out = model(padded, **FORMS[form](mask)).logits[0, left : left + 45]
        next_token_loss(out, ids[0]).backward()
        assert gap(out.detach(), alone.detach()) < 1e-5
        assert float(handle.losses["layers.1"]) == pytest.approx(loss, rel=1e-5)
        worst = worst_gap(gradients(model), wanted)
        assert worst[0] < 2e-4, worst


def test_padding_of_packed_rows_comes_off_whatever_says_where_documents_begin() -> None:
    model, ids = tiny().eval(), tokens(1, 30)
    mask = torch.ones(1, 30, dtype=torch.long)
    mask[:, 12:16] = 0
    numbers = torch.tensor([[0] * 14 + [1] * 16])
    with install(model), torch.no_grad():
        out = model(ids, attention_mask=mask, seq_idx=numbers).logits[0]
        assert gap(out[:12], model(ids[:, :12]).logits[0]) < 1e-5
        assert gap(out[16:], model(ids[:, 16:]).logits[0]) < 1e-5


def test_a_row_of_padding_alone_is_harmless() -> None:
    model, ids = tiny(), tokens(2, 24)
    mask = torch.tensor([[0] * 24, [1] * 24])
    with install(model) as handle:
        out = model(ids, attention_mask=mask).logits
        out[1].square().sum().backward()
        assert torch.isfinite(out).all() and all(torch.isfinite(value).all() for value in gradients(model).values())
        alone = model(ids[1:])
        assert gap(out[1].detach(), alone.logits[0].detach()) < 1e-5
        assert set(handle.losses) == {"layers.1"}


@pytest.mark.parametrize("offset", [1, 4, 1000])
def test_positions_with_an_offset_never_show_the_future(offset: int) -> None:
    model = tiny()
    embeds = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with install(model, coef=0.0):
        out = model(inputs_embeds=embeds, position_ids=torch.arange(40)[None] + offset).logits
        plain = model(inputs_embeds=embeds).logits
        # only relative positions matter: the rest is the rounding of large angles
        assert gap(out.detach(), plain.detach()) < 1e-3
        for token in (0, 11, 12, 30):
            embeds.grad = None
            out[0, token].square().sum().backward(retain_graph=True)
            assert not embeds.grad[0, token + 1 :].any()


def test_positions_that_skip_inside_a_known_document_only_turn_the_rotations() -> None:
    """Position-skipping recipes: documents given in words of their own, positions with jumps inside."""
    model, ids = tiny().eval(), tokens(1, 40)
    skipping = torch.cat([torch.arange(20), torch.arange(100, 120)])[None]
    with install(model), torch.no_grad():
        one = model(ids, position_ids=skipping, seq_idx=torch.zeros(1, 40, dtype=torch.long)).logits[0]
        two = model(ids, position_ids=skipping).logits[0]
        assert gap(two[20:], model(ids[:, 20:]).logits[0]) < 1e-4
        assert gap(one[20:], two[20:]) > 0.01


REFUSED_DOCUMENTS = {
    "4-D mask": ({"attention_mask": torch.ones(2, 1, 20, 20)}, r"attention_mask must be \[rows, tokens\]"),
    "mask of another length": ({"attention_mask": torch.ones(2, 19, dtype=torch.long)}, r"attention_mask must be .* got \[2, 19\]"),
    "mask as a list": ({"attention_mask": [[1] * 20] * 2}, "got list"),
    "hole in a mask": ({"attention_mask": torch.tensor([[1] * 9 + [0] + [1] * 10] * 2)}, "hole"),
    "hole in a document": (
        {"attention_mask": torch.tensor([[1] * 9 + [0] + [1] * 10] * 2), "position_ids": torch.arange(20)[None]},
        "hole inside a document",
    ),
    "offsets with two rows": ({"cu_seqlens": torch.tensor([0, 20])}, "cumulative lengths describe one packed row; got 2 rows"),
    "3-D positions": ({"position_ids": torch.zeros(3, 2, 20, dtype=torch.long)}, "position_ids must be .* 3-D"),
    "numbers of another shape": ({"seq_idx": torch.zeros(3, 20, dtype=torch.long)}, r"seq_idx must be .* got \[3, 20\]"),
}


@pytest.mark.parametrize("case", REFUSED_DOCUMENTS)
def test_arguments_that_do_not_describe_documents_are_refused(case: str) -> None:
    arguments, message = REFUSED_DOCUMENTS[case]
    with install(tiny()) as handle, pytest.raises(ValueError, match=message):
        handle.model(tokens(2, 20), **arguments)


@pytest.mark.parametrize("positions", [{}, {"position_ids": torch.arange(20)[None]}])
def test_a_float_mask_is_refused(positions: dict) -> None:
    with install(tiny()) as handle, pytest.raises(TypeError, match=r"mask\.bool\(\)"):
        handle.model(tokens(2, 20), attention_mask=torch.ones(2, 20), **positions)


REFUSED_LAYOUTS = {
    "not a layout": ("packed", TypeError, "handle.layout must be a csakit.Layout"),
    "of another batch": (Layout.batch(2, 19, ratio=4, window=WINDOW), ValueError, r"handle.layout describes \[2, 19\] tokens"),
    "another window": (Layout.batch(2, 20, ratio=4, window=WINDOW + 1), ValueError, "the model's window 8; got window 9"),
    "a shard": (Layout.batch(2, 40, ratio=4, window=WINDOW).shard(1, 2), ValueError, "kv_offset 7"),
}


@pytest.mark.parametrize("case", REFUSED_LAYOUTS)
def test_a_layout_that_does_not_fit_is_refused(case: str) -> None:
    layout, error, message = REFUSED_LAYOUTS[case]
    with install(tiny()) as handle:
        handle.layout = layout
        with pytest.raises(error, match=message):
            handle.model(tokens(2, 20))
