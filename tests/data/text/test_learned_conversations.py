"""What is learned of conversations, with small templates that have one trait each."""

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.chat_encoder import ChatEncoder
from prompt_tuning.data.rows.line_formats import FormatChoice
from prompt_tuning.data.text.conversations import answers_of
from prompt_tuning.data.text.learned_conversations import LearnedConversations
from prompt_tuning.data.text.tokenizers import load_tokenizer
from tests.support import small_templates as templates
from tests.support.chat_tokenizer import write_chat_tokenizer

SPECIAL = "{# <|user|><|assistant|><|system|><|tool|><|end|><|return|><|call|> #}"
THINKS = "<think>\nb\n</think>\n\nok"
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": "1"}'}}


def talk(*texts):
    roles = ("user", "assistant")
    return answers_of(
        [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    )


class Opened:
    def __init__(self, folder, source, eos="<|end|>", **choice):
        write_chat_tokenizer(folder, SPECIAL + source, eos)
        self.tokenizer = load_tokenizer(folder)
        self.choice = FormatChoice(**choice)
        self.template = self.choice.open_template(self.tokenizer)
        self.encoder = ChatEncoder(self.tokenizer, self.template)

    def text(self, ids):
        pieces = map(self.tokenizer.token, ids)
        return "".join(pieces).replace("Ċ", "\n").replace("Ġ", " ")

    def prompt(self, record):
        return self.text(self.encoder(record, "here"))

    def learned(self, record):
        """Returns each example with brackets around what is learned."""
        encode = LearnedConversations(self.tokenizer, self.template, self.choice.turns)
        (examples,) = encode([record])
        if isinstance(examples, str):
            raise InputError(examples)
        return [self.marked(each) for each in examples]

    def marked(self, tokens):
        shown, before = "", 0
        for id, kind in zip(tokens.input_ids, tokens.token_types, strict=True):
            shown += "[" if kind and not before else "]" if before and not kind else ""
            shown += self.text([id])
            before = kind
        return shown + "]" * bool(before)


@pytest.fixture
def opened(tmp_path):
    return lambda source, **choice: Opened(tmp_path / "model", source, **choice)


TWO = talk("a", "b", "c", "d")
TURN = "<|user|>a<|end|><|assistant|>"
LINES = "<|user|>\na<|end|><|assistant|>\n"
LEARNED = {
    "appends": (
        templates.APPENDS,
        TWO,
        [f"{TURN}[b<|end|>]<|user|>c<|end|><|assistant|>[d<|end|>]"],
    ),
    "drops thoughts": (
        templates.DROPS_THOUGHTS,
        talk("a", "<think>x</think>b", "c", "<think>y</think>d"),
        [
            f"{TURN}[<think>x</think>b<|end|>]",
            f"{TURN}b<|end|><|user|>c<|end|><|assistant|>[<think>y</think>d<|end|>]",
        ],
    ),
    "exchanges end": (
        templates.EXCHANGES_END,
        TWO,
        [
            f"{TURN}[b<|return|>]",
            f"{TURN}b<|end|><|user|>c<|end|><|assistant|>[d<|return|>]",
        ],
    ),
    "EOS last": (
        templates.EOS_LAST,
        TWO,
        [f"{TURN}[b<|end|>]<|user|>c<|end|><|assistant|>[d<|end|>]"],
    ),
    "opens thought": (
        templates.OPENS_THOUGHT,
        talk("a", THINKS),
        [f"{TURN}<think>\n[b\n</think>\n\nok<|end|>]"],
    ),
    "opens thought, none given": (
        templates.OPENS_THOUGHT,
        talk("a", "b"),
        # The first line feed after the tag and the next are not one token here.
        [f"{TURN}<think>\n[\n</think>\n\nb<|end|>]"],
    ),
    "no end": (
        templates.NO_END,
        TWO,
        [
            "<|user|>a<|assistant|>[b<|end|>]",
            "<|user|>a<|assistant|>b<|user|>c<|assistant|>[d<|end|>]",
        ],
    ),
    "wants parts": (templates.WANTS_PARTS, talk("a", "b"), [f"{TURN}[b<|end|>]"]),
    "nothing next": (
        templates.NOTHING_NEXT,
        TWO,
        ["a<|end|>[b<|end|>]c<|end|>[d<|end|>]"],
    ),
    "calls": (
        templates.CALLS,
        answers_of(
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "2"},
                {"role": "assistant", "content": "b"},
            ]
        ),
        [f"{TURN}[f(1)<|call|>]<|tool|>2<|end|><|assistant|>[b<|end|>]"],
    ),
    "a token over the border": (
        templates.LINES,
        talk("a", "\n\nb", "c", "d"),
        [
            f"{LINES}[\n\nb<|end|>]",
            f"{LINES}\n\nb<|end|><|user|>\nc<|end|><|assistant|>\n[d<|end|>]",
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNED)
def test_what_is_learned(opened, name):
    source, record, expected = LEARNED[name]
    eos = "<|return|>" if name in ("exchanges end", "EOS last") else "<|end|>"
    model = opened(source, eos=eos)
    assert model.learned(record) == expected
    # Each context is what is read before the answer is written.
    runs = [run for text in expected for run in text.split("[")[1:]]
    numbers = [n for n, is_learned in enumerate(record.learned) if is_learned]
    heads = [text[: text.rindex("[")] for text in expected]
    last = record._replace(messages=record.messages[: numbers[-1]])
    assert len(runs) == len(numbers)
    assert model.prompt(last) == heads[-1].replace("[", "").replace("]", "")


def test_together_names_the_change_and_two_ways_out(opened):
    model = opened(templates.EXCHANGES_END, eos="<|return|>", turns="together")
    with pytest.raises(
        InputError,
        match=r"with message 4 the chat template writes '<\|end\|>.* where it wrote "
        r"'<\|return\|>'.*--turns apart.*or another chat_template",
    ):
        model.learned(TWO)


def test_apart_makes_an_example_of_each_answer(opened):
    model = opened(templates.APPENDS, turns="apart")
    first, second = model.learned(TWO)
    assert first == f"{TURN}[b<|end|>]"
    assert second == f"{TURN}b<|end|><|user|>c<|end|><|assistant|>[d<|end|>]"


def test_variables_reach_the_template_by_name(opened):
    model = opened(
        templates.CLOSES_THOUGHT, chat_template_kwargs={"enable_thinking": False}
    )
    assert model.prompt(talk("a")) == f"{TURN}<think>\n\n</think>\n\n"
    own = talk("a")._replace(variables={"enable_thinking": True})
    assert model.prompt(own) == TURN
    assert model.learned(talk("a", THINKS)) == [
        f"{TURN}<think>\n\n</think>\n\n[ok<|end|>]"
    ]
    # As in transformers, what a conversation brings along may be of no use.
    assert model.prompt(own._replace(variables={"style": 1})) == model.prompt(talk("a"))
    with pytest.raises(
        InputError,
        match=r"does not read the variable 'thinking'.*reads: enable_thinking",
    ):
        model.prompt(own._replace(chosen=("thinking",)))


def test_a_last_answer_is_continued(opened):
    model = opened(templates.APPENDS)
    assert model.prompt(talk("a", "yes, ")) == f"{TURN}yes, "
    parts = [{"type": "text", "text": "so"}]
    messages = [{"role": "user", "content": "a"}]
    record = answers_of([*messages, {"role": "assistant", "content": parts}])
    assert model.prompt(record) == f"{TURN}so"
    with pytest.raises(InputError, match="no text that can be continued"):
        model.prompt(answers_of([*messages, {"role": "assistant", "content": None}]))


def test_a_refusal_names_the_message_and_the_line(opened):
    model = opened(templates.NO_SYSTEM)
    record = answers_of([{"role": "system", "content": "s"}, *talk("a").messages])
    with pytest.raises(InputError, match=r"message 1: no system message \(line 2 of"):
        model.prompt(record)


def test_developers_are_the_system_for_templates_without_them(opened):
    record = answers_of([{"role": "developer", "content": "s"}])
    assert opened(templates.APPENDS).prompt(record) == (
        "<|system|>s<|end|><|assistant|>"
    )


def test_an_answer_of_which_nothing_is_written_is_refused(opened):
    calls = [{"role": "assistant", "content": "", "tool_calls": [CALL]}]
    record = answers_of([{"role": "user", "content": "a"}, *calls])
    with pytest.raises(InputError, match="writes nothing of message 2"):
        opened(templates.APPENDS).learned(record)


def test_the_date_of_a_template_is_read(opened):
    model = opened(templates.DATED, chat_date="2026-07-03")
    assert model.prompt(talk("a")) == f"2026{TURN}"
