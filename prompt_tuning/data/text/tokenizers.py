"""Text to token ids and back, from the two kinds of file that tokenizers come in.

A prompt and the completion that continues it are encoded apart, so that a prompt has
the same ids in training as when a completion is asked of the model, and no token spans
the boundary. A tokenizer that puts a space before every text (sentencepiece's dummy
prefix) would put one into the middle of the pair; `encode_continuation` leaves it out,
so that the ids of both, joined, decode to the exact text.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, SupportsIndex, runtime_checkable

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.text.special_tokens import (
    SpecialTokens,
    configured,
    read_json_object,
    read_settings,
)

if TYPE_CHECKING:
    import sentencepiece
    import tokenizers

SPACE_MARKS = ("\u2581", "\u0120")
"""How vocabularies write a leading space: sentencepiece's, and byte-level BPE's."""


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer.

    Attributes:
      vocabulary_size: one more than the largest id that `encode` may give.
      bos_id: beginning of sequence, or None.
      eos_id: end of sequence, or None.
      pad_id: what fills rows; EOS or 0 where the tokenizer has no padding token.
      add_bos: whether the model expects BOS before its text.
    """

    vocabulary_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int
    add_bos: bool

    def encode(self, text: str) -> list[int]:
        """The ids of a text that stands first, without special tokens."""
        ...

    def encode_continuation(self, text: str) -> list[int]:
        """The ids of a text that continues another, with no space put before it."""
        ...

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """The text of ids, special tokens and ids past the vocabulary dropped."""
        ...

    def token(self, id: int) -> str:
        """The raw piece of one id, for inspection."""
        ...


class _SpecialTokenAttributes:
    """Sets the special tokens' attributes that `Tokenizer` names.

    Attributes:
      special: the tokens that have a role of their own; None for padding that is EOS.
    """

    def __init__(self, special: SpecialTokens):
        self.special = special
        fallback = 0 if special.eos_id is None else special.eos_id
        self.bos_id = special.bos_id
        self.eos_id = special.eos_id
        self.pad_id = fallback if special.pad_id is None else special.pad_id
        self.add_bos = bool(special.add_bos) and special.bos_id is not None


class SentencePieceTokenizer(_SpecialTokenAttributes):
    """A sentencepiece `.model` file (T5, Llama 2); see `Tokenizer`.

    The sentinels that T5 puts past the file's vocabulary are not in it.
    """

    def __init__(
        self,
        processor: "sentencepiece.SentencePieceProcessor",
        special: SpecialTokens,
    ):
        super().__init__(special)
        self.processor = processor
        self.vocabulary_size = processor.vocab_size()

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return self.processor.encode(text)

    def encode_continuation(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return _encode_after(self, self._anchor, text)

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """See `Tokenizer`."""
        return self.processor.decode([i for i in map(int, ids) if self._is_text(i)])

    def token(self, id: int) -> str:
        """See `Tokenizer`."""
        known = 0 <= id < self.vocabulary_size
        return self.processor.id_to_piece(int(id)) if known else f"<unused {id}>"

    def _is_text(self, id: int) -> bool:
        return 0 <= id < self.vocabulary_size and not self.processor.is_control(id)

    @functools.cached_property
    def _anchor(self) -> "_Anchor | None":
        ids = range(self.vocabulary_size)
        return _find_anchor(self, [self.token(i) for i in ids if self._is_text(i)])


class HuggingFaceTokenizer(_SpecialTokenAttributes):
    """A `tokenizer.json`, or GPT-2's `vocab.json` and `merges.txt`; see `Tokenizer`."""

    def __init__(self, tokenizer: "tokenizers.Tokenizer", special: SpecialTokens):
        super().__init__(special)
        # A tokenizer.json may say to cut or fill every text to the length that its
        # model was trained with.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.vocabulary_size = 1 + max(tokenizer.get_vocab().values())

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        try:
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises nothing narrower
            raise InputError(
                f"the text {text!r} cannot be encoded ({error}): a part of it is not "
                "in the tokenizer's vocabulary, which has no token for the unknown"
            ) from error

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of `encode` for each text, faster than one by one."""
        encode = self.tokenizer.encode_batch_fast
        try:
            return [found.ids for found in encode(texts, add_special_tokens=False)]
        except Exception:  # which text it was, `encode` says
            return [self.encode(text) for text in texts]

    def encode_continuation(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return _encode_after(self, self._anchor, text)

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """See `Tokenizer`."""
        known = [i for i in map(int, ids) if 0 <= i < self.vocabulary_size]
        return self.tokenizer.decode(known, skip_special_tokens=True)

    def token(self, id: int) -> str:
        """See `Tokenizer`."""
        piece = self.tokenizer.id_to_token(int(id)) if id >= 0 else None
        return f"<unused {id}>" if piece is None else piece

    @functools.cached_property
    def _anchor(self) -> "_Anchor | None":
        return _find_anchor(self, list(self.tokenizer.get_vocab()))


@dataclasses.dataclass(frozen=True)
class _Anchor:
    """A text to encode a continuation after, and the ids to drop again."""

    text: str
    ids: list[int]


def _find_anchor(tokenizer: Tokenizer, pieces: Sequence[str]) -> _Anchor | None:
    """An anchor for `tokenizer`, or None if it puts no space before a text.

    The anchor is a character that stands in no piece but at its end, so no token spans
    the boundary after it, and what follows is cut as if it stood alone.
    """
    first = tokenizer.encode("a")
    if not first or not tokenizer.token(first[0]).startswith(SPACE_MARKS):
        return None
    inside = set("".join(piece[:-1] for piece in pieces))
    single = [piece for piece in pieces if len(piece) == 1 and piece not in inside]
    # Punctuation first: a letter may fuse with an accent that begins the text.
    for character in sorted(single, key=str.isalnum):
        ids = tokenizer.encode(character)
        if ids and tokenizer.decode(ids) == character:
            return _Anchor(character, ids)
    raise InputError(
        "this tokenizer puts a space before every text, and has no character to encode "
        "a completion after: use separate texts (an encoder-decoder model) or a "
        "tokenizer without a dummy prefix"
    )


def _encode_after(tokenizer: Tokenizer, anchor: _Anchor | None, text: str) -> list[int]:
    if not text or anchor is None:
        return tokenizer.encode(text)
    ids = tokenizer.encode(anchor.text + text)
    if ids[: len(anchor.ids)] != anchor.ids:
        raise InputError(
            f"the text {text[:20]!r} fuses with what stands before it, so it cannot be "
            "encoded as a completion: begin it with another character"
        )
    return ids[len(anchor.ids) :]


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids that a decoder-only model is given: BOS if it expects one, the prompt."""
    begin = [tokenizer.bos_id] if tokenizer.add_bos else []
    return [*(i for i in begin if i is not None), *tokenizer.encode(prompt)]


def continued_pair(
    tokenizer: Tokenizer, prompt: str, completion: str
) -> tuple[list[int], list[int]]:
    """The ids of a prompt and of the completion that continues the same text.

    The prompt's ids are those of `encode(prompt)`. Where that drops trailing spaces
    (many sentencepiece models do), the completion's ids begin with them.
    """
    prompt_ids, completion_ids = encode_consecutive(tokenizer, [prompt, completion])
    return prompt_ids, completion_ids


def encode_consecutive(tokenizer: Tokenizer, runs: Sequence[str]) -> list[list[int]]:
    """The ids of texts each of which continues those before it; empty ones have none.

    Trailing spaces that the ids of one run leave out are put before the next.
    """
    found: list[list[int]] = []
    encode, dropped = tokenizer.encode, ""
    for run in runs:
        text = dropped + run
        found.append(encode(text) if text else [])
        if not text:
            continue
        kept = text.rstrip()
        dropped = text[len(kept) :]
        if dropped and encode(kept) != found[-1]:
            dropped = ""
        encode = tokenizer.encode_continuation
    return found


def separate_pair(
    tokenizer: Tokenizer, prompt: str, completion: str
) -> tuple[list[int], list[int]]:
    """The ids of a prompt and a completion that are two texts, as T5's are."""
    return tokenizer.encode(prompt), tokenizer.encode(completion)


def load_tokenizer(
    path: str | Path,
    *,
    bos_id: int | None = None,
    eos_id: int | None = None,
    pad_id: int | None = None,
    add_bos: bool | None = None,
) -> Tokenizer:
    """Reads a tokenizer from a file, or from the folder of a checkpoint.

    In a folder the first of these is read: `tokenizer.json`, `tokenizer.model`,
    `spiece.model`, the only `*.model`, `vocab.json` with `merges.txt` (GPT-2's form,
    whose special token is `<|endoftext|>`); and `tokenizer_config.json` and
    `special_tokens_map.json`, where there are such, for `bos_token`, `eos_token`,
    `pad_token` and `add_bos_token`; see `read_settings`.

    Args:
      path: the file or folder.
      bos_id: overrides what the files say; so do the next three.
      eos_id: end of sequence.
      pad_id: padding.
      add_bos: whether BOS comes first. Without it and without `add_bos_token`: what the
        post-processor of a `tokenizer.json` does, and for a sentencepiece file whether
        it has a BOS.

    Raises:
      InputError: if there is no such file, or it cannot be read as a tokenizer.
    """
    file = _tokenizer_file(Path(path))
    asked = SpecialTokens(bos_id, eos_id, pad_id, add_bos)
    config = read_settings(file.parent)
    if file.suffix == ".model":
        tokenizer = _load_sentencepiece(file, asked, config)
    elif file.name == "vocab.json":
        tokenizer = _load_byte_level(file, asked, config)
    else:
        tokenizer = _load_hugging_face(file, asked, config)
    if add_bos and tokenizer.bos_id is None:
        raise InputError(
            f"add_bos is set, but {file} names no BOS: pass bos_id as well"
        )
    return tokenizer


def _tokenizer_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise InputError(
            f"tokenizer {path}: no such file or folder; expected tokenizer.json, a "
            "sentencepiece .model file, or a folder that holds one"
        )
    for name in ("tokenizer.json", "tokenizer.model", "spiece.model"):
        if (path / name).is_file():
            return path / name
    models = sorted(path.glob("*.model"))
    if len(models) == 1:
        return models[0]
    if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        return path / "vocab.json"
    raise InputError(
        f"tokenizer {path}: the folder has {len(models)} .model files; expected "
        "tokenizer.json, tokenizer.model, spiece.model, one *.model, or vocab.json "
        "with merges.txt"
    )


def _load_sentencepiece(file: Path, asked: SpecialTokens, config: dict) -> Tokenizer:
    import sentencepiece

    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    except (RuntimeError, OSError) as error:
        raise InputError(f"{file} is not a sentencepiece model: {error}") from error
    ids = [processor.bos_id(), processor.eos_id(), processor.pad_id()]
    own = SpecialTokens(*(None if i < 0 else i for i in ids), add_bos=ids[0] >= 0)
    id_of = {processor.id_to_piece(i): i for i in range(processor.vocab_size())}
    return SentencePieceTokenizer(
        processor, asked.over(configured(config, id_of)).over(own)
    )


def _load_hugging_face(file: Path, asked: SpecialTokens, config: dict) -> Tokenizer:
    import tokenizers

    read_json_object(file)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise InputError(f"{file} is not a tokenizer.json: {error}") from error
    special = asked.over(configured(config, tokenizer.get_vocab()))
    first = tokenizer.encode("a").ids[:1]
    own = SpecialTokens(add_bos=first == [special.bos_id])
    return HuggingFaceTokenizer(tokenizer, special.over(own))


def _load_byte_level(file: Path, asked: SpecialTokens, config: dict) -> Tokenizer:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    merges = file.with_name("merges.txt")
    read_json_object(file)
    try:
        byte_pairs = models.BPE.from_file(str(file), str(merges))
    except Exception as error:  # the library raises nothing narrower
        raise InputError(
            f"{file} and {merges.name} are not a GPT-2 tokenizer: {error}"
        ) from error
    tokenizer = tokenizers.Tokenizer(byte_pairs)
    prefix_space = bool(config.get("add_prefix_space", False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    end = tokenizer.token_to_id("<|endoftext|>")
    if end is not None:
        tokenizer.add_special_tokens(["<|endoftext|>"])
    special = asked.over(configured(config, tokenizer.get_vocab()))
    own = SpecialTokens(bos_id=end, eos_id=end, add_bos=False)
    return HuggingFaceTokenizer(tokenizer, special.over(own))
