"""Operations, shapes and suites, and how much useful work each is. Nothing here needs torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

OPERATIONS = {
    "attend": "attention forward",
    "attend-teacher": "attention forward, and the teacher",
    "attend-backward": "attention forward, the teacher, and backward",
    "select": "index scores and their greatest entries",
    "distill": "the sparse objective of a given selection, and backward to the indexer's q, k and weights",
    "dense": "the dense objective over every visible entry, and backward to the indexer's q, k and weights",
}
ATTENTION = tuple(name for name in OPERATIONS if name.startswith("attend"))
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


@dataclass(frozen=True)
class Case:
    """What is measured: an operation at a shape, which entries the queries attend, and the dtype of the inputs."""

    operation: str
    shape: Shape
    selection: str = "uniform"
    dtype: str = "float32"

    def __str__(self) -> str:
        shape = self.shape
        attention, index = f"{shape.heads} heads x {shape.width}", f"{shape.index_heads} index heads x {shape.index_width}"
        if self.operation in ATTENTION:
            what = f"{attention}, K {shape.topk}, window {shape.window}, {self.selection} selection"
        else:
            what = f"{index}, {attention}" if self.operation == "dense" else f"{index}, K {shape.topk}"
        return f"{self.operation}: {shape.tokens} tokens, {what}, {self.dtype}"


def useful_flops(case: Case) -> int:
    """Multiplications and additions of the matrix products that the mathematics needs, over valid (query, key) pairs only.

    Attention: 4 H D per pair forward and 10 H D backward (logits once more, and four products); the teacher adds none. Scoring: 2 I C per
    visible pair. Sparse objective: 6 I C per selected pair (scores and two gradients). Dense: 6 I C + 2 H D per visible pair.
    """
    shape = case.shape
    attention, index = shape.heads * shape.width, shape.index_heads * shape.index_width
    if case.operation in ATTENTION:
        factor = 14 if case.operation == "attend-backward" else 4
        return factor * attention * (shape.window_pairs + shape.selected_pairs)
    if case.operation == "select":
        return 2 * index * shape.visible_pairs
    if case.operation == "distill":
        return 6 * index * shape.selected_pairs
    return (6 * index + 2 * attention) * shape.visible_pairs


@dataclass(frozen=True)
class Suite:
    """A named list of cases."""

    about: str
    cases: tuple[Case, ...]
    memory: bool = True  # whether peak memory is measured, in a process for each provider and case


def cases(
    operations: tuple[str, ...], shapes: tuple[Shape, ...], selections: tuple[str, ...] = ("uniform",), dtype: str = "float32"
) -> tuple[Case, ...]:
    """Every operation at every shape; attention also with every kind of selection."""
    return tuple(
        Case(operation, shape, selection, dtype)
        for shape in shapes
        for operation in operations
        for selection in (selections if operation in ATTENTION else ("uniform",))
    )


SMOKE = Shape(96, 4, 32, 8, window=16, index_heads=4, index_width=16)
GROWTH = Shape(
    1024, 16, 128, 512, index_heads=8, index_width=64
)  # V4-Flash at 1/16 of both widths: where scoring overtakes stays where it is
FLASH = Shape(4096, 64, 512, 512)
PRO = Shape(4096, 128, 512, 1024)

INDEXER = ("select", "distill")
LAYER = ("attend-teacher", "attend-backward", *INDEXER)

SUITES = {
    "smoke": Suite(
        "every operation at a tiny size: does it all run and agree? seconds",
        cases(tuple(OPERATIONS), (SMOKE,), SELECTIONS),
        memory=False,
    ),
    "attention": Suite(
        "attention at two moderate sizes, uniform and clustered selections",
        cases(ATTENTION, (Shape(2048, 16, 128, 256), Shape(8192, 8, 128, 128)), SELECTIONS),
    ),
    "indexer": Suite(
        "scoring and both objectives, 64 x 128 index heads",
        cases((*INDEXER, "dense"), (Shape(2048, 16, 128, 256),)) + cases(INDEXER, (Shape(4096, 16, 128, 512),)),
    ),
    "targets": Suite(
        "what the CPU backend is held to",
        cases(ATTENTION, (Shape(2048, 16, 128, 256),))
        + cases(("attend-backward",), (Shape(4096, 16, 128, 256), Shape(2048, 64, 512, 512), Shape(8192, 64, 128, 512)))
        + cases(INDEXER, (Shape(4096, 16, 128, 512),)),
    ),
    "v4-flash": Suite("DeepSeek-V4-Flash widths", cases(LAYER, (replace(FLASH, tokens=2048), FLASH))),
    "v4-pro": Suite("DeepSeek-V4-Pro widths", cases(LAYER, (replace(PRO, tokens=2048), PRO))),
    "public": Suite(
        "shapes of public kernel reports (bfloat16; they count the window into K: 640 and 1152)",
        cases(
            ("attend", "attend-backward"),
            (FLASH, replace(FLASH, tokens=8192), replace(FLASH, tokens=32768), PRO, replace(PRO, tokens=32768)),
            dtype="bfloat16",
        ),
    ),
    "growth": Suite(
        "1K to 64K tokens at fixed K, V4-Flash proportions: attention is linear, scoring quadratic; bound it with --max-tokens",
        cases(("attend", "select"), tuple(replace(GROWTH, tokens=1024 << power) for power in range(7))),
    ),
}


def parse_shape(text: str) -> Shape:
    """The shape of a text like `2048x16x128x256` (tokens, heads, width, K), with index heads and width behind a colon: `...:64x128`.

    Raises:
        ValueError: another text, or a size of 0.
    """
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)(?::(\d+)x(\d+))?", text)
    if found is None:
        form = "TOKENSxHEADSxWIDTHxK or TOKENSxHEADSxWIDTHxK:INDEX_HEADSxINDEX_WIDTH, like 2048x16x128x256"
        raise ValueError(f"a shape must read {form}; got {text!r}")
    sizes = [int(size) for size in found.groups() if size is not None]
    if 0 in sizes:
        raise ValueError(f"the sizes of a shape must be at least 1; got {text!r}")
    shape = Shape(*sizes[:4])
    return replace(shape, index_heads=sizes[4], index_width=sizes[5]) if len(sizes) == 6 else shape
