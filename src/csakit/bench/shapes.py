"""Operations and shapes, and how much useful work each is. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass

OPERATIONS = {
    "attend": "attention forward",
    "attend-teacher": "attention forward, and the teacher",
    "attend-backward": "attention forward, the teacher, and backward",
    "select": "index scores and their greatest entries",
    "distill": "the sparse objective of a given selection, and backward to the indexer's q, k and weights",
    "dense": "the dense objective over every visible entry, and backward to the indexer's q, k and weights",
    "sliding": "a layer with V4-Flash's proportions, forward: window only",
    "csa": "the same: window and selected entries",
    "hca": "the same: window and every heavily compressed entry",
    "sliding-backward": "forward and backward of such a layer",
    "csa-backward": "the same; where the provider can, the indexer's sparse objective with it",
    "hca-backward": "the same",
    "step": "one optimizer step of the sparse stage of `csakit train --preset tiny`",
}
ATTENTION = tuple(name for name in OPERATIONS if name.startswith("attend"))
KERNELS = (*ATTENTION, "select", "distill", "dense")
LAYERS = tuple(f"{kind}{pass_}" for pass_ in ("", "-backward") for kind in ("sliding", "csa", "hca"))
HCA_RATIO = 128
SELECTIONS = ("uniform", "clustered")
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Shape:
    """One row of T tokens: attention of H heads of width D over a window and K of T // ratio entries; an indexer of I heads of width C."""

    tokens: int
    heads: int
    width: int
    topk: int
    window: int = 128
    ratio: int = 4
    index_heads: int = 64
    index_width: int = 128

    def __str__(self) -> str:
        return f"{self.tokens}x{self.heads}x{self.width}x{self.topk}"

    @property
    def entries(self) -> int:
        return self.tokens // self.ratio

    @property
    def window_pairs(self) -> int:
        """(query, token) pairs inside the window."""
        return sum(min(position + 1, self.window) for position in range(self.tokens))

    @property
    def visible_pairs(self) -> int:
        """(query, entry) pairs where the query sees the entry."""
        return sum((position + 1) // self.ratio for position in range(self.tokens))

    @property
    def selected_pairs(self) -> int:
        """(query, entry) pairs that are attended: at most K per query."""
        return sum(min((position + 1) // self.ratio, self.topk) for position in range(self.tokens))

    # a layer around the attention, in V4-Flash's proportions: at 64 heads x 512 it is V4-Flash's

    @property
    def hidden(self) -> int:
        return self.heads * self.width // 8

    @property
    def rank(self) -> int:
        """Of the query latent and of each group of the output projection."""
        return max(1, self.hidden // 4)

    @property
    def groups(self) -> int:
        return min(8, self.heads)


@dataclass(frozen=True)
class Case:
    """What is measured: an operation at a shape, which entries the queries attend, the dtype of the inputs, the threads of torch."""

    operation: str
    shape: Shape
    selection: str = "uniform"
    dtype: str = "float32"
    threads: int = 1

    @property
    def kind(self) -> str:
        """Of a layer: sliding, csa or hca."""
        return self.operation.removesuffix("-backward")

    @property
    def backward(self) -> bool:
        return self.operation.endswith("-backward")

    def __str__(self) -> str:
        shape = self.shape
        attention, index = f"{shape.heads} heads x {shape.width}", f"{shape.index_heads} index heads x {shape.index_width}"
        if self.operation in ATTENTION:
            what = f"{attention}, K {shape.topk}, window {shape.window}, {self.selection} selection"
        elif self.operation in LAYERS:
            what = f"hidden {shape.hidden}, {attention}, K {shape.topk}, window {shape.window}"
        elif self.operation == "dense":
            what = f"{index}, {attention}"
        else:
            what = f"{index}, K {shape.topk}" if self.operation in KERNELS else f"{attention}, K {shape.topk}, window {shape.window}"
        threads = "" if self.threads == 1 else f", {self.threads} threads"
        return f"{self.operation}: {shape.tokens} tokens, {what}, {self.dtype}{threads}"


def useful_flops(case: Case) -> int | None:
    """Multiplications and additions of the matrix products that the mathematics needs, over valid (query, key) pairs only.

    Attention: 4 H D per pair forward and 10 H D backward (logits once more, and four products); the teacher adds none. Scoring: 2 I C per
    visible pair. Sparse objective: 6 I C per selected pair (scores and two gradients). Dense: 6 I C + 2 H D per visible pair. Layers: their
    projections, once forward and twice backward, and attention and indexer as above. Of a whole step nobody has counted them: None.
    """
    shape = case.shape
    attention, index = shape.heads * shape.width, shape.index_heads * shape.index_width
    if case.operation == "step":
        return None
    if case.operation in LAYERS:
        return _layer_flops(case)
    if case.operation in ATTENTION:
        factor = 14 if case.operation == "attend-backward" else 4
        return factor * attention * (shape.window_pairs + shape.selected_pairs)
    if case.operation == "select":
        return 2 * index * shape.visible_pairs
    if case.operation == "distill":
        return 6 * index * shape.selected_pairs
    return (6 * index + 2 * attention) * shape.visible_pairs


def _layer_flops(case: Case) -> int:
    """Of a layer: 2 T per weight, three times that with backward; the indexer's projections feed its objective alone."""
    shape = case.shape
    attention, index = shape.heads * shape.width, shape.index_heads * shape.index_width
    weights = shape.hidden * (shape.rank + shape.width) + 2 * shape.rank * attention + shape.groups * shape.rank * shape.hidden
    pairs = shape.window_pairs
    scoring = 0
    if case.kind == "csa":
        weights += 4 * shape.hidden * shape.width
        weights += index * shape.rank + shape.hidden * (shape.index_heads + 4 * shape.index_width)
        pairs += shape.selected_pairs
        scoring = 2 * index * shape.visible_pairs + (6 * index * shape.selected_pairs if case.backward else 0)
    if case.kind == "hca":
        weights += 2 * shape.hidden * shape.width
        pairs += sum((position + 1) // HCA_RATIO for position in range(shape.tokens))
    return 2 * shape.tokens * weights * (3 if case.backward else 1) + (14 if case.backward else 4) * attention * pairs + scoring
