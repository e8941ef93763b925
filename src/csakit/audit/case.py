"""Cases and results: what a candidate is given, and the form in which it answers.

A `Case` is one small problem of compressed sparse attention with its indexer, as plain torch tensors. A candidate is any
object with `loss(case)`, or simply that function:

    def loss(case: Case) -> Result | Tensor       # the indexer loss: a scalar, differentiable in the case's tensors

Further members are optional. A probe that needs one the candidate lacks says "not tested" and why:

    select(case) -> Tensor                        # [B, T, K] selected entries, any order, -1 for an empty slot
    attend(case) -> Tensor                        # [B, T, H, D] the layer's attention output
    compress(case) -> Tensor                      # [B, E, D] entries pooled with overlap from values, gates and bias
    loss_over_ranks(cases) -> Result | Tensor     # the same loss when each rank holds only the heads of one of the cases
    with_coefficient(case, coefficient) -> Result | Tensor  # the loss times a coefficient; None and 0 turn it off
    name: str, dtype: torch.dtype, device: str    # default: the object's own name, float64, "cpu"
    denominator: "attended" | "visible"           # the convention of its sparse teacher; without it the audit finds out
    form: "csa" | "dsa"                           # what it attends, default "csa": see `random_case`
    divisor: one of `DIVISORS`                    # what it divides by where the case names no divisor, default "tokens"

A candidate raises `NotSupported` for a case that it has no way to express (packed documents, say): that too is "not tested".
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

LOSS_INPUTS = ("q", "kv", "entries", "sink", "q_index", "k_index", "weights")
Objective = Literal["sparse", "dense"]
Form = Literal["csa", "dsa"]  # compressed entries beside a window and a sink; or tokens alone (DeepSeek-V3.2)
DIVISORS = {
    "tokens": "real tokens",
    "candidates": "rows that have a candidate",
    "positions": "all positions, padding included",
    "one": "nothing: the sum over rows",
}
Denominator = Literal["attended", "visible"]
INDEX_INPUTS = ("q_index", "k_index", "weights")
ATTENTION_INPUTS = ("q", "kv", "entries", "sink")
TOKEN_INPUTS = ("q", "kv", "q_index", "weights", "values", "gates")  # fields with a row for every token
ENTRY_INPUTS = ("entries", "k_index")  # and for every entry


class NotSupported(Exception):
    """Raised by a candidate for a case that it has no way to express; its text is shown as the reason for "not tested"."""


class NoLoss(NotSupported):
    """Raised by a candidate that has no indexer loss at all, so that its indexer is not trained."""


@dataclass(frozen=True, eq=False)
class Case:
    """One small problem. B rows, T tokens, H heads, D width, E = floor(T / ratio) entries, I index heads, C index width.

    Key and value are one tensor, shared by all heads. Entry e of a document covers its tokens e*ratio .. e*ratio+ratio-1 and is
    visible from the last of them on; the entries of a row's documents lie next to each other, spare ones last. A window counts
    the query itself. Rows are plain (`cu_seqlens` and `mask` None), packed (`cu_seqlens`, B = 1) or padded (`mask`).
    """

    q: Tensor  # [B, T, H, D]
    kv: Tensor  # [B, T, D]
    entries: Tensor  # [B, E, D]
    sink: Tensor  # [H], a logit in the denominator, without scale and without value
    q_index: Tensor  # [B, T, I, C]
    k_index: Tensor  # [B, E, C]
    weights: Tensor  # [B, T, I], may be negative
    values: Tensor  # [B, T, 2 * D]: what compression pools; the first D columns serve the next block
    gates: Tensor  # [B, T, 2 * D]
    bias: Tensor  # [ratio, 2 * D]
    ratio: int
    window: int
    topk: int
    scale: float  # of the attention logits
    index_scale: float  # of the index scores: the temperature of the student
    objective: Objective = "sparse"  # candidates: the selected entries, or every visible one
    denominator: Denominator = "attended"  # compressed part of the sparse teacher's denominator
    cu_seqlens: Tensor | None = None  # [N + 1] int32, offsets of N packed documents, some of them empty
    mask: Tensor | None = None  # [B, T] bool, True on real tokens, which are one run per row
    weight: Tensor | None = None  # [B, T] weight of each row's KL; None: 1 on real tokens
    divisor: float | None = None  # what the weighted sum is divided by; None: the sum of the weights of real tokens
    chosen: Tensor | None = None  # [B, T, K] a selection to use as it is, -1 in empty slots; None: the topk greatest scores

    @property
    def documents(self) -> list[tuple[int, int, int]]:
        """(row, first token, length) of every document that has a token."""
        if self.cu_seqlens is not None:
            offsets = self.cu_seqlens.tolist()
            found = [(0, start, stop - start) for start, stop in itertools.pairwise(offsets)]
        elif self.mask is not None:
            found = [(row, real.index(True), sum(real)) for row, real in enumerate(self.mask.tolist()) if any(real)]
        else:
            found = [(row, 0, self.kv.shape[1]) for row in range(self.kv.shape[0])]
        return [document for document in found if document[2] > 0]

    @property
    def document_ids(self) -> Tensor:
        """[B, T] int64: number of the document that a token belongs to, -1 on padding."""
        ids = torch.full(self.kv.shape[:2], -1, dtype=torch.int64, device=self.kv.device)
        for number, (row, first, length) in enumerate(self.documents):
            ids[row, first : first + length] = number
        return ids

    def tensors(self) -> dict[str, Tensor]:
        """The fields that hold a tensor, by name."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: x for name, x in fields.items() if isinstance(x, Tensor)}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Case:
        """The same case with other tensors in the named fields."""
        return dataclasses.replace(self, **tensors)  # type: ignore[arg-type]

    def to(self, dtype: torch.dtype, device: str) -> Case:
        """The same case with its floating-point tensors in a dtype, and everything on a device."""
        tensors = self.tensors().items()
        return self.with_tensors({name: x.to(device, dtype if x.is_floating_point() else x.dtype) for name, x in tensors})

    def alone(self, row: int, first: int, length: int, entry: int) -> Case:
        """The tokens first .. first+length-1 of a row and the entries from `entry` on that they complete, as a row of their own."""
        entries = slice(entry, entry + length // self.ratio)
        parts = {name: getattr(self, name)[row : row + 1, first : first + length] for name in TOKEN_INPUTS}
        parts |= {name: getattr(self, name)[row : row + 1, entries] for name in ENTRY_INPUTS}
        return dataclasses.replace(self.with_tensors(parts), cu_seqlens=None, mask=None)

    def heads(self, start: int, stop: int) -> Case:
        """What a rank sees that holds the heads start .. stop-1; the indexer is not sharded."""
        return dataclasses.replace(self, q=self.q[:, :, start:stop], sink=self.sink[start:stop])


class Result(NamedTuple):
    """A candidate's answer. Only the loss is needed; what else is given is checked as well."""

    loss: Tensor  # scalar, in nats
    kl: Tensor | None = None  # [B, T]
    teacher: Tensor | None = None  # [B, T, E]: probability of every entry, 0 where it is no candidate
    indices: Tensor | None = None  # [B, T, K], any order, -1 for an empty slot


@dataclass(frozen=True)
class Size:
    """How large the cases of those probes are that compare whole losses; probes of single positions keep their own.

    Raises:
        ValueError: a number below 1.
    """

    times: int = 1  # factor of tokens, document lengths and topk
    heads: int = 0  # 0: what the probe asks for
    window: int = 0
    width: int = 4
    index_heads: int = 8  # with few index heads ReLU makes ties of zeros
    index_width: int = 4

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not isinstance(value, int) or value < (0 if name in ("heads", "window") else 1):
                raise ValueError(f"{name} of a size must be a whole number of at least 1; got {value!r}")


SIZES = {"small": Size(), "real": Size(times=16, heads=32, window=64, width=128, index_heads=32, index_width=64)}


def random_case(
    rows: int = 1,
    tokens: int = 16,
    *,
    heads: int = 3,
    ratio: int = 2,
    window: int = 3,
    topk: int = 2,
    lengths: Sequence[int] = (),
    seed: int = 0,
    size: Size | None = None,
    form: Form = "csa",
) -> Case:
    """A case whose numbers are exact in bfloat16 too, so that every precision starts from the same inputs.

    `lengths` of documents, 0 allowed, make one packed row of their sum. A `size` multiplies tokens, lengths and topk, and sets the rest.
    In the form "dsa" every token is an entry of its own and there is nothing else: ratio 1, window 0, no sink.
    """
    if form == "dsa":
        case = _random_case(rows, tokens, heads, 1, 0, topk, tuple(lengths), seed, dataclasses.replace(size or Size(), window=0))
        return _without_sink(case)
    return _random_case(rows, tokens, heads, ratio, window, topk, tuple(lengths), seed, size or Size())


@cache
def _without_sink(case: Case) -> Case:
    return dataclasses.replace(case, sink=torch.full_like(case.sink, -math.inf))


@cache  # probes ask for the same few cases; nobody writes into one
def _random_case(
    rows: int, tokens: int, heads: int, ratio: int, window: int, topk: int, lengths: tuple[int, ...], seed: int, size: Size
) -> Case:
    tokens, topk, lengths = tokens * size.times, topk * size.times, tuple(length * size.times for length in lengths)
    if lengths:
        rows, tokens = 1, sum(lengths)
    heads, window = size.heads or heads, size.window or window
    generator = torch.Generator().manual_seed(seed)
    width, index_heads, index_width = size.width, size.index_heads, size.index_width

    def grid(*shape: int) -> Tensor:
        return torch.randint(-32, 33, shape, generator=generator).double() / 16

    count = tokens // ratio
    return Case(
        q=grid(rows, tokens, heads, width),
        kv=grid(rows, tokens, width),
        entries=grid(rows, count, width),
        sink=grid(heads),
        q_index=grid(rows, tokens, index_heads, index_width),
        k_index=grid(rows, count, index_width),
        weights=grid(rows, tokens, index_heads),
        values=grid(rows, tokens, 2 * width),
        gates=grid(rows, tokens, 2 * width),
        bias=grid(ratio, 2 * width),
        ratio=ratio,
        window=window,
        topk=topk,
        scale=width**-0.5,
        index_scale=index_width**-0.5 * index_heads**-0.5,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int() if lengths else None,
    )
