"""Texts whose sections are encoded once, against the library's encoding of each."""

import random

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from prompt_tuning.data.text.special_tokens import SpecialTokens
from prompt_tuning.data.text.text_encoder import TextEncoder
from prompt_tuning.data.text.tokenizers import HuggingFaceTokenizer

ADDED = {
    "plain": AddedToken("<s>", normalized=False),
    "begins with a word": AddedToken("user:", normalized=False),
    "within another": AddedToken("<s><", normalized=False),
    "takes spaces before": AddedToken("<l>", lstrip=True, normalized=False),
    "takes spaces after": AddedToken("<r>", rstrip=True, normalized=False),
    "between words": AddedToken("<w>", single_word=True, normalized=False),
    "found in normalized text": AddedToken("<n>", normalized=True),
}
SPLITS = {
    "bytes": (None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "bytes after a space": (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "mark before all": (normalizers.Prepend("▁"), None),
    "mark before the first": (None, pre_tokenizers.Metaspace(prepend_scheme="first")),
    "stripped": (normalizers.Strip(), pre_tokenizers.ByteLevel(add_prefix_space=False)),
}


def make_tokenizer(split):
    normalizer, pre_tokenizer = SPLITS[split]
    merges = [("a", "b"), ("Ġ", "a"), ("Ġ", "Ġ"), ("▁", "a"), ("Ċ", "Ċ"), ("s", ">")]
    alphabet = [*pre_tokenizers.ByteLevel.alphabet(), "▁", " ", "\n"]
    pieces = [*sorted(alphabet), *("".join(pair) for pair in merges)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.add_tokens(list(ADDED.values()))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    return HuggingFaceTokenizer(tokenizer, SpecialTokens())


@pytest.mark.parametrize("split", SPLITS)
def test_ids_are_those_of_texts_and_of_their_beginnings(split):
    tokenizer = make_tokenizer(split)
    rng = random.Random(split)
    pieces = [*(x.content for x in ADDED.values()), "a", "b", " ", "\n", "<", "s>", "1"]
    texts = [
        ["".join(rng.choices(pieces, k=rng.randrange(6))) for _ in range(4)]
        for _ in range(500)
    ]
    counts = 0
    for parts, (ids, lengths) in zip(
        texts, TextEncoder(tokenizer).joined(texts), strict=True
    ):
        assert ids == tokenizer.encode("".join(parts))
        beginnings = [tokenizer.encode("".join(parts[:n])) for n in range(1, 5)]
        if any(ids[: len(each)] != each for each in beginnings):
            assert lengths is None
        else:
            assert lengths is not None
            totals = [sum(lengths[:n]) for n in range(1, 5)]
            assert totals == [len(each) for each in beginnings]
            counts += 1
    assert 0 < counts < len(texts)
