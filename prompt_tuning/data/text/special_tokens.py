"""Tokens with a role (BOS, EOS, padding), read from the files next to a tokenizer."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prompt_tuning.core.typed_json import JsonObject, read_object

CONFIG_FILE = "tokenizer_config.json"
MAP_FILE = "special_tokens_map.json"
ROLES = ("bos_token", "eos_token", "pad_token")
"""Roles with a field in `SpecialTokens`, in the order of its fields."""


CLEANS = "clean_up_tokenization_spaces"
FLAGS = (
    *("add_bos_token", "add_prefix_space", "legacy", "split_special_tokens"),
    CLEANS,
)
"""Settings that are true or false."""


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """Ids of the special tokens; None for those not defined. See `Tokenizer`."""

    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    begin_ids: tuple[int, ...] | None = None

    def fill_from(self, other: "SpecialTokens") -> "SpecialTokens":
        """Returns these values, or `other`'s for None."""
        fields = [field.name for field in dataclasses.fields(self)]
        values = {name: getattr(self, name) for name in fields}
        defined = {name: x for name, x in values.items() if x is not None}
        return dataclasses.replace(other, **defined)


def read_json_object(file: Path) -> dict[str, Any]:
    """Reads the JSON object of a file; an empty one if the file is missing."""
    return dict(read_object(file).values) if file.exists() else {}


def read_settings(folder: Path) -> dict[str, Any]:
    """Reads `tokenizer_config.json`, overridden by `special_tokens_map.json`.

    The map is the older format: like transformers, this does not read it if the config
    has `added_tokens_decoder`.
    """
    config = _read_checked(folder / CONFIG_FILE)
    if "added_tokens_decoder" in config:
        return config
    return config | _read_checked(folder / MAP_FILE)


def _read_checked(file: Path) -> dict[str, Any]:
    content = JsonObject(str(file), read_json_object(file))
    for flag in FLAGS:
        content.flag(flag, None)
    for role in ROLES:
        if role in content and _text(content.value(role)) is None:
            content.refuse(role, "a text, or an object with a text as its content")
    return dict(content.values)


def role_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of the tokens with a role, by role, such as `eos_token`."""
    further = settings.get("extra_special_tokens")
    entries = {k: v for k, v in settings.items() if k.endswith("_token")}
    if isinstance(further, dict):
        entries |= further
    texts = {role: _text(entry) for role, entry in entries.items()}
    return {role: text for role, text in texts.items() if text is not None}


def _text(entry: Any) -> str | None:
    """Returns a token's text: a string, or the one in `{"content": string}`."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else None
