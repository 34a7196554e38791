"""Reads a `DataSource` for a model: its files, their format, tasks and template."""

from pathlib import Path

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.model_interface import ModelInterface
from prompt_tuning.data.rows.data_files import contains_text, list_files
from prompt_tuning.data.rows.line_formats import FormatChoice, first_record, format_of
from prompt_tuning.data.rows.tasks import PROMPT_IDS, Tasks, TaskToken
from prompt_tuning.data.rows.token_columns import TokenColumns
from prompt_tuning.data.text.templates import TokenTemplate, parse_template
from prompt_tuning.settings.data_source import DataSource

WORD_ENDS = ".!?,;)]}\"'\u201d\u2019\u00bb\u2026"
"""Marks that end a word, and are usually followed by a space."""


def check_source(source: DataSource, model: ModelInterface) -> None:
    """Refuses settings that contradict the model or each other."""
    _check_packing(source)
    if source.use_token_type_ids is False and source.prompt_loss_weight:
        raise InputError(
            f"prompt_loss_weight is {source.prompt_loss_weight}, but "
            "use_token_type_ids is False, so every token is learned with weight 1: "
            "leave one of them out"
        )
    if model.labels and source.prompt_loss_weight:
        raise InputError(
            f"prompt_loss_weight is {source.prompt_loss_weight}, but the class head of "
            "the model predicts no prompt tokens: give "
            f"{how_to_set('DataSource.prompt_loss_weight', 0.0)}"
        )
    if model.architecture == "encoder_decoder":
        _check_encoder_decoder(source)
    if model.placement == "after_bos":
        model.check_single_begin("a prompt (Prompting.placement = 'after_bos')")
    if model.prefix_attention and (
        source.prompt_loss_weight > 0 or source.use_token_type_ids is False
    ):
        raise InputError(
            "Prompting.prefix_attention lets prompt tokens attend to each other, "
            "and this data asks to learn them: each would see its own target. Give "
            f"{how_to_set('DataSource.use_token_type_ids', True)} "
            f"{how_to_set('DataSource.prompt_loss_weight', 0.0)}"
        )


def _check_packing(source: DataSource) -> None:
    if source.packed_length is not None and not source.packing:
        raise InputError(
            f"packed_length is {source.packed_length}, but rows are not packed: give "
            f"{how_to_set('DataSource.packing', True)} as well, or leave it out"
        )


def _check_encoder_decoder(source: DataSource) -> None:
    """Refuses settings that only decoder-only models support."""
    if source.use_token_type_ids is False:
        raise InputError(
            "use_token_type_ids is False, but an encoder-decoder model needs the "
            "types to tell its input from its target: give "
            f"{how_to_set('DataSource.use_token_type_ids', True)}"
        )
    if source.prompt_loss_weight:
        raise InputError(
            f"prompt_loss_weight is {source.prompt_loss_weight}, but an "
            "encoder-decoder model never predicts prompt tokens: give "
            f"{how_to_set('DataSource.prompt_loss_weight', 0.0)}"
        )
    if not source.separate_articles:
        raise InputError(
            "separate_articles is False, but an encoder-decoder model reads each "
            "turn of a row as a separate example: leave it out"
        )
    if source.joiner:
        raise InputError(
            f"joiner is {shown(source.joiner)}, but prompt and completion of an "
            "encoder-decoder model are two texts: set it to the empty string"
        )


def files_of(source: DataSource) -> list[Path]:
    """Returns the files that `DataSource.files` stands for."""
    return list_files(source.files, source.split or "train")


def reads_text(source: DataSource) -> bool:
    """Tests whether the files contain text, or else HDF5 rows of token ids."""
    return contains_text(files_of(source))


def has_pairs(source: DataSource) -> bool:
    """Tests whether rows are pairs of texts under the keys that the settings name."""
    if not reads_text(source) or FormatChoice.of(source).renders_pairs:
        return False
    if source.template is not None:
        return True
    keys = source.prompt_key, source.completion_key
    first = first_record(files_of(source)[0])
    return format_of(first, source.format, *keys) == ("pairs", False)


def joined_words(source: DataSource) -> str | None:
    """Returns words of the first record that touch where its two texts are joined.

    For example "bad.negative", because a mark that ends a word counts as its letters.
    None if the texts are separated, or are not a pair.
    """
    if source.joiner or source.template is not None or not has_pairs(source):
        return None
    record = first_record(files_of(source)[0])
    keys = (source.prompt_key or "", source.completion_key)
    prompt, completion = (str(record.get(key, "")) for key in keys)
    last, first = prompt[-1:], completion[:1]
    if first.isalnum() and (last.isalnum() or (last and last in WORD_ENDS)):
        return prompt.split()[-1] + completion.split()[0]
    return None


def token_columns(source: DataSource) -> TokenColumns:
    """Returns the columns to read in addition to ids and types."""
    return TokenColumns(
        source.use_loss_weights,
        source.example_weight_key,
        source.balance_key,
        source.objective_columns,
    )


def row_keys(source: DataSource) -> frozenset[str]:
    """Returns the keys of a line that are read, except for its texts."""
    keys = [key for key, _ in token_columns(source).keys.values()]
    return frozenset(key for key in (*keys, source.prompt_id_key) if key is not None)


def token_template(source: DataSource, model: ModelInterface) -> TokenTemplate | None:
    """Returns the template as token ids of the model; None if none is set.

    The soft parts are removed for a model without a prompt.
    """
    if (source.template is None) == (model.placement == "template"):
        state = "None" if source.template is None else "set"
        raise InputError(
            f"DataSource.template is {state} and Prompting.placement is "
            f"{shown(model.placement)}: a template determines where the prompt "
            "vectors stand, so set both "
            f"({how_to_set('DataSource.template', 'TEXT')} does), or neither"
        )
    if source.template is None:
        return None
    if source.task_token is not None:
        raise InputError(
            "DataSource.task_token is set, but every example begins with the "
            "template: select the task by "
            f"{how_to_set('DataSource.prompt_id_key', 'KEY')}"
        )
    parsed = parse_template(source.template)
    template = TokenTemplate(
        parsed if model.prompt_length else parsed.without_soft(),
        model.require_tokenizer(),
        model.vocabulary_size,
        separate=model.architecture == "encoder_decoder",
    )
    template.check_length(model.prompt_length)
    return template


def tasks_of(source: DataSource, model: ModelInterface) -> Tasks | None:
    """Returns how each example selects its prompt; None if the model has one prompt.

    The data must select a prompt if the model has more than one, and must not
    otherwise.
    """
    by_token = source.task_token is not None
    selects = by_token or source.prompt_id_key is not None
    if model.prompt_count == 1:
        if selects:
            name = "task_token" if by_token else "prompt_id_key"
            raise InputError(
                f"DataSource.{name} is {shown(getattr(source, name))}, but the model "
                "has one prompt for all tasks: leave it out, or use a multi-task prompt"
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
    token = TaskToken(_sentinel_end(source, model)) if by_token else None
    return Tasks(
        model.prompt_count,
        source.prompt_id_key,
        source.prompt_id_names,
        token,
        source.prompt_id_aliases or {},
    )


def _sentinel_end(source: DataSource, model: ModelInterface) -> int | None:
    """Returns one more than the id of task 0's sentinel; None for "index"."""
    if source.task_token == "index":
        return None
    if source.sentinel_vocabulary_size is not None:
        return source.sentinel_vocabulary_size
    return model.require_tokenizer().vocabulary_size
