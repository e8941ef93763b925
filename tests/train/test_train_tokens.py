"""Tokens: each knows how many bytes of text it stands for, so bits per byte means the same for all of them."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import micro
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from csakit.train import DataConfig
from csakit.train.corpus import DataError
from csakit.train.tokens import ByteTokenizer, FileTokenizer, open_tokenizer

TEXT = "Größe, naïveté and 東京 😀 in one text; the quick brown fox jumps over the lazy dog. " * 3


def trained(kind: str) -> tokenizers.Tokenizer:
    """A tokenizer of one of three kinds, trained on the text."""
    if kind == "bytes":  # several tokens for one character
        found = tokenizers.Tokenizer(tokenizers.models.BPE())
        found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        found.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<doc>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
    elif kind == "words":  # spaces are dropped, unknown words and all
        found = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="<unk>"))
        found.normalizer = tokenizers.normalizers.NFD()
        found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["<doc>", "<unk>"], show_progress=False)
    else:
        found = tokenizers.Tokenizer(tokenizers.models.Unigram())
        found.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        found.decoder = tokenizers.decoders.Metaspace()
        trainer = tokenizers.trainers.UnigramTrainer(
            vocab_size=80, special_tokens=["<doc>", "<unk>"], unk_token="<unk>", show_progress=False
        )
    found.train_from_iterator([TEXT], trainer)
    return found


@pytest.fixture(scope="module", params=["bytes", "words", "pieces"])
def path(request, tmp_path_factory) -> Path:
    """The tokenizer.json of each kind."""
    found = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    trained(request.param).save(str(found))
    return found


def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(path):
    tokenizer = FileTokenizer(path, "<doc>")

    @given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40).map(lambda text: "a" + text))
    def every_text(text):
        (encoded,) = tokenizer.encode([text.encode()])
        assert len(encoded.ids) == len(encoded.sizes) and int(encoded.sizes.min()) >= 0
        assert int(encoded.sizes.sum()) == len(text.encode())

    every_text()
    (encoded,) = tokenizer.encode([TEXT.encode()])
    assert int(encoded.sizes.sum()) == len(TEXT.encode())


def test_byte_level_tokens_stand_for_their_own_bytes(tmp_path):
    trained("bytes").save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json", "<doc>")
    (encoded,) = tokenizer.encode([b"the quick brown fox"])
    pieces = [tokenizer.decode([token]) for token in encoded.ids.tolist()]
    assert "".join(pieces) == "the quick brown fox" and encoded.sizes.tolist() == [len(piece) for piece in pieces]


def test_a_text_without_tokens_is_an_empty_document(tmp_path):
    trained("words").save(str(tmp_path / "tokenizer.json"))
    (encoded,) = FileTokenizer(tmp_path / "tokenizer.json", "<doc>").encode([b"  "])
    assert len(encoded.ids) == len(encoded.sizes) == 0


def test_the_separator_is_a_token_by_name_or_number_or_one_behind_all_others(path):
    named, behind = FileTokenizer(path, "<doc>"), FileTokenizer(path, None)
    assert named.separator == 0 == FileTokenizer(path, 0).separator and behind.separator == named.vocabulary == behind.vocabulary - 1
    assert named.fingerprint != behind.fingerprint
    assert named.decode([0, *named.encode([b"fox"])[0].ids.tolist()]).strip() == "fox"
    with pytest.raises(DataError, match=r"expected the token data\.separator = '<none>' in it"):
        FileTokenizer(path, "<none>")


def test_a_damaged_or_missing_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    for name in ("tokenizer.json", "nowhere.json"):
        with pytest.raises(DataError, match=rf"{name}: not a readable tokenizer\.json: "):
            FileTokenizer(tmp_path / name, None)


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'csakit\[train\]'"):
        FileTokenizer(tmp_path / "tokenizer.json", None)


def test_weights_bring_their_tokenizer_and_their_separator(path):
    found = open_tokenizer("", "", start=path.parent, bos=0, vocabulary=1000)
    assert isinstance(found, FileTokenizer) and found.separator == 0
    assert isinstance(open_tokenizer("", "", start=path.parent / "nowhere", bos=256, vocabulary=257), ByteTokenizer)
    assert isinstance(open_tokenizer("", "", start=None, bos=None, vocabulary=None), ByteTokenizer)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"vocabulary": 1000, "start": Path("nowhere")}, r"no tokenizer\.json beside the weights, whose vocabulary of 1000 is not bytes"),
        ({"separator": "<doc>"}, r"data\.separator: bytes have a separator of their own, '<doc>' needs data\.tokenizer"),
        ({"path": True, "vocabulary": 5}, r"the model's vocabulary has 5; give the model's own tokenizer, or name one of its tokens"),
        ({"path": True, "vocabulary": 5, "bos": 0}, r"the model's vocabulary has 5; give the model's own tokenizer$"),
    ],
)
def test_tokens_that_do_not_fit_the_weights_are_refused(path, given, message):
    given = {"path": "", "separator": "", "start": None, "bos": None, "vocabulary": None, **given}
    given["path"] = str(path) if given["path"] else ""
    with pytest.raises(DataError, match=message):
        open_tokenizer(given.pop("path"), given.pop("separator"), **given)


def test_bits_per_byte_count_the_bytes_of_the_text_and_not_the_tokens(tmp_path, path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(4):
        (texts / f"{number}.txt").write_text(TEXT[number:], encoding="utf-8")
    stages = micro.config()
    run = micro.trainer(
        tmp_path / "run",
        micro.config(
            stages=("dense",),
            data=DataConfig(path=str(texts), sequence_length=512, tokenizer=str(path), heldout_rows=1),
            dense=replace(stages.dense, steps=1),
        ),
    )
    run.run()
    before, step, _ = micro.metrics(tmp_path / "run")
    # A model that knows nothing spends log2(vocabulary) bits on each token, whatever it stands for.
    (batch,) = run.evaluator.batches
    rate = math.log2(run.built.tokenizer.vocabulary) * int(batch.predicted.sum()) / int(batch.sizes.sum())
    assert before["bits_per_byte"] == pytest.approx(rate, rel=0.05) and step["bits_per_byte"] > 0
    sizes = [len(document.text) for document in micro.corpus.load(run.config.data).heldout]
    assert int(batch.sizes.sum()) == sum(sizes)
