"""Examples cut to the maximum length of a model."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int32, Int64

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.examples.row_readers import Example
from prompt_tuning.data.model_interface import ModelInterface
from prompt_tuning.settings.data_source import DataSource


class NothingLearnedError(InputError):
    """An example has no learned token left."""


@dataclasses.dataclass(frozen=True)
class Truncation:
    """Removes tokens from the beginning or the end of examples.

    The tokens that begin a row, a text inserted after them, prompt vectors of a
    template, and the EOS that ends the texts of an encoder-decoder are never removed.

    Attributes:
      source: settings, which tell the end to remove from.
      model: properties of the model.
      maximum: maximum number of inputs, and of targets.
      same_tokens: see `RowReader`.
      classifies: whether targets are classes, of states that the row's own tokens have.
      inserted: number of tokens of a text that is inserted after a row's first ones.
    """

    source: DataSource
    model: ModelInterface
    maximum: int
    same_tokens: bool
    classifies: bool
    inserted: int = 0

    @property
    def from_left(self) -> bool:
        """Whether the beginning is removed, so that a completion keeps its end."""
        return self.source.on_too_long != "truncate_right"

    def __call__(self, example: Example) -> Example:
        """Returns an example with at most `maximum` inputs and targets.

        Raises NothingLearnedError if no learned token is left, and InputError if more
        tokens are kept for sure than fit.
        """
        longest = max(len(example.inputs), len(example.targets))
        if longest <= self.maximum:
            return example
        fixed = self._fixed(example.inputs, has_prompt=example.prefix_length > 0)
        targets = inputs = self._positions(fixed, self.maximum)
        if not self.same_tokens:
            targets = self._positions(_last(len(example.targets)), self.maximum)
        if self.model.labels and self.model.problem != "tokens":  # a class of the row
            targets = np.append(inputs[:-1], len(example.targets) - 1)
        weights = example.weights[targets]
        follows = self.model.predicts_first_token or self.inserted > 0
        if self.same_tokens and not (follows or self.classifies):
            weights[0] = 0
        if not np.any(weights):
            other = "truncate_right" if self.from_left else "truncate_left"
            raise NothingLearnedError(
                f"{longest} tokens, and the {self.maximum} that are left contain no "
                "learned one: remove others instead, by "
                f"{how_to_set('DataSource.on_too_long', other)}"
            )
        return dataclasses.replace(
            example,
            inputs=example.inputs[inputs],
            targets=example.targets[targets],
            weights=weights,
            prefix_length=int(np.count_nonzero(inputs < example.prefix_length)),
            columns={name: x[targets] for name, x in example.columns.items()},
        )

    def cut_prompt(self, ids: Sequence[int], maximum: int) -> list[int]:
        """Returns at most `maximum` ids of a prompt."""
        row = np.array(ids, np.int32)
        return row[self._positions(self._fixed(row, has_prompt=True), maximum)].tolist()

    def _fixed(
        self, ids: Int32[np.ndarray, "n"], *, has_prompt: bool
    ) -> Bool[np.ndarray, "n"]:
        """Returns which inputs are never removed."""
        fixed = np.zeros(len(ids), bool)
        start = 0
        if has_prompt or not self.same_tokens:
            start = self.model.begin_length(ids)
        fixed[:start] = True
        if self.classifies:
            has_eos = self.model.encodes
        else:
            has_eos = not self.same_tokens and self.model.encoder_input.endswith("eos")
        if has_eos:
            fixed |= _last(len(ids))
        fixed[start : start + self.inserted] = True
        if self.source.template is not None:  # ids of its prompt vectors follow others
            fixed |= ids >= self.model.vocabulary_size
        return fixed

    def _positions(
        self, fixed: Bool[np.ndarray, "n"], maximum: int
    ) -> Int64[np.ndarray, "m"]:
        if len(fixed) <= maximum:
            return np.arange(len(fixed))
        room = maximum - int(np.count_nonzero(fixed))
        if room < 1:
            raise InputError(
                f"{len(fixed)} tokens, of which {maximum - room} cannot be removed, "
                f"expected fewer than {maximum}"
            )
        others = np.flatnonzero(~fixed)
        kept = others[-room:] if self.from_left else others[:room]
        return np.sort(np.concatenate([np.flatnonzero(fixed), kept]))


def _last(length: int) -> Bool[np.ndarray, "n"]:
    return np.arange(length) == length - 1


def truncation_of(
    source: DataSource, model: ModelInterface, *, same_tokens: bool, inserted: int = 0
) -> Truncation | None:
    """Returns how settings of the data cut long examples; None if they do not.

    A text of `inserted` tokens comes after BOS.
    """
    maximum, classifies = model.maximum_length, bool(model.labels)
    if maximum is None or not source.on_too_long.startswith("truncate"):
        return None
    return Truncation(source, model, maximum, same_tokens, classifies, inserted)
