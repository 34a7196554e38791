"""Starts of a key/value prefix that stands for a whole text."""

import numpy as np

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.number_ranges import PositiveInteger
from prompt_tuning.prompts import initializers
from prompt_tuning.prompts.initializers import TextInitializer, Vocabulary
from prompt_tuning.prompts.stack_shape import PrefixStart


def from_chunks(text: str, chunks: PositiveInteger = 8) -> TextInitializer:
    """Starts a `KeyValuePrefix` from windows spread evenly over a text.

    The model reads the tokens that begin every text, e.g. BOS, and then the windows,
    one after the other. Their keys and values are the prefix. Prefer it to `from_text`
    if the text is much longer than the prefix, and all of it matters.

    Args:
      text: the text, with at least as many tokens as the prefix has slots.
      chunks: number of windows; at most one per slot.

    Raises:
      InputError: when it initializes the prompt, if the text is too short, or the
        prompt has no keys and values.

    Examples:
      >>> start = pt.from_chunks("reverse: abcdefghijkl", chunks=2)
      >>> prefix = pt.KeyValuePrefix(length=6, initializer=start)
      >>> trained, _ = model.attach(prefix).partition()
      >>> trained["decoder/prompt/prompt"].shape
      (4, 2, 6, 4, 32)
    """

    def initialize(key, shape, vocabulary):
        del key
        ids = _read(text, shape, vocabulary, "from_chunks")
        begin = len(vocabulary.tokenizer.begin_ids)
        return initializers.request_start(
            PrefixStart(spread_windows(ids, shape[2], chunks, begin)), shape, vocabulary
        )

    return initialize


def from_attention_matching(
    text: str, windows: PositiveInteger = 16
) -> TextInitializer:
    """Starts a `KeyValuePrefix` so that attending to it is like attending to a text.

    In each block and head, the slots are the keys of the text that get most attention
    while the model rereads windows of the text. The values follow by least squares, so
    that the prefix gives the same attention output as the whole text. No gradient is
    computed. It is the closed form of Zweiger et al. (2026, "Attention Matching", arXiv
    2602.16284), without its bias per slot, and the best start of a memory: training
    then takes a fraction of the steps. If a text is longer than the model's positions,
    the model reads it in parts, each of which gets its share of the slots.

    Args:
      text: the text, with more tokens than the prefix has slots.
      windows: number of windows of the text that the model rereads.

    Raises:
      InputError: when it initializes the prompt, if the text is too short, or the model
        has attention that the closed form does not support.

    Examples:
      >>> start = pt.from_attention_matching("reverse: abcdefghijkl", windows=2)
      >>> prefix = pt.KeyValuePrefix(length=6, initializer=start)
      >>> trained, _ = model.attach(prefix).partition()
      >>> trained["decoder/prompt/prompt"].shape
      (4, 2, 6, 4, 32)
    """

    def initialize(key, shape, vocabulary):
        del key
        ids = _read(text, shape, vocabulary, "from_attention_matching")
        begin = len(vocabulary.tokenizer.begin_ids)
        return initializers.request_start(
            PrefixStart(ids, windows, begin), shape, vocabulary
        )

    return initialize


def _read(
    text: str, shape: tuple[int, ...], vocabulary: Vocabulary, name: str
) -> tuple[int, ...]:
    if len(shape) != initializers.PREFIX_DIMENSIONS:
        raise InputError(
            f"{name}() computes keys and values, and this prompt has vectors: use it "
            "with KeyValuePrefix, or use from_text()"
        )
    return initializers.document_tokens(vocabulary.encode(text), shape, vocabulary)


def spread_windows(
    ids: tuple[int, ...], slots: int, count: int, begin: int
) -> tuple[int, ...]:
    """Returns `slots` tokens: the first `begin`, then `count` windows spread evenly."""
    begin = min(begin, slots - 1)
    count = min(count, slots - begin)
    sizes = [len(part) for part in np.array_split(np.arange(slots - begin), count)]
    free = len(ids) - slots  # tokens that are left out, between the windows
    chosen, first = list(ids[:begin]), begin
    for number, size in enumerate(sizes):
        skipped = free * number // max(count - 1, 1)
        chosen += ids[first + skipped : first + skipped + size]
        first += size
    return tuple(chosen)
