"""Settings that choose the new tokens of a row, e.g. temperature and `top_p`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from prompt_tuning.core import number_ranges
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.decoding.text_constraints import (
    TextConstraint,
    find_constraint,
    schema_text,
)
from prompt_tuning.settings.rollout_settings import NEW_TOKENS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the new tokens of a row are chosen, and when the row ends.

    By default decoding is greedy and goes on until the model ends the row.

    Attributes:
      temperature: sampling temperature; 0 takes the most probable token.
      top_k: number of most probable tokens to sample from; None for all.
      top_p: share of the probability mass to sample from; None for all of it.
      min_p: minimum probability of a token, relative to the most probable one; None for
        no minimum.
      repetition_penalty: divisor of the scores of all tokens in the row; 1 for none.
      presence_penalty: subtracted from the score of every token generated so far.
      frequency_penalty: the same, times the number of times it was generated.
      logit_bias: added to the scores of tokens, by id.
      forbidden: ids that are never chosen.
      forced: ids that the new tokens start with.
      minimum_new_tokens: number of new tokens before the row may end.
      new_tokens: maximum number of new tokens; may be 0 with `given_logprobs`.
      ends: ids that end a row, in addition to the model's own.
      ignores_end: whether to go on after the model's own end tokens.
      stop: texts that end the row; they are not part of its text.
      n: number of samples per row.
      seed: seed of sampling; sample `i` of the row has its own key.
      logprobs: number of most probable tokens to return log-probabilities for, in
        addition to the chosen one; None for no log-probabilities.
      given_logprobs: the same for each given token after the first.
      regex: regular expression that the whole new text must match, in the syntax of
        Rust's `regex` without look-around. Needs the extra `guided`, as do
        `json_schema` and `grammar`.
      json_schema: JSON schema of the new text, as a dict or as text (stored as text).
      grammar: grammar of the new text, in llguidance's form of Lark.
      constraint: derived from these three; None for any text.

    Examples:
      >>> two = pt.Sampling(temperature=0.7, top_p=0.9, n=2, seed=1, new_tokens=4)
      >>> len(model.generate("upper: abc=", sampling=two))
      2
    """

    temperature: number_ranges.Temperature = 0.0
    top_k: number_ranges.PositiveInteger | None = None
    top_p: number_ranges.PositiveShare | None = None
    min_p: number_ranges.Share | None = None
    repetition_penalty: number_ranges.PositiveFactor = 1.0
    presence_penalty: number_ranges.Penalty = 0.0
    frequency_penalty: number_ranges.Penalty = 0.0
    logit_bias: Mapping[number_ranges.NonnegativeInteger, number_ranges.Penalty] = (
        dataclasses.field(default_factory=dict)
    )
    forbidden: tuple[number_ranges.NonnegativeInteger, ...] = ()
    forced: tuple[number_ranges.NonnegativeInteger, ...] = ()
    minimum_new_tokens: number_ranges.NonnegativeInteger = 0
    new_tokens: number_ranges.NonnegativeInteger = NEW_TOKENS
    ends: tuple[number_ranges.NonnegativeInteger, ...] = ()
    ignores_end: bool = False
    stop: tuple[str, ...] = ()
    n: number_ranges.SampleCount = 1
    seed: number_ranges.NonnegativeInteger = 0
    logprobs: number_ranges.LogprobCount | None = None
    given_logprobs: number_ranges.LogprobCount | None = None
    regex: str | None = None
    json_schema: Mapping[str, Any] | str | None = None
    grammar: str | None = None
    constraint: TextConstraint | None = dataclasses.field(
        init=False, repr=False, compare=False, default=None
    )

    def __post_init__(self):
        check_fields(self, prefix="")
        for name in ("forbidden", "forced", "ends", "stop"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_lengths()
        if self.temperature == 0:
            self._check_greedy()
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", schema_text(self.json_schema))
        # The schema is now a text; only the caller should spend the time to compile it.
        schema = cast(str | None, self.json_schema)
        found = find_constraint(self.regex, schema, self.grammar)
        object.__setattr__(self, "constraint", found)

    def _check_lengths(self) -> None:
        if self.new_tokens == 0 and (self.given_logprobs is None or self.n > 1):
            raise InputError(
                "new_tokens is 0, expected at least 1, or one sample (n = 1) with the "
                "log-probabilities of the given tokens (given_logprobs)"
            )
        if self.minimum_new_tokens > self.new_tokens:
            raise InputError(
                f"minimum_new_tokens is {self.minimum_new_tokens}, expected 0 to "
                f"new_tokens, which is {self.new_tokens}"
            )
        if len(self.forced) > self.new_tokens:
            raise InputError(
                f"{len(self.forced)} tokens are forced, and new_tokens is "
                f"{self.new_tokens}"
            )
        both = set(self.forced) & set(self.forbidden)
        if both:
            raise InputError(f"token {min(both)} is both forced and forbidden")
        if not all(self.stop):
            raise InputError(f"stop is {shown(self.stop)}, expected texts not empty")

    def _check_greedy(self) -> None:
        for name in ("top_k", "top_p", "min_p"):
            if getattr(self, name) is not None:
                raise InputError(
                    "the temperature is 0, which always takes the most probable token, "
                    f"so {name} has no effect: set a temperature, such as 0.7"
                )
        if self.n > 1:
            raise InputError(
                f"the temperature is 0 and n is {self.n}: all samples would be the "
                "same; set a temperature, such as 0.7"
            )

    def check_vocabulary(self, size: int) -> None:
        """Checks that all ids are tokens of a model.

        Raises:
          InputError: for the first id that is not.
        """
        for name in ("logit_bias", "forbidden", "forced", "ends"):
            for token in getattr(self, name):
                if not 0 <= token < size:
                    raise InputError(
                        f"{name} names token {token}, expected 0 to {size - 1}"
                    )
        if len(set(self.forbidden)) >= size:
            raise InputError("every token is forbidden")
