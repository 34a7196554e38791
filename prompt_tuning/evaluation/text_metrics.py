"""How much a generated text is like the texts that were wanted.

ROUGE is that of `rouge-score` and BLEU that of `sacrebleu`, so that the numbers are
those that others report. Both are in the extra `metrics`, and are imported when used.
"""

import collections
import importlib.util
import re
import string
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from prompt_tuning.core.errors import InputError
from prompt_tuning.evaluation.metric_sums import MetricSums, Sums, mean_metric

References = Sequence[Sequence[str]]
"""Of each example the texts that are right, at least one."""

TextMetric = Callable[[Sequence[str], References], dict[str, MetricSums]]

ROUGE_NAMES = ("rouge1", "rouge2", "rougeL")
BLEU_ORDER = 4
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def answer_words(text: str) -> list[str]:
    """The words of an answer as SQuAD compares them (Rajpurkar et al. 2016, 6.1).

    In lower case, without ASCII punctuation and the articles a, an and the.
    """
    bare = text.lower().translate(_PUNCTUATION)
    return re.sub(r"\b(?:a|an|the)\b", " ", bare).split()


def word_f1(made: Sequence[str], wanted: Sequence[str]) -> float:
    """The F1 of two bags of words; where one is empty, whether both are."""
    if not made or not wanted:
        return float(made == wanted)
    shared = (collections.Counter(made) & collections.Counter(wanted)).total()
    return 2 * shared / (len(made) + len(wanted))


def squad(made: Sequence[str], references: References) -> dict[str, MetricSums]:
    """SQuAD's F1 and exact match, each with the reference that fits best."""
    f1, exact = [], []
    for text, right in zip(made, references, strict=True):
        words, wanted = answer_words(text), [answer_words(one) for one in right]
        f1.append(max(word_f1(words, one) for one in wanted))
        exact.append(any(words == one for one in wanted))
    return {"squad_f1": mean_metric(f1), "squad_exact_match": mean_metric(exact)}


def rouge(made: Sequence[str], references: References) -> dict[str, MetricSums]:
    """The F-measures of ROUGE-1, -2 and -L (Lin 2004), stemmed, best reference.

    `rouge-score` takes Latin letters and digits for words, and nothing else.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE_NAMES), use_stemmer=True)
    found = [
        scorer.score_multi(list(right), text)
        for text, right in zip(made, references, strict=True)
    ]
    return {
        name: mean_metric([scores[name].fmeasure for scores in found])
        for name in ROUGE_NAMES
    }


def bleu(made: Sequence[str], references: References) -> dict[str, MetricSums]:
    """BLEU of all texts together (Papineni et al. 2002), from 0 to 100.

    As `sacrebleu` has it (Post 2018): its tokenizer 13a, exponential smoothing.
    """
    from sacrebleu.metrics.bleu import BLEU

    metric, rows = BLEU(), []
    for text, right in zip(made, references, strict=True):
        found = metric.corpus_score([text], [[one] for one in right])
        rows.append([*found.counts, *found.totals, found.sys_len, found.ref_len])

    def score_one(sums: Float[np.ndarray, "k"]) -> float:
        numbers = np.rint(sums).astype(int).tolist()
        counts, totals = numbers[:BLEU_ORDER], numbers[BLEU_ORDER:-2]
        lengths = numbers[-2], numbers[-1]
        return BLEU.compute_bleu(
            counts, totals, *lengths, smooth_method=metric.smooth_method
        ).score

    def score(sums: Sums) -> Float[np.ndarray, "*lead"]:
        return np.apply_along_axis(score_one, -1, sums)

    return {"bleu": MetricSums(np.array(rows, np.float64), score, per_example=False)}


TEXT_METRICS: dict[str, TextMetric] = {"squad": squad, "rouge": rouge, "bleu": bleu}
METRIC_NAMES = {
    "squad": ("squad_f1", "squad_exact_match"),
    "rouge": ROUGE_NAMES,
    "bleu": ("bleu",),
}
"""What each of them measures."""

_LIBRARIES = {"rouge": ("rouge_score", "rouge-score"), "bleu": ("sacrebleu",) * 2}


def check_library(metric: str) -> None:
    """Refuses a metric whose library is not there.

    Raises:
      InputError: with how to install it.
    """
    if metric not in _LIBRARIES:
        return
    module, name = _LIBRARIES[metric]
    if importlib.util.find_spec(module) is None:
        raise InputError(
            f"Evaluation.metrics has {metric!r}, which needs {name}: "
            "pip install 'prompt-tuning[metrics]'"
        )
