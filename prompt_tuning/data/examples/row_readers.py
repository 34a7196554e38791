"""How a row of ids and types is read as examples, for each architecture."""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, Integer

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import PADDING, PROMPT, SEPARATOR, token_weights
from prompt_tuning.data.examples.segmentation import (
    Cut,
    Pieces,
    articles,
    kept_tokens,
    real_lengths,
    turns,
)
from prompt_tuning.data.rows.row_sources import RowBlock
from prompt_tuning.data.rows.tasks import TaskToken
from prompt_tuning.data.rows.token_columns import TokenValues

Place = Callable[[int], str]
"""Where a row stands, for messages."""

TYPES_NEEDED = (
    "no token_type_ids, which an encoder-decoder model needs to tell its input (type "
    "0) from its target (types 1 and 3)"
)


NOTHING_SAID = TokenValues()


@dataclasses.dataclass(frozen=True)
class Example:
    """What a model sees and what it learns to say.

    Attributes:
      inputs: ids of the encoder, or of the decoder-only model, `[n]`.
      targets: ids that are predicted, `[u]`; in a decoder-only model the inputs.
      weights: of each target's loss, `[u]`.
      prefix_length: how many inputs of a decoder-only model are given before its first
        completion token (BOS included); 0 in an encoder-decoder model.
      prompt_id: which of the `N` prompts it has.
      columns: numbers of each target that an objective reads, `[u]`, by name.
    """

    inputs: Int32[np.ndarray, "n"]
    targets: Int32[np.ndarray, "u"]
    weights: Float32[np.ndarray, "u"]
    prefix_length: int
    prompt_id: int = 0
    columns: Mapping[str, Float32[np.ndarray, "u"]] = dataclasses.field(
        default_factory=dict
    )


@dataclasses.dataclass(frozen=True)
class Spans:
    """Where `E` examples lie among the rows, and their lengths; arrays `[E]`.

    Attributes:
      rows: the row of each.
      starts: its first token in the row.
      stops: one past its last.
      input_lengths: number of inputs.
      target_lengths: number of targets.
      weight_counts: number of targets whose weight is not zero.
      prompt_ids: which prompt each has; 0 where nothing says.
    """

    rows: Int64[np.ndarray, "E"]
    starts: Int64[np.ndarray, "E"]
    stops: Int64[np.ndarray, "E"]
    input_lengths: Int64[np.ndarray, "E"]
    target_lengths: Int64[np.ndarray, "E"]
    weight_counts: Int64[np.ndarray, "E"]
    prompt_ids: Int64[np.ndarray, "E"]

    def __len__(self) -> int:
        return len(self.rows)

    def columns(self) -> list[Int64[np.ndarray, "E"]]:
        """The arrays, in the order of the attributes."""
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    def select(self, chosen: Bool[np.ndarray, "E"] | slice) -> "Spans":
        """The chosen examples."""
        return Spans(*(column[chosen] for column in self.columns()))


def join_spans(parts: Sequence[Spans]) -> Spans:
    """The spans of all parts, one after the other."""
    columns = zip(*(part.columns() for part in parts), strict=True)
    return Spans(*(np.concatenate(column) for column in columns))


@runtime_checkable
class RowReader(Protocol):
    """One way to read rows as examples."""

    def scan(self, block: RowBlock, place: Place) -> Spans:
        """The examples of a block of rows whose values are in range.

        Raises:
          InputError: if a row cannot be read this way, or has nothing to learn.
        """
        ...

    def example(
        self,
        input_ids: Int32[np.ndarray, "n"],
        token_types: Int32[np.ndarray, "n"] | None,
        values: TokenValues = NOTHING_SAID,
    ) -> Example:
        """The example of one span of a row."""
        ...


@dataclasses.dataclass(frozen=True)
class DecoderOnlyReading:
    """An article of a row, or a whole row, is an example whose targets are its inputs.

    Target `i` is predicted by whatever stands before token `i`: target 0 by the last
    prompt vector, or by nothing in a model without a prompt, where its weight is zero.
    BOS is given, never learned, unless its type says that it is the EOS that ends an
    article (GPT-2 has one id for both); nor is a vector of a template's prompt.

    Attributes:
      use_token_type_ids: whether the types decide the weights; if not, every token is
        learned, padding that the data has among them.
      prompt_loss_weight: weight of type 0 where they do.
      predicts_first_token: whether a prompt vector stands before each example.
      bos_id: the id of BOS, or None.
      task_token: what says an example's task at its head; None if nothing does.
      soft_ids: ids from this one on stand for vectors of a template's prompt; None
        where all are of tokens.
      cut: what of a row is an example: `articles` or `whole_rows`.
    """

    use_token_type_ids: bool
    prompt_loss_weight: float
    predicts_first_token: bool
    bos_id: int | None
    task_token: TaskToken | None = None
    soft_ids: int | None = None
    cut: Cut = articles

    def scan(self, block: RowBlock, place: Place) -> Spans:
        """The articles of each row in which something is learned; see `RowReader`."""
        pieces = self._pieces(block)
        tasks = self._tasks(block, pieces, place)
        try:
            weights = self._block_weights(block, pieces)
        except InputError as error:
            raise InputError(f"{place(block.start)}: {error}") from error
        learned = np.count_nonzero(weights, axis=1)
        if not learned.all():
            raise InputError(
                f"{place(block.start + int(np.argmin(learned)))}: no token carries "
                "weight, expected at least one that is learned (BOS is not; nor is the "
                "first token of an article in a model without a prompt)"
            )
        begins = pieces.rows * weights.shape[1] + pieces.starts
        counts = np.add.reduceat(weights.ravel() != 0, begins, dtype=np.int64)
        rows, starts, stops = pieces
        lengths = stops - starts - int(self.task_token is not None)
        spans = Spans(
            block.start + rows, starts, stops, lengths, lengths, counts, tasks
        )
        return spans.select(counts > 0)

    def weights(self, block: RowBlock) -> Float32[np.ndarray, "c n"]:
        """What each token of a block weighs, in whichever example it is.

        Raises:
          InputError: if the types that are to say it are missing or out of range.
        """
        return self._block_weights(block, self._pieces(block))

    def example(
        self,
        input_ids: Int32[np.ndarray, "n"],
        token_types: Int32[np.ndarray, "n"] | None,
        values: TokenValues = NOTHING_SAID,
    ) -> Example:
        """One article, or one row; see `RowReader`."""
        if self.task_token is not None:
            input_ids = self.task_token.without(input_ids)
            values = values.map(self.task_token.without)
            if token_types is not None:
                token_types = self.task_token.without(token_types)
        types = None if token_types is None else token_types[None]
        first = np.array([0])
        weights = self._weights(input_ids[None], types, values, (first, first))[0]
        return Example(
            input_ids,
            input_ids,
            weights,
            self._prefix_length(input_ids, token_types),
            columns=values.columns,
        )

    def _pieces(self, block: RowBlock) -> Pieces:
        kept = kept_tokens(block)
        if self.use_token_type_ids and block.token_types is not None:
            kept = block.token_types != PADDING
        return self.cut(block.token_types, kept)

    def _block_weights(
        self, block: RowBlock, pieces: Pieces
    ) -> Float32[np.ndarray, "c n"]:
        """What each token of a block weighs, if it is cut into these examples."""
        rows, firsts = pieces.rows, pieces.starts
        if self.task_token is not None and self.task_token.at == 0:
            firsts = firsts + 1
        there = firsts < pieces.stops
        heads = rows[there], firsts[there]
        weights = self._weights(block.input_ids, block.token_types, block.values, heads)
        weights[~kept_tokens(block)] = 0
        if self.task_token is not None:
            said = pieces.starts + self.task_token.at
            there = said < pieces.stops
            weights[rows[there], said[there]] = 0
        return weights

    def _weights(
        self,
        input_ids: Integer[np.ndarray, "c n"],
        token_types: Integer[np.ndarray, "c n"] | None,
        values: TokenValues,
        heads: tuple[Int64[np.ndarray, "E"], Int64[np.ndarray, "E"]],
    ) -> Float32[np.ndarray, "c n"]:
        """What each token weighs; `heads` are rows and places of first tokens."""
        weights = token_weights(
            token_types,
            input_ids.shape,
            use_token_type_ids=self.use_token_type_ids,
            prompt_loss_weight=self.prompt_loss_weight,
        )
        weights = values.weighted(weights)
        if not self.predicts_first_token:
            weights[heads] = 0
        else:
            weights[heads] *= ~self._is_bos(input_ids, token_types)[heads]
        if self.soft_ids is not None:
            weights[input_ids >= self.soft_ids] = 0
        return weights

    def _is_bos(
        self,
        input_ids: Integer[np.ndarray, "*rows n"],
        token_types: Integer[np.ndarray, "*rows n"] | None,
    ) -> Bool[np.ndarray, "*rows n"]:
        """Which tokens are BOS, if an example begins with them."""
        found = np.equal(input_ids, -1 if self.bos_id is None else self.bos_id)
        return found if token_types is None else found & (token_types != SEPARATOR)

    def _tasks(
        self, block: RowBlock, pieces: Pieces, place: Place
    ) -> Int64[np.ndarray, "E"]:
        """Which task each example says; 0 where none does.

        Raises:
          InputError: if one ends before the token that was to say it.
        """
        token, rows = self.task_token, pieces.rows
        if token is None:
            return np.zeros_like(rows)
        places = pieces.starts + token.at
        missing = places >= pieces.stops
        places = np.where(missing, pieces.starts, places)
        if block.token_types is not None:
            missing |= np.isin(block.token_types[rows, places], (PADDING, SEPARATOR))
        if missing.any():
            first = int(np.argmax(missing))
            raise InputError(
                f"{place(block.start + int(rows[first]))}: token "
                f"{int(pieces.starts[first]) + token.at} was to say the task "
                "(DataSource.task_token), but the text has ended there"
            )
        return token.tasks(block.input_ids[rows, places])

    def _prefix_length(
        self,
        input_ids: Int32[np.ndarray, "n"],
        token_types: Int32[np.ndarray, "n"] | None,
    ) -> int:
        given = np.zeros(len(input_ids), bool)
        if token_types is not None:
            given = token_types == PROMPT
        given[:1] |= self._is_bos(input_ids, token_types)[:1]
        return len(given) if given.all() else int(np.argmin(given))


@dataclasses.dataclass(frozen=True)
class EncoderDecoderReading:
    """A row is one example for each turn: a prompt, then its completion.

    The row is cut wherever a prompt follows a completion. Of each turn type 0 becomes
    the encoder's input and types 1 and 3 the target, both closed by EOS; BOS is
    dropped from the input, padding everywhere.

    Attributes:
      eos_id: closes inputs and targets.
      bos_id: the id of BOS, or None.
      task_token: what says a turn's task at the head of its prompt; None if nothing
        does.
    """

    eos_id: int
    bos_id: int | None
    task_token: TaskToken | None = None

    def scan(self, block: RowBlock, place: Place) -> Spans:
        """One example for each turn of each row; see `RowReader`."""
        found = []
        for offset, length in enumerate(real_lengths(block)):
            row = block.start + offset
            if block.token_types is None:
                raise InputError(f"{place(row)}: {TYPES_NEEDED}")
            ids, types = block.input_ids[offset], block.token_types[offset]
            for start, stop in turns(types[:length]):
                self._check_turn(types[start:stop], place(row), start)
                inside = offset, slice(start, stop)
                example = self.example(
                    ids[start:stop].astype(np.int32),
                    types[start:stop].astype(np.int32),
                    block.values.map(operator.itemgetter(inside)),
                )
                count = np.count_nonzero(example.weights)
                if not count:
                    raise InputError(_nothing_learned(place(row), start))
                lengths = len(example.inputs), len(example.targets)
                own = row, start, stop, *lengths, count, example.prompt_id
                found.append(own)
        return Spans(*np.array(found, np.int64).reshape(-1, 7).T)

    def weights(self, block: RowBlock) -> Float32[np.ndarray, "c n"]:
        """What each token of a block weighs as a target.

        Raises:
          InputError: if there are no types, or they are out of range.
        """
        if block.token_types is None:
            raise InputError(TYPES_NEEDED)
        types, shape = block.token_types, block.input_ids.shape
        return block.values.weighted(
            token_weights(types, shape, use_token_type_ids=True)
        )

    def example(
        self,
        input_ids: Int32[np.ndarray, "n"],
        token_types: Int32[np.ndarray, "n"] | None,
        values: TokenValues = NOTHING_SAID,
    ) -> Example:
        """One turn; see `RowReader`."""
        if token_types is None:
            raise InputError(TYPES_NEEDED)
        given, task = input_ids[token_types == PROMPT], 0
        if self.task_token is not None:
            task, given = self.task_token.taken(given)
        inputs = self._closed(given[given != self.bos_id])
        said = (token_types != PROMPT) & (token_types != PADDING)
        targets = self._closed(input_ids[said])
        missing = len(targets) - int(said.sum())
        # An EOS that the row has not is worth what the token before it is.
        values = values.map(lambda x: np.pad(x[said], (0, missing), mode="edge"))
        weights = values.weighted(np.ones(len(targets), np.float32))
        return Example(inputs, targets, weights, 0, int(task), columns=values.columns)

    def _closed(self, ids: Int32[np.ndarray, "k"]) -> Int32[np.ndarray, "_"]:
        if ids.size and ids[-1] == self.eos_id:
            return ids
        return np.append(ids, np.int32(self.eos_id))

    def _check_turn(
        self, types: Integer[np.ndarray, "n"], place: str, start: int
    ) -> None:
        given = types == PROMPT
        taken = 0 if self.task_token is None else self.task_token.at + 1
        if given.sum() <= taken:
            what = "prompt (type 0)" if not taken else "prompt (type 0) after the task"
            raise InputError(
                f"{place}, from token {start}: no {what} before the "
                "completion; an encoder-decoder model needs an input for its encoder"
            )
        if not ((types != PADDING) & ~given).any():
            raise InputError(_nothing_learned(place, start))


def _nothing_learned(place: str, start: int) -> str:
    return (
        f"{place}, from token {start}: no token carries weight, expected a completion "
        "(types 1 and 3) after the prompt"
    )
