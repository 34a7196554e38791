"""Conversations as ids, up to the answer that comes next."""

from pathlib import Path

import pytest

from prompt_tuning.data.chat_encoder import ChatEncoder, first_turn
from prompt_tuning.data.rows.conversation_rows import ConversationEncoder
from prompt_tuning.data.rows.jsonl import JsonLine, LineEncoder
from prompt_tuning.data.text.chat_templates import chat_template_of
from prompt_tuning.data.text.conversations import answers_of
from prompt_tuning.data.text.tokenizers import load_tokenizer
from tests.support.small_tokenizer import CHAT, EOS, write_tokenizer


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
