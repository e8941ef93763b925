"""Documents: where they come from, in which order, on which side, and how unreadable ones are reported."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet as pyarrow_parquet
import pytest

from csakit.train.config import DataConfig
from csakit.train.corpus import DataError, load


def folder_of(path: Path, count: int = 30) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (path / f"{number:02d}.txt").write_text(f"document {number}\n" * (number + 1))
    return path


def load_from(path: Path, **options) -> tuple[list[str], list[str]]:
    corpus = load(DataConfig(path=str(path), **options))
    return [document.name for document in corpus.training], [document.name for document in corpus.heldout]


def test_the_standard_library_is_the_default_and_gives_many_documents():
    corpus = load(DataConfig())
    names = {document.name for document in (*corpus.training, *corpus.heldout)}
    assert len(names) > 200 and "argparse.py" in names and not any("site-packages" in name or name.startswith("test/") for name in names)
    assert 0.02 < len(corpus.heldout) / len(names) < 0.25


def test_a_folder_is_read_in_the_order_of_names_whatever_the_disk_says(tmp_path):
    forward, backward = tmp_path / "a", tmp_path / "b"
    folder_of(forward)
    backward.mkdir()
    for path in sorted(forward.iterdir(), reverse=True):
        (backward / path.name).write_bytes(path.read_bytes())
    assert load_from(forward) == load_from(backward)
    training, heldout = load_from(forward)
    assert training == sorted(training) and heldout and len(training) > len(heldout)


def test_new_documents_leave_the_old_ones_on_their_side(tmp_path):
    training, heldout = load_from(folder_of(tmp_path, 30))
    more_training, more_heldout = load_from(folder_of(tmp_path, 60))
    assert set(training) <= set(more_training) and set(heldout) <= set(more_heldout) and len(heldout) > 1


def test_copies_of_a_document_are_on_one_side(tmp_path):
    folder_of(tmp_path)
    for path in list(tmp_path.iterdir()):
        (tmp_path / f"copy-{path.name}").write_bytes(path.read_bytes())
    training, heldout = load_from(tmp_path)
    assert {name.removeprefix("copy-") for name in training}.isdisjoint(name.removeprefix("copy-") for name in heldout)


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_two_documents_are_enough_for_both_sides_whatever_the_share(tmp_path, share):
    training, heldout = load_from(folder_of(tmp_path, 2), heldout=share)
    assert len(training) == len(heldout) == 1


def test_one_document_is_cut_at_a_line_and_nothing_is_lost(tmp_path):
    text = "".join(f"line {number}: größer\n" for number in range(100))
    path = tmp_path / "one.txt"
    path.write_text(text, encoding="utf-8")
    corpus = load(DataConfig(path=str(path), heldout=0.25))
    (start,), (end,) = corpus.training, corpus.heldout
    assert (start.text + end.text).decode() == text and end.text.startswith(b"line ") and 70 <= start.text.count(b"\n") <= 80


def test_one_document_without_lines_is_cut_between_characters(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("ü" * 51, encoding="utf-8")
    corpus = load(DataConfig(path=str(path), heldout=0.5))
    assert len(corpus.training[0].text.decode() + corpus.heldout[0].text.decode()) == 51


def test_hidden_files_binaries_and_empty_files_are_left_out_and_counted(tmp_path):
    folder_of(tmp_path, 5)
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("secret")
    (tmp_path / "picture.bin").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes("größer".encode("latin-1"))
    (tmp_path / "empty.txt").write_text("\n")
    corpus = load(DataConfig(path=str(tmp_path)))
    names = [document.name for document in (*corpus.training, *corpus.heldout)]
    assert sorted(names) == [f"{number:02d}.txt" for number in range(5)]
    assert corpus.skipped == 2 and "2 files that are not UTF-8 text left out" in corpus.describe()


def test_a_zip_gives_the_same_split_as_the_folder_it_was_made_of(tmp_path):
    source = folder_of(tmp_path / "texts")
    with zipfile.ZipFile(tmp_path / "texts.zip", "w") as archive:
        for path in source.iterdir():
            archive.write(path, path.name)
    training, heldout = load_from(tmp_path / "texts.zip")
    assert ([name.removeprefix("texts.zip/") for name in training], [name.removeprefix("texts.zip/") for name in heldout]) == load_from(
        source
    )


def test_a_jsonl_gives_one_document_a_line(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join([json.dumps({"body": "one"}), "", json.dumps("two"), json.dumps({"body": "three\u2028"})]), encoding="utf-8")
    corpus = load(DataConfig(path=str(path), text_key="body"))
    documents = {document.name: document.text.decode() for document in (*corpus.training, *corpus.heldout)}
    assert documents == {"texts.jsonl:000000001": "one", "texts.jsonl:000000003": "two", "texts.jsonl:000000004": "three\u2028"}


def test_members_of_a_zip_are_read_by_their_names(tmp_path):
    with zipfile.ZipFile(tmp_path / "texts.zip", "w") as archive:
        archive.writestr("a.jsonl", '{"text": "one"}\n{"text": "two"}\n')
        archive.writestr("b/c.txt", "three")
    training, heldout = load_from(tmp_path / "texts.zip")
    names = ["texts.zip/a.jsonl:000000001", "texts.zip/a.jsonl:000000002", "texts.zip/b/c.txt"]
    assert sorted(training + heldout) == names


def test_a_parquet_gives_one_document_a_row_of_its_column(tmp_path):
    path = parquet(tmp_path / "texts.parquet", {"n": [1, 2, 3], "body": ["one", "größer", "three"]})
    corpus = load(DataConfig(path=str(path), text_key="body"))
    documents = {document.name: document.text.decode() for document in (*corpus.training, *corpus.heldout)}
    assert documents == {f"texts.parquet:{number:09d}": text for number, text in enumerate(["one", "größer", "three"])}


def test_a_parquet_without_the_column_or_with_a_row_that_is_no_text_or_damaged_is_named(tmp_path):
    with pytest.raises(DataError, match=r"a\.parquet: expected text in the column 'text' \(set data\.text_key\), got columns n, body"):
        load_from(parquet(tmp_path / "a.parquet", {"n": [1], "body": ["x"]}))
    with pytest.raises(DataError, match=r"b\.parquet, row 1: expected text in the column 'text', got None"):
        load_from(parquet(tmp_path / "b.parquet", {"text": ["x", None]}))
    damaged = parquet(tmp_path / "c.parquet", {"text": ["x" * 1000]})
    damaged.write_bytes(damaged.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"c\.parquet: not a readable \.parquet: "):
        load_from(damaged)


def test_a_parquet_without_datasets_names_the_package(tmp_path, monkeypatch):
    path = parquet(tmp_path / "a.parquet", {"text": ["x"]})
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"\.parquet files need the package datasets: pip install 'csakit\[parquet\]'"):
        load_from(path)


def parquet(path: Path, columns: dict) -> Path:
    pyarrow_parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": ', r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"body": "x"}\n', r"a\.jsonl, line 1: expected text under the key 'text' \(set data\.text_key\)"),
        ("a.zip", b"PK no zip", r"a\.zip: not a readable zip"),
        ("a.txt", b"", "no text found"),
        ("a.bin", b"\0\1\2", r"no text found, 1 files that are not UTF-8"),
        ("a.txt", b"x", "1 bytes are too few to train on a part and hold out another"),
    ],
)
def test_what_cannot_be_read_is_named_with_the_reason(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(DataConfig(path=str(tmp_path / name)))


def test_a_missing_path_and_an_empty_folder_are_refused(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        load(DataConfig(path=str(tmp_path / "nowhere")))
    with pytest.raises(DataError, match="no text found"):
        load(DataConfig(path=str(tmp_path)))


def test_a_damaged_member_of_a_zip_is_an_error_and_not_a_shorter_corpus(tmp_path):
    path = tmp_path / "texts.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", "some text " * 1000)
    raw = bytearray(path.read_bytes())
    raw[50] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(DataError, match="not a readable zip"):
        load(DataConfig(path=str(path)))


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    folder_of(tmp_path, 3)

    def refuse(self):
        raise PermissionError(13, os.strerror(13), str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"00\.txt: cannot be read: Permission denied"):
        load(DataConfig(path=str(tmp_path)))


def test_a_folder_that_may_not_be_entered_is_named(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, os.strerror(13), str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        load(DataConfig(path=str(tmp_path)))
