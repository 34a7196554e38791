"""Conversations that are trained on directly have the tokens that `prepare` writes."""

import csv
import json
from typing import Any

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.data.model_interface import ModelInterface
from prompt_tuning.data.preparation.preparation import prepare
from prompt_tuning.data.preparation.preparation_settings import (
    Preparation,
    TextFormat,
    TokenizerChoice,
)
from prompt_tuning.data.text.tokenizers import load_tokenizer
from prompt_tuning.settings.data_source import DataSource
from tests.support.chat_records import READ
from tests.support.prepared_files import write_jsonl
from tests.support.small_tokenizer import CHAT, EOS, write_tokenizer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say the word."},
    {"role": "assistant", "content": "the word"},
    {"role": "user", "content": "And again?"},
    {"role": "assistant", "content": "the word again"},
]
# The third of `MESSAGES` ends so.
pytestmark = pytest.mark.filterwarnings("ignore:.*ends with a message of the user")

MESSAGES = [
    {"messages": TALK},
    {"messages": TALK[1:3]},
    {"messages": [*TALK[:3], {"role": "user", "content": "Thanks."}]},
]
SENDERS = {"user": "human", "assistant": "gpt", "system": "system"}
SHAREGPT = [
    {
        "conversations": [
            {"from": SENDERS[m["role"]], "value": m["content"]}
            for m in line["messages"]
        ]
    }
    for line in MESSAGES
]
ALPACA = [
    {"instruction": "Add.", "input": "1 2", "output": "3"},
    {"instruction": "Name a color.", "input": "", "output": "red"},
]
FIELDS = ("an unlearned end", "openai weights", "tools", "parts", "top-level system")
FORMATS = {
    "messages": MESSAGES,
    "sharegpt": SHAREGPT,
    "alpaca": ALPACA,
    "fields of messages": [READ[name].record for name in FIELDS],
    "fields of sharegpt": [READ["sharegpt tools"].record, READ["sharegpt"].record],
    "fields of alpaca": [READ["alpaca"].record, ALPACA[1]],
    "trl": [READ["trl with tools"].record, READ["trl"].record],
}


@pytest.fixture
def folder(tmp_path):
    return write_tokenizer(tmp_path / "tokenizer", chat_template=CHAT)


def load(folder, files, *, architecture: Any = "decoder_only", **settings):
    model = ModelInterface(
        architecture=architecture,
        vocabulary_size=262,
        tokenizer=load_tokenizer(folder),
        predicts_first_token=False,
    )
    return load_examples(DataSource(files=str(files), **settings), model)


def tokens(examples):
    return [
        (x.inputs.tolist(), x.targets.tolist(), x.weights.tolist())
        for x in map(examples.__getitem__, range(len(examples)))
    ]


def prepared(folder, file, output, **text):
    preparation = Preparation(
        (str(file),),
        str(output),
        TokenizerChoice(str(folder)),
        length=256,
        packing="single::drop",
        text=TextFormat(chat=True, **text),
    )
    return prepare(preparation, workers=1)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["decoder_only", "encoder_decoder"])
@pytest.mark.parametrize("name", FORMATS)
def test_lines_and_their_preparation_have_the_same_tokens(
    tmp_path, folder, name, architecture
):
    file = write_jsonl(tmp_path / "lines.jsonl", *FORMATS[name])
    direct = load(folder, file, architecture=architecture)
    rows = load(
        folder, prepared(folder, file, tmp_path / "out"), architecture=architecture
    )
    assert tokens(direct) == tokens(rows)
    assert direct.rows.describe(1) == f"{file}, line 2"


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_messages_in_a_table_are_json(tmp_path, folder, key):
    lines = write_jsonl(tmp_path / "lines.jsonl", *MESSAGES)
    file = tmp_path / "lines.csv"
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([key])
        writer.writerows([json.dumps(line["messages"])] for line in MESSAGES)
    expected = tokens(load(folder, lines))
    assert tokens(load(folder, file)) == expected
    assert tokens(load(folder, prepared(folder, file, tmp_path / "out"))) == expected


def test_pairs_are_rendered_if_asked(tmp_path, folder):
    pairs = [{"prompt": "Say it.", "completion": "it"}]
    file = write_jsonl(tmp_path / "lines.jsonl", *pairs)
    rows = load(folder, prepared(folder, file, tmp_path / "out"))
    assert tokens(load(folder, file, chat=True)) == tokens(rows)
    assert tokens(load(folder, file)) != tokens(rows)


def test_only_answers_and_their_end_are_learned(tmp_path, folder):
    file = write_jsonl(tmp_path / "lines.jsonl", {"messages": TALK})
    tokenizer = load_tokenizer(folder)
    (example,) = map(load(folder, file).__getitem__, range(1))
    ids = example.targets[example.weights > 0].tolist()
    text = "".join(map(tokenizer.token, ids)).replace("Ġ", " ").replace("Ċ", "\n")
    assert text == f"the word{EOS}the word again{EOS}"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("instruction", "context", "response"), "'context' is not .*: leave out the "),
        (("question", "context", "answer"), "'context' is not read: rename it"),
    ],
)
def test_a_part_of_the_prompt_under_another_key_is_named(
    tmp_path, folder, keys, message
):
    prompt, _, completion = keys
    file = write_jsonl(tmp_path / "lines.jsonl", dict.fromkeys(keys, "a"))
    with pytest.warns(
        UserWarning, match=f"lines.jsonl: .*{prompt!r} alone, and {message}"
    ):
        load(folder, file, prompt_key=prompt, completion_key=completion)


def test_a_message_that_nothing_answers_is_named(tmp_path, folder):
    asking = {"messages": [*TALK, {"role": "user", "content": "and?"}]}
    file = write_jsonl(tmp_path / "lines.jsonl", {"messages": TALK}, asking)
    with pytest.warns(UserWarning, match="line 2: the conversation ends with a mes"):
        one, other = map(load(folder, file).__getitem__, range(2))
    assert one.targets.tolist() == other.targets.tolist()


def test_sharegpt_and_messages_are_the_same(tmp_path, folder):
    messages = write_jsonl(tmp_path / "messages.jsonl", *MESSAGES)
    sharegpt = write_jsonl(tmp_path / "sharegpt.jsonl", *SHAREGPT)
    assert tokens(load(folder, messages)) == tokens(load(folder, sharegpt))
    with_system = {"system": "Be brief.", "conversations": SHAREGPT[1]["conversations"]}
    whole = write_jsonl(tmp_path / "whole.jsonl", with_system)
    first = write_jsonl(tmp_path / "first.jsonl", {"messages": TALK[:3]})
    assert tokens(load(folder, whole)) == tokens(load(folder, first))


def test_alpaca_without_a_chat_template_is_plain_text(tmp_path):
    plain = write_tokenizer(tmp_path / "plain")
    alpaca = write_jsonl(tmp_path / "alpaca.jsonl", *ALPACA)
    pairs = write_jsonl(
        tmp_path / "pairs.jsonl",
        {"prompt": "Add.\n1 2", "completion": "\n3"},
        {"prompt": "Name a color.", "completion": "\nred"},
    )
    assert tokens(load(plain, alpaca)) == tokens(load(plain, pairs))


def test_a_template_is_needed_for_messages(tmp_path):
    plain = write_tokenizer(tmp_path / "plain")
    file = write_jsonl(tmp_path / "lines.jsonl", *MESSAGES)
    with pytest.raises(InputError, match=r"lines.jsonl contains .*has no chat_temp"):
        load(plain, file)
    template = tmp_path / "chat.jinja"
    template.write_text(CHAT)
    assert len(load(plain, file, chat_template=str(template))) == 3


def test_a_template_that_uses_the_date_needs_one(tmp_path):
    dated = write_tokenizer(
        tmp_path / "dated", chat_template="{{ strftime_now('%Y') }}" + CHAT
    )
    file = write_jsonl(tmp_path / "lines.jsonl", *MESSAGES)
    with pytest.raises(InputError, match="uses the current date, so rows would differ"):
        load(dated, file)
    day = "2026-07-26"
    rows = load(dated, prepared(dated, file, tmp_path / "out", chat_date=day))
    assert tokens(load(dated, file, chat_date=day)) == tokens(rows)


def test_conversations_without_an_answer_are_left_out_and_counted(tmp_path, folder):
    empty = {"role": "assistant", "content": ""}
    parts = {"role": "assistant", "content": [{"type": "text", "text": ""}]}
    lines = [TALK[:2], [TALK[1], empty], [TALK[1], parts], [*TALK[1:3], TALK[3], empty]]
    written = write_jsonl(tmp_path / "a.jsonl", *({"messages": x} for x in lines))
    rows = load(folder, written)
    assert rows.without_completion == 3
    whole = write_jsonl(tmp_path / "b.jsonl", {"messages": TALK[1:3]})
    assert tokens(rows) == tokens(load(folder, whole))
    assert tokens(rows) == tokens(
        load(folder, prepared(folder, written, tmp_path / "out"))
    )
    none = write_jsonl(tmp_path / "c.jsonl", {"messages": TALK[:2]})
    with pytest.raises(InputError, match="no record has a completion"):
        load(folder, none)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": []}, "line 2: 'messages' is .*, expected a list of at least one"),
        ({"messages": ["hi"]}, "line 2: 'messages' is .*, expected a list of at least"),
        ({"messages": [{"role": "user"}]}, "line 2: .* 'role' .* and 'content'; found"),
        (
            {"conversations": []},
            "line 2: found the keys .*, expected 'messages'",
        ),
    ],
)
def test_a_line_that_is_no_conversation_is_refused(tmp_path, folder, line, message):
    file = write_jsonl(tmp_path / "lines.jsonl", MESSAGES[0], line)
    with pytest.raises(InputError, match=message):
        load(folder, file)


def test_unknown_senders_are_refused(tmp_path, folder):
    line = {"conversations": [{"from": "bird", "value": "tweet"}]}
    file = write_jsonl(tmp_path / "lines.jsonl", line)
    with pytest.raises(InputError, match=r"'from' .human, user, gpt.* found .*bird"):
        load(folder, file)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "pairs"}, "expected 'prompt'; name the key with"),
        ({"joiner": " "}, "DataSource.joiner is ' ', but .*conversations"),
        ({"add_eos": False}, "DataSource.add_eos is False, but a conversation ends"),
        ({"chat_date": "today"}, "DataSource.chat_date is 'today', expected a date"),
    ],
)
def test_settings_that_contradict_conversations(tmp_path, folder, settings, message):
    file = write_jsonl(tmp_path / "lines.jsonl", *MESSAGES)
    with pytest.raises(InputError, match=message):
        load(folder, file, **settings)


def test_the_text_that_cannot_be_encoded_has_its_line(tmp_path, folder):
    lines = [MESSAGES[0], json.loads(json.dumps(MESSAGES[1]))]
    lines[1]["messages"][1]["content"] = "x" * (2**20 + 2**22)
    file = tmp_path / "lines.json"
    file.write_text(json.dumps(lines))
    with pytest.raises(InputError, match=r"lines.json, item 2: .*characters"):
        load(folder, file)
