"""Bodies of OpenAI's requests, checked field by field."""

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.number_ranges import MAXIMUM_LOGPROBS
from prompt_tuning.core.typed_json import JsonObject, as_object, parse_json
from prompt_tuning.data.text.template_renderer import ChatRecord
from prompt_tuning.decoding.beam_search import BeamSearch
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.server import chat_requests, structured_outputs, tool_choice
from prompt_tuning.server.chat_requests import read_conversation
from prompt_tuning.server.given_embeddings import read_embeddings
from prompt_tuning.server.given_parts import NOTHING_GIVEN, GivenParts
from prompt_tuning.server.request_fields import (
    CHANGING,
    IGNORED,
    Changing,
    check_known,
    has_no_limit,
    without_open_limits,
)
from prompt_tuning.server.server_limits import (
    MAXIMUM_BIASES,
    MAXIMUM_ROWS,
    MAXIMUM_STOP,
    MAXIMUM_STOP_TOKENS,
    MAXIMUM_STOPS,
)
from prompt_tuning.server.tool_choice import ToolChoice, read_tool_choice

COMPLETION_TOKENS = 16
"""Default maximum number of new tokens of a completion."""
SAMPLING = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("min_tokens", "ignore_eos", "stop_token_ids", *structured_outputs.FIELDS),
)
"""Fields of sampling settings; vLLM's names where OpenAI has none."""
COMMON = (
    *("model", "stream", "stream_options", "logprobs", "prompt_logprobs"),
    *("prompt_id", "skip_special_tokens", *SAMPLING),
)
SPECIAL = "add_special_tokens"
BEAMS = ("use_beam_search", "best_of", "length_penalty")
"""Fields of beam search, named as in vLLM."""
WITH_BEAMS = (
    *("model", "prompt", "prompt_id", "max_tokens", "n", "temperature", "seed"),
    *("stream", SPECIAL, *BEAMS),
)
"""Fields allowed in a request with beam search."""
COMPLETION = ("prompt", "prompt_embeds", "echo", SPECIAL, *BEAMS, *COMMON)
CHAT = (
    *(*chat_requests.FIELDS, "top_logprobs", "max_completion_tokens"),
    *(*tool_choice.FIELDS, *COMMON),
)
SMALLEST_TOP_P = 1e-6
STREAM_OPTIONS = ("include_usage",)
STREAM_CHANGING = {
    "continuous_usage_stats": Changing((False,)),
    "include_obfuscation": Changing((True, False)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommonBody:
    """Fields that completions and conversations have in common.

    `asked` is the maximum number of new tokens in the request. With `usage`, a stream
    ends with token counts. `unknown` has the names of unknown fields. With
    `skips_special`, the text leaves out special tokens.
    """

    model: str | None
    prompt_id: int | None
    sampling: Sampling
    stream: bool
    usage: bool
    asked: int | None
    unknown: Sequence[str]
    given: GivenParts
    skips_special: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionBody(CommonBody):
    """Body of `/v1/completions`.

    `embeddings` are rows of vectors to read instead of tokens; in the answer they come
    before the prompts.
    """

    prompts: Sequence[str] | Sequence[Sequence[int]]
    embeddings: Sequence[np.ndarray]
    special: bool
    beams: BeamSearch | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatBody(CommonBody):
    """Body of `/v1/chat/completions`."""

    conversation: ChatRecord
    tools: ToolChoice | None


def read_body(content: bytes) -> JsonObject:
    """Parses a body."""
    return as_object(parse_json(content, "the body"), "the body")


def read_completion(body: JsonObject, room: int) -> CompletionBody:
    """Reads the body of `/v1/completions`; arguments and errors as in `read_chat`."""
    unknown = check_known(body, COMPLETION)
    tokens = room if has_no_limit(body, "max_tokens") else COMPLETION_TOKENS
    body = without_open_limits(body)
    embeddings = read_embeddings(body)
    prompts = []
    if not embeddings or body.values.get("prompt") is not None:
        prompts = read_prompts(body, "prompt")
    rows = len(embeddings) + len(prompts)
    fields: dict[str, Any] = {"prompts": prompts, "embeddings": embeddings}
    fields |= {"special": body.flag(SPECIAL, True), "unknown": unknown}
    if body.flag("use_beam_search", False):
        beams = read_beams(body, tokens)
        values = dict(body.values) | {"temperature": 1, "n": beams.returned}
        common = _common(JsonObject(body.source, values), tokens, None, rows)
        return CompletionBody(beams=beams, **fields, **common)
    for name in ("best_of", "length_penalty"):
        value = body.values.get(name)
        # All samples are returned, so none is left out.
        if name == "best_of" and value == body.values.get("n"):
            continue
        if value not in (None, *CHANGING[name].neutral):
            raise InputError(f"{name} needs use_beam_search = true")
    logprobs = None
    if body.values.get("logprobs") is not False:
        logprobs = body.integer("logprobs", None, maximum=MAXIMUM_LOGPROBS)
    echo = body.flag("echo", False)
    if echo and embeddings:
        raise InputError("prompt_embeds have no text to echo: leave out echo")
    common = _common(body, tokens, logprobs, rows, echo=echo)
    return CompletionBody(beams=None, **fields, **common)


def read_beams(body: JsonObject, tokens: int) -> BeamSearch:
    """Reads the settings of beam search with `best_of` beams, `n` of them returned.

    Args:
      body: the body.
      tokens: maximum number of new tokens if the body has none.

    Raises:
      InputError: if a field contradicts beam search.
    """
    for name, value in body.values.items():
        allowed = name in (*WITH_BEAMS, *IGNORED) or value in (None, False, [], {})
        if name == "skip_special_tokens":
            allowed = value is not False
        if not allowed and name in COMPLETION:
            raise InputError(f"{name} has no effect with use_beam_search: leave it out")
    if body.flag("stream", False):
        raise InputError("beams are known at the end only: leave out stream")
    if body.number("temperature", 0):
        raise InputError("beam search takes the best beams: leave out temperature")
    returned = body.integer("n", 1, minimum=1, maximum=MAXIMUM_ROWS)
    beams = body.integer("best_of", returned, minimum=1, maximum=MAXIMUM_ROWS)
    if beams < 2:
        raise InputError(
            "use_beam_search needs at least 2 beams: set best_of to their number, of "
            "which n are returned"
        )
    return BeamSearch(
        beams=beams,
        returned=returned,
        length_penalty=body.number("length_penalty", 1.0, minimum=-100, maximum=100),
        new_tokens=body.integer("max_tokens", tokens, minimum=1),
    )


def read_chat(body: JsonObject, room: int) -> ChatBody:
    """Reads the body of `/v1/chat/completions`.

    New tokens may take all `room` positions of a slot.
    """
    unknown = check_known(body, CHAT)
    top = body.integer("top_logprobs", None, maximum=MAXIMUM_LOGPROBS)
    wanted = body.flag("logprobs", False)
    if top and not wanted:
        raise InputError("top_logprobs needs logprobs = true")
    values = dict(without_open_limits(body).values)
    tokens = values.pop("max_completion_tokens", None)
    if tokens is not None:
        if values.get("max_tokens") not in (None, tokens):
            raise InputError(
                "max_tokens and max_completion_tokens mean the same, and have unlike "
                "values: give one of them"
            )
        values["max_tokens"] = tokens
    body = JsonObject(body.source, values)
    common = _common(body, room, (top or 0) if wanted else None)
    tools = read_tool_choice(body)
    conversation = read_conversation(body)._replace(tools=tools and tools.tools)
    return ChatBody(conversation=conversation, tools=tools, unknown=unknown, **common)


def read_prompts(
    body: JsonObject, name: str
) -> Sequence[str] | Sequence[Sequence[int]]:
    """Returns the texts or token ids in a field, as a list even if there is only one.

    Raises:
      InputError: if it is anything else.
    """
    prompt = body.value(name)
    if isinstance(prompt, str):
        return [prompt]
    expected = "a text, a list of texts, a list of token ids, or a list of such lists"
    if not isinstance(prompt, list) or not prompt:
        body.refuse(name, expected)
    if _all_ids(prompt):
        return [prompt]
    if not all(isinstance(x, str) for x in prompt) and not all(map(_all_ids, prompt)):
        body.refuse(name, expected)
    return prompt


def check_tokens(name: str, ids: Sequence[int], size: int) -> None:
    """Checks that ids are within a vocabulary.

    Raises:
      InputError: with the field's name and the first id that is not.
    """
    outside = [token for token in ids if not 0 <= token < size]
    if outside:
        raise InputError(f"{name} has id {outside[0]}, expected 0 to {size - 1}")


def _all_ids(values: object) -> bool:
    return isinstance(values, list) and all(type(x) is int for x in values)


def _common(
    body: JsonObject,
    tokens: int,
    logprobs: int | None,
    prompts: int = 1,
    *,
    echo: bool = False,
) -> dict[str, Any]:
    stream = body.flag("stream", False)
    given_parts = GivenParts(
        echo,
        logprobs if echo else None,
        body.integer("prompt_logprobs", None, maximum=MAXIMUM_LOGPROBS),
    )
    if stream and given_parts != GivenParts(echo):
        raise InputError(
            "log-probabilities of the prompt are not streamed: leave out stream, or "
            "echo's logprobs and prompt_logprobs"
        )
    options = body.nested("stream_options", {})
    check_known(options, STREAM_OPTIONS, STREAM_CHANGING)
    sampling = _sampling(body, tokens, logprobs, given_parts)
    if prompts * sampling.n > MAXIMUM_ROWS:
        raise InputError(
            f"the request has {prompts} prompts and n = {sampling.n}, expected at most "
            f"{MAXIMUM_ROWS} rows"
        )
    return {
        "model": body.text("model", None),
        "prompt_id": body.integer("prompt_id", None),
        "sampling": sampling,
        "stream": stream,
        "usage": options.flag("include_usage", False),
        "asked": body.integer("max_tokens", None),
        "given": given_parts,
        "skips_special": body.flag("skip_special_tokens", True),
    }


def _sampling(
    body: JsonObject, tokens: int, logprobs: int | None, given: GivenParts
) -> Sampling:
    """Returns the sampling settings, without values that change nothing."""
    samples = body.integer("n", 1, minimum=1, maximum=MAXIMUM_ROWS)
    new_tokens = body.integer("max_tokens", tokens, minimum=0)
    if new_tokens == 0 and (given == NOTHING_GIVEN or samples > 1):
        raise InputError(
            "max_tokens is 0, expected at least 1, or n = 1 with echo or "
            "prompt_logprobs, which are about the prompt"
        )
    # The smallest share leaves the likeliest token, which clients request with 0.
    top_p = max(body.number("top_p", 1.0, minimum=0, maximum=1), SMALLEST_TOP_P)
    min_p = body.number("min_p", 0.0)
    top_k = body.integer("top_k", 0, minimum=-1)
    temperature = body.number("temperature", 1.0, minimum=0, maximum=100)
    if temperature == 0:  # clients send the others beside it, where they do nothing
        top_p, min_p, top_k = 1.0, 0.0, 0
    seed = body.integer("seed", None, minimum=-(2**63), maximum=2**63 - 1)
    return Sampling(
        temperature=temperature,
        top_k=top_k if top_k > 0 else None,
        top_p=None if top_p == 1 else top_p,
        min_p=min_p or None,
        repetition_penalty=body.number("repetition_penalty", 1.0),
        presence_penalty=body.number(
            "presence_penalty", 0.0, minimum=-100, maximum=100
        ),
        frequency_penalty=body.number(
            "frequency_penalty", 0.0, minimum=-100, maximum=100
        ),
        logit_bias=_biases(body),
        minimum_new_tokens=body.integer("min_tokens", 0),
        new_tokens=new_tokens,
        ends=_stop_tokens(body),
        ignores_end=body.flag("ignore_eos", False),
        stop=_stops(body),
        n=samples,
        seed=secrets.randbits(31) if seed is None else seed % 2**31,
        logprobs=logprobs,
        given_logprobs=given.count(new_tokens),
        **structured_outputs.read_constraint(body),
    )


def _biases(body: JsonObject) -> dict[int, float]:
    biases = body.nested("logit_bias", {})
    if len(biases.values) > MAXIMUM_BIASES:
        raise InputError(
            f"logit_bias has {len(biases.values):,} tokens, expected at most "
            f"{MAXIMUM_BIASES:,}"
        )
    for name in biases.values:
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise InputError(f"logit_bias has {shown(name)}, expected a token id")
    return {
        int(name): biases.number(name, minimum=-100, maximum=100)
        for name in biases.values
    }


def _stops(body: JsonObject) -> tuple[str, ...]:
    stop = body.value("stop", []) or []
    stops = [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stops, list)
        or len(stops) > MAXIMUM_STOPS
        or not all(isinstance(x, str) and len(x) <= MAXIMUM_STOP for x in stops)
    ):
        body.refuse(
            "stop",
            f"a text or a list of up to {MAXIMUM_STOPS} texts, of at most "
            f"{MAXIMUM_STOP:,} characters",
        )
    return tuple(stops)


def _stop_tokens(body: JsonObject) -> tuple[int, ...]:
    if "stop_token_ids" not in body:
        return ()
    tokens = body.integers("stop_token_ids")
    if len(tokens) > MAXIMUM_STOP_TOKENS:
        raise InputError(
            f"stop_token_ids has {len(tokens):,} tokens, expected at most "
            f"{MAXIMUM_STOP_TOKENS}"
        )
    return tuple(tokens)
