"""Names of a T5's parameters in T5X checkpoints.

Linear layers are stored `[in, out]`, like ours.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from prompt_tuning.checkpoints.stored_tensors import Recipe, layered, transpose
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.t5_config import t5_config
from prompt_tuning.families.family import Recipes


def t5x_recipes(config: ModelConfig) -> Recipes:
    """Returns how each parameter of a T5 is made from the arrays in a T5X checkpoint.

    Raises:
      InputError: if the model is not an encoder-decoder.
    """
    if config.architecture != "encoder_decoder":
        raise InputError(
            f"T5X checkpoints contain encoder-decoders, but the config is "
            f"{config.architecture!r}; use a Hugging Face checkpoint"
        )
    table = {
        "token_embedder/embedding": Recipe(("token_embedder/embedding",)),
        **_stack_recipes("encoder", config.encoder_layers, config.gated),
        **_stack_recipes("decoder", config.layers, config.gated),
    }
    if not config.tied_head:
        head = Recipe(("decoder/logits_dense/kernel",), transform=transpose)
        table["head/kernel"] = head
    return table


def config_bindings(config: ModelConfig) -> list[str]:
    """Returns gin bindings that describe a T5, which T5X checkpoints lack."""
    signature = inspect.signature(t5_config).parameters
    values = {name: getattr(config, name, None) for name in signature}
    values["version"] = "1.0" if config.tied_head else "1.1"
    if config.encoder_layers == config.layers:
        values["encoder_layers"] = None
    bindings = [
        f"t5_config.{name}={values[name]!r}"
        for name, parameter in signature.items()
        if values[name] != parameter.default
    ]
    return ["Pretrained.config=@t5_config()", *bindings]


def t5x_arrays(
    config: ModelConfig, parameters: Mapping[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays of a T5X checkpoint, made from our parameters.

    Raises:
      InputError: if the model has anything but a T5's parameters and prompts.
    """
    recipes = dict(t5x_recipes(config))
    for stack in ("encoder", "decoder"):
        if f"{stack}/prompt/prompt" in parameters:
            name = f"{stack}/prompt/prompt/prompt"
            recipes[f"{stack}/prompt/prompt"] = Recipe((name,))
    different = sorted(recipes.keys() ^ parameters.keys())
    if different:
        raise InputError(
            "T5X has names for the parameters of a T5 and its prompts [P, D], and this "
            f"model differs in {', '.join(different[:5])}"
        )
    for path, recipe in recipes.items():
        array = np.asarray(parameters[path])
        layers = array if recipe.stacked else [array]
        for name, layer in zip(recipe.sources, layers, strict=True):
            # The identity and the transposition are their own inverses.
            yield name, np.ascontiguousarray(recipe.transform(np.asarray(layer)))


def _stack_recipes(stack: str, layers: int, gated: bool) -> Recipes:
    names = {
        "mlp_norm/scale": "pre_mlp_layer_norm/scale",
        "mlp/up/kernel": "mlp/wi_1/kernel" if gated else "mlp/wi/kernel",
        "mlp/down/kernel": "mlp/wo/kernel",
    }
    if gated:
        names["mlp/gate/kernel"] = "mlp/wi_0/kernel"
    if stack == "encoder":
        names |= _attention_names("self_attention", "attention", "attention")
    else:
        names |= _attention_names("self_attention", "self_attention", "self_attention")
        names |= _attention_names(
            "cross_attention", "encoder_decoder_attention", "cross_attention"
        )
    return {
        f"{stack}/relative_position_bias/embedding": Recipe(
            (f"{stack}/relpos_bias/rel_embedding",)
        ),
        f"{stack}/final_norm/scale": Recipe((f"{stack}/{stack}_norm/scale",)),
        **{
            f"{stack}/layers/{ours}": layered(f"{stack}/layers_{{}}/{theirs}", layers)
            for ours, theirs in names.items()
        },
    }


def _attention_names(ours: str, theirs: str, norm: str) -> dict[str, str]:
    return {
        f"{ours}_norm/scale": f"pre_{norm}_layer_norm/scale",
        **{
            f"{ours}/{projection}/kernel": f"{theirs}/{projection}/kernel"
            for projection in ("query", "key", "value", "out")
        },
    }
