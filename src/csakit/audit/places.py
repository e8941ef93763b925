"""Where in the code to look: the functions that ran for one loss, and the lines in them that a broken invariant points at."""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from .case import random_case
from .subject import Subject

_AUDIT = Path(__file__).parent
_PLAIN = str(_AUDIT / "candidates" / "plain.py")  # the known mistakes are code under audit too
_TORCH, _PYTHON = str(Path(torch.__file__).parent), sysconfig.get_path("stdlib")

LINES = 5  # of each kind; who looks will find the others there

# What to look for in the code when one of the probes of a group fails.
_SIGNS: tuple[tuple[frozenset[str], str], ...] = (
    (
        frozenset({"window", "sink", "worked-teacher", "shift-invariance", "single-head-control", "underflow", "dense-is-all-selected"}),
        r"softmax\(|logsumexp\(|\.exp\(|logaddexp\(",
    ),
    (frozenset({"extreme-scores"}), r"\blog\(|\.log\(|1e-\d|clamp|\beps\b"),
    (frozenset({"tie-rule", "selection", "top-k-below-visible"}), r"topk\(|argsort\(|\.sort\("),
    (frozenset({"visibility", "causality", "window-width", "packed-leak"}), r"//|triu\(|tril\(|arange\("),
    (frozenset({"row-divisor", "loss-scale", "row-weights"}), r"\.mean\(|divisor|/ *(max|float|\w*count|\w*num)"),
    (frozenset({"gradient-isolation", "indexer-trains"}), r"detach\(|no_grad"),
)


@dataclass(frozen=True)
class Place:
    """A line of code: of a function that ran, or one in it that a failed probe points at."""

    file: str
    line: int
    function: str
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}" + (f": {self.code}" if self.code else "")


def places(subject: Subject, failed: Iterable[str]) -> tuple[Place, ...]:
    """Lines that the failed probes point at, in the functions that ran for one loss; the functions themselves where there are none."""
    ran, broken, found = _functions(subject), set(failed), []
    if broken & {"window", "sink"}:
        broken -= {"window-width"}  # that follows: a window that is not there has no width
    for names, sign in _SIGNS:
        if names & broken:
            found += [place for code in ran for place in _lines(code, re.compile(sign))][:LINES]
    return tuple(found or [Place(code.co_filename, code.co_firstlineno, _name(code)) for code in ran[:LINES]])


def is_torch(file: str) -> bool:
    """Whether a file belongs to PyTorch."""
    return file.startswith(_TORCH)


def _functions(subject: Subject) -> list[CodeType]:
    """Code of the candidate and of what it calls, outside PyTorch, Python and the audit, in the order of first calls."""
    ran: dict[CodeType, None] = {}

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and _is_candidates(frame.f_code.co_filename):
            ran.setdefault(frame.f_code)

    if sys.getprofile() is not None:  # somebody is profiling the audit: leave that alone
        return []
    sys.setprofile(watch)
    try:
        subject.ask(random_case(form=subject.form))
    except Exception:  # the probes have reported it
        pass
    finally:
        sys.setprofile(None)
    return [code for code in ran if not code.co_name.startswith("<")]


def _is_candidates(file: str) -> bool:
    if file == _PLAIN:
        return True
    python = file.startswith(_PYTHON) and "-packages" not in file  # installed packages may lie below the standard library
    return not (python or file.startswith(("<", _TORCH, str(_AUDIT))))


def _lines(code: CodeType, wanted: re.Pattern[str]) -> list[Place]:
    lines = _source(code.co_filename)
    numbers = sorted({line for _, _, line in code.co_lines() if line})
    shown = [(number, lines[number - 1].strip()) for number in numbers if number <= len(lines)]
    return [
        Place(code.co_filename, number, _name(code), text)
        for number, text in shown
        if not text.startswith(("#", '"', "def ", "@")) and wanted.search(text)
    ]


def _name(code: CodeType) -> str:
    return str(getattr(code, "co_qualname", code.co_name))


@cache
def _source(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
