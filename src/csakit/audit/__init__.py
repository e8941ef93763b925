"""Is this indexer loss the right one? Probes with a number each, for csakit, for your own code, for known mistakes.

    import csakit.audit
    report = csakit.audit.run(my_loss)      # my_loss(case) -> loss: see csakit.audit.case for the whole protocol
    print(report)
    assert report.passed

On the command line: `csakit audit my_module:my_loss`.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from . import candidates
from .case import SIZES, Case, NoLoss, NotSupported, Result, Size, random_case
from .closest import Fit, closest
from .conventions import conventions
from .picture import Picture, picture
from .places import Place, is_torch, places
from .probes import PROBES, Probe
from .report import Matrix, Report, Verdict
from .subject import AnswerError, Subject


def run(candidate: Any, probes: Iterable[str] | None = None, *, size: Size | None = None) -> Report:
    """The verdicts of the named probes (None: all of them) on a candidate.

    Args:
        candidate: a function `loss(case)`, or an object with that method and optional others (`csakit.audit.case`).
        probes: names from `PROBES`; they run in that order.
        size: of the cases of probes that compare whole losses; None: small ones, `SIZES["real"]` is nearer to a real layer.

    Raises:
        TypeError: the candidate has no `loss(case)`, or that returns something other than a scalar tensor or a `Result` with one.
        ValueError: an unknown probe, or a dtype or denominator that no case can have.
    """
    wanted = list(PROBES) if probes is None else list(probes)
    for name in wanted:
        if name not in PROBES:
            raise ValueError(f"probes must be names from {', '.join(PROBES)}; got {name!r}")
    subject = Subject(candidate, size)
    report = _judge(subject, wanted)
    where = places(subject, report.failed) if report.failed else ()
    return replace(report, conventions=conventions(subject), places=where, picture=picture(subject))


def matrix() -> Matrix:
    """What catches what: csakit and the plain candidate, then every known mistake, under every probe."""
    right = [candidates.load(name) for name in candidates.RIGHT]
    everyone = [_judge(Subject(candidate), list(PROBES)) for candidate in (*right, *candidates.WRONG.values())]
    return Matrix(tuple(everyone[: len(right)]), tuple(everyone[len(right) :]))


def _judge(subject: Subject, wanted: list[str]) -> Report:
    """The verdicts, and where one is a failure which known mistake fits."""
    verdicts = tuple(_verdict(PROBES[name], subject) for name in PROBES if name in wanted)
    failed = any(verdict.status == "fail" for verdict in verdicts)
    return Report(subject.name, verdicts, closest(subject) if failed else None)


def _verdict(probe: Probe, subject: Subject) -> Verdict:
    if subject.form not in probe.forms:
        return Verdict(probe.name, "not tested", None, "", "this attention has neither window nor sink nor compressed entries")
    try:
        measured = probe.measure(subject)
    except NotSupported as reason:
        return Verdict(probe.name, "not tested", None, "", str(reason))
    except AnswerError:
        raise
    except Exception as error:  # a candidate that crashes has failed this probe; the others may still tell why
        frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
        where = next((frame for frame in reversed(frames) if not is_torch(frame.filename)), frames[-1])
        return Verdict(probe.name, "fail", None, "", f"{type(error).__name__} at {where.filename}:{where.lineno}: {error}")
    if measured.passed:
        return Verdict(probe.name, "pass", measured.value, measured.limit, probe.holds)
    broken = f"{probe.broken} ({measured.detail})" if measured.detail else probe.broken
    return Verdict(probe.name, "fail", measured.value, measured.limit, broken)


__all__ = [
    "PROBES",
    "SIZES",
    "Case",
    "Fit",
    "Matrix",
    "NoLoss",
    "NotSupported",
    "Picture",
    "Place",
    "Probe",
    "Report",
    "Result",
    "Size",
    "Verdict",
    "candidates",
    "matrix",
    "random_case",
    "run",
]
