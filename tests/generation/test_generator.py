"""A row's text is the same in pieces as at once."""

import dataclasses

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.generation.generator import Generator
from tests.generation.test_text_generation import ROW, model_with
from tests.support.dummies import LetterTokenizer
from tests.support.exhaustive import sample

NEW = 11
SAMPLINGS = [
    Sampling(new_tokens=NEW, temperature=2.0, top_k=9, seed=3),
    Sampling(new_tokens=NEW),
]


class Numbers(LetterTokenizer):
    """Decodes token ids as numbers."""

    def decode(self, ids) -> str:
        return "".join(f" {int(id)}" for id in ids)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sampling", sample(1, SAMPLINGS))
def test_text_in_pieces_is_the_text_at_once(sampling):
    model, parameters = model_with(64)
    model = dataclasses.replace(model, tokenizer=Numbers())
    generator = Generator(model, parameters, sampling)
    (whole,) = generator.continue_rows([ROW])
    pieces = list(generator.stream(ROW))
    assert len(pieces) == NEW and "".join(pieces) == whole.text
    # An end ends the row, and is left out.
    ids = whole.text.split()
    place = next(i for i in range(2, NEW) if ids[i] not in ids[:i])
    ending = dataclasses.replace(sampling, ends=(int(ids[place]),))
    generator = Generator(model, parameters, ending)
    (stopped,) = generator.continue_rows([ROW])
    assert "".join(generator.stream(ROW)) == stopped.text
    assert stopped.text.split() == ids[:place]
    # A conversation grows past the first engine's slot.
    longer = ROW * 4
    (whole,) = generator.continue_rows([longer])
    assert "".join(generator.stream(longer)) == whole.text


def test_rows_that_do_not_fit_are_refused():
    generator = Generator(*model_with(20), Sampling(new_tokens=12))
    with pytest.raises(InputError, match="do not fit"):
        list(generator.stream(ROW))
