"""Builds one `tokenizers.Tokenizer` from the files of any tokenizer.

The ids equal those of transformers 5.24. Its class gives the parts that are in no file
(see `tokenizer_classes`), the files next to the vocabulary add tokens, and the
post-processor puts tokens before a text. With a `tokenizer.json`, transformers follows
the post-processor and ignores `add_bos_token`; otherwise only the flag counts.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.typed_json import parse_json, read_limited, read_object
from prompt_tuning.data.text import added_tokens, special_tokens, word_pieces
from prompt_tuning.data.text.encoding_limits import (
    MAXIMUM_FILE,
    QUICK,
    Costs,
    read_costs,
    reporting_errors,
)
from prompt_tuning.data.text.sentencepiece_files import (
    SentencePieceFile,
    read_sentencepiece,
)
from prompt_tuning.data.text.tokenizer_classes import (
    CLASSES,
    GENERIC,
    Parts,
    TokenizerClass,
    charsmap_of,
    class_name,
    refusal,
    same_parts,
)

if TYPE_CHECKING:
    import tokenizers

SHIFTED = "sentencepiece.bpe.model"
"""Name of the file of classes that give pieces other ids than the file (XLM-R)."""
SHIFTED_ROLES = ("bos_token", "pad_token", "eos_token", "unk_token")
"""Roles of these classes' first tokens, which replace three pieces of the file."""
MAXIMUM_VOCABULARY = 2**24
"""Maximum number of ids of a tokenizer."""
MAXIMUM_EXTRA = 10_000
"""Maximum number of sentinels."""


@dataclasses.dataclass(frozen=True)
class BuiltTokenizer:
    """A tokenizer with all its added tokens.

    Its post-processor puts tokens before a text. `roles` are ids by role, such as
    `eos_token`. `cleans_spaces` says whether decoded texts lose spaces; see
    `tokenizers.clean_spaces`.
    """

    tokenizer: "tokenizers.Tokenizer"
    roles: Mapping[str, int]
    costs: Costs
    cleans_spaces: bool = False


@dataclasses.dataclass
class MainFile:
    """The content of the main file of a tokenizer.

    Attributes:
      tokenizer: the tokenizer, without the tokens of other files.
      roles: texts of the tokens with a role, unless other files name them.
      costs: limits of encoding.
      further: special tokens, unless other files list some.
    """

    tokenizer: "tokenizers.Tokenizer"
    roles: Mapping[str, str]
    costs: Costs = QUICK
    further: "list[str | tokenizers.AddedToken]" = dataclasses.field(
        default_factory=list
    )


def build_tokenizer(file: Path) -> BuiltTokenizer:
    """Builds the tokenizer of a file and of the settings next to it.

    The file is a `tokenizer.json`, a sentencepiece file, `vocab.json` or `vocab.txt`.
    """
    folder = file.parent
    settings = special_tokens.read_settings(folder)
    tokens = added_tokens.read_folder_tokens(folder)
    if file.suffix == ".model":
        name = _class_name(folder, settings)
        read = _read_pieces(file, name, settings)
        if name == GENERIC and read.tokenizer.pre_tokenizer is not None:
            tokens = tokens.raw()
    elif file.name == "vocab.json":
        name = _class_name(folder, settings)
        name = "GPT2Tokenizer" if name == GENERIC else name
        read = _read_byte_level(file, name, settings)
    elif file.name == word_pieces.FILE:
        name = _class_name(folder, settings)
        read = _read_word_pieces(file, name, settings)
    else:
        content = read_limited(file, MAXIMUM_FILE)
        name = _class_name(folder, settings, b'"ByteLevel"' in content)
        read = _read_library_file(file, content, name, settings)
    tokenizer = read.tokenizer
    defaults = {k: text for k, text in read.roles.items() if k not in settings}
    tokens = dataclasses.replace(tokens, roles={**defaults, **tokens.roles})
    further = tokens.further
    if further is None or (tokens.in_map and read.further):
        further = read.further
    added_tokens.add_tokens(tokenizer, tokens, further, str(file))
    _check_size(tokenizer, file)
    tokenizer.encode_special_tokens = settings.get("split_special_tokens") is True
    kind = CLASSES.get(name)
    if file.name == word_pieces.FILE:
        around = {role: tokens.text(role) for role in ("cls_token", "sep_token")}
        word_pieces.put_around(tokenizer, around, str(file))
    has_post_processor = file.suffix != ".model" and file.name != "vocab.json"
    adds_bos = kind is not None and kind.add_bos
    if not has_post_processor:
        adds_bos = settings.get("add_bos_token", adds_bos)
    begin = tokens.text("bos_token") if adds_bos else None
    if kind is not None and kind.begin_role is not None:
        begin = tokens.text(kind.begin_role)
    if begin is not None or not has_post_processor:
        put_before(tokenizer, [] if begin is None else [begin])
    ids = {
        role: tokenizer.token_to_id(added_tokens.text_of(token))
        for role, token in tokens.roles.items()
    }
    roles = {role: id for role, id in ids.items() if id is not None}
    is_bpe = type(tokenizer.model).__name__ == "BPE"  # whose spaces stay
    cleans = bool(settings.get(special_tokens.CLEANS)) and not is_bpe
    return BuiltTokenizer(tokenizer, roles, read.costs, cleans)


def put_before(tokenizer: "tokenizers.Tokenizer", begin: list[str]) -> tuple[int, ...]:
    """Makes a tokenizer put tokens before every text, and returns their ids."""
    from tokenizers import processors

    ids = {text: tokenizer.token_to_id(text) for text in begin}
    special = {text: id for text, id in ids.items() if id is not None}
    single = [*begin, "$A"]
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore
        single=single, pair=[*single, "$B"], special_tokens=list(special.items())
    )
    return tuple(special[text] for text in begin)


def _check_size(tokenizer: "tokenizers.Tokenizer", file: Path) -> None:
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if not 0 <= largest < MAXIMUM_VOCABULARY:
        raise InputError(
            f"the ids of the tokenizer {file} go up to {largest:,}, expected at least "
            f"one, and at most {MAXIMUM_VOCABULARY - 1:,}"
        )


def _class_name(
    folder: Path, settings: Mapping[str, Any], is_byte_level: bool = False
) -> str:
    config = special_tokens.read_json_object(folder / "config.json")
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    model_type = config.get("model_type")
    return class_name(
        named if isinstance(named, str) else None,
        model_type if isinstance(model_type, str) else None,
        is_byte_level,
    )


def _read_pieces(file: Path, name: str, settings: Mapping[str, Any]) -> MainFile:
    pieces = read_sentencepiece(file)
    if name == GENERIC and file.name != SHIFTED:
        return read_generic_pieces(pieces, settings)
    return read_class_pieces(pieces, name, settings)


def read_class_pieces(
    pieces: SentencePieceFile, name: str, settings: Mapping[str, Any]
) -> MainFile:
    """Reads a sentencepiece file as a class of transformers does."""
    kind = CLASSES.get(name)
    if kind is None or name == GENERIC:
        raise InputError(refusal(pieces.source, name))
    class_tokens = _class_tokens(name, settings, pieces.source)
    further: list[Any] = [*pieces.added_tokens(), *class_tokens]
    parts = kind.build(settings, pieces.charsmap)
    if kind.is_unigram:
        scores = pieces.scores
        if kind.is_shifted:
            texts = {**kind.roles, **special_tokens.role_texts(settings)}
            first = [(texts[role], 0.0) for role in SHIFTED_ROLES]
            scores = [*first, *scores[3:], (texts["mask_token"], 0.0)]
        scores += [(text, 0.0) for text in class_tokens]
        tokenizer = _assemble(kind, parts, scores, [])
    else:
        vocabulary = {piece: i for i, (piece, _) in enumerate(pieces.scores)}
        tokenizer = _assemble(kind, parts, vocabulary, pieces.merges_by_id())
    if kind.is_shifted:  # The replaced pieces are in the vocabulary by their roles.
        return MainFile(tokenizer, kind.roles, QUICK)
    roles = pieces.roles() | dict(kind.roles)
    return MainFile(tokenizer, roles, QUICK, further)


def read_generic_pieces(
    pieces: SentencePieceFile, settings: Mapping[str, Any]
) -> MainFile:
    """Reads a sentencepiece file as its own library does."""
    tokenizer = pieces.standard_tokenizer(legacy=settings.get("legacy", True) is True)
    further: list[Any] = [*pieces.added_tokens()]
    costs = read_costs(json.loads(tokenizer.to_str()), pieces.source)
    return MainFile(tokenizer, pieces.roles(), costs, further)


def _read_byte_level(file: Path, name: str, settings: Mapping[str, Any]) -> MainFile:
    from tokenizers import models

    kind = CLASSES.get(name)
    merges_file = file.with_name("merges.txt")
    if (
        kind is None
        or kind.is_unigram
        or "byte_fallback" in kind.build({}, b"").options
    ):
        raise InputError(refusal(str(file), name))
    read_object(file)
    read_limited(merges_file, MAXIMUM_FILE)
    with reporting_errors(
        lambda: f"{file} and {merges_file.name} are not a byte-level tokenizer"
    ):
        vocabulary, merges = models.BPE.read_file(str(file), str(merges_file))
        parts = kind.build(settings, b"")
        tokenizer = _assemble(kind, parts, vocabulary, merges)
    return MainFile(tokenizer, kind.roles)


def _read_word_pieces(file: Path, name: str, settings: Mapping[str, Any]) -> MainFile:
    if name not in (GENERIC, *word_pieces.CLASSES):
        raise InputError(refusal(str(file), name))
    unknown = (word_pieces.ROLES | special_tokens.role_texts(settings))["unk_token"]
    tokenizer = word_pieces.read_word_pieces(file, settings, unknown)
    costs = read_costs(json.loads(tokenizer.to_str()), str(file))
    return MainFile(tokenizer, word_pieces.ROLES, costs)


def _read_library_file(
    file: Path, content: bytes, name: str, settings: Mapping[str, Any]
) -> MainFile:
    """Reads a `tokenizer.json`, with the parts of its class, if it has a class."""
    import tokenizers
    from tokenizers.models import WordPiece

    parsed = parse_json(content, str(file))
    if not isinstance(parsed, dict):
        parsed = read_object(file).values  # reports what it contains
    costs = read_costs(parsed, str(file))
    with reporting_errors(lambda: f"{file} is not a tokenizer.json"):
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    # It may be set to truncate or pad every text to the length that its model was
    # trained with.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    kind = CLASSES.get(name)
    if name in word_pieces.CLASSES and isinstance(tokenizer.model, WordPiece):
        word_pieces.set_parts(tokenizer, settings, str(file))
        return MainFile(tokenizer, word_pieces.ROLES, costs)
    if kind is None:
        return MainFile(tokenizer, {}, costs)
    with reporting_errors(lambda: f"{file} is not a tokenizer.json"):
        tokenizer = _with_parts(kind, tokenizer, parsed, settings)
    if not kind.keeps_post_processor:
        put_before(tokenizer, [])
    return MainFile(tokenizer, kind.roles, costs)


def _with_parts(
    kind: TokenizerClass,
    tokenizer: "tokenizers.Tokenizer",
    content: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> "tokenizers.Tokenizer":
    """Returns a tokenizer with the parts of its class, which override its file's."""
    model = content["model"]
    if model.get("type", "BPE") != ("Unigram" if kind.is_unigram else "BPE"):
        return tokenizer
    parts = kind.build(settings, charsmap_of(content.get("normalizer")))
    if same_parts(content, parts):
        return tokenizer
    vocabulary, merges = model["vocab"], model.get("merges", ())
    if kind.is_unigram:
        vocabulary = [tuple(entry) for entry in vocabulary]
    pairs = [tuple(x.split(" ") if isinstance(x, str) else x) for x in merges]
    changed = _assemble(kind, parts, vocabulary, pairs)
    # The older list of `tokenizer_config.json` replaces that of the file.
    if added_tokens.DECODER not in settings:
        added = sorted(tokenizer.get_added_tokens_decoder().items())
        changed.add_tokens([token for _, token in added])
    if tokenizer.post_processor is not None:
        changed.post_processor = tokenizer.post_processor
    return changed


def _assemble(
    kind: TokenizerClass, parts: Parts, vocabulary: Any, merges: Any
) -> "tokenizers.Tokenizer":
    import tokenizers
    from tokenizers import models

    if kind.is_unigram:
        model = models.Unigram(vocabulary, **parts.options)
    else:
        model = models.BPE(vocab=vocabulary, merges=merges, **parts.options)
    tokenizer = tokenizers.Tokenizer(model)
    if parts.normalizer is not None:
        tokenizer.normalizer = parts.normalizer
    tokenizer.pre_tokenizer = parts.pre_tokenizer
    tokenizer.decoder = parts.decoder
    return tokenizer


def _class_tokens(name: str, settings: Mapping[str, Any], source: str) -> list[str]:
    """Returns the tokens that a class adds to the pieces of a file."""
    count = settings.get("extra_ids", 100)
    if type(count) is not int or not 0 <= count <= MAXIMUM_EXTRA:
        raise InputError(
            f"the settings next to {source} have extra_ids = {count!r}, expected a "
            f"whole number from 0 to {MAXIMUM_EXTRA:,}"
        )
    is_t5 = name == "T5Tokenizer"
    return [f"<extra_id_{i}>" for i in reversed(range(count))] if is_t5 else []
