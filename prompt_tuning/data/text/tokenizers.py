"""Tokenizers, read from sentencepiece or Hugging Face files.

A prompt and the completion that continues it are encoded separately, so that no token
spans the boundary, and a prompt has the same ids in training as in generation. A
tokenizer that puts a space before every text (sentencepiece's dummy prefix) would
insert one in the middle of the pair; `encode_continuation` leaves it out, so that the
joined ids decode to the exact text.
"""

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, SupportsIndex, runtime_checkable

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.typed_json import read_limited
from prompt_tuning.data.text import library_errors
from prompt_tuning.data.text.anchors import Anchor, encode_after, find_anchor
from prompt_tuning.data.text.encoding_limits import (
    QUICK,
    UNLIMITED_TEXT,
    Costs,
    LimitedCalls,
    TooSlowError,
    check_text,
    read_costs,
)
from prompt_tuning.data.text.library_errors import reporting_errors
from prompt_tuning.data.text.special_tokens import (
    SpecialTokens,
    begin_token,
    configured_tokens,
    read_json_object,
    read_settings,
)
from prompt_tuning.data.text.tokenizer_folder import find_tokenizer

if TYPE_CHECKING:
    import sentencepiece
    import tokenizers

BYTE_LEVEL_CLASSES = ("GPT2Tokenizer", "CodeGenTokenizer")
"""Classes of transformers that `vocab.json` and `merges.txt` describe completely."""
MAXIMUM_VOCABULARY = 2**24
"""Maximum number of ids of a tokenizer."""


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of a tokenizer.

    Attributes:
      vocabulary_size: one more than the largest id that `encode` can return.
      bos_id: id of the beginning-of-sequence token, or None.
      eos_id: id of the end-of-sequence token, or None.
      pad_id: id of the padding token; EOS or 0 if the tokenizer defines none.
      add_bos: whether the model expects BOS before a text.
    """

    vocabulary_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int
    add_bos: bool

    def encode(self, text: str) -> list[int]:
        """Encodes a text at the beginning of a row, without special tokens."""
        ...

    def encode_continuation(self, text: str) -> list[int]:
        """Encodes a text that continues another, without a space before it."""
        ...

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Decodes ids, ignoring special tokens and ids beyond the vocabulary."""
        ...

    def token(self, id: int) -> str:
        """Returns the vocabulary entry of an id, for inspection."""
        ...


class _SpecialTokenAttributes:
    """Implements the special tokens' attributes of `Tokenizer`.

    Attributes:
      special: ids of the special tokens as defined; `pad_id` is None if no padding
        token is defined.
    """

    def __init__(self, special: SpecialTokens):
        self.special = special
        fallback = 0 if special.eos_id is None else special.eos_id
        self.bos_id = special.bos_id
        self.eos_id = special.eos_id
        self.pad_id = fallback if special.pad_id is None else special.pad_id
        self.add_bos = bool(special.add_bos) and special.bos_id is not None


class SentencePieceTokenizer(_SpecialTokenAttributes):
    """The tokenizer of a sentencepiece `.model` file (T5, Llama 2); see `Tokenizer`.

    It does not include the sentinels that T5 adds after the file's vocabulary.
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
        check_text(text)
        with reporting_errors(lambda: f"the text {shown(text)} cannot be encoded"):
            return self.processor.encode(text)

    def encode_continuation(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return encode_after(self, self._anchor, text)

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """See `Tokenizer`."""
        with reporting_errors(lambda: library_errors.DECODING):
            return self.processor.decode([i for i in map(int, ids) if self._is_text(i)])

    def token(self, id: int) -> str:
        """See `Tokenizer`."""
        if not 0 <= id < self.vocabulary_size:
            return f"<unused {id}>"
        with reporting_errors(lambda: library_errors.DECODING):
            return self.processor.id_to_piece(int(id))

    def _is_text(self, id: int) -> bool:
        return 0 <= id < self.vocabulary_size and not self.processor.is_control(id)

    @functools.cached_property
    def _anchor(self) -> Anchor | None:
        ids = range(self.vocabulary_size)
        return find_anchor(self, [self.token(i) for i in ids if self._is_text(i)])


class HuggingFaceTokenizer(_SpecialTokenAttributes):
    """A `tokenizer.json`, or GPT-2's `vocab.json` and `merges.txt`; see `Tokenizer`.

    Attributes:
      folder: folder that it was loaded from, which may contain a chat template; None if
        it was not loaded from a file.
      costs: what encoding may take.
    """

    def __init__(
        self,
        tokenizer: "tokenizers.Tokenizer",
        special: SpecialTokens,
        folder: Path | None = None,
        costs: Costs = QUICK,
    ):
        super().__init__(special)
        self.tokenizer = tokenizer
        self.folder = folder
        self.costs = costs
        self._limited = LimitedCalls()
        self.vocabulary_size = 1 + max(tokenizer.get_vocab().values(), default=-1)
        if not 0 < self.vocabulary_size <= MAXIMUM_VOCABULARY:
            raise InputError(
                f"the tokenizer's ids go up to {self.vocabulary_size - 1:,}, expected "
                f"at least one, and at most {MAXIMUM_VOCABULARY - 1:,}"
            )

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        check_text(text, self.costs.growth)
        with reporting_errors(
            lambda: (
                f"the text {shown(text)} cannot be encoded, perhaps because a part "
                "of it is not in the tokenizer's vocabulary"
            )
        ):
            if self.costs.is_quick and len(text) <= UNLIMITED_TEXT:
                return self.tokenizer.encode(text, add_special_tokens=False).ids
            return self._encode_batch([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes several texts, faster than calling `encode` for each."""
        for text in texts:
            check_text(text, self.costs.growth)
        try:
            with reporting_errors(lambda: "a text cannot be encoded"):
                return self._encode_batch(texts)
        except TooSlowError:
            raise
        except InputError:  # `encode` reports which text it was
            return [self.encode(text) for text in texts]

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        def encode() -> list[list[int]]:
            encode_batch = self.tokenizer.encode_batch_fast
            return [each.ids for each in encode_batch(texts, add_special_tokens=False)]

        return self._limited(encode, sum(map(len, texts)))

    def encode_continuation(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return encode_after(self, self._anchor, text)

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """See `Tokenizer`."""
        inside = [i for i in map(int, ids) if 0 <= i < self.vocabulary_size]
        with reporting_errors(lambda: library_errors.DECODING):
            if self.costs.is_quick:
                return self.tokenizer.decode(inside, skip_special_tokens=True)
            # Unlike `decode`, it lets other threads run.
            (text,) = self._limited(
                lambda: self.tokenizer.decode_batch([inside], skip_special_tokens=True),
                len(inside),
            )
            return text

    def token(self, id: int) -> str:
        """See `Tokenizer`."""
        inside = 0 <= id < self.vocabulary_size
        entry = self.tokenizer.id_to_token(int(id)) if inside else None
        return f"<unused {id}>" if entry is None else entry

    @functools.cached_property
    def _anchor(self) -> Anchor | None:
        return find_anchor(self, list(self.tokenizer.get_vocab()))


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Encodes a decoder-only model's prompt, after BOS if the model expects one."""
    begin = [tokenizer.bos_id] if tokenizer.add_bos else []
    return [*(i for i in begin if i is not None), *tokenizer.encode(prompt)]


def continued_pair(
    tokenizer: Tokenizer, prompt: str, completion: str
) -> tuple[list[int], list[int]]:
    """Encodes a prompt and the completion that continues the same text.

    The prompt's ids are `encode(prompt)`. If that drops trailing spaces, as in many
    sentencepiece models, the completion's ids begin with them.
    """
    prompt_ids, completion_ids = encode_consecutive(tokenizer, [prompt, completion])
    return prompt_ids, completion_ids


def encode_consecutive(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Encodes texts each of which continues those before; empty texts have no ids.

    Trailing spaces that the ids of one text omit are put before the next.
    """
    encoded: list[list[int]] = []
    encode, omitted = tokenizer.encode, ""
    for text in texts:
        text = omitted + text
        encoded.append(encode(text) if text else [])
        if not text:
            continue
        stripped = text.rstrip()
        omitted = text[len(stripped) :]
        if omitted and encode(stripped) != encoded[-1]:
            omitted = ""
        encode = tokenizer.encode_continuation
    return encoded


def separate_pair(
    tokenizer: Tokenizer, prompt: str, completion: str
) -> tuple[list[int], list[int]]:
    """Encodes a prompt and a completion that are two texts, as in T5."""
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

    In a folder, the first of these files is read: `tokenizer.json`, `tokenizer.model`,
    `spiece.model`, a single `*.model`, or `vocab.json` with `merges.txt` (the format of
    GPT-2, whose special token is `<|endoftext|>`). `bos_token`, `eos_token`,
    `pad_token` and `add_bos_token` are read from `tokenizer_config.json` and
    `special_tokens_map.json`, if they exist; see `read_settings`.

    Args:
      path: path of the file or folder.
      bos_id: id of BOS; this and the following override the files.
      eos_id: id of EOS.
      pad_id: id of the padding token.
      add_bos: whether to put BOS before a text. By default it follows `add_bos_token`,
        else the post-processor of a `tokenizer.json`, or whether a sentencepiece file
        defines BOS.

    Raises:
      InputError: if the file is missing, or cannot be read as a tokenizer.
    """
    file = find_tokenizer(Path(path))
    overrides = SpecialTokens(bos_id, eos_id, pad_id, add_bos)
    config = read_settings(file.parent)
    load = _load_hugging_face
    if file.suffix == ".model":
        load = _load_sentencepiece
    elif file.name == "vocab.json":
        load = _load_byte_level
    with reporting_errors(lambda: f"{file} cannot be used as a tokenizer"):
        tokenizer = load(file, overrides, config)
    if add_bos and tokenizer.bos_id is None:
        raise InputError(
            f"add_bos is set, but {file} defines no BOS: pass bos_id as well"
        )
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a folder contains the files of a tokenizer."""
    names = ("tokenizer.json", "*.model", "vocab.json")
    return any(any(folder.glob(name)) for name in names)


def _load_sentencepiece(
    file: Path, overrides: SpecialTokens, config: dict
) -> Tokenizer:
    import sentencepiece

    content = read_limited(file, library_errors.MAXIMUM_FILE)
    with reporting_errors(lambda: f"{file} is not a sentencepiece model"):
        processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    ids = [processor.bos_id(), processor.eos_id(), processor.pad_id()]
    defaults = SpecialTokens(*(None if i < 0 else i for i in ids), add_bos=ids[0] >= 0)
    vocabulary = {processor.id_to_piece(i): i for i in range(processor.vocab_size())}
    return SentencePieceTokenizer(
        processor,
        overrides.fill_from(configured_tokens(config, vocabulary)).fill_from(defaults),
    )


def _load_hugging_face(file: Path, overrides: SpecialTokens, config: dict) -> Tokenizer:
    import tokenizers

    costs = read_costs(read_json_object(file), str(file))
    with reporting_errors(lambda: f"{file} is not a tokenizer.json"):
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    # It may be set to truncate or pad every text to the length that its model was
    # trained with.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    special = overrides.fill_from(configured_tokens(config, tokenizer.get_vocab()))
    encode = tokenizer.encode_batch
    marked, plain = LimitedCalls()(
        lambda: [encode(["a"], add_special_tokens=x)[0].ids for x in (True, False)], 2
    )
    special = special.fill_from(begin_token(marked, plain, special.bos_id))
    return HuggingFaceTokenizer(tokenizer, special, file.parent, costs)


def _load_byte_level(file: Path, overrides: SpecialTokens, config: dict) -> Tokenizer:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    merges = file.with_name("merges.txt")
    kind = config.get("tokenizer_class", BYTE_LEVEL_CLASSES[0])
    if str(kind).removesuffix("Fast") not in BYTE_LEVEL_CLASSES:
        raise InputError(
            f"{file.parent} has only vocab.json and merges.txt of a {shown(kind)}, "
            "which splits texts by rules that are in neither file; write its "
            f"tokenizer.json by AutoTokenizer.from_pretrained({str(file.parent)!r})"
            ".save_pretrained('tokenizer') in transformers"
        )
    read_json_object(file)
    read_limited(merges, library_errors.MAXIMUM_FILE)
    with reporting_errors(
        lambda: f"{file} and {merges.name} are not a GPT-2 tokenizer"
    ):
        byte_pairs = models.BPE.from_file(str(file), str(merges))
    tokenizer = tokenizers.Tokenizer(byte_pairs)
    prefix_space = bool(config.get("add_prefix_space", False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    end = tokenizer.token_to_id("<|endoftext|>")
    if end is not None:
        tokenizer.add_special_tokens(["<|endoftext|>"])
    special = overrides.fill_from(configured_tokens(config, tokenizer.get_vocab()))
    defaults = SpecialTokens(bos_id=end, eos_id=end, add_bos=False)
    return HuggingFaceTokenizer(tokenizer, special.fill_from(defaults), file.parent)
