"""Request fields that we do not read: harmless, unknown, or refused."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from prompt_tuning.core.errors import InputError, did_you_mean, shown
from prompt_tuning.core.typed_json import JsonObject

_logger = logging.getLogger(__name__)

IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "cache_salt", "request_id"),
    *("priority", "include_reasoning", "parallel_tool_calls", "prediction"),
    *("cache_prompt", "guided_decoding_backend", "keep_alive"),
)
"""Fields that do not change what is generated, whatever their value."""


class Changing(NamedTuple):
    """An unsupported field that would change the answer.

    Attributes:
      neutral: accepted values, which change nothing.
      instead: what to send instead, if anything.
    """

    neutral: Sequence[Any] = ()
    instead: str = ""


THINKING = "chat_template_kwargs: {enable_thinking: ...}"
CHANGING: Mapping[str, Changing] = {
    # OpenAI
    "audio": Changing(),
    "best_of": Changing((1,)),
    "function_call": Changing(("none", "auto")),
    "functions": Changing(([],)),
    "modalities": Changing((["text"],)),
    "suffix": Changing(("",)),
    "tool_choice": Changing(("none", "auto")),
    "tools": Changing(([],)),
    "verbosity": Changing(("medium",)),
    "web_search_options": Changing(),
    # OpenAI's responses, OpenRouter and Anthropic
    "instructions": Changing(("",), "a message of the role system"),
    "max_output_tokens": Changing(instead="max_tokens"),
    "reasoning": Changing(({},), "reasoning_effort"),
    "stop_sequences": Changing(([],), "stop"),
    "system": Changing(("",), "a message of the role system"),
    "thinking": Changing(instead=THINKING),
    # vLLM
    "add_generation_prompt": Changing((True,)),
    "allowed_token_ids": Changing(([],)),
    "bad_words": Changing(([],)),
    "chat_template": Changing(),
    "chat_template_kwargs": Changing(({},)),
    "continue_final_message": Changing((False,)),
    "detokenize": Changing((True,)),
    "documents": Changing(([],)),
    "early_stopping": Changing((False,)),
    "include_stop_str_in_output": Changing((False,)),
    "length_penalty": Changing((1,)),
    "logits_processors": Changing(([],)),
    "mm_processor_kwargs": Changing(({},)),
    "return_token_ids": Changing((False,)),
    "return_tokens_as_token_ids": Changing((False,)),
    "spaces_between_special_tokens": Changing((True,)),
    "truncate_prompt_tokens": Changing(),
    "use_beam_search": Changing((False,)),
    # transformers and text-generation-inference
    "do_sample": Changing(instead="temperature"),
    "max_new_tokens": Changing(instead="max_tokens"),
    "num_beams": Changing((1,), "best_of with use_beam_search"),
    "return_full_text": Changing((False,)),
    "truncate": Changing(),
    "typical_p": Changing((1,)),
    # llama.cpp, ollama, SGLang and Qwen
    "dry_multiplier": Changing((0,)),
    "dynatemp_range": Changing((0,)),
    "ebnf": Changing(instead="structured_outputs: {grammar: ...}"),
    "enable_thinking": Changing(instead=THINKING),
    "format": Changing(instead="response_format"),
    "grammar": Changing(instead="structured_outputs: {grammar: ...}"),
    "json_schema": Changing(instead="structured_outputs: {json: ...}"),
    "lora_path": Changing(instead="model"),
    "mirostat": Changing((0,)),
    "n_predict": Changing(instead="max_tokens"),
    "num_predict": Changing(instead="max_tokens"),
    "options": Changing(),
    "regex": Changing(instead="structured_outputs: {regex: ...}"),
    "repeat_penalty": Changing((1,), "repetition_penalty"),
    "stop_regex": Changing(),
    "think": Changing(instead=THINKING),
    "xtc_probability": Changing((0,)),
}
"""Fields that would change the answer; refused by name unless neutral."""
LIMITS = ("max_tokens", "max_completion_tokens")
"""Names of the maximum number of new tokens."""
MAXIMUM_NOTED = 1000
"""Maximum number of log lines about unknown fields."""


class UnknownFields:
    """Logs one line per unknown field and client."""

    def __init__(self):
        self._noted: set[tuple[str, str]] = set()

    def note(self, names: Sequence[str], client: str) -> None:
        """Logs fields, unless already logged.

        Args:
          names: the fields, each with the rest of its line.
          client: address of the client, with or without a port.
        """
        host = client.rpartition(":")[0] or client
        for name in names:
            if (name, host) in self._noted or len(self._noted) == MAXIMUM_NOTED:
                continue
            self._noted.add((name, host))
            _logger.warning("a request from %s has an unknown field %s", host, name)


def check_known(
    body: JsonObject, known: Sequence[str], changing: Mapping[str, Changing] = CHANGING
) -> list[str]:
    """Checks for unsupported fields that would change the answer.

    Null fields are accepted, and those of `changing` with some values. Returns the
    unknown fields, each with a suggestion if a known name is similar.

    Raises:
      InputError: for the first refused field.
    """
    unknown = []
    for name, value in body.values.items():
        if name in known or name in IGNORED or value is None:
            continue
        if name not in changing:
            unknown.append(f"{shown(name)}, which is ignored{_meant(name, known)}")
        elif not any(_equal(value, each) for each in changing[name].neutral):
            instead = changing[name].instead
            hint = f"send {instead} instead" if instead else "leave it out"
            raise InputError(f"{name} = {shown(value)} is not supported: {hint}")
    return unknown


def has_no_limit(body: JsonObject, name: str) -> bool:
    """Tests whether a number of new tokens is null or -1, which both mean the room.

    The former is that of vLLM, the latter that of llama.cpp.
    """
    value = body.values.get(name, 0)
    return value is None or (type(value) is int and value == -1)


def without_open_limits(body: JsonObject) -> JsonObject:
    """Returns a body without the numbers of new tokens that mean the room."""
    open_ended = [name for name in LIMITS if has_no_limit(body, name)]
    values = {k: x for k, x in body.values.items() if k not in open_ended}
    return JsonObject(body.source, values)


def _meant(name: str, known: Sequence[str]) -> str:
    hint = did_you_mean(name, known)
    return hint if hint.endswith("?") else ""


def _equal(value: Any, expected: Any) -> bool:
    """Whether two JSON values are equal; true and 1 are not."""
    return value == expected and isinstance(value, bool) == isinstance(expected, bool)
