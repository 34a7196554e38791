import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core.dropout import DropoutIndex, dropout
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import logical_axes, merge
from prompt_tuning.decoding.batch_decoding import continue_batch
from prompt_tuning.decoding.row_encoding import pad_rows
from prompt_tuning.decoding.row_progress import first_choices, sampling_needs
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.models.build import build_model
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.scoring import loss_sums
from prompt_tuning.settings.prompting import Prompting
from prompt_tuning.training.gradients import gradients
from tests.support import dummies
from tests.support.dummies import logits, logits_by_step
from tests.support.exhaustive import sample
from tests.support.refusals import refuses

PROMPT = "decoder/prompt/prompt"
JOINED = Prompting(execution="joined")
SHARED = Prompting(execution="shared")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_shared_and_joined_prompts_give_the_same_loss_and_gradient(family):
    config = dummies.FAMILIES[family]
    # In one row the prompt itself predicts the first token.
    batch = dummies.make_batch(config, dummies.random_rows([(4, 3), (0, 5), (2, 1)]))
    outcomes = []
    for prompting in (SHARED, JOINED):
        graph, parameters = dummies.prompted(config, prompting=prompting)
        trained = {PROMPT: parameters.pop(PROMPT)}
        compute = jax.jit(functools.partial(gradients, graph))
        gradient, sums = compute(trained, parameters, batch, None)
        outcomes.append((gradient[PROMPT], sums.loss / sums.weight))
    assert np.abs(outcomes[0][0]).max() > 1e-3
    for shared, joined in zip(*outcomes, strict=True):
        np.testing.assert_allclose(shared, joined, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "prompting"),
    [
        ("llama", SHARED),
        ("llama", Prompting(prefix_attention=True)),
        ("gpt2", Prompting("suffix")),
        ("t5_gated", Prompting("suffix")),
    ],
)
def test_stepwise_decoding_gives_the_scores_of_one_pass(family, prompting):
    config = dummies.FAMILIES[family]
    graph, parameters = dummies.prompted(config, prompting=prompting)
    rows = dummies.random_rows([(5, 4), (1, 4), (3, 4)])
    at_once = logits(parameters, dummies.make_batch(config, rows), graph=graph)
    tokens, lengths = pad_rows([given for given, _ in rows], 0, 5)
    completions = np.array([completion for _, completion in rows])
    by_step = logits_by_step(parameters, tokens, lengths, completions, graph=graph)
    np.testing.assert_allclose(by_step, at_once, atol=1e-4)


def insert(prompt, given, position):
    return given[:position] + prompt + given[position:]


@pytest.mark.parametrize(
    ("family", "placement", "from_end"),
    [("llama", "suffix", 0), ("t5_original", "suffix", 1), ("gpt2", "after_bos", None)],
)
def test_a_prompt_of_token_embeddings_acts_as_the_tokens(family, placement, from_end):
    config = dummies.FAMILIES[family]
    graph, parameters = dummies.prompted(config, prompting=Prompting(placement))
    (path,) = [path for path in parameters if "/prompt/" in path]
    prompt = [7, 8, 9]
    parameters[path] = parameters["token_embedder/embedding"][jnp.array(prompt)]
    rows = dummies.random_rows([(5, 4), (2, 2)])
    ours = logits(parameters, dummies.make_batch(config, rows), graph=graph)

    plain_graph, plain = dummies.unprompted(config)
    positions = [1 if from_end is None else len(given) - from_end for given, _ in rows]
    as_text = [
        (insert(prompt, given, position), completion)
        for (given, completion), position in zip(rows, positions, strict=True)
    ]
    batch = dummies.make_batch(config, as_text)
    expected = logits(plain, batch, graph=plain_graph)
    real = batch.loss_weights > 0
    np.testing.assert_allclose(
        np.asarray(ours)[real], np.asarray(expected)[real], atol=1e-4
    )


@pytest.mark.parametrize("prefix_attention", [True, False])
def test_given_tokens_and_prompt_attend_to_later_ones_only_under_prefix_attention(
    prefix_attention,
):
    prompting = Prompting(prefix_attention=prefix_attention, execution="joined")
    graph, parameters = dummies.prompted(dummies.LLAMA, prompting=prompting)
    rows = [([5, 6, 7], [8, 9, 10]), ([5, 6, 4], [8, 9, 10]), ([5, 6, 7], [8, 4, 4])]
    batch = dummies.make_batch(dummies.LLAMA, rows)
    every = np.tile(np.arange(6, dtype=np.int32), (3, 1))
    batch = dataclasses.replace(batch, loss_positions=every)
    scores = np.asarray(logits(parameters, batch, graph=graph))
    change = np.abs(scores - scores[0]).max(-1)
    # Target 0 is predicted by the prompt, 1 and 2 by given tokens before the changed
    # one, and 3 by that token itself.
    seen_early = change[1, :3] > 1e-4
    assert seen_early.tolist() == [prefix_attention] * 3
    assert np.all(change[1, 3:] > 1e-4)
    # A completion stays causal: only later positions attend to its second token.
    assert np.all(change[2, :5] < 1e-5) and change[2, 5] > 1e-4


def test_prefix_attention_trains():
    prompting = Prompting(prefix_attention=True)
    graph, parameters = dummies.prompted(dummies.LLAMA, prompting=prompting)
    frozen = dict(parameters)
    trained = {PROMPT: frozen.pop(PROMPT)}
    batch = dummies.make_batch(dummies.LLAMA, dummies.random_rows([(4, 3), (2, 5)]))
    compute = jax.jit(functools.partial(gradients, graph))
    gradient, before = compute(trained, frozen, batch, None)
    moved = {PROMPT: trained[PROMPT] - 0.1 * gradient[PROMPT]}
    _, after = compute(moved, frozen, batch, None)
    assert after.loss < before.loss


DRAWN = ("llama", "t5_gated")
ROWS = [[3, 4, 5], [6], [7, 8, 9, 10, 11, 12, 13]]


def generate(family, rows, *, temperature=0, filler=0, length=7, stop_ids=()):
    """Generates six more tokens for each row."""
    graph, parameters = dummies.prompted(dummies.FAMILIES[family])
    tokens, lengths = pad_rows(rows, filler, length)
    sampling = Sampling(temperature=temperature, seed=4)
    return np.asarray(
        continue_batch(
            parameters,
            tokens,
            lengths,
            first_choices(sampling, stop_ids, range(len(rows))),
            graph=graph,
            new_tokens=6,
            needs=sampling_needs(sampling),
            pad_id=0,
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "temperature"),
    # `test_families` has the greedy tokens of rows alone for each kind of attention.
    [
        ("llama", 0),
        *((family, 1.5) for family in DRAWN),
        *sample(0, ((x, 1.5) for x in dummies.FAMILIES if x not in DRAWN)),
    ],
)
def test_a_rows_continuation_does_not_depend_on_the_other_rows(family, temperature):
    together = generate(family, ROWS, temperature=temperature)
    others = [ROWS[0], [9, 9, 9, 9, 9], [1, 2]]
    otherwise = generate(family, others, temperature=temperature, filler=17)
    np.testing.assert_array_equal(together[0], otherwise[0])
    assert not np.array_equal(together[1:], otherwise[1:])


def test_a_row_continues_the_same_alone_and_in_a_batch():
    alone = generate("llama", ROWS[:1], length=3)
    among_others = generate("llama", ROWS)
    np.testing.assert_array_equal(alone[0], among_others[0])


def test_a_finished_row_is_padded():
    endless = generate("llama", ROWS)
    end = int(endless[0, 1])
    ended = generate("llama", ROWS, stop_ids=(end,))
    for row, until_end in zip(endless.tolist(), ended.tolist(), strict=True):
        stop = row.index(end) + 1 if end in row else len(row)
        assert until_end == row[:stop] + [0] * (len(row) - stop)
    assert ended[0, 2:].tolist() == [0] * 4


@pytest.mark.exhaustive
def test_dropout_draws_the_same_mask_when_recomputed():
    config = dummies.with_dropout(dummies.GPT2)
    graph, frozen = dummies.prompted(config, prompting=JOINED)
    trained = {PROMPT: frozen.pop(PROMPT)}
    batch = dummies.make_batch(config, dummies.random_rows([(4, 3), (2, 5)]))

    def loss(trained, frozen, batch, key):
        return loss_sums(graph, trained | frozen, batch, key).loss

    saved = jax.jit(jax.value_and_grad(loss))
    recomputed = jax.jit(jax.value_and_grad(jax.checkpoint(loss)))
    key, other = jax.random.key(1), jax.random.key(2)
    value, gradient = saved(trained, frozen, batch, key)
    again = recomputed(trained, frozen, batch, key)
    np.testing.assert_allclose(again[0], value, rtol=1e-6)
    np.testing.assert_allclose(again[1][PROMPT], gradient[PROMPT], atol=1e-5)
    assert abs(saved(trained, frozen, batch, other)[0] - value) > 1e-2


def test_dropout_zeroes_its_share_and_scales_the_rest():
    ones = jnp.ones((100, 100))
    indices = DropoutIndex.at_positions(jnp.arange(100), 100)
    dropped = jax.jit(dropout, static_argnums=1)(ones, 0.25, jax.random.key(0), indices)
    assert np.unique(dropped).tolist() == pytest.approx([0.0, 4 / 3])
    assert np.mean(dropped == 0) == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(("rate", "key"), [(0.0, jax.random.key(0)), (0.5, None)])
def test_dropout_without_rate_or_key_changes_nothing(rate, key):
    x = jnp.ones((2, 3))
    assert dropout(x, rate, key, DropoutIndex.at_positions(jnp.arange(2), 3)) is x


@pytest.mark.parametrize("family", dummies.FAMILIES)
def test_bfloat16_is_kept_throughout_training_and_decoding(family):
    config = dataclasses.replace(dummies.FAMILIES[family], compute_dtype="bfloat16")
    graph, parameters = dummies.prompted(config)
    batch = dummies.make_batch(config, dummies.random_rows([(4, 3), (2, 5)]))

    def run(parameters, batch):
        model = cast(LanguageModel, merge(graph, parameters))
        first, cache = model.prefill(batch.tokens, batch.lengths, 2)
        following, _ = model.decode(batch.lengths, cache)
        return model.hidden(batch), first, following, cache.generated

    for leaf in jax.tree.leaves(jax.eval_shape(run, parameters, batch)):
        assert leaf.dtype == jnp.bfloat16


def test_bfloat16_is_near_float32():
    batch = dummies.make_batch(dummies.GPT2, dummies.random_rows([(4, 3), (2, 5)]))
    means = []
    for dtype in ("float32", "bfloat16"):
        config = dataclasses.replace(dummies.GPT2, compute_dtype=dtype)
        graph, parameters = dummies.prompted(config, prompting=JOINED)
        sums = jax.jit(functools.partial(loss_sums, graph))(parameters, batch)
        means.append(float(sums.loss / sums.weight))
    assert means[0] != means[1]
    assert means[1] == pytest.approx(means[0], rel=0.02)


@pytest.mark.parametrize("field", ["compute_dtype", "parameter_dtype"])
@pytest.mark.parametrize("dtype", ["float16", "half", "fp16"])
def test_float16_is_refused_with_the_reason(field, dtype):
    with pytest.raises(InputError, match=f"{field} is '{dtype}': float16 overflows"):
        dataclasses.replace(dummies.LLAMA, **{field: dtype})


def test_another_dtype_is_refused():
    with pytest.raises(InputError, match="expected 'float32' or 'bfloat16'"):
        dataclasses.replace(dummies.LLAMA, compute_dtype="float64")


@pytest.mark.parametrize(
    ("family", "choices"),
    [
        ("llama", {"placement": "suffix"}),
        ("llama", {"placement": "after_bos"}),
        ("gpt2", {"prefix_attention": True}),
        ("t5_gated", {}),
    ],
)
def test_a_shared_prompt_is_refused_where_it_changes_results(family, choices):
    prompting = Prompting(execution="shared", **choices)
    with pytest.raises(InputError, match="execution is 'shared', but the prompt sees"):
        dummies.prompted(dummies.FAMILIES[family], prompting=prompting)


def test_prefix_attention_is_refused_for_an_encoder():
    with pytest.raises(InputError, match="prefix_attention is for decoder-only"):
        dummies.prompted(dummies.T5_GATED, prompting=Prompting(prefix_attention=True))


def test_unknown_choices_are_refused():
    with refuses("placement is 'middle', expected one of 'pre"):
        Prompting(cast(Any, "middle"))
    with refuses("execution is 'both', expected one of 'auto'"):
        Prompting(execution=cast(Any, "both"))


@pytest.mark.parametrize("family", dummies.FAMILIES)
def test_every_parameter_names_an_axis_for_each_dimension(family):
    config = dummies.FAMILIES[family]
    axes = {}

    def build(key):
        model = build_model(key, config)
        axes.update(logical_axes(model))
        return model

    _, parameters = dummies.abstract(build)
    assert axes.keys() == parameters.keys()
    sizes = {"embed": config.width, "vocab": dummies.V, "mlp": 24, "layers": 2}
    for path, (names, _) in axes.items():
        shape = parameters[path].shape
        assert len(names) == len(shape), path
        for name, size in zip(names, shape, strict=True):
            assert sizes.get(name, size) == size, path


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["prefix", "after_bos", "suffix"])
def test_no_token_is_predicted_from_itself(placement):
    # Only a prompt at the start provides a state before token 0.
    first = 0 if placement == "prefix" else 1
    graph, parameters = dummies.prompted(
        dummies.LLAMA, prompting=Prompting(placement=placement)
    )
    batch = dummies.make_batch(dummies.LLAMA, [((1, 2, 3), (4, 5, 6))])
    positions = np.arange(first, 6, dtype=np.int32)[None]
    batch = dataclasses.replace(batch, loss_positions=positions)
    before = logits(parameters, batch, graph=graph)
    for index, position in enumerate(positions[0]):
        tokens = batch.tokens.copy()
        tokens[0, position] = 9
        changed = dataclasses.replace(batch, tokens=tokens)
        after = logits(parameters, changed, graph=graph)
        np.testing.assert_array_equal(after[0, index], before[0, index])
