"""Inputs from Python are texts, conversations or token ids, and others are refused."""

import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.core.errors import InputError
from prompt_tuning.texts.python_inputs import read_inputs
from tests.support.small_runs import add_chat_template

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}={{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}a={% endif %}"
)
ASK = {"role": "user", "content": "ab"}
HUMAN = {"from": "human", "value": "ab"}


@pytest.fixture(scope="module")
def model(files) -> pt.Model:
    return pt.load(add_chat_template(files.decoder, TEMPLATE))


@pytest.fixture
def rows(model, monkeypatch):
    """The rows that are continued, as texts."""
    rows = []

    def record(requests, settings=None):
        del settings
        rows.extend(model.tokenizer.decode(x.ids) for x in requests)
        return iter(())

    monkeypatch.setattr(model.texts, "complete", record)
    return rows


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([ASK], ["u=ab a="]),
        ([[ASK], [HUMAN], "cd"], ["u=ab a=", "u=ab a=", "cd"]),
        ([[{"role": "system", "content": "x"}, ASK]], ["s=x u=ab a="]),
        (([ASK] for _ in range(2)), ["u=ab a="] * 2),
        ([np.array([3]), [np.int64(3)]], None),
    ],
    ids=["one", "several", "system", "generator", "ids"],
)
def test_conversations_and_ids_stand_for_texts(model, rows, given, expected):
    model.generate(given, new_tokens=2)
    assert rows == (expected or [model.tokenizer.decode([3])] * 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "the texts are None, expected a text"),
        (3, "the texts are 3, expected a text"),
        (b"ab", "the texts are b'ab'"),
        (ASK, "the texts are {'role'"),
        (["ab", None], "input 2 is None, expected a text"),
        ([b"ab"], "input 1 is b'ab'"),
        ([[True]], r"input 1 is \[True\]"),
        ([{"role": "user"}], "input: 'messages' must be a list of objects"),
    ],
)
def test_other_inputs_are_refused(given, message):
    with pytest.raises(InputError, match=message):
        read_inputs(given)


def test_keys_without_a_template_are_refused(model):
    with pytest.raises(InputError, match=r"keys \['text'\], which only a template"):
        model.generate([{"text": "ab"}], new_tokens=2)


def test_a_system_message_is_for_texts(model):
    with pytest.raises(InputError, match="put the system message among the others"):
        model.generate([ASK], chat=True, system="x")
