"""Opens the files of a data source as a table of examples."""

import dataclasses
from collections.abc import Mapping, Sequence

from prompt_tuning.core.batch import value_columns
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_choices import WITH_VALUES, Architecture
from prompt_tuning.core.setting_hints import NUMBER, how_to_set
from prompt_tuning.data import source_reading
from prompt_tuning.data.examples.class_reader import (
    ClassRowReader,
    ClassValueEdit,
    TaggedRowReader,
)
from prompt_tuning.data.examples.context_column import ContextColumn
from prompt_tuning.data.examples.context_reader import ContextRowReader
from prompt_tuning.data.examples.decoder_only_reader import DecoderOnlyRowReader
from prompt_tuning.data.examples.encoder_decoder_reader import EncoderDecoderRowReader
from prompt_tuning.data.examples.example_table import Examples, scan_rows
from prompt_tuning.data.examples.truncation import truncation_of
from prompt_tuning.data.model_interface import ModelInterface
from prompt_tuning.data.rows import line_formats, token_columns
from prompt_tuning.data.rows.hdf5_rows import Hdf5Rows
from prompt_tuning.data.rows.jsonl import LineEncoder, PairEncoder
from prompt_tuning.data.rows.jsonl_rows import JsonlRows, RecordEdit, edited_records
from prompt_tuning.data.rows.row_sources import BlockWeights, RowSource
from prompt_tuning.data.rows.tasks import Tasks
from prompt_tuning.data.rows.word_rows import WordEncoder
from prompt_tuning.data.text.templates import TokenTemplate
from prompt_tuning.data.text.tokenizers import Tokenizer, continued_pair, separate_pair
from prompt_tuning.settings.data_source import DataSource

PAIR_ENCODERS: dict[Architecture, PairEncoder] = {
    "decoder_only": continued_pair,
    "encoder_decoder": separate_pair,
}
CLASS_READERS = {"tokens": TaggedRowReader}
"""Readers of problems whose examples do not each have one class."""


def load_examples(
    source: DataSource,
    model: ModelInterface,
    *,
    context_ids: Sequence[int] = (),
    edit: RecordEdit | None = None,
    contexts: ContextColumn | None = None,
) -> Examples:
    """Opens the files of a data source, and checks every row once.

    Args:
      source: the files and how they are read.
      model: properties of the model that reads them.
      context_ids: token ids of a text to insert before the prompt of every example.
      edit: changes a record of a text file before it is encoded.
      contexts: column of the text that a teacher reads before an example.

    Raises:
      InputError: if a setting, a file or a row cannot be used with this model; the
        message gives its location.
    """
    if contexts is not None:
        columns = {**(source.columns or {}), token_columns.CONTEXTS: contexts.key}
        source, edit = dataclasses.replace(source, columns=columns), contexts.edit
    source_reading.check_source(source, model)
    edit, columns = _with_values(source, model, edit)
    template = source_reading.token_template(source, model)
    tasks = source_reading.tasks_of(source, model)
    is_text = source_reading.reads_text(source)
    if tasks is not None and is_text and model.tokenizer is not None:
        tasks = tasks.after(len(model.tokenizer.begin_ids))
    reader = _row_reader(source, model, tasks, bool(context_ids))
    if is_text:
        rows = _open_text(source, model, template, tasks, edit, columns)
    else:
        rows = _open_hdf5(source, template, tasks, reader.weights)
    if context_ids:
        reader = ContextRowReader(reader, tuple(context_ids), model.begin_ids)
    if model.labels:
        _check_pooling(source, model)
        reader = CLASS_READERS.get(model.problem, ClassRowReader)(reader, model)
    truncation = truncation_of(
        source, model, same_tokens=reader.same_tokens, inserted=len(context_ids)
    )
    scanned = scan_rows(
        rows,
        reader,
        source,
        model,
        soft_ids=0 if template is None else template.length,
        tasks=tasks,
        truncation=truncation,
    )
    if contexts is not None:
        contexts.check(rows)
    return Examples(
        rows,
        reader,
        **scanned._asdict(),
        has_prompt_ids=tasks is not None,
        columns=columns,
        truncation=truncation,
        contexts=contexts,
    )


def _check_pooling(source: DataSource, model: ModelInterface) -> None:
    """Refuses packed rows whose examples are pooled."""
    if model.pooling != "last" and source.packing:
        raise InputError(
            f"ClassHead.pooling is {model.pooling!r}, but DataSource.packing puts "
            "several examples into a row: set packing to False, or pooling to 'last'"
        )


def _with_values(
    source: DataSource, model: ModelInterface, edit: RecordEdit | None
) -> tuple[RecordEdit | None, dict[str, str]]:
    """Returns an edit of records that adds the values of classes, and all columns."""
    columns = source.objective_columns
    if not model.labels or model.problem not in WITH_VALUES:
        return edit, columns
    if not source_reading.reads_text(source):
        raise InputError(
            f"{source.files} contains token ids, but ClassHead.problem is "
            f"{model.problem!r}, whose values are read from text: use jsonl files"
        )
    values = ClassValueEdit(source.completion_key, model.labels, model.problem)
    columns |= {name: name for name in value_columns(len(model.labels))}
    return values if edit is None else lambda record: values(edit(record)), columns


def _row_reader(
    source: DataSource,
    model: ModelInterface,
    tasks: Tasks | None,
    follows_text: bool,
) -> DecoderOnlyRowReader | EncoderDecoderRowReader:
    """Returns the reader of rows; `follows_text` if a text is inserted before each."""
    task_token = tasks and tasks.token
    if model.architecture == "decoder_only":
        return DecoderOnlyRowReader(
            source,
            model.vocabulary_size,
            next(iter(model.begin_ids), -1),
            model.predicts_first_token or follows_text,
            task_token,
        )
    if model.eos_id is None:
        raise InputError(
            "an encoder-decoder model ends its texts with EOS, and neither the "
            "tokenizer nor the model's config defines its id: give it by "
            f"{how_to_set('Pretrained.eos_id', NUMBER)}"
        )
    skips = source.on_nothing_learned == "skip"
    return EncoderDecoderRowReader(model.eos_id, model, task_token, skips)


def _open_text(
    source: DataSource,
    model: ModelInterface,
    template: TokenTemplate | None,
    tasks: Tasks | None,
    edit: RecordEdit | None,
    columns: Mapping[str, str],
) -> RowSource:
    paths = source_reading.files_of(source)
    try:
        tokenizer = model.require_tokenizer()
    except InputError as error:
        raise InputError(
            f"{paths[0]} contains text, which a tokenizer encodes: {error}"
        ) from error
    pairs = LineEncoder(
        tokenizer,
        source.prompt_key,
        source.completion_key,
        source.joiner,
        PAIR_ENCODERS[model.architecture],
        template,
        source_reading.row_keys(source),
    )
    if model.problem == "tokens":
        encoder, add_eos = _word_encoder(source, tokenizer, model.labels), False
    else:
        first = next((x.content for x in edited_records(paths[0], edit)), {})
        encoder = line_formats.choose_encoder(
            paths[0], first, line_formats.FormatChoice.of(source), pairs
        )
        add_eos = source.add_eos
    if isinstance(encoder, line_formats.ConversationEncoder):
        _check_conversations(source)
    return JsonlRows(
        paths,
        encoder,
        add_eos=add_eos,
        tasks=tasks,
        columns=dataclasses.replace(
            source_reading.token_columns(source), columns=columns
        ),
        edit=edit,
    )


def _word_encoder(
    source: DataSource, tokenizer: Tokenizer, labels: Sequence[str]
) -> WordEncoder:
    """Returns the encoder of tagged words."""
    unread = {"template": None, "task_token": None, "format": "auto"}
    for name, default in {**unread, "chat": False, "joiner": ""}.items():
        if getattr(source, name) != default:
            raise InputError(
                f"DataSource.{name} is set, but each word of a row has a tag "
                "(ClassHead.problem is 'tokens'): leave it out"
            )
    return WordEncoder(tokenizer, labels, source.prompt_key, source.completion_key)


def _check_conversations(source: DataSource) -> None:
    """Refuses settings that do not apply to conversations."""
    if source.task_token is not None:
        raise InputError(
            "DataSource.task_token is set, but a chat template begins each row: select "
            f"the task by {how_to_set('DataSource.prompt_id_key', 'KEY')}"
        )
    if not source.add_eos:
        raise InputError(
            "DataSource.add_eos is False, but a conversation ends as its chat template "
            "ends it, or with EOS: leave it out"
        )


def _open_hdf5(
    source: DataSource,
    template: TokenTemplate | None,
    tasks: Tasks | None,
    weights: BlockWeights,
) -> RowSource:
    if template is not None:
        raise InputError(
            f"DataSource.template is set, but {source.files} contains token ids, not "
            "text to insert into it: use jsonl files, or leave the template out"
        )
    if tasks is not None and tasks.names is not None:
        raise InputError(
            f"prompt_id_names are {list(tasks.names)}, but {source.files} numbers its "
            "tasks: leave the names out"
        )
    return Hdf5Rows(
        source_reading.files_of(source),
        prompt_ids=None if tasks is None else tasks.key,
        columns=source_reading.token_columns(source),
        weights=weights,
    )
