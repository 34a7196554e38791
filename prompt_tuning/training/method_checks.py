"""Checks that a run can train methods that not every run can."""

from collections.abc import Collection

from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameter_groups import match_any
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.prompts.low_rank import EVA


def check_methods(run: Run, model: PromptedModel) -> None:
    """Checks prompts that are constant, and LoRA that starts from data.

    Raises:
      InputError: with the setting that they do not go together with.
    """
    _check_constant(model.plan.abstract, run)
    _check_activation_starts(run, model)


def _check_constant(paths: Collection[str], run: Run) -> None:
    """Refuses a group for the parameters of a prompt that has none.

    Raises:
      InputError: with the config to use instead.
    """
    if run.prompt is None or any("/prompt/" in path for path in paths):
        return
    for regex in [regex for group in run.groups for regex in group.regexes]:
        if "prompt" in regex and not any(map(match_any([regex]), paths)):
            raise InputError(
                f"the parameter groups train {regex}, but the run's prompt is a "
                "constant without parameters (InferenceOnlyPrompt), which can only be "
                "evaluated and used: to train the vectors of a file, give --gin_file "
                "prompts/file.gin instead of prompts/inference_only.gin"
            )


def _check_activation_starts(run: Run, model: PromptedModel) -> None:
    """Refuses a start from activations where they cannot be read.

    Raises:
      InputError: with the setting.
    """
    if not any(lora.initial == EVA for lora in model.loras.values()):
        return
    found = None
    if model.placement is not None:
        found = "Run.mesh divides the model"
    elif model.weight_storage.by_layer:
        found = "Pretrained.weights streams the layers"
    elif run.rollouts is not None:
        found = "Run.rollouts samples the answers"
    elif run.objective is not None and run.objective.embeds is not None:
        found = "Run.objective compares vectors of texts"
    if found:
        raise InputError(
            f"LoRA.initial is {EVA!r}, which reads the activations of whole rows of "
            f"data on one device, but {found}: leave out LoRA.initial, or start from a "
            "run that has it (Run.start_from)"
        )
