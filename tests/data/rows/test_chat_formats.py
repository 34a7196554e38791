"""Conversations of public tools are read as transformers renders them, or refused."""

# transformers is only in the `bench` extra.
# pyright: reportMissingImports=false

import json
from pathlib import Path

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import COMPLETION, SEPARATOR
from prompt_tuning.data.rows.jsonl import AlpacaEncoder, JsonLine, LineEncoder
from prompt_tuning.data.rows.line_formats import ConversationEncoder
from prompt_tuning.data.rows.python_rows import write_rows
from prompt_tuning.data.rows.text_records import read_records
from prompt_tuning.data.text.chat_templates import ChatTemplate, chat_template_of
from prompt_tuning.data.text.conversations import answers_of, recognize_format
from prompt_tuning.data.text.learned_conversations import LearnedConversations
from prompt_tuning.data.text.tokenizers import load_tokenizer
from tests.support import chat_records
from tests.support.chat_records import (
    MARKED_TEMPLATE,
    PARTS,
    READ,
    TALK,
    TEMPLATE,
    TOOLS,
    user,
)
from tests.support.small_tokenizer import EOS, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats") / "tokenizer"
    return write_tokenizer(folder, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def encode(folder):
    """Encodes a record in the format that is recognized, as ids and types."""
    tokenizer = load_tokenizer(folder)
    learned = LearnedConversations(tokenizer, chat_template_of(tokenizer), "auto")

    def encode(record, pairs=None):
        pairs = pairs or LineEncoder(tokenizer)
        format = recognize_format(record, pairs.completion_key)
        encoder = ConversationEncoder(format, learned, pairs)
        ((row,),) = encoder.rows([line(record)], True)
        return [part.tolist() for part in row]

    return encode


def line(record):
    return JsonLine(Path("x.jsonl"), 1, record)


def texts(folder, row):
    """Returns the whole text of a row, and that of its learned tokens."""
    tokenizer = load_tokenizer(folder)
    kinds = (COMPLETION, SEPARATOR)
    learned = [id for id, kind in zip(*row, strict=True) if kind in kinds]
    return [
        "".join(map(tokenizer.token, ids)).replace("Ċ", "\n").replace("Ġ", " ")
        for ids in (row[0], learned)
    ]


def text_of(message):
    calls = message.get("tool_calls") or []
    called = "".join(
        x["function"]["name"] + json.dumps(x["function"]["arguments"]) for x in calls
    )
    return f"{message['content']}{called}{EOS}\n"


@pytest.mark.parametrize("name", READ)
def test_records_are_read_as_the_conversation_that_they_stand_for(folder, encode, name):
    record, messages, learned, arguments = READ[name]
    tools, style = arguments.get("tools"), arguments.get("style", "")
    before = (json.dumps(tools) if tools else "") + style
    whole = "".join(f"<|{m['role']}|>\n{text_of(m)}" for m in messages)
    # What follows the token that ends an answer is not learned.
    answers = "".join(text_of(messages[number]).rstrip() for number in learned)
    # Nothing follows the last EOS.
    expected = [(before + whole).rstrip(), answers]
    assert texts(folder, encode(record)) == expected


@pytest.mark.torch
@pytest.mark.parametrize("name", READ)
def test_ids_and_learned_tokens_are_those_of_transformers(folder, encode, name):
    from transformers import AutoTokenizer

    record, messages, learned, arguments = READ[name]
    messages = [m | {"learned": i in learned} for i, m in enumerate(messages)]
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages,
        chat_template=MARKED_TEMPLATE,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **arguments,
    )
    ids, types = encode(record)
    # transformers writes a line feed after the last EOS.
    assert expected["input_ids"][:-1] == ids
    assert expected["assistant_masks"][:-1] == [int(kind > 0) for kind in types]


@pytest.mark.parametrize("name", chat_records.REFUSED)
def test_fields_that_are_not_read_are_refused_by_name(encode, name):
    record, message = chat_records.REFUSED[name]
    with pytest.raises(InputError, match=f"x.jsonl, line 1: .*{message}"):
        encode(record)


def test_a_template_that_reads_parts_gets_them():
    source = (
        "{% for m in messages %}{% for part in m.content %}"
        "[{{ part.text }}]{% endfor %}{% endfor %}"
    )
    chat = ChatTemplate(source, {"eos_token": EOS}, "a test")
    assert chat.prompt(answers_of([user(PARTS)]), "here") == "[a][b]"


def test_a_template_for_tools_is_used_with_tools(tmp_path):
    named = {"default": "{{ 'no' }}", "tool_use": "{{ 'tools' }}"}
    entries = [{"name": name, "template": text} for name, text in named.items()]
    in_config = write_tokenizer(tmp_path / "config", chat_template=entries)
    in_files = write_tokenizer(tmp_path / "files")
    (in_files / "additional_chat_templates").mkdir()
    (in_files / "chat_template.jinja").write_text(named["default"])
    extra = in_files / "additional_chat_templates/tool_use.jinja"
    extra.write_text(named["tool_use"])
    for folder in (in_config, in_files):
        chat = chat_template_of(load_tokenizer(folder))
        record = answers_of([user("a")])
        assert chat.prompt(record, "here") == "no"
        assert chat.prompt(record._replace(tools=TOOLS), "here") == "tools"


def test_keys_that_arrow_adds_are_left_out(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    from pyarrow import Table

    tools = [{"name": "f", "x": {"a": 1}}, {"name": "g", "x": {"b": [{"c": None}]}}]
    file = tmp_path / "x.parquet"
    parquet.write_table(Table.from_pylist([{"tools": tools, "none": None}]), file)
    (read,) = read_records(file)
    tools[1]["x"]["b"][0] = {}
    assert read.content == {"tools": tools, "none": None}
    dataset = type("Dataset", (list,), {"__module__": "datasets.arrow_dataset"})
    rows = dataset([{"messages": [{"role": "user", "name": None}]}])
    write_rows(rows, tmp_path / "x.jsonl", "prompt", "completion")
    (row,) = (tmp_path / "x.jsonl").read_text().splitlines()
    assert json.loads(row) == {"messages": [{"role": "user"}]}


def test_pairs_with_fields_that_change_them_are_refused(folder):
    tokenizer = load_tokenizer(folder)
    pair = {"prompt": "a", "completion": "b"}
    task = {"instruction": "a", "output": "b"}
    for encoder, record in ((LineEncoder, pair), (AlpacaEncoder, task)):
        rows = encoder(tokenizer, elsewhere=frozenset({"weight"})).rows
        harmless = {"system": "", "history": None, "label": 0, "weight": 0.5}
        rows([line(record | harmless)], True)
        for name, value in {
            "system": "s",
            "history": [["a", "b"]],
            "tools": "[{}]",
        }.items():
            with pytest.raises(InputError, match=f"line 1: {name!r} is .* not read"):
                rows([line(record | {name: value})], True)


def test_a_key_that_one_line_lacks_is_to_be_added(folder):
    lacking = JsonLine(Path("x.jsonl"), 2, {"prompt": "a"})
    rows = LineEncoder(load_tokenizer(folder)).rows
    with pytest.raises(InputError, match="add it, or leave the line out; if no line"):
        rows([lacking], True)


def test_unknown_keys_of_the_first_conversation_are_named(encode):
    record = {"messages": TALK, "id": 4, "meta": {"x": 1}, "notes": "", "mood": "good"}
    with pytest.warns(UserWarning, match=r"line 1: the keys \['mood'\] are not read"):
        encode(record)
