"""Is this indexer loss the right one? Probes with a number each, for csakit, for your own code, for known mistakes.

    import csakit.audit
    report = csakit.audit.run(my_loss)      # my_loss(case) -> loss: see csakit.audit.case for the whole protocol
    print(report)
    assert report.passed

On the command line: `csakit audit my_module:my_loss`.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from typing import Any

from . import candidates
from .case import Case, NotSupported, Result, random_case
from .closest import closest
from .probes import PROBES, Probe
from .report import Matrix, Report, Verdict
from .subject import AnswerError, Subject


def run(candidate: Any, probes: Iterable[str] | None = None) -> Report:
    """The verdicts of the named probes (None: all of them) on a candidate.

    Args:
        candidate: a function `loss(case)`, or an object with that method and optional others (`csakit.audit.case`).
        probes: names from `PROBES`; they run in that order.

    Raises:
        TypeError: the candidate has no `loss(case)`, or that returns something other than a scalar tensor or a `Result` with one.
        ValueError: an unknown probe, or a dtype or denominator that no case can have.
    """
    wanted = list(PROBES) if probes is None else list(probes)
    for name in wanted:
        if name not in PROBES:
            raise ValueError(f"probes must be names from {', '.join(PROBES)}; got {name!r}")
    subject = Subject(candidate)
    verdicts = tuple(_verdict(PROBES[name], subject) for name in PROBES if name in wanted)
    failed = any(verdict.status == "fail" for verdict in verdicts)
    return Report(subject.name, verdicts, closest(subject) if failed else None)


def matrix() -> Matrix:
    """What catches what: csakit and the plain candidate, then every known mistake, under every probe."""
    right = tuple(run(candidates.load(name)) for name in candidates.RIGHT)
    return Matrix(right, tuple(run(candidate) for candidate in candidates.WRONG.values()))


def _verdict(probe: Probe, subject: Subject) -> Verdict:
    try:
        measured = probe.measure(subject)
    except NotSupported as reason:
        return Verdict(probe.name, "not tested", None, "", str(reason))
    except AnswerError:
        raise
    except Exception as error:  # a candidate that crashes has failed this probe; the others may still tell why
        where = traceback.extract_tb(sys.exc_info()[2])[-1]
        return Verdict(probe.name, "fail", None, "", f"{type(error).__name__} at {where.filename}:{where.lineno}: {error}")
    if measured.passed:
        return Verdict(probe.name, "pass", measured.value, measured.limit, probe.holds)
    return Verdict(probe.name, "fail", measured.value, measured.limit, probe.broken)


__all__ = ["PROBES", "Case", "Matrix", "NotSupported", "Probe", "Report", "Result", "Verdict", "candidates", "matrix", "random_case", "run"]
