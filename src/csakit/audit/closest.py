"""Which known mistake explains a candidate best: its losses are recomputed under each of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from torch import Tensor

from .candidates import WRONG, PlainTorch
from .case import Case, Denominator, random_case
from .subject import Subject


def closest(subject: Subject) -> str:
    """One line: the mistakes under which the plain code gives the candidate's losses on ordinary rows, or the nearest one."""
    cases, known = _known(subject.denominator)
    found = [(number, loss) for number, case in enumerate(cases) if (loss := _loss(subject, case)) is not None]
    if not found:
        return "it gives no loss to compare with known mistakes"
    gaps = {name: max(_away(loss, losses[number], known["torch"][number]) for number, loss in found) for name, losses in known.items()}
    right = gaps.pop("torch")
    if right <= subject.tolerance:
        return "on ordinary rows its loss is right"
    fitting = [name for name, error in gaps.items() if error <= subject.tolerance]
    if fitting:
        return f"its loss is that of {' or '.join(fitting)} ({right:.2g} from the right one)"
    best = min(gaps, key=gaps.__getitem__)
    if gaps[best] < right / 2:
        return f"nearest known mistake: {best} ({gaps[best]:.2g} away; {right:.2g} from the right loss)"
    return f"no known mistake is much nearer than the right loss ({right:.2g} away)"


def _away(loss: Tensor, known: Tensor, right: Tensor) -> float:
    """Distance of a loss from a known one, in units of the right one."""
    return float(((loss - known) / right).abs().nan_to_num(float("inf")))


@cache
def _known(denominator: Denominator) -> tuple[list[Case], dict[str, list[Tensor]]]:
    """A sparse and a dense case of ordinary rows, and the losses that the right code and every known mistake give for them."""
    sparse = replace(random_case(2, 18, topk=3), denominator=denominator)
    cases = [sparse, replace(sparse, objective="dense")]
    return cases, {candidate.name: [candidate.loss(case).loss for case in cases] for candidate in (PlainTorch(), *WRONG.values())}


def _loss(subject: Subject, case: Case) -> Tensor | None:
    """The candidate's loss; None where it has none, or crashes (which the probes have reported)."""
    try:
        return subject.answer(case).loss
    except Exception:
        return None
