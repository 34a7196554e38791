"""The settings of a data set: its files, and how these are read and batched."""

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
"""The column that `DataSource.advantages_key` names."""

LineFormat = Literal["auto", "pairs", "messages", "sharegpt", "alpaca"]
TooLong = Literal["error", "skip", "truncate", "truncate_left", "truncate_right"]
"""What becomes of an example that is too long; "truncate" is "truncate_left"."""
Turns = Literal["auto", "together", "apart"]
"""Whether the answers of a conversation are learned in one example."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSource:
    """Data files, how they are read as examples, and how these are batched.

    `tune` and others take its fields directly. A data set consists of HDF5 files, whose
    rows are token ids with optional token types (0 prompt, 1 completion, 2 padding, 3
    separator), or of files of text, whose lines are objects with a prompt and a
    completion, or a conversation.

    Attributes:
      files: files of one kind: HDF5 (`.hdf5`, `.h5`), `.jsonl`, `.json` (one list),
        `.csv`, `.tsv` (these four also with `.gz` or `.zst`) or `.parquet`; a glob such
        as "data/*.jsonl", a folder of such files, or a folder that `prepare` wrote.
      split: which files of a folder that `prepare` wrote: "train", "dev" or "test".
        None for "train" in training data, and "dev" in evaluation data.
      batch_size: number of rows of a batch, over all devices; must be a multiple of the
        number of devices that the rows are divided among.
      batch_tokens: maximum number of tokens of a batch, padding included. If set, it
        replaces `batch_size`: batches of shorter rows hold more rows. `batch_size` then
        applies only to rows that are generated from or ranked.
      buckets: maximum number of lengths that rows are padded to. The lengths are chosen
        to minimize padding; each of them is compiled once. None for as many as save
        more time in every pass over the data than a share of their compilation takes.
      packing: packs many examples into a row; each attends only to itself and its
        prompt. All batches then have the same shape, and `batch_size` counts packed
        rows.
      packed_length: number of tokens of a packed row (of its inputs in an
        encoder-decoder); None for four times the average length of an example.
      use_token_type_ids: whether token types determine which tokens are learned. If
        True, data without types is refused. If False, every token is learned, including
        the padding of HDF5 rows. None for True if the data has types, and else False.
      prompt_loss_weight: loss weight of prompt tokens (type 0) if token types are used.
      on_nothing_learned: "error" to reject a row without a learned token; "skip" to
        leave such rows out and count them.
      separate_articles: whether a decoder-only model reads each part of an HDF5 row
        that ends with a separator (type 3) as a separate example, which does not attend
        to the others and is generated or ranked from its own prompt. If False, each row
        is one example, so that texts are learned in the context of those before them.
      use_loss_weights: whether loss weights are multiplied by the HDF5 data set
        `loss_weights [rows, length]`, if the files contain it.
      example_weight_key: jsonl key or HDF5 data set `[rows]` (usually
        `example_weights`) that contains the weight of each example; None for equal
        weights.
      balance_key: jsonl key or HDF5 data set that contains the class of each example,
        `[rows]`, or in HDF5 of each token, `[rows, length]` (such as `category_ids`).
        Loss weights are scaled so that all classes have the same total weight over the
        files. None for no balancing.
      advantages_key: jsonl key or HDF5 data set that contains the advantage of each
        example, `[rows]`, or in HDF5 of each token, `[rows, length]`; required by
        `PolicyGradient`.
      columns: other columns of numbers that an objective reads, as in `advantages_key`:
        a dict of jsonl keys or HDF5 data sets by the name that the objective gives the
        column.
      format: format of the lines: "pairs" of a prompt and a completion, "messages",
        "sharegpt" or "alpaca"; see `prompt_tuning.data.text.conversations`. "auto"
        recognizes it by the keys of the first line.
      chat: whether the chat template of the tokenizer renders pairs too; it always
        renders messages, and tasks of the format alpaca if there is one.
      chat_template: file of another chat template, which renders pairs too.
      chat_date: date for a chat template that uses the current date: "2026-07-26".
      chat_template_kwargs: variables that the chat template reads, such as
        {"enable_thinking": False}; a conversation may set them itself.
      turns: "together" to learn all answers of a conversation in one example, "apart"
        to learn each in an example with the context that it has when it is answered,
        or "auto": together where each answer then has this context, else apart.
      prompt_key: jsonl key of the prompt; None if lines have no prompt.
      completion_key: jsonl key of the completion, which is learned.
      joiner: text inserted between prompt and completion.
      template: prompt of each example as a template of text, keys of the line and
        prompt vectors, such as "{soft:20} Review: {text} {soft:5} Mood:"; replaces
        `prompt_key`. Requires `Prompting.placement = 'template'`. The format is
        described in `prompt_tuning.data.text.templates`.
      prompt_id_key: jsonl key or HDF5 data set `[rows]` (usually `prompt_ids`) that
        selects each example's prompt in a multi-task prompt.
      prompt_id_names: names of the prompts in order, if jsonl lines contain names
        instead of numbers.
      prompt_id_aliases: other names of tasks and what they stand for, e.g.
        {"mnli_mismatched": "mnli"}.
      task_token: "index" or "sentinel" if the first token of each example (after the
        BOS that the tokenizer adds) selects its prompt, instead of `prompt_id_key`. The
        token is the prompt's number, or `<extra_id_k>` of T5 for prompt `k`, and is
        removed from the example.
      sentinel_vocabulary_size: one more than the id of `<extra_id_0>`: 32100 for T5;
        None for the size of the tokenizer's vocabulary.
      add_eos: whether the end-of-sequence token is appended to each completion and
        learned.
      on_too_long: "error" to reject examples that exceed the model's positions; "skip"
        to leave them out and count them; "truncate" or "truncate_left" to remove their
        beginning, so that a completion keeps its end; "truncate_right" to remove their
        end. See `Truncation`.
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
        """The key of each column that an objective reads, by the column's name."""
        columns = dict(self.columns or {})
        if self.advantages_key is not None:
            columns[ADVANTAGES] = self.advantages_key
        return columns
