"""A table of examples: rows that were checked once, and are read when asked for."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int64

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import Architecture
from prompt_tuning.data.examples.row_readers import (
    DecoderOnlyReading,
    EncoderDecoderReading,
    Example,
    Place,
    RowReader,
    Spans,
    join_spans,
)
from prompt_tuning.data.examples.segmentation import articles, whole_rows
from prompt_tuning.data.examples.text_prefix import PrecededReading
from prompt_tuning.data.rows.hdf5_table import INPUT_IDS, TOKEN_TYPE_IDS
from prompt_tuning.data.rows.jsonl import PairEncoder
from prompt_tuning.data.rows.row_sources import (
    Files,
    Hdf5Rows,
    JsonlRows,
    RowBlock,
    RowSource,
    Weigh,
    file_list,
)
from prompt_tuning.data.rows.tasks import Tasks, TaskToken
from prompt_tuning.data.rows.token_columns import TokenColumns
from prompt_tuning.data.text.templates import TokenTemplate
from prompt_tuning.data.text.tokenizers import Tokenizer, continued_pair, separate_pair

HDF5_SUFFIXES = (".hdf5", ".h5")
JSONL_SUFFIX = ".jsonl"
PAIR_ENCODERS: dict[Architecture, PairEncoder] = {
    "decoder_only": continued_pair,
    "encoder_decoder": separate_pair,
}


class Examples:
    """`E` examples that can be read in any order, by several threads.

    Attributes:
      rows: that they are read from.
      reading: how.
      spans: where they are.
      skipped: how many were left out because they were too long.
      has_prompt_ids: whether the data says which prompt each has.
      columns: names of the columns that it provides for an objective.
      uncounted: targets that would have weight, but are not measured because another
        model that is measured beside has nothing to predict them from.
    """

    uncounted = 0

    def __init__(
        self,
        rows: RowSource,
        reading: RowReader,
        spans: Spans,
        skipped: int = 0,
        *,
        has_prompt_ids: bool = False,
        columns: Collection[str] = (),
    ):
        self.rows = rows
        self.reading = reading
        self.spans = spans
        self.skipped = skipped
        self.has_prompt_ids = has_prompt_ids
        self.columns = tuple(columns)

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> Example:
        """Example `index`, read from its file if that is HDF5."""
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        row, start, stop = self.span(index)
        example = self.reading.example(*self.rows.part(row, slice(start, stop)))
        prompt_id = int(self.spans.prompt_ids[index])
        return dataclasses.replace(example, prompt_id=prompt_id)

    def span(self, index: int) -> tuple[int, int, int]:
        """The row of example `index`, its first token there, and one past its last."""
        where = self.spans.rows, self.spans.starts, self.spans.stops
        row, start, stop = (int(each[index]) for each in where)
        return row, start, stop

    @property
    def input_lengths(self) -> Int64[np.ndarray, "E"]:
        """Number of inputs of each example."""
        return self.spans.input_lengths

    @property
    def target_lengths(self) -> Int64[np.ndarray, "E"]:
        """Number of targets of each example."""
        return self.spans.target_lengths

    @property
    def weight_counts(self) -> Int64[np.ndarray, "E"]:
        """Number of targets of each example whose weight is not zero."""
        return self.spans.weight_counts


def load_examples(
    files: Files,
    *,
    architecture: Architecture,
    tokenizer: Tokenizer | None,
    vocabulary_size: int,
    maximum_length: int | None = None,
    predicts_first_token: bool = True,
    use_token_type_ids: bool = True,
    prompt_loss_weight: float = 0.0,
    separate_articles: bool = True,
    prompt_key: str | None = "prompt",
    completion_key: str = "completion",
    joiner: str = "",
    add_eos: bool = True,
    on_too_long: Literal["error", "skip"] = "error",
    maximum_examples: int | None = None,
    bos_id: int | None = None,
    eos_id: int | None = None,
    template: TokenTemplate | None = None,
    tasks: Tasks | None = None,
    given_before: Sequence[int] = (),
    columns: TokenColumns | None = None,
) -> Examples:
    """Opens data files of one kind, and checks every row of them once.

    Args:
      files: one file or several, `.hdf5` or `.h5`, or `.jsonl`.
      architecture: decides how a row becomes examples; see `DecoderOnlyReading` and
        `EncoderDecoderReading`.
      tokenizer: for `.jsonl`, and for the ids of BOS and EOS; may be None for HDF5.
      vocabulary_size: of the model; every id is below it, but those of a template's
        prompt vectors.
      maximum_length: of inputs and of targets: the model's positions minus the prompt's
        vectors, unless a template has these in the row; None if there is no end.
      predicts_first_token: whether a prompt vector stands before a decoder-only row.
      use_token_type_ids: whether the types decide the weights; see `token_weights`.
      prompt_loss_weight: weight of type 0 where they do.
      separate_articles: whether each article of a decoder-only row, closed by a
        separator (type 3), is an example of its own; else each row is one.
      prompt_key: of a `.jsonl` line; None where there is no given text.
      completion_key: of a `.jsonl` line.
      joiner: put before a `.jsonl` completion in a decoder-only model.
      add_eos: whether EOS closes a `.jsonl` row.
      on_too_long: "error", or "skip" to leave out and count what is too long.
      maximum_examples: keep only the first of them.
      bos_id: in place of the tokenizer's; never learned as a row's first token.
      eos_id: in place of the tokenizer's; closes the texts of an encoder-decoder.
      template: what is given, in place of the text under `prompt_key`.
      tasks: where the data says which prompt each example has; None if there is one.
      given_before: ids of a text that is put before what each example is given.
      columns: what else is read of the data; `loss_weights` alone if None.

    Raises:
      InputError: if a file or an argument cannot be used; the message says where.
    """
    if tokenizer is not None:
        bos_id = tokenizer.bos_id if bos_id is None else bos_id
        eos_id = tokenizer.eos_id if eos_id is None else eos_id
    of_text = _suffix(files) == JSONL_SUFFIX
    if tasks is not None and of_text and tokenizer is not None and tokenizer.add_bos:
        tasks = tasks.behind_bos()
    task_token = None if tasks is None else tasks.token
    if architecture == "encoder_decoder":
        _check_encoder_decoder(
            use_token_type_ids, prompt_loss_weight, separate_articles, joiner
        )
        reading = _encoder_decoder_reading(eos_id, bos_id, task_token)
    else:
        reading = DecoderOnlyReading(
            use_token_type_ids,
            prompt_loss_weight,
            predicts_first_token or bool(given_before),
            bos_id,
            task_token,
            soft_ids=None if template is None else vocabulary_size,
            cut=articles if separate_articles else whole_rows,
        )
    weigh = reading.weights
    if given_before:
        reading = PrecededReading(reading, tuple(given_before), bos_id)
    if not of_text:
        rows = _hdf5_rows(files, template, tasks, columns, weigh)
    elif tokenizer is None:
        raise InputError(f"{files} holds text: expected a tokenizer to encode it with")
    else:
        rows = JsonlRows(
            files,
            tokenizer,
            prompt_key=prompt_key,
            completion_key=completion_key,
            joiner=joiner,
            add_eos=add_eos,
            encode_pair=PAIR_ENCODERS[architecture],
            template=template,
            tasks=tasks,
            columns=columns,
        )
    ids = vocabulary_size + (0 if template is None else template.length)
    limits = Limits(ids, maximum_length, on_too_long, maximum_examples)
    spans, skipped = scan(rows, reading, limits, tasks)
    return Examples(
        rows,
        reading,
        spans,
        skipped,
        has_prompt_ids=tasks is not None,
        columns=() if columns is None else columns.columns,
    )


def _hdf5_rows(
    files: Files,
    template: TokenTemplate | None,
    tasks: Tasks | None,
    columns: TokenColumns | None,
    weigh: Weigh,
) -> Hdf5Rows:
    if template is not None:
        raise InputError(
            f"DataSource.template is set, but {files} holds token ids, not texts to "
            "fill it with: use jsonl files, or leave the template out"
        )
    if tasks is not None and tasks.names is not None:
        raise InputError(
            f"prompt_id_names are {list(tasks.names)}, but {files} numbers its tasks: "
            "leave the names out"
        )
    prompt_ids = None if tasks is None else tasks.key
    return Hdf5Rows(files, prompt_ids=prompt_ids, columns=columns, weigh=weigh)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What rows are held against; the fields are arguments of `load_examples`.

    Raises:
      InputError: if a limit makes no sense.
    """

    vocabulary_size: int
    maximum_length: int | None = None
    on_too_long: str = "error"
    maximum_examples: int | None = None

    def __post_init__(self):
        if self.on_too_long not in ("error", "skip"):
            raise InputError(
                f"on_too_long is {self.on_too_long!r}, expected 'error' or 'skip'"
            )
        for name in ("vocabulary_size", "maximum_length", "maximum_examples"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise InputError(f"{name} is {limit}, expected 1 or more")


def scan(
    rows: RowSource, reading: RowReader, limits: Limits, tasks: Tasks | None = None
) -> tuple[Spans, int]:
    """Checks rows in order, until there are examples enough.

    Returns:
      The examples, and how many were skipped because they were too long.

    Raises:
      InputError: at the first row that cannot be used.
    """
    parts, kept, skipped = [], 0, 0
    for block in rows.blocks():
        _check_values(block, limits.vocabulary_size, rows.place)
        spans = reading.scan(block, rows.place)
        if tasks is not None:
            spans = _with_tasks(spans, block, tasks, rows.place)
        short = _short_enough(spans, limits, rows.place)
        parts.append(spans.select(short))
        kept += len(parts[-1])
        skipped += len(spans) - len(parts[-1])
        if limits.maximum_examples is not None and kept >= limits.maximum_examples:
            break
    if not kept:
        raise InputError(
            f"{rows.place(0)}, and all {len(rows)} rows: longer than the "
            f"{limits.maximum_length} tokens there is room for; none is left"
        )
    return join_spans(parts).select(slice(limits.maximum_examples)), skipped


def _with_tasks(spans: Spans, block: RowBlock, tasks: Tasks, place: Place) -> Spans:
    """The spans with their rows' tasks, where the data has a column of them.

    Raises:
      InputError: at the first task that there is no prompt for.
    """
    found = spans.prompt_ids
    if block.prompt_ids is not None:
        found = block.prompt_ids[spans.rows - block.start].astype(np.int64)
    outside = (found < 0) | (found >= tasks.count)
    if outside.any():
        first = int(np.argmax(outside))
        where = place(int(spans.rows[first]))
        raise InputError(f"{where}: {tasks.explain(int(found[first]))}")
    return dataclasses.replace(spans, prompt_ids=found)


def _check_values(block: RowBlock, vocabulary_size: int, place: Place) -> None:
    checked = [(INPUT_IDS, block.input_ids, vocabulary_size, "the vocabulary")]
    if block.token_types is not None:
        checked.append((TOKEN_TYPE_IDS, block.token_types, 4, "the four token types"))
    for name, values, end, what in checked:
        outside = (values < 0) | (values >= end)
        if outside.any():
            row, token = np.argwhere(outside)[0]
            raise InputError(
                f"{place(block.start + int(row))}, token {token}: {name} is "
                f"{values[row, token]}, expected 0 to {end - 1} ({what}); was the data "
                "made for this model?"
            )


def _short_enough(spans: Spans, limits: Limits, place: Place) -> Bool[np.ndarray, "E"]:
    lengths = np.maximum(spans.input_lengths, spans.target_lengths)
    if limits.maximum_length is None:
        return np.ones(len(spans), bool)
    short = lengths <= limits.maximum_length
    if limits.on_too_long == "error" and not short.all():
        first = int(np.argmin(short))
        raise InputError(
            f"{place(int(spans.rows[first]))}: {lengths[first]} tokens, expected at "
            f"most {limits.maximum_length} (the model's positions minus the prompt's "
            'vectors); shorten it, or set on_too_long="skip" to leave such rows out'
        )
    return short


def _check_encoder_decoder(
    use_token_type_ids: bool,
    prompt_loss_weight: float,
    separate_articles: bool,
    joiner: str,
) -> None:
    """Refuses the arguments that mean something in decoder-only models alone."""
    if not use_token_type_ids:
        raise InputError(
            "use_token_type_ids is False, but an encoder-decoder model needs the types "
            "to tell its input from its target: set it to True"
        )
    if prompt_loss_weight:
        raise InputError(
            f"prompt_loss_weight is {prompt_loss_weight}, but the prompt tokens of an "
            "encoder-decoder model are never predicted: set it to 0"
        )
    if not separate_articles:
        raise InputError(
            "separate_articles is False, but an encoder-decoder model reads each turn "
            "of a row apart, whichever article it is of: leave it out"
        )
    if joiner:
        raise InputError(
            f"joiner is {joiner!r}, but prompt and completion of an encoder-decoder "
            "model are two texts: set it to the empty string"
        )


def _encoder_decoder_reading(
    eos_id: int | None, bos_id: int | None, task_token: TaskToken | None
) -> EncoderDecoderReading:
    if eos_id is None:
        raise InputError(
            "an encoder-decoder model closes its texts with EOS, and neither the "
            "tokenizer nor eos_id says which id that is: pass eos_id"
        )
    return EncoderDecoderReading(eos_id, bos_id, task_token)


def _suffix(files: Files) -> str:
    """The kind that all files have."""
    paths = file_list(files)
    kinds = {"hdf5" if p.suffix in HDF5_SUFFIXES else p.suffix for p in paths}
    if kinds not in ({"hdf5"}, {JSONL_SUFFIX}):
        raise InputError(
            f"data files {[str(path) for path in paths]}: expected all to end in "
            f".hdf5 or .h5, or all in {JSONL_SUFFIX}"
        )
    return kinds.pop()
