"""Describe the examples of an evaluation in words."""

from prompt_tuning.evaluation.evaluator import Evaluator


def describe_examples(evaluator: Evaluator, resamples: int) -> str:
    """Describes the examples and the intervals of a table in one line."""
    parts = [f"{len(evaluator):,} examples", f"95 % of {resamples:,} bootstrap draws"]
    if evaluator.loss_meaning is not None:
        parts.append(f"loss is the {evaluator.loss_meaning}")
    examples = evaluator.examples
    if examples.skipped:
        parts.append(f"{examples.skipped:,} left out because they are too long")
    if examples.unlearned:
        parts.append(f"{examples.unlearned:,} left out: nothing is learned")
    if examples.without_completion:
        count = examples.without_completion
        parts.append(f"{count:,} left out: they have no completion")
    if examples.repetition.conversations:
        parts.append(str(examples.repetition))
    if examples.truncated:
        parts.append(f"{examples.truncated:,} truncated because they are too long")
    if examples.uncounted:
        parts.append(
            f"{examples.uncounted:,} first tokens not counted in any column, because "
            "the model without a prompt has nothing to predict them from"
        )
    return "; ".join(parts)
