"""Requests of the texts and conversations that one command continues."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prompt_tuning.core.activity import activity
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.number_ranges import NonnegativeInteger, PositiveInteger
from prompt_tuning.data.text.conversations import answers_of
from prompt_tuning.data.text.template_renderer import ChatRecord
from prompt_tuning.data.text.templates import TokenTemplate
from prompt_tuning.data.text.tokenizers import Tokenizer
from prompt_tuning.decoding.beam_search import BeamSearch
from prompt_tuning.decoding.request import Completion, Request, TokenLogprob
from prompt_tuning.decoding.request_stream import stream_request
from prompt_tuning.decoding.row_checks import check_prompt_ids, check_rows
from prompt_tuning.decoding.row_encoding import add_special_ids, encode_given
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.decoding.text_pieces import token_name
from prompt_tuning.generation.conversation import (
    ChatEncoder,
    first_turn,
)
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.text_adapters import TextAdapters

NEW_TOKENS = 64
CHAT_TOKENS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSettings:
    """How the texts of a command are continued.

    Attributes:
      sampling: how tokens are chosen; `new_tokens` here replaces its number.
      beams: settings of beam search, or None to sample.
      new_tokens: maximum number of new tokens; None for `default_new_tokens`.
      chat: whether a text is a user's message, put into the chat template.
      system: system message before it, or None.
      adapter: name of the adapter of texts that name none; see `TextAdapters.find`.
      prompt_id: prompt of texts that name none, for an adapter with several.
      slots: number of rows that are continued together.
      day: ISO date for a chat template that uses the current one; None for today.
    """

    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    beams: BeamSearch | None = None
    new_tokens: PositiveInteger | None = None
    chat: bool = False
    system: str | None = None
    adapter: str | None = None
    prompt_id: NonnegativeInteger | None = None
    slots: PositiveInteger = 32
    day: str | None = None

    def __post_init__(self):
        check_fields(self, prefix="")


def default_new_tokens(model: PromptedModel, chat: bool) -> int:
    """Returns the maximum number of new tokens of a text or an answer."""
    room = model.maximum_length or 2 * CHAT_TOKENS
    return min(CHAT_TOKENS, room // 2) if chat else NEW_TOKENS


class TextRequests:
    """Makes checked requests of texts and conversations.

    Args:
      adapters: the model and its adapters.
      settings: settings of all texts.

    Attributes:
      room: number of positions that the longest row so far takes in a slot.

    Raises:
      InputError: if the settings do not fit the model.
    """

    def __init__(self, adapters: TextAdapters, settings: TextSettings):
        self.adapters, self.settings = adapters, settings
        self.room = 0
        self._prompted = adapters.model.prompted
        self._tokenizer = self._prompted.needed_tokenizer()
        settings.sampling.check_vocabulary(self._prompted.config.vocabulary_size)
        self._encoders: dict[str | None, ChatEncoder] = {}
        if settings.chat:
            assert self.encoder() is not None

    def template(self, adapter: str | None = None) -> TokenTemplate | None:
        """Returns the template of the data of an adapter's run, if it has one.

        Args:
          adapter: name of the adapter; None for that of the settings.
        """
        return self.adapters.texts(self._find(adapter)).template

    def encoder(self, adapter: str | None = None) -> ChatEncoder:
        """Returns the encoder of conversations for an adapter.

        Args:
          adapter: name of the adapter; None for that of the settings.

        Raises:
          InputError: if there is no chat template, or the data of the adapter's run has
            a template.
        """
        name = self._find(adapter)
        if name not in self._encoders:
            texts = self.adapters.texts(name)
            self._encoders[name] = texts.open_chat(self.settings.day)
        return self._encoders[name]

    def _find(self, adapter: str | None) -> str | None:
        """Returns the engine's name of an adapter; None for that of the settings."""
        return self.adapters.find(self.settings.adapter if adapter is None else adapter)

    def encode(self, text: str, adapter: str | None = None) -> list[int]:
        """Returns the ids of a text, or of a message that begins a conversation."""
        if self.settings.chat:
            messages = first_turn(text, self.settings.system)
            return self.encode_chat(answers_of(messages), "the message", adapter)
        return encode_given(self._prompted, text, self.template(adapter))

    def encode_chat(
        self, record: ChatRecord, location: str, adapter: str | None = None
    ) -> list[int]:
        """Returns the ids of a conversation up to its next answer."""
        return self.encoder(adapter)(record, location)

    def encode_keys(
        self, texts: Mapping[str, str], template: TokenTemplate
    ) -> list[int]:
        """Returns the ids of the prompt of a template, by the texts of its keys."""
        return add_special_ids(self._prompted, template.encode_prompt(texts))

    def request(
        self,
        ids: list[int],
        *,
        chat: bool | None = None,
        adapter: str | None = None,
        prompt_id: int | None = None,
        seed: int | None = None,
    ) -> Request:
        """Returns the request of a row, after its checks.

        Args:
          ids: tokens of the row.
          chat: whether it is a conversation; None as in the settings.
          adapter: name of its adapter; None for that of the settings.
          prompt_id: its prompt; None for that of the settings.
          seed: its seed; None for that of the settings.

        Raises:
          InputError: if the row cannot be continued.
        """
        settings = self.settings
        chat = settings.chat if chat is None else chat
        name = self._find(adapter)
        prompt_id = settings.prompt_id if prompt_id is None else prompt_id
        model = self.adapters.prompted(name)
        new_tokens = settings.new_tokens
        if new_tokens is None:
            new_tokens = default_new_tokens(self._prompted, chat)
        check_rows(model, [ids], new_tokens)
        check_prompt_ids(model, None if prompt_id is None else [prompt_id], 1)
        self.room = max(self.room, self.adapters.room_for(name, len(ids), new_tokens))
        own = settings.sampling
        sampling = dataclasses.replace(
            own,
            new_tokens=new_tokens,
            ends=(*own.ends, *(self.encoder(adapter).turn_ends() if chat else ())),
            seed=own.seed if seed is None else seed,
        )
        return Request(
            ids=ids,
            adapter=name,
            prompt_id=prompt_id,
            sampling=sampling,
        )

    def complete(self, requests: Iterable[Request]) -> Iterator[list[Completion]]:
        """Yields the completions of each request, in order."""
        if self.settings.beams is not None:
            return self.adapters.search(requests, self.settings.beams)
        return self.adapters.complete(requests, self.settings.slots, self.room)

    def fields(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Returns the completions of one request as JSON has them.

        A single one is described by `output`, `finish_reason`, `input_tokens` and
        `output_tokens`; several are a list of such objects, `outputs`.
        """
        several = [_fields(each, self._tokenizer) for each in completions]
        settings = self.settings
        count = settings.sampling.n
        if settings.beams is not None:
            count = settings.beams.returned
        if count == 1:
            return several[0]
        given = [each.pop("input_tokens") for each in several]
        return {"input_tokens": given[0], "outputs": several}


class EngineGenerator:
    """Continues single rows by an engine, for sessions at a terminal.

    Args:
      requests: makes the requests; `prompt_id` and the adapter are among its settings.

    Attributes:
      model: the model.
    """

    def __init__(self, requests: TextRequests):
        self._requests = requests
        self.model = requests.adapters.model.prompted

    def stream(self, row: Sequence[int], prompt_id: int | None = None) -> Iterator[str]:
        """Yields the text that continues a row, piece by piece.

        Raises:
          InputError: if the row cannot be continued.
        """
        request = self._requests.request(list(row), prompt_id=prompt_id)
        engine = self._requests.adapters.engine(1, self._requests.room)
        pieces = stream_request(engine, request)
        with activity("reading the text"):
            first = next(pieces)
        for piece in itertools.chain([first], pieces):
            if piece.text:
                yield piece.text


def _fields(completion: Completion, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns one completion as JSON has it."""
    fields: dict[str, Any] = {
        "output": completion.text,
        "finish_reason": completion.reason,
        "input_tokens": completion.given_tokens,
        "output_tokens": len(completion.ids),
    }
    if completion.score is not None:
        fields["score"] = completion.score
    if completion.problem:
        fields["problem"] = completion.problem
    if completion.logprobs is not None:
        fields["logprobs"] = [_logprob(each, tokenizer) for each in completion.logprobs]
    return fields


def _logprob(one: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the log-probabilities at one token as JSON has them."""
    top = [_entry(token, value, tokenizer) for token, value in one.top]
    return {**_entry(one.token, one.logprob, tokenizer), "top": top}


def _entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {"token": token_name(tokenizer, token), "id": token, "logprob": logprob}
