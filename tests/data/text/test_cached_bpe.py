"""Encoding by words gives the ids of the whole text, real or adversarial."""

import random

import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from prompt_tuning.data.text import cached_bpe
from prompt_tuning.data.text.tokenizers import HuggingFaceTokenizer, load_tokenizer
from tests.support.shared_data import FIXTURES, SHARED, released
from tests.support.small_tokenizer import EOS, write_tokenizer

CHARACTERS = [
    *" \n\t\r'sdaZ9_-.",
    *("'ll", "'re", "  ", "\n\n", "é", "ß", "²", "½", "Ⅷ", "٣", "中", "。", "“", "—"),
    *("\u00a0", "\u0085", "\u2028", "\u3000", "\u200b", "\u0301", "\x1c", "\x00"),
    *("😀", "\U0001fae8", "\U0001d400", "\U00020000", "\ufffe", "\ua7cb", "\u1c89"),
]


@pytest.fixture
def small(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer"))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    return tokenizer.tokenizer


def check_hostile(tokenizer: tokenizers.Tokenizer):
    encode = cached_bpe.cached_bpe(tokenizer)
    assert encode is not None
    draw = random.Random(0)
    for _ in range(4000):
        text = "".join(draw.choices(CHARACTERS, k=draw.randint(0, 12)))
        assert encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_unusual_texts_have_the_tokenizers_ids(small):
    check_hostile(small)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "text_file"),
    [
        (FIXTURES / "tokenizers/byte_level", FIXTURES / "data_prep/pretraining.jsonl"),
        released(
            SHARED / "data/tokenizers/gpt2",
            SHARED / "data/text/tinyshakespeare/input.txt",
        ),
    ],
)
def test_gpt2s_ids_equal_the_tokenizers(folder, text_file):
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    check_hostile(tokenizer.tokenizer)
    encode = cached_bpe.cached_bpe(tokenizer.tokenizer)
    assert encode is not None
    text = text_file.read_text("utf-8")
    for at in range(0, len(text), 50_000):
        piece = text[at : at + 50_000]
        assert encode(piece) == tokenizer.encode(piece)


def test_added_tokens_are_found_in_the_text(small):
    encode = cached_bpe.cached_bpe(small)
    assert encode is not None
    text = f"the end{EOS}the rest"
    assert small.token_to_id(EOS) in encode(text)
    assert encode(text) == small.encode(text).ids


def test_cached_words_have_a_bound(small, monkeypatch):
    monkeypatch.setattr(cached_bpe, "CACHED_WORDS", 3)
    encode = cached_bpe.cached_bpe(small)
    assert encode is not None
    text = "one two three four five six one"
    assert encode(text) == encode(text) == small.encode(text).ids
    assert len(encode._ids_of) == 3


def test_tokenizers_with_another_split_are_not_accelerated(small):
    small.normalizer = normalizers.Lowercase()
    assert cached_bpe.cached_bpe(small) is None
    small.normalizer = None
    assert cached_bpe.cached_bpe(small) is not None
    small.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert cached_bpe.cached_bpe(small) is None
    small.pre_tokenizer = pre_tokenizers.Whitespace()
    assert cached_bpe.cached_bpe(small) is None
