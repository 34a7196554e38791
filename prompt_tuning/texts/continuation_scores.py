"""Log-probabilities of continuations, each given its context."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from prompt_tuning.core.errors import InputError
from prompt_tuning.decoding.continue_rows import runs_in_slots
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.request import Completion, Request
from prompt_tuning.decoding.request_checks import slots_for
from prompt_tuning.decoding.row_checks import check_rows
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.evaluation.ranking import score_candidates
from prompt_tuning.models.scoring import label_losses
from prompt_tuning.texts.continue_requests import run_in_order
from prompt_tuning.texts.loaded_adapter import LoadedAdapter
from prompt_tuning.texts.texts import Texts

Part = str | Sequence[int]
"""A context or a continuation: a text, or token ids to read as they are."""
Row = tuple[list[int], list[int]]
"""Ids of a context and of its continuation."""
SCORED = Sampling(new_tokens=0, given_logprobs=1)
"""Settings of rows that are read only to score their tokens."""


class ContinuationScore(NamedTuple):
    """The probability of a continuation.

    `logprob` sums its tokens' natural log-probabilities; `greedy` tells whether greedy
    decoding would generate it.
    """

    logprob: float
    greedy: bool


def score_continuations(
    texts: Texts,
    pairs: Sequence[tuple[Part, Part]],
    adapter: str | None = None,
    prompt_id: int | None = None,
    batch_size: int = 32,
) -> list[ContinuationScore]:
    """Scores the continuation in each pair of a context and a continuation.

    Rows of causal models are scored by an engine, which reads a common beginning of
    contexts once. Other rows are scored in batches, like labels in an evaluation.
    """
    chosen = texts.find(adapter)
    rows = [_encode(chosen, *pair, number) for number, pair in enumerate(pairs)]
    engine = _open_engine(texts, chosen, rows, batch_size)
    scores: dict[int, ContinuationScore] = {}
    # An engine needs a token that predicts the first one.
    alone = [i for i, (given, _) in enumerate(rows) if engine is None or not given]
    batched = _in_batches(chosen, [rows[i] for i in alone], prompt_id, batch_size)
    scores |= zip(alone, batched, strict=True)
    if engine is None:
        return [scores[i] for i in range(len(rows))]
    # Rows that begin alike follow each other.
    left = [number for number in range(len(rows)) if number not in scores]
    order = sorted(left, key=lambda number: rows[number])
    requests = (
        Request(
            ids=[*given, *ids],
            adapter=chosen.key,
            prompt_id=prompt_id,
            sampling=SCORED,
            scored_from=len(given),
        )
        for given, ids in (rows[number] for number in order)
    )
    for number, (completion,) in zip(
        order, run_in_order(engine, requests), strict=True
    ):
        scores[number] = _sum(completion)
    return [scores[i] for i in range(len(rows))]


def _encode(
    adapter: LoadedAdapter, context: Part, continuation: Part, number: int
) -> Row:
    """Encodes a pair like a prompt and its completion."""
    model, ids = adapter.model, continuation
    if isinstance(ids, str):
        tokenizer = model.needed_tokenizer()
        separate = model.config.architecture == "encoder_decoder"
        ids = tokenizer.encode(ids) if separate else tokenizer.encode_continuation(ids)
    if isinstance(context, str):
        context = adapter.encoding.encode(context)
    if not ids:
        raise InputError(f"the continuation of pair {number} has no token")
    return list(context), list(ids)


def _open_engine(
    texts: Texts, adapter: LoadedAdapter, rows: Sequence[Row], batch_size: int
) -> DecodingEngine | None:
    """Returns an engine with room for the rows; None if no engine can score them."""
    if not runs_in_slots(adapter.model):
        return None
    longest = max((len(context) + len(ids) for context, ids in rows), default=1)
    texts.room = max(texts.room, adapter.room_for(longest, 0))
    engine = texts.engine(slots_for(len(rows), batch_size))
    return None if engine.find_adapter(adapter.key).whole else engine


def _sum(completion: Completion) -> ContinuationScore:
    scores = completion.given_logprobs or ()
    # Added in order, as the harness adds the scores of a server.
    return ContinuationScore(
        sum(each.logprob for each in scores),
        all(each.logprob >= each.top[0][1] for each in scores),
    )


def _in_batches(
    adapter: LoadedAdapter, rows: Sequence[Row], prompt_id: int | None, batch_size: int
) -> list[ContinuationScore]:
    """Scores rows in batches, each with a single candidate."""
    for context, ids in rows:
        check_rows(adapter.model, [context], len(ids))
    scored = score_candidates(
        label_losses,
        adapter.model,
        adapter.parameters,
        [context for context, _ in rows],
        [[ids] for _, ids in rows],
        batch_size=batch_size,
        prompt_ids=None if prompt_id is None else [prompt_id] * len(rows),
    )
    scores = np.zeros((len(rows), 2))
    for numbers, losses in scored:
        scores[numbers] = losses[:, 0]
    return [ContinuationScore(-nll, wrong == 0) for nll, wrong in scores.tolist()]
