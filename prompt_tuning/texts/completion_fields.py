"""Completions as JSON objects, for files of lines and for `--json`."""

from collections.abc import Sequence
from typing import Any

from prompt_tuning.data.text.tokenizers import Tokenizer
from prompt_tuning.decoding.detokenizer import token_name
from prompt_tuning.decoding.request import Completion, TokenLogprob


def completion_fields(
    completions: Sequence[Completion], tokenizer: Tokenizer, *, single: bool
) -> dict[str, Any]:
    """Returns the completions of one text.

    With `single`, the fields are `output`, `finish_reason`, `input_tokens` and
    `output_tokens`; otherwise there is a list of such objects, `outputs`.
    """
    several = [_fields(each, tokenizer) for each in completions]
    if single:
        return several[0]
    input_tokens = [each.pop("input_tokens") for each in several]
    return {"input_tokens": input_tokens[0], "outputs": several}


def _fields(completion: Completion, tokenizer: Tokenizer) -> dict[str, Any]:
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
    top = [_entry(token, value, tokenizer) for token, value in one.top]
    return {**_entry(one.token, one.logprob, tokenizer), "top": top}


def _entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {"token": token_name(tokenizer, token), "id": token, "logprob": logprob}
