"""A text that is put before what each example is given, in token ids."""

import dataclasses

import numpy as np
from jaxtyping import Int32

from prompt_tuning.data.examples.row_readers import (
    NOTHING_SAID,
    DecoderOnlyReading,
    Example,
    Place,
    RowReader,
    Spans,
)
from prompt_tuning.data.rows.row_sources import RowBlock
from prompt_tuning.data.rows.token_columns import TokenValues


@dataclasses.dataclass(frozen=True)
class PrecededReading:
    """Another reading, with a text before what each example is given; see `RowReader`.

    Attributes:
      reading: of the rows as they are.
      ids: of the text; they stand behind BOS and are not learned.
      bos_id: the id of BOS, or None.
    """

    reading: RowReader
    ids: tuple[int, ...]
    bos_id: int | None

    def scan(self, block: RowBlock, place: Place) -> Spans:
        """The examples of the other reading, longer by the text."""
        spans = self.reading.scan(block, place)
        longer = {"input_lengths": spans.input_lengths + len(self.ids)}
        if isinstance(self.reading, DecoderOnlyReading):
            longer["target_lengths"] = spans.target_lengths + len(self.ids)
        return dataclasses.replace(spans, **longer)

    def example(
        self,
        input_ids: Int32[np.ndarray, "n"],
        token_types: Int32[np.ndarray, "n"] | None,
        values: TokenValues = NOTHING_SAID,
    ) -> Example:
        """The example of the other reading, with the text."""
        example = self.reading.example(input_ids, token_types, values)
        inputs, weights = example.inputs, example.weights
        # A first token that is learned is the end of an article, not its BOS.
        at = int(example.prefix_length > 0 and inputs[0] == self.bos_id)
        inputs = np.insert(inputs, at, np.array(self.ids, np.int32))
        if not isinstance(self.reading, DecoderOnlyReading):
            return dataclasses.replace(example, inputs=inputs)
        nothing = np.zeros(len(self.ids), np.float32)
        return dataclasses.replace(
            example,
            inputs=inputs,
            targets=inputs,
            weights=np.insert(weights, at, nothing),
            prefix_length=example.prefix_length + len(self.ids),
            columns={
                name: np.insert(column, at, nothing)
                for name, column in example.columns.items()
            },
        )
