"""OpenAI's answers: completions, conversations and their event streams."""

import abc
import secrets
import time
from collections.abc import Sequence
from typing import Any

from prompt_tuning.data.text.tokenizers import Tokenizer
from prompt_tuning.decoding.detokenizer import distinct_names, token_content, token_name
from prompt_tuning.decoding.request import (
    Completion,
    Piece,
    Request,
    RequestHandle,
    TokenLogprob,
)
from prompt_tuning.server.chat_syntax import ChatMessage, ChatSyntax
from prompt_tuning.server.given_parts import (
    NOTHING_GIVEN,
    GivenParts,
    GivenText,
    prompt_logprobs,
)


class AnswerFormat(abc.ABC):
    """Formats the results of one request."""

    prefix = ""
    whole = part = ""

    def __init__(
        self, model: str, tokenizer: Tokenizer, given: GivenParts = NOTHING_GIVEN
    ):
        self._model, self._tokenizer, self.given = model, tokenizer, given
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def answer(self, handles: Sequence[RequestHandle]) -> dict[str, Any]:
        """Returns the answer once all rows have ended."""
        choices = []
        for handle in handles:
            for completion in sorted(handle.completions, key=lambda x: x.sample):
                choices.append(self._choice(len(choices), completion, handle.request))
        return {
            **self._head(self.whole),
            "choices": choices,
            "usage": usage(handles),
        }

    def opening(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """Returns events before the first piece: one per row, or none."""
        choices = [
            {"logprobs": None, "finish_reason": None, **first}
            for request in requests
            for first in [self._first(request)] * request.sampling.n
            if first
        ]
        return [
            {**self._head(self.part), "choices": [{"index": row, **choice}]}
            for row, choice in enumerate(choices)
        ]

    def event(self, row: int, piece: Piece) -> dict[str, Any] | None:
        """Returns the event of a piece; None if it has nothing to show."""
        completion = piece.completion
        delta = self._delta(row, piece)
        if not (any(delta.values()) or piece.logprobs or completion):
            return None
        choice = {
            "index": row,
            "logprobs": self._logprobs(piece.logprobs),
            "finish_reason": None if completion is None else completion.reason,
            **delta,
        }
        return {**self._head(self.part), "choices": [choice]}

    def usage_event(self, handles: Sequence[RequestHandle]) -> dict[str, Any]:
        """Returns the event with token counts."""
        return {**self._head(self.part), "choices": [], "usage": usage(handles)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
        }

    def _choice(
        self, index: int, completion: Completion, request: Request
    ) -> dict[str, Any]:
        del request
        return {
            "index": index,
            "logprobs": self._logprobs(completion.logprobs),
            "finish_reason": completion.reason,
            **self._content(completion),
        }

    def _prompt_logprobs(self, completion: Completion) -> dict[str, Any]:
        """Returns vLLM's field about given tokens, if requested."""
        count = self.given.prompt_logprobs
        if count is None:
            return {}
        entries = prompt_logprobs(completion, self._tokenizer, count)
        return {"prompt_logprobs": entries}

    @abc.abstractmethod
    def _first(self, request: Request) -> dict[str, Any]:
        """Returns the fields of each row's first event; none for no event."""

    @abc.abstractmethod
    def _content(self, completion: Completion) -> dict[str, Any]:
        """Returns the fields of a choice with its text."""

    @abc.abstractmethod
    def _delta(self, row: int, piece: Piece) -> dict[str, Any]:
        """Returns the fields of a streamed choice with a part of its text."""

    @abc.abstractmethod
    def _logprobs(
        self, logprobs: Sequence[TokenLogprob] | None
    ) -> dict[str, Any] | None:
        """Returns the log-probabilities of tokens; None if not requested."""


class CompletionFormat(AnswerFormat):
    """Answers of `/v1/completions`."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def _first(self, request: Request) -> dict[str, Any]:
        if not self.given.echo:
            return {}
        return {"text": GivenText.decode(self._tokenizer, request.ids or ()).text}

    def _content(self, completion: Completion) -> dict[str, Any]:
        return {"text": completion.text}

    def _delta(self, row: int, piece: Piece) -> dict[str, Any]:
        del row
        return {"text": piece.text}

    def _choice(
        self, index: int, completion: Completion, request: Request
    ) -> dict[str, Any]:
        choice = super()._choice(index, completion, request)
        if self.given.echo:
            given_text = GivenText.decode(self._tokenizer, request.ids or ())
            choice["text"] = given_text.text + completion.text
            if self.given.logprobs is not None:
                later = self._logprobs(given_text.logprobs(completion)) or {}
                first = given_text.first_entry(self._tokenizer)
                choice["logprobs"] = {x: [*first[x], *later[x]] for x in later}
        return choice | self._prompt_logprobs(completion)

    def _logprobs(
        self, logprobs: Sequence[TokenLogprob] | None
    ) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        names, top = [], []
        for each in logprobs:
            # Different tokens may have one text.
            ids = [token for token, _ in each.top]
            named = distinct_names(self._tokenizer, [*ids, each.token])
            names.append(named[each.token])
            top.append({named[token]: value for token, value in each.top})
        return {
            "tokens": names,
            "token_logprobs": [each.logprob for each in logprobs],
            "top_logprobs": top,
            "text_offset": [each.offset for each in logprobs],
        }


class ChatFormat(AnswerFormat):
    """Answers of `/v1/chat/completions`."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        syntax: ChatSyntax,
        given: GivenParts = NOTHING_GIVEN,
    ):
        super().__init__(model, tokenizer, given)
        self._syntax = syntax
        self._messages: dict[int, ChatMessage] = {}

    def answer(self, handles: Sequence[RequestHandle]) -> dict[str, Any]:
        """Returns the answer, with vLLM's field if requested."""
        (handle,) = handles
        return super().answer(handles) | self._prompt_logprobs(handle.completions[0])

    def _first(self, request: Request) -> dict[str, Any]:
        del request
        return {"delta": {"role": "assistant", "content": ""}}

    def _content(self, completion: Completion) -> dict[str, Any]:
        message = ChatMessage(self._syntax)
        message.add(completion.text, ends=True)
        return {"message": message.whole(), **message.reason(completion)}

    def _delta(self, row: int, piece: Piece) -> dict[str, Any]:
        message = self._messages.setdefault(row, ChatMessage(self._syntax))
        ends = piece.completion is not None
        delta = {"delta": message.add(piece.text, ends=ends)}
        if piece.completion is not None:
            delta |= message.reason(piece.completion)
        return delta

    def _logprobs(
        self, logprobs: Sequence[TokenLogprob] | None
    ) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        content = [
            {
                **self._entry(each.token, each.logprob),
                "top_logprobs": [self._entry(*pair) for pair in each.top],
            }
            for each in logprobs
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        name = token_name(self._tokenizer, token)
        content = token_content(self._tokenizer, token)
        return {"token": name, "logprob": logprob, "bytes": list(content)}


def usage(handles: Sequence[RequestHandle]) -> dict[str, int]:
    """Returns the token counts of a request."""
    completions = [x for handle in handles for x in handle.completions]
    new = sum(len(each.ids) for each in completions)
    input_tokens = sum(
        handle.completions[0].given_tokens for handle in handles if handle.completions
    )
    return {
        "prompt_tokens": input_tokens,
        "completion_tokens": new,
        "total_tokens": input_tokens + new,
    }
