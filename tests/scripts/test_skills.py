import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from scripts import skills


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("copy", "hello"),
        ("reverse", "olleh"),
        ("upper", "HELLO"),
        ("title", "Hello"),
        ("rot1", "ifmmp"),
        ("rot2", "jgnnq"),
        ("star", "h*ll*"),
        ("double", "hheelllloo"),
        ("first", "h"),
        ("last", "o"),
        ("init", "hell"),
        ("tail", "ello"),
        ("middle", "ell"),
        ("left", "elloh"),
        ("swap", "oellh"),
        ("reverse upper", "OLLEH"),
        ("swap rot1", "pfmmi"),
    ],
)
def test_each_skill_on_hello(name, expected):
    assert skills.apply(name, "hello") == expected
    assert skills.line(name, "hello") == f"{name}: hello={expected}"


def test_the_alphabet_wraps():
    assert skills.apply("rot1", "zZ*") == "aA*"
    assert skills.apply("rot2", "yz") == "ab"


def test_a_bare_prompt_has_no_name():
    assert skills.prompt_text(None, "hello") == "hello="


def test_pretraining_has_thirteen_skills_and_eight_compositions():
    assert len(skills.TRAINED_SKILLS) == 13
    assert len(skills.TRAINED_COMPOSITIONS) == 8
    assert set(skills.KEPT_OUT).isdisjoint(skills.TRAINED)


@pytest.mark.parametrize("kept_out", skills.KEPT_OUT)
@pytest.mark.parametrize("trained", skills.TRAINED)
def test_no_trained_name_equals_an_excluded_function(kept_out, trained):
    tried = skills.words(np.random.default_rng(0), 500, held_out=False)
    agreeing = sum(
        skills.apply(kept_out, word) == skills.apply(trained, word) for word in tried
    )
    assert agreeing <= 15  # such as palindromes


def test_every_trained_answer_is_text_of_the_vocabulary():
    pairs = skills.pretraining_pairs(np.random.default_rng(1), 3000)
    assert all(answer for _, answer in pairs)
    for prompt, answer in pairs:
        assert skills.decode(skills.encode(prompt + answer)) == prompt + answer


def test_pretraining_has_no_held_out_words_and_no_excluded_names():
    for prompt, _ in skills.pretraining_pairs(np.random.default_rng(2), 3000):
        name, word = prompt.removesuffix("=").split(": ")
        assert name not in skills.KEPT_OUT
        assert not skills.is_held_out(word)


def test_the_hash_holds_out_a_tenth_and_never_changes():
    rng = np.random.default_rng(3)
    both = skills.words(rng, 9000, held_out=False) + skills.words(
        rng, 1000, held_out=True
    )
    assert sum(map(skills.is_held_out, both)) == 1000
    every_three_letters = [
        a + b + c for a in "abcdefghij" for b in "klmnopqrst" for c in "uvwxyzabcd"
    ]
    share = sum(map(skills.is_held_out, every_three_letters)) / 1000
    assert 0.07 < share < 0.13


def test_splits_are_distinct_disjoint_and_repeatable():
    split = skills.splits(5, train=2000, dev=200, test=500)
    together = split.train + split.dev + split.test
    assert len(set(together)) == len(together) == 2700
    assert not any(map(skills.is_held_out, split.train))
    assert all(map(skills.is_held_out, split.dev + split.test))
    assert split == skills.splits(5, train=2000, dev=200, test=500)
    assert split.test != skills.splits(6, train=2000, dev=200, test=500).test


def test_words_have_three_to_eight_lower_case_letters():
    drawn = skills.words(np.random.default_rng(4), 2000, held_out=False)
    assert {len(word) for word in drawn} == {3, 4, 5, 6, 7, 8}
    assert all(word.isascii() and word.islower() for word in drawn)


def test_the_saved_tokenizer_round_trips_exactly(tmp_path):
    skills.save_tokenizer(tmp_path, add_bos=True)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("swap rot1: hello=pfmmi", " two  spaces ", "h*LL* 12"):
        assert tokenizer.encode(text).ids == [skills.BOS_ID, *skills.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert [tokenizer.token_to_id(t) for t in ("<pad>", "<eos>", "<bos>")] == [0, 1, 2]
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["add_bos_token"] is True
    assert settings["eos_token"] == "<eos>"
