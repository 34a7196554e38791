"""Check that runs can step together over one copy of the frozen model."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.examples.example_groups import ExampleGroups
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.evaluation.evaluator import Evaluator
from prompt_tuning.losses.normalizers import TOTAL_TARGETS
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.training.run_plan import RunPlan
from prompt_tuning.training.step import PROMPT

MAY_DIFFER = ("directory", "prompt", "groups", "seed", "data_seed")


def check_compatible(runs: Mapping[str, Run]) -> None:
    """Checks that runs agree in the settings that members of a sweep must share.

    Raises:
      InputError: with the first setting that differs.
    """
    (first_name, first), *others = runs.items()
    if first.early_stopping:
        raise InputError(
            f"Run.early_stopping is {first.early_stopping}, but members of a sweep "
            f"step together: give {how_to_set('Run.early_stopping', 0)}; the best "
            "checkpoint of each is kept anyway"
        )
    for name, run in others:
        for field in dataclasses.fields(Run):
            if field.name in MAY_DIFFER or not field.init:
                continue
            path, mine, theirs = _difference(
                f"Run.{field.name}",
                getattr(first, field.name),
                getattr(run, field.name),
            )
            if path:
                raise InputError(
                    f"{path} is {shown(mine)} in member {first_name} and "
                    f"{shown(theirs)} in "
                    f"member {name}; members of one sweep share the model, the data "
                    "and the steps, and may differ only in their prompt, groups (such "
                    "as the learning rate), seed and data_seed. Start one sweep for "
                    "each value"
                )


def _difference(path: str, one: Any, other: Any) -> tuple[str, Any, Any]:
    """Returns the innermost setting that differs; an empty path if none does."""
    if one == other:
        return "", None, None
    if dataclasses.is_dataclass(one) and type(one) is type(other):
        for field in dataclasses.fields(one):
            difference = _difference(
                f"{path}.{field.name}",
                getattr(one, field.name),
                getattr(other, field.name),
            )
            if difference[0]:
                return difference
    return path, one, other


def check_members(plans: Mapping[str, RunPlan]) -> None:
    """Checks that runs can be members of one sweep.

    Raises:
      InputError: if they differ in what they must share, or cannot be stacked.
    """
    check_compatible({name: plan.run for name, plan in plans.items()})
    _check_trained(plans)
    members = list(plans.values())
    answers = {getattr(plan.model.prompts.prompt, "answers", None) for plan in members}
    if len(answers) > 1:
        raise InputError(
            "members of one sweep have ContextPrompts with other answers or another "
            "decay, but they share one step: train each run alone"
        )
    if reads_own_batches(members):
        _check_own_batches(members[0])


def reads_own_batches(members: Sequence[RunPlan]) -> bool:
    """Whether the members learn from different rows or in different orders."""
    orders = {member.run.order_seed for member in members}
    return len(orders) > 1 or members[0].run.rollouts is not None


def _check_own_batches(member: RunPlan) -> None:
    """Checks that batches can be padded to one shape."""
    objective = member.run.objective
    if objective is not None and objective.counts_padding:
        raise InputError(
            "members read their rows in different orders, padded to the same shape, "
            f"and TokenObjective.normalizer is {TOTAL_TARGETS!r}, which counts that "
            "padding, so a member's loss would depend on the others; set "
            "Run.data_seed, so that they share batches "
            f"({how_to_set('Run.data_seed', 0)}), or another normalizer"
        )
    if member.data.batch_tokens is not None:
        raise InputError(
            "members read their rows in different orders, and DataSource."
            "batch_tokens gives them batches of different shapes, which cannot be "
            "stacked within the budget; set Run.data_seed, so that they share batches "
            f"({how_to_set('Run.data_seed', 0)}), or leave out batch_tokens"
        )


def _check_trained(plans: Mapping[str, RunPlan]) -> None:
    """Checks that the members' trained parameters can be stacked."""
    (first_name, first), *others = plans.items()
    expected_shapes = first.model.plan.abstract
    for name, plan in others:
        for path in plan.labels.keys() ^ first.labels.keys():
            raise InputError(
                f"{path} is trained in only one of the members {first_name} and "
                f"{name}; members of one sweep train the same parameters"
            )
        for path in plan.labels:
            shape = plan.model.plan.abstract[path].shape
            expected = expected_shapes[path].shape
            same_width = shape[1:] == expected[1:] and path.endswith(PROMPT)
            if shape != expected and not same_width:
                raise InputError(
                    f"{path} has shape {expected} in member {first_name} and {shape} "
                    f"in member {name}; only soft prompts may differ in shape, "
                    "and only in length"
                )
        if _kinds_differ(first, plan):
            raise InputError(
                f"the prompts of {first_name} and {name} are of different "
                "kinds; sweep over one kind at a time"
            )


def _kinds_differ(one: RunPlan, other: RunPlan) -> bool:
    """Whether two members differ in structure, apart from a trained prompt's length."""
    if one.model.prompt_length == other.model.prompt_length:
        return one.model.graph != other.model.graph
    trains_prompt = any(path.endswith(PROMPT) for path in one.labels)
    prompts = (one.model.prompts.prompt, other.model.prompts.prompt)
    soft = all(type(prompt) is SoftPrompt for prompt in prompts)
    soft &= one.model.prompts.decoder_prompt is None
    return not (trains_prompt and soft)


def check_same_rows(
    examples: Examples | ExampleGroups, longest: RunPlan, members: Sequence[RunPlan]
) -> None:
    """Checks that all members learn from the rows of the one with the longest prompt.

    Raises:
      InputError: if some rows fit only with the shorter prompts.
    """
    shortest = min(members, key=lambda member: member.model.prompt_length)
    if shortest.model.maximum_length == longest.model.maximum_length:
        return
    if examples.truncated:
        raise InputError(
            f"with {longest.model.prompt_length} prompt vectors {examples.truncated} "
            "rows are truncated to other lengths than with "
            f"{shortest.model.prompt_length}, so the members would learn from "
            "different tokens; shorten those rows, or sweep over one length"
        )
    if not examples.skipped:
        return
    left_out = shortest.examples().skipped
    if left_out != examples.skipped:
        raise InputError(
            f"with {longest.model.prompt_length} prompt vectors "
            f"{examples.skipped} rows are too long and left out, with "
            f"{shortest.model.prompt_length} only {left_out}, so the members would "
            "learn from different rows; remove those rows from the files, or sweep "
            "over lengths that leave out the same rows"
        )


def check_same_held_out(
    evaluators: Iterable[Evaluator], members: Sequence[RunPlan]
) -> None:
    """Checks that members are compared on the same held-out rows.

    Raises:
      InputError: if some rows fit only with the shorter prompts.
    """
    examples = [evaluator.examples for evaluator in evaluators]
    skipped = {held_out.skipped for held_out in examples}
    if len(skipped) > 1:
        raise InputError(
            f"prompts of these lengths leave out {sorted(skipped)} held-out rows as "
            "too long, so members would be compared on different rows; shorten rows "
            "or sweep over shorter prompts"
        )
    several = len({member.model.maximum_length for member in members}) > 1
    if several and any(held_out.truncated for held_out in examples):
        raise InputError(
            "prompts of these lengths truncate held-out rows to different lengths, so "
            "members would be compared on different rows; shorten rows or sweep over "
            "one length"
        )
