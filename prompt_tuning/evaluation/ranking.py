"""Rank classification: the answer is the label that the model finds most likely."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from prompt_tuning.core.batch import LabelBatch
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.batching.plan_batches import group_by_length
from prompt_tuning.data.examples.class_examples import ClassExamples, prompt_part
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.examples.row_readers import Example
from prompt_tuning.data.text.tokenizers import SPACE_MARKS
from prompt_tuning.decoding import row_checks, row_encoding
from prompt_tuning.evaluation.batch_scores import BatchFunction, score_batches
from prompt_tuning.models.scoring import class_nll, label_nll
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.settings.data_source import DataSource


def label_nats(
    model: PromptedModel,
    parameters: Parameters,
    given: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]],
    *,
    add_eos: bool,
    length_normalize: bool = False,
    batch_size: int = 64,
    prompt_ids: Sequence[int] | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> Float[np.ndarray, "n C"]:
    """Computes the cost in nats of each label for each example; the lowest wins.

    `add_eos` counts the end-of-sequence token, which distinguishes a label from a
    longer one that starts with it. `length_normalize` takes the mean over a label's
    tokens instead of the sum. See `candidate_nats` for batches.
    """
    labels = add_end(labels, model, add_eos)
    nats = candidate_nats(
        model,
        parameters,
        given,
        [labels] * len(given),
        batch_size=batch_size,
        prompt_ids=prompt_ids,
        on_batch=on_batch,
    )
    lengths = [len(label) for label in labels] if length_normalize else 1
    return nats / np.array(lengths)


def candidate_nats(
    model: PromptedModel,
    parameters: Parameters,
    given: Sequence[Sequence[int]],
    candidates: Sequence[Sequence[Sequence[int]]],
    *,
    batch_size: int,
    prompt_ids: Sequence[int] | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> Float[np.ndarray, "n C"]:
    """Computes the summed cost in nats of each candidate of each example.

    Each input is read once, and its candidates attend to it. Candidates include their
    end tokens. A batch has fewer than `batch_size` examples if all their candidates
    would take more tokens than `batch_size` rows with one candidate each. `on_batch` is
    called with its number of candidates.
    """
    nats = np.zeros((len(given), len(candidates[0]) if given else 0))
    scored = score_candidates(
        label_nll,
        model,
        parameters,
        given,
        candidates,
        batch_size=batch_size,
        prompt_ids=prompt_ids,
    )
    return _in_order(scored, nats, on_batch)


def class_nats(
    model: PromptedModel,
    parameters: Parameters,
    given: Sequence[Sequence[int]],
    *,
    batch_size: int,
    prompt_ids: Sequence[int] | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> Float[np.ndarray, "n C"]:
    """Computes the cost in nats of each class of a class head for each example.

    Arguments and errors are as in `label_nats`.
    """
    nats = np.zeros((len(given), len(model.config.labels)))
    unread = [[[0]]] * len(given)
    given = [model.interface.scored_row(row) for row in given]
    scored = score_candidates(
        class_nll,
        model,
        parameters,
        given,
        unread,
        batch_size=batch_size,
        prompt_ids=prompt_ids,
    )
    return _in_order(scored, nats, on_batch)


def _in_order(
    scored: Iterator[tuple[Sequence[int], np.ndarray]],
    nats: Float[np.ndarray, "n C"],
    on_batch: Callable[[int], None] | None,
) -> Float[np.ndarray, "n C"]:
    """Stores the costs of each batch at the indices of its examples."""
    for numbers, batch_nats in scored:
        nats[numbers] = batch_nats
        if on_batch is not None:
            on_batch(batch_nats.size)
    return nats


def score_candidates(
    function: BatchFunction[Any],
    model: PromptedModel,
    parameters: Parameters,
    given: Sequence[Sequence[int]],
    candidates: Sequence[Sequence[Sequence[int]]],
    *,
    batch_size: int,
    prompt_ids: Sequence[int] | None = None,
) -> Iterator[tuple[Sequence[int], np.ndarray]]:
    """Yields a function's results for batches of examples with their candidates.

    `function` takes a `LabelBatch`, and its result has the batch's rows as first axis.
    The other arguments are as in `candidate_nats`.

    Yields:
      the indices of each batch's examples, and the function's result for them.
    """
    row_checks.check_prompt_ids(model, prompt_ids, len(given))
    if not given:
        return
    count = len(candidates[0])
    width = max(len(each) for row in candidates for each in row)
    lengths = [max(len(row), 1) for row in given]
    longest = max(lengths)
    tokens = batch_size * (longest + width)
    groups = group_by_length(
        lengths,
        batch_size=max(1, min(batch_size, tokens // (longest + count * width))),
        maximum_length=model.maximum_length,
        row_parts=model.interface.rows.parts,
    )
    batches = (
        _label_batch(
            [given[number] for number in group.repeated],
            [candidates[number] for number in group.repeated],
            None if prompt_ids is None else [prompt_ids[i] for i in group.repeated],
            shape=(group.length, width),
            pad_id=model.config.pad_id,
        )
        for group in groups
    )
    scored = score_batches(function, model, parameters, batches)
    for group, (_, scores) in zip(groups, scored, strict=True):
        yield group.real, scores[: len(group.real)]


def _label_batch(
    rows: Sequence[Sequence[int]],
    candidates: Sequence[Sequence[Sequence[int]]],
    prompt_ids: Sequence[int] | None,
    *,
    shape: tuple[int, int],
    pad_id: int,
) -> LabelBatch:
    """Pads inputs and their candidates to `shape`, the two lengths."""
    tokens, lengths = row_encoding.pad_rows(rows, pad_id, shape[0])
    flat = [candidate for row in candidates for candidate in row]
    labels, label_lengths = row_encoding.pad_rows(flat, pad_id, shape[1])
    return LabelBatch(
        tokens,
        lengths,
        labels.reshape(len(rows), -1, shape[1]),
        label_lengths.reshape(len(rows), -1),
        None if prompt_ids is None else np.array(prompt_ids, np.int32),
    )


def add_end(
    labels: Sequence[Sequence[int]], model: PromptedModel, add_eos: bool
) -> list[list[int]]:
    """Appends the end-of-sequence token to each label if `add_eos`."""
    end = [model.eos_id] if add_eos and model.eos_id is not None else []
    return [[*label, *end] for label in labels]


def build_candidates(
    model: PromptedModel,
    data: DataSource,
    examples: Examples,
    labels: Sequence[str],
    *,
    share: bool,
) -> ClassExamples:
    """Combines every example with each label.

    `share` tells whether the model can read an example once for all labels.

    Raises:
      InputError: if a label has no tokens, an example's completion is not a label, or
        an example with its longest label is too long.
    """
    encoded = encode_labels(model, data, labels)
    return ClassExamples(
        examples,
        add_end(encoded, model, data.add_eos),
        gold_label_indices(model, examples, encoded, labels),
        model.interface,
        skip_too_long=data.on_too_long == "skip",
        share=share,
    )


def encode_labels(
    model: PromptedModel, data: DataSource, labels: Sequence[str]
) -> list[list[int]]:
    """Encodes labels like completions, without the end token.

    Raises:
      InputError: if a label has no tokens, or two labels have the same tokens.
    """
    tokenizer = model.needed_tokenizer()
    encoded: list[list[int]] = []
    for label in labels:
        ids = tokenizer.encode_continuation(data.joiner + label)
        if model.config.architecture == "encoder_decoder":
            ids = tokenizer.encode(label)
        if not ids:
            raise InputError(
                f"the label {shown(label)} gives no token, so it cannot be ranked; use "
                "another verbalizer"
            )
        if ids in encoded:
            raise InputError(
                f"the labels {shown(labels[encoded.index(ids)])} and {shown(label)} "
                "give the same tokens, so neither can win; use another verbalizer"
            )
        encoded.append(ids)
    return encoded


def gold_label_indices(
    model: PromptedModel,
    examples: Examples,
    encoded: Sequence[list[int]],
    labels: Sequence[str],
) -> list[int]:
    """Finds the label that matches each example's completion.

    Raises:
      InputError: for the first completion that is not a label, with its file and line.
    """
    gold = []
    for index in range(len(examples)):
        example = examples[index]
        ids = completion_tokens(example, model)
        if ids not in encoded:
            text = _completion_text(example, ids, model)
            hint = space_hint(text, labels)
            raise InputError(
                f"{examples.describe(index)}: the completion is {shown(text)}, which "
                f"is none of the labels {shown(list(labels))}{hint}"
            )
        gold.append(encoded.index(ids))
    return gold


def _completion_text(example: Example, ids: list[int], model: PromptedModel) -> str:
    """Returns the text of a completion, with its leading space."""
    context = given_tokens(example, model)
    (text,) = row_encoding.decode_continuations(model, [context], [ids])
    # A completion without a prompt is decoded without the space that it begins with.
    begins_with_space = bool(ids) and (
        model.needed_tokenizer().token(ids[0]).startswith(SPACE_MARKS)
    )
    separate = model.config.architecture == "encoder_decoder"
    if begins_with_space and not separate and not text.startswith(" "):
        return f" {text}"
    return text


def space_hint(text: str, labels: Sequence[str]) -> str:
    """Suggests labels if they differ from the data only in spaces."""
    if text.strip() not in [label.strip() for label in labels]:
        return ""
    leading = text[: len(text) - len(text.lstrip())]
    wanted = [f"{leading}{label.strip()}" for label in labels]
    return (
        " (labels are compared with their leading space): give "
        f"{how_to_set('Evaluation.labels', wanted)}"
    )


def given_tokens(example: Example, model: PromptedModel) -> list[int]:
    """Returns the tokens of an example that the model continues or answers."""
    return prompt_part(example, model.config.architecture).tolist()


def completion_tokens(example: Example, model: PromptedModel) -> list[int]:
    """Returns the tokens of an example's completion, without the end token."""
    # In an encoder-decoder all targets are learned: its prefix length is 0.
    targets = example.targets[example.prefix_length :]
    return row_encoding.strip_end(targets.tolist(), model.stop_ids)
