"""Records with a chosen and a rejected answer, in the forms of published data."""

import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.examples.preference_examples import (
    load_preferences,
    with_prompt,
)
from prompt_tuning.data.model_interface import ModelInterface
from prompt_tuning.data.text.tokenizers import load_tokenizer
from prompt_tuning.settings.data_source import DataSource
from tests.support.prepared_files import write_jsonl
from tests.support.small_tokenizer import CHAT, write_tokenizer

ASK = {"role": "user", "content": "Say the word."}
GOOD, BAD = (
    {"role": "assistant", "content": text} for text in ("the word", "no word at all")
)


@pytest.fixture
def model(tmp_path):
    folder = write_tokenizer(tmp_path / "tokenizer", chat_template=CHAT)
    tokenizer = load_tokenizer(str(folder))
    return ModelInterface(
        architecture="decoder_only",
        vocabulary_size=tokenizer.vocabulary_size,
        tokenizer=tokenizer,
        maximum_length=60,
    )


def read(model, tmp_path, records, *, share=False, **settings):
    file = write_jsonl(tmp_path / "pairs.jsonl", *records)
    source = DataSource(files=str(file), **settings)
    return load_preferences(source, model, share=share)


def decoded(model, row):
    given, answer = row.inputs[: row.prefix_length], row.inputs[row.prefix_length :]
    return model.tokenizer.decode(given.tolist()), model.tokenizer.decode(
        answer.tolist()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},  # TRL, explicit
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},  # TRL, implicit
        # UltraFeedback: the prompt is also given as a text.
        {"prompt": ASK["content"], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        # ultrafeedback_binarized: the better conversation is repeated, too.
        {
            "prompt": ASK["content"],
            "messages": [ASK, GOOD],
            "chosen": [ASK, GOOD],
            "rejected": [ASK, BAD],
        },
        {"prompt": ASK["content"], "chosen": [GOOD], "rejected": [BAD]},
        # LLaMA-Factory: a conversation and two messages.
        {
            "conversations": [{"from": "human", "value": ASK["content"]}],
            "chosen": {"from": "gpt", "value": GOOD["content"]},
            "rejected": {"from": "gpt", "value": BAD["content"]},
        },
        {"messages": [ASK], "chosen": GOOD, "rejected": BAD},
    ],
    ids=["explicit", "implicit", "both", "three", "text", "sharegpt", "messages"],
)
def test_conversations_have_one_prompt_and_two_answers(model, tmp_path, record):
    ((chosen, rejected),) = [read(model, tmp_path, [record])[0]]
    given, answer = decoded(model, chosen)
    other, bad = decoded(model, rejected)
    assert given == other and "Say the word." in given
    assert "the word" in answer and "no word at all" in bad
    assert "Say" not in answer + bad


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        # Anthropic's hh-rlhf: the texts begin alike, up to the answers.
        (
            {"chosen": "ask: say it answer: yes", "rejected": "ask: say it answer: no"},
            {"prompt": "ask: say it answer:", "chosen": " yes", "rejected": " no"},
        ),
        (
            {"prompt": "say it", "chosen": "yes", "rejected": "yellow"},
            {"prompt": "say it", "chosen": "yes", "rejected": "yellow"},
        ),
        (
            {"instruction": "say", "input": "it", "chosen": "yes", "rejected": "no"},
            {"prompt": "say\nit", "chosen": "yes", "rejected": "no"},
        ),
        ({"prompt": "say it", "completion": "yes"},) * 2,
    ],
)
def test_texts_begin_with_what_both_have_in_common(record, expected):
    assert with_prompt(record, "prompt") == expected


def test_a_prompt_is_read_once_for_both_answers(model, tmp_path):
    records = [{"prompt": "say", "chosen": " it", "rejected": " no"}]
    whole = read(model, tmp_path, records)[0]
    shared = read(model, tmp_path, records, share=True)
    assert shared.shares_prompt
    for row, parts in zip(whole, shared[0], strict=True):
        tokens = np.concatenate([parts.inputs, parts.targets])
        np.testing.assert_array_equal(tokens, row.inputs)
        assert len(parts.inputs) == row.prefix_length and parts.weights.all()


def test_prompts_that_are_cut_differently_are_read_apart(model, tmp_path):
    records = [{"prompt": "say " * 20, "chosen": " it", "rejected": " no way" * 3}]
    cut = read(model, tmp_path, records, share=True, on_too_long="truncate")
    assert cut.truncated == 1 and not cut.shares_prompt


def test_records_that_teach_nothing_are_left_out_and_counted(model, tmp_path):
    records = [
        {"prompt": "say", "chosen": " it", "rejected": " no"},
        {"prompt": "say", "chosen": " same", "rejected": " same"},
        {"prompt": "say", "chosen": " it", "rejected": ""},
        {"prompt": "say", "chosen": " it", "rejected": " very long" * 30},
        {"prompt": "say", "chosen": " last", "rejected": " no"},
    ]
    examples = read(model, tmp_path, records, on_too_long="skip")
    assert len(examples) == 2
    assert (examples.unlearned, examples.without_completion) == (1, 1)
    assert examples.skipped >= 1
    assert "last" in decoded(model, examples[1][0])[1]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"prompt": "a", "completion": "b"},
            r"\['completion', 'prompt'\], but the obj",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "the two answers are equal"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, "the prompt is empty"),
        (
            {"prompt": [ASK], "chosen": [GOOD, ASK, GOOD], "rejected": [BAD]},
            "expected a prompt that ends with another role",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "'rejected' is null"),
    ],
)
def test_a_record_without_two_answers_is_refused(model, tmp_path, record, message):
    with pytest.raises(InputError, match=message):
        read(model, tmp_path, [record])
