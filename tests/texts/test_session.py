"""A session remembers its conversation, and texts are the same in pieces."""

import pytest

import prompt_tuning as pt
from prompt_tuning.core.errors import InputError
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.texts.session import Session
from prompt_tuning.texts.text_settings import TextSettings
from tests.support.small_runs import add_chat_template

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}={{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}a={% endif %}"
)


@pytest.fixture(scope="module")
def model(files) -> pt.Model:
    return pt.load(add_chat_template(files.decoder, TEMPLATE))


def test_a_conversation_is_remembered_until_it_is_reset(model, monkeypatch):
    rows, tokenizer = [], model.tokenizer
    stream = model.texts.stream

    def recorded(request):
        rows.append(tokenizer.decode(request.ids))
        yield from stream(request)

    monkeypatch.setattr(model.texts, "stream", recorded)
    settings = TextSettings(chat=True, system="sys", new_tokens=3)
    session = Session(model.texts, settings)
    first = "".join(session.answer("ab"))
    "".join(session.answer("cd"))
    session.reset()
    "".join(session.answer("ab"))
    begin = "s=sys u=ab a="
    assert rows == [begin, f"{begin}{first} u=cd a=", begin]


def test_a_text_in_pieces_is_the_text_at_once(model):
    settings = Sampling(new_tokens=10, temperature=2.0, top_k=9, seed=3)
    (whole,) = model.generate("ab=", sampling=settings)
    pieces = list(model.stream("ab=", sampling=settings))
    assert len(pieces) > 1 and "".join(pieces) == whole.text
    # The slot of the first text is too short for this one.
    longer = "ab=" * 17
    (whole,) = model.generate(longer, sampling=settings)
    assert "".join(model.stream(longer, sampling=settings)) == whole.text


def test_a_text_that_does_not_fit_is_refused(model):
    with pytest.raises(InputError, match="do not fit"):
        model.generate("a" * 100_000)
