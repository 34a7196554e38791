"""Rows of single tokens train, and are read and written, as in PEFT."""

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prompt_tuning.adapters.adapter import TOKENS, TokenIds
from prompt_tuning.adapters.peft.folder import read_folder, write_folder
from prompt_tuning.adapters.peft.peft_conversion import from_peft, to_peft
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import merge
from prompt_tuning.families.hf_folder import read_config
from prompt_tuning.losses.cross_entropy import token_loss
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.pretrained.source import read_frozen
from prompt_tuning.settings.pretrained import Pretrained
from tests.support.adapters import (
    assert_same_logits,
    batch_of,
    our_logits,
    peft_logits,
    random_adapter,
    restored,
    train_by_peft,
)
from tests.support.shared_data import FIXTURES

PEFT, STEPS, RATE = FIXTURES / "peft", 24, 0.05
ROWS, HEAD = (f"token_embedder/adapters/tokens/{x}" for x in ("rows", "head"))
MODELS = ("gpt2_tied", "qwen2_bias_tied", "llama_gqa_untied")


def config_of(model):
    return read_config(PEFT / model / "base")


@functools.cache
def tokens_of(model):
    """The case's tokens, with trained and new ones among them."""
    given = np.load(PEFT / model / "ref.npz")
    tokens = {name: given[name].copy() for name in ("input_ids", "attention_mask")}
    tokens["attention_mask"] = np.ones_like(tokens["attention_mask"])
    size = config_of(model).vocabulary_size
    for start, token in enumerate((3, size, size + 1)):
        tokens["input_ids"][:, 1 + start :: 4] = token
    return tokens


def tuned(model, kind="LORA"):
    """Returns an adapter with rows of tokens: an old one, and new ones."""
    config = config_of(model)
    size, random = config.vocabulary_size, np.random.default_rng(0)
    ids = (3, size, size + 1)
    head = () if config.tied_head else (ids if kind == TOKENS else (*ids[1:], 5))
    rows = {ROWS: ids, HEAD: head}
    parameters = {
        path: random.standard_normal((len(each), config.width)).astype("f4") / 3
        for path, each in rows.items()
        if each
    }
    adapter = random_adapter(config, "LORA", "self_attention/value")
    if kind == TOKENS:
        adapter = dataclasses.replace(adapter, kind=TOKENS, parameters={}, scalings={})
    parameters = adapter.parameters | parameters
    return dataclasses.replace(
        adapter, parameters=parameters, tokens=TokenIds(ids, head)
    )


OURS = {
    f"{model} {kind}": (model, kind) for model in MODELS for kind in ("LORA", TOKENS)
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """PEFT's logits with our adapters, on the resized model."""
    folder, jobs = tmp_path_factory.mktemp("peft"), {}
    for number, (name, (model, kind)) in enumerate(OURS.items()):
        exported = to_peft(tuned(model, kind), config_of(model))
        write_folder(folder / str(number), exported)
        np.savez(folder / f"{number}.npz", **tokens_of(model))
        jobs[name] = {
            "base": PEFT / model / "base",
            "adapter": folder / str(number),
            "tokens": folder / f"{number}.npz",
            "size": config_of(model).vocabulary_size + 2,
            "double": True,
        }
    return peft_logits(jobs)


@pytest.mark.torch
@pytest.mark.parametrize("name", OURS)
def test_our_files_change_pefts_model_as_ours(name, theirs):
    model, kind = OURS[name]
    adapter, tokens = tuned(model, kind), tokens_of(model)
    graph, parameters = restored(PEFT / model / "base", adapter)
    ours = our_logits(parameters, batch_of(tokens), graph=graph)
    assert_same_logits(ours, theirs[name], tokens)


@pytest.mark.parametrize("name", OURS)
def test_written_files_are_read_again(name, tmp_path):
    model, kind = OURS[name]
    adapter, config = tuned(model, kind), config_of(model)
    write_folder(tmp_path / "peft", to_peft(adapter, config))
    again = from_peft(read_folder(tmp_path / "peft"), config, name)
    assert (again.kind, again.tokens) == (adapter.kind, adapter.tokens)
    for path, array in adapter.parameters.items():
        np.testing.assert_allclose(again.parameters[path], array, rtol=1e-6)


TRAINED = {
    "gpt2_tied": {"target_modules": ["c_proj"], "fan_in_fan_out": True},
    "qwen2_bias_tied": {"target_modules": ["v_proj"]},
    "llama_gqa_untied": {"target_modules": ["q_proj"]},
}


def targets_of(model):
    ids = tokens_of(model)["input_ids"]
    return np.roll(ids, -1, axis=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Adapters that PEFT trained with new tokens in a resized model."""
    folder, jobs = tmp_path_factory.mktemp("peft"), {}
    for model, settings in TRAINED.items():
        np.savez(folder / f"{model}.npz", targets=targets_of(model), **tokens_of(model))
        size = config_of(model).vocabulary_size
        jobs[model] = {
            "base": str(PEFT / model / "base"),
            "folder": str(folder / model),
            "tokens": str(folder / f"{model}.npz"),
            "steps": STEPS,
            "learning_rate": RATE,
            "task_type": "CAUSAL_LM",
            "size": size + 3,
            "trainable_token_indices": [3, size, size + 1],
            **settings,
        }
    train_by_peft(jobs)
    return {model: folder / model for model in TRAINED}


def read(folder, model):
    base = str(PEFT / model / "base")
    frozen = functools.partial(read_frozen, Pretrained(checkpoint=base))
    return from_peft(read_folder(folder), config_of(model), model, frozen)


def curve(model, adapter):
    """Trains what PEFT trained; returns the losses, all values and the last logits."""
    graph, parameters = restored(PEFT / model / "base", adapter)
    batch, targets = batch_of(tokens_of(model)), jnp.asarray(targets_of(model), int)
    trained = {p: parameters[p] for p in adapter.parameters if p != HEAD}

    def loss(trained):
        merged = cast(LanguageModel, merge(graph, parameters | trained))
        head = merged.output_head()
        return token_loss(merged.hidden(batch), head, targets).nll.mean()

    optimizer = optax.sgd(RATE, momentum=0.9)

    @jax.jit
    def step(trained, state):
        value, gradient = jax.value_and_grad(loss)(trained)
        # The resized model has a token more, which PEFT does not train.
        gradient[ROWS] = gradient[ROWS].at[3:].set(0)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(trained, updates), state, value

    state, losses = optimizer.init(trained), []
    for _ in range(STEPS):
        trained, state, value = step(trained, state)
        losses.append(float(value))
    return losses, trained, our_logits(parameters | trained, batch, graph=graph)


@pytest.mark.torch
@pytest.mark.parametrize("model", TRAINED)
def test_training_is_pefts(model, trained):
    start, end = (read(trained[model] / name, model) for name in ("start", "end"))
    size = config_of(model).vocabulary_size
    assert start.tokens.rows == (3, size, size + 1, size + 2)
    losses, values, logits = curve(model, start)
    expected = np.load(trained[model] / "end.npz")
    assert losses[-1] < losses[0] - 0.05
    np.testing.assert_allclose(losses, expected["losses"], atol=3e-6)
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
    assert np.abs(end.parameters[ROWS] - start.parameters[ROWS]).max() > 0.01
    for path, array in values.items():
        np.testing.assert_allclose(array, end.parameters[path], atol=1e-4)


def test_rows_of_another_number_than_the_settings_name_are_refused(tmp_path):
    config = config_of("gpt2_tied")
    folder = to_peft(tuned("gpt2_tied"), config)
    folder.settings["trainable_token_indices"] = [3, 4]
    with pytest.raises(InputError, match=r"shape \(3, .*expected \(2, "):
        from_peft(folder, config, "adapter")
