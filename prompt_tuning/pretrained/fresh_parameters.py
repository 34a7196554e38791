"""First values of the parameters that a checkpoint lacks."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
from jaxtyping import Array, Key

from prompt_tuning.adapters.peft.lora_biases import BIAS, FROZEN
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.parameters import Build, Parameters
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.pretrained.weight_storage import DEVICE
from prompt_tuning.prompts.dora import LORA_A, LORA_B, MAGNITUDE, initial_magnitudes
from prompt_tuning.prompts.low_rank import EVA, LowRank
from prompt_tuning.prompts.low_rank_adapters import LoRA
from prompt_tuning.prompts.state_prefix import STATE
from prompt_tuning.prompts.trained_bias import frozen_biases
from prompt_tuning.prompts.weight_starts import (
    FROM_WEIGHTS,
    START_A,
    START_B,
    initial_starts,
)
from prompt_tuning.sharding.array_placement import Placement


def initialize(
    build: Build, key: Key[Array, ""], paths: Sequence[str], placement: Placement | None
) -> Parameters:
    """Initializes the parameters at some paths; no other initializer runs.

    On a mesh each device computes its own shard.
    """

    def compute(key: Key[Array, ""]) -> Parameters:
        parameters = build(key)[1]
        chosen = {path: parameters[path] for path in paths}
        return chosen if placement is None else placement.pad(chosen)

    if placement is None:
        return jax.jit(compute)(key)
    shardings = {path: placement.shardings[path] for path in paths}
    return jax.jit(compute, out_shardings=shardings)(key)


def check_on_device(paths: Collection[str], weights: str) -> None:
    """Checks that the frozen weights are where adapters that read them need them.

    `paths` are all parameters'; `weights` is `Pretrained.weights`.
    """
    if weights == DEVICE:
        return
    for end, need, setting in (
        (
            START_A,
            "LoRA.initial computes the first factors from the frozen weights",
            "LoRA.initial",
        ),
        (BIAS, "trained biases start from the frozen ones", "LoRA.bias"),
        (
            MAGNITUDE,
            "DoRA computes the norms of the frozen weights in each step",
            "LoRA.dora",
        ),
    ):
        if any(path.endswith(end) for path in paths):
            raise InputError(
                f"Pretrained.weights is {shown(weights)}, but {need}, which must be on "
                f"the device: give {how_to_set('Pretrained.weights', DEVICE)}, or "
                f"leave out {setting}"
            )


def complete_adapters(
    parameters: Parameters,
    loras: Mapping[str, LowRank],
    placement: Placement | None,
    given: Collection[str] = (),
) -> Parameters:
    """Computes the first values of adapters that depend on the frozen weights.

    `loras` are by the path of their projection. A `placement` of None means one device;
    on a mesh, it gathers the weights of one block at a time. `given` are paths of
    parameters that the caller already has from elsewhere.
    """
    parameters = _with_magnitudes(parameters, loras, placement)
    parameters = _with_biases(parameters, placement)
    # Singular values of large weights take long.
    fresh = {path: x for path, x in loras.items() if path + START_A not in given}
    return _with_starts(parameters, fresh, placement)


def _with_magnitudes(
    parameters: Parameters, loras: Mapping[str, LowRank], placement: Placement | None
) -> Parameters:
    """Adds DoRA's first magnitudes, the norms of the frozen weights."""
    scalings = {p: x.scaling for p, x in loras.items() if x.magnitude is not None}
    needed = {
        path: leaf
        for path, leaf in parameters.items()
        if path.partition("/kernel")[0].partition("/adapters/")[0] in scalings
    }
    start = functools.partial(initial_magnitudes, scalings=scalings)
    computed = [path + MAGNITUDE for path in scalings]
    return parameters | _compute(start, needed, computed, placement)


def _with_starts(
    parameters: Parameters, loras: Mapping[str, LowRank], placement: Placement | None
) -> Parameters:
    """Adds the first factors of LoRAs that start from the frozen weights."""
    chosen = {path: x for path, x in loras.items() if x.initial in FROM_WEIGHTS}
    needed = {
        path: leaf
        for path, leaf in parameters.items()
        if path.partition("/kernel")[0] in chosen
    }
    start = functools.partial(
        initial_starts,
        ranks={path: x.ranks for path, x in chosen.items()},
        scalings={path: x.scaling for path, x in chosen.items()},
        initial={path: x.initial for path, x in chosen.items()},
    )
    ends = (LORA_A, LORA_B, START_A, START_B)
    computed = [path + end for path in chosen for end in ends]
    return parameters | _compute(start, needed, computed, placement)


def _with_biases(parameters: Parameters, placement: Placement | None) -> Parameters:
    """Copies the frozen biases to the trained ones that start from them."""
    paths = [path for path in parameters if path.endswith(BIAS)]
    frozen = [path.removesuffix(BIAS) + FROZEN for path in paths]
    needed = {path: parameters[path] for path in (*paths, *frozen)}
    return parameters | _compute(frozen_biases, needed, paths, placement)


def _compute(
    function: Callable[[Parameters], Parameters],
    needed: Parameters,
    computed: Sequence[str],
    placement: Placement | None,
) -> Parameters:
    """Computes the parameters at some paths from others; nothing without paths."""
    if not computed:
        return {}
    shardings = None
    if placement is not None:
        shardings = {path: placement.shardings[path] for path in computed}
    return jax.jit(function, out_shardings=shardings)(needed)


def initialized_by(path: str, tuning: Tuning) -> str:
    """Describes the initializer of a fresh parameter."""
    if path.startswith("token_embedder/adapters/"):
        return "the tokens' own rows, and the table's mean for new tokens"
    if path.endswith(BIAS):
        return "the frozen bias"
    initial = next((x.initial for x in tuning.adapters if isinstance(x, LoRA)), None)
    if "/adapters/lora/" in path and initial in FROM_WEIGHTS:
        return f"the frozen weights ({initial})"
    if path.endswith(LORA_A) and initial == EVA:
        return f"the activations of the first batches ({initial})"
    if path.startswith("head/adapters/"):
        return "the checkpoint's head of as many classes, or normal with deviation 0.02"
    if "/adapters/" in path:
        value = "one" if "/adapters/ia3/" in path else "zero at one factor"
        return f"the adapter ({value}, so the model is unchanged)"
    if path.endswith(STATE):
        return "zero, as in the model without a prompt"
    if "/prompt/" not in path:
        return "the module's initializer"
    decoder = path.startswith("decoder/") and tuning.decoder_prompt is not None
    factory = tuning.decoder_prompt if decoder else tuning.prompt
    bound = getattr(factory, "keywords", {}).get("initializer")
    return f"the prompt's initializer{f' {bound}' if bound else ''}"
