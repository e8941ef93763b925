"""A suite from beginning to end, contest by contest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from . import providers
from .contest import Measured
from .records import Row
from .shapes import KERNELS, Case
from .suites import Suite


@dataclass(frozen=True)
class Options:
    """How a suite is run.

    Attributes:
        repeats: rounds, at most; each round measures everybody once. None: the suite's.
        patience: seconds after which a contest begins no further round.
        device: "cpu", or a CUDA device.
        baseline: the provider whose time speedups are relative to; where it was not timed there are none. None: eager, and transformers for
            layers and steps.
        most_gib: providers that would need more memory are skipped; None: 60 % of what is free.
        memory: whether peak memory is measured.
        megatron: path of a Megatron-LM checkout.
        settings: allocator settings to record, by name.
    """

    repeats: int | None = None
    patience: float = float("inf")
    device: str = "cpu"
    baseline: str | None = None
    most_gib: float | None = None
    memory: bool = True
    megatron: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def allocator(self) -> str:
        """The settings as they are recorded."""
        return " ".join(f"{name}={value}" for name, value in self.settings.items()) or "default"

    def against(self, case: Case) -> str:
        """The baseline at a case."""
        return self.baseline or ("eager" if case.operation in KERNELS else "transformers")


def run(
    name: str,
    suite: Suite,
    names: Sequence[str] | None,
    options: Options | None = None,
    *,
    done: Sequence[Row] = (),
    keep: Callable[[Sequence[Row]], None] | None = None,
    tell: Callable[[str], None] | None = None,
) -> list[Row]:
    """The rows of all contests.

    Args:
        name: of the suite, for the rows.
        suite: what is measured.
        names: of the providers, see `csakit.bench.providers`; None: those that an operation is usually measured with.
        options: how.
        done: rows of an earlier run; contests that are among them, under the same settings, are left out.
        keep: takes the rows of a contest as soon as they are there.
        tell: takes a line of progress now and then.

    Raises:
        ValueError: an unknown provider, repeats or threads below 1, or a device that is not there.
    """
    options, tell = options or Options(), tell or (lambda line: None)
    _check(suite, options)
    known: dict[str, providers.Provider | str] = {}

    def find(provider: str) -> providers.Provider | str:
        if provider not in known:
            try:
                known[provider] = providers.find(provider, megatron=options.megatron)
            except providers.Unsupported as reason:
                known[provider] = str(reason)
        return known[provider]

    for provider in names or ():
        find(provider)
    if options.megatron is not None:
        find("megatron")
    measured = {(row.case, row.allocator, row.suite) for row in done}
    before = torch.get_num_threads()
    rows: list[Row] = []
    try:
        for number, contest in enumerate(suite.contests, 1):
            about = f"{number}/{len(suite.contests)} {', '.join(map(str, contest.cases))}"
            if all((case, options.allocator, name) in measured for case in contest.cases):
                tell(f"{about}: measured before")
                continue
            tell(about)
            found = Measured(name, suite, contest, options, tell).rows(names, find)
            if keep is not None:
                keep(found)
            rows += found
        return rows
    finally:
        torch.set_num_threads(before)


def _check(suite: Suite, options: Options) -> None:
    if options.repeats is not None and options.repeats < 1:
        raise ValueError(f"repeats must be at least 1; got {options.repeats}")
    threads = min(case.threads for case in suite.cases)
    if threads < 1:
        raise ValueError(f"threads must be at least 1; got {threads}")
    kind = torch.device(options.device).type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or a CUDA device; got {options.device}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {options.device} was asked for, but this torch sees no GPU")
