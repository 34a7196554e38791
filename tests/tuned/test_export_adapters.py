"""Exporting prompts and adapters of every kind from models."""

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.adapters.peft.folder import check_shapes
from prompt_tuning.adapters.peft.peft_conversion import to_peft
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import merge, split
from prompt_tuning.models.build import build_model
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.prompts.deep import AddedDeepPrompt, DeepPrompt
from prompt_tuning.prompts.factorized import FactorizedMultiTaskPrompt
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.low_rank_adapters import LoRA
from prompt_tuning.prompts.multitask import AddMultiTaskPrompt
from prompt_tuning.prompts.prefix import KeyValuePrefix, ProjectedKeyValuePrefix
from prompt_tuning.prompts.projection_adapters import IA3
from prompt_tuning.prompts.reparameterized import MLPPrompt
from prompt_tuning.prompts.soft import PaddedPrompt, SoftPrompt
from prompt_tuning.prompts.stack_shape import StackShape
from prompt_tuning.prompts.wrapped import DroppedPrompt
from prompt_tuning.settings.prompting import Prompting
from prompt_tuning.tuned.export_adapters import convert_for_peft, export_adapters
from tests.support import dummies
from tests.support.dummies import LLAMA, T5_GATED, P, V

D = LLAMA.width
STACK = StackShape(LLAMA.layers, LLAMA.key_value_heads, LLAMA.head_width)


def prompt_of(cls, seed=0, **settings):
    random = np.random.default_rng(seed).standard_normal((V, D)).astype("f4")
    vocabulary = Vocabulary(random, stack=STACK)
    return cls(jax.random.key(seed), vocabulary, **settings)


def model_of(config, prompt=None, **tuning):
    """Returns a model with distinct numbers and the given prompt."""
    graph, parameters = dummies.unprompted(config)
    model = build_model(jax.random.key(0), config, prompt, **tuning)
    graph, parameters_ = split(model)
    return cast(LanguageModel, merge(graph, parameters_ | parameters))


def only_adapter(model):
    (adapter,) = export_adapters(model)
    return adapter


@pytest.mark.parametrize(
    ("config", "stack"), [(LLAMA, "decoder"), (T5_GATED, "encoder")]
)
def test_a_plain_prompt_is_its_vectors(config, stack):
    prompt = prompt_of(SoftPrompt, length=P)
    adapter = only_adapter(model_of(config, prompt))
    assert adapter.kind == "PROMPT_TUNING"
    (path,) = adapter.parameters
    assert path == f"{stack}/prompt/prompt"
    np.testing.assert_array_equal(adapter.parameters[path], prompt.prompt[...])


def test_a_reparameterized_prompt_is_folded():
    prompt = prompt_of(MLPPrompt, inner=lambda k, v: SoftPrompt(k, v, length=P))
    adapter = only_adapter(model_of(LLAMA, prompt))
    assert adapter.kind == "PROMPT_TUNING"
    array = adapter.parameters["decoder/prompt/prompt"]
    np.testing.assert_allclose(array, prompt(), rtol=1e-5)
    assert array.shape == (P, D)
    assert np.abs(array - prompt.inner()).max() > 0.01


def test_dropout_and_padding_are_removed():
    inner = prompt_of(SoftPrompt, length=P)
    dropped = prompt_of(DroppedPrompt, inner=lambda *_: inner, rate=0.5)
    array = only_adapter(model_of(LLAMA, dropped)).parameters["decoder/prompt/prompt"]
    np.testing.assert_array_equal(array, inner())
    padded = PaddedPrompt(inner(), 2)
    array = only_adapter(model_of(LLAMA, padded)).parameters["decoder/prompt/prompt"]
    np.testing.assert_array_equal(array, inner()[:2])


def prompts_in(tensors):
    factor = tensors["prefix_task_cols"] @ tensors["prefix_task_rows"]
    return tensors["prompt_embeddings"] * factor


def test_task_prompts_are_tasks_of_peft():
    factorized = prompt_of(FactorizedMultiTaskPrompt, length=P, tasks=4, rank=2)
    adapter = only_adapter(model_of(LLAMA, factorized))
    leaves = ("shared", "columns", "rows")
    assert set(adapter.parameters) == {f"decoder/prompt/{leaf}" for leaf in leaves}
    for leaf in leaves:
        expected = getattr(factorized, leaf)[...]
        array = adapter.parameters[f"decoder/prompt/{leaf}"]
        np.testing.assert_array_equal(array, expected)
    added = prompt_of(AddMultiTaskPrompt, length=P, tasks=4)
    exported = to_peft(only_adapter(model_of(LLAMA, added)), LLAMA)
    assert exported.settings["num_tasks"] == 4
    np.testing.assert_array_equal(prompts_in(exported.tensors), added())


def test_two_plain_prompts_are_one_task_of_peft():
    first, second = (prompt_of(SoftPrompt, seed, length=P) for seed in (0, 1))
    model = model_of(T5_GATED, first, decoder_prompt=second)
    adapter = convert_for_peft(only_adapter(model), model, None)
    exported = to_peft(adapter, T5_GATED)
    check_shapes(exported.settings, exported.tensors, "ours")
    both = np.concatenate([first(), second()])
    np.testing.assert_array_equal(prompts_in(exported.tensors), both[None])


def test_a_task_prompt_and_a_plain_prompt_can_be_combined():
    tasks = prompt_of(AddMultiTaskPrompt, length=P, tasks=3)
    plain = prompt_of(SoftPrompt, 1, length=P)
    adapter = only_adapter(model_of(T5_GATED, tasks, decoder_prompt=plain))
    exported = to_peft(adapter, T5_GATED)
    expected = np.concatenate([tasks(), np.tile(plain(), (3, 1, 1))], axis=1)
    np.testing.assert_array_equal(prompts_in(exported.tensors), expected)


def test_a_prefix_with_frozen_slots_is_pefts_cartridge():
    prompt = prompt_of(KeyValuePrefix, length=P, frozen_slots=2)
    adapter = only_adapter(model_of(LLAMA, prompt))
    settings = to_peft(adapter, LLAMA).settings
    assert (settings["peft_type"], settings["num_frozen_tokens"]) == ("CARTRIDGE", 2)


@pytest.mark.parametrize("cls", [KeyValuePrefix, ProjectedKeyValuePrefix])
def test_a_prefix_is_its_keys_and_values(cls):
    prefix = prompt_of(cls, length=P)
    adapter = only_adapter(model_of(LLAMA, prefix))
    assert adapter.kind == "PREFIX_TUNING"
    array = adapter.parameters["decoder/prompt/prompt"]
    assert array.shape == (2, 2, P, 2, 4)
    np.testing.assert_allclose(array, prefix(), rtol=1e-6)


def test_an_encoders_prefix_cannot_be_written_for_peft():
    adapter = only_adapter(model_of(T5_GATED, prompt_of(KeyValuePrefix, length=P)))
    assert set(adapter.parameters) == {"encoder/prompt/prompt"}
    with pytest.raises(InputError, match="prefixes into a decoder only"):
        to_peft(convert_for_peft(adapter, None, None), T5_GATED)


def logits(model, tokens):
    batch = dummies.make_batch(LLAMA, [([], row) for row in tokens])
    # Token 0 is predicted by a prompt, but not by a prefix.
    return jax.jit(lambda batch: model.logits(model.hidden(batch)))(batch)[:, 1:]


@pytest.mark.slow
@pytest.mark.parametrize("cls", [DeepPrompt, AddedDeepPrompt, SoftPrompt])
def test_a_prompt_computed_before_the_text_becomes_a_prefix(cls):
    prompt = prompt_of(cls, length=P)
    leaves = split(prompt)[1]
    noise = {
        name: np.random.default_rng(1).standard_normal(leaf.shape).astype("f4")
        for name, leaf in leaves.items()
    }
    for name, numbers in noise.items():
        getattr(prompt, name)[...] = jnp.asarray(numbers)
    model = model_of(LLAMA, prompt)
    adapter = only_adapter(model)
    kinds = {DeepPrompt: "DEEP_PROMPT", AddedDeepPrompt: "ADDED_DEEP_PROMPT"}
    assert adapter.kind == kinds.get(cls, "PROMPT_TUNING")
    for name, numbers in noise.items():
        array = adapter.parameters[f"decoder/prompt/{name}"]
        np.testing.assert_array_equal(array, numbers)
    if cls is SoftPrompt:
        assert convert_for_peft(adapter, model, None) is adapter
        return
    exported = convert_for_peft(adapter, model, None)
    assert exported.kind == "PREFIX_TUNING"
    prefix = prompt_of(KeyValuePrefix, length=P)
    prefix.prompt[...] = jnp.asarray(exported.parameters["decoder/prompt/prompt"])
    rows = [
        given + completion
        for given, completion in dummies.random_rows([(2, 4), (3, 3)])
    ]
    expected, array = (logits(m, rows) for m in (model, model_of(LLAMA, prefix)))
    np.testing.assert_allclose(array, expected, atol=1e-5)


def test_adapters_of_projections_come_with_their_scalings():
    specs = [
        LoRA(regexes=[r".*/query"], rank=2, alpha=3.0),
        LoRA(regexes=[r".*/mlp/up"], rank=4, alpha=4.0, rank_stabilized=True),
        IA3(),
    ]
    lora, ia3 = export_adapters(model_of(LLAMA, adapters=specs))
    attention = "decoder/layers/self_attention"
    assert lora.scalings == {f"{attention}/query": 1.5, "decoder/layers/mlp/up": 2.0}
    assert ia3.kind == "IA3" and not ia3.scalings
    shapes = {path: array.shape for path, array in ia3.parameters.items()}
    assert shapes == {
        f"{attention}/key/adapters/ia3/scale": (2, 8),
        f"{attention}/value/adapters/ia3/scale": (2, 8),
        "decoder/layers/mlp/down/adapters/ia3/scale": (2, 24),
    }
    for adapter in (lora, ia3):
        exported = to_peft(adapter, LLAMA)
        check_shapes(exported.settings, exported.tensors, "ours")


@pytest.mark.parametrize(
    ("config", "prompting"),
    [
        (LLAMA, Prompting(placement="suffix")),
        (LLAMA, Prompting(prefix_attention=True)),
        (T5_GATED, Prompting(visibility=["prompt->prompt"])),
    ],
)
def test_positions_and_masks_that_peft_lacks_are_refused(config, prompting):
    prompt = prompt_of(SoftPrompt, length=P)
    model = model_of(config, prompt, prompting=prompting)
    with pytest.raises(InputError, match=r"before the text.*Prompting\("):
        convert_for_peft(only_adapter(model), model, prompting)
    lora = only_adapter(model_of(config, adapters=[LoRA(regexes=[r".*/query"])]))
    assert convert_for_peft(lora, model, prompting) is lora


def test_a_prompt_only_in_a_t5s_decoder_is_refused():
    model = model_of(T5_GATED, decoder_prompt=prompt_of(SoftPrompt, length=P))
    with pytest.raises(InputError, match="decoder of an encoder-decoder alone"):
        to_peft(convert_for_peft(only_adapter(model), model, None), T5_GATED)


def test_a_deep_prompt_of_an_encoder_is_refused():
    model = model_of(T5_GATED, prompt_of(DeepPrompt, length=P))
    with pytest.raises(InputError, match="PEFT has no deep prompts"):
        convert_for_peft(only_adapter(model), model, None)
    with pytest.raises(InputError, match="no method DEEP_PROMPT"):
        to_peft(convert_for_peft(only_adapter(model), None, None), LLAMA)
