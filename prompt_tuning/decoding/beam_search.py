"""Beam search: find the most probable continuations of a row.

All beams of a row share one copy of its prompt, text and encoder output; only the keys
and values of new tokens are reordered.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from prompt_tuning.core import number_ranges
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.parameters import Parameters, merge
from prompt_tuning.decoding import row_checks, row_encoding
from prompt_tuning.decoding.request import Completion, EndReason
from prompt_tuning.models.attention import KeyValues
from prompt_tuning.models.cache import Cache
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.streams import Context
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.settings.rollout_settings import NEW_TOKENS

IMPOSSIBLE = -1e9
"""Score of a row's unused beams before its first token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearch:
    """Settings of beam search, which finds the most probable continuations.

    Prefer it to `Sampling` for short answers with one right form, e.g. translations. It
    costs `beams` times as much per token.

    Attributes:
      beams: number of continuations that are extended in parallel.
      returned: number of continuations returned per row, best first.
      length_penalty: exponent `a` of the divisor of a continuation's log-probability.
      normalization: the divisor: "length" is `length ** a`, as in transformers; "wu" is
        `((5 + length) / 6) ** a` (Wu et al. 2016, equation 14), as in T5X, which
        recommends 4 beams and `a = 0.6`.
      new_tokens: maximum number of new tokens.
      ends: ids that end a continuation, in addition to the model's own.

    Examples:
      >>> two = pt.BeamSearch(beams=2, new_tokens=4)
      >>> model.generate("upper: abc=", sampling=two)
      ['ABC']
    """

    beams: number_ranges.BeamCount = 4
    returned: number_ranges.PositiveInteger = 1
    length_penalty: number_ranges.LengthPenalty = 1.0
    normalization: Literal["length", "wu"] = "length"
    new_tokens: number_ranges.PositiveInteger = NEW_TOKENS
    ends: tuple[number_ranges.NonnegativeInteger, ...] = ()

    def __post_init__(self):
        check_fields(self, prefix="")
        if self.returned > self.beams:
            raise InputError(
                f"returned is {self.returned}, expected 1 to beams, which is "
                f"{self.beams}"
            )

    def normalize(self, score: float, length: int) -> float:
        """Divides a log-probability by the divisor for `length` tokens."""
        base = length if self.normalization == "length" else (5 + length) / 6
        return score / base**self.length_penalty


class _Hypothesis(NamedTuple):
    """A finished continuation, without its end token."""

    score: float
    ids: tuple[int, ...]
    reason: EndReason


@dataclasses.dataclass
class _Beams:
    """The beams of one row.

    `finished` are the best finished continuations, at most `beams`; the search is
    `done` if no beam can still become one of the best.
    """

    settings: BeamSearch
    ends: tuple[int, ...]
    ids: list[tuple[int, ...]]
    finished: list[_Hypothesis] = dataclasses.field(default_factory=list)
    done: bool = False

    def finish(self, score: float, length: int, ids, reason: EndReason) -> None:
        """Adds a continuation that ended after `length` tokens."""
        normalized = self.settings.normalize(score, length)
        self.finished.append(_Hypothesis(normalized, ids, reason))
        self.finished.sort(key=lambda one: -one.score)
        del self.finished[self.settings.beams :]

    def extend(
        self, scores: Sequence[float], beams: Sequence[int], tokens: Sequence[int]
    ) -> list[tuple[float, int, int]]:
        """Chooses the next beams, as (score, beam, last token), best first."""
        count, chosen = self.settings.beams, []
        length = len(self.ids[0]) + 1
        for rank, (score, beam, token) in enumerate(
            zip(scores, beams, tokens, strict=True)
        ):
            if token in self.ends:
                # As in transformers, an end counts among the best candidates only.
                if rank < count:
                    self.finish(score, length, self.ids[beam], "stop")
            elif len(chosen) < count:
                chosen.append((score, beam, token))
        self.ids = [(*self.ids[beam], token) for _, beam, token in chosen]
        if len(self.finished) == count:
            attainable = self.settings.normalize(scores[0], length)
            self.done = self.finished[-1].score >= attainable
        return chosen


def search_beams(
    model: PromptedModel,
    parameters: Parameters,
    rows: Sequence[Sequence[int]],
    settings: BeamSearch,
    prompt_ids: Sequence[int] | None = None,
) -> list[list[Completion]]:
    """Finds the most probable continuations of rows.

    The continuations are returned best first.

    Raises:
      InputError: as in `continue_rows`, and if the model is on a mesh.
    """
    row_checks.check_generates(model)
    if model.layout is not None:
        raise InputError("beam search runs on one device: leave out the mesh")
    model.weight_storage.reject_streamed(row_checks.GENERATES)
    row_checks.check_rows(model, rows, settings.new_tokens)
    row_checks.check_prompt_ids(model, prompt_ids, len(rows))
    completions = []
    for number, row in enumerate(rows):
        chosen = None if prompt_ids is None else prompt_ids[number]
        best = _search_row(model, parameters, row, settings, chosen)
        texts = [""] * len(best)
        if model.tokenizer is not None:
            ids = [each.ids for each in best]
            texts = row_encoding.decode_continuations(model, [row] * len(best), ids)
        completions.append(
            [
                Completion(
                    text=text,
                    ids=each.ids,
                    reason=each.reason,
                    sample=sample,
                    given_tokens=len(row),
                    score=each.score,
                )
                for sample, (text, each) in enumerate(zip(texts, best, strict=True))
            ]
        )
    return completions


def _search_row(
    model: PromptedModel,
    parameters: Parameters,
    row: Sequence[int],
    settings: BeamSearch,
    prompt_id: int | None,
) -> list[_Hypothesis]:
    length = row_encoding.LENGTH_MULTIPLE * max(
        -(-len(row) // row_encoding.LENGTH_MULTIPLE), 1
    )
    room = model.maximum_length
    tokens, lengths = row_encoding.pad_rows(
        [row], model.config.pad_id, length if room is None else min(length, room)
    )
    ends = tuple(dict.fromkeys((*model.stop_ids, *settings.ends)))
    beams = _Beams(settings, ends, [()] * settings.beams)
    scores = np.full(settings.beams, IMPOSSIBLE, np.float32)
    scores[0] = 0
    candidates, cache = _start(
        parameters,
        tokens,
        lengths,
        None if prompt_id is None else jnp.array([prompt_id]),
        scores,
        candidates=(1 + max(len(ends), 1)) * settings.beams,
        # Programs are compiled for few numbers of new tokens.
        new_tokens=1 << (settings.new_tokens - 1).bit_length(),
        graph=model.graph,
    )
    for step in range(settings.new_tokens):
        values, parents, new = (x.tolist() for x in jax.device_get(candidates))
        chosen = beams.extend(values, parents, new)
        if beams.done:
            break
        scores = np.array([score for score, _, _ in chosen], np.float32)
        if step + 1 == settings.new_tokens:
            for score, ids in zip(scores.tolist(), beams.ids, strict=True):
                beams.finish(score, len(ids), ids, "length")
            break
        candidates, cache = _advance(
            parameters,
            cache,
            np.array([beam for _, beam, _ in chosen], np.int32),
            np.array([token for _, _, token in chosen], np.int32),
            scores,
            candidates=len(values),
            graph=model.graph,
        )
    return beams.finished[: settings.returned]


Candidates = tuple[Float[Array, "c"], Int[Array, "c"], Int[Array, "c"]]
"""Scores, beams and tokens of the best extensions, best first."""


@functools.partial(jax.jit, static_argnames=("candidates", "new_tokens", "graph"))
def _start(
    parameters: Parameters,
    tokens: Int[Array, "1 T"],
    lengths: Int[Array, "1"],
    prompt_ids: Int[Array, "1"] | None,
    scores: Float[Array, "beams"],
    *,
    candidates: int,
    new_tokens: int,
    graph: nnx.GraphDef,
) -> tuple[Candidates, Cache]:
    """Reads a row and returns candidates for its first token."""
    model = cast(LanguageModel, merge(graph, parameters))
    hidden, cache = model.prefill(tokens, lengths, new_tokens, prompt_ids)
    count = len(scores)
    logits = jnp.repeat(model.logits(hidden), count, axis=0)
    return _best(logits, scores, candidates), _share(cache, count)


@functools.partial(
    jax.jit, static_argnames=("candidates", "graph"), donate_argnames="cache"
)
def _advance(
    parameters: Parameters,
    cache: Cache,
    parents: Int[Array, "beams"],
    tokens: Int[Array, "beams"],
    scores: Float[Array, "beams"],
    *,
    candidates: int,
    graph: nnx.GraphDef,
) -> tuple[Candidates, Cache]:
    """Reads the last token of each beam and returns the next candidates."""
    model = cast(LanguageModel, merge(graph, parameters))
    generated = KeyValues(*(part[:, :, parents] for part in cache.generated))
    state = jax.tree.map(lambda x: x[:, parents], cache.state)
    cache = dataclasses.replace(cache, generated=generated, state=state)
    hidden, cache = model.decode(tokens, cache)
    return _best(model.logits(hidden), scores, candidates), cache


def _best(
    logits: Float[Array, "beams V"], scores: Float[Array, "beams"], count: int
) -> Candidates:
    """Returns the extensions with the highest log-probabilities."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    total = logprobs + scores[:, None]
    size = total.shape[1]
    best, index = jax.lax.top_k(total.reshape(-1), min(count, total.size))
    return best, index // size, index % size


def _share(cache: Cache, count: int) -> Cache:
    """Lets `count` beams attend to a row's context, which is stored once."""

    def repeat(x: Array) -> Array:
        return jnp.repeat(x, count, axis=0)

    def shared(context: Context) -> Context:
        rows = None if context.rows is None else repeat(context.rows)
        return context._replace(rows=rows)

    generated = KeyValues(*(jnp.repeat(x, count, axis=2) for x in cache.generated))
    return dataclasses.replace(
        cache,
        next_positions=repeat(cache.next_positions),
        active=None if cache.active is None else repeat(cache.active),
        past=tuple(map(shared, cache.past)),
        generated=generated,
        cross=tuple(map(shared, cache.cross)),
        state=jax.tree.map(lambda x: jnp.repeat(x, count, axis=1), cache.state),
    )
