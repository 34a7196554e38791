"""Deep prompts, decoder prompts, templates, prefixes and adapters of projections."""

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import merge
from prompt_tuning.models.build import build_model
from prompt_tuning.models.decoder_only import DecoderOnly
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts.deep import AddedDeepPrompt, DeepPrompt
from prompt_tuning.prompts.initializers import (
    Vocabulary,
    from_array,
    uniform,
)
from prompt_tuning.prompts.low_rank_adapters import LoRA
from prompt_tuning.prompts.multitask import AddMultiTaskPrompt
from prompt_tuning.prompts.prefix import KeyValuePrefix, ProjectedKeyValuePrefix, normal
from prompt_tuning.prompts.projection_adapters import IA3
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.prompts.stack_shape import StackShape
from prompt_tuning.prompts.wrapped import DroppedPrompt
from prompt_tuning.settings.prompting import Prompting
from tests.support import dummies
from tests.support.dummies import logits, logits_by_step
from tests.support.exhaustive import sample

KEY, P, D = jax.random.key(0), dummies.P, dummies.LLAMA.width
LLAMA, T5 = dummies.LLAMA, dummies.T5_GATED
STACK = StackShape(2, 2, 4)
VOCABULARY = Vocabulary(np.zeros((dummies.V, D), "f4"), None, STACK)
PROMPT = "decoder/prompt/prompt"


def built(config, prompt=None, prompting=None, **others):
    return dummies.with_numbers(
        lambda key: build_model(key, config, prompt, prompting, **others)
    )


def soft(length=P):
    return SoftPrompt(KEY, VOCABULARY, length=length)


def batch_of(config, sizes=((4, 3), (0, 5), (2, 1))):
    sizes = [(given or 1, new) for given, new in sizes] if config is T5 else sizes
    return dummies.make_batch(config, dummies.random_rows(sizes))


@pytest.mark.slow
@pytest.mark.parametrize("prompting", sample(1, [None, Prompting(execution="joined")]))
def test_a_deep_prompt_of_a_soft_prompts_hidden_states_equals_it(prompting):
    config = dataclasses.replace(LLAMA, layers=3)
    graph, parameters = built(config, soft())
    stack = STACK._replace(layers=3)
    deep = DeepPrompt(KEY, dataclasses.replace(VOCABULARY, stack=stack), length=P)
    deep_graph, deep_parameters = built(config, deep, prompting)
    batch = batch_of(config)
    result = [parameters[PROMPT]]
    for layers in (1, 2):
        result.append(hidden_after(layers, config, parameters))
    deep_parameters[PROMPT] = jnp.stack(result)
    expected = logits(parameters, batch, graph=graph)
    actual = logits(deep_parameters, batch, graph=deep_graph)
    real = batch.loss_weights > 0
    np.testing.assert_allclose(actual[real], expected[real], atol=1e-4)
    deep_parameters[PROMPT] = deep_parameters[PROMPT].at[2].add(1.0)
    moved = logits(deep_parameters, batch, graph=deep_graph)
    assert np.abs(moved - expected)[real].max() > 1e-2


def hidden_after(layers, config, parameters):
    """Hidden states of a soft prompt after the first blocks, from a truncated model."""
    graph, _ = built(dataclasses.replace(config, layers=layers), soft())
    cut = {p: x[:layers] if "/layers/" in p else x for p, x in parameters.items()}
    model = cast(DecoderOnly, merge(graph, cut))
    stream = model.decoder.prefix_stream()
    assert stream is not None
    (hidden,), _ = model.decoder.run([stream])
    return hidden[0]


@pytest.mark.parametrize("config", sample(1, [LLAMA, T5]))
@pytest.mark.parametrize("placement", sample(1, ["prefix", "suffix"]))
def test_a_deep_prompt_that_adds_nothing_is_a_soft_prompt(config, placement):
    prompting = Prompting(placement)
    added = AddedDeepPrompt(KEY, VOCABULARY, length=P)
    graph, parameters = built(config, soft(), prompting)
    deep_graph, deep_parameters = built(config, added, prompting)
    (path,) = [path for path in parameters if "/prompt/" in path]
    later = path.replace("prompt/prompt", "prompt/added")
    deep_parameters |= {path: parameters[path], later: jnp.zeros((1, P, D))}
    batch = batch_of(config, ((4, 3), (2, 5)))
    real = batch.loss_weights > 0
    expected = logits(parameters, batch, graph=graph)[real]
    actual = logits(deep_parameters, batch, graph=deep_graph)[real]
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    moved = logits(
        deep_parameters | {later: jnp.ones((1, P, D))}, batch, graph=deep_graph
    )
    assert np.abs(moved[real] - expected).max() > 1e-2


def test_a_decoder_prompt_of_an_encoder_decoder_acts_as_tokens_before_the_start():
    start, more = T5.decoder_start_id, [7, 8]
    graph, parameters = built(T5, decoder_prompt=soft())
    tokens = jnp.array([start, *more])
    parameters[PROMPT] = parameters["token_embedder/embedding"][tokens]
    rows = dummies.random_rows([(4, 3), (2, 5)])
    batch = dummies.make_batch(T5, rows)
    ours = logits(parameters, batch, graph=graph)

    plain_graph, plain = dummies.unprompted(T5)
    longer = [(given, [*more, start, *completion]) for given, completion in rows]
    expected = logits(plain, dummies.make_batch(T5, longer), graph=plain_graph)
    real = batch.loss_weights > 0
    np.testing.assert_allclose(ours[real], expected[:, P:][real], atol=1e-4)


@pytest.mark.parametrize("config", sample(1, [LLAMA, dummies.GPT2, T5]))
def test_vectors_within_a_template_act_as_the_tokens(config):
    graph, parameters = built(config, soft(), Prompting("template"))
    (path,) = [path for path in parameters if "/prompt/" in path]
    tokens = [7, 8, 9]
    parameters[path] = parameters["token_embedder/embedding"][jnp.array(tokens)]
    v = dummies.V
    soft_rows = [([v, 3, v + 1, v + 2, 4], [5, 6]), ([4, v, v + 1, v + 2], [3])]
    plain_rows = [([7, 3, 8, 9, 4], [5, 6]), ([4, 7, 8, 9], [3])]
    batch = dummies.make_batch(config, soft_rows)
    ours = logits(parameters, batch, graph=graph)
    plain_graph, plain = dummies.unprompted(config)
    expected = logits(plain, dummies.make_batch(config, plain_rows), graph=plain_graph)
    real = batch.loss_weights > 0
    np.testing.assert_allclose(ours[real], expected[real], atol=1e-4)


@pytest.mark.parametrize(
    ("config", "prompt", "others"),
    sample(
        1,
        [
            (LLAMA, DeepPrompt, {}),
            (dummies.GPT2, KeyValuePrefix, {}),
            (T5, DeepPrompt, {"decoder_prompt": AddedDeepPrompt}),
            (T5, KeyValuePrefix, {"decoder_prompt": KeyValuePrefix}),
        ],
    ),
)
def test_stepwise_decoding_gives_the_scores_of_one_pass(config, prompt, others):
    stack = StackShape(2, config.key_value_heads, config.head_width)
    vocabulary = dataclasses.replace(VOCABULARY, stack=stack)
    others = {name: kind(KEY, vocabulary, length=P) for name, kind in others.items()}
    graph, parameters = built(config, prompt(KEY, vocabulary, length=P), **others)
    rows = dummies.random_rows([(5, 4), (1, 4), (3, 4)])
    at_once = logits(parameters, dummies.make_batch(config, rows), graph=graph)
    tokens, lengths = dummies.pad_rows([given for given, _ in rows], 0, 5)
    completions = np.array([completion for _, completion in rows])
    by_step = logits_by_step(parameters, tokens, lengths, completions, graph=graph)
    np.testing.assert_allclose(by_step, at_once, atol=1e-4)


def test_a_projected_prefix_equals_the_prefix_that_it_computes():
    projected = ProjectedKeyValuePrefix(KEY, VOCABULARY, length=P, hidden=5)
    result = projected()
    assert result.shape == (2, 2, P, 2, 4)
    # Li and Liang 2021, 4.3, entry by entry: vector 1's key of block 1, head 1.
    inner = np.tanh(projected.embedding[1] @ projected.inner.kernel[...])
    flat = inner @ projected.outer.kernel[...]
    np.testing.assert_allclose(result[1, 0, 1, 1], flat[16 + 4 : 16 + 8], rtol=1e-5)


def test_ia3_scales_dense_layers_and_shared_experts():
    model = build_model(KEY, dummies.DEEPSEEK, adapters=[IA3()])
    scales = [x for x in dummies.split(model)[1] if x.endswith("/ia3/scale")]
    layers = "decoder/layers"
    projections = {path.removesuffix("/adapters/ia3/scale") for path in scales}
    assert projections == {
        *(f"{layers}/{part}/down" for part in ("dense_mlp", "mlp/shared")),
        *(f"{layers}/self_attention/{part}" for part in ("key", "value")),
    }


@pytest.mark.slow
@pytest.mark.parametrize("config", [LLAMA, T5])
def test_fresh_adapters_change_nothing_and_trained_ones_do(config):
    plain_graph, plain = dummies.unprompted(config)
    specs = [LoRA(regexes=[r"decoder/.*/(query|up)"], rank=2), IA3()]
    model = build_model(KEY, config, adapters=specs)
    graph, parameters = dummies.split(model)
    added = {path: x for path, x in parameters.items() if "/adapters/" in path}
    assert "decoder/layers/mlp/down/adapters/ia3/scale" in added
    assert added["decoder/layers/mlp/down/adapters/ia3/scale"].shape == (2, 24)
    assert added["decoder/layers/mlp/up/adapters/lora/a"].shape == (2, D, 2)
    assert not any("query/adapters/ia3" in path for path in added)
    batch = batch_of(config, ((4, 3), (2, 5)))
    expected = logits(plain, batch, graph=plain_graph)
    np.testing.assert_array_equal(logits(plain | added, batch, graph=graph), expected)
    for path in added:
        moved = plain | added | {path: added[path] + 0.5}
        changed = np.abs(logits(moved, batch, graph=graph) - expected).max()
        # One of LoRA's two factors is initialized to zero.
        assert (changed > 1e-3) == (not path.endswith("lora/a"))


def test_adapters_that_match_nothing_or_overlap_are_refused():
    unknown = LoRA(regexes=[r"decoder/layers/attention/query"])
    with pytest.raises(InputError, match=r"matches no projection .*self_attention/que"):
        build_model(KEY, LLAMA, adapters=[unknown])
    of_peft = LoRA(regexes=["q_proj"])
    with pytest.raises(InputError, match=r"q_proj of PEFT is '\.\*/query'") as caught:
        build_model(KEY, LLAMA, adapters=[of_peft])
    for name in ("query", "key", "value", "out", "gate", "up", "down"):
        assert f"/{name}" in str(caught.value)
    twice = [LoRA(regexes=[r".*/query"]), LoRA(regexes=[r".*/(query|key)"])]
    with pytest.raises(InputError, match="two adapters 'lora' match the projection"):
        build_model(KEY, LLAMA, adapters=twice)
    with pytest.raises(InputError, match=r"LoRA\.rank is 0"):
        LoRA(regexes=[".*"], rank=0)
    with pytest.raises(InputError, match="expected a list"):
        LoRA(regexes=".*/query")
    with pytest.raises(InputError, match=r"LoRA\.regexes is empty"):
        LoRA(regexes=[])
    with pytest.raises(InputError, match="there are only adapters"):
        build_model(
            KEY, LLAMA, None, Prompting(prefix_attention=True), adapters=[IA3()]
        )


def test_unsupported_settings_of_prefixes_and_decoders_are_refused():
    prefix = KeyValuePrefix(KEY, VOCABULARY, length=P)
    with pytest.raises(InputError, match="precedes the text and sees none"):
        build_model(KEY, LLAMA, prefix, Prompting("suffix"))
    with pytest.raises(InputError, match="decoder_prompt is for encoder-decoders"):
        build_model(KEY, LLAMA, decoder_prompt=soft())
    with pytest.raises(InputError, match=r"encoder .* alone: set its prompt"):
        encoder = dataclasses.replace(LLAMA, bidirectional=True)
        build_model(KEY, encoder, decoder_prompt=soft())
    with pytest.raises(InputError, match=r"decoder_prompting\.placement is 'suffix'"):
        build_model(
            KEY, T5, decoder_prompt=soft(), decoder_prompting=Prompting("suffix")
        )
    with pytest.raises(InputError, match="visibility is for encoders"):
        build_model(KEY, LLAMA, soft(), Prompting(visibility=("prompt->prompt",)))
    alone = Vocabulary(VOCABULARY.embeddings)
    with pytest.raises(InputError, match="KeyValuePrefix has parameters for every"):
        KeyValuePrefix(KEY, alone, length=P)
    with pytest.raises(InputError, match="prefix's length is 0"):
        KeyValuePrefix(KEY, VOCABULARY, length=0)
    with pytest.raises(InputError, match=r"initializer returned \(3, 16\), expected"):
        bad = from_array(jnp.zeros((P, D)))
        KeyValuePrefix(
            KEY, VOCABULARY, length=P, initializer=lambda k, s, v: bad(k, (P, D), v)
        )


def test_both_stacks_must_have_the_same_number_of_prompts():
    several = functools.partial(
        AddMultiTaskPrompt, length=P, initializer=uniform(), task_initializer=uniform()
    )
    tuning = Tuning(
        prompt=functools.partial(several, tasks=3),
        decoder_prompt=functools.partial(several, tasks=2),
    )
    with pytest.raises(InputError, match="encoder has 3 prompts and the decoder 2"):
        tuning.start(KEY, VOCABULARY, T5)


def test_the_initializer_sets_the_prefix():
    prefix = KeyValuePrefix(KEY, VOCABULARY, length=50, initializer=normal(0.3))
    assert float(prefix().std()) == pytest.approx(0.3, rel=0.1)


def test_a_deep_prompt_cannot_be_wrapped():
    deep = functools.partial(DeepPrompt, length=P)
    with pytest.raises(InputError, match="makes a DeepPrompt, expected a prompt at"):
        DroppedPrompt(KEY, VOCABULARY, inner=deep, rate=0.1)
