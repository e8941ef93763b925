"""The recorded tables are whole, and benchmarks/README.md shows what they say."""

from __future__ import annotations

import importlib.util
import pathlib
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from csakit import cli
from csakit.bench import picture, records, suites
from csakit.cli import main

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"
TABLES = sorted(FOLDER.glob("*.csv"))


def shown(text: str) -> dict[str, str]:
    """{file: output} of the blocks of the page that begin with a `--read` command."""
    blocks = re.findall(r"```text\n\$ csakit bench --read benchmarks/(\S+)\n(.*?)```", text, re.DOTALL)
    return dict(blocks)


def test_every_recorded_table_is_shown() -> None:
    assert TABLES
    assert shown((FOLDER / "README.md").read_text()).keys() == {path.name for path in TABLES}


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_the_page_shows_what_a_table_says(path, capsys) -> None:
    assert main(["bench", "--read", str(path)]) == 0
    assert shown((FOLDER / "README.md").read_text())[path.name].strip() == capsys.readouterr().out.strip()


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_the_picture_is_drawn_from_its_table(path) -> None:
    assert path.with_suffix(".svg").read_text() == picture.draw(records.read_csv(path))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_nobody_disagreed_when_it_was_recorded(path) -> None:
    rows = records.read_csv(path)
    assert {row.status for row in rows} <= {"ok", "skipped"}
    assert all(row.provider_version and row.torch and row.processor for row in rows if row.status == "ok")


@pytest.fixture(scope="module")
def render():
    spec = importlib.util.spec_from_file_location("render", FOLDER / "render.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_front_page_quotes_the_tables(render) -> None:
    tables = {path.stem: records.read_csv(path) for path in TABLES}
    for block in render.MARKS["figures"].finditer((FOLDER.parent / "README.md").read_text()):
        assert block[0] == block[1] + render.figures(tables) + block[2]


def test_every_table_of_the_recording_has_its_command_and_trial(render, monkeypatch, tmp_path) -> None:
    """Each command parses, and asks for cases; what is run is what the page shows."""
    import record

    ran = []
    monkeypatch.setattr("subprocess.run", lambda line, **options: ran.append((line, options["env"])) or SimpleNamespace(returncode=0))
    assert record.main(["--trial", str(tmp_path), "--megatron", "/somewhere"]) == 0
    parser = cli.parser()
    shown = [record.command(table, options) for table in record.TABLES for options in table.commands]
    assert len(ran) == len(shown)
    for (line, settings), said in zip(ran, shown):
        args = parser.parse_args(line[line.index("bench") :])
        assert args.append and args.suite in suites.SUITES and f"--suite {args.suite}" in said
        assert all(settings[name] == value for name, value in re.findall(r"(\w+_?)=(\S+)", said))
    assert {settings.get("THP_MEM_ALLOC_ENABLE") for _, settings in ran} == {None, "1"}
    assert any("/somewhere" in line for line, _ in ran)


def test_rendering_shows_layers_steps_and_goals(render, tmp_path, monkeypatch) -> None:
    (tmp_path / "benchmarks").mkdir()
    rows = records.read_csv(TABLES[0])
    row = next(row for row in rows if row.figure == "wall")
    sizes = {"tokens": 1024, "heads": 64, "width": 512, "topk": 512, "index_heads": 64, "index_width": 128}

    def of(operation, provider, figure, value, **fields):
        return replace(row, operation=operation, provider=provider, figure=figure, value=value, low=None, high=None, **sizes | fields)

    layers = [of("csa", who, "wall", 1e3 * n) for n, who in enumerate(("csakit-nn", "csakit-installed", "transformers"), 1)]
    layers += [of("csa", row.provider, "error", 2e-6) for row in layers]
    layers.append(of("csa", "csakit-nn", "memory peak", 512.0))
    layers.append(of("csa-backward", "transformers", "error", None, status="skipped"))
    layers.append(of("csa-backward", "csakit-nn", "error", 1e-6))
    layers.append(of("csa-backward", "csakit-nn", "wall", 4e3))
    steps = [of("step", "csakit-installed", "tokens", 300.0), of("step", "transformers", "tokens", 200.0)]
    steps += [of("step", row.provider, "error", 0.0) for row in steps]
    teacher = [of("attend-teacher", "csakit-cpu", "against", 1.25, baseline="attend"), of("attend-teacher", "csakit-cpu", "error", 0.0)]
    (tmp_path / "benchmarks" / "README.md").write_text("<!-- tables: begin -->\nold\n<!-- tables: end -->\n")
    (tmp_path / "README.md").write_text("before\n<!-- figures: begin -->\nold\n<!-- figures: end -->\nafter\n")
    for name, found in (("layers", layers), ("step", steps), ("variants", teacher)):
        timed = [replace(row, figure="cpu") for row in found if row.figure == "error"]  # for the pictures
        records.append(tmp_path / "benchmarks" / f"{name}.csv", [*found, *(replace(row, value=1.0) for row in timed if row.status == "ok")])
    monkeypatch.chdir(tmp_path)
    render.render(tmp_path / "benchmarks")
    front, page = (tmp_path / "README.md").read_text(), (tmp_path / "benchmarks" / "README.md").read_text()
    assert front.startswith("before\n<!-- figures: begin -->\nOne V4-Flash-width layer") and front.endswith(
        "<!-- figures: end -->\nafter\n"
    )
    assert "| compressed sparse, forward | 1024 | 1.00 s, 0.5 GiB | 2.00 s | 3.00 s | 3.0 x |" in front
    assert "| compressed sparse, forward and backward | 1024 | 4.00 s | - | does not fit |  |" in front
    assert "300 tokens per second with the indexers' training, 200 in stock Transformers without (1.50 x)" in front
    assert "| the teacher on top of attention, 1024 x 64 x 512 | -20 %, at most 3 % (held) |" in front
    assert "old" not in page and "trains 300" in page
    assert "csakit bench --suite step --operations step --append --out benchmarks/step.csv" in page
    assert shown(page).keys() == {"layers.csv", "step.csv", "variants.csv"}
