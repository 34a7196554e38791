"""The tokenizer in the metadata of a GGUF file.

Its model is named `gpt2` (byte-level, with merges) or `llama` (sentencepiece, with
scores). The types of tokens are numbered as in sentencepiece.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.gguf_files import is_gguf, read_gguf
from prompt_tuning.core.typed_json import JsonObject
from prompt_tuning.data.text import gguf_splits, tokenizer_building
from prompt_tuning.data.text.encoding_limits import read_costs, reporting_errors
from prompt_tuning.data.text.sentencepiece_files import (
    BPE,
    CONTROL,
    MARK,
    NORMAL,
    USER_DEFINED,
    SentencePieceFile,
    make_model,
)

if TYPE_CHECKING:
    import tokenizers

PREFIX = "tokenizer.ggml."
MODEL, SPLIT, TOKENS, TYPES, SCORES, MERGES = (
    f"{PREFIX}{name}"
    for name in ("model", "pre", "tokens", "token_type", "scores", "merges")
)
ADD_BOS = f"{PREFIX}add_bos_token"
TEMPLATE = "tokenizer.chat_template"
NAMED_TEMPLATES = "tokenizer.chat_templates"
UNKNOWN, UNUSED, BYTE = 2, 5, 6
"""Further types of tokens."""
ROLES = {
    "bos_token": f"{PREFIX}bos_token_id",
    "eos_token": f"{PREFIX}eos_token_id",
    "unk_token": f"{PREFIX}unknown_token_id",
    "pad_token": f"{PREFIX}padding_token_id",
}
"""Fields of the ids of tokens, by their roles."""
REMEDY = (
    "put the model's tokenizer.json and tokenizer_config.json beside the file, which "
    "are then read instead"
)


def has_gguf_tokenizer(path: Path) -> bool:
    """Tests whether a path is a GGUF file with a tokenizer."""
    if not is_gguf(path):
        return False
    return read_gguf(path).metadata.value(MODEL, "none") != "none"


def read_gguf_templates(path: Path) -> dict[str, Any]:
    """Returns the chat templates of a file, by their names."""
    metadata = read_gguf(path).metadata
    named = {
        str(name): metadata.value(f"{TEMPLATE}.{name}", None)
        for name in metadata.sequence(NAMED_TEMPLATES, [])
    }
    return named | {"default": metadata.value(TEMPLATE, None)}


def build_gguf_tokenizer(path: Path) -> tokenizer_building.BuiltTokenizer:
    """Builds the tokenizer of a file, if it is supported."""
    metadata = read_gguf(path).metadata
    model = metadata.text(MODEL)
    if model == "gpt2":
        read, add_bos = _read_byte_level(metadata)
    elif model == "llama":
        read, add_bos = _read_pieces(metadata), True
    else:
        metadata.refuse(MODEL, f"gpt2 or llama: {REMEDY}")
    tokenizer = read.tokenizer
    tokenizer.add_tokens(read.further)
    tokens = metadata.sequence(TOKENS)
    roles = {}
    for role, field in ROLES.items():
        id = metadata.integer(field, None, maximum=len(tokens) - 1)
        if id is not None:
            roles[role] = id
    bos, adds = roles.get("bos_token"), metadata.flag(ADD_BOS, add_bos)
    begin = tokenizer.id_to_token(bos) if adds and bos is not None else None
    tokenizer_building.put_before(tokenizer, [] if begin is None else [begin])
    return tokenizer_building.BuiltTokenizer(tokenizer, roles, read.costs)


def _read_byte_level(metadata: JsonObject) -> tuple[tokenizer_building.MainFile, bool]:
    """Reads a byte-level tokenizer, and whether BOS is put before texts."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    texts, types = _tokens(metadata)
    architecture = metadata.text("general.architecture", "")
    name = metadata.text(SPLIT, gguf_splits.UNNAMED.get(architecture, "default"))
    if name not in gguf_splits.SPLITS:
        known = ", ".join(gguf_splits.SPLITS)
        raise InputError(
            f"{metadata.source} divides texts in the way {shown(name)} ({SPLIT}), "
            f"expected one of {known}; for others {REMEDY}"
        )
    split = gguf_splits.SPLITS[name]
    merges = [
        _merge(metadata, merge) for merge in _list_of(metadata, MERGES, str, "texts")
    ]
    with reporting_errors(lambda: f"{metadata.source} has no usable tokenizer"):
        vocabulary: dict[str, int] = {}
        for id, (text, kind) in enumerate(zip(texts, types, strict=True)):
            if kind != UNUSED:
                vocabulary.setdefault(text, id)
        model = models.BPE(
            vocab=vocabulary, merges=merges, ignore_merges=split.whole_words
        )
        tokenizer = tokenizers.Tokenizer(model)
        if split.composed or architecture == "gptneox":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = split.pre_tokenizer()
        tokenizer.decoder = decoders.ByteLevel()
    part: Any = tokenizer.pre_tokenizer
    costs = read_costs({"pre_tokenizer": json.loads(part.__getstate__())}, name)
    further = _added(texts, types)
    return tokenizer_building.MainFile(tokenizer, {}, costs, further), split.add_bos


def _merge(metadata: JsonObject, merge: str) -> tuple[str, str]:
    # The first part has at least one character, which may be a space in old files.
    middle = merge.find(" ", 1)
    if middle < 0:
        raise InputError(
            f"{metadata.source} has the merge {shown(merge)}, expected two texts with "
            "a space between them"
        )
    return merge[:middle], merge[middle + 1 :]


def _added(
    texts: Sequence[str], types: Sequence[int]
) -> "list[str | tokenizers.AddedToken]":
    """Returns the tokens that texts contain as a whole."""
    import tokenizers

    return [
        tokenizers.AddedToken(text, normalized=False, special=kind == CONTROL)
        for text, kind in zip(texts, types, strict=True)
        if kind in (CONTROL, USER_DEFINED) and text
    ]


def _read_pieces(metadata: JsonObject) -> tokenizer_building.MainFile:
    """Reads a tokenizer of sentencepiece as if from its file."""
    texts, types = _tokens(metadata)
    scores = _list_of(metadata, SCORES, float, "numbers")
    total = len(metadata.sequence(TOKENS))
    if len(scores) != total:
        metadata.refuse(SCORES, f"a list of {total:,} numbers, one for each token")
    # Conversions write spaces into tokens that were added to the file's.
    pieces = [
        (text.replace(" ", MARK) if kind == USER_DEFINED else text, score, kind)
        for text, score, kind in zip(texts, scores, types, strict=False)
    ]
    unknown = metadata.integer(ROLES["unk_token"], 0, maximum=len(texts) - 1)
    model = make_model(
        pieces,
        trainer={
            "model_type": BPE,
            "byte_fallback": BYTE in types,
            "unk_id": unknown,
            "unk_piece": texts[unknown],
        },
        normalizer={
            "add_dummy_prefix": metadata.flag(f"{PREFIX}add_space_prefix", True),
            "remove_extra_whitespaces": metadata.flag(
                f"{PREFIX}remove_extra_whitespaces", False
            ),
        },
    )
    file = SentencePieceFile(model, metadata.source)
    file.check()
    with reporting_errors(lambda: f"{metadata.source} has no usable tokenizer"):
        if metadata.text("general.architecture", "").startswith("gemma"):
            return tokenizer_building.read_class_pieces(file, "GemmaTokenizer", {})
        return tokenizer_building.read_generic_pieces(file, {})


def _tokens(metadata: JsonObject) -> tuple[list[str], list[int]]:
    """Returns the texts and types of all tokens."""
    texts = _list_of(metadata, TOKENS, str, "texts")
    types = metadata.integers(TYPES) if TYPES in metadata else [NORMAL] * len(texts)
    if not texts or len(types) != len(texts):
        metadata.refuse(TYPES, f"a list of {len(texts):,} numbers, one for each token")
    # They fill the embedding table, and a tokenizer of transformers lacks them.
    count = max((id for id, kind in enumerate(types) if kind != UNUSED), default=-1) + 1
    return texts[:count], types[:count]


def _list_of(metadata: JsonObject, name: str, kind: type, items: str) -> list[Any]:
    values = metadata.sequence(name)
    if any(type(value) is not kind for value in values):
        metadata.refuse(name, f"a list of {items}")
    return values
