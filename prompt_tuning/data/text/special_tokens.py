"""Which tokens have a role (BOS, EOS, padding), as the files beside a tokenizer say."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prompt_tuning.core.errors import InputError

CONFIG_FILE = "tokenizer_config.json"
MAP_FILE = "special_tokens_map.json"
ROLES = ("bos_token", "eos_token", "pad_token")
"""Those that have a field in `SpecialTokens`, in its order."""


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """The special tokens' ids, of which None are not named; see `Tokenizer`."""

    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    add_bos: bool | None = None

    def over(self, other: "SpecialTokens") -> "SpecialTokens":
        """These, and `other` where these say None."""
        mine = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        return dataclasses.replace(other, **mine)


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in a file; an empty one if there is no such file.

    Raises:
      InputError: if it holds something else.
    """
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{file} holds a {type(content).__name__}, expected an object")
    return content


def read_settings(folder: Path) -> dict[str, Any]:
    """What `tokenizer_config.json` says, and `special_tokens_map.json` over it.

    The map is the older of the two: transformers does not read it where the config has
    `added_tokens_decoder`.

    Raises:
      InputError: if one of them holds no object.
    """
    config = read_json_object(folder / CONFIG_FILE)
    if "added_tokens_decoder" in config:
        return config
    return config | read_json_object(folder / MAP_FILE)


def role_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """The text of each token that has a role, by role: `eos_token`, `image_token`."""
    further = settings.get("extra_special_tokens")
    entries = {k: v for k, v in settings.items() if k.endswith("_token")}
    if isinstance(further, dict):
        entries |= further
    texts = {role: _text(entry) for role, entry in entries.items()}
    return {role: text for role, text in texts.items() if text is not None}


def configured(settings: Mapping[str, Any], id_of: Mapping[str, int]) -> SpecialTokens:
    """The ids of the tokens that settings give a role."""
    texts = [_text(settings.get(role)) for role in ROLES]
    ids = [None if text is None else id_of.get(text) for text in texts]
    return SpecialTokens(*ids, add_bos=settings.get("add_bos_token"))


def _text(entry: Any) -> str | None:
    """A token's text: a string, or `{"content": string}`."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else None
