"""Encodes texts for a model or one of its adapters, like its training data."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.chat_encoder import ChatEncoder, open_chat_encoder
from prompt_tuning.data.rows.line_formats import FormatChoice
from prompt_tuning.data.source_reading import token_template
from prompt_tuning.data.text.templates import TokenTemplate
from prompt_tuning.data.text.tokenizers import encode_prompt
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.settings.data_source import DataSource


@dataclasses.dataclass(frozen=True)
class TextEncoding:
    """Encodes texts and conversations for a model with one adapter, or without.

    Only this class chooses between plain text, the data's template and a chat template.

    Attributes:
      model: the model with the adapter.
      source: settings of the data that the adapter was trained with.
      folder: folder with the adapter's own chat template; None for the tokenizer's.
      day: ISO date for a chat template that uses the current date, if the data sets
        none; None for today.
    """

    model: PromptedModel
    source: DataSource
    folder: Path | None = None
    day: str | None = None

    @functools.cached_property
    def template(self) -> TokenTemplate | None:
        """Template of the data, or None."""
        return token_template(self.source, self.model.interface)

    @functools.cached_property
    def chat(self) -> ChatEncoder:
        """Encodes conversations up to their next answer.

        Raises:
          InputError: if there is no chat template, or the data has a template.
        """
        if self.source.template is not None:
            raise InputError(
                "a chat template and DataSource.template both determine the text "
                "around a message: continue texts instead of chats, and the run's "
                "template is used"
            )
        choice = FormatChoice.of(self.source)
        if choice.chat_date is None:
            choice = dataclasses.replace(choice, chat_date=self.day)
        return open_chat_encoder(self.model.needed_tokenizer(), choice, self.folder)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, which replaces the only key of a template."""
        return encode_given(self.model, text, self.template)

    def encode_keys(self, texts: Mapping[str, str]) -> list[int]:
        """Returns the ids of the template with a text for each of its keys."""
        assert self.template is not None
        return add_special_ids(self.model, self.template.encode_prompt(texts))


def encode_given(
    model: PromptedModel, text: str, template: TokenTemplate | None = None
) -> list[int]:
    """Encodes an input as in training; see `add_special_ids`."""
    tokenizer = model.needed_tokenizer()
    ids = tokenizer.encode(text) if template is None else template.encode_text(text)
    return add_special_ids(model, ids)


def add_special_ids(model: PromptedModel, ids: list[int]) -> list[int]:
    """Adds BOS before the ids of an input, and EOS after an encoder's.

    For an encoder, `ModelConfig.encoder_input` decides which of them.
    """
    if model.config.architecture == "decoder_only":
        return [*encode_prompt(model.needed_tokenizer(), ""), *ids]
    form, bos, eos = model.config.encoder_input, model.interface.bos_id, model.eos_id
    begin = [bos] if bos is not None and form.startswith("bos") else []
    end = [eos] if eos is not None and form.endswith("eos") else []
    return [*begin, *ids, *end]
