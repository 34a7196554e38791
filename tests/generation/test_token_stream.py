"""A row's tokens and text are the same in pieces as at once."""

import dataclasses
import itertools

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.generation.sampling import TemperatureSampler, greedy
from prompt_tuning.generation.text_generation import continue_all
from prompt_tuning.generation.token_stream import (
    STREAMED_TOKENS,
    stream_text,
    stream_tokens,
)
from tests.generation.test_text_generation import ROW, model_with
from tests.support.dummies import LetterTokenizer
from tests.support.exhaustive import sample

NEW = 3 * STREAMED_TOKENS - 1
SAMPLERS = [TemperatureSampler(2.0, top_k=9), greedy]


@pytest.mark.exhaustive
@pytest.mark.parametrize("sampler", sample(1, SAMPLERS))
def test_tokens_in_pieces_are_those_at_once(sampler):
    model, parameters = model_with(64)
    options = {"new_tokens": NEW, "sampler": sampler, "seed": 3}
    (expected,) = continue_all(model, parameters, [ROW], **options)
    chunks = list(stream_tokens(model, parameters, ROW, **options))
    assert list(itertools.chain(*chunks)) == expected and len(expected) == NEW
    assert max(map(len, chunks)) == STREAMED_TOKENS
    # A stop token in the middle of a piece ends the row, and is left out.
    place = next(i for i in range(2, NEW) if expected[i] not in expected[:i])
    ending = {**options, "stop_ids": [expected[place]]}
    stopped = list(stream_tokens(model, parameters, ROW, **ending))
    assert list(itertools.chain(*stopped)) == expected[:place]
    assert continue_all(model, parameters, [ROW], **ending) == [expected[:place]]


def test_rows_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="do not fit"):
        list(stream_tokens(*model_with(20), ROW, new_tokens=12))


class Bytes(LetterTokenizer):
    """Each token is a byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids) -> str:
        return bytes(ids).decode(errors="replace")


def test_text_is_shown_when_its_characters_are_complete():
    model, _ = model_with(64)
    config = dataclasses.replace(model.config, vocabulary_size=256)
    model = dataclasses.replace(model, tokenizer=Bytes(), config=config)
    new = list("né €!".encode())
    pieces = list(stream_text(model, list(b"a "), iter([id] for id in new)))
    assert "".join(pieces) == "né €!"
    assert [piece for piece in pieces if piece] == ["n", "é", " ", "€", "!"]
    # The last token of a text that is cut off may be a part of a character.
    cut = list(stream_text(model, [], iter([new[:2]])))
    assert "".join(cut) == "n\ufffd"
