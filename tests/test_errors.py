"""Every mistake of a caller is told: the argument, what was expected, what came, and the likely fix. One case for each `raise`.

The last test reads the sources: a `raise` that no case here reaches fails it.
"""

from __future__ import annotations

import ast
import inspect
import pathlib
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

import csakit
from csakit import Layout, metrics

SOURCE = pathlib.Path(csakit.__file__).parent
FILES = (
    "layout",
    "checks",
    "compression",
    "selection",
    "attention",
    "distillation",
    "metrics",
    "ops",
    "backends/__init__",
    "backends/rows",
)
B, T, H, D, E, IH, C, K = 2, 8, 4, 6, 4, 2, 3, 2
LAYOUT = Layout.batch(B, T, ratio=2, window=3)
NO_WINDOW = Layout.batch(B, T, ratio=2, window=0)
NAN = float("nan")


class Wrong(NamedTuple):
    """A wrong call, and what it must raise."""

    call: Callable[[], object]
    error: type[Exception]
    match: str


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def pack(offsets: list, **options) -> Layout:
    return Layout.packed(torch.tensor(offsets), **{"ratio": 2, "window": 3} | options)


def from_mask(mask: torch.Tensor) -> Layout:
    return Layout.from_mask(mask, ratio=2, window=3)


def from_ids(x: torch.Tensor) -> Layout:
    return Layout.from_document_ids(x, ratio=2, window=3)


def attend(layout: Layout = LAYOUT, **changes) -> object:
    given = {"q": torch.zeros(B, T, H, D), "kv": torch.zeros(B, T, D), "entries": torch.zeros(B, E, D)} | changes
    return csakit.attend(**given, layout=layout)


def compress(layout: Layout = LAYOUT, **changes) -> object:
    given = {"values": torch.zeros(B, T, 2 * D), "gates": torch.zeros(B, T, 2 * D), "bias": torch.zeros(2, 2 * D)} | changes
    return csakit.compress(**given, layout=layout)


def select(layout: Layout = LAYOUT, **changes) -> object:
    given = {"q": torch.zeros(B, T, IH, C), "k": torch.zeros(B, E, C), "weights": torch.zeros(B, T, IH), "topk": K} | changes
    return csakit.select(**given, layout=layout)


def log_mass(**changes) -> object:
    given = {"q": torch.zeros(B, T, H, D), "entries": torch.zeros(B, E, D), "lse": torch.zeros(B, T, H)} | changes
    return csakit.teacher_log_mass(**given, layout=LAYOUT)


def distill(**changes) -> object:
    given = {"scores": torch.zeros(B, T, K), "log_mass": torch.zeros(B, T, K)} | changes
    return csakit.distill(**given, layout=LAYOUT)


def distill_dense(**changes) -> object:
    given = {"q_index": torch.zeros(B, T, IH, C), "k_index": torch.zeros(B, E, C), "weights": torch.zeros(B, T, IH)}
    given |= {"q": torch.zeros(B, T, H, D), "entries": torch.zeros(B, E, D), "lse": torch.zeros(B, T, H)}
    return csakit.distill_dense(**given | changes, layout=LAYOUT)


def validate(entry: list[int], token: int = 7) -> object:
    indices = torch.full((B, T, K), -1)
    indices[1, token] = torch.tensor(entry)
    return csakit.validate_indices(indices, LAYOUT)


def attach(out=None, loss=None, **options) -> object:
    out = torch.zeros(2, 3) if out is None else out
    return csakit.attach_loss(out, torch.zeros((), requires_grad=True) if loss is None else loss, **options)


def other_device() -> object:
    with csakit.backend("cpu"):
        return csakit.select(*(torch.zeros(s, device="meta") for s in ((B, T, IH, C), (B, E, C), (B, T, IH))), K, LAYOUT)


def under_debug(call: Callable[[], object]) -> Callable[[], object]:
    def checked() -> object:
        with csakit.debug(True):
            return call()

    return checked


CASES = {
    # layouts
    "rows is no whole number": Wrong(
        lambda: Layout.batch(2.0, 8, ratio=2, window=3), TypeError, r"rows must be a whole number; got float 2\.0"
    ),
    "tokens is negative": Wrong(lambda: Layout.batch(2, -1, ratio=2, window=3), ValueError, "tokens must be at least 0; got -1"),
    "ratio is 0": Wrong(lambda: Layout.batch(2, 8, ratio=0, window=3), ValueError, "ratio must be at least 1; got 0"),
    "ratio is a bool": Wrong(lambda: Layout.batch(2, 8, ratio=True, window=3), TypeError, "ratio must be a whole number; got bool True"),
    "window is negative": Wrong(lambda: Layout.batch(2, 8, ratio=2, window=-1), ValueError, "window must be at least 0; got -1"),
    "offsets are a list": Wrong(
        lambda: Layout.packed([0, 4], ratio=2, window=3), TypeError, r"cu_seqlens must be an int32 or int64 tensor .*list"
    ),
    "offsets are floats": Wrong(lambda: pack([0.0, 4.0]), TypeError, r"cu_seqlens must be .*float32 \[2\]"),
    "offsets are 2-D": Wrong(lambda: pack([[0, 4]]), ValueError, r"cu_seqlens must have shape .*got \[1, 2\]"),
    "no offsets": Wrong(lambda: Layout.packed(ids(0), ratio=2, window=3), ValueError, "cu_seqlens must hold at least the offset 0"),
    "offsets start above 0": Wrong(lambda: pack([1, 4]), ValueError, "cu_seqlens must start with 0; got 1.*not lengths"),
    "offsets decrease": Wrong(lambda: pack([0, 5, 3]), ValueError, r"cu_seqlens must not decrease; got \[0, 5, 3\]"),
    "offsets exceed the row": Wrong(lambda: pack([0, 9], tokens=8), ValueError, "tokens must be at least the last offset 9; got 8"),
    "room is too small": Wrong(
        lambda: pack([0, 4, 8], cu_seqlens_padded=torch.tensor([0, 3, 9])), ValueError, "cu_seqlens_padded must give every document room"
    ),
    "room of another count": Wrong(
        lambda: pack([0, 4, 8], cu_seqlens_padded=torch.tensor([0, 9])),
        ValueError,
        r"cu_seqlens_padded must have shape .*= \[3\]; got \[2\]",
    ),
    "room decreases": Wrong(
        lambda: pack([0, 0, 0], cu_seqlens_padded=torch.tensor([0, 9, 3])), ValueError, "cu_seqlens_padded must not decrease"
    ),
    "additive mask": Wrong(lambda: from_mask(torch.zeros(2, 8)), TypeError, r"mask must be bool or 0/1 integers.*mask >= 0"),
    "mask of all pairs": Wrong(
        lambda: from_mask(torch.ones(2, 1, 8, 8).bool()), ValueError, r"mask must have shape \[B, T\].*where documents begin"
    ),
    "mask of document numbers": Wrong(
        lambda: from_mask(torch.tensor([[1, 2]])), ValueError, "mask must hold 0 and 1 only; use from_document_ids"
    ),
    "mask with a hole": Wrong(lambda: from_mask(torch.tensor([[1, 0, 1]])), ValueError, "one run of real tokens per row; got a hole"),
    "ids are bool": Wrong(lambda: from_ids(torch.ones(2, 8).bool()), TypeError, "ids must be an int32 or int64 tensor"),
    "ids below -1": Wrong(lambda: from_ids(torch.tensor([[0, -2]])), ValueError, r"ids must be -1 \(padding\) or at least 0; got -2"),
    "another ratio of a shard": Wrong(lambda: LAYOUT.shard(1, 2).with_ratio(4), ValueError, "with_ratio needs the whole row.*before shard"),
    "another ratio of the first shard": Wrong(lambda: LAYOUT.shard(0, 2).with_ratio(4), ValueError, "with_ratio needs the whole row"),
    "rows is no tensor": Wrong(lambda: LAYOUT.to_entries([1]), TypeError, r"rows must be a tensor \[B, T, ..\]; got list"),
    "rows of another length": Wrong(
        lambda: LAYOUT.to_entries(torch.zeros(B, T + 1)), ValueError, r"rows must be the whole rows.*\[2, 8, ..\]; got \[2, 9\]"
    ),
    "rank beyond world": Wrong(lambda: LAYOUT.shard(2, 2), ValueError, "rank must be below world = 2; got 2"),
    "world does not divide the row": Wrong(
        lambda: LAYOUT.shard(0, 3), ValueError, "world must divide the row length 8; got 3. Pad the row"
    ),
    "shard of a shard": Wrong(lambda: LAYOUT.shard(1, 2).shard(0, 2), ValueError, "this layout is a part of one already"),
    # compress
    "odd channels": Wrong(
        lambda: compress(values=torch.zeros(B, T, 5), gates=torch.zeros(B, T, 5), bias=torch.zeros(2, 5)),
        ValueError,
        "even number of channels.*got 5.*overlap=False",
    ),
    "values are integers": Wrong(lambda: compress(values=ids(B, T, 12)), TypeError, "values must be a floating-point tensor"),
    "gates of another width": Wrong(
        lambda: compress(gates=torch.zeros(B, T, 6)), ValueError, r"gates must have shape .*= \[2, 8, 12\]; got \[2, 8, 6\]"
    ),
    "bias of another ratio": Wrong(
        lambda: compress(bias=torch.zeros(4, 12)), ValueError, r"bias must have shape \[ratio.*= \[2, 12\]; got \[4, 12\]"
    ),
    "compress blocks": Wrong(lambda: compress(replace(LAYOUT, block=True)), ValueError, "compress needs a layout of compressed entries"),
    "compress a shard": Wrong(
        lambda: compress(LAYOUT.shard(1, 2), values=torch.zeros(B, 4, 12), gates=torch.zeros(B, 4, 12)), ValueError, "Compress before shard"
    ),
    # select and its kin
    "index query without a head axis": Wrong(lambda: select(q=torch.zeros(B, T, C)), ValueError, r"q must have shape \[B, T, I, C\]"),
    "index keys per token": Wrong(
        lambda: select(k=torch.zeros(B, T, C)), ValueError, r"k must have shape \[B, E, C\] = \[2, 4, 3\]; got \[2, 8, 3\].*one per entry"
    ),
    "weights of other heads": Wrong(lambda: select(weights=torch.zeros(B, T, 1)), ValueError, r"weights must have shape \[B, T, I\]"),
    "topk is 0": Wrong(lambda: select(topk=0), ValueError, "topk must be at least 1; got 0"),
    "topk is a tensor": Wrong(lambda: select(topk=torch.tensor(2)), TypeError, "topk must be a whole number"),
    "sets that do not divide": Wrong(
        lambda: select(sets=3), ValueError, "number of sets must divide the number of index heads; got 3 and 2"
    ),
    "sets is 0": Wrong(lambda: select(sets=0), ValueError, "sets must be at least 1"),
    "relu is text": Wrong(lambda: select(relu="false"), TypeError, "relu must be True or False; got str 'false'"),
    "scale is text": Wrong(lambda: select(scale="1"), TypeError, "scale must be a number; got str '1'"),
    "scale is NaN": Wrong(lambda: select(scale=NAN), ValueError, "scale must be finite; got nan"),
    "index_scores checks the same": Wrong(
        lambda: csakit.index_scores(torch.zeros(B, T, IH, C), torch.zeros(B, E, C + 1), None, LAYOUT), ValueError, "k must have shape"
    ),
    "index repeated": Wrong(lambda: validate([1, 1]), ValueError, r"entry 1 of row 1, token 7 stands more than once.*0\.\.3"),
    "index below -1": Wrong(lambda: validate([0, -2]), ValueError, "entry -2 of row 1, token 7 is below -1"),
    "index out of range": Wrong(
        lambda: validate([0, 4]), ValueError, "entry 4 of row 1, token 7 is out of range: the layout has 4 entries"
    ),
    "index not visible": Wrong(lambda: validate([0, 2], token=4), ValueError, r"entry 2 of row 1, token 4 is not visible.*0\.\.1"),
    "index where none is visible": Wrong(lambda: validate([0, -1], token=0), ValueError, "entry 0 of row 1, token 0 is not visible.*none"),
    "indices are int16": Wrong(
        lambda: csakit.validate_indices(torch.zeros(B, T, K, dtype=torch.int16), LAYOUT),
        TypeError,
        "indices must be an int32 or int64 tensor",
    ),
    "attend checks indices when debugging": Wrong(
        under_debug(lambda: attend(indices=ids(B, T, K))), ValueError, "entry 0 of row 0, token 0 is not visible"
    ),
    # attend
    "q without a head axis": Wrong(lambda: attend(q=torch.zeros(B, T, D)), ValueError, r"q must have shape \[B, T, H, D\]"),
    "heads first": Wrong(
        lambda: attend(q=torch.zeros(B, H, T, D)), ValueError, r"q must have shape \[B, T, H, D\] = \[2, 8, any, any\]; got \[2, 4, 8, 6\]"
    ),
    "no kv, but a window": Wrong(lambda: attend(kv=None), ValueError, "kv is None, but the layout has a window of 3"),
    "neither kv nor entries": Wrong(
        lambda: attend(NO_WINDOW, kv=None, entries=None), ValueError, r"attend needs kv or entries.*window is 0"
    ),
    "indices without entries": Wrong(
        lambda: attend(entries=None, indices=ids(B, T, K)), ValueError, "indices name entries, but entries is None"
    ),
    "kv of another length": Wrong(
        lambda: attend(kv=torch.zeros(B, T + 2, D)), ValueError, r"kv must have shape .*T_kv = T \+ layout\.kv_offset"
    ),
    "entries of another length": Wrong(
        lambda: attend(entries=torch.zeros(B, E + 1, D)), ValueError, r"entries must have shape .*E = layout\.num_entries"
    ),
    "kv heads that do not divide": Wrong(
        lambda: attend(kv=torch.zeros(B, T, 3, D), entries=torch.zeros(B, E, 3, D)),
        ValueError,
        "KV heads of kv must divide the number of heads; got 3 and 4",
    ),
    "kv heads of one only": Wrong(
        lambda: attend(kv=torch.zeros(B, T, 2, D)), ValueError, "kv and entries must have the same number of KV heads; got 2 and 1"
    ),
    "sink per token": Wrong(lambda: attend(sink=torch.zeros(B, T, H)), ValueError, r"sink must have shape \[H\] = \[4\]"),
    "scale is a tensor": Wrong(
        lambda: attend(scale=torch.tensor(1.0)), TypeError, "scale must be a number; got Tensor|scale must be a number; got float32"
    ),
    "sets of indices that do not divide": Wrong(
        lambda: attend(indices=ids(B, T, 3, K)), ValueError, "sets of indices must divide the number of heads; got 3 and 4"
    ),
    "indices without a token axis": Wrong(lambda: attend(indices=ids(B, K)), ValueError, r"indices must have shape \[B, T, K\]"),
    "value_width too large": Wrong(lambda: attend(value_width=D + 1), ValueError, "value_width must be at most the key width 6; got 7"),
    "value_width is 0": Wrong(lambda: attend(value_width=0), ValueError, "value_width must be at least 1"),
    "value_width beside values": Wrong(
        lambda: attend(value_width=2, values=torch.zeros(B, T, 2), entry_values=torch.zeros(B, E, 2)),
        ValueError,
        "it does not go with values",
    ),
    "values without entry_values": Wrong(
        lambda: attend(values=torch.zeros(B, T, 2)), ValueError, "entry_values and entries must be given together"
    ),
    "entry_values without values": Wrong(
        lambda: attend(entry_values=torch.zeros(B, E, 2)), ValueError, "values and kv must be given together"
    ),
    "values of another length": Wrong(
        lambda: attend(values=torch.zeros(B, T + 1, 2), entry_values=torch.zeros(B, E, 2)),
        ValueError,
        "values must have shape .*shaped like its keys",
    ),
    "values of two widths": Wrong(
        lambda: attend(values=torch.zeros(B, T, 2), entry_values=torch.zeros(B, E, 3)), ValueError, r"the same width; got \[2, 3\]"
    ),
    "the layout is missing": Wrong(lambda: attend(None), TypeError, r"layout must be a csakit\.Layout; got NoneType"),
    "teacher is text": Wrong(
        lambda: attend(indices=ids(B, T, K) - 1, teacher="false"), TypeError, "teacher must be True or False; got str 'false'"
    ),
    "overlap is text": Wrong(lambda: compress(overlap="false"), TypeError, "overlap must be True or False; got str 'false'"),
    # teachers of other kernels
    "no entries to teach": Wrong(lambda: log_mass(entries=None), TypeError, "entries must be a floating-point tensor"),
    "lse of heads first": Wrong(
        lambda: log_mass(lse=torch.zeros(B, H, T)), ValueError, r"lse must have shape \[B, T, H\].*need a transpose"
    ),
    "sets beside indices": Wrong(lambda: log_mass(indices=ids(B, T, K), sets=2), ValueError, "sets must be that of indices, 1; got 2"),
    "base 10": Wrong(
        lambda: csakit.lse_with_sink(torch.zeros(B, T, H), None, base="10"), ValueError, 'base must be "e" or "2"; got \'10\''
    ),
    "lse is a number": Wrong(
        lambda: csakit.lse_with_sink(1.0, None), TypeError, r"lse must be a floating-point tensor \[.., H\]; got float"
    ),
    "sink of other heads": Wrong(
        lambda: csakit.lse_with_sink(torch.zeros(B, T, H), torch.zeros(H + 1)), ValueError, "sink must have shape"
    ),
    # distill
    "scores without slots": Wrong(lambda: distill(scores=torch.zeros(B, T)), ValueError, r"scores must have shape \[B, T, K\]"),
    "log_mass of other slots": Wrong(
        lambda: distill(log_mass=torch.zeros(B, T, K + 1)), ValueError, "log_mass must have shape of the shape of scores"
    ),
    "log_mass is None": Wrong(lambda: distill(log_mass=None), TypeError, "log_mass must be a floating-point tensor"),
    "weight per slot": Wrong(lambda: distill(weight=torch.ones(B, T, K)), ValueError, r"weight must have shape \[B, T\]"),
    "divisor is negative": Wrong(lambda: distill(divisor=-1), ValueError, "divisor must be at least 0; got -1"),
    "divisor is NaN": Wrong(lambda: distill(divisor=NAN), ValueError, "divisor must be finite; got nan"),
    "divisor is text": Wrong(lambda: distill(divisor="8"), TypeError, "divisor must be a number; got str '8'"),
    "divisor per row": Wrong(lambda: distill(divisor=torch.ones(B)), ValueError, "divisor must have shape scalar"),
    "group is a number": Wrong(lambda: distill(group=2), TypeError, "group must be a torch.distributed process group; got int 2"),
    "dense: index keys per token": Wrong(
        lambda: distill_dense(k_index=torch.zeros(B, T, C)), ValueError, r"k_index must have shape \[B, E, C\]"
    ),
    "dense: sets beyond heads": Wrong(
        lambda: distill_dense(sets=2, q=torch.zeros(B, T, 3, D), lse=torch.zeros(B, T, 3)),
        ValueError,
        "sets must divide the number of heads",
    ),
    "dense: index_scale": Wrong(lambda: distill_dense(index_scale="1"), TypeError, "index_scale must be a number"),
    "attach to no tensor": Wrong(lambda: attach(out=[1.0]), TypeError, "out must be a floating-point tensor; got list"),
    "attach a loss per token": Wrong(lambda: attach(loss=torch.zeros(3)), ValueError, r"loss must have shape scalar = \[\]; got \[3\]"),
    "attach with text": Wrong(lambda: attach(weight="0.1"), TypeError, "weight must be a number; got str '0.1'"),
    "attach with NaN": Wrong(lambda: attach(weight=NAN), ValueError, "weight must be finite"),
    "attach with a weight per token": Wrong(lambda: attach(weight=torch.ones(3)), ValueError, "weight must have shape scalar"),
    # metrics
    "mass of integers": Wrong(
        lambda: metrics.teacher_entropy(ids(B, T, E)), TypeError, r"log_mass must be a floating-point tensor \[B, T, E\]"
    ),
    "picks of floats": Wrong(
        lambda: metrics.captured_mass(torch.zeros(B, T, E), torch.zeros(B, T, K)), TypeError, "indices must be int32 or int64"
    ),
    "picks of other rows": Wrong(lambda: metrics.captured_mass(torch.zeros(B, T, E), ids(B, T + 1, K)), ValueError, "to fit log_mass; got"),
    "look_back over other entries": Wrong(
        lambda: metrics.look_back(torch.zeros(B, T, E + 1), LAYOUT), ValueError, "log_mass must be .* of the layout"
    ),
    "pairs of topk 0": Wrong(lambda: metrics.attention_pairs(LAYOUT, 0), ValueError, "topk must be at least 1"),
    "shares of another lse": Wrong(
        lambda: metrics.branch_shares(torch.zeros(B, T, H, D), None, None, torch.zeros(B, H, T), LAYOUT), ValueError, "lse must have shape"
    ),
    # backends and switches
    "unknown backend": Wrong(lambda: csakit.backend("cuda"), ValueError, "backend must be one of reference, cpu.*; got 'cuda'"),
    "tile is 0": Wrong(lambda: csakit.backend("cpu", tile=0), ValueError, "tile must be at least 1"),
    "tile of the reference": Wrong(lambda: csakit.backend("reference", tile=4), ValueError, "the reference has none"),
    "cpu backend elsewhere": Wrong(other_device, RuntimeError, "backend 'cpu' was asked for, but the tensors are on meta"),
    "debug is a number": Wrong(lambda: csakit.debug(1), TypeError, "debug takes True or False; got 1"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_call_says_what_is_wrong(name: str) -> None:
    wrong = CASES[name]
    with pytest.raises(wrong.error, match=wrong.match):
        wrong.call()


PUBLIC = [getattr(csakit, name) for name in csakit.__all__ if inspect.isfunction(getattr(csakit, name))]
METRICS = [
    f for f in vars(metrics).values() if inspect.isfunction(f) and f.__module__ == metrics.__name__ and not f.__name__.startswith("_")
]


@pytest.mark.parametrize(
    "function", [*PUBLIC, *METRICS, Layout.batch, Layout.packed, Layout.from_mask, Layout.from_document_ids], ids=lambda f: f.__qualname__
)
def test_unknown_keywords_are_type_errors_and_options_are_keywords(function: Callable) -> None:
    """No **kwargs anywhere, and everything with a default is keyword-only."""
    parameters = inspect.signature(function).parameters.values()
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters)
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters if p.default is not p.empty)
    with pytest.raises(TypeError, match="unexpected keyword argument 'windw'"):
        function(windw=3)


def test_the_verbs_say_when_the_layout_is_missing() -> None:
    """A tensor, None or a number in the layout's place is a TypeError that names the layout."""
    for layout in (None, 4, torch.zeros(B, T)):
        for call in (attend, compress, select):
            with pytest.raises(TypeError, match=r"layout must be a csakit\.Layout"):
                call(layout)
        with pytest.raises(TypeError, match=r"layout must be a csakit\.Layout"):
            csakit.distill(torch.zeros(B, T, K), torch.zeros(B, T, K), layout)


def test_debug_and_backend_are_switches_and_contexts_and_restore_what_was() -> None:
    assert attend(indices=ids(B, T, K)) is not None
    with csakit.debug(True):
        with csakit.debug(False):
            assert attend(indices=ids(B, T, K)) is not None
        with pytest.raises(ValueError, match="is not visible"):
            attend(indices=ids(B, T, K))
    assert attend(indices=ids(B, T, K)) is not None
    switch = csakit.debug(True)
    with pytest.raises(ValueError, match="is not visible"):
        attend(indices=ids(B, T, K))
    csakit.debug(False)
    assert attend(indices=ids(B, T, K)) is not None
    assert switch is not None
    q = torch.randn(B, T, H, D)
    want = attend(q=q)
    with csakit.backend("cpu", tile=1), csakit.backend("reference"):
        inner = attend(q=q)
    assert torch.allclose(inner.out, want.out, atol=1e-6) and torch.equal(attend(q=q).out, want.out)


def raise_statements() -> set[tuple[str, int]]:
    """(file, first line) of every `raise` with an exception in the files of the ops."""
    found = set()
    for name in FILES:
        for node in ast.walk(ast.parse((SOURCE / f"{name}.py").read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                found.add((name, node.lineno))
    return found


def test_every_raise_is_reached_by_a_case() -> None:
    reached = set()
    for name, wrong in CASES.items():
        try:
            wrong.call()
        except wrong.error as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            path = pathlib.Path(last.filename)
            if SOURCE in path.parents:
                reached.add((str(path.relative_to(SOURCE).with_suffix("")), last.lineno))
        else:
            pytest.fail(f"{name}: nothing was raised")
    missing = {(file, line) for file, line in raise_statements() if not any(f == file and line <= at <= line + 4 for f, at in reached)}
    assert not missing, f"no case for the raise at {sorted(missing)}"
