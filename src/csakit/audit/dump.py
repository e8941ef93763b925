"""A safetensors file that another program has written, as a case with what that program computed for it.

docs/audit_tensors.md lists the names, shapes and metadata.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .case import Case, Denominator, Objective
from .picture import with_scores
from .subject import TOLERANCES

SHAPES = {
    "q": "B T H D", "kv": "B T D", "entries": "B E D", "sink": "H", "indices": "B T K", "scores": "B T *", "mask": "B T", "weight": "B T",
    "cu_seqlens": "*", "loss": "", "kl": "B T", "teacher": "B T *", "d_scores": "B T *", "lse": "B T H", "out": "B T H D",
}  # fmt: skip
ANSWERS = ("loss", "kl", "teacher", "d_scores", "lse", "out")
WORDS = {
    "layout": ("bshd", "sbhd", "thd"),
    "objective": ("sparse", "dense"),
    "denominator": ("attended", "visible"),
    "lse_base": ("e", "2"),
    "lse_sink": ("in", "out"),
}
NUMBERS = ("ratio", "window", "scale", "divisor", "coefficient")
MOST = 2**24  # attention logits: what a small machine holds a few of


@dataclass(frozen=True, eq=False)
class Dump:
    """What a file holds: the case in float64, the answers that were found in it, and how exact they can be."""

    name: str
    case: Case
    answers: Mapping[str, Tensor]  # float64; teacher and d_scores over all entries
    lse_base: str | None
    lse_sink: str | None
    denominator: Denominator | None  # as declared
    all_scores: bool  # scores of every entry, not of the selected ones alone
    tolerance: float


def read(path: Path) -> Dump:
    """The dump in a file.

    Raises:
        ValueError: the file cannot be read, a tensor is missing, of another shape or kind, metadata is missing or no such word.
    """
    tensors, metadata = _load(path)
    try:
        return _dump(path, tensors, metadata)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ValueError("--tensors needs safetensors: pip install csakit[train]") from error
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read as a safetensors file: {error}") from error


def _dump(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> Dump:
    _check_names(tensors, metadata)
    numbers = {name: _number(name, metadata[name]) for name in NUMBERS if name in metadata}
    words = {name: _word(name, metadata[name]) for name in WORDS if name in metadata}
    x = _by_row(tensors, words.get("layout", "bshd"))
    _check_shapes(x)
    case = _case(x, numbers, words)
    scores = x.get("scores")
    all_scores = scores is not None and not _in_slots(scores, x)
    if scores is not None:
        case = with_scores(case, _over_entries(scores.double(), x, -math.inf))
    answers = {name: x[name].double() for name in ANSWERS if name in x}
    for name in ("teacher", "d_scores"):
        if name in answers:
            answers[name] = _over_entries(answers[name], x, 0.0)
    if "coefficient" in numbers:
        for name in ("loss", "d_scores"):
            if name in answers:
                answers[name] = answers[name] / numbers["coefficient"]
    precise = [TOLERANCES[y.dtype] for name, y in tensors.items() if name != "loss" and y.dtype in TOLERANCES]
    return Dump(
        metadata.get("name", path.name), case, answers, words.get("lse_base"), words.get("lse_sink"),
        words.get("denominator"), all_scores, max(1e-6, *precise),  # type: ignore[arg-type]
    )  # fmt: skip


def _check_names(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    unknown = [name for name in tensors if name not in SHAPES]
    if unknown:
        raise ValueError(f"tensors must be named {', '.join(SHAPES)}; got {', '.join(unknown)}")
    missing = [name for name in ("q", "kv", "entries") if name not in tensors]
    if missing:
        raise ValueError(f"tensors q, kv and entries are needed; {', '.join(missing)} is missing")
    missing = [name for name in ("ratio", "window") if name not in metadata]
    if missing:
        raise ValueError(f"metadata must hold ratio and window, as strings; {', '.join(missing)} is missing")
    if not any(name in tensors for name in ANSWERS):
        raise ValueError(f"there is nothing to judge: at least one of {', '.join(ANSWERS)} is needed")
    if any(name in tensors for name in ("loss", "kl", "d_scores")) and "scores" not in tensors:
        raise ValueError("scores are needed to judge loss, kl or d_scores: the index scores of the selected entries, or of all")
    if "mask" in tensors and "cu_seqlens" in tensors:
        raise ValueError("mask and cu_seqlens exclude each other: one says where documents are")
    known = {*NUMBERS, *WORDS, "name", "format"}
    unknown = [name for name in metadata if name not in known]
    if unknown:
        raise ValueError(f"metadata must be among {', '.join(sorted(known))}; got {', '.join(unknown)}")


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    whole = name in ("ratio", "window")
    least = 1 if name == "ratio" else 0
    if not math.isfinite(value) or value < least or (whole and value != int(value)) or (not whole and value == 0):
        raise ValueError(f"metadata {name} must be a {'whole ' if whole else 'positive '}number; got {text!r}")
    return value


def _word(name: str, text: str) -> str:
    if text not in WORDS[name]:
        raise ValueError(f"metadata {name} must be one of {', '.join(WORDS[name])}; got {text!r}")
    return text


def _by_row(tensors: dict[str, Tensor], layout: str) -> dict[str, Tensor]:
    """Every tensor with rows first: thd has no axis of rows, sbhd has the sequence first in what it projects."""
    if layout == "thd":
        return {name: x if name in ("sink", "cu_seqlens", "loss") else x[None] for name, x in tensors.items()}
    if layout == "sbhd":
        swapped = ("q", "kv", "entries", "out", "lse")
        return {name: x.transpose(0, 1) if name in swapped and x.ndim > 1 else x for name, x in tensors.items()}
    return tensors


def _check_shapes(x: dict[str, Tensor]) -> None:
    sizes: dict[str, tuple[int, str]] = {}
    for name, letters in SHAPES.items():
        if name not in x:
            continue
        wanted = letters.split()
        shape = list(x[name].shape) if name != "loss" or x[name].numel() != 1 else []
        fits = len(shape) == len(wanted)
        for letter, size in zip(wanted, shape):
            fits = fits and (letter == "*" or sizes.setdefault(letter, (size, name))[0] == size)
        if not fits:
            known = ", ".join(f"{letter} = {size} ({of})" for letter, (size, of) in sizes.items())
            raise ValueError(f"{name} must be [{', '.join(wanted)}]; got {shape}, where {known}")
        if name == "mask":
            continue
        integers = name in ("indices", "cu_seqlens")
        if integers == x[name].is_floating_point():
            raise ValueError(f"{name} must hold {'integers' if integers else 'floating-point numbers'}; got {x[name].dtype}")
    if "cu_seqlens" in x and (
        x["q"].shape[0] != 1 or int(x["cu_seqlens"][-1]) != x["q"].shape[1] or bool((x["cu_seqlens"].diff() < 0).any())
    ):
        raise ValueError(f"cu_seqlens must rise from 0 to the {x['q'].shape[1]} tokens of one row; got {x['cu_seqlens'].tolist()}")
    count, slots = x["entries"].shape[1], x["indices"].shape[2] if "indices" in x else None
    for name in ("scores", "teacher", "d_scores"):
        if name in x and x[name].shape[2] not in (count, slots):
            raise ValueError(f"{name} must have a last axis of the {count} entries or the {slots} slots of indices; got {x[name].shape[2]}")
    rows, tokens, heads, _ = x["q"].shape
    if rows * tokens * heads * (tokens + count) > MOST:
        raise ValueError(
            f"{rows} x {tokens} tokens and {heads} heads are too many for a float64 audit on the CPU: write the first tokens of one row "
            "(what comes later does not change them), with kl or teacher of those rows"
        )


def _case(x: dict[str, Tensor], numbers: dict[str, float], words: dict[str, Any]) -> Case:
    q, entries, chosen = x["q"].double(), x["entries"].double(), x.get("indices")
    rows, tokens, heads, width = q.shape
    ratio, count = int(numbers["ratio"]), entries.shape[1]
    objective: Objective = words.get("objective", "dense" if chosen is None else "sparse")
    if objective == "sparse" and chosen is None:
        raise ValueError("the sparse objective needs indices: the entries that each query selects, -1 in empty slots")
    blank = q.new_zeros(rows, tokens, 2 * width)
    case = Case(
        q=q, kv=x["kv"].double(), entries=entries, sink=x["sink"].double() if "sink" in x else q.new_full((heads,), -math.inf),
        q_index=q.new_zeros(rows, tokens, 1, 1), k_index=q.new_zeros(rows, count, 1), weights=q.new_ones(rows, tokens, 1),
        values=blank, gates=blank, bias=q.new_zeros(ratio, 2 * width), ratio=ratio, window=int(numbers["window"]),
        topk=count if chosen is None else chosen.shape[2], scale=numbers.get("scale", width**-0.5), index_scale=1.0, objective=objective,
        cu_seqlens=x["cu_seqlens"].int() if "cu_seqlens" in x else None, mask=x["mask"].bool() if "mask" in x else None,
        weight=x["weight"].double() if "weight" in x else None, divisor=numbers.get("divisor"),
        chosen=None if chosen is None else chosen.long(),
    )  # fmt: skip
    needed = max((length // ratio for _, _, length in case.documents), default=0)
    if needed > count:
        raise ValueError(f"entries must hold the {needed} blocks of {ratio} tokens of a document; got {count}")
    return case


def _in_slots(values: Tensor, x: dict[str, Tensor]) -> bool:
    return "indices" in x and values.shape[2] == x["indices"].shape[2]


def _over_entries(values: Tensor, x: dict[str, Tensor], empty: float) -> Tensor:
    """Values of slots [B, T, K] as values of entries [B, T, E]."""
    if not _in_slots(values, x):
        return values
    count, indices = x["entries"].shape[1], x["indices"].long()
    spare = torch.where((indices < 0) | (indices >= count), count, indices)
    return values.new_full((*values.shape[:2], count + 1), empty).scatter(-1, spare, values)[..., :count]
