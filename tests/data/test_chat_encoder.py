"""Conversations as ids, up to the answer that comes next."""

import pytest

from prompt_tuning.data.chat_encoder import ChatEncoder, first_turn
from prompt_tuning.data.text.chat_templates import chat_template_of
from prompt_tuning.data.text.conversations import answers_of
from prompt_tuning.data.text.learned_conversations import LearnedConversations
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
    learned = LearnedConversations(tokenizer, chat_template_of(tokenizer), "auto")
    (examples,) = learned([answers_of(messages)])
    assert not isinstance(examples, str)
    (tokens,) = examples
    last = len(tokens.input_ids) - 1 - tokens.token_types[::-1].index(0)
    read = encoder(answers_of(messages[:-1]), "here")
    assert read == tokens.input_ids[: last + 1]
