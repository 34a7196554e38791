"""A checklist of what may explain a run's result, from its log and measurement."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from prompt_tuning.report.calibration_curve import answers_and_labels
from prompt_tuning.report.curves import learning_rate_curve
from prompt_tuning.report.measurement import Measurement
from prompt_tuning.report.recorded_run import RecordedRun

FEW_EXAMPLES = 30
"""Number of examples below which a bootstrap interval says little."""
DEAD_GRADIENT = 1e-7
GROWN, UNMOVED = 30.0, 0.02
"""Thresholds for the ratio of the prompt's last norm to its first.

`UNMOVED` is its distance from 1.
"""
STILL_FALLING = 0.02
"""Fall of the loss in the last quarter above which more steps are suggested.

It is relative to the first loss.
"""
FEWEST_POINTS = 6
"""Minimum number of losses to fit a line to."""
OVERFITTED = 0.1
UNSHARED = 4
"""Ratio of the best held-out loss to the training loss that suggests overfitting.

The difference must also exceed one nat.
"""
POOR_FIT = 0.5
SAME_ANSWER = 0.9
IGNORED = 0.01
"""Share of attention on the whole prompt below which it counts as ignored."""


class Finding(NamedTuple):
    """One item of the checklist.

    `suspicious` tells whether it may explain a bad result, and `advice` then what to
    try; None if unknown.
    """

    title: str
    suspicious: bool | None
    text: str
    advice: str = ""


Checked = tuple[bool | None, str, *tuple[str, ...]]
"""What `Finding` has after its title; the advice is for a suspicious item alone."""


def check_run(recorded: RecordedRun, measured: Measurement | None) -> list[Finding]:
    """Returns the checklist of a run, suspicious items first."""
    checks: dict[str, Checked] = {
        "Loss at the start": _loss_at_start(recorded, measured),
        "Gradient at the start": _gradient_at_start(recorded),
        "Still falling at the end": _end_of_training(recorded),
        "Fits its training data": _fit_of_training(recorded),
        "Training against held-out": _training_against_held_out(recorded),
        "Learning rate and the prompt's norm": _norm_of_prompt(recorded),
        "Attention on the prompt": _attention_on_prompt(measured),
        "Truncated or skipped": _left_out(measured),
        "Variety of answers": _answers(measured),
        "Labels": _labels(measured),
        "Number of examples": _number_of_examples(measured),
    }
    findings = [
        Finding(title, suspicious, text, *advice if suspicious else ())
        for title, (suspicious, text, *advice) in checks.items()
    ]
    return sorted(findings, key=lambda x: not x.suspicious)


def _loss_at_start(recorded: RecordedRun, measured: Measurement | None) -> Checked:
    steps, losses = recorded.curve("loss")
    if not losses:
        return None, "the log has no loss"
    text = f"{losses[0]:.4g} at step {steps[0]:,}"
    if measured is None:
        return None, text
    uniform = math.log(measured.vocabulary_size)
    text += (
        f"; guessing among all {measured.vocabulary_size:,} tokens costs {uniform:.4g}"
    )
    if measured.bare is not None and "loss" in measured.bare.metrics:
        text += f", no prompt {measured.bare.metrics['loss'].value:.4g} held out"
    if losses[-1] <= uniform:
        return False, text
    advice = (
        "the loss never fell below guessing: check that the tokenizer, the template "
        "and the targets are the model's, and lower the learning rate"
    )
    return True, f"{text}; {losses[-1]:.4g} at the end", advice


def _gradient_at_start(recorded: RecordedRun) -> Checked:
    steps, norms = recorded.curve("gradient_norm")
    if not norms:
        return None, "the log has no gradient norm"
    text = f"norm {norms[0]:.3g} at step {steps[0]:,}"
    advice = "nothing reaches what is trained: check the loss weights and placement"
    return norms[0] < DEAD_GRADIENT, text, advice


def _end_of_training(recorded: RecordedRun) -> Checked:
    """Fits a line to the last quarter of the held-out loss, or else the training loss.

    The loss of a batch is noisier than that of all held-out examples.
    """
    _, losses = recorded.curve("evaluation/loss")
    if len(losses) < FEWEST_POINTS:
        _, losses = recorded.curve("loss")
    part = max(len(losses) // 4, FEWEST_POINTS)
    if len(losses) < part:
        return None, "the log is too short to tell"
    values, places = np.array(losses[-part:]), np.arange(part) - (part - 1) / 2
    slope = (places @ values) / (places @ places)
    fitted = values.mean() + slope * places
    error = np.sqrt(((values - fitted) ** 2).sum() / (part - 2) / (places @ places))
    text = f"a line through its last quarter goes from {fitted[0]:.4g} to "
    text += f"{fitted[-1]:.4g}"
    # What is left of the first loss counts: the log of a small loss may fall forever.
    falling = (
        fitted[0] - fitted[-1] > STILL_FALLING * abs(losses[0]) and slope < -3 * error
    )
    done, planned = recorded.steps
    if done < planned:
        text += f"; stopped after {done:,} of {planned:,} steps"
    return bool(falling), text, "train for more steps: the loss was still falling"


def _mean_at_end(values: Sequence[float]) -> float:
    return float(np.mean(values[-max(len(values) // 10, 1) :]))


def _fit_of_training(recorded: RecordedRun) -> Checked:
    _, shares = recorded.curve("accuracy")
    if not shares:
        return None, "the log has no accuracy"
    mean = _mean_at_end(shares)
    text = f"{100 * mean:.1f} % of the training tokens right at the end"
    advice = (
        "it does not fit even what it was trained on: perhaps the frozen model cannot "
        "do this; try more vectors, another method, rate or model"
    )
    return mean < POOR_FIT, text, advice


def _training_against_held_out(recorded: RecordedRun) -> Checked:
    steps, held_out = recorded.curve("evaluation/loss")
    _, training = recorded.curve("loss")
    if not held_out or not training:
        return None, "the log has no held-out loss"
    mean = _mean_at_end(training)
    best = int(np.argmin(held_out))
    text = f"training {mean:.4g}, held out {held_out[-1]:.4g} at the end"
    text += f" and {held_out[best]:.4g} at best, at step {steps[best]:,}"
    rise = held_out[-1] - held_out[best]
    if rise > OVERFITTED * held_out[best] and held_out[-1] > 1.5 * mean:
        advice = (
            "it overfits: use more data, fewer steps or vectors, or a lower rate; the "
            "best checkpoint is kept all the same"
        )
        return True, text, advice
    advice = (
        "what it learns does not help on held-out data: are both of the same task, and "
        "is there enough training data?"
    )
    return held_out[best] > UNSHARED * mean + 1, text, advice


def _norm_of_prompt(recorded: RecordedRun) -> Checked:
    steps, norms = recorded.curve("prompt_norm")
    if not norms:
        return None, "the log has no prompt norm"
    _, rates = learning_rate_curve(recorded.values, recorded.curve("loss")[0])
    text = f"norm {norms[0]:.4g} at step {steps[0]:,}, {norms[-1]:.4g} at the end"
    if rates:
        text = f"highest rate {max(rates):.3g}; {text}"
    ratio = norms[-1] / max(norms[0], 1e-12)
    if ratio > GROWN:
        return True, text, f"the norm grew {ratio:.0f}-fold: lower the rate"
    unmoved = len(norms) > 1 and abs(ratio - 1) < UNMOVED
    return unmoved, text, "the prompt has hardly moved: raise the rate"


def _attention_on_prompt(measured: Measurement | None) -> Checked:
    """Checks whether the text attends to the prompt."""
    if measured is None:
        return None, "not measured for this page"
    effects = measured.card.effects
    if isinstance(effects, str):
        return None, effects
    count = effects.shares.shape[1]
    text = f"{100 * effects.total_share:.1f} % in the mean over {count:,} vectors"
    if effects.dead:
        text += f"; {len(effects.dead):,} of them are neither read nor missed"
    if effects.total_share < IGNORED:
        advice = (
            "the text hardly attends to the prompt: start it from words, raise the "
            "rate, or place it nearer to the completion (Prompting.placement)"
        )
        return True, text, advice
    return 2 * len(effects.dead) > count, text, "most vectors do nothing: use fewer"


def _left_out(measured: Measurement | None) -> Checked:
    if measured is None:
        return None, "not measured for this page"
    if not measured.left_out:
        return False, "every example is as in the files"
    advice = "raise the maximum lengths, or shorten the texts"
    return True, "; ".join(measured.left_out), advice


def _answers(measured: Measurement | None) -> Checked:
    """Checks whether nearly every input gets the same answer."""
    rows = [] if measured is None else tuned_predictions(measured)
    answers = [row["output"] for row in rows if row["output"] is not None]
    if len(answers) < 2:
        return None, "no answers were made"
    (answer, count), *_ = Counter(answers).most_common(1)
    share = count / len(answers)
    wanted = Counter(row["target"] for row in rows).most_common(1)[0][1] / len(rows)
    text = (
        f"{len(set(answers)):,} different ones; {answer[:60]!r} is {100 * share:.0f} %"
    )
    advice = (
        "it answers nearly every input alike: it has learned at most which answer is "
        "frequent; balance the classes, or train longer"
    )
    return share > max(SAME_ANSWER, wanted + 0.1), text, advice


def tuned_predictions(measured: Measurement) -> list[dict]:
    """Returns the tuned model's prediction for each example."""
    name = next(iter(measured.results))
    return [dict(row) for row in measured.predictions if row["system"] == name]


def _labels(measured: Measurement | None) -> Checked:
    """Compares the accuracy of labels with chance and with the largest class."""
    matrix = None if measured is None else confusion(measured, 0)
    if matrix is None:
        return None, "no labels were ranked"
    total = matrix.sum()
    accuracy, largest = np.trace(matrix) / total, matrix.sum(axis=1).max() / total
    chance = 1 / len(matrix)
    text = (
        f"accuracy {100 * accuracy:.1f} %, chance {100 * chance:.1f} %, always the "
        f"most frequent label {100 * largest:.1f} %"
    )
    if accuracy < chance - 3 * math.sqrt(chance * (1 - chance) / total):
        return (True, text, "worse than chance: are labels swapped somewhere?")
    if accuracy <= largest + 2 * math.sqrt(largest * (1 - largest) / total):
        advice = "hardly better than always answering the most frequent label"
        return True, text, advice
    return False, text


def confusion(measured: Measurement, system: int) -> Float[np.ndarray, "C C"] | None:
    """Counts examples by label (rows) and answer (columns); None without labels.

    `system` is the index of the system among the results.
    """
    found = answers_and_labels(list(measured.results.values())[system])
    if found is None:
        return None
    answered, labels = found
    return labels.T @ answered


def _number_of_examples(measured: Measurement | None) -> Checked:
    if measured is None:
        return None, "not measured for this page"
    count = len(next(iter(measured.tuned.metrics.values())).rows)
    advice = "hold more out: so few say little about others"
    return count < FEW_EXAMPLES, f"{count:,}", advice
