"""Check that a run supports its methods."""

from collections.abc import Collection

from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameter_groups import match_any
from prompt_tuning.losses.token_objective import TokenObjective
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.prompts.cpt import ContextPrompt
from prompt_tuning.prompts.low_rank import EVA


def check_methods(run: Run, model: PromptedModel) -> None:
    """Checks the needs of constant and example prompts and LoRA from activations."""
    _check_constant(model.plan.abstract, run)
    _check_activation_starts(run, model)
    _check_context_prompt(run, model)


def _check_constant(paths: Collection[str], run: Run) -> None:
    """Checks that no parameter group is for a prompt without parameters."""
    if run.prompt is None or any("/prompt/" in path for path in paths):
        return
    for regex in [regex for group in run.groups for regex in group.regexes]:
        if "prompt" in regex and not any(map(match_any([regex]), paths)):
            raise InputError(
                f"the parameter groups train {regex}, but the run's prompt is a "
                "constant without parameters (InferenceOnlyPrompt), which can only be "
                "evaluated and used: to train the vectors of a file, start a "
                "SoftPrompt from_file (prompts/file.gin)"
            )


def _check_activation_starts(run: Run, model: PromptedModel) -> None:
    """Checks that the run can read the activations to start from."""
    if not model.activation_loras:
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


def _check_context_prompt(run: Run, model: PromptedModel) -> None:
    """Checks that the loss can count answers in the context."""
    if isinstance(model.prompts.decoder_prompt, ContextPrompt):
        raise _refusal("Run.decoder_prompt is the prompt of an encoder-decoder")
    prompt, config, prompting = model.prompts.prompt, model.config, model.prompting
    if not isinstance(prompt, ContextPrompt):
        return
    found = None
    if config.architecture != "decoder_only" or config.bidirectional:
        found = "the model has an encoder"
    elif not prompting.shared(causal=True) or config.positions == "disentangled":
        found = f"Run.prompting is {prompting}, so that each row has its own context"
    elif config.labels:
        found = "the model has a head of classes"
    elif not isinstance(run.objective, TokenObjective | None):
        found = f"Run.objective is a {type(run.objective).__name__}"
    if found:
        raise _refusal(found)


def _refusal(found: str) -> InputError:
    return InputError(
        "ContextPrompt learns the answers in the context of a decoder-only model by "
        f"their cross-entropy, behind no other text, but {found}: use SoftPrompt with "
        "from_text, or leave the setting out"
    )
