"""Mask the tokens that would make a text break its constraint.

llguidance (https://github.com/guidance-ai) computes the masks on the host while the
device reads the row's last token.
"""

import copy
import dataclasses
import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt32

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.data.text.added_text import (
    CONTEXT_TOKENS,
    drops_space,
    find_spaced,
    token_bytes,
)
from prompt_tuning.data.text.encoding_limits import reporting_errors
from prompt_tuning.decoding import text_constraints
from prompt_tuning.decoding.request import Request
from prompt_tuning.decoding.request_checks import row_ends, text_before
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.pretrained.prompted_model import PromptedModel

MASK_SECONDS = 0.1
"""CPU time limit of a mask after the first; all rows wait for it."""
KEPT_MASKS = 8
"""Number of most recent constraints that keep their first mask in memory."""
KEPT_VOCABULARIES = 2
"""Number of vocabularies kept in memory; they differ in special tokens."""
_Written = tuple[tuple[int, str], ...]
WORD_BITS = 32
"""Number of tokens per word of a mask; the first is in the lowest bit."""


class RowMask:
    """The tokens that may follow in one row.

    Attributes:
      words: the mask, one bit per token.
      complete: whether the text matches and cannot grow.
      problem: why no token can follow although the text does not match; empty if one
        can.

    Args:
      matcher: llguidance's matcher for the row.
      name: setting that has the constraint, for messages.
      size: size of the vocabulary.
      ends: ids that end the row; allowed only after a matching text.
      forbidden: ids that never follow.
    """

    def __init__(
        self,
        matcher: Any,
        name: str,
        size: int,
        ends: Sequence[int],
        forbidden: Sequence[int],
    ):
        self._matcher, self._name = matcher, name
        self._ends = _pack(ends, size)
        self._usable = _pack(range(size), size) & ~(self._ends | _pack(forbidden, size))
        self.complete, self.problem = False, ""
        self._find()

    def copy(self) -> "RowMask":
        """Returns the mask for another row with the same text."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def check(self, token: int) -> bool:
        """Returns whether a token may follow; if not, sets `problem`."""
        word, bit = divmod(token, WORD_BITS)
        allowed = bool(self.words[word] >> np.uint32(bit) & np.uint32(1))
        if not allowed:
            self.problem = f"with token {token}, no text matches the {self._name}"
        return allowed

    def add(self, token: int) -> None:
        """Adds an allowed token that does not end the row."""
        begun = time.thread_time()
        self._matcher.consume_token(token)
        self._find()
        if time.thread_time() - begun > MASK_SECONDS and not self.complete:
            self.problem = f"the {self._name} is too complex: its tokens take too long"

    def _find(self) -> None:
        content = self._matcher.compute_bitmask()
        words = np.frombuffer(content.ljust(4 * len(self._usable), b"\0"), "<u4")
        following = words[: len(self._usable)] & self._usable
        accepts = self._matcher.is_accepting()
        self.words = following
        if accepts:
            self.words = following | self._ends
        if following.any():
            return
        self.complete = accepts
        if not accepts:
            reason = text_constraints.problem_of(self._matcher)
            nothing = not reason or reason.startswith("NoExtension")
            self.problem = f"no token continues a text that matches the {self._name}"
            self.problem += "" if nothing else f": {reason}"


def _pack(tokens: Sequence[int], size: int) -> UInt32[np.ndarray, "W"]:
    """Returns a mask with the given tokens set."""
    bits = np.zeros(-(-size // WORD_BITS) * WORD_BITS, bool)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").view("<u4")


@dataclasses.dataclass
class _Vocabulary:
    """A model's tokens in the form that llguidance reads.

    Attributes:
      tokens: bytes of each token; empty for tokens that never appear in a text.
      eos_token_id: None, so that llguidance adds its own end token.
      bos_token_id: None.
      special_token_ids: none; special tokens are empty as well.
      is_tokenizer_wrapper: tells llguidance that the object has these fields.
    """

    tokens: list[bytes]
    eos_token_id: None = None
    bos_token_id: None = None
    special_token_ids: Sequence[int] = ()
    is_tokenizer_wrapper: bool = True

    def __call__(self, text: str) -> list[int]:
        """Encodes text that the grammar determines; our grammars switch this off."""
        raise NotImplementedError


class MaskReader:
    """Compiles the constraints of requests for a model.

    The model's vocabulary is read when first needed.
    """

    def __init__(self, model: PromptedModel):
        self._model = model
        self._size = model.config.vocabulary_size
        self._opened: OrderedDict[Hashable, RowMask] = OrderedDict()
        self._vocabularies: OrderedDict[_Written, Any] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, request: Request, given: Sequence[int]) -> RowMask:
        """Returns the mask of a new row with a constraint.

        Raises:
          InputError: if no text of the vocabulary matches, or the forced tokens do not.
        """
        sampling = request.sampling
        constraint = sampling.constraint
        assert constraint is not None
        preceding = text_before(request, given, self._model)[-CONTEXT_TOKENS:]
        ends = row_ends(sampling, self._model)
        mask = self._first(
            constraint, preceding, ends, sampling.forbidden, request.written
        )
        if mask.problem:
            raise InputError(f"{mask.problem}, at its beginning")
        if mask.complete:
            raise InputError(f"no text but the empty one matches the {constraint.name}")
        self._check_forced(mask.copy(), sampling, ends)
        return mask

    def _first(
        self,
        constraint: text_constraints.TextConstraint,
        before: Sequence[int],
        ends: Sequence[int],
        forbidden: Sequence[int],
        written: Mapping[int, str],
    ) -> RowMask:
        tokenizer = self._model.needed_tokenizer()
        grammar = constraint.grammar(drops_space(tokenizer, before, self._spaced))
        special = tuple(sorted(written.items()))
        key = (grammar, tuple(ends), tuple(forbidden), special)
        with self._lock:
            if key in self._opened:
                self._opened.move_to_end(key)
                return self._opened[key].copy()
        matcher = self._matcher(constraint.name, grammar, special)
        mask = RowMask(matcher, constraint.name, self._size, ends, forbidden)
        with self._lock:
            self._opened[key] = mask.copy()
            if len(self._opened) > KEPT_MASKS:
                self._opened.popitem(last=False)
        return mask

    def _matcher(self, name: str, grammar: str, special: _Written) -> Any:
        library = text_constraints.guidance_library()
        matcher = library.LLMatcher(
            self._vocabulary(special),
            grammar,
            log_level=0,
            limits=text_constraints.parser_limits(),
        )
        if matcher.is_error():
            raise InputError(
                f"{name} cannot be used: {text_constraints.problem_of(matcher)}"
            )
        return matcher

    def _check_forced(
        self, mask: RowMask, sampling: Sampling, ends: Sequence[int]
    ) -> None:
        for number, token in enumerate(sampling.forced):
            if not mask.check(token):
                text = self._model.needed_tokenizer().decode([token])
                raise InputError(
                    f"the forced token {token} ({shown(text)}), number {number + 1}, "
                    "is not part of a text that matches: leave out forced"
                )
            if token in ends:
                return
            mask.add(token)

    @functools.cached_property
    def _token_bytes(self) -> list[bytes]:
        return token_bytes(self._model.needed_tokenizer())

    @functools.cached_property
    def _spaced(self) -> int | None:
        return find_spaced(self._token_bytes)

    def _vocabulary(self, special: _Written) -> Any:
        """Returns the vocabulary, with texts for some special tokens."""
        with self._lock:
            if special not in self._vocabularies:
                self._vocabularies[special] = self._read_vocabulary(special)
                if len(self._vocabularies) > KEPT_VOCABULARIES:
                    self._vocabularies.popitem(last=False)
            return self._vocabularies[special]

    def _read_vocabulary(self, special: _Written) -> Any:
        empty = [b""] * max(self._size - len(self._token_bytes), 0)
        tokens = [*self._token_bytes[: self._size], *empty]
        for token, text in special:
            tokens[token] = text.encode()
        with reporting_errors(lambda: "the vocabulary cannot follow a constraint"):
            return text_constraints.guidance_library().LLTokenizer(_Vocabulary(tokens))
