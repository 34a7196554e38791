"""Sessions in which a model answers texts, and conversations through a template."""

import dataclasses
import itertools
from pathlib import Path

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.rows.conversation_rows import ConversationEncoder
from prompt_tuning.data.rows.jsonl import JsonLine, LineEncoder
from prompt_tuning.data.text.chat_templates import chat_template_of
from prompt_tuning.data.text.conversations import answers_of
from prompt_tuning.data.text.tokenizers import load_tokenizer
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.generation.conversation import ChatEncoder, first_turn
from prompt_tuning.generation.generator import Generator
from prompt_tuning.generation.text_session import ChatSession
from tests.generation.test_text_generation import ROW, model_with
from tests.support.dummies import LetterTokenizer
from tests.support.small_tokenizer import CHAT, EOS, write_tokenizer

SIX = Sampling(new_tokens=6)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> ChatEncoder:
    folder = tmp_path_factory.mktemp("chat") / "tokenizer"
    write_tokenizer(folder, chat_template=CHAT)
    tokenizer = load_tokenizer(folder)
    return ChatEncoder(tokenizer, chat_template_of(tokenizer))


def text_of(encoder: ChatEncoder, ids: list[int]) -> str:
    tokenizer = encoder._tokenizer
    return "".join(
        EOS if id == tokenizer.eos_id else tokenizer.decode([id]) for id in ids
    )


def test_a_conversation_is_rendered_up_to_its_next_answer(encoder):
    messages = [
        *first_turn("hi", "be kind"),
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "the end"},
    ]
    assert text_of(encoder, encoder(answers_of(messages), "here")) == (
        f"<|system|>\nbe kind{EOS}\n<|user|>\nhi{EOS}\n<|assistant|>\nhello{EOS}\n"
        f"<|user|>\nthe end{EOS}\n<|assistant|>\n"
    )
    assert encoder.turn_ends() == [encoder._tokenizer.eos_id]


def test_a_session_remembers_the_conversation_until_it_is_reset(encoder, monkeypatch):
    rows, numbers = [], itertools.count(1)

    def stream(self, row, prompt_id):
        rows.append(row)
        yield from ("it is ", str(next(numbers)))

    monkeypatch.setattr(Generator, "stream", stream)
    session = ChatSession(Generator(*model_with(64), SIX), encoder, "short")
    assert "".join(session.answer("a")) == "it is 1"
    assert "".join(session.answer("b")) == "it is 2"
    begin = f"<|system|>\nshort{EOS}\n<|user|>\n"
    first, second = (text_of(encoder, row) for row in rows)
    assert first == f"{begin}a{EOS}\n<|assistant|>\n"
    assert second == f"{first}it is 1{EOS}\n<|user|>\nb{EOS}\n<|assistant|>\n"
    session.reset()
    "".join(session.answer("a"))
    assert rows[2] == rows[0]


class Numbers(LetterTokenizer):
    """Decodes token ids as numbers."""

    def decode(self, ids) -> str:
        return "".join(f" {int(id)}" for id in ids)


def test_the_tokens_before_an_answer_are_those_of_training(
    encoder,
):
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "the end"},
        {"role": "assistant", "content": "bye"},
    ]
    tokenizer = encoder._tokenizer
    rows = ConversationEncoder(
        "messages", chat_template_of(tokenizer), LineEncoder(tokenizer)
    )
    line = JsonLine(Path("x.jsonl"), 1, {"messages": messages})
    ((ids, types),) = rows.rows([line], True)
    last = len(ids) - 1 - types[::-1].tolist().index(0)
    assert encoder(answers_of(messages[:-1]), "here") == ids[: last + 1].tolist()


def test_the_reason_of_an_end_is_reported():
    model, parameters = model_with(64)
    model = dataclasses.replace(model, tokenizer=Numbers())
    (whole,) = Generator(model, parameters, SIX).continue_rows([ROW])
    assert (whole.finish_reason, whole.input_tokens, whole.output_tokens) == (
        "length",
        len(ROW),
        6,
    )
    third = int(whole.text.split()[2])
    ending = dataclasses.replace(SIX, ends=(third,))
    (stopped,) = Generator(model, parameters, ending).continue_rows([ROW])
    before = whole.text.split().index(str(third))
    assert (stopped.finish_reason, stopped.output_tokens) == ("stop", before)
    pieces = []
    text = Generator(model, parameters, SIX).stream_to(pieces.append, [ROW])
    assert "".join(pieces) == text == whole.text
    with pytest.raises(InputError, match="one text, and 2"):
        Generator(model, parameters, SIX).stream_to(pieces.append, [ROW, ROW])
