"""Texts that must match a constraint; what matches is decided by `re` and `json`."""

import dataclasses
import itertools
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.text.added_text import token_bytes
from prompt_tuning.data.text.tokenizers import load_tokenizer
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.request import Completion, Request
from prompt_tuning.decoding.request_checks import row_ends
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.decoding.token_masks import MaskReader, RowMask
from tests.support.dummies import LLAMA, T5_GATED, LetterTokenizer
from tests.support.engine_models import engine_model
from tests.support.small_tokenizer import write_tokenizer

pytest.importorskip("llguidance", reason="needs the extra guided")

FIXTURES = Path(__file__).parents[1] / "fixtures/tokenizers"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "size": {"enum": [1, 20, None]},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}


def open_model(folder: Path, kind: str, config=LLAMA):
    """A model with random weights and a real tokenizer."""
    path = FIXTURES / kind
    if kind == "small":
        path = write_tokenizer(folder / "tokenizer")
    tokenizer = load_tokenizer(path)
    # The embeddings have rows for a few tokens that the tokenizer has not.
    size = tokenizer.vocabulary_size + 5
    config = dataclasses.replace(
        config,
        vocabulary_size=size,
        eos_id=tokenizer.eos_id,
        maximum_positions=256,
    )
    model, parameters = engine_model(config, "none")
    return dataclasses.replace(model, tokenizer=tokenizer), parameters


def complete(engine: DecodingEngine, text: str, **settings) -> list[Completion]:
    sampling = Sampling(**{"new_tokens": 40, **settings})
    (handle,) = engine.run([Request(text=text, sampling=sampling)])
    return sorted(handle.completions, key=lambda each: each.sample)


def marked(mask: RowMask) -> set[int]:
    bits = np.unpackbits(mask.words.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


WORDS = ["the", "then", "th\u00e9", "a b", " a", "a", "aab\n", "7/7", "\u4e2d\u6587"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["small", "byte_level", "bpe", "unigram"])
def test_the_mask_is_the_set_of_tokens_that_some_word_continues_with(kind, tmp_path):
    model, _ = open_model(tmp_path, kind)
    added = token_bytes(model.needed_tokenizer())
    words = [word.encode() for word in WORDS]
    given = model.needed_tokenizer().encode("x")
    random = np.random.default_rng(0)
    for _ in range(5):
        request = Request(ids=given, sampling=Sampling(regex="|".join(WORDS)))
        mask = MaskReader(model).open(request, given)
        text, expected = b"", {0}
        while expected:
            expected = {
                token
                for token, content in enumerate(added)
                if content and any(word.startswith(text + content) for word in words)
            }
            ends = row_ends(request.sampling, model) if text in words else ()
            assert marked(mask) == expected | set(ends)
            assert mask.complete == (text in words and not expected)
            # The vocabulary may lack the tokens that a word ends with.
            assert bool(mask.problem) == (text not in words and not expected)
            if expected:
                token = int(random.choice(sorted(expected)))
                mask.add(token)
                text += added[token]


@pytest.mark.slow
@pytest.mark.parametrize(
    "regex", ["[ab]{2,5}(the)*", r"-?\d+(\.\d{1,3})?", "(x|yz)+ ?"]
)
def test_every_sampled_text_matches_the_expression(regex, tmp_path):
    engine = DecodingEngine(*open_model(tmp_path, "small"), slots=8, length=64)
    ended = 0
    for seed in range(4):
        drawn = {"temperature": 1.5, "n": 8, "seed": seed, "top_p": 0.95}
        for each in complete(engine, "one two", regex=regex, **drawn):
            if each.reason == "stop":
                assert re.fullmatch(regex, each.text), each
                ended += 1
    assert ended > 8


@pytest.mark.slow
def test_every_sampled_text_is_json_of_the_schema(tmp_path):
    engine = DecodingEngine(*open_model(tmp_path, "small"), slots=8, length=256)
    drawn = {"temperature": 1.0, "n": 16, "new_tokens": 200}
    for each in complete(engine, "one", json_schema=SCHEMA, **drawn):
        value = json.loads(each.text)
        assert set(value) == {"name", "size"}
        assert isinstance(value["name"], str) and len(value["name"]) <= 4
        assert value["size"] in (1, 20, None)
        assert each.reason == "stop"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["small", "unigram"])
def test_every_sampled_text_is_of_the_grammar(kind, tmp_path):
    grammar = 'start: "(" start ")" | WORD\nWORD: /[ab}]{1,3}/'
    engine = DecodingEngine(*open_model(tmp_path, kind), slots=8, length=64)
    drawn = {"temperature": 1.0, "n": 8, "new_tokens": 40}
    for each in complete(engine, "the", grammar=grammar, **drawn):
        if each.reason == "stop":
            depth = each.text.count("(")
            word = each.text[depth : len(each.text) - depth]
            assert each.text == "(" * depth + word + ")" * depth
            assert re.fullmatch("[ab}]{1,3}", word), each


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["small", "unigram"])
def test_an_encoder_decoders_text_matches_from_its_beginning(kind, tmp_path):
    model = open_model(tmp_path, kind, T5_GATED)
    engine = DecodingEngine(*model, slots=8, length=64)
    for each in complete(engine, "the", regex="(a|e)( the)?", temperature=2.0, n=8):
        assert re.fullmatch("(a|e)( the)?", each.text), each


@pytest.mark.slow
def test_rows_next_to_a_constrained_one_have_the_same_ids(tmp_path):
    engine = DecodingEngine(*open_model(tmp_path, "small"), slots=4, length=64)
    settings = [
        Sampling(new_tokens=12),
        Sampling(new_tokens=12, temperature=1.2, top_k=9, seed=3),
        Sampling(new_tokens=12, regex="[a-f ]+", temperature=1.2, seed=3),
    ]
    requests = [Request(text="one two", sampling=each) for each in settings]
    alone = [engine.run([each])[0].completions[0].ids for each in requests]
    together = [each.completions[0].ids for each in engine.run(requests)]
    assert together == alone


@pytest.mark.slow
def test_guesses_leave_constrained_rows_as_they_are(tmp_path):
    model = open_model(tmp_path, "small")
    rows = [
        Request(text="ab ab ab ab", sampling=Sampling(regex="(ab )+c", new_tokens=20)),
        Request(text="ab ab ab ab", sampling=Sampling(new_tokens=20)),
    ]
    ids = [
        [
            handle.completions[0].ids
            for handle in DecodingEngine(
                *model, slots=2, length=64, guesses=guesses
            ).run(rows)
        ]
        for guesses in (0, 3)
    ]
    assert ids[0] == ids[1]


def test_log_probabilities_are_those_of_the_model_without_the_constraint(tmp_path):
    engine = DecodingEngine(*open_model(tmp_path, "small"), slots=2, length=64)
    free = complete(engine, "one", logprobs=1, new_tokens=1)[0].logprobs
    bound = complete(engine, "one", logprobs=1, regex="q+", new_tokens=1)[0].logprobs
    assert free is not None and bound is not None
    assert bound[0].top == free[0].top
    assert bound[0].logprob < free[0].logprob


def test_a_text_that_is_complete_ends_before_a_minimum(tmp_path):
    engine = DecodingEngine(*open_model(tmp_path, "small"), slots=2, length=64)
    settings = {"regex": "(ab){2}c?", "minimum_new_tokens": 20}
    (each,) = complete(engine, "one", **settings)
    assert (each.text, each.reason) == ("ababc", "stop")
    (each,) = complete(engine, "one", regex="a+", minimum_new_tokens=7, new_tokens=9)
    assert len(each.ids) >= 7


def test_a_row_without_allowed_tokens_ends_with_a_message(tmp_path):
    model, parameters = open_model(tmp_path, "small")
    engine = DecodingEngine(model, parameters, slots=2, length=64)
    (b,) = model.needed_tokenizer().encode("b")
    (each,) = complete(engine, "one", regex="aab", forbidden=(b,))
    assert (each.text, each.reason) == ("aa", "failed")
    assert "no token continues a text that matches the regex" in each.problem


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"regex": "(a"}, "regex cannot be used: unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": "a\\"}, "ends with a single backslash"),
        ({"regex": "a" * 10_001}, "regex has 10,001 characters, expected at most"),
        ({"regex": "\ud800"}, "half a surrogate pair"),
        ({"regex": "a", "json_schema": "{}"}, "both set: leave out one"),
        ({"grammar": "start: a"}, "grammar cannot be used: "),
        ({"grammar": "start: " + "a " * 2**16}, "grammar has 131,079 characters"),
        ({"json_schema": "{"}, "json_schema is not valid JSON"),
        ({"json_schema": {"type": "nope"}}, "Invalid type: nope"),
        ({"json_schema": {"x": {1}}}, "json_schema is not JSON"),
        ({"json_schema": {"$ref": "http://localhost/x"}}, "json_schema cannot be used"),
        ({"json_schema": '{"enum": ["' + "a" * 2**17 + '"]}'}, "expected at most"),
        ({"json_schema": {"multipleOf": 999_983}}, "too complex: this takes more"),
    ],
)
def test_a_constraint_that_cannot_be_used_is_refused(settings, message):
    with pytest.raises(InputError, match=re.escape(message)):
        Sampling(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"regex": ""}, "no text but the empty one matches the regex"),
        ({"regex": "a", "forbidden": tuple(range(70))}, "at its beginning"),
        ({"regex": "a", "forced": (3,)}, "the forced token 3"),
    ],
)
def test_a_row_that_cannot_begin_is_refused(settings, message, tmp_path):
    engine = DecodingEngine(*open_model(tmp_path, "small"), slots=2, length=64)
    request = Request(text="one", sampling=Sampling(new_tokens=20, **settings))
    with pytest.raises(InputError, match=re.escape(message)):
        engine.submit(request)


def test_an_expression_with_a_large_automaton_has_limits(tmp_path):
    model, parameters = open_model(tmp_path, "byte_level")
    engine = DecodingEngine(model, parameters, slots=2, length=64)
    regex = r"(\w{1,50}){1,50}" + r"\p{L}*\p{N}*" * 50
    for each in complete(engine, "one", regex=regex, temperature=2.0, n=2):
        assert each.reason == "length" or "too many" in each.problem


def test_without_the_library_the_message_has_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InputError, match=r"pip install 'prompt-tuning\[guided\]'"):
        Sampling(regex="never seen before")


def test_a_tokenizer_whose_tokens_depend_on_others_is_refused():
    class Alternating(LetterTokenizer):
        def decode(self, ids):
            return "".join(
                letter if len(list(run)) > 1 else f"x{letter}"
                for letter, run in itertools.groupby(self.token(int(id)) for id in ids)
            )

    with pytest.raises(InputError, match="changes the text of a token"):
        token_bytes(Alternating())
