"""`reinforce`: train on rewards."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from prompt_tuning.api.model import Model
from prompt_tuning.api.tune import TunedModel, tune
from prompt_tuning.config import argument_types
from prompt_tuning.config.deferred_factories import Configurable
from prompt_tuning.core.errors import InputError
from prompt_tuning.settings.rollout_settings import RewardFunction, Rollouts
from prompt_tuning.training.progress import Callback


def reinforce(
    model: Model | str | Path,
    method: argument_types.Methods,
    prompts: Any,
    *,
    rewards: Sequence[str | RewardFunction],
    group: int = Rollouts.group,
    new_tokens: int = Rollouts.new_tokens,
    temperature: float | int = Rollouts.temperature,
    steps: int | None = None,
    epochs: int | float | None = None,
    learning_rate: argument_types.LearningRates | None = None,
    optimizer: argument_types.Optimizer | None = None,
    objective: argument_types.Objectives | None = None,
    evaluation: Any = None,
    directory: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    **settings: Unpack[argument_types.TuneFields],
) -> TunedModel:
    """Trains prompts or adapters on rewards of the model's own answers.

    In each step the model, as trained so far, answers each prompt of a batch `group`
    times. Answers that score above their group's average become more likely.
    `rollouts.jsonl` in the run directory records all answers.

    Args:
      model: result of `load`, or a checkpoint as `load` takes it.
      method: a prompt or adapter such as `SoftPrompt(length=20)`, or a list of them.
      prompts: texts, or data in any form that `tune` takes. A reward gets all fields of
        a row.
      rewards: functions `(prompt, completion, row) -> number`, or names; see
        `Rollouts`.
      group: number of answers per prompt.
      new_tokens: maximum number of tokens of an answer.
      temperature: sampling temperature.
      steps: number of optimizer steps; see `tune`.
      epochs: how often each prompt is answered, instead of `steps`.
      learning_rate: number or schedule; see `tune`.
      optimizer: settings or an optax transformation; see `tune`.
      objective: settings of `GRPO`; None for its defaults.
      evaluation: held-out data, with completions.
      directory: run directory; None for a temporary one.
      callbacks: functions called with the step and its logged metrics; see `tune`.
      progress: whether to show a progress bar.
      settings: other fields of `Run` and `DataSource`; `batch_size` counts prompts. To
        set other fields of `Rollouts`, call `tune` with `rollouts=Rollouts(...)` and
        `objective=GRPO(...)`.

    Returns:
      the trained model; `result` has the metrics.

    Raises:
      InputError: if an argument, the data or a reward cannot be used.

    Examples:
      >>> def shout(prompt: str, completion: str, row: dict) -> float:
      ...     return float(completion.isupper())
      >>> tuned = pt.reinforce(
      ...     model,
      ...     pt.SoftPrompt(length=5),
      ...     ["apple=", "bread="],
      ...     rewards=[shout],
      ...     new_tokens=8,
      ...     steps=2,
      ...     batch_size=2,
      ...     progress=False,
      ... )
      >>> tuned.result.step
      2
    """
    if "rollouts" in settings:
        raise InputError(
            "reinforce makes Rollouts of its arguments: for more settings call "
            "tune(..., objective=GRPO(), rollouts=Rollouts(...))"
        )
    settings["rollouts"] = Configurable("Rollouts")(
        rewards=rewards, group=group, new_tokens=new_tokens, temperature=temperature
    )
    if isinstance(prompts, Sequence) and not isinstance(prompts, str):
        prompts = [{"prompt": x} if isinstance(x, str) else x for x in prompts]
    return tune(
        model,
        method,
        prompts,
        steps=steps,
        epochs=epochs,
        learning_rate=learning_rate,
        optimizer=optimizer,
        objective=Configurable("GRPO")() if objective is None else objective,
        evaluation=evaluation,
        directory=directory,
        callbacks=callbacks,
        progress=progress,
        **settings,
    )
