"""Labels of a text cost the training loss of both, and the text is read once."""

import dataclasses
import functools
import math
import re

import jax
import numpy as np
import pytest

from prompt_tuning.core.batch import Batch, LabelBatch
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.batching.batches import split_micro_batches
from prompt_tuning.decoding.row_encoding import pad_rows
from prompt_tuning.evaluation.batch_scores import score_rows
from prompt_tuning.models.scoring import greedy_tokens, label_nll, token_losses
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.streaming.streamed_function import StreamedFunction
from prompt_tuning.training.gradients import gradients
from tests.streaming.test_streamed_step import Layers, divided
from tests.support import dummies, meshes, methods
from tests.support.exhaustive import sample

CONFIGS = {"decoder": dummies.LLAMA, "gpt2": dummies.GPT2, "t5": dummies.T5_GATED}
METHODS = {method.name: method for method in methods.METHODS}
LABELS = [[5], [7, 4, 9], [6, 8]]
SIZES = [4, 1, 7, 2]
# How a prompt is executed, and methods in which rows or blocks differ.
FIRST = [
    ("soft prompt", "decoder"),
    ("prefix language model", "decoder"),
    ("template of text and vectors", "decoder"),
    ("several tasks: add", "decoder"),
    ("mixture of prompts, chosen by the text", "gpt2"),
    ("deep prompt", "gpt2"),
    ("key/value prefix", "decoder"),
    ("prompts in encoder and decoder", "t5"),
    ("LoRA", "decoder"),
]
OTHERS = [
    (name, family)
    for name, method in METHODS.items()
    for family in CONFIGS
    if family not in method.refused and (name, family) not in FIRST
]


def label_batch(given, labels=LABELS, prompt_ids=None) -> LabelBatch:
    """Returns texts, padded further than necessary, that all have the same labels."""
    tokens, lengths = pad_rows(given, 0, max(map(len, given)) + 2)
    padded, label_lengths = pad_rows(labels, 0, max(map(len, labels)))
    return LabelBatch(
        tokens,
        lengths,
        np.repeat(padded[None], len(given), axis=0),
        np.repeat(label_lengths[None], len(given), axis=0),
        prompt_ids,
    )


def joined_batch(config: ModelConfig, given, labels=LABELS, prompt_ids=None) -> Batch:
    """Returns a row for each text and label, as in training."""
    rows = [(row, label) for row in given for label in labels]
    batch = dummies.make_batch(config, rows)
    if prompt_ids is not None:
        prompt_ids = np.repeat(prompt_ids, len(labels))
    return dataclasses.replace(batch, prompt_ids=prompt_ids)


def shared_batch(config: ModelConfig, given, labels=LABELS, prompt_ids=None) -> Batch:
    """Returns the rows of `joined_batch`, with each text once."""
    texts = label_batch(given, labels, prompt_ids)
    weights = np.arange(texts.labels.shape[2]) < texts.label_lengths[..., None]
    targets = texts.labels.reshape(len(given) * len(labels), -1)
    return Batch(
        tokens=texts.tokens,
        lengths=texts.lengths,
        targets=targets,
        loss_positions=np.tile(np.arange(targets.shape[1]), (len(targets), 1)),
        loss_weights=weights.reshape(targets.shape).astype(np.float32),
        prefix_lengths=texts.lengths,
        prompt_ids=prompt_ids,
    )


def loss_of_rows(graph, parameters: Parameters, batch: Batch, labels: int):
    """Returns the loss of each text's rows, `[B, C]`, from the training objective."""
    losses = jax.jit(functools.partial(token_losses, graph))(parameters, batch)
    summed = (batch.loss_weights * np.asarray(losses.nll)).sum(1)
    return summed.reshape(-1, labels)


def texts(*sizes: int, soft: tuple[int, ...] = ()) -> list[list[int]]:
    rows = dummies.random_rows([(size, 1) for size in sizes])
    return [[*given, *soft] for given, _ in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, family", [*FIRST, *sample(0, OTHERS)], ids=lambda x: x.replace(" ", "-")
)
def test_labels_cost_the_training_loss_of_text_and_label(name, family):
    config = CONFIGS[family]
    graph, parameters, _ = meshes.tuned(config, METHODS[name])
    soft = tuple(config.vocabulary_size + i for i in range(3))
    given = texts(*SIZES, soft=soft if name.startswith("template") else ())
    tasks = np.arange(4, dtype=np.int32) % 2 if name.startswith("several") else None
    batch = joined_batch(config, given, prompt_ids=tasks)
    expected = loss_of_rows(graph, parameters, batch, len(LABELS))
    score = jax.jit(functools.partial(label_nll, graph))
    actual = score(parameters, label_batch(given, prompt_ids=tasks))
    np.testing.assert_allclose(actual, expected, rtol=2e-6)
    shared = shared_batch(config, given, prompt_ids=tasks)
    losses = loss_of_rows(graph, parameters, shared, len(LABELS))
    np.testing.assert_allclose(losses, expected, rtol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "accumulate"),
    sample(2, [("llama", 2), ("t5_gated", 1), ("llama", 1), ("t5_gated", 2)]),
)
def test_the_gradient_of_rows_that_share_their_text(family, accumulate):
    config = dummies.FAMILIES[family]
    graph, parameters = dummies.prompted(config)
    trained = {path: x for path, x in parameters.items() if "prompt" in path}
    frozen = {path: x for path, x in parameters.items() if path not in trained}
    given = texts(*SIZES)
    compute = jax.jit(functools.partial(gradients, graph, key=None))

    def gradient_of(batch):
        if accumulate > 1:
            batch = split_micro_batches(batch, accumulate)
        return compute(trained, frozen, batch)[0]

    expected = gradient_of(joined_batch(config, given))
    actual = gradient_of(shared_batch(config, given))
    assert actual.keys() == expected.keys() and actual
    for path, values in actual.items():
        scale = np.abs(expected[path]).max()
        np.testing.assert_allclose(values, expected[path], atol=1e-5 * scale)


def test_labels_of_one_token_need_only_the_text():
    config, given, labels = dummies.LLAMA, texts(*SIZES), [[5], [7]]
    graph, parameters = dummies.unprompted(config)
    batch = joined_batch(config, given, labels)
    expected = loss_of_rows(graph, parameters, batch, len(labels))
    actual = jax.jit(functools.partial(label_nll, graph))(
        parameters, label_batch(given, labels)
    )
    np.testing.assert_allclose(actual, expected, rtol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "t5_gated"])
def test_a_prompt_predicts_labels_of_an_empty_text(family):
    config = dummies.FAMILIES[family]
    graph, parameters = dummies.prompted(config)
    given = [[], [9, 3]]
    batch = joined_batch(config, given)
    expected = loss_of_rows(graph, parameters, batch, len(LABELS))
    actual = jax.jit(functools.partial(label_nll, graph))(
        parameters, label_batch(given)
    )
    np.testing.assert_allclose(actual, expected, rtol=2e-6)


def functions_and_batches():
    """Returns functions of label batches, each with a batch."""
    given = texts(*SIZES)
    one_label = label_batch(given, LABELS[1:2])
    return [(label_nll, label_batch(given)), (greedy_tokens, one_label)]


MESHES = [
    ("llama", MeshShape(data=1, fsdp=2, tensor=4)),
    ("t5_gated", MeshShape(data=2, tensor=2)),
]


@pytest.mark.slow
@pytest.mark.parametrize("family, shape", sample(1, MESHES))
def test_a_mesh_gives_the_same_numbers(family, shape):
    # A vocabulary of 37 tokens cannot be divided evenly.
    config = dataclasses.replace(dummies.FAMILIES[family], vocabulary_size=37)
    graph, parameters = dummies.prompted(config)
    layout = meshes.layout_of(shape, config)
    placement = meshes.placed(layout, graph, parameters)
    put = {path: placement.put(path, leaf) for path, leaf in parameters.items()}
    for function, batch in functions_and_batches():
        expected = score_rows(function, graph, None, parameters, batch)
        actual = score_rows(function, graph, layout, put, batch)
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "t5_gated"])
def test_streamed_weights_are_read_once(family):
    config = dataclasses.replace(dummies.FAMILIES[family], layers=3)
    graph, parameters = dummies.prompted(config)
    _, _, blocks, rest = divided(parameters, [])
    for function, batch in functions_and_batches():
        layers, run = Layers(blocks), functools.partial(function, graph)
        streamed = StreamedFunction(lambda _, p, batch, run=run: run(p, batch))
        actual = streamed.forward({}, rest | layers.weights, batch)
        expected = jax.jit(run)(parameters, batch)
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
        assert layers.reads
        # An encoder-decoder's cross-attention projects the encoder's output ahead.
        often = {r for r in layers.reads if layers.reads.count(r) > 1}
        assert all("/cross_attention/" in path for path, _ in often)


# Primes and powers of two, so that the size of an array tells its dimensions.
ROWS, COUNT, TEXT, WIDTH = 5, 11, 13, 16


def copies(program) -> set[str]:
    """Returns shapes with hidden states or keys of the text for every label."""
    found = set()
    for shape in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", program.as_text()):
        size = math.prod(map(int, shape.split(",")))
        if size % (ROWS * COUNT * TEXT * WIDTH) == 0:
            found.add(shape)
    return found


@pytest.mark.parametrize("family", ["llama", "t5_gated"])
def test_no_label_copies_the_keys_of_its_text(family):
    """Finds copies only if a row of text and label is read for each label."""
    heads = {"heads": 1, "key_value_heads": 1, "head_width": WIDTH}
    config = dataclasses.replace(dummies.FAMILIES[family], **heads)
    graph, parameters = dummies.unprompted(config)
    labels = [[3 + i, 4, 5, 6] for i in range(COUNT)]
    separate = config.architecture == "encoder_decoder"
    # With padding, texts of both batches have `TEXT` tokens.
    given = texts(*[TEXT - 2] * ROWS)
    batch = label_batch(given, labels)
    assert batch.tokens.shape == (ROWS, TEXT)
    program = jax.jit(functools.partial(label_nll, graph)).lower(parameters, batch)
    assert not copies(program.compile())
    whole = texts(*[TEXT if separate else TEXT - 4] * ROWS)
    joined = joined_batch(config, whole, labels)
    assert joined.tokens.shape == (ROWS * COUNT, TEXT)
    control = jax.jit(functools.partial(token_losses, graph)).lower(parameters, joined)
    assert copies(control.compile())


def operations(function, *arguments) -> float:
    costs = jax.jit(function).lower(*arguments).compile().cost_analysis()
    assert costs is not None
    return costs["flops"]


def test_six_labels_cost_less_than_half_of_another_reading():
    config = dataclasses.replace(dummies.LLAMA, layers=1, maximum_positions=256)
    graph, parameters = dummies.prompted(config)
    given, labels = texts(*[126] * 4), [[3 + i, 4, 5, 6] for i in range(6)]
    rows = joined_batch(config, texts(*[127] * 4), [[5]])
    assert rows.tokens.shape == (4, 128)
    once = operations(functools.partial(token_losses, graph), parameters, rows)
    ranked = operations(
        functools.partial(label_nll, graph), parameters, label_batch(given, labels)
    )
    assert once < ranked < 1.5 * once
