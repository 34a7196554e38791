"""Retrieve the parts of a text that share the most words with a question.

Words are tokens, and the score is BM25 (Robertson and Zaragoza 2009, "The Probabilistic
Relevance Framework", equation 3.15).
"""

import collections
import math
from collections.abc import Sequence

from prompt_tuning.data.text.tokenizers import Tokenizer
from prompt_tuning.texts.text_study import cut_text

PARTS = 4
"""Minimum number of parts to retrieve."""
SHORTEST_PART = 8
SATURATION, LENGTH_WEIGHT = 1.2, 0.75
"""The parameters `k1` and `b` of BM25."""


class TextRetriever:
    """Retrieves parts of a text, up to `count` tokens in total."""

    def __init__(self, text: str, tokenizer: Tokenizer, count: int):
        length = min(max(count // PARTS, SHORTEST_PART), count)
        self._parts = [tuple(part) for part in cut_text(text, tokenizer, length)]
        self._counts = [collections.Counter(part) for part in self._parts]
        self._parts_with = collections.Counter(x for part in self._counts for x in part)
        self._mean = sum(map(len, self._parts)) / len(self._parts)
        self._count = count

    def __call__(self, question: Sequence[int]) -> list[int]:
        """Returns the best parts for a question's tokens, in text order."""
        asked = set(question)
        scores = [self._score(number, asked) for number in range(len(self._parts))]
        chosen, room = [], self._count
        for number in sorted(range(len(scores)), key=lambda n: -scores[n]):
            if len(self._parts[number]) <= room:
                chosen.append(number)
                room -= len(self._parts[number])
        return [token for number in sorted(chosen) for token in self._parts[number]]

    def _score(self, number: int, asked: set[int]) -> float:
        counts, length = self._counts[number], len(self._parts[number]) / self._mean
        penalty = SATURATION * (1 - LENGTH_WEIGHT + LENGTH_WEIGHT * length)
        shared = sorted(asked & counts.keys())
        weights = [counts[token] / (counts[token] + penalty) for token in shared]
        pairs = zip(map(self._rarity, shared), weights, strict=True)
        return math.fsum(rarity * weight for rarity, weight in pairs)

    def _rarity(self, token: int) -> float:
        parts, having = len(self._parts), self._parts_with[token]
        return math.log(1 + (parts - having + 0.5) / (having + 0.5))
