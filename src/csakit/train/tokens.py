"""From text to tokens: bytes, or the vocabulary of a tokenizers file. Every token knows how many bytes of text it stands for.

So bits per byte means the same whatever the tokens are, and runs with different tokenizers can be compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from csakit.train.corpus import DataError

BYTES = 256
TEXTS_AT_ONCE = 64


class Encoded(NamedTuple):
    """A document as tokens, without its separator."""

    ids: Tensor  # [n] uint8 or int32
    sizes: Tensor | None  # [n] int32: bytes of the text each token stands for, n of them summing to the text; None: one each


class Tokenizer(Protocol):
    """What a run needs to know of its tokens."""

    vocabulary: int  # ids are below it, the separator included
    separator: int  # begins each document
    fingerprint: str  # of everything that decides the ids

    def encode(self, texts: Sequence[bytes]) -> list[Encoded]:
        """The tokens of UTF-8 texts."""

    def decode(self, ids: list[int]) -> str:
        """The text of some tokens, separators left out."""

    def save(self, folder: Path) -> None:
        """Write what makes them beside the weights that know them."""


class ByteTokenizer:
    """Bytes, and 256 as the separator."""

    vocabulary, separator, fingerprint = BYTES + 1, BYTES, "bytes"

    def encode(self, texts: Sequence[bytes]) -> list[Encoded]:
        """The bytes of the texts."""
        return [
            Encoded(torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8), None)
            for text in texts
        ]

    def decode(self, ids: list[int]) -> str:
        """The text of some bytes; what is cut off inside a character shows as a replacement character."""
        return bytes(token for token in ids if token != BYTES).decode("utf-8", "replace")

    def save(self, folder: Path) -> None:
        """Nothing: the size of the vocabulary says it."""


class FileTokenizer:
    """The tokens of a tokenizer.json, as the tokenizers library reads it. No special tokens are added but the separator."""

    def __init__(self, path: Path, separator: str | int | None) -> None:
        """From a file. separator: a token's name or id; None: an id of its own behind the vocabulary.

        Raises: DataError for a file that cannot be read, or a separator that is not in it; ImportError without tokenizers.
        """
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ImportError("data.tokenizer needs the package tokenizers: pip install 'csakit[train]'") from error
        try:
            self._raw = path.read_bytes()
            self._tokenizer = Tokenizer.from_str(self._raw.decode("utf-8"))
        except Exception as error:  # tokenizers raises Exception itself for a file that is none
            raise DataError(f"{path}: not a readable tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if isinstance(separator, str):
            found = self._tokenizer.token_to_id(separator)
            if found is None:
                raise DataError(f"{path}: expected the token data.separator = {separator!r} in it, there is none")
            self.separator = found
        else:
            self.separator = largest if separator is None else separator
        self.vocabulary = max(largest, self.separator + 1)
        self.fingerprint = f"{hashlib.blake2b(self._raw, digest_size=16).hexdigest()}-{self.separator}"

    def encode(self, texts: Sequence[bytes]) -> list[Encoded]:
        """The tokens of the texts."""
        found = []
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            some = [text.decode("utf-8") for text in texts[start : start + TEXTS_AT_ONCE]]
            for text, encoding in zip(some, self._tokenizer.encode_batch(some, add_special_tokens=False)):
                sizes = _sizes(text, [stop for _, stop in encoding.offsets])
                found.append(Encoded(torch.tensor(encoding.ids, dtype=torch.int32), torch.tensor(sizes, dtype=torch.int32)))
        return found

    def decode(self, ids: list[int]) -> str:
        """The text of some tokens."""
        return self._tokenizer.decode([token for token in ids if token != self.separator], skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json."""
        (folder / "tokenizer.json").write_bytes(self._raw)


def _sizes(text: str, stops: list[int]) -> list[int]:
    """Bytes of each token, given where it stops in characters: from where those before it end, the last one to the end of the text.

    What a tokenizer leaves out (a trimmed space) belongs to the next token, and the first of several tokens of one character has its bytes.
    """
    if not stops:
        return []
    width = [0, *accumulate(len(character.encode("utf-8")) for character in text)] if not text.isascii() else range(len(text) + 1)
    ends = list(accumulate((width[stop] for stop in [*stops[:-1], len(text)]), max))
    return [end - begin for begin, end in zip([0, *ends[:-1]], ends)]


def open_tokenizer(path: str, separator: str, *, start: Path | None, bos: int | None, vocabulary: int | None) -> Tokenizer:
    """The tokenizer of a run.

    path, separator: data.tokenizer and data.separator. start: folder of the weights a run begins with, None when they are random;
    bos, vocabulary: what its config.json says.

    Raises: DataError when the tokens are not known, or do not fit the vocabulary of the weights; as FileTokenizer.
    """
    if not path and start is not None and (start / "tokenizer.json").is_file():
        path = str(start / "tokenizer.json")
    if path:
        found: Tokenizer = FileTokenizer(Path(path), separator or bos)
    elif separator:
        raise DataError(f"data.separator: bytes have a separator of their own, {separator!r} needs data.tokenizer")
    elif vocabulary in (None, ByteTokenizer.vocabulary):
        found = ByteTokenizer()
    else:
        raise DataError(f"{start}: no tokenizer.json beside the weights, whose vocabulary of {vocabulary} is not bytes; set data.tokenizer")
    if vocabulary is not None and found.vocabulary > vocabulary:
        raise DataError(
            f"data.tokenizer: ids up to {found.vocabulary - 1}, the model's vocabulary has {vocabulary}; give the model's own tokenizer"
            + ("" if found.separator < vocabulary else ", or name one of its tokens as data.separator")
        )
    return found
