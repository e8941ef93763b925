"""What importing needs, and which module may import which: fresh processes, and the source read as a tree."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

SOURCE = pathlib.Path(__file__).parents[1] / "src" / "csakit"

TORCH_ALONE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {refused}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
import torch
before = set(sys.modules)
import csakit
layout = csakit.Layout.batch(1, 8, ratio=2, window=2)
x = torch.randn(1, 8, 2, 4)
selection = csakit.select(x, x[:, :4, 0], None, 2, layout)
attention = csakit.attend(x, x[:, :, 0], x[:, ::2, 1], layout, indices=selection.indices, teacher=True)
csakit.distill(selection.scores, attention.log_mass, layout)
csakit.metrics.attention_pairs(layout, 2)
print(*sorted({{name.split(".")[0] for name in set(sys.modules) - before}}))
"""


def python(script: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_the_core_needs_torch_alone() -> None:
    """With every optional package out of reach the verbs run, and nothing outside torch, csakit and the standard library is imported."""
    optional = {
        "transformers",
        "safetensors",
        "rich",
        "matplotlib",
        "numpy",
        "tokenizers",
        "huggingface_hub",
        "triton",
        "hypothesis",
        "pytest",
    }
    finished = python(TORCH_ALONE.format(refused=optional))
    assert finished.returncode == 0, finished.stderr
    foreign = set(finished.stdout.split()) - set(sys.stdlib_module_names) - {"torch", "csakit"}
    assert not {name for name in foreign if not name.startswith("_")}, foreign


def test_import_changes_nothing_of_torch() -> None:
    """No default dtype, device, thread count, grad mode, seed or environment variable is touched."""
    finished = python("""
import os, torch
parts = torch.get_default_dtype, torch.get_default_device, torch.get_num_threads, torch.is_grad_enabled, torch.initial_seed
state = lambda: ([part() for part in parts], dict(os.environ))
before, random = state(), torch.get_rng_state()
import csakit
assert state() == before and torch.equal(random, torch.get_rng_state())
from csakit import checks
assert not checks.debugging()
""")
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["audit", "--help"], ["report", "--help"], ["env", "--help"], ["--nonsense"]]
)
def test_help_and_usage_errors_come_without_torch(arguments: list[str]) -> None:
    finished = python(f"""
import sys
from csakit.cli import main
try:
    code = main({arguments!r})
except SystemExit as stop:
    code = stop.code
assert "torch" not in sys.modules
sys.exit(code)
""")
    assert finished.returncode == (0 if "--help" in arguments else 2), finished.stderr
    assert "csakit" in (finished.stdout or finished.stderr)


# ---- arrows ----------------------------------------------------------------------------------------------------------

# cli -> train, audit, bench, report -> integrations -> nn -> verbs -> ops -> backends -> layout, checks
LEVELS = [
    {"cli", "__main__"},
    {"train", "audit", "bench", "report"},
    {"integrations"},
    {"nn", "checkpoints", "parallel"},
    {"compression", "selection", "attention", "distillation", "metrics"},
    {"ops"},
    {"backends"},
    {"layout", "checks"},
]
RANK = {part: rank for rank, parts in enumerate(LEVELS) for part in parts}


def imports_of(path: pathlib.Path) -> set[str]:
    """The csakit modules a file imports, as dotted paths below csakit; lazy imports inside functions count."""
    package = ["csakit", *path.relative_to(SOURCE).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "csakit"}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            if module[:1] == ["csakit"]:
                found |= {".".join([*module, alias.name]) for alias in node.names}
    return {name.removeprefix("csakit").removeprefix(".") for name in found}


FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def part_of(dotted: str) -> str:
    return dotted.split(".")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_one_way(path: pathlib.Path) -> None:
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    assert own in RANK, f"{own} has no place among the arrows"
    for name in imports_of(path):
        part = part_of(name)
        if part in RANK:
            assert RANK[part] >= RANK[own], f"{own} imports {name}"
        elif name:
            assert RANK[own] < RANK["compression"], f"{own} is below the verbs and imports {name} from the package"


@pytest.mark.parametrize("path", [p for p in FILES if "backends" in p.parts], ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_backend_imports_no_other_backend(path: pathlib.Path) -> None:
    """What backends share is rows.py; which one runs is decided in backends/__init__.py, by name."""
    own = path.relative_to(SOURCE / "backends").parts[0].removesuffix(".py")
    for name in imports_of(path):
        if name.startswith("backends."):
            assert name.split(".")[1] in {own, "rows"}, name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_optional_packages_are_imported_where_they_are_used(path: pathlib.Path) -> None:
    """Outside integrations, train and report no module imports one at its top level; the environment is read in cli alone."""
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    tree = ast.parse(path.read_text())
    top = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    top |= {node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom) and not node.level}
    if RANK[own] >= RANK["nn"]:
        foreign = {name.split(".")[0] for name in top} - set(sys.stdlib_module_names) - {"torch", "csakit", "triton"}
        assert not foreign
    if own == "cli":
        assert not {name for name in top if name.split(".")[0] == "torch"}
    else:
        reads = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "os"}
        assert not reads & {"environ", "getenv"}
