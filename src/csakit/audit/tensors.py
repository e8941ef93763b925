"""The audit of a file of tensors: is what another program computed for them right, and if not, which known mistake explains it?

    csakit audit --tensors FILE.safetensors

A file cannot be asked a second question, so its numbers are compared with the right ones and with those of every known mistake.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from . import oracle
from .candidates import MISTAKES, PlainTorch
from .case import DIVISORS, Case, Denominator
from .closest import Fit, nearest
from .dump import Dump, read
from .picture import Picture, worst_row
from .report import Report, Verdict
from .subject import CONVENTIONS, gap

_COMPARED = ("teacher", "kl", "loss", "d_scores")  # what a teacher decides
_TOLD = {
    "teacher": ("the teacher is the attention's own distribution over the candidates", "another teacher"),
    "kl": ("each row's KL is right", "rows have another KL"),
    "loss": ("the loss is right", "the loss has another value"),
    "d_scores": ("the gradient of the scores is (student - teacher) / divisor", "the scores get another gradient"),
    "out": ("the attention output is right", "the attention itself differs"),
    "lse": ("the lse is the logarithm of the whole denominator", "the lse is that of another denominator"),
    "indices": ("selected entries are visible and distinct", "rows select entries that are repeated or not visible"),
    "selection": ("the selected entries are those of greatest score", "rows leave out an entry of greater score"),
}


def run(path: Path) -> Report:
    """The verdicts on a file.

    Raises:
        ValueError: it cannot be read, or does not hold what an audit needs; the message says what.
    """
    return judge(read(path))


def judge(dump: Dump) -> Report:
    """The verdicts on a dump."""
    case, right = _right(dump)
    found = {name: x for name, x in dump.answers.items() if name in _COMPARED}
    gaps = {name: gap(x, right[name]) for name, x in found.items()}
    verdicts = [_limit(dump, name, gaps[name], _detail(name, found[name], right, case, dump)) for name in found]
    verdicts += [*_attention(dump, case), *_selection(dump, case)]
    known = _known(case, found)
    failed = any(verdict.status == "fail" and verdict.probe in _COMPARED for verdict in verdicts)
    fit = nearest({name: _away(found, answers) for name, answers in known.items()}, _away(found, right), dump.tolerance) if failed else None
    if fit is None and any(verdict.status == "fail" for verdict in verdicts):
        fit = Fit("what it gives of teacher and loss is right" if found else "it gives no teacher and no loss to compare")
    return Report(dump.name, tuple(verdicts), fit, _conventions(dump, case, known, right, found), picture=_picture(case, found, right))


def _right(dump: Dump) -> tuple[Case, dict[str, Tensor]]:
    """The case under the declared denominator, else "visible" where that alone is right, with the right answers."""
    tried: list[tuple[Case, dict[str, Tensor]]] = []
    conventions: tuple[Denominator, ...] = (dump.denominator,) if dump.denominator else CONVENTIONS
    for convention in conventions:
        case = replace(dump.case, denominator=convention)
        solution = oracle.solve(case)
        answers = {
            "teacher": solution.teacher,
            "kl": solution.kl,
            "loss": solution.loss,
            "d_scores": solution.gradients["q_index"][:, :, 0],
        }
        off = max((gap(dump.answers[name], answers[name]) for name in _COMPARED if name in dump.answers), default=0.0)
        tried.append((case, answers))
        if off <= dump.tolerance:
            return case, answers
    return tried[0]


def _known(case: Case, found: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """What each known mistake gives for the case; those that crash on it, or whose gradient has no graph, give what they can."""
    answers = {}
    for mistake in MISTAKES if found else ():
        scores = case.q_index.clone().requires_grad_()
        result = PlainTorch(mistake).loss(case.with_tensors({"q_index": scores}))
        assert result.kl is not None and result.teacher is not None
        gradient = torch.autograd.grad(result.loss, scores)[0] if result.loss.requires_grad else torch.zeros_like(scores)
        answers[mistake] = {"teacher": result.teacher, "kl": result.kl, "loss": result.loss.detach(), "d_scores": gradient[:, :, 0]}
    return answers


def _away(found: Mapping[str, Tensor], answers: Mapping[str, Tensor]) -> float:
    return max((gap(x, answers[name]) for name, x in found.items()), default=math.inf)


def _limit(dump: Dump, name: str, value: float, detail: str = "") -> Verdict:
    holds, broken = _TOLD[name]
    passed = value <= dump.tolerance
    told = holds if passed else broken + (f" ({detail})" if detail else "")
    return Verdict(name, "pass" if passed else "fail", value, f"<= {dump.tolerance:.3g}", told)


def _detail(name: str, found: Tensor, right: Mapping[str, Tensor], case: Case, dump: Dump) -> str:
    """What else a wrong answer shows: sums of the teacher, the row, or another divisor."""
    if name == "teacher":
        sums = found.sum(-1)[right["teacher"].sum(-1) > 0.5]
        off = float((sums - 1).abs().max()) if sums.numel() else 0.0
        if off > dump.tolerance:
            return f"and it does not sum to 1: {off:.3g} off"
    if name == "loss" and float(right["loss"]):
        lengths = [length for _, _, length in case.documents]
        counts = {"candidates": sum(max(0, n - case.ratio + 1) for n in lengths), "positions": case.kv[..., 0].numel(), "one": 1}
        factor = float(found.reshape(()) / right["loss"])
        fitting = [kind for kind, count in counts.items() if abs(factor * count / sum(lengths) - 1) <= dump.tolerance]
        if fitting:
            return f"it divides by {DIVISORS[fitting[0]]}: if that is meant, write divisor = {counts[fitting[0]]} into the metadata"
        return f"{factor:.4g} times the right one"
    if found.ndim > 1 and found.shape == right[name].shape:
        error = (found - right[name]).abs().nan_to_num(math.inf).flatten(2 if found.ndim > 2 else 1)
        place = int((error.amax(-1) if found.ndim > 2 else error).argmax())
        return "worst in row {}, token {}".format(*divmod(place, found.shape[1]))
    return ""


def _attention(dump: Dump, case: Case) -> list[Verdict]:
    """Verdicts on attention output and lse."""
    real = case.document_ids >= 0
    verdicts = []
    if "out" in dump.answers:
        right = oracle.attend(case, torch.zeros_like(case.q))[0]
        verdicts.append(_limit(dump, "out", gap(torch.where(real[..., None, None], dump.answers["out"], 0), right)))
    if "lse" in dump.answers:
        found = {}
        for sink in (dump.lse_sink,) if dump.lse_sink else ("in", "out"):
            lse, empty = _lse(case, with_sink=sink == "in")
            for base in (dump.lse_base,) if dump.lse_base else ("e", "2"):
                given = dump.answers["lse"] * (1.0 if base == "e" else math.log(2))
                found[f"base {base}, sink {sink}"] = gap(torch.where(empty, 0, given), lse)
        best = min(found, key=found.__getitem__)
        verdict = _limit(dump, "lse", found[best])
        verdicts.append(replace(verdict, explanation=f"{verdict.explanation} ({best})"))
    return verdicts


def _lse(case: Case, *, with_sink: bool) -> tuple[Tensor, Tensor]:
    """(lse [B, T, H], where there is none: on padding, and in rows that attend nothing)."""
    lse = torch.full(case.q.shape[:3], -math.inf, dtype=torch.float64)
    for query in oracle.queries(case):
        everything = list(range(len(query.visible)))
        own = case.objective == "sparse" and case.denominator == "attended"
        places = oracle.chosen_of(case, query, oracle.scores_of(case, query)) if own else everything
        logits = torch.cat(oracle.logits_of(case, query, places), 1)
        lse[query.row, query.token] = torch.cat([logits, case.sink[:, None]], 1).logsumexp(1) if with_sink else logits.logsumexp(1)
    empty = lse.isinf()
    return lse.masked_fill(empty, 0), empty


def _selection(dump: Dump, case: Case) -> list[Verdict]:
    """Verdicts on the selection that the file brings along."""
    if case.chosen is None:
        return []
    bad, left_out = 0, 0
    for query in oracle.queries(case):
        picked = [entry for entry in case.chosen[query.row, query.token].tolist() if entry >= 0]
        bad += len(set(picked)) < len(picked) or not set(picked) <= set(query.visible)
        if dump.all_scores and query.visible:
            scores = case.q_index[query.row, query.token, 0]
            others = [entry for entry in query.visible if entry not in picked]
            slack = dump.tolerance * float(scores.abs().max())
            missing = len(picked) < min(case.topk, len(query.visible))
            greater = bool(others and picked) and float(scores[others].max()) > float(scores[picked].min()) + slack
            left_out += missing or greater
    verdicts = []
    for name, rows in (("indices", bad), *((("selection", left_out),) if dump.all_scores else ())):
        verdicts.append(Verdict(name, "fail" if rows else "pass", float(rows), "<= 0", _TOLD[name][bool(rows)]))
    return verdicts


def _conventions(
    dump: Dump, case: Case, known: Mapping[str, Mapping[str, Tensor]], right: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> dict[str, str]:
    told = {}
    if case.objective == "sparse" and found:
        told["denominator"] = f"{case.denominator}, {'as declared' if dump.denominator else 'found by comparing'}"
    answers = {name: right[name] for name in found}
    alike = [mistake for mistake, given in known.items() if _away(answers, given) <= dump.tolerance and mistake in _OF_THE_TEACHER]
    if alike:
        why = ": with one head the denominator cancels" if case.q.shape[2] == 1 else ""
        told["blind to"] = f"this file gives the same numbers, right or wrong, under {', '.join(alike)}{why}"
    return told


_OF_THE_TEACHER = ("compressed-only", "selected-prefix-lse", "sink-without-window", "window-without-sink", "base-2-lse", "window-plus-one")


def _picture(case: Case, found: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Picture | None:
    if "teacher" not in found:
        return None
    scores = case.q_index[:, :, 0]
    has_scores = scores.shape[-1] == right["teacher"].shape[-1]
    student = scores.masked_fill(right["teacher"] == 0, -math.inf).softmax(-1).nan_to_num(0.0) if has_scores else right["teacher"]
    return worst_row(case, found["teacher"], right["teacher"], student)
