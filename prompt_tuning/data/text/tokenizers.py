"""Tokenizers, read from sentencepiece or Hugging Face files.

A prompt and the completion that continues it are encoded separately, so that no token
spans the boundary, and a prompt has the same ids in training as in generation. A
tokenizer that puts a space before every text (sentencepiece's dummy prefix) would
insert one in the middle of the pair; `encode_continuation` leaves it out, so that the
joined ids decode to the exact text.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, SupportsIndex, runtime_checkable

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.gguf_files import is_gguf
from prompt_tuning.data.text import encoding_limits, tokenizer_folder
from prompt_tuning.data.text.encoding_limits import reporting_errors
from prompt_tuning.data.text.gguf_tokenizer import (
    build_gguf_tokenizer,
    has_gguf_tokenizer,
)
from prompt_tuning.data.text.special_tokens import ROLES, SpecialTokens
from prompt_tuning.data.text.tokenizer_building import BuiltTokenizer, build_tokenizer

if TYPE_CHECKING:
    import tokenizers

SPACE_MARKS = ("\u2581", "\u0120")
"""Characters for a leading space in vocabularies: sentencepiece, byte-level BPE."""
CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
"""Parts of decoded texts that lose their spaces, in the order of transformers."""
UNSETTLED = re.compile(r"(?: (?:n|'[vr])?|')\Z")
"""End of a cleaned text that may lose spaces if more text follows."""


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of a tokenizer.

    Attributes:
      vocabulary_size: one more than the largest id that `encode` can return.
      bos_id: id of the beginning-of-sequence token, or None.
      eos_id: id of the end-of-sequence token, or None.
      pad_id: id of the padding token; EOS or 0 if the tokenizer defines none.
      begin_ids: ids of the tokens that the model expects before a text, such as BOS.
    """

    vocabulary_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int
    begin_ids: tuple[int, ...]

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


class HuggingFaceTokenizer:
    """A tokenizer of the library `tokenizers`; see `Tokenizer`.

    Attributes:
      special: ids of the special tokens; without padding, `pad_id` here is EOS or 0.
      folder: folder or GGUF file that it was loaded from, which may contain a chat
        template; None if it was not loaded from a file.
      costs: limits of encoding.
      cleans_spaces: whether decoded texts lose spaces; see `clean_spaces`.
    """

    def __init__(
        self,
        tokenizer: "tokenizers.Tokenizer",
        special: SpecialTokens,
        folder: Path | None = None,
        costs: encoding_limits.Costs = encoding_limits.QUICK,
        cleans_spaces: bool = False,
    ):
        self.special = special
        self.bos_id, self.eos_id = special.bos_id, special.eos_id
        fallback = 0 if special.eos_id is None else special.eos_id
        self.pad_id = fallback if special.pad_id is None else special.pad_id
        self.begin_ids = special.begin_ids or ()
        self.cleans_spaces = cleans_spaces
        self.tokenizer = tokenizer
        self.folder = folder
        self.costs = costs
        self._limited = encoding_limits.LimitedCalls()
        self.vocabulary_size = 1 + max(tokenizer.get_vocab().values(), default=-1)

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        encoding_limits.check_text(text, self.costs.growth)
        with reporting_errors(
            lambda: f"the text {shown(text)} cannot be encoded, {_reason(text)}"
        ):
            if self.costs.is_quick and len(text) <= encoding_limits.UNLIMITED_TEXT:
                return self.tokenizer.encode(text, add_special_tokens=False).ids
            return self._encode_batch([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes many texts, faster than calling `encode` for each."""
        for text in texts:
            encoding_limits.check_text(text, self.costs.growth)
        try:
            with reporting_errors(lambda: "a text cannot be encoded"):
                return self._encode_batch(texts)
        except encoding_limits.TooSlowError:
            raise
        except InputError:  # `encode` reports which text it was
            return [self.encode(text) for text in texts]

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        def encode() -> list[list[int]]:
            encode_batch = self.tokenizer.encode_batch_fast
            return [each.ids for each in encode_batch(texts, add_special_tokens=False)]

        return self._limited(encode, sum(map(len, texts)))

    def encode_continuation(self, text: str) -> list[int]:
        """See `Tokenizer`; a text that merges with the anchor is refused."""
        if not text or self._anchor is None:
            return self.encode(text)
        before, before_ids = self._anchor
        ids = self.encode(before + text)
        if ids[: len(before_ids)] != before_ids:
            raise InputError(
                f"the text {text[:20]!r} merges with the character before it, so it "
                "cannot be encoded as a completion: begin it with another character"
            )
        return ids[len(before_ids) :]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """See `Tokenizer`."""
        inside = [i for i in map(int, ids) if 0 <= i < self.vocabulary_size]
        with reporting_errors(lambda: encoding_limits.DECODING):
            if self.costs.is_quick:
                text = self.tokenizer.decode(inside, skip_special_tokens=True)
            else:
                # Unlike `decode`, it lets other threads run.
                decode = self.tokenizer.decode_batch
                (text,) = self._limited(
                    lambda: decode([inside], skip_special_tokens=True), len(inside)
                )
        return clean_spaces(text) if self.cleans_spaces else text

    def token(self, id: int) -> str:
        """See `Tokenizer`."""
        inside = 0 <= id < self.vocabulary_size
        entry = self.tokenizer.id_to_token(int(id)) if inside else None
        return f"<unused {id}>" if entry is None else entry

    @functools.cached_property
    def _anchor(self) -> tuple[str, list[int]] | None:
        """A text to encode before a continuation, and its ids, which are then removed.

        None if the tokenizer puts no space before a text. The anchor is a character
        that occurs in vocabulary entries only at their end. So no token spans the
        boundary after it, and the text that follows is encoded as if it stood alone.
        """
        first = self.encode("a")
        if not first or not self.token(first[0]).startswith(SPACE_MARKS):
            return None
        entries = list(self.tokenizer.get_vocab())
        inside = set("".join(entry[:-1] for entry in entries))
        single = [entry for entry in entries if len(entry) == 1 and entry not in inside]
        # Punctuation first: a letter could merge with an accent that begins the text.
        for character in sorted(single, key=str.isalnum):
            ids = self.encode(character)
            if ids and self.decode(ids) == character:
                return character, ids
        raise InputError(
            "this tokenizer puts a space before every text, and has no character after "
            "which a completion can be encoded: use separate texts (an encoder-decoder "
            "model) or a tokenizer without a dummy prefix"
        )


def _reason(text: str) -> str:
    """Returns why a text may not be encoded."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        return "because it has half a surrogate pair, which is no character: remove it"
    return "perhaps because a part of it is not in the tokenizer's vocabulary"


def clean_spaces(text: str) -> str:
    """Removes spaces as `clean_up_tokenization_spaces` of transformers does.

    >>> clean_spaces("I do n't , it ' s .")
    "I don't, it's."
    """
    for part in CLEANED:
        text = text.replace(part, part.strip())
    return text


def is_unsettled(tokenizer: Tokenizer, text: str) -> bool:
    """Tests whether further tokens may change the end of a decoded text."""
    if not isinstance(tokenizer, HuggingFaceTokenizer) or not tokenizer.cleans_spaces:
        return False
    return UNSETTLED.search(text) is not None


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Encodes a decoder-only model's prompt, after the tokens that begin a text."""
    return [*tokenizer.begin_ids, *tokenizer.encode(prompt)]


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
    """Encodes texts that each continue the ones before; empty texts have no ids.

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
    """Encodes a prompt and a completion as two texts, as in T5."""
    return tokenizer.encode(prompt), tokenizer.encode(completion)


def load_tokenizer(path: str | Path, *, eos_id: int | None = None) -> Tokenizer:
    """Reads a tokenizer from a file, or from the folder of a checkpoint.

    In a folder, the first of these files is read: `tokenizer.json`, `tokenizer.model`,
    `spiece.model`, a single `*.model`, `vocab.json` with `merges.txt`, or `vocab.txt`
    (word pieces of BERT). The files next to it add tokens and give them roles
    (`tokenizer_config.json`, `special_tokens_map.json`, `added_tokens.json`), as in
    transformers; see `tokenizer_building`. A GGUF file contains a tokenizer itself.

    Args:
      path: path of the file or folder.
      eos_id: id of EOS; overrides the files.

    Raises:
      InputError: if the file is missing, or cannot be read as a tokenizer.
    """
    file = tokenizer_folder.find_tokenizer(Path(path))
    with reporting_errors(lambda: f"{file} cannot be used as a tokenizer"):
        built = build_gguf_tokenizer(file) if is_gguf(file) else build_tokenizer(file)
        begin, end = _outer_ids(built)
    roles = SpecialTokens(*map(built.roles.get, ROLES), begin_ids=begin)
    if roles.bos_id is None and len(begin) == 1:
        # Without other files only the post-processor defines BOS.
        roles = dataclasses.replace(roles, bos_id=begin[0])
    if roles.eos_id is None and len(end) == 1:
        roles = dataclasses.replace(roles, eos_id=end[0])  # [SEP] of BERT
    special = SpecialTokens(eos_id=eos_id).fill_from(roles)
    with reporting_errors(lambda: f"{file} cannot be used as a tokenizer"):
        folder = file if is_gguf(file) else file.parent
        return HuggingFaceTokenizer(
            built.tokenizer, special, folder, built.costs, built.cleans_spaces
        )


def _outer_ids(built: BuiltTokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the ids that a tokenizer's post-processor puts around a text."""
    encode = built.tokenizer.encode_batch
    (encoded,) = encoding_limits.LimitedCalls()(
        lambda: encode(["a"], add_special_tokens=True), 1
    )
    marked = list(zip(encoded.ids, encoded.special_tokens_mask, strict=True))
    begin, end = (
        tuple(id for id, _ in itertools.takewhile(lambda x: x[1], order))
        for order in (marked, marked[::-1])
    )
    return begin, end


def has_tokenizer(folder: Path) -> bool:
    """Tests whether a folder, or a GGUF file, contains a tokenizer."""
    names = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt")
    return has_gguf_tokenizer(folder) or any(any(folder.glob(name)) for name in names)


@functools.lru_cache(maxsize=8)
def hidden_tokens(tokenizer: Tokenizer) -> Mapping[str, int]:
    """Returns the ids of the special tokens that `decode` leaves out, by their text."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        added = tokenizer.tokenizer.get_added_tokens_decoder().items()
        return {token.content: id for id, token in added if token.special}
    return {}
