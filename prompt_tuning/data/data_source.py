"""The settings of a data set: its files, and how these are read and batched."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
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
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.examples.truncation import TooLong
from prompt_tuning.data.model_interface import ModelInterface
from prompt_tuning.data.rows.data_files import contains_text, list_files
from prompt_tuning.data.rows.line_formats import (
    FormatChoice,
    LineFormat,
    first_record,
    format_of,
)
from prompt_tuning.data.rows.tasks import PROMPT_IDS, Tasks, TaskToken
from prompt_tuning.data.rows.token_columns import ADVANTAGES, TokenColumns
from prompt_tuning.data.text.learned_answers import Turns
from prompt_tuning.data.text.templates import TokenTemplate, parse_template

WORD_ENDS = ".!?,;)]}\"'\u201d\u2019\u00bb\u2026"
"""Marks that end a word, and are usually followed by a space."""


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
    task_token: str | None = None
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

    def check(self, model: ModelInterface) -> None:
        """Checks that the settings fit the model and each other.

        Raises:
          InputError: if a setting contradicts the model or another setting.
        """
        self._check_packing()
        if self.use_token_type_ids is False and self.prompt_loss_weight:
            raise InputError(
                f"prompt_loss_weight is {self.prompt_loss_weight}, but "
                "use_token_type_ids is False, so every token is learned with weight 1: "
                "leave one of them out"
            )
        if model.architecture == "encoder_decoder":
            self._check_encoder_decoder()
        if model.placement == "after_bos":
            model.check_single_begin("a prompt (Prompting.placement = 'after_bos')")
        if model.prefix_attention and (
            self.prompt_loss_weight > 0 or self.use_token_type_ids is False
        ):
            raise InputError(
                "Prompting.prefix_attention lets prompt tokens attend to each other, "
                "and this data asks to learn them: each would see its own target. Give "
                f"{how_to_set('DataSource.use_token_type_ids', True)} "
                f"{how_to_set('DataSource.prompt_loss_weight', 0.0)}"
            )

    def _check_packing(self) -> None:
        if self.packed_length is not None and not self.packing:
            raise InputError(
                f"packed_length is {self.packed_length}, but rows are not packed: give "
                f"{how_to_set('DataSource.packing', True)} as well, or leave it out"
            )

    def _check_encoder_decoder(self) -> None:
        """Rejects settings that only decoder-only models support."""
        if self.use_token_type_ids is False:
            raise InputError(
                "use_token_type_ids is False, but an encoder-decoder model needs the "
                "types to tell its input from its target: give "
                f"{how_to_set('DataSource.use_token_type_ids', True)}"
            )
        if self.prompt_loss_weight:
            raise InputError(
                f"prompt_loss_weight is {self.prompt_loss_weight}, but an "
                "encoder-decoder model never predicts prompt tokens: give "
                f"{how_to_set('DataSource.prompt_loss_weight', 0.0)}"
            )
        if not self.separate_articles:
            raise InputError(
                "separate_articles is False, but an encoder-decoder model reads each "
                "turn of a row as a separate example: leave it out"
            )
        if self.joiner:
            raise InputError(
                f"joiner is {shown(self.joiner)}, but prompt and completion of an "
                "encoder-decoder model are two texts: set it to the empty string"
            )

    @property
    def paths(self) -> list[Path]:
        """The files that `files` stands for.

        Raises:
          InputError: if one is missing, or a glob or a folder contains none.
        """
        return list_files(self.files, self.split or "train")

    @property
    def is_text(self) -> bool:
        """Whether the files contain text, or else HDF5 rows of token ids.

        Raises:
          InputError: as `paths`, or if they are not of one kind.
        """
        return contains_text(self.paths)

    @property
    def has_pairs(self) -> bool:
        """Whether rows are pairs of texts under keys that `prompt_key` and others name.

        Raises:
          InputError: as `is_text`, or if the first line cannot be read.
        """
        if not self.is_text or self.format_choice.renders_pairs:
            return False
        if self.template is not None:
            return True
        keys = self.prompt_key, self.completion_key
        first = first_record(self.paths[0])
        return format_of(first, self.format, *keys) == ("pairs", False)

    @property
    def joined_words(self) -> str | None:
        """Words of the first record that touch where its two texts are joined.

        Marks that end a word count as its letters, as in "bad.negative". None if the
        texts are separated, or are not a pair.
        """
        if self.joiner or self.template is not None or not self.has_pairs:
            return None
        record = first_record(self.paths[0])
        keys = (self.prompt_key or "", self.completion_key)
        prompt, completion = (str(record.get(key, "")) for key in keys)
        last, first = prompt[-1:], completion[:1]
        if first.isalnum() and (last.isalnum() or (last and last in WORD_ENDS)):
            return prompt.split()[-1] + completion.split()[0]
        return None

    @property
    def format_choice(self) -> FormatChoice:
        """How lines become conversations."""
        return FormatChoice.of(self)

    @property
    def objective_columns(self) -> dict[str, str]:
        """The key of each column that an objective reads, by the column's name."""
        columns = dict(self.columns or {})
        if self.advantages_key is not None:
            columns[ADVANTAGES] = self.advantages_key
        return columns

    def token_columns(self) -> TokenColumns:
        """Returns the columns to read besides ids and types."""
        return TokenColumns(
            self.use_loss_weights,
            self.example_weight_key,
            self.balance_key,
            self.objective_columns,
        )

    @property
    def row_keys(self) -> frozenset[str]:
        """The keys of a line that are read besides its texts."""
        keys = [key for key, _ in self.token_columns().keys.values()]
        return frozenset(key for key in (*keys, self.prompt_id_key) if key is not None)

    def token_template(self, model: ModelInterface) -> TokenTemplate | None:
        """Returns the template as token ids of the model; None if none is set.

        The soft parts are removed for a model without a prompt.

        Raises:
          InputError: if the template cannot be parsed, or does not fit the model's
            prompt.
        """
        if (self.template is None) == (model.placement == "template"):
            state = "None" if self.template is None else "set"
            raise InputError(
                f"DataSource.template is {state} and Prompting.placement is "
                f"{shown(model.placement)}: a template determines where the prompt "
                "vectors "
                "stand, so set both (--template or data/template.gin does), or neither"
            )
        if self.template is None:
            return None
        if self.task_token is not None:
            raise InputError(
                "DataSource.task_token is set, but every example begins with the "
                "template: select the task by "
                f"{how_to_set('DataSource.prompt_id_key', 'KEY')}"
            )
        parsed = parse_template(self.template)
        template = TokenTemplate(
            parsed if model.prompt_length else parsed.without_soft(),
            model.require_tokenizer(),
            model.vocabulary_size,
            separate=model.architecture == "encoder_decoder",
        )
        template.check_length(model.prompt_length)
        return template

    def tasks(self, model: ModelInterface) -> Tasks | None:
        """Returns how each example selects its prompt; None if the model has one.

        Raises:
          InputError: if the data selects no prompt where the model has several, or
            selects one where it has not.
        """
        by_token = self.task_token is not None
        selects = by_token or self.prompt_id_key is not None
        if model.prompt_count == 1:
            if selects:
                name = "task_token" if by_token else "prompt_id_key"
                raise InputError(
                    f"DataSource.{name} is {shown(getattr(self, name))}, but the model "
                    "has "
                    "one prompt for all tasks: leave it out, or use a multi-task prompt"
                )
            return None
        if not selects:
            raise InputError(
                f"the model has {model.prompt_count} prompts, and the data does not "
                "select one for each example: name the jsonl key or HDF5 data set "
                f"({PROMPT_IDS!r}) by {how_to_set('DataSource.prompt_id_key', 'KEY')}; "
                "or let the first token select it by "
                f"{how_to_set('DataSource.task_token', 'index')}"
            )
        token = TaskToken(self._sentinel_end(model)) if by_token else None
        return Tasks(
            model.prompt_count,
            self.prompt_id_key,
            self.prompt_id_names,
            token,
            self.prompt_id_aliases or {},
        )

    def _sentinel_end(self, model: ModelInterface) -> int | None:
        """Returns one more than the id of task 0's sentinel; None for "index"."""
        if self.task_token not in ("index", "sentinel"):
            raise InputError(
                f"DataSource.task_token is {shown(self.task_token)}, expected 'index' "
                "or 'sentinel'"
            )
        if self.task_token == "index":
            return None
        if self.sentinel_vocabulary_size is not None:
            return self.sentinel_vocabulary_size
        return model.require_tokenizer().vocabulary_size
