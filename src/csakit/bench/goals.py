"""What the CPU backend is held to, and what the rows of a run say of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from .records import Row
from .shapes import Shape
from .suites import FLASH, MODERATE, SMALL

OWN = ("csakit-cpu-native", "csakit-cpu")  # whose rows are judged: the first that is there
WIDE = replace(FLASH, tokens=1024)
Value = Callable[[Sequence[Row]], "float | None"]


@dataclass(frozen=True)
class Goal:
    """A bound on a figure.

    Attributes:
        text: what is asked for.
        value: the figure among the rows of one provider, None where it was not measured.
        bound: and whether it is the least or the most.
    """

    text: str
    value: Value
    bound: float
    least: bool = True
    unit: str = "x"

    def line(self, value: float) -> str:
        """The verdict, for people."""
        held = value >= self.bound if self.least else value <= self.bound
        shown, bound = (f"{x:.3g}{' ' if self.unit != 'x' else ''}{self.unit}" for x in (value, self.bound))
        return f"{'held' if held else 'missed':6}  {self.text}: {shown}, {'at least' if self.least else 'at most'} {bound}"


def lines(rows: Sequence[Row]) -> list[str]:
    """The verdict on every goal whose figures are among the rows."""
    for provider in OWN:
        mine = [row for row in rows if row.provider == provider and row.value is not None]
        if mine:
            others = [row for row in rows if row.provider == "eager"]
            found = [(goal, goal.value([*mine, *others])) for goal in GOALS]
            return [goal.line(value) for goal, value in found if value is not None]
    return []


def _find(rows: Iterable[Row], figure: str, operation: str, shape: Shape, baseline: str = "", **fields: object) -> float | None:
    for row in rows:
        if (row.figure, row.operation, row.baseline, row.case.shape) == (figure, operation, baseline, shape) and all(
            getattr(row, name) == value for name, value in fields.items()
        ):
            return row.value
    return None


def _speedup(operation: str, shape: Shape, baseline: str) -> Value:
    def value(rows: Sequence[Row]) -> float | None:
        return _find((row for row in rows if row.provider in OWN), "speedup", operation, shape, baseline)

    return value


def _peak(operation: str, shape: Shape) -> Value:
    return lambda rows: _find((row for row in rows if row.provider in OWN), "of peak", operation, shape, dtype="float32", threads=1)


def _against(operation: str, shape: Shape, baseline: str, **fields: object) -> Value:
    return lambda rows: _find((row for row in rows if row.provider in OWN), "against", operation, shape, baseline, **fields)


def _teacher(shape: Shape) -> Value:
    """What the teacher adds, in percent."""

    def value(rows: Sequence[Row]) -> float | None:
        faster = _against("attend-teacher", shape, "attend")(rows)
        return None if faster is None else 100 * (1 / faster - 1)

    return value


def _memory_share(operation: str, shape: Shape) -> Value:
    """Of the eager author's memory."""

    def value(rows: Sequence[Row]) -> float | None:
        own, eager = (
            _find((row for row in rows if (row.provider == "eager") == theirs), "memory peak", operation, shape) for theirs in (False, True)
        )
        return None if own is None or not eager else own / eager

    return value


def _microseconds(operation: str, shape: Shape) -> Value:
    def value(rows: Sequence[Row]) -> float | None:
        wall = _find((row for row in rows if row.provider in OWN), "wall", operation, shape)
        return None if wall is None else 1e3 * wall

    return value


def _most_memory(rows: Sequence[Row]) -> float | None:
    return max((row.value for row in rows if row.provider in OWN and row.figure == "memory extra" and row.value is not None), default=None)


_LONGER = replace(MODERATE, tokens=4096)
_FLASH = replace(FLASH, tokens=2048)
_INDEX = replace(MODERATE, tokens=4096, topk=512)

GOALS = (
    Goal("2048 x 16 x 128, K 256, with teacher and backward, over Megatron-LM", _speedup("attend-backward", MODERATE, "megatron"), 18),
    Goal("2048 x 16 x 128, K 256, the same over the eager author", _speedup("attend-backward", MODERATE, "eager"), 7),
    Goal("4096 x 16 x 128, K 256, with teacher and backward, over Megatron-LM", _speedup("attend-backward", _LONGER, "megatron"), 25),
    Goal("4096 x 16 x 128, K 256, the same over the eager author", _speedup("attend-backward", _LONGER, "eager"), 6),
    Goal("2048 x 64 x 512, K 512, with teacher and backward, over the eager author", _speedup("attend-backward", _FLASH, "eager"), 4),
    Goal("2048 x 64 x 512, K 512, the same, of the matrix-product peak", _peak("attend-backward", _FLASH), 75, unit="%"),
    Goal(
        "8192 x 64 x 128, K 512, with teacher and backward, over the torch path",
        _speedup("attend-backward", Shape(8192, 64, 128, 512), "csakit-cpu-torch"),
        1.5,
    ),
    Goal("the teacher on top of attention, 2048 x 16 x 128", _teacher(MODERATE), 3, least=False, unit="%"),
    Goal("the teacher on top of attention, 1024 x 64 x 512", _teacher(WIDE), 3, least=False, unit="%"),
    Goal("select, 64 x 128 index heads, 4096 tokens, K 512, over the eager author", _speedup("select", _INDEX, "eager"), 5),
    Goal("select, the same, share of the eager author's memory", _memory_share("select", _INDEX), 1 / 8, least=False, unit="of it"),
    Goal("distill with backward, the same shape, over the eager author", _speedup("distill", _INDEX, "eager"), 5),
    Goal("memory beyond inputs, outputs and gradients, all cases", _most_memory, 64, least=False, unit="MiB"),
    Goal("two threads over one, 2048 x 16 x 128", _against("attend-backward", MODERATE, "1 thread", threads=2), 1.7),
    Goal("two threads over one, 1024 x 64 x 512", _against("attend-backward", WIDE, "1 thread", threads=2), 1.7),
    Goal("two threads over one, select", _against("select", _INDEX, "1 thread", threads=2), 1.7),
    Goal("bfloat16 over float32, 2048 x 16 x 128", _against("attend-backward", MODERATE, "float32", dtype="bfloat16"), 1),
    Goal(
        "bfloat16 over float32, 1024 x 64 x 512 (meant for AVX512-BF16)",
        _against("attend-backward", WIDE, "float32", dtype="bfloat16"),
        1.6,
    ),
    Goal("bfloat16 over float32, select", _against("select", _INDEX, "float32", dtype="bfloat16"), 1),
    Goal("a call of attend that has next to nothing to do", _microseconds("attend", SMALL), 100, least=False, unit="us"),
)
