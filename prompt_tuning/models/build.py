"""A model of a config's family, with the prompts and adapters that tune it."""

import difflib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flax import nnx
from jaxtyping import Array, Key

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameter_groups import match_any
from prompt_tuning.core.parameters import named_key
from prompt_tuning.models.decoder_only import Decoder, DecoderOnly
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.layers import Dense
from prompt_tuning.models.prefixed import PrefixDecoder, PrefixEncoder
from prompt_tuning.models.prompted import (
    PromptDecoder,
    PromptDecoderOnly,
    PromptEncoder,
    PromptEncoderDecoder,
    PromptEncoderPromptDecoder,
)
from prompt_tuning.models.t5 import Encoder, EncoderDecoder
from prompt_tuning.prompts.prefix import KeyValuePrefix
from prompt_tuning.prompts.projection_adapters import AdapterSpec
from prompt_tuning.prompts.prompting import Prompting
from prompt_tuning.prompts.soft import InputPrompt

Prompt = InputPrompt | KeyValuePrefix


def build_model(
    key: Key[Array, ""],
    config: ModelConfig,
    prompt: Prompt | None = None,
    prompting: Prompting | None = None,
    *,
    decoder_prompt: Prompt | None = None,
    decoder_prompting: Prompting | None = None,
    adapters: Sequence[AdapterSpec] = (),
) -> LanguageModel:
    """A model of the config's family, with its parameters initialised.

    Args:
      key: of the frozen parameters and of adapters; prompts bring their own vectors.
      config: the frozen model.
      prompt: of a decoder-only model, or of the encoder of an encoder-decoder.
      prompting: how it stands among the text; as a prefix if None.
      decoder_prompt: of the decoder of an encoder-decoder.
      decoder_prompting: how that stands among the targets; as a prefix if None.
      adapters: which projections are adapted, and how.

    Raises:
      InputError: if the family has no such choice, or an adapter matches no projection.
    """
    prompting = prompting or Prompting()
    prompting.check(config.architecture)
    if prompting.prefix_attention and prompt is None and adapters:
        raise InputError(
            "prefix_attention is a prompt's, and there are adapters alone: the model "
            "would run causally; leave it out, or set Run.prompt too"
        )
    if config.architecture == "decoder_only":
        if decoder_prompt is not None:
            raise InputError(
                "decoder_prompt is for encoder-decoders; a decoder-only model's prompt "
                "is Run.prompt"
            )
        decoder = _decoder(prompt, prompting)
        family = PromptDecoderOnly if isinstance(prompt, InputPrompt) else DecoderOnly
        model = family(key, config, decoder=decoder)
    else:
        check_decoder_prompting(decoder_prompting)
        family = _encoder_decoder_family(prompt, decoder_prompt)
        model = family(
            key,
            config,
            encoder=_encoder(prompt, prompting),
            decoder=_decoder(decoder_prompt, Prompting()),
        )
    add_adapters(model, adapters, named_key(key, "adapters"))
    return model


def check_decoder_prompting(prompting: Prompting | None) -> None:
    """Refuses what a prompt among targets has no choice in.

    Raises:
      InputError: with what to leave out.
    """
    if prompting is None:
        return
    for field in ("placement", "prefix_attention", "visibility"):
        found, only = getattr(prompting, field), getattr(Prompting(), field)
        if found != only:
            raise InputError(
                f"decoder_prompting.{field} is {found!r}, expected {only!r}: a prompt "
                "in the decoder of an encoder-decoder stands before the targets, "
                "causally"
            )
    if prompting.execution == "shared":
        raise InputError(
            "decoder_prompting.execution is 'shared', but what a prompt in the decoder "
            "sees of the encoder differs by row; use 'auto' or 'joined'"
        )


def _encoder_decoder_family(
    prompt: Prompt | None, decoder_prompt: Prompt | None
) -> type[EncoderDecoder]:
    in_encoder = isinstance(prompt, InputPrompt)
    if in_encoder and isinstance(decoder_prompt, InputPrompt):
        return PromptEncoderPromptDecoder
    return PromptEncoderDecoder if in_encoder else EncoderDecoder


def _encoder(prompt: Prompt | None, prompting: Prompting) -> Callable[..., Encoder]:
    if prompt is None:
        return Encoder
    if isinstance(prompt, KeyValuePrefix):
        _check_prefix(prompting)
        return functools.partial(PrefixEncoder, prompt=prompt)
    return functools.partial(PromptEncoder, prompt=prompt, prompting=prompting)


def _decoder(prompt: Prompt | None, prompting: Prompting) -> Callable[..., Decoder]:
    if prompt is None:
        return Decoder
    if isinstance(prompt, KeyValuePrefix):
        _check_prefix(prompting)
        return functools.partial(PrefixDecoder, prompt=prompt)
    return functools.partial(PromptDecoder, prompt=prompt, prompting=prompting)


def _check_prefix(prompting: Prompting) -> None:
    if prompting != Prompting():
        raise InputError(
            f"a key/value prefix stands before all text and sees none, so it has no "
            f"choice of {prompting}; leave Prompting as it is"
        )


def projections(model: nnx.Module) -> Iterator[tuple[str, Dense]]:
    """All projections of a model, with their paths."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, Dense):
            yield "/".join(map(str, path)), node


def add_adapters(
    model: LanguageModel, adapters: Sequence[AdapterSpec], key: Key[Array, ""]
) -> None:
    """Adapts the projections that each adapter's expressions match.

    Raises:
      InputError: if an expression matches no projection, or two adapters of one kind
        match the same.
    """
    if not adapters:
        return
    found = dict(projections(model))
    for spec in adapters:
        for regex in spec.regexes:
            if not any(map(match_any([regex]), found)):
                raise InputError(_no_projection(spec, regex, list(found)))
        matches = match_any(spec.regexes)
        for path in filter(matches, found):
            dense = found[path]
            if spec.name in dense.adapters:
                raise InputError(
                    f"two adapters {spec.name!r} match the projection {path}; let one "
                    "of them go"
                )
            shape: Any = dense.kernel.shape
            own = named_key(key, f"{path}/{spec.name}")
            dense.adapters[spec.name] = spec.build(own, path, shape, dense.axes)


def _no_projection(spec: AdapterSpec, regex: str, paths: list[str]) -> str:
    near = difflib.get_close_matches(regex, paths, n=3, cutoff=0.0)
    return (
        f"the expression {regex!r} of {type(spec).__name__} matches no projection (it "
        f"must match the whole path); the nearest of {len(paths)} are "
        f"{', '.join(near)}"
    )
