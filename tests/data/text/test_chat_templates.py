"""Chat templates: answers have type 1, regardless of what the texts contain."""

import datetime
import json
import resource
import time

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.preparation.example_encoder import ExampleEncoder
from prompt_tuning.data.preparation.preparation_settings import (
    TextFormat,
    TokenizerChoice,
)
from prompt_tuning.data.preparation.records import Record, Turn
from prompt_tuning.data.preparation.tokenizer_files import open_tokenizer, special_texts
from prompt_tuning.data.text.chat_templates import (
    ChatTemplate,
    read_chat_template,
)
from prompt_tuning.data.text.conversations import answers_of
from prompt_tuning.data.text.tokenizers import load_tokenizer
from tests.support.exhaustive import sample
from tests.support.shared_data import FIXTURES
from tests.support.small_tokenizer import CHAT, EOS, write_tokenizer

GPT2 = FIXTURES / "tokenizers/byte_level"


def chat(source, **special):
    return ChatTemplate(source, {"eos_token": EOS} | special, "a test")


def learned(template, record, ends=()):
    """Returns the texts of a conversation in one example."""
    (result,) = template.learned_many([record], ends)
    if isinstance(result, str):
        raise InputError(f"here: {result}")
    (texts,) = result.examples
    return texts


def talk(*texts):
    roles = ("user", "assistant")
    return answers_of(
        [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    )


def test_answers_and_their_end_tokens_are_learned():
    runs = learned(chat(CHAT), talk("hi", "yes", "and?", "no"), [EOS])
    assert runs == [
        ("<|user|>\nhi" + EOS + "\n<|assistant|>\n", 0),
        ("yes" + EOS, 1),
        ("\n<|user|>\nand?" + EOS + "\n<|assistant|>\n", 0),
        ("no" + EOS, 1),
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
def test_text_is_never_read_as_markup(text):
    runs = learned(chat(CHAT), talk(text, "yes", text, text), [EOS])
    answers = [run for run, kind in runs if kind == 1]
    assert answers == [f"yes{EOS}", f"{text}{EOS}"]
    turn = f"<|user|>\n{text}{EOS}\n<|assistant|>\n"
    assert [run for run, kind in runs if kind == 0] == [turn, "\n" + turn]


def test_a_template_that_changes_earlier_output_is_refused():
    source = (
        "{% for m in messages %}{{ m.content if loop.last else '...' }}{% endfor %}"
    )
    with pytest.raises(InputError, match=r"here: with message 2 the chat template wr"):
        learned(chat(source), talk("hi", "yes"))


def test_the_number_of_messages_is_limited():
    with pytest.raises(InputError, match="here: 1,002 messages, expected at most 1,0"):
        learned(chat(CHAT), talk(*["hi", "yes"] * 501))


def test_errors_raised_by_a_template_are_reported():
    source = "{{ raise_exception('only users') }}"
    with pytest.raises(InputError, match=r"message 1: only users \(line 1 of"):
        learned(chat(source), talk("hi", "yes"))
    with pytest.raises(InputError, match="is not jinja2"):
        chat("{% for %}").check()


def test_the_dialect_of_templates():
    source = (
        "{{ bos_token }}{%- for m in messages %}\n"
        "    {%- if m.role == 'system' %}{% continue %}{% endif %}\n"
        "    {%- generation %}{{ m.content | tojson }}{% endgeneration %}\n"
        "{%- endfor %}"
    )
    runs = learned(chat(source, bos_token="<s>"), talk("<é>", "b"))
    assert runs == [('<s>"<é>"', 0), ('"b"', 1)]


def test_the_sandbox_isolates_templates_from_the_machine():
    source = "{{ messages.__class__.__mro__ }}"
    with pytest.raises(InputError, match="does not accept these messages"):
        learned(chat(source), talk("a", "b"))


def test_locations_of_templates(tmp_path):
    folder = write_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(InputError, match="has no chat_template, and"):
        read_chat_template(folder, None, {})
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": CHAT}]
    config = {"eos_token": {"content": EOS}, "chat_template": named}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_chat_template(folder, None, {}).source == CHAT
    (folder / "chat_template.jinja").write_text("own")
    assert read_chat_template(folder, None, {}).source == "own"
    other = tmp_path / "other.jinja"
    other.write_text("other")
    assert read_chat_template(folder, str(other), {}).source == "other"
    other.unlink()
    message = "other.jinja, which renders the data, is missing.*--chat_template FILE"
    with pytest.raises(InputError, match=message):
        read_chat_template(folder, str(other), {})


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.json"])
@pytest.mark.parametrize("stored", [CHAT, {"default": CHAT, "rag": "other"}])
def test_older_forms_of_templates_are_read(file, stored, tmp_path):
    (tmp_path / file).write_text(json.dumps({"chat_template": stored}))
    assert read_chat_template(tmp_path, None, {}).source == CHAT


def named(folder, *special_tokens):
    choice = TokenizerChoice(str(folder), special_tokens)
    return special_texts(choice, open_tokenizer(choice))


def test_tokens_with_a_role_reach_the_template(tmp_path):
    """The expected values are from `apply_chat_template` in transformers 5.23."""
    entry = {"content": "<s>"}
    folder = write_tokenizer(tmp_path / "tokenizer", bos_token=entry, image_token="<i>")
    config = {"bos_token": "<s>", "eos_token": EOS, "pad_token": "<|pad|>"}
    assert named(folder) == config | {"image_token": "<i>"}
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<b>"}, "unk_token": "<u>"})
    )
    assert named(folder)["bos_token"] == "<b>" and named(folder)["unk_token"] == "<u>"
    special_tokens = ("eos_token", "<e>"), ("additional_special_tokens", "<x>")
    assert named(folder, *special_tokens)["eos_token"] == "<e>"
    # With `added_tokens_decoder` in the config, other files are not read.
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": EOS, "added_tokens_decoder": {}})
    )
    assert named(folder) == {"eos_token": EOS}


def test_a_tokenizer_without_a_config_names_its_own_tokens():
    end = "<|endoftext|>"
    assert named(GPT2) == {"bos_token": end, "eos_token": end}


def rendered(source, **fields):
    record = answers_of([{"role": "user", "content": "hi", "name": None}])
    return ChatTemplate(source, {}, "a test", **fields).prompt(record, "here")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if tools is not none %}tools{% endif %}{{ tools is defined }}", "True"),
        ("{{ documents is none and documents is defined }}", "True"),
        ("{{ messages[0].keys() | list }}", "['role', 'content']"),
        ("{{ {'b': 'é', 'a': 1} | tojson(sort_keys=true) }}", '{"a": 1, "b": "é"}'),
        ("{{ ['é'] | tojson(ensure_ascii=true, indent=1) }}", '[\n "\\u00e9"\n]'),
        ("{{ {'a': 1} | tojson(separators=(',', ':')) }}", '{"a":1}'),
    ],
)
def test_templates_see_the_same_variables_as_in_transformers(source, expected):
    assert rendered(source) == expected


def test_a_template_sees_one_date():
    source = "{{ strftime_now('%d %b %Y') }}"
    assert rendered(source, date=datetime.date(2026, 7, 3)) == "03 Jul 2026"
    before = datetime.date.today()
    assert rendered(source) in {
        day.strftime("%d %b %Y") for day in (before, datetime.date.today())
    }
    assert chat(source).uses_date and not chat(CHAT).uses_date


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ 1 / (messages | length - 1) }}", "division by zero"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ 'a'.encode('klingon') }}", "unknown encoding"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
    ],
)
def test_any_error_of_a_template_is_reported(source, message):
    with pytest.raises(InputError, match=f"^here: the chat .* messages: .*{message}"):
        rendered(source)


BIG = "(messages | length * 10 ** 9)"
NESTED = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
)
TOO_MUCH = [
    (NESTED, ""),
    ("{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(99) }}", ""),
    ("{{ 10 ** " + BIG + " }}", ""),
    ("{{ [messages] | tojson(indent=" + BIG + ") }}", ""),
    ("{{ 'a' * " + BIG + " * 9 }}", ""),
    ("{{ 'a' | center(" + BIG + ") }}", ""),
    ("{{ 'a'.ljust(" + BIG + ") }}", ""),
    ("{{ '{:>9999999999}'.format(1) }}", ""),
    ("{{ '%9999999999d' % 1 }}", ""),
    (
        "{% set x = namespace(s='ab') %}{% for i in range(99) %}"
        "{% set x.s = x.s ~ x.s %}{% endfor %}",
        "",
    ),
    ("{{ 'abc' * 10 ** 6 }}", "3,000,000 characters, expected at most 1,048,576"),
]


def peak_kibibytes() -> int:
    """Returns the largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.slow
@pytest.mark.parametrize(("source", "message"), sample(4, TOO_MUCH))
def test_a_rendering_has_limits(source, message):
    """Each of them would take many seconds or gigabytes, or is merely too long."""
    template = chat("{{ '' }}" + source)
    template.check()
    before, peak = time.monotonic(), peak_kibibytes()
    with pytest.raises(InputError, match=f"^here: the chat template of .*{message}"):
        template.prompt(talk("hi"), "here")
    assert time.monotonic() - before < 30
    assert peak_kibibytes() - peak < 2**20


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 11 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ 'a' | center(10 ** 11) }}",
        "{% if x %}" * 500,
        "{{ " + "(" * 5000,
        "{{ " + "[" * 300 + "]" * 300 + " }}",
        "{% set é² = 1 %}{{ é² }}",
        "{% for a in b %}{% break %}{% endfor %}{% break %}",
    ],
)
def test_compiling_a_template_has_limits(source):
    """Constants are computed when a template is compiled, or when it is rendered."""
    with pytest.raises(InputError, match="chat template of a test"):
        chat(source).prompt(talk("hi"), "here")


@pytest.mark.slow
def test_a_template_that_hangs_is_stopped():
    template = chat(
        "{{ messages[0].content }}{% if messages[0].content == 'no' %}"
        + NESTED
        + "{% endif %}"
    )
    no, yes = talk("no"), talk("yes")
    problem, texts, *_ = list(template.render_many("prompt", [no, yes, no, yes]))
    assert "computes for more than 1.5 seconds" in str(problem)
    assert texts == ("yes",)
    with pytest.raises(InputError, match=r"1\.5 seconds, with 3 conv"):
        template.prompt(no, "here")


def chat_encoder(folder, **text):
    choice = TokenizerChoice(str(folder))
    tokenizer = open_tokenizer(choice)
    template = read_chat_template(folder, None, special_texts(choice, tokenizer))
    encoder = ExampleEncoder(TextFormat(chat=True, **text), tokenizer, template)

    def encode(*records):
        results = encoder([(record, "") for record in records])
        found = [each for each in results if not isinstance(each, InputError)]
        assert len(found) == len(records)
        return found

    return encode


def test_messages_after_the_last_answer_are_dropped(tmp_path):
    """generative_data_prep drops pairs with an empty completion in the same way."""
    folder = write_tokenizer(tmp_path / "tokenizer", chat_template=CHAT)
    answered, asking = talk("hi", "yes"), talk("hi", "yes", "and?")
    records = [Record((), each) for each in (answered, asking)]
    one, other = chat_encoder(folder)(*records)
    assert one == other != []
    _, (example,) = chat_encoder(folder, keep_prompt_only=True)(*records)
    text = load_tokenizer(folder).decode(example.input_ids)
    assert text.endswith("yes\n<|user|>\nand?") and not example.token_types[-2]


def test_a_conversation_ends_with_one_separator(tmp_path):
    folder = write_tokenizer(tmp_path / "tokenizer", chat_template=CHAT)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_id is not None
    record = Record((Turn("hi", "yes"), Turn("and?", "no")))
    ((example,),) = chat_encoder(folder)(record)
    assert example.token_types[-1] == 3 and example.token_types.count(3) == 1
    assert example.input_ids[-1] == tokenizer.eos_id
    # The EOS of the first answer has the type of its text.
    assert example.input_ids.count(tokenizer.eos_id) == 4
    learned = zip(example.input_ids, example.token_types, strict=True)
    assert tokenizer.decode(i for i, kind in learned if kind) == "yesno"


def test_messages_and_pairs_are_the_same(tmp_path):
    folder = write_tokenizer(tmp_path / "tokenizer", chat_template=CHAT)
    pairs = Record((Turn("hi", "yes"),))
    records = pairs, Record((), talk("hi", "yes")), Record((), talk("hi"))
    one, other, none = chat_encoder(folder)(*records)
    assert one == other != [] and none == []


def test_separate_pairs_are_separate_conversations(tmp_path):
    folder = write_tokenizer(tmp_path / "tokenizer", chat_template=CHAT)
    encoder = chat_encoder(folder, attention_boundary="pair", packing_boundary="pair")
    record = Record((Turn("hi", "yes"), Turn("and?", "no")))
    (examples,) = encoder(record)
    assert [example.token_types[-1] for example in examples] == [3, 3]
