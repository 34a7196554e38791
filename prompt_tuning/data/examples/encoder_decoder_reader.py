"""Reads rows as the examples of an encoder-decoder model."""

import dataclasses

import numpy as np
from jaxtyping import Float32, Int32, Integer

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import PADDING, PROMPT, token_weights
from prompt_tuning.data.examples import row_readers, row_splitting
from prompt_tuning.data.model_interface import ModelInterface
from prompt_tuning.data.rows.row_sources import Row, RowBlock
from prompt_tuning.data.rows.tasks import TaskToken

TYPES_NEEDED = (
    "no token_type_ids, which an encoder-decoder model needs to tell its input (type "
    "0) from its target (types 1 and 3)"
)


@dataclasses.dataclass(frozen=True)
class EncoderDecoderRowReader:
    """Reads each turn of a row, a prompt and its completion, as one example.

    A row is split wherever a prompt follows a completion. Type 0 of a turn becomes the
    encoder's input, types 1 and 3 the target. Special tokens of the input are as in
    `ModelConfig.encoder_input`; EOS is appended to the target where it is missing.
    Padding is removed from both.

    Attributes:
      eos_id: id of the token that ends inputs and targets.
      model: properties of the model that reads the examples.
      task_token: token at the start of a turn that selects the model's prompt, or None.
      skip_unlearned: whether turns without a learned token are left out, not refused.
    """

    same_tokens = False

    eos_id: int
    model: ModelInterface
    task_token: TaskToken | None
    skip_unlearned: bool

    def scan(self, block: RowBlock) -> row_readers.ExampleIndex:
        """Returns one example for each turn; see `RowReader`."""
        entries: list[tuple[int, ...]] = []
        for offset, length in enumerate(row_splitting.unpadded_lengths(block)):
            row = block.start + offset
            if block.token_types is None:
                raise InputError(f"{block.describe(row)}: {TYPES_NEEDED}")
            types = block.token_types[offset]
            for start, stop in row_splitting.find_turns(types[:length]):
                turn = types[start:stop]
                if self.skip_unlearned and not _has_target(turn):
                    continue
                self._check_turn(turn, block.describe(row), start)
                example = self.example(block.read(row, slice(start, stop)))
                count = int(np.count_nonzero(example.weights))
                if not count and self.skip_unlearned:
                    continue
                if not count:
                    raise InputError(_nothing_learned(block.describe(row), start))
                lengths = len(example.inputs), len(example.targets)
                entries.append((row, start, stop, *lengths, count, example.prompt_id))
        # [E, 7], in the order of the index's columns.
        return row_readers.ExampleIndex(*np.array(entries, np.int64).reshape(-1, 7).T)

    def weights(self, block: RowBlock) -> Float32[np.ndarray, "c n"]:
        """Returns the loss weights of a block's tokens as targets."""
        if block.token_types is None:
            raise InputError(TYPES_NEEDED)
        types, shape = block.token_types, block.input_ids.shape
        return block.values.scale(token_weights(types, shape, use_token_type_ids=True))

    def example(self, row: Row) -> row_readers.Example:
        """Builds the example of one turn; see `RowReader`."""
        input_ids, token_types, values = row
        if token_types is None:
            raise InputError(TYPES_NEEDED)
        prompt, task = input_ids[token_types == PROMPT], 0
        if self.task_token is not None:
            task, prompt = self.task_token.split(prompt)
        bos_id, special = self.model.bos_id, self.model.encoder_input
        inputs = prompt[prompt != bos_id]
        if special.endswith("eos"):
            inputs = self._with_eos(inputs)
        if special.startswith("bos") and bos_id is not None:
            inputs = np.insert(inputs, 0, bos_id)
        is_target = (token_types != PROMPT) & (token_types != PADDING)
        targets = self._with_eos(input_ids[is_target])
        appended = len(targets) - int(is_target.sum())
        # An appended EOS has the weight of the token before it.
        values = values.map(lambda x: np.pad(x[is_target], (0, appended), mode="edge"))
        weights = values.scale(np.ones(len(targets), np.float32))
        return row_readers.Example(
            inputs, targets, weights, 0, int(task), columns=values.columns
        )

    def kept(self, token_types: row_readers.TokenTypes) -> row_readers.TokenMask:
        """Returns which tokens are not padding; see `RowReader`."""
        return token_types != PADDING

    def _with_eos(self, ids: Int32[np.ndarray, "k"]) -> Int32[np.ndarray, "_"]:
        if ids.size and ids[-1] == self.eos_id:
            return ids
        return np.append(ids, np.int32(self.eos_id))

    def _check_turn(
        self, types: Integer[np.ndarray, "n"], row: str, start: int
    ) -> None:
        is_prompt = types == PROMPT
        removed = 0 if self.task_token is None else self.task_token.position + 1
        if is_prompt.sum() <= removed:
            part = "prompt (type 0)" + (" after the task" if removed else "")
            raise InputError(
                f"{row}, from token {start}: no {part} before the "
                "completion; an encoder-decoder model needs an input for its encoder"
            )
        if not _has_target(types):
            raise InputError(_nothing_learned(row, start))


def _has_target(types: Integer[np.ndarray, "n"]) -> bool:
    return bool(((types != PADDING) & (types != PROMPT)).any())


def _nothing_learned(row: str, start: int) -> str:
    return (
        f"{row}, from token {start}: no token has a loss weight, expected a completion "
        f"(types 1 and 3) after the prompt; {row_readers.how_to_skip()}"
    )
