"""Tokenizers whose expressions or replacements would take forever, or all memory."""

import json
import time

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.text import encoding_limits
from prompt_tuning.data.text.encoding_limits import MAXIMUM_GROWN, Costs, read_costs
from prompt_tuning.data.text.tokenizers import load_tokenizer
from tests.support.small_tokenizer import write_tokenizer

LLAMA_3 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}"
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
SLOW = r"(.)(?:.|..){16}(?!\1|.)(?=\1)"
"""Takes half a second for 48 characters, and ten times as long with 18 repetitions: the
library limits the steps for each position of a text, but not their sum."""


def split(expression):
    return {
        "type": "Split",
        "pattern": {"Regex": expression},
        "behavior": "Isolated",
        "invert": False,
    }


def replace(content, **pattern):
    return {"type": "Replace", "pattern": pattern, "content": content}


def load(folder, **changes):
    """Loads a byte-level tokenizer with changed settings."""
    file = write_tokenizer(folder) / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return load_tokenizer(file)


def test_an_expression_that_hangs_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding_limits, "MAXIMUM_SECONDS", 0.1)
    tokenizer = load(tmp_path / "a", pre_tokenizer=split(SLOW))
    before = time.monotonic()
    for encode in (lambda: tokenizer.encode("ab" * 40), lambda: tokenizer.encode("ab")):
        with pytest.raises(InputError, match=r"takes more than 0\.1 s for 80 char"):
            encode()
    assert time.monotonic() - before < 30
    decoders = [{"type": "Fuse"}, replace("", Regex=SLOW)]
    decoder = {"type": "Sequence", "decoders": decoders}
    tokenizer = load(tmp_path / "b", decoder=decoder)
    with pytest.raises(InputError, match="expected regular expressions without nested"):
        tokenizer.decode(tokenizer.encode("ab") * 40)


def test_published_expressions_are_known_to_be_quick():
    sequence = {"type": "Sequence", "pretokenizers": [split(LLAMA_3), split(r"[\s\S]")]}
    assert read_costs({"pre_tokenizer": sequence}, "") == Costs(1, True)
    assert read_costs({"normalizer": split("x+")}, "") == Costs(1, False)
    model = {"type": "WordPiece", "max_input_chars_per_word": 10**6}
    assert not read_costs({"model": model}, "").is_quick


@pytest.mark.parametrize(
    "entries",
    [
        [replace("aa", String="a")] * 11,
        [replace("a" * 1024, Regex="")],
        [{"type": "Prepend", "prepend": "a" * 1024}],
    ],
)
def test_replacements_that_multiply_a_text_are_refused(entries, tmp_path):
    normalizer = {"type": "Sequence", "normalizers": entries}
    with pytest.raises(InputError, match="for one, expected at most 1,024"):
        load(tmp_path / "a", normalizer=normalizer)


def test_a_text_that_becomes_too_long_is_refused(tmp_path):
    normalizer = replace("a" * 1000, String="a")
    tokenizer = load(tmp_path / "a", normalizer=normalizer)
    assert len(tokenizer.encode("ab")) > 0
    with pytest.raises(InputError, match=r"has 67,109 characters, expected at most 67"):
        tokenizer.encode("b" * (MAXIMUM_GROWN // 1000 + 1))
