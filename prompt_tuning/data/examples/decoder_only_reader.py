"""Reads rows as the examples of a decoder-only model."""

import dataclasses
import operator

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, Integer

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import PADDING, PROMPT, SEPARATOR, token_weights
from prompt_tuning.data.examples import row_readers
from prompt_tuning.data.examples.row_splitting import (
    ExampleBounds,
    keep_whole_rows,
    split_at_separators,
    stored_tokens,
    token_positions,
)
from prompt_tuning.data.rows.row_sources import Row, RowBlock
from prompt_tuning.data.rows.tasks import TaskToken
from prompt_tuning.data.rows.token_columns import TokenValues
from prompt_tuning.settings.data_source import DataSource


@dataclasses.dataclass(frozen=True)
class DecoderOnlyRowReader:
    """Reads each row, or each part that a separator ends, as one example.

    The targets of an example are its inputs. Target `i` is predicted from the tokens
    before token `i`, and target 0 from the last prompt vector; without one it has no
    weight. BOS is never learned, unless its type marks it as the EOS that ends an
    example (GPT-2 uses one id for both). Neither are the prompt vectors of a template.
    Padding (type 2) is removed wherever it stands, if types are used.

    Attributes:
      source: settings, which tell how rows are split and what is learned.
      vocabulary_size: `V` of the model; ids from there on are vectors of a template.
      begin_id: id of the token that begins a row; -1 for none.
      predicts_first_token: whether prompt vectors or a text precede every example.
      task_token: token at the start of every example that selects its prompt, or None.
    """

    same_tokens = True

    source: DataSource
    vocabulary_size: int
    begin_id: int
    predicts_first_token: bool
    task_token: TaskToken | None = None

    def scan(self, block: RowBlock) -> row_readers.ExampleIndex:
        """Returns the examples with at least one learned token; see `RowReader`."""
        bounds = self._bounds(block)
        tasks = self._tasks(block, bounds)
        try:
            weights = self._block_weights(block, bounds)
        except InputError as error:
            raise InputError(f"{block.describe(block.start)}: {error}") from error
        learned = np.count_nonzero(weights, axis=1)
        if not learned.all() and self.source.on_nothing_learned == "error":
            first = block.start + int(np.argmin(learned))
            raise InputError(
                f"{block.describe(first)}: no token has a loss weight, expected at "
                "least one learned token (BOS is never learned, nor is the first token "
                "of an example in a model without a prompt); "
                f"{row_readers.how_to_skip()}"
            )
        # Learned tokens of each example, `[E]`, counted in the flattened rows.
        begins = bounds.rows * weights.shape[1] + bounds.starts
        counts = np.add.reduceat(weights.ravel() != 0, begins, dtype=np.int64)
        rows, starts, stops, lengths = bounds
        lengths = lengths - int(self.task_token is not None)
        index = row_readers.ExampleIndex(
            block.start + rows, starts, stops, lengths, lengths, counts, tasks
        )
        return index.select(counts > 0)

    def weights(self, block: RowBlock) -> Float32[np.ndarray, "c n"]:
        """Returns the loss weights of a block's tokens."""
        return self._block_weights(block, self._bounds(block))

    def example(self, row: Row) -> row_readers.Example:
        """Builds one example; see `RowReader`."""
        input_ids, token_types, values = row
        if token_types is not None:
            kept = self.kept(token_types)
            input_ids, token_types = input_ids[kept], token_types[kept]
            values = values.map(operator.itemgetter(kept))
        if self.task_token is not None:
            input_ids = self.task_token.remove(input_ids)
            values = values.map(self.task_token.remove)
            if token_types is not None:
                token_types = self.task_token.remove(token_types)
        types = None if token_types is None else token_types[None]
        first = np.array([0])
        weights = self._weights(input_ids[None], types, values, (first, first))[0]
        return row_readers.Example(
            input_ids,
            input_ids,
            weights,
            self._prefix_length(input_ids, token_types),
            columns=values.columns,
        )

    def kept(self, token_types: row_readers.TokenTypes) -> row_readers.TokenMask:
        """Returns which tokens are not padding; see `RowReader`."""
        if self.source.use_token_type_ids is False:
            return np.ones(token_types.shape, bool)
        return token_types != PADDING

    def _included(self, block: RowBlock) -> Bool[np.ndarray, "c n"]:
        stored = stored_tokens(block)
        return (
            stored
            if block.token_types is None
            else stored & self.kept(block.token_types)
        )

    def _bounds(self, block: RowBlock) -> ExampleBounds:
        splits = self.source.separate_articles
        split = split_at_separators if splits else keep_whole_rows
        return split(block.token_types, self._included(block))

    def _block_weights(
        self, block: RowBlock, bounds: ExampleBounds
    ) -> Float32[np.ndarray, "c n"]:
        rows, included = bounds.rows, self._included(block)
        is_task = self.task_token is not None and self.task_token.position == 0
        firsts = token_positions(bounds, included, int(is_task))
        # An example may end before its first token, if it is only a task token.
        nonempty = firsts < bounds.stops
        heads = rows[nonempty], firsts[nonempty]
        weights = self._weights(block.input_ids, block.token_types, block.values, heads)
        weights[~stored_tokens(block)] = 0
        if self.task_token is not None:
            positions = token_positions(bounds, included, self.task_token.position)
            present = positions < bounds.stops
            weights[rows[present], positions[present]] = 0
        return weights

    def _weights(
        self,
        input_ids: Integer[np.ndarray, "c n"],
        token_types: Integer[np.ndarray, "c n"] | None,
        values: TokenValues,
        heads: tuple[Int64[np.ndarray, "E"], Int64[np.ndarray, "E"]],
    ) -> Float32[np.ndarray, "c n"]:
        """Computes loss weights; `heads` are rows and positions of first tokens."""
        weights = token_weights(
            token_types,
            input_ids.shape,
            use_token_type_ids=self._uses_types(token_types),
            prompt_loss_weight=self.source.prompt_loss_weight,
        )
        weights = values.scale(weights)
        if self.predicts_first_token:
            weights[heads] *= ~self._is_bos(input_ids, token_types)[heads]
        else:
            weights[heads] = 0
        if self.source.template is not None:
            weights[input_ids >= self.vocabulary_size] = 0
        return weights

    def _uses_types(self, token_types: Integer[np.ndarray, "c n"] | None) -> bool:
        if self.source.use_token_type_ids is not None:
            return self.source.use_token_type_ids
        if token_types is None and self.source.prompt_loss_weight > 0:
            raise InputError(
                f"prompt_loss_weight is {self.source.prompt_loss_weight}, but the data "
                "has no token_type_ids that mark the tokens of prompts: add them with "
                "prompt-tuning token-types, or leave prompt_loss_weight out to train "
                "on every token"
            )
        return token_types is not None

    def _is_bos(
        self,
        input_ids: Integer[np.ndarray, "*rows n"],
        token_types: Integer[np.ndarray, "*rows n"] | None,
    ) -> Bool[np.ndarray, "*rows n"]:
        """Returns which tokens would be BOS as the first token of an example."""
        is_bos = np.equal(input_ids, self.begin_id)
        return is_bos if token_types is None else is_bos & (token_types != SEPARATOR)

    def _tasks(self, block: RowBlock, bounds: ExampleBounds) -> Int64[np.ndarray, "E"]:
        """Returns the tasks of the examples; 0 without task tokens."""
        token, rows = self.task_token, bounds.rows
        if token is None:
            return np.zeros_like(rows)
        positions = token_positions(bounds, self._included(block), token.position)
        missing = positions >= bounds.stops
        positions = np.where(missing, bounds.starts, positions)
        if block.token_types is not None:
            types = block.token_types[rows, positions]
            missing |= types == SEPARATOR
        if missing.any():
            first = int(np.argmax(missing))
            raise InputError(
                f"{block.describe(block.start + int(rows[first]))}: token "
                f"{int(bounds.starts[first]) + token.position} should be the task "
                "token (DataSource.task_token), but the example ends before it"
            )
        return token.decode(block.input_ids[rows, positions])

    def _prefix_length(
        self,
        input_ids: Int32[np.ndarray, "n"],
        token_types: Int32[np.ndarray, "n"] | None,
    ) -> int:
        """Returns the number of prompt tokens, BOS included, at the start."""
        in_prompt = np.zeros(len(input_ids), bool)
        if token_types is not None:
            in_prompt = token_types == PROMPT
        in_prompt[:1] |= self._is_bos(input_ids, token_types)[:1]
        return len(in_prompt) if in_prompt.all() else int(np.argmin(in_prompt))
