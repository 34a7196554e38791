"""Checks of rows before they are continued."""

from collections.abc import Sequence

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.pretrained.prompted_model import PromptedModel

GENERATES = "continuing a text reads all weights for each token"
"""Reason given when streamed weights cannot be used; see `WeightStorage`."""


def check_generates(model: PromptedModel) -> None:
    """Checks that a model can generate text.

    Raises:
      InputError: if it has a class head or is an encoder.
    """
    if model.config.labels:
        raise InputError(
            f"the model's head scores the classes {shown(list(model.config.labels))}, "
            "so it generates no text: use predict, or evaluate without exact_match and "
            "metrics of generated texts"
        )
    if model.config.bidirectional:
        raise InputError(
            f"{model.config.family} is an encoder, whose tokens see those after them, "
            "so it generates no text: train a head of classes by "
            f"{how_to_set('ClassHead.pooling', 'first')}, or embed texts (Model.embed, "
            "or /v1/embeddings of serve)"
        )


def check_scores(model: PromptedModel) -> None:
    """Checks that a model scores next tokens or classes.

    Raises:
      InputError: if it is an encoder without a class head.
    """
    if model.config.bidirectional and not model.config.labels:
        raise InputError(
            f"{model.config.family} is an encoder, which predicts no next tokens: "
            f"train a head of classes by {how_to_set('ClassHead.pooling', 'first')}"
        )


def positions_taken(model: PromptedModel, given: int, new: int) -> int:
    """Returns the number of positions that a row's tokens take, without prompt vectors.

    An encoder and a decoder count positions separately; an encoder without a decoder
    generates no tokens.
    """
    if model.config.bidirectional:
        return given
    separate = model.config.architecture == "encoder_decoder"
    return max(given, new) if separate else given + new


def row_room(model: PromptedModel, given: int, new: int) -> int:
    """Returns the number of slot positions that is enough for a row.

    It is an upper bound if the prompt is in pages before the row. Arguments are as in
    `positions_taken`.
    """
    prompt = max(model.prompt_length, model.prompts.decoder_length)
    return prompt + positions_taken(model, given, new)


def check_rows(
    model: PromptedModel, rows: Sequence[Sequence[int]], new_tokens: int
) -> None:
    """Checks that rows can be continued.

    Raises:
      InputError: if `new_tokens` is below 1, a row and its new tokens exceed the
        model's positions, or a row is empty and the model has no prompt.
    """
    if new_tokens < 1 and not model.config.labels:
        raise InputError(f"new_tokens is {new_tokens}, expected at least 1")
    lengths = [len(row) for row in rows]
    longest, room = max(lengths, default=0), model.maximum_length
    taken = positions_taken(model, longest, new_tokens)
    if room is not None and taken > room:
        positions = model.config.maximum_positions or 0
        new = f" and {new_tokens} new ones" if new_tokens else ""
        also = f" and the prompt takes {positions - room}" if positions > room else ""
        raise InputError(
            f"a row of {longest} tokens{new} do not fit: the model has {positions} "
            f"positions{also}{model.config.positions_note}"
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
      InputError: if the model has more than one prompt and an id is missing or out of
        range, or it has one prompt and there are ids.
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
