"""One row of the engine: its text, settings and progress."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from prompt_tuning.core.adapted_rows import NEVER, first_active
from prompt_tuning.decoding.adapter_table import PromptPages, ResidentAdapter
from prompt_tuning.decoding.detokenizer import Detokenizer, NewText
from prompt_tuning.decoding.given_scores import GivenScores
from prompt_tuning.decoding.ngram_drafts import guess_tokens
from prompt_tuning.decoding.request import (
    Completion,
    EndReason,
    Piece,
    RequestHandle,
    TokenLogprob,
    content_number,
)
from prompt_tuning.decoding.request_checks import row_ends, text_before
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.decoding.token_choice import NO_TOKEN, Chosen, Needs, RowChoices
from prompt_tuning.decoding.token_masks import WORD_BITS, RowMask
from prompt_tuning.pretrained.prompted_model import PromptedModel

WIDE = 128
"""Number of end tokens per row that arrays have room for if clients set them."""


class RowProgress:
    """A sample of a request.

    `content` is the hash of its content; see `content_number`. Its adapter is active
    from the token with the index `active_from`. In the slot it has `written` keys, from
    the position `first` on; once its text has been read, it is `ready` to generate
    tokens. `leader` is the row that first reads the `shared` tokens with which both
    texts begin, or None. `mask` has the tokens that may follow; None without a
    constraint.
    """

    def __init__(
        self,
        handle: RequestHandle,
        sample: int,
        given: Sequence[int],
        adapter: ResidentAdapter,
        prompt: PromptPages,
        model: PromptedModel,
        submitted: float,
        mask: RowMask | None = None,
    ):
        self.handle, self.sample, self.given = handle, sample, list(given)
        self.adapter, self.prompt, self.submitted = adapter, prompt, submitted
        self.sampling, self.new_tokens = handle.request.sampling, handle.new_tokens
        self.written, self.first, self.ready = 0, prompt.length, False
        self.leader: RowProgress | None = None
        self.shared = 0
        self.tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._end_logprob: TokenLogprob | None = None
        self.ends, stop = row_ends(self.sampling, model), self.sampling.stop
        self.mask = None if mask is None else mask.copy()
        self.needs = sampling_needs(self.sampling)
        self.vocabulary_size = model.config.vocabulary_size
        self.embeddings = handle.request.embeddings
        invoked = adapter.invocation if self.embeddings is None else (-1,)
        self.active_from = first_active(given, invoked) if adapter.invocation else 0
        self.scores = None
        if self.sampling.given_logprobs is not None:
            count = self.sampling.given_logprobs
            first = handle.request.scored_from
            self.scores = GivenScores(self.given, first, count)
        self.content = content_number(given, self.embeddings)
        separate = model.config.architecture == "encoder_decoder"
        preceding = text_before(handle.request, given, model)
        self._before = [model.config.decoder_start_id] if separate else preceding
        self._text = None
        # An adapter may have added tokens to the model's.
        tokenizer = adapter.model.tokenizer or model.tokenizer
        if model.tokenizer is not None and tokenizer is not None:
            minimum = self.sampling.minimum_new_tokens
            written = handle.request.written
            self._text = Detokenizer(tokenizer, preceding, stop, minimum, written)

    @property
    def reads_whole(self) -> bool:
        """Whether its text is read in one piece by the model with its adapter."""
        return self.adapter.whole or not self.given

    def common_keys(self, other: "RowProgress") -> int:
        """Returns how many first keys it shares with another row of the same text.

        An adapter that tokens invoke leaves the keys before them as in the frozen
        model. At least one token is always read, because its state predicts the next
        one.
        """
        rows, most = (self, other), len(self.given) - 1
        if any(row.reads_whole or row.embeddings is not None for row in rows):
            return 0
        same = other.adapter is self.adapter and other.prompt is self.prompt
        if same and other.active_from == self.active_from:
            return most
        keeps = all(x.adapter.keeps_before and not x.prompt.pages for x in rows)
        if not same and not keeps:
            return 0
        frozen = [row.active_from if row.adapter.name else NEVER for row in rows]
        return min(most, *([row.active_from for row in rows] if same else frozen))

    def given_marks(self, size: int) -> Bool[np.ndarray, "V"]:
        """Marks the tokens before the first new one in a vocabulary of `size`.

        For an encoder-decoder this is the decoder's start token, as in transformers.
        """
        marks = np.zeros(size, bool)
        marks[self._before] = True
        return marks

    def biases(self, size: int) -> Float[np.ndarray, "V"]:
        """Returns the bias of each logit."""
        bias = np.zeros(size, np.float32)
        for token, value in self.sampling.logit_bias.items():
            bias[token] = value
        bias[list(self.sampling.forbidden)] = -np.inf
        return bias

    def add(self, token: int, chosen: Chosen | None, slot: int) -> Piece:
        """Adds a token, and ends the row if the token ends it.

        `chosen` has the arrays of the step, on the host; None for a guessed token.
        """
        if self.mask is not None and not self.mask.check(token):
            return self._end("failed")
        scored = None
        if self.sampling.logprobs is not None and chosen is not None:
            scored = _logprob(token, chosen, slot, self.sampling.logprobs)
        if token in self.ends:
            self._end_logprob = scored
            return self._end("stop")
        self.tokens.append(token)
        if self.mask is not None:
            self.mask.add(token)
        added, logprobs = NewText("", False), None
        if self._text is not None:
            added = self._text.add(token)
        text = added.text
        if scored is not None:
            logprobs = (scored._replace(offset=added.offset),)
            self._logprobs += logprobs
        if added.stopped:
            return self._end("stop", text, (token,), logprobs)
        reason = self._end_of_text()
        if reason is not None:
            return self._end(reason, text, (token,), logprobs)
        return Piece(
            handle=self.handle,
            sample=self.sample,
            text=text,
            ids=(token,),
            logprobs=logprobs,
        )

    def _end_of_text(self) -> EndReason | None:
        """Returns why the row ends with its last token; None if it goes on."""
        if self.mask is not None and self.mask.complete:
            return "stop"
        if len(self.tokens) == self.new_tokens:
            return "length"
        return "failed" if self.mask is not None and self.mask.problem else None

    def guess(self, count: int) -> list[int]:
        """Guesses the next tokens of a greedy row from its own text."""
        if self.needs != Needs():
            return []
        left = self.new_tokens - len(self.tokens)
        return guess_tokens([*self.given, *self.tokens], min(count, left))

    def end_reading(self) -> Piece:
        """Ends a row that generates no tokens, once its text has been read."""
        return self._end("length")

    def _end(
        self,
        reason: EndReason,
        text: str = "",
        ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] | None = None,
    ) -> Piece:
        if self._text is not None:
            text += self._text.finish()
        if self.sampling.logprobs is not None and logprobs is None:
            logprobs = ()
        return Piece(
            handle=self.handle,
            sample=self.sample,
            text=text,
            ids=ids,
            logprobs=logprobs,
            completion=self.finish(reason),
        )

    def finish(self, reason: EndReason) -> Completion:
        """Adds the row's completion to its request."""
        text = ""
        if self._text is not None:
            self._text.finish()
            text = self._text.text
        wanted = self.sampling.logprobs is not None
        scores, end = self.scores if self.ready else None, self._end_logprob
        completion = Completion(
            text=text,
            ids=tuple(self.tokens),
            logprobs=tuple(self._logprobs) if wanted else None,
            reason=reason,
            sample=self.sample,
            given_tokens=len(self.given),
            problem=self.mask.problem if self.mask and reason == "failed" else "",
            given_logprobs=scores and scores.results(),
            end_logprob=end and end._replace(offset=len(text)),
        )
        self.handle.completions.append(completion)
        return completion


def _logprob(token: int, chosen: Chosen, slot: int, count: int) -> TokenLogprob:
    assert chosen.logprobs is not None
    assert chosen.top_tokens is not None and chosen.top_logprobs is not None
    top = zip(
        chosen.top_tokens[slot, :count].tolist(),
        chosen.top_logprobs[slot, :count].tolist(),
        strict=True,
    )
    return TokenLogprob(token, float(chosen.logprobs[slot]), tuple(top))


def sampling_needs(sampling: Sampling) -> Needs:
    """Returns the options that the settings use."""
    truncated = (sampling.top_k, sampling.top_p, sampling.min_p)
    penalties = (sampling.presence_penalty, sampling.frequency_penalty)
    return Needs(
        sampled=sampling.temperature > 0,
        truncated=any(option is not None for option in truncated),
        penalized=any(penalties) or sampling.repetition_penalty != 1,
        constrained=bool(
            sampling.logit_bias
            or sampling.forbidden
            or sampling.forced
            or sampling.minimum_new_tokens
        ),
        logprobs=sampling.logprobs is not None,
        masked=sampling.constraint is not None,
    )


def row_choices(
    count: int,
    active: Sequence[tuple[int, RowProgress]],
    needs: Needs,
    *,
    wide: bool = False,
) -> RowChoices:
    """Returns the settings of all slots as arrays; neutral where no row is active.

    With `wide`, the arrays have room for more end tokens than rows usually have, so
    that clients who set many do not cause another compilation.
    """
    ends = max(len(row.ends) for _, row in active)
    choices = _neutral(count, max(ends, WIDE) if wide else ends)
    # Rows of one request, or of one evaluation, share their settings.
    sharing: dict[int, list[tuple[int, RowProgress]]] = {}
    for slot, row in active:
        sharing.setdefault(id(row.sampling), []).append((slot, row))
    for placed in sharing.values():
        slots, rows = zip(*placed, strict=True)
        samples = [row.handle.request.first_sample + row.sample for row in rows]
        steps = [len(row.tokens) for row in rows]
        _set(choices, slots, rows[0].sampling, rows[0].ends, samples, steps)
        choices.content[np.array(slots)] = [row.content for row in rows]
    if not needs.masked:
        return choices
    width = -(-active[0][1].vocabulary_size // WORD_BITS)
    allowed = np.full((count, width), ~np.uint32(0))
    for slot, row in active:
        if row.mask is not None:
            allowed[slot] = row.mask.words
    return choices._replace(allowed=allowed)


def first_choices(
    sampling: Sampling,
    ends: Sequence[int],
    samples: Sequence[int],
    contents: Sequence[int] | None = None,
) -> RowChoices:
    """Returns the settings of rows before their first new token, as arrays.

    `contents` has the content hash of each row; None if nothing is sampled.
    """
    count = len(samples)
    choices = _neutral(count, len(ends))
    _set(choices, range(count), sampling, ends, samples, [0] * count)
    if contents is not None:
        choices.content[:] = contents
    return choices


def _neutral(count: int, ends: int) -> RowChoices:
    """Returns settings that change nothing, with room for end tokens."""
    width = 4
    while width < ends:
        width *= 2
    return RowChoices(
        temperature=np.zeros(count, np.float32),
        top_k=np.zeros(count, np.int32),
        top_p=np.ones(count, np.float32),
        min_p=np.zeros(count, np.float32),
        repetition=np.ones(count, np.float32),
        presence=np.zeros(count, np.float32),
        frequency=np.zeros(count, np.float32),
        seed=np.zeros(count, np.uint32),
        content=np.zeros(count, np.uint32),
        sample=np.zeros(count, np.int32),
        step=np.zeros(count, np.int32),
        forced=np.full(count, NO_TOKEN, np.int32),
        ends=np.full((count, width), NO_TOKEN, np.int32),
        before_end=np.zeros(count, bool),
        biased=np.zeros(count, bool),
    )


def _set(
    choices: RowChoices,
    slots: Sequence[int],
    sampling: Sampling,
    ends: Sequence[int],
    samples: Sequence[int],
    steps: Sequence[int],
) -> None:
    """Writes the settings of rows that share them, for the next token of each."""
    chosen = np.array(slots)
    choices.temperature[chosen] = sampling.temperature
    choices.top_k[chosen] = sampling.top_k or 0
    choices.top_p[chosen] = 1 if sampling.top_p is None else sampling.top_p
    choices.min_p[chosen] = sampling.min_p or 0
    choices.repetition[chosen] = sampling.repetition_penalty
    choices.presence[chosen] = sampling.presence_penalty
    choices.frequency[chosen] = sampling.frequency_penalty
    choices.seed[chosen] = sampling.seed
    choices.sample[chosen] = samples
    choices.step[chosen] = steps
    for slot, step in zip(slots, steps, strict=True):
        if step < len(sampling.forced):
            choices.forced[slot] = sampling.forced[step]
    choices.ends[chosen, : len(ends)] = ends
    choices.before_end[chosen] = np.array(steps) < sampling.minimum_new_tokens
    choices.biased[chosen] = bool(sampling.logit_bias or sampling.forbidden)
