"""csakit's own verbs on one of its backends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import csakit

from ..problem import Problem
from ..shapes import ATTENTION, KERNELS, Case
from . import ORACLE, Results, Unsupported


class Own:
    """A backend of csakit, chosen explicitly."""

    def __init__(self, backend: str) -> None:
        self.name = f"csakit-{backend}"
        self.version = csakit.__version__
        self._backend = backend

    def bytes_needed(self, case: Case) -> int:
        if self._backend != ORACLE:
            return 0
        shape = case.shape
        size = 8 if case.dtype == "float64" else 4
        if case.operation in ATTENTION:
            return 6 * size * shape.heads * (shape.tokens + shape.entries) * (shape.tokens + shape.width)
        return 6 * size * shape.tokens * shape.entries * (shape.index_heads + (shape.heads if case.operation == "dense" else 0))

    def prepare(self, problem: Problem) -> Callable[[], Results]:
        operation = problem.case.operation
        if operation not in KERNELS:
            raise Unsupported("a backend has kernels only")
        build = {"select": self._select, "distill": self._distill, "dense": self._dense}.get(operation, self._attend)
        with self._forced():
            work = build(problem)

        def run() -> Results:
            with self._forced():
                return work()

        return run

    @contextlib.contextmanager
    def _forced(self) -> Iterator[None]:
        """The backend, chosen explicitly: it runs, or raises a RuntimeError "backend .. was asked for, but ..". That is no failure."""
        try:
            with csakit.backend(self._backend):
                yield
        except RuntimeError as error:
            if "was asked for" in str(error):
                raise Unsupported(str(error)) from error
            raise

    def _attend(self, problem: Problem) -> Callable[[], Results]:
        x, layout = problem.leaves(), problem.layout
        teacher = problem.case.operation != "attend"

        def work() -> Results:
            attention = csakit.attend(x["q"], x["kv"], x["entries"], layout, indices=x["indices"], sink=x["sink"], teacher=teacher)
            results = {"out": attention.out, "lse": attention.lse}
            if attention.log_mass is not None:
                results["log_mass"] = attention.log_mass
            if "d_out" in x:
                results |= problem.gradients(attention.out, x["d_out"], x)
            return results

        return work

    def _select(self, problem: Problem) -> Callable[[], Results]:
        x, topk = problem.inputs, problem.case.shape.topk

        def work() -> Results:
            return csakit.select(x["q_index"], x["k_index"], x["weights"], topk, problem.layout)._asdict()

        return work

    def _distill(self, problem: Problem) -> Callable[[], Results]:
        x, layout = problem.leaves(), problem.layout
        indices, scores = csakit.select(x["q_index"], x["k_index"], x["weights"], problem.case.shape.topk, layout)

        def work() -> Results:
            loss = csakit.distill(scores, x["log_mass"], layout, weight=x["weight"], divisor=problem.divisor).loss
            return {"loss": loss, "indices": indices, **problem.gradients(loss, None, x, keep=True)}

        return work

    def _dense(self, problem: Problem) -> Callable[[], Results]:
        x, layout = problem.leaves(), problem.layout

        def work() -> Results:
            loss = csakit.distill_dense(
                x["q_index"],
                x["k_index"],
                x["weights"],
                x["q"],
                x["entries"],
                x["lse"],
                layout,
                weight=x["weight"],
                divisor=problem.divisor,
            ).loss
            return {"loss": loss, **problem.gradients(loss, None, x)}

        return work
