"""Checks that the parameter groups of a run train what its model has."""

from collections.abc import Collection

from prompt_tuning.config.run import Run
from prompt_tuning.core import parameter_groups
from prompt_tuning.core.errors import InputError


def check_constant(paths: Collection[str], run: Run) -> None:
    """Refuses a group for the parameters of a prompt that has none.

    Raises:
      InputError: with the config to use instead.
    """
    if run.prompt is None or any("/prompt/" in path for path in paths):
        return
    for regex in [regex for group in run.groups for regex in group.regexes]:
        if "prompt" in regex and not any(
            map(parameter_groups.match_any([regex]), paths)
        ):
            raise InputError(
                f"the parameter groups train {regex}, but the run's prompt is a "
                "constant without parameters (InferenceOnlyPrompt), which can only be "
                "evaluated and used: to train the vectors of a file, give --gin_file "
                "prompts/file.gin instead of prompts/inference_only.gin"
            )


def check_fresh(fresh: Collection[str], labels: Collection[str], run: Run) -> None:
    """Refuses fresh parameters that nothing trains: they would stay random.

    Raises:
      InputError: with the parameters and what the groups train.
    """
    untrained = [path for path in fresh if path not in labels]
    if not untrained:
        return
    listed = ", ".join([*untrained[:2], *(["..."] if len(untrained) > 2 else [])])
    regexes = ", ".join(regex for group in run.groups for regex in group.regexes)
    raise InputError(
        f"{listed} {'is' if len(untrained) == 1 else 'are'} fresh but not trained: "
        f"the parameter groups train {regexes or 'nothing'}. Add a regex to "
        "ParameterGroup.regexes, or leave out what is not trained; of several "
        "--gin_file, give an adapter's or prompt's file after the run's. A prompt that "
        "is only read from a file is an InferenceOnlyPrompt"
    )
