import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest

from prompt_tuning.checkpoints.restore_plan import RestorePlan
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.text.templates import TokenTemplate, parse_template
from prompt_tuning.data.text.tokenizers import load_tokenizer
from prompt_tuning.decoding.continue_rows import continue_rows
from prompt_tuning.decoding.row_encoding import continuation_text
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.evaluation.ranking import label_nats
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.pretrained.text_encoding import encode_given
from prompt_tuning.pretrained.tuning import PromptPair
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.multitask import AddMultiTaskPrompt
from prompt_tuning.prompts.prefix import KeyValuePrefix
from prompt_tuning.prompts.prompt_module import InputPrompt
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.prompts.stack_shape import StackShape
from prompt_tuning.settings.prompting import Prompting
from tests.support.dummies import (
    FAMILIES,
    GPT2,
    LLAMA,
    LetterTokenizer,
    P,
    V,
    prompted,
    unprompted,
    with_prompt,
)
from tests.support.exhaustive import sample
from tests.support.shared_data import FIXTURES

ROW = [4, 9, 2, 30, 7, 7, 1, 12, 5, 3]


def model_with(positions: int, prompt: bool = True) -> tuple[PromptedModel, Parameters]:
    """The same GPT-2 with fewer learned positions."""
    make = prompted if prompt else unprompted
    _, parameters = make(GPT2)
    config = dataclasses.replace(GPT2, maximum_positions=positions)
    graph, _ = make(config)
    name = "position_embedder/embedding"
    table = parameters[name][:positions]
    plan = mock.Mock(spec=RestorePlan, origin="folder")
    soft = SoftPrompt(jax.random.key(0), Vocabulary(np.zeros((1, 1))), length=P)
    started = PromptPair(soft if prompt else None)
    model = PromptedModel(config, graph, started, Prompting(), None, plan, dict)
    return model, parameters | {name: table}


@pytest.mark.slow
def test_rows_are_not_padded_past_the_last_learned_position():
    # 15 positions are left after the prompt; rows would otherwise be padded to 16.
    expected = continue_rows(*model_with(64), [ROW], Sampling(new_tokens=5))
    short = model_with(P + 15)
    assert continue_rows(*short, [ROW], Sampling(new_tokens=5)) == expected
    with pytest.raises(InputError, match="10 tokens and 6 new ones do not fit"):
        continue_rows(*short, [ROW], Sampling(new_tokens=6))


@pytest.mark.exhaustive
def test_an_encoder_and_a_decoder_each_have_all_positions():
    config = dataclasses.replace(FAMILIES["t5_gated"], maximum_positions=P + 12)
    prompt = SoftPrompt(jax.random.key(0), VOCABULARY, length=P, initializer=_normal)
    model, parameters = model_of(config, prompt, Prompting(), Letters())
    (row,) = continue_rows(model, parameters, [ROW], Sampling(new_tokens=12))
    assert len(row) == 12
    for given, new in ((ROW, 13), ([*ROW, *ROW], 5)):
        with pytest.raises(InputError, match="do not fit: the model has"):
            continue_rows(model, parameters, [given], Sampling(new_tokens=new))
    assert (
        dataclasses.replace(model, prompts=PromptPair(None, prompt)).maximum_length
        == 12
    )


def test_an_empty_text_is_refused_without_a_prompt():
    with pytest.raises(InputError, match="row 1 has no token"):
        continue_rows(*model_with(64, prompt=False), [ROW, []], Sampling(new_tokens=5))


VOCABULARY = Vocabulary(np.zeros((V, 16), np.float32))


def model_of(config, prompt: InputPrompt, prompting=None, tokenizer=None):
    graph, parameters = with_prompt(config, prompt, prompting)
    plan = mock.Mock(spec=RestorePlan, origin="folder")
    prompting = prompting or Prompting()
    model = PromptedModel(
        config, graph, PromptPair(prompt), prompting, tokenizer, plan, dict
    )
    return model, parameters


def prompted_three_times(config) -> tuple[PromptedModel, Parameters]:
    """Three prompts with different continuations."""
    key = jax.random.key(1)
    prompt = AddMultiTaskPrompt(
        key,
        VOCABULARY,
        length=P,
        tasks=3,
        initializer=_normal,
        task_initializer=_normal,
    )
    return model_of(config, prompt)


def _normal(key, shape, vocabulary):
    return jax.random.normal(key, shape)


def with_one_prompt(config, model: PromptedModel, number: int):
    """The model with only one of the prompts."""
    prompts = model.prompts.prompt
    assert isinstance(prompts, InputPrompt)
    soft = SoftPrompt(
        jax.random.key(0),
        VOCABULARY,
        length=P,
        initializer=lambda *_: prompts()[number],
    )
    return model_of(config, soft)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", sample(1, ["llama", "t5_gated"]))
def test_each_row_is_continued_and_ranked_after_its_own_prompt(family):
    config = FAMILIES[family]
    model, parameters = prompted_three_times(config)
    rows, labels = [ROW, ROW[:4], ROW[:7]], [[3, 4], [5]]
    continuations = continue_rows(
        model, parameters, rows, Sampling(new_tokens=6), prompt_ids=[2, 0, 1]
    )
    nats = label_nats(
        model, parameters, rows, labels, add_eos=False, prompt_ids=[2, 0, 1]
    )
    for index, number in enumerate([2, 0, 1]):
        alone = with_one_prompt(config, model, number)
        assert [continuations[index]] == continue_rows(
            *alone, [rows[index]], Sampling(new_tokens=6)
        )
        alone_nats = label_nats(*alone, [rows[index]], labels, add_eos=False)
        np.testing.assert_allclose(nats[index], alone_nats[0], rtol=1e-5)
    other = with_one_prompt(config, model, 0)
    wrong = label_nats(*other, [rows[0]], labels, add_eos=False)
    assert np.abs(wrong - nats[0]).max() > 1e-2


def test_rows_select_their_prompt():
    model, parameters = prompted_three_times(LLAMA)
    with pytest.raises(InputError, match=r"has 3 prompts, .* 0 to 2"):
        continue_rows(model, parameters, [ROW], Sampling(new_tokens=5))
    with pytest.raises(InputError, match="prompt id is 3, expected 0 to 2"):
        continue_rows(model, parameters, [ROW], Sampling(new_tokens=5), prompt_ids=[3])
    with pytest.raises(InputError, match="2 prompt ids, expected 1"):
        continue_rows(
            model, parameters, [ROW], Sampling(new_tokens=5), prompt_ids=[0, 1]
        )
    with pytest.raises(InputError, match="one prompt for all rows"):
        continue_rows(*model_with(64), [ROW], Sampling(new_tokens=5), prompt_ids=[0])


class Letters(LetterTokenizer):
    bos_id: int | None = 30
    begin_ids: tuple[int, ...] = (30,)


@pytest.mark.slow
def test_a_text_is_continued_within_its_training_template():
    prompt = SoftPrompt(jax.random.key(0), VOCABULARY, length=P, initializer=_normal)
    tokenizer = Letters()
    in_rows = Prompting(placement="template")
    model, parameters = model_of(LLAMA, prompt, in_rows, tokenizer)
    template = TokenTemplate(parse_template("{soft:3}{text}"), tokenizer, V)
    assert encode_given(model, "abc", template) == [30, V, V + 1, V + 2, 0, 1, 2]
    # The prompt is at the position of "after_bos".
    behind = model_of(LLAMA, prompt, Prompting(placement="after_bos"), tokenizer)
    texts = ["abc", "", "hello"]
    rows = [encode_given(model, text, template) for text in texts]
    continuations = continue_rows(model, parameters, rows, Sampling(new_tokens=6))
    plain = [encode_given(behind[0], text) for text in texts]
    assert continuations == continue_rows(*behind, plain, Sampling(new_tokens=6))
    assert len(set(map(tuple, continuations))) == 3


def test_an_encoder_reads_the_text_within_its_template():
    config = dataclasses.replace(FAMILIES["t5_gated"], eos_id=1)
    prompt = SoftPrompt(jax.random.key(0), VOCABULARY, length=P)
    model, _ = model_of(config, prompt, Prompting(placement="template"), Letters())
    template = TokenTemplate(parse_template("d{soft:3}{x}"), LetterTokenizer(), V)
    assert encode_given(model, "abc", template) == [3, V, V + 1, V + 2, 0, 1, 2, 1]
    in_gemma = dataclasses.replace(config, encoder_input="bos_text")
    model, _ = model_of(in_gemma, prompt, Prompting(placement="template"), Letters())
    assert encode_given(model, "abc", template) == [30, 3, V, V + 1, V + 2, 0, 1, 2]


def test_a_continuation_keeps_its_leading_space():
    tokenizer = load_tokenizer(FIXTURES / "tokenizers/bpe")
    given = [tokenizer.bos_id or 0, *tokenizer.encode("Once upon")]
    new = tokenizer.encode_continuation(" a time")
    assert continuation_text(tokenizer, given, new) == " a time"
    assert continuation_text(tokenizer, given, []) == ""


def test_a_prefix_predicts_no_token():
    model, parameters = model_with(64)
    stack = StackShape(GPT2.layers, GPT2.key_value_heads, GPT2.head_width)
    vocabulary = Vocabulary(np.zeros((1, 1)), None, stack)
    prefix = KeyValuePrefix(jax.random.key(0), vocabulary, length=P)
    prefixed = dataclasses.replace(model, prompts=PromptPair(prefix))
    with pytest.raises(InputError, match="row 1 has no token, and without prompt vec"):
        continue_rows(prefixed, parameters, [ROW, []], Sampling(new_tokens=5))
