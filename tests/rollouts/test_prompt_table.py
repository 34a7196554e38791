"""Prompts of rollouts, in the forms of published data."""

import pytest

import prompt_tuning as pt
from prompt_tuning.settings.data_source import DataSource
from prompt_tuning.settings.rollout_settings import Rollouts
from prompt_tuning.training.rollouts.prompt_table import load_prompts
from tests.support.prepared_files import write_jsonl
from tests.support.small_runs import add_chat_template

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}={{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}a={% endif %}"
)
ASK = {"role": "user", "content": "ab"}
ANSWER = {"role": "assistant", "content": "c"}
PARTS = {"role": "user", "content": [{"type": "text", "text": x} for x in "ab"]}


@pytest.fixture(scope="module")
def model(files) -> pt.Model:
    return pt.load(add_chat_template(files.decoder, TEMPLATE))


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [ASK, ANSWER]},
        {"messages": [PARTS]},
        {"conversations": [{"from": "human", "value": "ab"}]},
        {"conversation": [ASK, ANSWER]},
        {"prompt": [ASK]},
    ],
    ids=["messages", "parts", "sharegpt", "conversation", "prompt"],
)
def test_the_last_message_of_a_conversation_is_answered(model, tmp_path, record):
    (prompt,) = prompts(model, tmp_path, record)
    assert (model.tokenizer.decode(prompt.ids), prompt.text) == ("u=ab a=", "ab")


def test_a_prompt_comes_before_a_text_under_another_key(model, tmp_path):
    record = {"prompt": "ab=", "conversation": "a text"}
    (prompt,) = prompts(model, tmp_path, record)
    assert prompt.text == "ab="


def prompts(model, tmp_path, record):
    file = write_jsonl(tmp_path / "prompts.jsonl", record)
    rollouts = Rollouts(rewards=["length=4"], new_tokens=4, group=2)
    return load_prompts(DataSource(files=str(file)), model.prompted, rollouts).prompts
