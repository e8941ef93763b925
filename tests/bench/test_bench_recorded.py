"""The recorded tables are whole, and benchmarks/README.md shows what they say."""

from __future__ import annotations

import pathlib
import re

import pytest

from csakit.bench import picture, records
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
