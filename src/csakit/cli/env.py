"""`csakit env`: what this machine offers, for a bug report."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from typing import Any

NAME = "env"
SUMMARY = "print versions, backends, threads and compilers, as a bug report needs them"

PACKAGES = ("csakit", "torch", "transformers", "safetensors", "rich", "numpy", "triton")
COMPILERS = ("c++", "g++", "clang++", "nvcc", "hipcc")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def run(args: argparse.Namespace) -> int:
    """Print the facts."""
    facts = collect()
    if args.json:
        print(json.dumps(facts))
    else:
        for group, values in facts.items():
            print(f"{group}:")
            for key, value in values.items():
                print(f"  {key:14} {value if value is not None else 'not found'}")
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """Versions, devices and compilers; None for what is not there."""
    import torch

    import csakit.backends

    accelerators = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "system": {"platform": platform.platform(), "python": platform.python_version(), "processors": os.cpu_count()},
        "packages": {name: _version(name) for name in PACKAGES},
        "torch": {
            "threads": torch.get_num_threads(),
            "cpu features": torch.backends.cpu.get_cpu_capability(),
            "cuda": torch.version.cuda,
            "rocm": torch.version.hip,
            "accelerators": ", ".join(accelerators) or None,
        },
        "csakit": {"backends": ", ".join(csakit.backends.NAMES), "native kernels": csakit.backends.load("cpu-native").build.state()},
        "compilers": {name: _compiler(name) for name in COMPILERS},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _compiler(name: str) -> str | None:
    """The first line a compiler says about itself."""
    path = shutil.which(name)
    if path is None:
        return None
    told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return f"{(told.stdout or told.stderr).strip().splitlines()[0]} ({path})" if told.stdout or told.stderr else path
