"""The text part of models that also read images; texts do not pass the other parts."""

import functools
from collections.abc import Callable, Mapping, Set
from typing import Any

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.default_positions import with_positions
from prompt_tuning.families.family import Family, Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama_layout import layout_recipes

Reader = Callable[[HuggingFaceSettings], ModelFields]
TEXT = "text_config"
STORED, LOADED = "language_model.model.", "model.language_model."
"""Prefix of the text model in most files, and in the model that transformers loads."""
ALIASES = (LOADED, STORED, "language_model.", "model.")
TABLES = (f"{STORED}embed_tokens.weight", f"{LOADED}embed_tokens.weight")
STORED_HEAD = "language_model.lm_head.weight"
IMAGE_SETTINGS = frozenset(
    f"{kind}_token_{suffix}"
    for kind in ("boi", "eoi", "image", "video", "vision_start", "vision_end")
    for suffix in ("id", "index")
) | {"vision_config"}
"""Settings of images, and of the tokens around them, which are tokens as any other."""


def read_text_part(
    settings: HuggingFaceSettings,
    readers: Mapping[str, Reader],
    *,
    tied: bool,
    defaults: Mapping[str, Any] | None = None,
) -> ModelFields:
    """Returns fields of `ModelConfig` for the text model; see `Family.read_fields`.

    Args:
      settings: the settings in `config.json`.
      readers: functions that read the text model's settings, by their `model_type`; the
        first also reads settings without one.
      tied: whether the head is tied by default.
      defaults: settings of the text model that the folder lacks.
    """
    part = settings.part(TEXT, defaults)
    kind = part.text("model_type", next(iter(readers)))
    if kind not in readers:
        part.refuse("model_type", " or ".join(map(repr, readers)))
    return readers[kind](with_positions(part, kind)) | {
        "tied_head": settings.flag("tie_word_embeddings", tied)
    }


def with_images(
    text: Family,
    model_type: str,
    title: str,
    readers: Mapping[str, Reader],
    *,
    tied: bool,
    defaults: Mapping[str, Any] | None = None,
    recipes: Callable[..., Recipes] = layout_recipes,
    more_inert: Set[str] = frozenset(),
    **changes: Any,
) -> Family:
    """Returns a family with images, of which only the text model is read.

    It is otherwise like `text`. `recipes` takes the arguments `prefix` and `head` of
    `layout_recipes`; `changes` replace other attributes. For `readers`, `tied` and
    `defaults` see `read_text_part`.
    """
    options = {"readers": readers, "tied": tied, "defaults": defaults}
    fields = {
        "recipes": functools.partial(_recipes, recipes=recipes),
        "embedding_tables": TABLES,
        "prefix_aliases": ALIASES,
        "token_parts": (TEXT,),
        "more_inert": IMAGE_SETTINGS | more_inert,
    }
    read = functools.partial(read_text_part, **options)
    return text.like(model_type, title, read, **(fields | changes))


def _recipes(
    config: ModelConfig, names: StoredNames, recipes: Callable[..., Recipes]
) -> Recipes:
    prefix = STORED if TABLES[0] in names else LOADED
    head = STORED_HEAD if STORED_HEAD in names else "lm_head.weight"
    return recipes(config, names, prefix=prefix, head=head)
