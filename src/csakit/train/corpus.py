"""Documents of real text as bytes, split into training and held-out documents.

The text is the source of Python's standard library unless a folder, a file, a zip, a .jsonl or a .parquet is named. Order and split
depend on the documents alone: names are sorted, and a hash of a document's bytes decides its side, so that a copy of a
training document is never held out and new documents leave the old ones where they were.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from csakit.train.config import DataConfig

# Left out of the standard library: other people's packages, tests, and tables that are data rather than source.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3", "__pycache__"}


class DataError(Exception):
    """The text of a run cannot be read, or there is none. The message says which file and what would do."""


@dataclass(frozen=True)
class Document:
    """A text and the name it is reported under."""

    name: str
    text: bytes


@dataclass(frozen=True)
class Corpus:
    """The documents of both sides in the order of their names, where they come from, and how many files were not text."""

    source: str
    training: tuple[Document, ...]
    heldout: tuple[Document, ...]
    skipped: int

    def describe(self) -> str:
        """One line for people."""
        sizes = [sum(len(document.text) for document in side) / 1e6 for side in (self.training, self.heldout)]
        counts = f"{len(self.training)} documents ({sizes[0]:.1f} MB) to train on, {len(self.heldout)} ({sizes[1]:.1f} MB) held out"
        return f"{self.source}: {counts}" + (f"; {self.skipped} files that are not UTF-8 text left out" if self.skipped else "")

    def fingerprint(self) -> str:
        """A hash of every document on its side: two corpora with the same one train the same."""
        total = hashlib.blake2b(digest_size=16)
        for side in (self.training, self.heldout):
            for document in side:
                total.update(hashlib.blake2b(document.text).digest())
            total.update(b"side")
        return total.hexdigest()


def load(config: DataConfig) -> Corpus:
    """The documents a configuration names, split in two.

    Raises: DataError when a file cannot be read or nothing is there to train on.
    """
    source = config.path or "Python's standard library"
    documents, skipped = [], 0
    for document in _read(Path(config.path).expanduser(), config.text_key) if config.path else _standard_library():
        if not _is_text(document.text):
            skipped += 1
        elif document.text.strip():
            documents.append(document)
    if not documents:
        raise DataError(
            f"{source}: no text found, {skipped} files that are not UTF-8 text left out; expected text files, a .zip of them, or a .jsonl "
            f"or .parquet with the text of a document under {config.text_key!r} in each line or row"
        )
    documents.sort(key=lambda document: document.name)
    training, heldout = _split(documents, config.heldout)
    return Corpus(source, tuple(training), tuple(heldout), skipped)


def _standard_library() -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in _files(root):
        if path.suffix == ".py":
            yield Document(path.relative_to(root).as_posix(), _bytes(path))


def _read(path: Path, text_key: str) -> Iterator[Document]:
    if path.is_dir():
        for file in _files(path):
            for document in _read_file(file, text_key):
                yield Document(f"{file.relative_to(path).as_posix()}{document.name}", document.text)
    elif path.exists():
        yield from (Document(f"{path.name}{document.name}", document.text) for document in _read_file(path, text_key))
    else:
        raise DataError(f"{path}: no such file or folder; data.path expects a folder, a text file, a .zip, a .jsonl or a .parquet")


def _read_file(path: Path, text_key: str) -> Iterator[Document]:
    """The documents of one file, each named by what follows the name of the file."""
    if path.suffix == ".zip":
        yield from _members(path, text_key)
    elif path.suffix == ".parquet":
        yield from _column(path, text_key)
    else:
        yield from _documents(str(path), _bytes(path), text_key)


def _documents(name: str, raw: bytes, text_key: str) -> Iterator[Document]:
    """The lines of a .jsonl, or the whole of another file."""
    if name.endswith(".jsonl"):
        yield from _lines(name, raw, text_key)
    else:
        yield Document("", raw)


def _files(root: Path) -> Iterator[Path]:
    """Every ordinary file below a folder, hidden ones and the folders of `SKIPPED` left out."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}")

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _members(path: Path, text_key: str) -> Iterator[Document]:
    try:
        with zipfile.ZipFile(path) as archive:
            for member in sorted(archive.infolist(), key=lambda info: info.filename):
                if not member.is_dir() and not any(part.startswith(".") for part in PurePosixPath(member.filename).parts):
                    for document in _documents(f"{path}/{member.filename}", archive.read(member), text_key):
                        yield Document(f"/{member.filename}{document.name}", document.text)
    except (OSError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        # zipfile raises RuntimeError for a member under a password, NotImplementedError for an unknown compression.
        raise DataError(f"{path}: not a readable zip: {error}") from error


def _lines(name: str, raw: bytes, text_key: str) -> Iterator[Document]:
    for number, line in enumerate(raw.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{name}, line {number}: not JSON: {error}") from error
        text = record if isinstance(record, str) else record.get(text_key) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise DataError(f"{name}, line {number}: expected text under the key {text_key!r} (set data.text_key), got {line[:80]!r}")
        yield Document(f":{number:09d}", text.encode("utf-8", "replace"))


def _column(path: Path, text_key: str) -> Iterator[Document]:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"{path}: .parquet files need the package datasets: pip install 'csakit[parquet]'") from error
    try:
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        columns = rows.column_names or []
        if text_key not in columns:
            raise DataError(f"{path}: expected text in the column {text_key!r} (set data.text_key), got columns {', '.join(columns)}")
        for number, row in enumerate(rows.select_columns([text_key])):
            if not isinstance(row[text_key], str):
                raise DataError(f"{path}, row {number}: expected text in the column {text_key!r}, got {row[text_key]!r:.80}")
            yield Document(f":{number:09d}", row[text_key].encode("utf-8", "replace"))
    except (OSError, ValueError) as error:  # what pyarrow raises for a damaged file are ValueErrors
        raise DataError(f"{path}: not a readable .parquet: {error}") from error


def _is_text(raw: bytes) -> bool:
    if b"\0" in raw:
        return False
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _split(documents: list[Document], share: float) -> tuple[list[Document], list[Document]]:
    scores = [int.from_bytes(hashlib.blake2b(document.text, digest_size=8).digest(), "big") / 2**64 for document in documents]
    if len(set(scores)) == 1:
        return _cut(documents[0], share)
    # The lowest is always held out and the highest always trains, so that a handful of documents has both sides too.
    limit = min(max(share, min(scores)), max(scores))
    heldout = [score < limit or score == min(scores) for score in scores]
    return (
        [document for document, held in zip(documents, heldout) if not held],
        [document for document, held in zip(documents, heldout) if held],
    )


def _cut(document: Document, share: float) -> tuple[list[Document], list[Document]]:
    """Both sides of a corpus of one document: its last part is held out, from the start of a line where there is one."""
    text = document.text
    place = min(int(len(text) * (1 - share)), len(text) - 1)
    line = text.find(b"\n", place) + 1
    place = line if 0 < line < len(text) else place
    while place and text[place] & 0xC0 == 0x80:  # inside a character
        place -= 1
    if not place:
        raise DataError(f"{document.name}: {len(text)} bytes are too few to train on a part and hold out another")
    return [Document(f"{document.name} (start)", text[:place])], [Document(f"{document.name} (end)", text[place:])]
