"""BERT's tokenizer from `vocab.txt`, one token in each line, as older folders have it.

The class divides words, and the settings say how texts are normalized.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.typed_json import JsonObject, read_limited
from prompt_tuning.data.text.encoding_limits import MAXIMUM_FILE, reporting_errors

if TYPE_CHECKING:
    import tokenizers

FILE = "vocab.txt"
CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")
"""Classes that divide words alike."""
ROLES = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
"""Texts of the tokens with a role, unless the settings name others."""


def read_word_pieces(
    file: Path, settings: Mapping[str, Any], unknown: str
) -> "tokenizers.Tokenizer":
    """Reads a vocabulary of word pieces; words outside of it are `unknown`."""
    import tokenizers
    from tokenizers import models

    try:
        text = read_limited(file, MAXIMUM_FILE).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not text in UTF-8: {error}") from error
    lines = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n")
    vocabulary = {token: number for number, token in enumerate(lines.split("\n"))}
    with reporting_errors(lambda: f"{file} is not a vocabulary of word pieces"):
        pieces = models.WordPiece(vocabulary, unk_token=unknown)
        tokenizer = tokenizers.Tokenizer(pieces)
    set_parts(tokenizer, settings, str(file))
    return tokenizer


def set_parts(
    tokenizer: "tokenizers.Tokenizer", settings: Mapping[str, Any], source: str
) -> None:
    """Makes a tokenizer normalize and divide texts as the classes do.

    Args:
      tokenizer: tokenizer to change.
      settings: settings of `tokenizer_config.json`.
      source: file of the tokenizer, for messages.

    Raises:
      InputError: if a setting has another type.
    """
    from tokenizers import decoders, normalizers, pre_tokenizers

    given = {name: x for name, x in settings.items() if x is not None}
    flags = JsonObject(f"the settings next to {source}", given)
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=flags.flag("tokenize_chinese_chars", True),
        strip_accents=flags.flag("strip_accents", None),
        lowercase=flags.flag("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")


def put_around(
    tokenizer: "tokenizers.Tokenizer", around: Mapping[str, str | None], source: str
) -> None:
    """Makes a tokenizer put a token before every text, and one after it.

    `around` are the texts of the two tokens, by their roles.
    """
    from tokenizers import processors

    for role, text in around.items():
        if not text or text.startswith("$"):
            raise InputError(
                f"{role} of {source} is {shown(text)}, expected the text of a token "
                "that is put around every text, such as [CLS]"
            )
    first, last = map(str, around.values())
    pairs = [(text, tokenizer.token_to_id(text)) for text in (first, last)]
    single, second = f"{first}:0 $A:0 {last}:0", f"$B:1 {last}:1"
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore
        single=single, pair=f"{single} {second}", special_tokens=pairs
    )
