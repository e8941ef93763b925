"""A candidate under audit: its members found, its losses and gradients brought to float64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from .case import ATTENTION_INPUTS, DIVISORS, INDEX_INPUTS, LOSS_INPUTS, Case, Denominator, Form, NotSupported, Result, Size, random_case
from .oracle import Solution, solve

# How far a right answer may be off, relative to the largest expected value: what rounding does in small sums and no more.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
CONVENTIONS: tuple[Denominator, ...] = ("attended", "visible")
FLOOR = 1e-3  # below this size an expected value counts as this large


@dataclass(frozen=True)
class Answer:
    """A candidate's loss, its gradients for every name in `LOSS_INPUTS`, and what it reports besides; float64 on the CPU."""

    loss: Tensor
    gradients: dict[str, Tensor]
    kl: Tensor | None = None
    teacher: Tensor | None = None
    indices: Tensor | None = None


class AnswerError(TypeError):
    """The candidate's loss is not a scalar: a mistake of the adapter, about which no probe can say anything."""


class Subject:
    """What the probes talk to: any candidate, with one way to ask it each question, in its own conventions.

    Raises:
        TypeError: the candidate is neither a function of a case nor an object with `loss(case)`.
        ValueError: its dtype, denominator or divisor is not one that the audit knows.
    """

    def __init__(self, candidate: Any, size: Size | None = None) -> None:
        loss = getattr(candidate, "loss", candidate)
        if isinstance(candidate, type) or not callable(loss):
            raise TypeError(
                f"candidate must be a function loss(case) or an object with a method loss(case); got {candidate!r}"
                + (": make an instance of the class" if isinstance(candidate, type) else "")
            )
        self.candidate, self._loss = candidate, loss
        self.name = str(getattr(candidate, "name", getattr(candidate, "__name__", type(candidate).__name__)))
        self.dtype: torch.dtype = getattr(candidate, "dtype", torch.float64)
        self.device: str = getattr(candidate, "device", "cpu")
        self.size = size or Size()
        self._answers: dict[Case, Answer] = {}
        self.declared: Denominator | None = getattr(candidate, "denominator", None)
        self.divisor: str = getattr(candidate, "divisor", "tokens")
        self.form: Form = getattr(candidate, "form", "csa")
        if self.dtype not in TOLERANCES:
            raise ValueError(f"the candidate's dtype must be one of {', '.join(map(str, TOLERANCES))}; got {self.dtype!r}")
        if self.declared not in (None, "attended", "visible"):
            raise ValueError(f'the candidate\'s denominator must be "attended" or "visible"; got {self.declared!r}')
        if self.form not in ("csa", "dsa"):
            raise ValueError(f'the candidate\'s form must be "csa" or "dsa"; got {self.form!r}')
        if self.divisor not in DIVISORS:
            raise ValueError(f"the candidate's divisor must be one of {', '.join(DIVISORS)}; got {self.divisor!r}")

    @cached_property
    def denominator(self) -> Denominator:
        """The convention of its sparse teacher: as declared; else "visible" where its loss on ordinary rows is right under that alone."""
        if self.declared is not None:
            return self.declared
        case, right = _both_conventions(self.form)
        try:
            answer = self.ask(case)
        except AnswerError:
            raise
        except Exception:  # a crash, or nothing it can express: the probes report that
            return "attended"
        away = {convention: distance(answer, solution) for convention, solution in right.items()}
        return "visible" if away["visible"] <= self.tolerance < away["attended"] else "attended"

    @property
    def tolerance(self) -> float:
        """How far a right answer may be off in the candidate's dtype."""
        return TOLERANCES[self.dtype]

    def truth(self, case: Case) -> Solution:
        """The right answer, with the candidate's convention for the denominator."""
        return solve(self._in_convention(case))

    def answer(self, case: Case) -> Answer:
        """The candidate's loss for a case with its gradients for the case's tensors."""
        if case not in self._answers:  # by identity
            self._answers[case] = self.ask(self._in_convention(case))
        return self._answers[case]

    def answer_over_ranks(self, case: Case, ranks: int) -> Answer:
        """The candidate's loss when the heads of a case are spread over ranks."""
        leaves, per = self._given(self._in_convention(case), LOSS_INPUTS), case.q.shape[2] // ranks
        shards = [leaves.heads(rank * per, (rank + 1) * per) for rank in range(ranks)]
        return self._answer(self._member("loss_over_ranks")(shards), leaves)

    def answer_with_coefficient(self, case: Case, coefficient: float | None) -> Answer:
        """The candidate's loss times a coefficient."""
        leaves = self._given(self._in_convention(case), LOSS_INPUTS)
        return self._answer(self._member("with_coefficient")(leaves, coefficient), leaves)

    def indices(self, case: Case) -> Tensor:
        """The candidate's selection [B, T, K], from `select` or from the result of `loss`."""
        case = self._given(self._in_convention(case))
        if callable(getattr(self.candidate, "select", None)):
            return self._member("select")(case).detach().cpu().long()
        found = self._result(self._loss(case)).indices
        if found is None:
            raise NotSupported("the candidate has no select() and its result no indices")
        return found.detach().cpu().long()

    def entries(self, case: Case) -> Tensor:
        """The candidate's compressed entries [B, E, D]."""
        return self._member("compress")(self._given(self._in_convention(case))).detach().cpu().double()

    def attention(self, case: Case, upstream: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The candidate's attention output and the gradients of sum(upstream * out)."""
        leaves = self._given(self._in_convention(case), ATTENTION_INPUTS)
        out = self._member("attend")(leaves)
        return out.detach().cpu().double(), _gradients((out * upstream.to(out)).sum(), leaves, ATTENTION_INPUTS)

    def _in_convention(self, case: Case) -> Case:
        return replace(case, denominator=self.denominator)

    def ask(self, case: Case) -> Answer:
        """The candidate's loss for a case as it stands, asked anew."""
        leaves = self._given(case, LOSS_INPUTS)
        answer, factor = self._answer(self._loss(leaves), leaves), self._to_tokens(case)
        if factor == 1:
            return answer
        return replace(answer, loss=factor * answer.loss, gradients={name: factor * x for name, x in answer.gradients.items()})

    def _to_tokens(self, case: Case) -> float:
        """What turns a mean over the candidate's own divisor into one over real tokens."""
        if self.divisor == "tokens" or case.divisor is not None:
            return 1.0
        weight = torch.ones(case.kv.shape[:2]) if case.weight is None else case.weight
        counts = {"tokens": 0.0, "candidates": 0.0, "positions": float(weight.sum()), "one": 1.0}
        for row, first, length in case.documents:
            counts["tokens"] += float(weight[row, first : first + length].sum())
            counts["candidates"] += float(weight[row, first + case.ratio - 1 : first + length].sum())
        return counts[self.divisor] / counts["tokens"] if counts["tokens"] else 1.0

    def _given(self, case: Case, leaves: Sequence[str] = ()) -> Case:
        """The case in the candidate's dtype and place: tensors of its own, some of them leaves that want a gradient."""
        case = case.to(self.dtype, self.device)
        return case.with_tensors({name: x.detach().clone().requires_grad_(name in leaves) for name, x in case.tensors().items()})

    def _member(self, name: str) -> Callable:
        member = getattr(self.candidate, name, None)
        if not callable(member):
            raise NotSupported(f"the candidate has no {name}()")
        return member

    def _result(self, given: Any) -> Result:
        result = Result(given) if isinstance(given, Tensor) else given
        if not isinstance(result, Result) or not isinstance(result.loss, Tensor) or result.loss.numel() != 1:
            shown = f"a tensor of shape {list(given.shape)}" if isinstance(given, Tensor) else repr(given)
            raise AnswerError(f"loss(case) of {self.name} must return a scalar tensor or a csakit.audit.Result with one; got {shown}")
        return result

    def _answer(self, given: Any, leaves: Case) -> Answer:
        result = self._result(given)
        extra = {name: None if x is None else x.detach().cpu().double() for name, x in result._asdict().items() if name != "loss"}
        return Answer(result.loss.detach().cpu().double().reshape(()), _gradients(result.loss, leaves, LOSS_INPUTS), **extra)


@cache
def _both_conventions(form: Form) -> tuple[Case, dict[Denominator, Solution]]:
    case = random_case(2, 18, topk=3, form=form)
    return case, {convention: solve(replace(case, denominator=convention)) for convention in CONVENTIONS}


def _gradients(total: Tensor, leaves: Case, names: Sequence[str]) -> dict[str, Tensor]:
    """Gradients in float64 on the CPU; zeros where the total does not depend on an input."""
    inputs = [getattr(leaves, name) for name in names]
    found = torch.autograd.grad(total.sum(), inputs, allow_unused=True) if total.requires_grad else [None] * len(inputs)
    return {name: (torch.zeros_like(x) if grad is None else grad).detach().cpu().double() for name, x, grad in zip(names, inputs, found)}


def gap(actual: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest expected value (at least `FLOOR`); infinite where a number is not finite."""
    if actual.shape != expected.shape or not bool(actual.isfinite().all() and expected.isfinite().all()):
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(FLOOR))


def distance(actual: Answer, expected: Answer | Solution) -> float:
    """Largest gap between two losses and their gradients for the indexer's inputs."""
    gaps = [gap(actual.gradients[name], expected.gradients[name]) for name in INDEX_INPUTS]
    return max(gap(actual.loss, expected.loss), *gaps)
