"""One contest from beginning to end: the agreement of every provider, then times in turns, then memory, parts and starts.

Kernels are functions of this process; layers and steps each have a process of their own, whose calls tell time and memory at once.
"""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import csakit

from . import agreement, problem, providers, starts
from .figures import Figure, ratio, summary
from .measurement import Sample, interleaved, products, sampled
from .records import FIGURES, PEAK, Row
from .shapes import KERNELS, Case, useful_flops
from .worker import Memory, Worker, measure

if TYPE_CHECKING:
    from .runner import Options
    from .suites import Contest, Suite

GIB = 1 << 30
Finding = tuple[str, Figure, bool, str]  # figure, value, whether it has quantiles, baseline


@dataclass(frozen=True)
class Entry:
    """A provider at a case: the verdict, and what to call when it is good.

    Attributes:
        call: one call, timed; None where the verdict is bad.
        worker: the process behind it, of layers and steps.
    """

    case: Case
    provider: str
    verdict: Mapping[str, Any]
    call: Callable[[], Sample] | None = None
    worker: Worker | None = None


class Measured:
    """A contest being measured."""

    def __init__(self, name: str, suite: Suite, contest: Contest, options: Options, tell: Callable[[str], None]) -> None:
        self.name, self.suite, self.contest, self.options, self.tell = name, suite, contest, options, tell
        self.place = _place(options)
        # with several threads somewhere, wall time is what all of the contest have in common
        self.clock = "cpu" if all(case.threads == 1 for case in contest.cases) else "wall"
        self.memories: dict[int, list[Memory]] = {}

    def rows(self, names: Sequence[str] | None, found: Callable[[str], providers.Provider | str]) -> list[Row]:
        """The rows of every provider at every case."""
        entries: list[Entry] = []
        try:
            for case in self.contest.cases:
                entries += self._entries(case, names, found)
            return list(self._measure(entries))
        finally:
            for entry in entries:
                if entry.worker is not None:
                    entry.worker.close()

    def _entries(self, case: Case, names: Sequence[str] | None, found: Callable[[str], providers.Provider | str]) -> Iterator[Entry]:
        names = names or providers.names(case.operation, megatron=self.options.megatron is not None)
        if self.contest.own:
            names = [name for name in names if name.startswith("csakit-")]
        _set_threads(case.threads)
        whole = problem.make(case, device=self.options.device) if case.operation in KERNELS else None
        taking: list[tuple[str, providers.Provider]] = []
        for name in names:
            provider = found(name)
            reason = provider if isinstance(provider, str) else self._too_big(provider, case)
            if isinstance(provider, str) or reason:
                version = "" if isinstance(provider, str) else provider.version
                yield Entry(case, name, {"status": "skipped", "note": reason, "error": None, "version": version})
            else:
                taking.append((name, provider))
        if whole is None:
            workers = [(name, Worker(name, case, device=self.options.device, megatron=self.options.megatron)) for name, _ in taking]
            yield from (self._apart(case, name, worker) for name, worker in workers)
            return
        for name, provider in taking:
            verdict, run = agreement.judge(provider, whole)
            yield Entry(case, name, verdict, None if run is None else self._timed(run, case.threads))

    def _too_big(self, provider: providers.Provider, case: Case) -> str | None:
        needed, most = provider.bytes_needed(case) / GIB, _most_gib(self.options)
        return f"needs about {needed:.1f} GiB; {most:.1f} are allowed" if needed > most else None

    def _apart(self, case: Case, name: str, worker: Worker) -> Entry:
        try:
            verdict = worker.verdict()
        except RuntimeError as error:
            verdict = {"status": "failed", "note": str(error), "error": None, "version": ""}
        if verdict["status"] != "ok":
            worker.close()
            return Entry(case, name, verdict)
        memories = self.memories.setdefault(id(worker), [])

        def call() -> Sample:
            sample, memory = worker.run()
            memories.append(memory)
            return sample

        return Entry(case, name, verdict, call, worker)

    def _timed(self, run: Callable[[], Any], threads: int) -> Callable[[], Sample]:
        sample = sampled(run, self.options.device)

        def call() -> Sample:
            _set_threads(threads)
            return sample()

        return call

    def _measure(self, entries: Sequence[Entry]) -> Iterator[Row]:
        calls: dict[Any, Callable[[], Sample]] = {number: entry.call for number, entry in enumerate(entries) if entry.call is not None}
        peaks = self._products(entries)
        started = time.monotonic()
        patient = self.options.patience
        samples, failures = interleaved(
            calls | {key: call for key, (call, _) in peaks.items()},
            self.options.repeats or self.suite.repeats,
            go_on=lambda: time.monotonic() - started < patient,
        )
        best: dict[tuple[str, int], Figure] = {}
        for key, (_, flops) in peaks.items():
            figure = self._summary(samples[key]).under(flops / 1e9)
            best[key[:2]] = max(best.get(key[:2], figure), figure)
        for case in self.contest.cases:
            kind = (case.dtype, case.threads)
            if kind in best:
                repeats = len(next(samples[key] for key in peaks if key[:2] == kind))
                yield self._row(case, PEAK, torch.__version__, "throughput", best[kind], repeats=repeats)
            for number, entry in enumerate(entries):
                if number in failures:
                    entry = replace(entry, call=None, verdict={**entry.verdict, "status": "failed", "note": failures[number]})
                if entry.case == case:
                    yield from self._rows(number, entry, entries, samples, best.get(kind))

    def _products(self, entries: Sequence[Entry]) -> dict[Any, tuple[Callable[[], Sample], int]]:
        """The matrix products to time beside the providers, for every dtype and number of threads that somebody is timed with."""
        found = {}
        for dtype, threads in dict.fromkeys((entry.case.dtype, entry.case.threads) for entry in entries if entry.call is not None):
            for name, (multiply, flops) in products(dtype, self.options.device).items():
                found[dtype, threads, name] = (self._timed(multiply, threads), flops)
        return found

    def _rows(
        self, number: int, entry: Entry, entries: Sequence[Entry], samples: Mapping[Any, Sequence[Sample]], best: Figure | None
    ) -> Iterator[Row]:
        verdict, who = entry.verdict, (entry.case, entry.provider, entry.verdict["version"])
        error = None if verdict["error"] is None else Figure(*3 * (verdict["error"],))
        yield self._row(*who, "error", error, ranged=False, status=verdict["status"], note=verdict["note"])
        if entry.call is None:
            return
        for name, figure, ranged, baseline in self._findings(number, entries, samples, best):
            repeats = len(samples[number]) if ranged else 1
            yield self._row(*who, name, figure, ranged=ranged, repeats=repeats, baseline=baseline)

    def _findings(
        self, number: int, entries: Sequence[Entry], samples: Mapping[Any, Sequence[Sample]], best: Figure | None
    ) -> Iterator[Finding]:
        """Everything measured of one entry."""
        entry, own = entries[number], samples[number]
        for clock in ("cpu", "wall", "device"):
            times = [getattr(sample, clock) for sample in own]
            if None not in times:
                yield clock, summary(times).times(1e3), True, ""
        flops = useful_flops(entry.case)
        if flops is None:
            yield "tokens", summary([sample.wall for sample in own]).under(entry.case.shape.tokens), True, ""
        else:
            throughput = self._summary(own).under(flops / 1e9)
            yield "throughput", throughput, True, ""
            if best is not None:
                yield "of peak", throughput.times(100 / best.value), True, ""
        yield from self._ratios(number, entries, samples)
        yield from self._single(entry)

    def _ratios(self, number: int, entries: Sequence[Entry], samples: Mapping[Any, Sequence[Sample]]) -> Iterator[Finding]:
        """Speedups over the baseline and, of csakit's, over everybody else; and over itself at the contest's first case."""
        entry, main = entries[number], self.options.against(entries[number].case)
        others = [(other, entries[other]) for other in range(len(entries)) if other in samples]
        for other, baseline in sorted(others, key=lambda pair: pair[1].provider != main):  # the baseline first: tables show that one
            pairs = ([self._seconds(sample) for sample in samples[who]] for who in (other, number))
            if baseline.case == entry.case:
                if baseline.provider == main or (entry.provider.startswith("csakit-") and other != number):
                    yield "speedup", ratio(*pairs), True, baseline.provider
            elif baseline.provider == entry.provider and baseline.case == self.contest.cases[0]:
                yield "against", ratio(*pairs), True, self.contest.difference[0]

    def _single(self, entry: Entry) -> Iterator[Finding]:
        """What is measured once: memory, parts and starts."""

        def single(name: str, value: float) -> Finding:
            return name, Figure(value, value, value), False, ""

        try:
            used = self._memory(entry)
            if used is not None:
                yield single("memory peak", used.peak)
                yield single("memory extra", max(0.0, used.peak - used.results))
            if self.suite.parts and entry.worker is not None:
                for part, milliseconds in entry.worker.parts().items():
                    yield single(f"part {part}", milliseconds)
            if self.suite.starts and entry.case == self.suite.cases[0] and entry.provider.startswith("csakit-"):
                yield from ((name, figure, True, "") for name, figure in starts.measure(entry.provider, entry.case).items())
        except RuntimeError as error:
            self.tell(str(error))

    def _memory(self, entry: Entry) -> Memory | None:
        """Of the first call of a worker, which found its memory untouched, or in a fresh process."""
        if entry.worker is not None:
            return self.memories[id(entry.worker)][0]
        if not self.options.memory:
            return None
        return measure(entry.provider, entry.case, device=self.options.device, megatron=self.options.megatron)

    def _summary(self, samples: Sequence[Sample]) -> Figure:
        return summary([self._seconds(sample) for sample in samples])

    def _seconds(self, sample: Sample) -> float:
        """The clock that counts: the device's on a GPU; CPU time with one thread, which other load does not disturb; else wall time."""
        return getattr(sample, self.clock) if sample.device is None else sample.device

    def _row(
        self,
        case: Case,
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
            "suite": self.name,
            "provider": provider,
            "provider_version": version,
            "status": status,
            "note": note,
            "repeats": repeats,
            "baseline": baseline,
        }
        sizes = {**asdict(case), **asdict(case.shape)}
        del sizes["shape"]
        return Row(**sizes, **self.place, **about, figure=figure, value=value, unit=FIGURES[figure][0], **quantiles)  # type: ignore[arg-type]


def _set_threads(threads: int) -> None:
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


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
        "allocator": options.allocator,
        "load": round(os.getloadavg()[0], 2),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
