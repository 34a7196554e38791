import dataclasses
from unittest import mock

import pytest

from prompt_tuning.checkpoints.restore import RestorePlan
from prompt_tuning.data.tokenizers import load_tokenizer
from prompt_tuning.decoding.texts import continuation_text, continue_all
from prompt_tuning.errors import InputError
from prompt_tuning.models.parameters import Parameters
from prompt_tuning.models.prompted import Prompting
from prompt_tuning.pretrained import PromptedModel
from tests.dummies import GPT2, P, prompted, unprompted
from tests.shared_data import SHARED, needs_shared

ROW = [4, 9, 2, 30, 7, 7, 1, 12, 5, 3]


def model_with(positions: int, prompt: bool = True) -> tuple[PromptedModel, Parameters]:
    """The same GPT-2 with fewer learned positions."""
    make = prompted if prompt else unprompted
    _, parameters = make(GPT2)
    config = dataclasses.replace(GPT2, maximum_positions=positions)
    graph, _ = make(config)
    name = "position_embedder/embedding"
    table = parameters[name][:positions]
    plan = mock.Mock(spec=RestorePlan)
    model = PromptedModel(
        config, graph, P if prompt else 0, Prompting(), None, plan, dict
    )
    return model, parameters | {name: table}


def test_rows_are_not_padded_past_the_last_learned_position():
    # Room for 15 tokens beside the prompt; rows are otherwise padded to 16.
    expected = continue_all(*model_with(64), [ROW], new_tokens=5)
    short = model_with(P + 15)
    assert continue_all(*short, [ROW], new_tokens=5) == expected
    with pytest.raises(InputError, match="10 tokens and 6 new ones do not fit"):
        continue_all(*short, [ROW], new_tokens=6)


def test_without_a_prompt_there_must_be_something_to_continue():
    with pytest.raises(InputError, match="row 1 has no token"):
        continue_all(*model_with(64, prompt=False), [ROW, []], new_tokens=5)


@needs_shared
def test_a_continuation_keeps_the_space_at_its_head():
    tokenizer = load_tokenizer(SHARED / "data/models/stories260k")
    given = [tokenizer.bos_id or 0, *tokenizer.encode("Once upon")]
    new = tokenizer.encode_continuation(" a time")
    assert continuation_text(tokenizer, given, new) == " a time"
    assert continuation_text(tokenizer, given, []) == ""
