"""The kernels as a shared library: compiled on first use where there is a C++ compiler, cached per user, loaded with ctypes.

The name of the library in the cache says what it was made from: the vector instructions, and a hash of sources and flags. The compiler is
no part of it: the interface is plain C, so what any compiler has built ahead of time serves where there is none. Builds are locked against
each other, and a library appears under its name only when it is complete.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import pathlib
import platform
import shutil
import subprocess
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator

import torch

SOURCES = pathlib.Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=fast", "-Wno-psabi")
AVX512 = ("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mfma")
LEVELS = {"avx2": ("-mavx2", "-mfma"), "avx512": AVX512, "avx512_bf16": (*AVX512, "-mavx512bf16")}
FUNCTIONS = tuple(f"csakit_{name}" for name in ("attend", "attend_backward", "log_mass", "score", "score_backward", "objective"))


class Unavailable(RuntimeError):
    """Why there are no native kernels here, in one line."""


def level() -> str:
    """The vector instructions to compile for: "avx512_bf16", "avx512" or "avx2", as this processor has them.

    Raises:
        Unavailable: the processor has none of them.
    """
    found = torch.backends.cpu.get_cpu_capability()
    if platform.machine().lower() not in ("x86_64", "amd64") or found not in ("AVX2", "AVX512"):
        raise Unavailable(f"the kernels need an x86 processor with AVX2 or AVX512; this is {platform.machine()} with {found}")
    if found == "AVX512" and torch.cpu.get_capabilities().get("avx512_bf16"):
        return "avx512_bf16"  # pairs of bfloat16 at twice the rate of floats; weights are rounded to bfloat16 for it
    return found.lower()


def compiler() -> str:
    """The path of a C++ compiler that takes the flags of GCC.

    Raises:
        Unavailable: there is none.
    """
    if platform.system() != "Linux":
        raise Unavailable(f"the kernels are built on Linux only; this is {platform.system()}")
    configured = (sysconfig.get_config_var("CXX") or "").split()
    for name in ("g++", "c++", "clang++", *configured[:1]):
        path = shutil.which(name)
        if path:
            return path
    raise Unavailable("no C++ compiler (g++, c++ or clang++) on the path")


def cache_folder() -> pathlib.Path:
    """Where libraries are kept for this user."""
    return pathlib.Path.home() / ".cache" / "csakit"


def library(*, folder: pathlib.Path | None = None, cxx: str | None = None) -> pathlib.Path:
    """The path of the compiled library, which is compiled now unless it is in the cache.

    Raises:
        Unavailable: no compiler, another processor, a cache that cannot be written, or a build that failed.
    """
    folder, flags = folder or cache_folder(), (*FLAGS, *LEVELS[level()])
    path = _path(folder, flags)
    if path.exists():
        return path
    cxx = cxx or compiler()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if not path.exists():  # another process may have built it meanwhile
                _compile(cxx, flags, path)
    except OSError as error:
        raise Unavailable(f"the cache folder {folder} cannot be used: {error}") from error
    return path


@functools.cache
def load() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        Unavailable: as `library`; or what was built cannot be loaded.
    """
    return opened(library())


def opened(path: pathlib.Path) -> ctypes.CDLL:
    """A compiled library, loaded.

    Raises:
        Unavailable: it cannot be.
    """
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"{path} cannot be loaded: {error}") from error
    loaded.csakit_lanes.restype = ctypes.c_long
    for name in FUNCTIONS:
        getattr(loaded, name).argtypes, getattr(loaded, name).restype = (ctypes.c_char_p,), None
    return loaded


@functools.cache
def why_not() -> str | None:
    """Why the native kernels cannot run, or None: they can. The first call builds them; it warns, once, where a build fails."""
    try:
        load()
    except Unavailable as error:
        if error.__cause__ is not None:  # something is broken, as against something that is not there
            warnings.warn(f"csakit runs without its native CPU kernels, several times slower: {error}", stacklevel=2)
        return str(error)
    return None


def state() -> str:
    """One line for people: which kernels run on this machine, or why none do. Builds nothing."""
    try:
        path = _path(cache_folder(), (*FLAGS, *LEVELS[level()]))
        return f"{level()}: {path}" if path.exists() else f"{level()}: to be built on first use with {compiler()}"
    except Unavailable as error:
        return f"none, the torch path runs: {error}"


def _path(folder: pathlib.Path, flags: tuple[str, ...]) -> pathlib.Path:
    return folder / f"kernels-{level()}-{_fingerprint(flags)}.so"


def _fingerprint(flags: tuple[str, ...]) -> str:
    known = hashlib.sha256(repr(flags).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        known.update(source.name.encode() + source.read_bytes())
    return known.hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    import fcntl

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also by a process that dies
        yield


def _compile(cxx: str, flags: tuple[str, ...], path: pathlib.Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = pathlib.Path(folder) / path.name
        command = [cxx, *flags, "-o", str(part), str(SOURCES / "kernels.cpp")]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            lines = (
                [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines() or [f"exit {error.returncode}"]
            )
            raise Unavailable(f"{cxx} failed: {lines[0].strip()} (the whole output: csakit build)") from error
        part.replace(path)
