"""What a run trained, taken out of its model: evaluated, so that nothing but arrays is
left of the modules that made it.
"""

import numpy as np

from prompt_tuning.adapters.adapter import (
    ADDED_DEEP,
    DEEP,
    IA3,
    LORA,
    MULTITASK,
    PREFIX,
    PROMPT,
    Adapter,
    Arrays,
)
from prompt_tuning.adapters.peft.ia3 import SCALE
from prompt_tuning.adapters.peft.lora import A, B
from prompt_tuning.adapters.peft.prompts import PREFIX_PATH, as_multitask
from prompt_tuning.core.errors import InputError
from prompt_tuning.models.build import Prompt, projections
from prompt_tuning.models.decoder_only import DecoderOnly
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.prompts.deep import AddedDeepPrompt, DeepPrompt
from prompt_tuning.prompts.multitask import FactorizedMultiTaskPrompt
from prompt_tuning.prompts.prefix import KeyValuePrefix
from prompt_tuning.prompts.projection_adapters import InputScale, LowRank, OutputScale
from prompt_tuning.prompts.prompting import Prompting


def adapters_of(model: LanguageModel) -> list[Adapter]:
    """All that is trained beside a model, as adapters of one kind each.

    A prompt is what its module makes without dropout: reparameterised ones are folded,
    padding is cut off, and prompts of several tasks are factorised unless they are.

    Raises:
      InputError: for an adapter of a projection that has no other form.
    """
    found: dict[str, Arrays] = {}
    for stack, prompt in model.prompts().items():
        kind, parameters = _of_prompt(stack, prompt)
        found.setdefault(kind, {}).update(parameters)
    if MULTITASK in found and PROMPT in found:
        # One stack has a prompt for each task, and the other one for all.
        for path, vectors in found.pop(PROMPT).items():
            tasks = len(next(x for p, x in found[MULTITASK].items() if "rows" in p))
            repeated = np.broadcast_to(vectors, (tasks, *vectors.shape))
            made = as_multitask({path.split("/")[0]: repeated})
            found[MULTITASK].update(made.parameters)
    adapters = [Adapter(kind=kind, parameters=x) for kind, x in found.items()]
    return adapters + _of_projections(model)


def _of_prompt(stack: str, prompt: Prompt) -> tuple[str, Arrays]:
    """The kind and the arrays of one prompt."""
    path = f"{stack}/prompt/prompt"
    if isinstance(prompt, KeyValuePrefix):
        return PREFIX, {path: np.asarray(prompt())}
    if isinstance(prompt, AddedDeepPrompt):
        added = np.asarray(prompt.added[...])
        leaves = {path: np.asarray(prompt()), f"{stack}/prompt/added": added}
        return ADDED_DEEP, leaves
    if isinstance(prompt, DeepPrompt):
        return DEEP, {path: np.asarray(prompt.every_block())}
    if isinstance(prompt, FactorizedMultiTaskPrompt):
        leaves = {
            leaf: np.asarray(getattr(prompt, leaf)[...])
            for leaf in ("shared", "columns", "rows")
        }
        return MULTITASK, {f"{stack}/prompt/{leaf}": x for leaf, x in leaves.items()}
    vectors = np.asarray(prompt())[..., : int(prompt.real_length), :]
    if vectors.ndim == 3:
        return MULTITASK, as_multitask({stack: vectors}).parameters
    return PROMPT, {path: vectors}


def _of_projections(model: LanguageModel) -> list[Adapter]:
    """The LoRAs and the scalings, in the order in which a projection applies them."""
    found: dict[str, Arrays] = {LORA: {}, IA3: {}}
    scalings, scaled_first = {}, False
    for path, dense in projections(model):
        kinds = []
        for name, adapter in dense.adapters.items():
            if isinstance(adapter, LowRank):
                scalings[path] = float(adapter.scaling)
                kind, leaves = LORA, {A: adapter.a, B: adapter.b}
            elif isinstance(adapter, InputScale | OutputScale):
                kind, leaves = IA3, {SCALE: adapter.scale}
            else:
                raise InputError(
                    f"{path}/adapters/{name} is a {type(adapter).__name__}, which has "
                    "no form outside of this library"
                )
            arrays = {
                f"{path}/{leaf}": np.asarray(x[...]) for leaf, x in leaves.items()
            }
            found[kind] |= arrays
            kinds.append(kind)
        scaled_first |= kinds == [IA3, LORA]
    made = [
        Adapter(kind=LORA, parameters=found[LORA], scalings=scalings),
        Adapter(kind=IA3, parameters=found[IA3]),
    ]
    ordered = reversed(made) if scaled_first else made
    return [adapter for adapter in ordered if adapter.parameters]


def as_peft_has_it(
    adapter: Adapter, model: LanguageModel | None, prompting: Prompting | None
) -> Adapter:
    """The same adapter in a form that does in PEFT what it does here.

    PEFT trains and uses a second prompt, the decoder's, in multi-task prompts alone;
    two plain prompts become one task of it. A deep prompt of a decoder-only model
    becomes the keys and values that it makes.

    Args:
      adapter: of a run, or read from a file.
      model: the run's, None for a file.
      prompting: how its prompt stands among the text; a prefix if None.

    Raises:
      InputError: if PEFT would do something else with it.
    """
    if adapter.kind in (LORA, IA3):
        return adapter
    _check_prompting(prompting or Prompting())
    if adapter.kind in (DEEP, ADDED_DEEP) and model is not None:
        return _as_prefix(model)
    if adapter.kind == PROMPT and len(adapter.parameters) == 2:
        return as_multitask(
            {path.split("/")[0]: x[None] for path, x in adapter.parameters.items()}
        )
    return adapter


def _check_prompting(prompting: Prompting) -> None:
    """Refuses what stands or sees otherwise than PEFT's prompts do.

    Raises:
      InputError: with how it stands.
    """
    if (
        prompting.placement != "prefix"
        or prompting.prefix_attention
        or prompting.sees != Prompting().sees
    ):
        raise InputError(
            "PEFT puts every prompt before the text, where it sees what a prefix sees; "
            f"this one was trained with {prompting}. Write it as an array (--to npy or "
            "safetensors) for a program that places it so"
        )


def _as_prefix(model: LanguageModel) -> Adapter:
    """The keys and values that a decoder's prompt makes when it runs ahead of the text.

    Raises:
      InputError: if it does not.
    """
    made = model.prefix() if isinstance(model, DecoderOnly) else None
    if made is None:
        raise InputError(
            "PEFT has no deep prompts, and this one is no key/value prefix: it is not "
            "in a decoder-only model, or not run ahead of the text"
        )
    pair = np.stack([np.asarray(x, np.float32) for x in made.key_values], axis=1)
    return Adapter(kind=PREFIX, parameters={PREFIX_PATH: pair[:, :, 0]})
