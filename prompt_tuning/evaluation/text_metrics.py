"""Similarity of generated texts to reference texts.

`rouge-score` computes ROUGE and `sacrebleu` BLEU, so the numbers compare with published
ones. Both are in the extra `metrics` and are imported on first use.
"""

import collections
import re
import string
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from prompt_tuning.evaluation.metric_sums import MetricSums, Sums, mean_metric
from prompt_tuning.settings.evaluation_settings import ROUGE_NAMES

References = Sequence[Sequence[str]]
"""Reference texts of each example, at least one."""

TextMetric = Callable[[Sequence[str], References], dict[str, MetricSums]]

BLEU_ORDER = 4
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def answer_words(text: str) -> list[str]:
    """Splits an answer into words as SQuAD does (Rajpurkar et al. 2016, section 6.1).

    Words are in lower case, without ASCII punctuation and the articles a, an and the.
    """
    bare = text.lower().translate(_PUNCTUATION)
    return re.sub(r"\b(?:a|an|the)\b", " ", bare).split()


def word_f1(generated: Sequence[str], reference: Sequence[str]) -> float:
    """Computes the F1 of two bags of words; 1 if both are empty, 0 if only one is."""
    if not generated or not reference:
        return float(generated == reference)
    shared = collections.Counter(generated) & collections.Counter(reference)
    return 2 * shared.total() / (len(generated) + len(reference))


def squad(generated: Sequence[str], references: References) -> dict[str, MetricSums]:
    """Computes SQuAD's F1 and exact match, each with the best reference."""
    f1, exact = [], []
    for text, texts in zip(generated, references, strict=True):
        words = answer_words(text)
        reference_words = [answer_words(reference) for reference in texts]
        f1.append(max(word_f1(words, reference) for reference in reference_words))
        exact.append(any(words == reference for reference in reference_words))
    return {"squad_f1": mean_metric(f1), "squad_exact_match": mean_metric(exact)}


def rouge(generated: Sequence[str], references: References) -> dict[str, MetricSums]:
    """Computes the F-measures of ROUGE-1, -2 and -L (Lin 2004) with stemming.

    Each text is compared with its best reference. `rouge-score` only finds words of
    Latin letters and digits.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE_NAMES), use_stemmer=True)
    scores = [
        scorer.score_multi(list(texts), text)
        for text, texts in zip(generated, references, strict=True)
    ]
    return {
        name: mean_metric([each[name].fmeasure for each in scores])
        for name in ROUGE_NAMES
    }


def bleu(generated: Sequence[str], references: References) -> dict[str, MetricSums]:
    """Computes BLEU over all texts together (Papineni et al. 2002), from 0 to 100.

    Uses the defaults of `sacrebleu` (Post 2018): tokenizer 13a, exponential smoothing.
    """
    from sacrebleu.metrics.bleu import BLEU

    metric, rows = BLEU(), []
    for text, texts in zip(generated, references, strict=True):
        score = metric.corpus_score([text], [[reference] for reference in texts])
        rows.append([*score.counts, *score.totals, score.sys_len, score.ref_len])

    def score_one(sums: Float[np.ndarray, "k"]) -> float:
        numbers = np.rint(sums).astype(int).tolist()
        counts, totals = numbers[:BLEU_ORDER], numbers[BLEU_ORDER:-2]
        lengths = numbers[-2], numbers[-1]
        return BLEU.compute_bleu(
            counts, totals, *lengths, smooth_method=metric.smooth_method
        ).score

    def score_all(sums: Sums) -> Float[np.ndarray, "*lead"]:
        return np.apply_along_axis(score_one, -1, sums)

    return {
        "bleu": MetricSums(np.array(rows, np.float64), score_all, per_example=False)
    }


TEXT_METRICS: dict[str, TextMetric] = {"squad": squad, "rouge": rouge, "bleu": bleu}
