"""Which of the legitimate conventions a candidate follows, found by asking it. Nothing here is right or wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from . import oracle
from .case import DIVISORS, Form, random_case
from .subject import CONVENTIONS, AnswerError, Subject


def conventions(subject: Subject) -> dict[str, str]:
    """The denominator of the sparse teacher with the place of the top-k mask, and the divisor, each in words with its number."""
    found = {}
    try:
        found["top-k"] = _topk(subject)
    except AnswerError:
        raise
    except Exception:  # no sparse loss, or one that crashes: nothing to say
        pass
    if subject.divisor != "tokens":
        found["divisor"] = f"declared: {DIVISORS[subject.divisor]}"
    return found


def _topk(subject: Subject) -> str:
    """Whether visible entries outside a query's selection count in its teacher, and what difference that makes to the loss."""
    case, other = random_case(form=subject.form), random_case(seed=4, form=subject.form)
    before, right, moved = subject.answer(case), _right(subject.form), 0.0
    chosen = right["attended"].indices
    for entry in range(case.entries.shape[1]):
        entries = case.entries.clone()
        entries[:, entry] = other.entries[:, entry]
        change = (subject.answer(replace(case, entries=entries)).gradients["q_index"] - before.gradients["q_index"]).abs().amax((2, 3))
        moved = max(moved, float(change.masked_fill((chosen == entry).any(-1), 0).max()))
    both = {convention: float(solution.loss) for convention, solution in right.items()}
    losses = f"right losses here: {both['attended']:.4g} over the selected, {both['visible']:.4g} over all visible entries"
    if moved == 0:
        return (
            "the mask stands before each head's softmax (attended): visible entries that a query does not select leave its teacher "
            f"exactly unchanged, however much of a head's attention they would draw ({losses}; this one: {float(before.loss):.4g})"
        )
    return (
        "each head's softmax runs over all visible entries and the selection is taken from it (visible): entries outside it move the "
        f"teacher ({losses}; this one: {float(before.loss):.4g})"
    )


@cache
def _right(form: Form) -> dict[str, oracle.Solution]:
    return {convention: oracle.solve(replace(random_case(form=form), denominator=convention)) for convention in CONVENTIONS}
