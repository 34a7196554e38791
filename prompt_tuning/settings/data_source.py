"""Settings of a data set: its files, and how they are read and batched."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.number_ranges import (
    AxisLength,
    NonnegativeNumber,
    PositiveInteger,
    RowCount,
    VocabularySize,
)

ADVANTAGES = "advantages"
"""Column named by `DataSource.advantages_key`."""

LineFormat = Literal["auto", "pairs", "messages", "sharegpt", "alpaca"]
TooLong = Literal["error", "skip", "truncate", "truncate_left", "truncate_right"]
"""What to do with an example that is too long; "truncate" means "truncate_left"."""
Turns = Literal["auto", "together", "apart"]
"""Whether all answers of a conversation are learned in one example."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSource:
    """A data set: its files, and how they are read and batched.

    `tune` and other functions take these fields directly. Files of text have one object
    per line, with a prompt and a completion or with a conversation. HDF5 files have one
    row of token ids per example, with optional token types (0 prompt, 1 completion, 2
    padding, 3 separator).

    Attributes:
      files: files of one kind: HDF5 (`.hdf5`, `.h5`), `.jsonl`, `.json` (one list),
        `.csv`, `.tsv` (these four also with `.gz` or `.zst`) or `.parquet`; a glob such
        as "data/*.jsonl"; a folder of such files; or a folder that `prepare` wrote.
      split: which files to read from a folder that `prepare` wrote: "train", "dev" or
        "test". None for "train" in training data and "dev" in evaluation data.
      batch_size: rows per batch over all devices; a multiple of the number of devices
        that share the rows.
      batch_tokens: maximum number of tokens per batch, padding included. It replaces
        `batch_size`, so that batches of shorter rows have more rows; `batch_size` then
        only applies when rows are generated from or ranked.
      buckets: maximum number of lengths that rows are padded to. Lengths are chosen to
        minimize padding; each is compiled once. None for as many as save more time per
        pass over the data than a share of their compilation takes.
      packing: whether to pack several examples into a row. Each attends only to itself
        and its prompt. All batches then have the same shape, and `batch_size` counts
        packed rows.
      packed_length: number of tokens of a packed row (of its inputs in an
        encoder-decoder); None for four times the average length of an example.
      use_token_type_ids: whether token types decide which tokens are learned. True
        requires types in the data. With False every token is learned, including the
        padding of HDF5 rows. None for True if the data has types, else False.
      prompt_loss_weight: loss weight of prompt tokens (type 0) if token types are used.
      on_nothing_learned: what to do with a row that has no learned token: "error", or
        "skip" to leave it out and count it.
      separate_articles: whether a decoder-only model treats each part of an HDF5 row
        that ends with a separator (type 3) as a separate example, which does not attend
        to the rest of the row and is generated or ranked from its own prompt. If False,
        each row is one example, so texts are learned in the context of those before
        them.
      use_loss_weights: whether to multiply loss weights by the HDF5 data set
        `loss_weights [rows, length]`, if present.
      example_weight_key: jsonl key or HDF5 data set `[rows]` (usually
        `example_weights`) with the weight of each example; None for equal weights.
      balance_key: jsonl key or HDF5 data set with the class of each example, `[rows]`,
        or in HDF5 of each token, `[rows, length]` (e.g. `category_ids`). Loss weights
        are scaled so that every class has the same total weight over the files. None
        for no balancing.
      advantages_key: jsonl key or HDF5 data set with the advantage of each example,
        `[rows]`, or in HDF5 of each token, `[rows, length]`; required by
        `PolicyGradient`.
      columns: other numeric columns that an objective reads, in the same forms as
        `advantages_key`: a dict from the objective's name for a column to its jsonl key
        or HDF5 data set.
      format: format of the lines: "pairs" (prompt and completion), "messages",
        "sharegpt" or "alpaca", see `prompt_tuning.data.text.conversations`. "auto"
        recognizes it by the keys of the first line.
      chat: whether to render pairs with the tokenizer's chat template, too. Messages
        are always rendered with it, and so are alpaca tasks if there is a template.
      chat_template: file of a chat template to use instead; it renders pairs, too.
      chat_date: date for chat templates that print the current date, e.g. "2026-07-26".
      chat_template_kwargs: variables for the chat template, e.g. {"enable_thinking":
        False}. A conversation can set them itself.
      turns: "together" learns all answers of a conversation in one example; "apart"
        makes an example of each, with the context it has when it is answered; "auto"
        uses "together" where both give the answers the same context, else "apart".
      prompt_key: jsonl key of the prompt; None if lines have no prompt.
      completion_key: jsonl key of the completion, which is learned.
      joiner: text inserted between prompt and completion.
      template: prompt as a template of text, keys of the line and prompt vectors, e.g.
        "{soft:20} Review: {text} {soft:5} Mood:"; replaces `prompt_key`. Requires
        `Prompting.placement = 'template'`. See `prompt_tuning.data.text.templates` for
        the format.
      prompt_id_key: jsonl key or HDF5 data set `[rows]` (usually `prompt_ids`) that
        selects each example's prompt in a multi-task prompt.
      prompt_id_names: names of the prompts in order, if jsonl lines have names instead
        of numbers.
      prompt_id_aliases: other names for tasks, e.g. {"mnli_mismatched": "mnli"}.
      task_token: "index" or "sentinel" if the first token of each example (after the
        tokenizer's BOS) selects its prompt, instead of `prompt_id_key`. The token is
        the number `k` of the prompt or T5's `<extra_id_k>`, and is removed from the
        example.
      sentinel_vocabulary_size: one more than the id of `<extra_id_0>`: 32100 for T5;
        None for the size of the tokenizer's vocabulary.
      add_eos: whether to append the end-of-sequence token to each completion, and learn
        it.
      on_too_long: what to do with examples that exceed the model's positions: "error";
        "skip" to leave them out and count them; "truncate" or "truncate_left" to cut
        their beginning, which keeps the end of the completion; "truncate_right" to cut
        their end. See `Truncation`.
      maximum_examples: number of examples to use, from the first; None for all.

    Examples:
      >>> held_out = pt.DataSource(files=pairs[:4], batch_size=4)
      >>> evaluation = pt.Evaluation(data=held_out, exact_match=True)
    """

    files: Sequence[str] | str
    split: Literal["train", "dev", "test"] | None = None
    batch_size: RowCount = 32
    batch_tokens: PositiveInteger | None = None
    buckets: AxisLength | None = None
    packing: bool = False
    packed_length: RowCount | None = None
    use_token_type_ids: bool | None = None
    prompt_loss_weight: NonnegativeNumber = 0.0
    on_nothing_learned: Literal["error", "skip"] = "error"
    separate_articles: bool = True
    use_loss_weights: bool = True
    example_weight_key: str | None = None
    balance_key: str | None = None
    advantages_key: str | None = None
    columns: Mapping[str, str] | None = None
    format: LineFormat = "auto"
    chat: bool = False
    chat_template: str | None = None
    chat_date: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    turns: Turns = "auto"
    prompt_key: str | None = "prompt"
    completion_key: str = "completion"
    joiner: str = ""
    template: str | None = None
    prompt_id_key: str | None = None
    prompt_id_names: Sequence[str] | None = None
    prompt_id_aliases: Mapping[str, str] | None = None
    task_token: Literal["index", "sentinel"] | None = None
    sentinel_vocabulary_size: VocabularySize | None = None
    add_eos: bool = True
    on_too_long: TooLong = "error"
    maximum_examples: PositiveInteger | None = None

    def __post_init__(self):
        check_fields(self)
        columns = self.columns
        if columns is not None and not (
            isinstance(columns, Mapping)
            and all(isinstance(text, str) for pair in columns.items() for text in pair)
        ):
            raise InputError(
                f"DataSource.columns is {shown(columns)}, expected a dict of names and "
                "keys such as {'margins': 'margin'}, or None"
            )

    @property
    def objective_columns(self) -> dict[str, str]:
        """Keys of the columns that an objective reads, by the objective's names."""
        columns = dict(self.columns or {})
        if self.advantages_key is not None:
            columns[ADVANTAGES] = self.advantages_key
        return columns
