"""Chat templates: what is an answer has type 1, whatever the texts say."""

import json

import pytest

from prompt_tuning.data.preparation.articles import ArticleMaker
from prompt_tuning.data.preparation.chat import ChatTemplate, read_chat_template
from prompt_tuning.data.preparation.records import Record, Turn
from prompt_tuning.data.preparation.settings import TextFormat
from prompt_tuning.data.tokenizers import load_tokenizer
from prompt_tuning.errors import InputError
from tests.data.preparation.small_tokenizer import CHAT, EOS, write_tokenizer


def chat(source, **special):
    return ChatTemplate(source, {"eos_token": EOS} | special, "a test")


def talk(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def test_answers_and_what_closes_them_are_learned():
    runs = chat(CHAT).runs(talk("hi", "yes", "and?", "no"), "here")
    assert runs == [
        ("<|user|>\nhi" + EOS + "\n<|assistant|>\n", 0),
        ("yes" + EOS + "\n", 1),
        ("<|user|>\nand?" + EOS + "\n<|assistant|>\n", 0),
        ("no" + EOS + "\n", 1),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "<prompt_placeholder>",
        "<completion_placeholder> {{ messages }} {% raw %}",
        "<|assistant|>\nyes",
        "yes",
        "",
        "\n \n",
    ],
)
def test_no_text_is_taken_for_a_mark(text):
    runs = chat(CHAT).runs(talk(text, "yes", text, text), "here")
    assert "".join(run for run, kind in runs if kind == 1) == (
        f"yes{EOS}\n{text}{EOS}\n"
    )
    given = "".join(run for run, kind in runs if kind == 0)
    turn = f"<|user|>\n{text}{EOS}\n<|assistant|>\n"
    assert given == 2 * turn


def test_a_template_that_changes_what_it_wrote_is_refused():
    source = (
        "{% for m in messages %}{{ m.content if loop.last else '...' }}{% endfor %}"
    )
    with pytest.raises(InputError, match=r"here: with message 2 the chat template wr"):
        chat(source).runs(talk("hi", "yes"), "here")


def test_what_a_template_refuses_is_named():
    source = "{{ raise_exception('only users') }}"
    with pytest.raises(InputError, match="does not take these messages: only users"):
        chat(source).runs(talk("hi", "yes"), "here")
    with pytest.raises(InputError, match="is not jinja2"):
        chat("{% for %}").check()


def test_the_dialect_of_templates():
    source = (
        "{{ bos_token }}{%- for m in messages %}\n"
        "    {%- if m.role == 'system' %}{% continue %}{% endif %}\n"
        "    {%- generation %}{{ m.content | tojson }}{% endgeneration %}\n"
        "{%- endfor %}"
    )
    runs = chat(source, bos_token="<s>").runs(talk("<é>", "b"), "here")
    assert runs == [('<s>"<é>"', 0), ('"b"', 1)]


def test_the_sandbox_keeps_templates_from_the_machine():
    source = "{{ messages.__class__.__mro__ }}"
    with pytest.raises(InputError, match="does not take these messages"):
        chat(source).runs(talk("a", "b"), "here")


def test_where_a_template_is_found(tmp_path):
    folder = write_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(InputError, match="has no chat_template, which --chat asks for"):
        read_chat_template(folder, None)
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": CHAT}]
    config = {"eos_token": {"content": EOS}, "chat_template": named}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_chat_template(folder, None).source == CHAT
    assert read_chat_template(folder, None).eos_token == EOS
    (folder / "chat_template.jinja").write_text("own")
    assert read_chat_template(folder, None).source == "own"
    (tmp_path / "other.jinja").write_text("other")
    assert read_chat_template(folder, str(tmp_path / "other.jinja")).source == "other"


def maker(folder, **text):
    return ArticleMaker(
        TextFormat(chat=True, **text),
        load_tokenizer(folder),
        read_chat_template(folder, None),
    )


def test_a_conversation_ends_with_one_separator(tmp_path):
    folder = write_tokenizer(tmp_path / "tokenizer", chat_template=CHAT)
    made = maker(folder)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_id is not None
    record = Record((Turn("hi", "yes"), Turn("and?", "no")))
    passages = made.passages(record, "here")
    ((article,),) = made.articles([passages])
    assert article.token_types[-1] == 3 and article.token_types.count(3) == 1
    assert article.input_ids[-1] == tokenizer.eos_id
    # The first answer is closed by a token that is learned as its text is.
    assert article.input_ids.count(tokenizer.eos_id) == 4
    learned = zip(article.input_ids, article.token_types, strict=True)
    assert tokenizer.decode(i for i, kind in learned if kind) == "yes\nno"


def test_messages_and_pairs_are_the_same(tmp_path):
    folder = write_tokenizer(tmp_path / "tokenizer", chat_template=CHAT)
    made = maker(folder)
    pairs = Record((Turn("hi", "yes"),))
    messages = Record((), tuple(talk("hi", "yes")))
    assert made.passages(pairs, "") == made.passages(messages, "")
    assert made.passages(Record((), tuple(talk("hi"))), "") == []


def test_pairs_of_their_own_are_conversations_of_their_own(tmp_path):
    folder = write_tokenizer(tmp_path / "tokenizer", chat_template=CHAT)
    made = maker(folder, attention_boundary="pair", packing_boundary="pair")
    record = Record((Turn("hi", "yes"), Turn("and?", "no")))
    (articles,) = made.articles([made.passages(record, "")])
    assert [article.token_types[-1] for article in articles] == [3, 3]
