"""Which known mistake explains a candidate best: its losses are recomputed under each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from torch import Tensor

from .candidates import MISTAKES, PlainTorch
from .case import Case, Denominator, Form, random_case
from .probes.documents import LENGTHS, padded
from .probes.teacher import extreme_case, quiet_case
from .subject import Subject

NEAR = 10  # a mistake that explains this much of the distance to the right loss is worth a name; otherwise none of the known ones fits


@dataclass(frozen=True)
class Fit:
    """The best fits among the known mistakes. Distances are of losses, in units of the right loss; None where nothing was compared."""

    text: str
    mistakes: tuple[str, ...] = ()  # one name, or several that give the same losses here; empty: right, or none of the known
    distance: float | None = None  # from the best of them
    runner_up: str | None = None  # the nearest mistake that does not fit
    runner_up_distance: float | None = None
    right_distance: float | None = None


def closest(subject: Subject) -> Fit:
    """The mistakes under which the plain code gives the candidate's losses: on ordinary rows, then in the corners."""
    cases = _cases(subject.denominator, subject.form)
    ordinary = _compare(subject, cases[:2])
    if ordinary is None:
        return Fit("it gives no loss to compare with known mistakes")
    if ordinary.right_distance is None or ordinary.right_distance > subject.tolerance:
        return ordinary
    corners = [(name, fit) for name, case, losses in cases[2:] if (fit := _compare(subject, [(name, case, losses)])) is not None]
    wrong = [(name, fit) for name, fit in corners if fit.right_distance is not None and fit.right_distance > subject.tolerance]
    told = [f"{name}: {fit.text}" for name, fit in wrong]
    names = tuple(dict.fromkeys(mistake for _, fit in wrong for mistake in fit.mistakes))
    return replace(ordinary, text="; ".join(["on ordinary rows its loss is right", *told]), mistakes=names)


def nearest(gaps: dict[str, float], right: float, tolerance: float) -> Fit:
    """The fit to distances by mistake, given that of the right loss."""
    if right <= tolerance:
        return Fit("its loss is right", right_distance=right)
    ranked = sorted(gaps, key=gaps.__getitem__)
    best = gaps[ranked[0]]
    if best <= tolerance:
        fitting = tuple(name for name in ranked if gaps[name] <= tolerance)
    elif best < right / NEAR:
        fitting = (ranked[0],)
    else:
        text = f"none of the known mistakes: the nearest, {ranked[0]}, is {best:.2g} away, the right loss {right:.2g}"
        return Fit(text, (), best, ranked[0], best, right)
    second = next((name for name in ranked if name not in fitting), None)
    beyond = "" if second is None else f"; next: {second}, {gaps[second]:.2g} away, {_times(gaps[second], best)}"
    if best <= tolerance:
        text = f"its loss is that of {' or '.join(fitting)} ({best:.2g} away; {right:.2g} from the right one{beyond})"
    else:
        text = f"nearest known mistake: {fitting[0]} ({best:.2g} away; {right:.2g} from the right loss{beyond})"
    return Fit(text, fitting, best, second, None if second is None else gaps[second], right)


def _times(far: float, near: float) -> str:
    if near == 0:
        return "the best fits exactly"
    return "over a million times as far" if far > 1e6 * near else f"{far / near:.3g} times as far"


def _compare(subject: Subject, cases: Sequence[tuple[str, Case, dict[str, Tensor]]]) -> Fit | None:
    """The fit over some cases; None where the candidate gives no loss for any of them."""
    found = [(loss, losses) for _, case, losses in cases if (loss := _loss(subject, case)) is not None]
    if not found:
        return None
    gaps = {name: max(_away(loss, losses[name], losses["torch"]) for loss, losses in found) for name in found[0][1]}
    return nearest(gaps, gaps.pop("torch"), subject.tolerance)


def _away(loss: Tensor, known: Tensor, right: Tensor) -> float:
    """Distance of a loss from a known one, in units of the right one; nil between two that are no number."""
    if bool(loss.isnan()) and bool(known.isnan()):
        return 0.0
    return float(((loss - known) / right).abs().nan_to_num(float("inf")))


@cache
def _cases(denominator: Denominator, form: Form) -> list[tuple[str, Case, dict[str, Tensor]]]:
    """Two cases of ordinary rows, then corners: with the losses that the right code ("torch") and every known mistake give for them."""
    sparse = replace(random_case(2, 18, topk=3, form=form), denominator=denominator)
    named = {
        "sparse": sparse,
        "dense": replace(sparse, objective="dense"),
        "with extreme scores": extreme_case(form),
        "with e^-800 on the entries": quiet_case(800, form=form),
        "in packed rows": random_case(lengths=LENGTHS, form=form),
        "with padding": padded(random_case(2, 14, form=form)),
        "with row weights": replace(sparse, weight=sparse.kv[..., 0].abs()),
        "with a divisor": replace(sparse, divisor=7.0),
    }
    candidates = [PlainTorch(), *map(PlainTorch, MISTAKES)]
    return [(name, case, {candidate.name: candidate.loss(case).loss for candidate in candidates}) for name, case in named.items()]


def _loss(subject: Subject, case: Case) -> Tensor | None:
    """The candidate's loss; None where it has none, or crashes (which the probes have reported)."""
    try:
        return subject.answer(case).loss
    except Exception:
        return None
