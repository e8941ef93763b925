"""A suite from beginning to end: for each case the agreement of every provider, then times in turns, then memory."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import csakit

from . import agreement, memory, problem, providers
from .figures import Figure, ratio, summary
from .measurement import Sample, interleaved, products
from .records import FIGURES, PEAK, Row
from .shapes import Case, useful_flops

GIB = 1 << 30


@dataclass(frozen=True)
class Options:
    """How a suite is run.

    Attributes:
        repeats: rounds; each round measures every provider once.
        device: "cpu", or a CUDA device.
        threads: of torch, in this process and in those that measure memory.
        baseline: the provider whose time speedups are relative to; where it was not timed there are none.
        most_gib: providers that would need more memory are skipped; None: 60 % of what is free.
        memory: whether peak memory is measured.
        megatron: path of a Megatron-LM checkout.
        settings: allocator settings to record, by name.
    """

    repeats: int = 5
    device: str = "cpu"
    threads: int = 1
    baseline: str = "eager"
    most_gib: float | None = None
    memory: bool = True
    megatron: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Verdict:
    """What came before the clock: a function to time, or the reason why there is none."""

    provider: str
    version: str
    status: str
    note: str = ""
    error: float | None = None
    run: Callable[[], Any] | None = None


def run(
    suite: str, cases: Sequence[Case], names: Sequence[str], options: Options | None = None, *, tell: Callable[[str], None] | None = None
) -> list[Row]:
    """The rows of all cases.

    Args:
        suite: its name, for the rows.
        cases: what is measured.
        names: of the providers, see `csakit.bench.providers`.
        options: how.
        tell: takes a line of progress now and then.

    Raises:
        ValueError: an unknown provider, repeats or threads below 1, or a device that is not there.
    """
    options, tell = options or Options(), tell or (lambda line: None)
    _check(options)
    found: dict[str, providers.Provider | str] = {}
    for name in names:
        try:
            found[name] = providers.find(name, megatron=options.megatron)
        except providers.Unsupported as reason:
            found[name] = str(reason)
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        rows: list[Row] = []
        for number, case in enumerate(cases, 1):
            tell(f"{number}/{len(cases)} {case}")
            rows += _Case(suite, case, options, tell).rows(found)
        return rows
    finally:
        torch.set_num_threads(before)


def _check(options: Options) -> None:
    for name in ("repeats", "threads"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} must be at least 1; got {getattr(options, name)}")
    kind = torch.device(options.device).type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or a CUDA device; got {options.device}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {options.device} was asked for, but this torch sees no GPU")


class _Case:
    """One case being measured."""

    def __init__(self, suite: str, case: Case, options: Options, tell: Callable[[str], None]) -> None:
        self.case, self.options, self.tell = case, options, tell
        self.base = dict(suite=suite, operation=case.operation, **asdict(case.shape), selection=case.selection, dtype=case.dtype) | _place(
            options
        )

    def rows(self, found: Mapping[str, providers.Provider | str]) -> list[Row]:
        whole = problem.make(self.case, device=self.options.device)
        queries = agreement.stretches(self.case.shape.tokens)
        probe = whole.only(queries)
        verdicts = [self._judge(name, provider, whole, probe, queries) for name, provider in found.items()]
        runs = {verdict.provider: verdict.run for verdict in verdicts if verdict.run is not None}
        peaks = products(self.case.dtype, self.options.device) if runs else {}
        samples = interleaved(runs | {name: multiply for name, (multiply, _) in peaks.items()}, self.options.repeats, self.options.device)
        best = max((self._clock(samples[name]).under(flops / 1e9) for name, (_, flops) in peaks.items()), default=None)
        rows = []
        if best is not None:
            rows.append(self._row(PEAK, torch.__version__, "throughput", best, repeats=self.options.repeats))
        for verdict in verdicts:
            error = None if verdict.error is None else Figure(verdict.error, verdict.error, verdict.error)
            who = (verdict.provider, verdict.version)
            rows.append(self._row(*who, "error", error, ranged=False, status=verdict.status, note=verdict.note))
            if verdict.run is not None:
                for name, figure, ranged, baseline in self._figures(verdict.provider, samples, best):
                    repeats = self.options.repeats if ranged else 1
                    rows.append(self._row(*who, name, figure, ranged=ranged, repeats=repeats, baseline=baseline))
        return rows

    def _judge(
        self, name: str, provider: providers.Provider | str, whole: problem.Problem, probe: problem.Problem, queries: list[slice]
    ) -> _Verdict:
        if isinstance(provider, str):
            return _Verdict(name, "", "skipped", provider)
        needed, most = provider.bytes_needed(self.case) / GIB, _most_gib(self.options)
        if needed > most:
            return _Verdict(name, provider.version, "skipped", f"needs about {needed:.1f} GiB; {most:.1f} are allowed")
        try:
            checked = agreement.check(probe, provider.prepare(probe)(), queries)
            ready = provider.prepare(whole) if checked.holds else None
        except providers.Unsupported as reason:
            return _Verdict(name, provider.version, "skipped", str(reason))
        except Exception as error:  # whatever a provider raises is its result
            return _Verdict(name, provider.version, "failed", f"{type(error).__name__}: {error}".splitlines()[0])
        if ready is None:
            note = f"{checked.name} is off by {checked.error:.1e}, {checked.allowed:.0e} is allowed"
            return _Verdict(name, provider.version, "disagrees", note, checked.error)
        return _Verdict(name, provider.version, "ok", f"worst: {checked.name}", checked.error, ready)

    def _clock(self, samples: Sequence[Sample]) -> Figure:
        return summary([_seconds(sample, self.options) for sample in samples])

    def _figures(self, name: str, samples: Mapping[str, Sequence[Sample]], best: Figure | None) -> Iterator[tuple[str, Figure, bool, str]]:
        """(name, value, whether it has quantiles, baseline) of everything measured of one provider."""
        own = samples[name]
        for clock in ("cpu", "wall", "device"):
            times = [getattr(sample, clock) for sample in own]
            if None not in times:
                yield clock, summary(times).times(1e3), True, ""
        throughput = self._clock(own).under(useful_flops(self.case) / 1e9)
        yield "throughput", throughput, True, ""
        if best is not None:
            yield "of peak", throughput.times(100 / best.value), True, ""
        baseline = self.options.baseline
        if baseline in samples:
            pairs = ([_seconds(sample, self.options) for sample in samples[who]] for who in (baseline, name))
            yield "speedup", ratio(*pairs), True, baseline
        if self.options.memory:
            options = self.options
            try:
                used = memory.measure(name, self.case, device=options.device, threads=options.threads, megatron=options.megatron)
            except RuntimeError as error:
                self.tell(str(error))
                return
            extra = max(0.0, used.peak - used.results)
            yield "memory peak", Figure(used.peak, used.peak, used.peak), False, ""
            yield "memory extra", Figure(extra, extra, extra), False, ""

    def _row(
        self,
        provider: str,
        version: str,
        figure: str,
        numbers: Figure | None,
        *,
        status: str = "ok",
        note: str = "",
        repeats: int = 1,
        baseline: str = "",
        ranged: bool = True,
    ) -> Row:
        value, low, high = (None, None, None) if numbers is None else (float(f"{x:.6g}") for x in numbers)
        quantiles: dict[str, Any] = {"low": low, "high": high} if ranged else {"low": None, "high": None}
        about = {
            "provider": provider,
            "provider_version": version,
            "status": status,
            "note": note,
            "repeats": repeats,
            "baseline": baseline,
        }
        return Row(**self.base, **about, figure=figure, value=value, unit=FIGURES[figure][0], **quantiles)  # type: ignore[arg-type]


def _seconds(sample: Sample, options: Options) -> float:
    """The clock that counts: the device's on a GPU; CPU time with one thread, which other load does not disturb; else wall time."""
    if sample.device is not None:
        return sample.device
    return sample.cpu if options.threads == 1 else sample.wall


def _most_gib(options: Options) -> float:
    if options.most_gib is not None:
        return options.most_gib
    if options.device.startswith("cuda"):
        return 0.6 * torch.cuda.mem_get_info(options.device)[0] / GIB
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except OSError:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 0.6 * free / GIB


def _place(options: Options) -> dict[str, Any]:
    """What a figure depends on beside the case."""
    return {
        "csakit": csakit.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": options.device if options.device == "cpu" else torch.cuda.get_device_name(options.device),
        "processor": _processor(),
        "threads": options.threads,
        "allocator": " ".join(f"{name}={value}" for name, value in options.settings.items()) or "default",
        "load": round(os.getloadavg()[0], 2),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
