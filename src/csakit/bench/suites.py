"""Suites: which cases are measured together, and against whom. Nothing here needs torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from .shapes import ATTENTION, KERNELS, LAYERS, SELECTIONS, Case, Shape


def word(case: Case, name: str) -> str:
    """What a case has for operation, dtype or threads."""
    value = getattr(case, name)
    return value if name != "threads" else "1 thread" if value == 1 else f"{value} threads"


@dataclass(frozen=True)
class Contest:
    """Cases whose providers are all measured in turns, in the same rounds.

    Attributes:
        cases: one, or several that differ in one respect (teacher, threads, dtype): then each provider is also compared with itself at the
            first of them.
        own: only csakit's backends take part.
    """

    cases: tuple[Case, ...]
    own: bool = False

    @property
    def difference(self) -> tuple[str, ...]:
        """What tells the cases apart, a word for each."""
        first = self.cases[0]
        for name in ("operation", "dtype", "threads"):
            if any(getattr(case, name) != getattr(first, name) for case in self.cases):
                return tuple(word(case, name) for case in self.cases)
        return tuple(str(case) for case in self.cases)


@dataclass(frozen=True)
class Suite:
    """A named list of contests.

    Attributes:
        memory: whether peak memory is measured, in a process for each provider and case.
        repeats: rounds, unless the caller says otherwise.
        starts: whether the time of `import csakit` and of the first call in a fresh process are measured, at the first case.
        parts: whether a profile says where the time goes.
    """

    about: str
    contests: tuple[Contest, ...]
    memory: bool = True
    repeats: int = 5
    starts: bool = False
    parts: bool = False

    @property
    def cases(self) -> tuple[Case, ...]:
        return tuple(case for contest in self.contests for case in contest.cases)


def alone(
    operations: tuple[str, ...], shapes: tuple[Shape, ...], selections: tuple[str, ...] = ("uniform",), dtype: str = "float32"
) -> tuple[Contest, ...]:
    """Every operation at every shape as a contest of its own; attention also with every kind of selection."""
    return tuple(
        Contest((Case(operation, shape, selection, dtype),))
        for shape in shapes
        for operation in operations
        for selection in (selections if operation in ATTENTION else ("uniform",))
    )


def against(case: Case, *changes: dict[str, object]) -> Contest:
    """csakit's backends at a case, and at the same case with changes."""
    return Contest((case, *(replace(case, **change) for change in changes)), own=True)  # type: ignore[arg-type]


SMOKE = Shape(96, 4, 32, 8, window=16, index_heads=4, index_width=16)
SMALL = Shape(8, 2, 16, 2, window=4, index_heads=2, index_width=16)
# V4-Flash at 1/16 of both widths: where scoring overtakes attention stays where it is
GROWTH = Shape(1024, 16, 128, 512, index_heads=8, index_width=64)
FLASH = Shape(4096, 64, 512, 512)
PRO = Shape(4096, 128, 512, 1024)
MODERATE, LONG = Shape(2048, 16, 128, 256), Shape(8192, 8, 128, 128)
TINY = Shape(1024, 4, 32, 16, window=32, index_heads=16, index_width=32)  # what a step of the preset sees: two rows of 512 tokens

INDEXER = ("select", "distill")
LAYER = ("attend-teacher", "attend-backward", *INDEXER)

SUITES = {
    "smoke": Suite(
        "every kernel operation at a tiny size: does it all run and agree? seconds",
        alone(KERNELS, (SMOKE,), SELECTIONS),
        memory=False,
    ),
    "attention": Suite(
        "attention at two moderate sizes, uniform and clustered selections",
        alone(ATTENTION, (MODERATE, LONG), SELECTIONS),
    ),
    "indexer": Suite(
        "scoring and both objectives, 64 x 128 index heads",
        alone((*INDEXER, "dense"), (MODERATE,)) + alone(INDEXER, (replace(MODERATE, tokens=4096, topk=512),)),
    ),
    "targets": Suite(
        "what the CPU backend is held to; the goals are listed below the table",
        alone(("attend-backward",), (MODERATE, replace(MODERATE, tokens=4096), replace(FLASH, tokens=2048), Shape(8192, 64, 128, 512)))
        + alone(INDEXER, (replace(MODERATE, tokens=4096, topk=512),)),
    ),
    "variants": Suite(
        "csakit against itself: with and without the teacher, one and two threads, float32 and bfloat16",
        (
            against(Case("attend", MODERATE), {"operation": "attend-teacher"}),
            against(Case("attend", replace(FLASH, tokens=1024)), {"operation": "attend-teacher"}),
            *(
                against(Case("attend-backward", shape), *changes)
                for changes in (({"threads": 2},), ({"dtype": "bfloat16"},))
                for shape in (MODERATE, replace(FLASH, tokens=1024))
            ),
            against(Case("select", replace(MODERATE, tokens=4096, topk=512)), {"threads": 2}),
            against(Case("select", replace(MODERATE, tokens=4096, topk=512)), {"dtype": "bfloat16"}),
        ),
        memory=False,
        repeats=9,
    ),
    "allocator": Suite(
        "one case, to run under several settings of the allocator with the same --out and --append",
        alone(("attend-backward",), (MODERATE,)),
        memory=False,
    ),
    "v4-flash": Suite("kernels at DeepSeek-V4-Flash's widths", alone(LAYER, (replace(FLASH, tokens=2048), FLASH))),
    "v4-pro": Suite("kernels at DeepSeek-V4-Pro's widths", alone(LAYER, (replace(PRO, tokens=2048), PRO))),
    "public": Suite(
        "shapes of public kernel reports (bfloat16; they count the window into K: 640 and 1152)",
        alone(
            ("attend", "attend-backward"),
            (FLASH, replace(FLASH, tokens=8192), replace(FLASH, tokens=32768), PRO, replace(PRO, tokens=32768)),
            dtype="bfloat16",
        ),
    ),
    "growth": Suite(
        "1K to 64K tokens at fixed K, V4-Flash proportions: attention is linear, scoring quadratic; bound it with --max-tokens",
        alone(("attend", "select"), tuple(replace(GROWTH, tokens=1024 << power) for power in range(7))),
        repeats=3,
    ),
    "layers": Suite(
        "one V4-Flash-width layer of each kind, 1024 and 4096 tokens: csakit.nn, stock Transformers, and stock with csakit installed",
        alone(LAYERS, (replace(FLASH, tokens=1024), FLASH)),
        repeats=3,
    ),
    "step": Suite(
        "where the time of a training step goes: the tiny preset, and one V4-Flash-width layer",
        alone(("step",), (TINY,)) + alone(("csa-backward",), (replace(FLASH, tokens=1024),)),
        memory=False,
        parts=True,
    ),
    "small": Suite(
        "what a call costs that has next to nothing to do, the first call of a process, and import",
        alone((*ATTENTION, "select"), (SMALL,)),
        memory=False,
        repeats=100,
        starts=True,
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
