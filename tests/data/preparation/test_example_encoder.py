"""Examples of tokenizers that start a text with BOS or a space."""

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.preparation.example_encoder import ExampleEncoder
from prompt_tuning.data.preparation.preparation_settings import TextFormat
from prompt_tuning.data.preparation.records import Record, Turn
from prompt_tuning.data.text.tokenizers import continued_pair, load_tokenizer
from tests.support.shared_data import FIXTURES

BPE = FIXTURES / "tokenizers/bpe"
UNIGRAM = FIXTURES / "tokenizers/unigram"
TALK = Record((Turn("The cat", "sat."), Turn("The dog", "ran.")))


def encode(tokenizer, record, **text):
    encoder = ExampleEncoder(TextFormat(**text), tokenizer, None)
    (examples,) = encoder([(record, "")])
    assert not isinstance(examples, InputError)
    return examples


@pytest.mark.parametrize("folder", [BPE, UNIGRAM])
def test_a_pair_has_the_models_input_ids(folder):
    tokenizer = load_tokenizer(folder)
    (example,) = encode(tokenizer, Record((Turn("The cat", "sat."),)))
    prompt, completion = continued_pair(tokenizer, "The cat", " sat.")
    begin = tokenizer.begin_ids
    assert example.input_ids == [*begin, *prompt, *completion, tokenizer.eos_id]
    given = len(begin) + len(prompt)
    assert example.token_types == [0] * given + [1] * len(completion) + [3]
    assert tokenizer.decode(example.input_ids) == "The cat sat."


def test_bos_begins_each_sequence_that_attends_together():
    tokenizer = load_tokenizer(BPE)
    assert tokenizer.bos_id is not None
    (line,) = encode(tokenizer, TALK)
    assert line.input_ids.count(tokenizer.bos_id) == 1
    apart = encode(tokenizer, TALK, attention_boundary="pair", packing_boundary="pair")
    assert [example.input_ids.count(tokenizer.bos_id) for example in apart] == [1, 1]
    assert [example.token_types[0] for example in apart] == [0, 0]
