"""Examples of texts that belong together: a query, a positive text, and negatives."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.examples.example_groups import ExampleGroups
from prompt_tuning.data.examples.row_readers import Example
from prompt_tuning.data.examples.truncation import truncation_of
from prompt_tuning.data.model_interface import ModelInterface
from prompt_tuning.data.rows.row_sources import Repetition
from prompt_tuning.data.rows.text_records import read_records
from prompt_tuning.data.source_reading import check_source, files_of, reads_text
from prompt_tuning.settings.data_source import DataSource

QUERIES, POSITIVE, NEGATIVES = (
    ("query", "anchor"),
    "positive",
    ("negatives", "negative"),
)
"""Keys of the texts; published data use both names of queries and of negatives."""
UNREAD = (
    *("prompt_key", "completion_key", "joiner", "template", "format", "chat"),
    *("chat_template", "chat_date", "chat_template_kwargs", "turns", "prompt_id_key"),
    *("task_token", "columns", "advantages_key", "example_weight_key", "balance_key"),
    *("use_token_type_ids", "prompt_loss_weight"),
)
"""Settings of `DataSource` that have no effect on records of such texts."""


class ContrastiveExamples(ExampleGroups):
    """`E` examples of `C` texts each: query, positive, and equally many negatives.

    Args:
      texts: token ids of the `C` texts by example.
      pooling: states that make the vector of a text; see `text_embeddings.Pooling`.
      skipped: number of examples left out because a text is too long.
      truncated: number of examples with a cut text.
    """

    def __init__(
        self,
        texts: Sequence[Sequence[Sequence[int]]],
        pooling: str,
        skipped: int = 0,
        truncated: int = 0,
    ):
        self._texts = [[np.array(x, np.int32) for x in each] for each in texts]
        self._pooling = pooling
        self.skipped, self.truncated = skipped, truncated
        self.unlearned = self.without_completion = self.uncounted = 0
        self.repetition, self.has_prompt_ids = Repetition(0, 0, 0), False
        self.gold = np.zeros(len(texts), np.int32)
        self.weights = np.ones(len(texts), np.float32)
        self.rows_per_example = len(texts[0])
        longest = np.array([max(map(len, each)) for each in texts], np.int64)
        self.input_lengths = self.target_lengths = longest
        self.weight_counts = longest if pooling == "mean" else np.ones_like(longest)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, number: int) -> list[Example]:
        """Returns the rows of one example; weights mark the states of their vectors.

        The state of a token is the one that predicts the next, so the last weight
        belongs to the position after the text.
        """
        rows = []
        for ids in self._texts[number]:
            weights = np.zeros(len(ids) + 1, np.float32)
            chosen = {"mean": slice(1, None), "last": -1, "first": 1}[self._pooling]
            weights[chosen] = 1
            rows.append(Example(ids, ids, weights, len(ids)))
        return rows

    def candidates(self) -> tuple[Int64[np.ndarray, "n"], Int64[np.ndarray, "E"]]:
        """Returns the numbers of the different texts, without the queries.

        Numbers start at the first positive, and count `C - 1` texts for each example.

        Returns:
          The first text of each kind, and the place of an example's positive among
          them.
        """
        texts = [ids.tobytes() for each in self._texts for ids in each[1:]]
        places, chosen = {}, []
        for number, text in enumerate(texts):
            if text not in places:
                places[text] = len(chosen)
                chosen.append(number)
        positives = [places[text] for text in texts[:: self.rows_per_example - 1]]
        return np.array(chosen, np.int64), np.array(positives, np.int64)

    def check_candidates(self, batch_size: int) -> None:
        """Refuses batches where the positive of a query is its only candidate."""
        examples = min(len(self), batch_size)
        if examples * (self.rows_per_example - 1) == 1:
            raise InputError(
                f"a batch has {examples} example without negatives, so the loss of its "
                f"query is always 0: give {NEGATIVES[0]!r} in each record, or several "
                f"records and {how_to_set('DataSource.batch_size', 32)}"
            )


def load_contrastive(
    source: DataSource,
    model: ModelInterface,
    encode: Callable[[str], list[int]],
    pooling: str,
) -> ContrastiveExamples:
    """Reads the files of a data source as texts that belong together.

    `encode` returns the tokens of a text; for `pooling` see `ContrastiveExamples`.
    """
    check_source(source, model)
    if not reads_text(source):
        raise InputError(
            f"{files_of(source)[0]} contains token ids, but the objective compares "
            f"texts: give records with {QUERIES[0]!r}, {POSITIVE!r} and "
            f"{NEGATIVES[0]!r}"
        )
    if model.prompt_count > 1:
        raise InputError(
            f"the model has {model.prompt_count} prompts, but texts of a contrastive "
            "objective share one: leave the others out"
        )
    _check_settings(source, model)
    shortened = _Shortened(source, model)
    texts: list[list[list[int]]] = []
    for path in files_of(source):
        for line in read_records(path):
            if len(texts) == source.maximum_examples:
                break
            place = f"{path}, {line.unit} {line.number}"
            words = _texts_of(line.content, place)
            rows = [shortened(model.scored_row(encode(x)), place) for x in words]
            if None in rows:
                continue
            texts.append([row for row in rows if row is not None])
            if len(rows) != len(texts[0]):
                raise InputError(
                    f"{place} has {len(rows) - 2} negatives, expected "
                    f"{len(texts[0]) - 2}, as the first record: give all records "
                    "equally many"
                )
    if not texts:
        raise InputError(f"{files_of(source)[0]} has no record that fits the model")
    return ContrastiveExamples(texts, pooling, shortened.skipped, shortened.cut)


def _check_settings(source: DataSource, model: ModelInterface) -> None:
    """Refuses settings that would have no effect on the texts of a record."""
    defaults = {field.name: field.default for field in dataclasses.fields(source)}
    for name in UNREAD:
        value = getattr(source, name)
        if value != defaults[name]:
            raise InputError(
                f"DataSource.{name} is {shown(value)}, which has no effect on records "
                "of a contrastive objective: leave it out"
            )
    if model.placement == "template":
        raise InputError(
            "Prompting.placement is 'template', but texts of a contrastive objective "
            "have no template: leave it out"
        )


class _Shortened:
    """Cuts or leaves out long texts, and counts their records."""

    def __init__(self, source: DataSource, model: ModelInterface):
        self._source, self._maximum = source, model.maximum_length
        cut = truncation_of(source, model, same_tokens=True)
        # Keeps an encoder's EOS.
        self._truncation = cut and dataclasses.replace(cut, classifies=True)
        self._skipped: set[str] = set()
        self._cut: set[str] = set()

    @property
    def skipped(self) -> int:
        return len(self._skipped)

    @property
    def cut(self) -> int:
        return len(self._cut)

    def __call__(self, ids: list[int], place: str) -> list[int] | None:
        """Returns a text that fits; None to leave its record out."""
        if not ids:
            raise InputError(f"{place}: a text has no token, so it has no vector")
        if self._maximum is None or len(ids) <= self._maximum:
            return ids
        if self._truncation is not None:
            self._cut.add(place)
            return self._truncation.cut_prompt(ids, self._maximum)
        if self._source.on_too_long == "skip":
            self._skipped.add(place)
            return None
        raise InputError(
            f"{place}: a text has {len(ids)} tokens, but the model reads at most "
            f"{self._maximum}: to cut such texts, type "
            f"{how_to_set('DataSource.on_too_long', 'truncate_right')}"
        )


def _texts_of(record: Mapping[str, Any], place: str) -> list[str]:
    """Returns the query, the positive and the negatives of a record."""
    query = next((key for key in QUERIES if key in record), None)
    other = next((key for key in NEGATIVES if key in record), None)
    if query is None or POSITIVE not in record:
        raise InputError(
            f"{place} has the keys {shown(sorted(record))}, expected {QUERIES[0]!r} or "
            f"{QUERIES[1]!r}, {POSITIVE!r}, and perhaps {NEGATIVES[0]!r}, a list of "
            f"texts, or {NEGATIVES[1]!r}"
        )
    negatives = [] if other is None else record[other]
    if not isinstance(negatives, list):
        negatives = [negatives]
    pairs = [(query, record[query]), (POSITIVE, record[POSITIVE])]
    pairs += [(str(other), text) for text in negatives]
    for key, text in pairs:
        if not (isinstance(text, str) and text):
            raise InputError(
                f"{place}: {key!r} has {shown(text)}, expected a text that is not empty"
            )
    return [text for _, text in pairs]
