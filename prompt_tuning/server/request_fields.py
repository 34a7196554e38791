"""Fields of requests that change nothing, and those that another field replaces."""

from collections.abc import Mapping, Sequence
from typing import Any

from prompt_tuning.core.errors import InputError, did_you_mean, shown
from prompt_tuning.core.typed_json import JsonObject

IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "cache_salt", "request_id"),
    *("priority", "include_reasoning", "parallel_tool_calls"),
)
"""Fields that do not change what is generated, whatever their value."""
NEUTRAL: Mapping[str, Sequence[Any]] = {
    "add_generation_prompt": (True,),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
}
"""Fields that are accepted with these values, which change nothing."""
INSTEAD = {
    "guided_choice": "structured_outputs: {choice: ...}",
    "guided_json": "structured_outputs: {json: ...}",
    "guided_regex": "structured_outputs: {regex: ...}",
    "max_new_tokens": "max_tokens",
    "num_beams": "best_of with use_beam_search",
}
"""What to send instead of fields that other servers or libraries have."""


def check_known(
    body: JsonObject,
    known: Sequence[str],
    neutral: Mapping[str, Sequence[Any]] = NEUTRAL,
) -> None:
    """Refuses fields that would have an effect elsewhere and have none here.

    Args:
      body: the body; fields that are null are accepted.
      known: fields that are read.
      neutral: fields that are accepted with some values only.

    Raises:
      InputError: for the first one.
    """
    for name, value in body.values.items():
        if name in known or name in IGNORED or value is None:
            continue
        if name not in neutral:
            hint = did_you_mean(name, known)
            if name in INSTEAD:
                hint = f"; send {INSTEAD[name]} instead"
            raise InputError(f"{body.source} has an unknown field {shown(name)}{hint}")
        if not any(_equal(value, each) for each in neutral[name]):
            raise InputError(f"{name} = {shown(value)} is not supported: leave it out")


def _equal(value: Any, expected: Any) -> bool:
    """Returns whether two values of JSON are equal; true and 1 are not."""
    return value == expected and isinstance(value, bool) == isinstance(expected, bool)
