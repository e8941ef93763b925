"""Clocks: interleaved repeats of prepared functions, each with CPU, wall and (on a GPU) device time."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

PRODUCTS = {
    "cpu": ((1024, 1024, 1024), (512, 640, 512)),
    "cuda": ((8192, 8192, 8192),),
}  # [M, K, N] of the matrix products that show the peak


SHORT = 0.02  # seconds


class Sample(NamedTuple):
    """Seconds of one call."""

    cpu: float  # of all threads of the process
    wall: float
    device: float | None  # between two events on the GPU's stream


def interleaved(
    calls: Mapping[Any, Callable[[], Sample]], repeats: int, *, go_on: Callable[[], bool] = lambda: True
) -> tuple[dict[Any, list[Sample]], dict[Any, str]]:
    """(samples of every timed call, why a call failed): once per round, in another order each round, so that all meet the same weather.

    What fails is called no more and has no samples.

    Args:
        repeats: rounds; asked before each but the first, `go_on` may end them sooner.
    """
    samples: dict[Any, list[Sample]] = {name: [] for name in calls}
    failures: dict[Any, str] = {}
    gc.collect()
    gc.disable()
    try:
        for number in range(repeats):
            if number and not go_on():
                break
            names = list(samples)
            turn = number % len(names) if names else 0
            for name in names[turn:] + names[:turn]:
                try:
                    samples[name].append(calls[name]())
                except Exception as error:  # whatever a provider raises is its result
                    failures[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                    del samples[name]
    finally:
        gc.enable()
    return samples, failures


def once(function: Callable[[], Any], device: str, calls: int = 1) -> Sample:
    """One call, or the mean of several one after another; the last one's results are dropped after the clock has stopped."""
    results = None
    if not device.startswith("cuda"):
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            results = function()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        del results
        return Sample(cpu / calls, wall / calls, None)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.current_stream(device)
    torch.cuda.synchronize(device)
    wall, cpu = time.perf_counter(), time.process_time()
    begin.record(stream)
    for _ in range(calls):
        results = function()
    end.record(stream)
    torch.cuda.synchronize(device)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    del results
    return Sample(cpu / calls, wall / calls, begin.elapsed_time(end) / 1e3 / calls)


def sampled(function: Callable[[], Any], device: str) -> Callable[[], Sample]:
    """What times a call of function. Short ones are averaged over SHORT: alone, each would find its code and data out of the caches."""
    calls = 0

    def sample() -> Sample:
        nonlocal calls
        if not calls:
            first = once(function, device)
            if first.wall >= SHORT:
                calls = 1
                return first
            calls = math.ceil(SHORT / once(function, device).wall)
        return once(function, device, calls)

    return sample


def products(dtype: str, device: str) -> dict[str, tuple[Callable[[], Any], int]]:
    """The matrix products to time beside the providers, each with its operations: the best of them is the machine's peak.

    Of float32 where the CPU multiplies dtype slower than that: a kernel that widens what it reads has no less to reach.
    """
    found: dict[str, tuple[Callable[[], Any], int]] = {}
    if device == "cpu" and torch.finfo(getattr(torch, dtype)).bits < 32 and _product_seconds(dtype) > _product_seconds("float32"):
        dtype = "float32"
    for rows, inner, columns in PRODUCTS["cuda" if device.startswith("cuda") else "cpu"]:
        left = torch.ones(rows, inner, dtype=getattr(torch, dtype), device=device)
        right = torch.ones(inner, columns, dtype=left.dtype, device=device)
        out = left @ right
        flops = 2 * rows * inner * columns
        count = max(1, round(2e9 / flops))  # long enough for the clock

        def multiply(left: torch.Tensor = left, right: torch.Tensor = right, out: torch.Tensor = out, count: int = count) -> None:
            for _ in range(count):
                torch.mm(left, right, out=out)

        found[f"product {rows}x{inner}x{columns}"] = (multiply, count * flops)
    return found


def _product_seconds(dtype: str) -> float:
    square = torch.ones(256, 256, dtype=getattr(torch, dtype))
    torch.mm(square, square)
    begun = time.process_time()
    torch.mm(square, square)
    return time.process_time() - begun
