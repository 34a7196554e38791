"""Builds a model from its config, with the prompts and adapters that tune it."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar

import jax
from flax import nnx
from jaxtyping import Array, Key

from prompt_tuning.adapters.peft.lora_biases import trainable_biases
from prompt_tuning.adapters.peft.modules import expert_projections
from prompt_tuning.adapters.peft.modules import projections as projections_in_peft
from prompt_tuning.checkpoints.stored_tensors import Recipe
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.layer_kinds import check_alike
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import describe, named_key, split
from prompt_tuning.models.decoder_only import Decoder, DecoderOnly
from prompt_tuning.models.encoder_decoder import Encoder, EncoderDecoder
from prompt_tuning.models.expert_adapters import ExpertProjection
from prompt_tuning.models.head import Head
from prompt_tuning.models.kernel_stores import chosen_stores, store_as
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.layers import Dense
from prompt_tuning.models.norms import Norm
from prompt_tuning.models.prefixed import PrefixDecoder, PrefixEncoder
from prompt_tuning.models.prompted import PromptDecoder, PromptEncoder
from prompt_tuning.models.transformer import Stack
from prompt_tuning.prompts.class_rows import NAME as CLASSES
from prompt_tuning.prompts.class_rows import ClassRows
from prompt_tuning.prompts.low_rank_adapters import LoRA
from prompt_tuning.prompts.projection_adapters import AdaptedProjection, AdapterSpec
from prompt_tuning.prompts.prompt_module import Attachment, PromptModule
from prompt_tuning.prompts.token_rows import NAME, TokenRows
from prompt_tuning.prompts.trained_bias import TrainedBias
from prompt_tuning.settings.prompting import Prompting

AnyStack = TypeVar("AnyStack", bound=Stack)

ENCODERS: Mapping[Attachment, Callable[..., Encoder]] = {
    Attachment.INPUT: PromptEncoder,
    Attachment.EVERY_BLOCK: PromptEncoder,
    Attachment.KEYS_AND_VALUES: PrefixEncoder,
}
DECODERS: Mapping[Attachment, Callable[..., Decoder]] = {
    Attachment.INPUT: PromptDecoder,
    Attachment.EVERY_BLOCK: PromptDecoder,
    Attachment.KEYS_AND_VALUES: PrefixDecoder,
}


def build_model(
    key: Key[Array, ""],
    config: ModelConfig,
    prompt: PromptModule | None = None,
    prompting: Prompting | None = None,
    *,
    decoder_prompt: PromptModule | None = None,
    decoder_prompting: Prompting | None = None,
    adapters: Sequence[AdapterSpec] = (),
    tokens: TokenRows | None = None,
    classes: ClassRows | None = None,
) -> LanguageModel:
    """Builds a model of the config's family and initializes its parameters.

    Args:
      key: random key of the frozen parameters and the adapters; prompts arrive already
        initialized.
      config: config of the frozen model.
      prompt: prompt of a decoder-only model, or of an encoder-decoder's encoder.
      prompting: position and visibility of that prompt; None puts it first.
      decoder_prompt: prompt of an encoder-decoder's decoder.
      decoder_prompting: the same as `prompting`, for the decoder's prompt.
      adapters: adapters of projections.
      tokens: trained rows of single tokens, already initialized.
      classes: trained class head, already initialized; the config has its labels.

    Raises:
      InputError: if the family does not support a setting, or an adapter matches no
        projection.
    """
    prompting = prompting or Prompting()
    prompting.check(config)
    if config.bidirectional:
        prompting = dataclasses.replace(prompting, prefix_attention=True)
    causal = not config.bidirectional
    if causal and prompting.prefix_attention and prompt is None and adapters:
        raise InputError(
            "prefix_attention applies to prompts, and there are only adapters: the "
            "model would run causally; leave it out, or set Run.prompt too"
        )
    if config.architecture == "decoder_only":
        if decoder_prompt is not None:
            found = "a decoder" if causal else "an encoder (which tags words of a T5)"
            raise InputError(
                f"decoder_prompt is for encoder-decoders, and the model is {found} "
                "alone: set its prompt by Run.prompt"
            )
        if prompt is not None and prompt.attachment is Attachment.KEYS_AND_VALUES:
            # A prefix is no part of the input, and every token sees it in any case.
            prompting = dataclasses.replace(prompting, prefix_attention=False)
        model = DecoderOnly(
            key, config, decoder=_stack(Decoder, DECODERS, prompt, prompting)
        )
    else:
        check_decoder_prompting(decoder_prompting)
        model = EncoderDecoder(
            key,
            config,
            encoder=_stack(Encoder, ENCODERS, prompt, prompting),
            decoder=_stack(Decoder, DECODERS, decoder_prompt, Prompting()),
        )
    store_as(model, chosen_stores(model) | dict(config.stores))
    add_adapters(model, adapters, named_key(key, "adapters"))
    train_biases(model, adapters)
    model.invocation = _invocation(config, adapters, prompt or decoder_prompt)
    if tokens is not None:
        model.token_embedder.adapters[NAME] = tokens
    if classes is not None:
        assert model.head is not None  # a config with labels has one
        if classes.dense is not None and model.head.transform is not None:
            model.head.transform.leave_out_dense()
        model.head.adapters[CLASSES] = classes
    return model


def frozen_graph(config: ModelConfig) -> tuple[nnx.GraphDef, tuple[str, ...]]:
    """Returns the structure of a config's frozen model, and its parameters' paths."""
    graph, abstract = describe(
        lambda key: split(build_model(key, config)), jax.random.key(0)
    )
    return graph, tuple(abstract)


def _invocation(
    config: ModelConfig, adapters: Sequence[AdapterSpec], prompt: PromptModule | None
) -> tuple[int, ...]:
    """Returns the tokens that invoke the LoRAs; empty if these always act.

    Raises:
      InputError: if LoRAs disagree about them, or the rows hold more than the tokens.
    """
    loras = [spec for spec in adapters if isinstance(spec, LoRA)]
    found = {tuple(spec.invocation or ()) for spec in loras}
    if not any(found):
        return ()
    if len(found) > 1:
        raise InputError(
            f"LoRA.invocation is {shown(sorted(found)[0])} in one LoRA and "
            f"{shown(sorted(found)[1])} in another, expected the same in all"
        )
    if prompt is not None or config.architecture != "decoder_only":
        raise InputError(
            "LoRA.invocation is for decoder-only models without prompts, as in PEFT: "
            "leave it out, or train LoRA alone"
        )
    invocation = found.pop()
    if max(invocation) >= config.vocabulary_size:
        raise InputError(
            f"LoRA.invocation has the id {max(invocation)}, and the model has tokens 0 "
            f"to {config.vocabulary_size - 1}"
        )
    return invocation


def check_decoder_prompting(prompting: Prompting | None) -> None:
    """Checks that a decoder's prompt uses only the settings that it supports.

    Raises:
      InputError: names the setting to leave out.
    """
    if prompting is None:
        return
    for field in ("placement", "prefix_attention", "visibility"):
        value, default = getattr(prompting, field), getattr(Prompting(), field)
        if value != default:
            raise InputError(
                f"decoder_prompting.{field} is {shown(value)}, expected {default!r}: a "
                "prompt in the decoder of an encoder-decoder precedes the targets, and "
                "its attention is causal"
            )
    if prompting.execution == "shared":
        raise InputError(
            "decoder_prompting.execution is 'shared', but a prompt in the decoder sees "
            "the encoder's outputs, which differ by row; use 'auto' or 'joined'"
        )


def _stack(
    plain: Callable[..., AnyStack],
    prompted: Mapping[Attachment, Callable[..., AnyStack]],
    prompt: PromptModule | None,
    prompting: Prompting,
) -> Callable[..., AnyStack]:
    """Returns the class of an encoder or a decoder, given its prompt if it has one."""
    if prompt is None:
        return plain
    stack = prompted[prompt.attachment]
    return functools.partial(stack, prompt=prompt, prompting=prompting)


def train_biases(model: LanguageModel, adapters: Sequence[AdapterSpec]) -> None:
    """Adds the trained biases that a LoRA asks for.

    Raises:
      InputError: if the model has no such biases, only some projections of a module
        have LoRA, or LoRAs ask for different biases.
    """
    loras = [spec for spec in adapters if isinstance(spec, LoRA)]
    choices = {spec.bias for spec in loras} - {"none"}
    if not choices:
        return
    choice = choices.pop()
    if choices:
        raise InputError(
            f"LoRA.bias is {choice!r} in one LoRA and {choices.pop()!r} in another, "
            "expected the same in all"
        )
    recipes, started = trainable_biases(model.config), []
    for path, node in list(biased_layers(model)):
        lora = node.adapters.get(LoRA.name)
        if path not in recipes or (lora is None and choice == "lora_only"):
            continue
        assert node.bias is not None  # `biased_layers` yields no others
        if lora is None:
            node.adapters[LoRA.name] = TrainedBias(node.bias)
        else:
            lora.train_bias(node.bias, choice)
        started.append(path)
    _check_biases(choice, started, recipes)


def _check_biases(
    choice: str, started: Collection[str], recipes: Mapping[str, Recipe]
) -> None:
    """Checks that there are biases to train, and that each module has all of its own.

    Transformers gives either all or none of a module's projections a bias.

    Raises:
      InputError: if not.
    """
    if not started:
        which = "no biases" if choice == "all" else "no biases in the adapted modules"
        raise InputError(
            f"LoRA.bias is {choice!r}, but the model has {which}: leave it out"
        )
    sources = {recipes[path].sources for path in started}
    for path, recipe in recipes.items():
        if path not in started and recipe.sources in sources:
            raise InputError(
                f"LoRA.bias is {choice!r}, but {path} is not adapted, and its module "
                f"in transformers, {recipe.sources[0].removesuffix('.bias')}, holds "
                "adapted projections too: PEFT trains the bias of a whole module, so "
                "adapt all of its projections, e.g. by its name in LoRA.at"
            )


def adaptable(
    model: nnx.Module,
) -> Iterator[tuple[str, Dense | ExpertProjection]]:
    """Yields everything that an adapter can adapt, with its path: experts included."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, Dense | ExpertProjection):
            yield "/".join(map(str, path)), node


def biased_layers(model: nnx.Module) -> Iterator[tuple[str, Dense | Norm | Head]]:
    """Yields the layers that may have a bias, with their paths."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, Dense | Norm | Head) and node.bias is not None:
            yield "/".join(map(str, path)), node


def add_adapters(
    model: LanguageModel, adapters: Sequence[AdapterSpec], key: Key[Array, ""]
) -> None:
    """Adds each adapter to the projections that its expression matches.

    Raises:
      InputError: if an expression matches nothing, or two adapters with the same name
        match one projection.
    """
    if not adapters:
        return
    if any(getattr(spec, "layers", None) is not None for spec in adapters):
        check_alike(
            model.config,
            "LoRA.layers counts the layers of a projection",
            "leave LoRA.layers out",
        )
    by_path = dict(adaptable(model))
    modules: dict[str, Sequence[str]] = dict.fromkeys(by_path, ())
    if any(spec.names_modules for spec in adapters):
        named = projections_in_peft(model.config) | expert_projections(model.config)
        modules |= {path: named[path].modules for path in by_path if path in named}
    dense_paths = {p: x for p, x in modules.items() if isinstance(by_path[p], Dense)}
    for spec in adapters:
        offered = modules if isinstance(spec, LoRA) else dense_paths
        for path in spec.select(offered):
            dense = by_path[path]
            if spec.name in dense.adapters:
                raise InputError(
                    f"two adapters {spec.name!r} match the projection {path}; remove "
                    "one of them"
                )
            whole = isinstance(dense, Dense)
            layers = dense.kernel.shape[0] if whole else dense.layers
            adapted = AdaptedProjection(
                path,
                (layers, *dense.sizes),
                dense.axes,
                modules[path],
                0 if whole else dense.experts,
            )
            adapter_key = named_key(key, f"{path}/{spec.name}")
            dense.adapters[spec.name] = spec.build(adapter_key, adapted)
            together = list(dense.adapters.values())
            if len(together) > 1 and any(adapter.alone for adapter in together):
                raise InputError(
                    f"{path} has DoRA and another adapter, but DoRA rescales the whole "
                    "output of its projection: leave one of them out"
                )
