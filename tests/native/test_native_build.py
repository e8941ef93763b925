"""Building the native kernels: the cache, the lock, and what happens where it fails."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import warnings

import pytest
import torch

import csakit
from csakit import Layout
from csakit.backends.cpu.native import build
from csakit.cli import main

# A compiler that notes that it ran and takes its time. How a library is made and kept does not depend on what is in it.
FAKE = """#!/bin/sh
echo ran >> "$(dirname "$0")/runs"
while [ "$1" != -o ]; do shift; done
echo half > "$2"; sleep 0.3; echo whole > "$2"
"""


def script(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def supported():
    try:
        build.level()
    except build.Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def fresh():
    """What is known of the library in this process is forgotten before and after."""
    for known in (build.load, build.why_not):
        known.cache_clear()
    yield
    for known in (build.load, build.why_not):
        known.cache_clear()


def attention():
    layout = Layout.batch(1, 6, ratio=2, window=2)
    x = torch.ones(1, 6, 1, 4)
    return csakit.attend(x, x[:, :, 0], x[:, :3, 0], layout).out


def test_a_second_build_finds_the_first_and_needs_no_compiler(supported, tmp_path, monkeypatch):
    cxx = script(tmp_path / "cxx", FAKE)
    first = build.library(folder=tmp_path / "cache", cxx=cxx)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert build.library(folder=tmp_path / "cache") == first
    assert first.read_text() == "whole\n" and (tmp_path / "runs").read_text() == "ran\n"
    assert sorted(p.name for p in first.parent.iterdir()) == sorted([first.name, "lock"]), "no half-made files stay"


def test_processes_that_build_at_once_compile_once_and_see_only_whole_libraries(supported, tmp_path):
    cxx = script(tmp_path / "cxx", FAKE)
    code = (
        "import pathlib, sys; from csakit.backends.cpu.native import build; "
        "print(build.library(folder=pathlib.Path(sys.argv[1]), cxx=sys.argv[2]).read_text())"
    )
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "cache"), cxx], stdout=subprocess.PIPE, text=True, env=paths)
        for _ in range(2)
    ]
    assert [process.communicate()[0].strip() for process in running] == ["whole"] * 2
    assert (tmp_path / "runs").read_text() == "ran\n"


def test_other_sources_or_flags_make_another_library(supported, tmp_path, monkeypatch):
    cxx = script(tmp_path / "cxx", FAKE)
    names = {build.library(folder=tmp_path, cxx=cxx).name}
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    names.add(build.library(folder=tmp_path, cxx=cxx).name)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "kernels.cpp").write_text("int x;")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "src")
    names.add(build.library(folder=tmp_path, cxx=cxx).name)
    assert len(names) == 3


def test_a_failed_build_is_one_warning_and_the_torch_path_runs(supported, fresh, tmp_path, monkeypatch):
    broken = script(tmp_path / "cxx", "#!/bin/sh\necho 'kernels.cpp:1: error: no such thing' >&2\necho more >&2\nexit 1\n")
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(build, "compiler", lambda: broken)
    with pytest.warns(UserWarning, match=r"without its native CPU kernels.*failed: kernels.cpp:1: error: no such thing") as told:
        out = attention()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(attention(), out)
    assert len(told) == 1 and "\n" not in str(told[0].message)
    assert (out == 1).all()
    with csakit.backend("cpu-native"), pytest.raises(RuntimeError, match=r"'cpu-native' was asked for, but .* failed: kernels.cpp:1"):
        attention()


def test_without_a_compiler_the_torch_path_runs_in_silence_and_env_says_so(supported, fresh, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (attention() == 1).all()
    assert main(["env", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["csakit"]["native kernels"]
    assert told == "none, the torch path runs: no C++ compiler (g++, c++ or clang++) on the path"
    assert main(["build"]) == 1
    assert "no C++ compiler" in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_or_loaded_is_no_traceback(supported, fresh, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(build, "compiler", lambda: script(tmp_path / "cxx", FAKE))
    for folder, message in ((tmp_path / "file", "cannot be used"), (tmp_path / "cache", "cannot be loaded")):
        monkeypatch.setattr(build, "cache_folder", lambda folder=folder: folder)
        build.why_not.cache_clear()
        with pytest.warns(UserWarning, match=message):
            assert (attention() == 1).all()


@pytest.mark.parametrize(
    ("target", "value", "message"),
    [
        ("torch.backends.cpu.get_cpu_capability", "DEFAULT", "need an x86 processor with AVX2 or AVX512"),
        ("platform.system", "Plan9", "built on Linux only; this is Plan9"),
    ],
)
def test_machines_without_kernels_are_told_why(supported, target, value, message, tmp_path, monkeypatch):
    monkeypatch.setattr(target, lambda: value)
    with pytest.raises(build.Unavailable, match=message):
        build.library(folder=tmp_path)


def test_csakit_build_says_where_the_library_is_and_first_use_loads_it(supported, capsys):
    if build.why_not():
        pytest.skip(build.why_not())
    assert main(["build", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"library": str(build.library()), "level": build.level()}
    assert build.load()._name == told["library"]
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["csakit"]["native kernels"] == f"{told['level']}: {told['library']}"


def test_a_compiler_that_is_not_there_is_a_usage_error(capsys):
    assert main(["build", "--compiler", "nobody++"]) == 2
    assert "'nobody++' is not" in capsys.readouterr().err
