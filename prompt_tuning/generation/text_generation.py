"""Generation for many rows of different lengths, in batches of few shapes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prompt_tuning.core.activity import activity
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.batching.batch_plan import FILLING
from prompt_tuning.data.batching.length_groups import LengthGroup, group_by_length
from prompt_tuning.data.text.templates import TokenTemplate
from prompt_tuning.data.text.tokenizers import Tokenizer, encode_prompt
from prompt_tuning.generation.engine import continue_rows, pad_rows, strip_end
from prompt_tuning.generation.sampling import Sampler, greedy
from prompt_tuning.generation.streamed_engine import continue_rows_streamed
from prompt_tuning.pretrained.prompted_model import PromptedModel

LENGTH_MULTIPLE = 16
GENERATES = "continuing a text reads all weights for each token"


def continue_all(
    model: PromptedModel,
    parameters: Parameters,
    rows: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    batch_size: int = 64,
    sampler: Sampler = greedy,
    seed: int = 0,
    prompt_ids: Sequence[int] | None = None,
    stop_ids: Sequence[int] = (),
    on_batch: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """Continues every row; the result does not depend on how rows are batched.

    Args:
      model: model that generates.
      parameters: all parameters by path.
      rows: token ids; without a prompt, each row needs at least one token.
      new_tokens: maximum number of new tokens of each row.
      batch_size: rows of a batch.
      sampler: chooses the next token.
      seed: seed of sampling; each row draws with its own key.
      prompt_ids: prompt of each row if the model has several, else None.
      stop_ids: further tokens of which each ends a row, next to the model's own.
      on_batch: called after each batch with its number of rows.

    Returns:
      The new tokens of each row, without the one that ended it.

    Raises:
      InputError: if the batch size is not positive, and as `check_rows` and
        `check_prompt_ids`.
    """
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}, expected at least 1")
    check_rows(model, rows, new_tokens)
    check_prompt_ids(model, prompt_ids, len(rows))
    ends = (*model.stop_ids, *stop_ids)
    base = jax.random.key(seed)
    continuations: dict[int, list[int]] = {}
    for group in _batches(model, rows, batch_size):
        chosen = group.rows[group.rows != FILLING].tolist()
        # Rows without an example repeat another one.
        filled = [*chosen, *chosen[-1:] * (len(group.rows) - len(chosen))]
        tokens, lengths = pad_rows(
            [rows[index] for index in filled], model.config.pad_id, group.length
        )
        keys = jax.vmap(lambda i: jax.random.fold_in(base, i))(jnp.array(filled))
        prompts = None
        if prompt_ids is not None:
            prompts = jnp.array([prompt_ids[index] for index in filled])
        generated = _continue_batch(
            model,
            parameters,
            (tokens, lengths, keys, prompts),
            new_tokens=new_tokens,
            sampler=sampler,
            stop_ids=ends,
        )
        for index, row in zip(chosen, generated.tolist(), strict=False):
            continuations[index] = strip_end(row, ends)
        if on_batch is not None:
            on_batch(len(chosen))
    return [continuations[index] for index in range(len(rows))]


def _continue_batch(
    model: PromptedModel, parameters: Parameters, rows: tuple, **settings: Any
) -> np.ndarray:
    """Generates one batch; layer by layer if the weights are streamed."""
    settings |= {"graph": model.graph, "pad_id": model.config.pad_id}
    if model.weight_storage.by_layer:
        everything = model.by_layer(parameters)
        with activity("generating; each token reads all streamed weights"):
            return continue_rows_streamed(everything, *rows, **settings)
    # Only a shape that is compiled is shown.
    with activity():
        generated = continue_rows(parameters, *rows, **settings, layout=model.layout)
        return np.asarray(generated)


def _batches(
    model: PromptedModel, rows: Sequence[Sequence[int]], batch_size: int
) -> list[LengthGroup]:
    """Divides rows into batches of few lengths, multiples of 16 if the model has room.

    Coarser lengths than in training let separate calls share compiled programs.
    """
    room = model.maximum_length
    lengths = -(-np.array([len(row) for row in rows]) // LENGTH_MULTIPLE)
    lengths = LENGTH_MULTIPLE * np.maximum(lengths, 1)
    return group_by_length(
        lengths if room is None else np.minimum(lengths, room),
        batch_size=batch_size,
        maximum_length=room,
        row_parts=model.interface.rows.parts,
    )


def check_rows(
    model: PromptedModel, rows: Sequence[Sequence[int]], new_tokens: int
) -> None:
    """Checks that rows can be continued.

    Raises:
      InputError: if fewer than one new token is requested, a row and its new tokens
        exceed the model's positions, or a row is empty in a model without a prompt.
    """
    if new_tokens < 1:
        raise InputError(f"new_tokens is {new_tokens}, expected at least 1")
    lengths = [len(row) for row in rows]
    longest, room = max(lengths, default=0), model.maximum_length
    # An encoder and a decoder count their positions separately.
    separate = model.config.architecture == "encoder_decoder"
    taken = max(longest, new_tokens) if separate else longest + new_tokens
    if room is not None and taken > room:
        positions = model.config.maximum_positions or 0
        also = f" and the prompt takes {positions - room}" if positions > room else ""
        raise InputError(
            f"a row of {longest} tokens and {new_tokens} new ones do not fit: the "
            f"model has {positions} positions{also}{model.config.positions_note}"
        )
    if not all(lengths) and not model.predicts_without_text:
        raise InputError(
            f"row {lengths.index(0)} has no token, and without prompt vectors or a "
            "beginning-of-sequence token there is nothing to continue"
        )


def check_prompt_ids(
    model: PromptedModel, prompt_ids: Sequence[int] | None, rows: int
) -> None:
    """Checks that each row chooses one of the model's prompts.

    Raises:
      InputError: if the model has several prompts and an id is missing or out of
        range, or if there are ids for a model with one prompt.
    """
    count = model.prompt_count
    if prompt_ids is None:
        if count > 1:
            raise InputError(
                f"the model has {count} prompts, and no row names its prompt: pass "
                f"prompt_ids (generate: --prompt_id), 0 to {count - 1}"
            )
        return
    if count == 1:
        raise InputError(
            "prompt ids were given, but the model has one prompt for all rows: leave "
            "them out"
        )
    if len(prompt_ids) != rows:
        raise InputError(
            f"there are {len(prompt_ids)} prompt ids, expected {rows}, one for each row"
        )
    outside = [number for number in prompt_ids if not 0 <= number < count]
    if outside:
        raise InputError(f"the prompt id is {outside[0]}, expected 0 to {count - 1}")


def continue_texts(
    model: PromptedModel,
    parameters: Parameters,
    texts: Sequence[str],
    *,
    new_tokens: int,
    batch_size: int = 64,
    sampler: Sampler = greedy,
    seed: int = 0,
    prompt_ids: Sequence[int] | None = None,
    template: TokenTemplate | None = None,
) -> list[str]:
    """Continues every text; arguments and errors as in `continue_all`.

    With a template, which is that of the data, each text replaces its only key.
    """
    rows = [encode_given(model, text, template) for text in texts]
    continuations = continue_all(
        model,
        parameters,
        rows,
        new_tokens=new_tokens,
        batch_size=batch_size,
        sampler=sampler,
        seed=seed,
        prompt_ids=prompt_ids,
    )
    return decode_continuations(model, rows, continuations)


def decode_continuations(
    model: PromptedModel,
    rows: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
) -> list[str]:
    """Decodes generated ids: as texts that continue their rows, or as separate ones."""
    tokenizer = model.needed_tokenizer()
    if model.config.architecture == "encoder_decoder":
        return [tokenizer.decode(row) for row in continuations]
    # Ids from the vocabulary's size on stand for the prompt vectors of a template.
    size = model.config.vocabulary_size
    return [
        continuation_text(tokenizer, [i for i in row if i < size], new)
        for row, new in zip(rows, continuations, strict=True)
    ]


def continuation_text(
    tokenizer: Tokenizer, given: Sequence[int], new: Sequence[int]
) -> str:
    """Decodes new ids as the text that they add to the given ids.

    Decoded alone, they would lose a leading space: sentencepiece drops it as the one
    that it inserts before every text.
    """
    before, whole = tokenizer.decode(given), tokenizer.decode([*given, *new])
    return whole.removeprefix(before) if before else tokenizer.decode(new)


def encode_given(
    model: PromptedModel, text: str, template: TokenTemplate | None = None
) -> list[int]:
    """Encodes an input as in training; see `add_special_ids`."""
    tokenizer = model.needed_tokenizer()
    ids = tokenizer.encode(text) if template is None else template.encode_text(text)
    return add_special_ids(model, ids)


def add_special_ids(model: PromptedModel, ids: list[int]) -> list[int]:
    """Adds BOS before the ids of an input, and EOS after those of an encoder's.

    Whether an encoder has one or both depends on `ModelConfig.encoder_input`.
    """
    if model.config.architecture == "decoder_only":
        return [*encode_prompt(model.needed_tokenizer(), ""), *ids]
    form, bos, eos = model.config.encoder_input, model.interface.bos_id, model.eos_id
    begin = [bos] if bos is not None and form.startswith("bos") else []
    end = [eos] if eos is not None and form.endswith("eos") else []
    return [*begin, *ids, *end]
