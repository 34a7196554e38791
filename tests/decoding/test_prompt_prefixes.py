"""Keys and values of prompts that are stored next to them."""

import dataclasses
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.decoding import prompt_prefixes as module
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.prompt_prefixes import (
    FILE,
    prefix_file,
    prompt_prefixes,
    write_prefixes,
)
from prompt_tuning.decoding.request import Request
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.models.build import build_model
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.soft import InferenceOnlyPrompt
from tests.support.dummies import DEEPSEEK, GPT2, LLAMA, with_numbers
from tests.support.engine_models import engine_model
from tests.support.exhaustive import sample


def ids(config, kind: str, path: Path) -> list[tuple[int, ...]]:
    """Returns the ids of two rows with an adapter that is loaded from a path."""
    bare, adapted = engine_model(config, "none"), engine_model(config, kind)
    engine = DecodingEngine(*bare, slots=2, length=16, chunk=8, page=4)
    engine.add_adapter("a", *adapted, prompt_prefixes(*adapted, path))
    requests = [
        Request(
            ids=row,
            adapter="a",
            prompt_id=1 if kind == "tasks" else None,
            sampling=Sampling(new_tokens=6),
        )
        for row in ([3, 1, 4], [5])
    ]
    return [handle.completions[0].ids for handle in engine.run(requests)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "kind", "dtype"),
    sample(
        1,
        [
            (LLAMA, "soft", "bfloat16"),
            *((LLAMA, kind, "float32") for kind in ("prefix", "deep", "tasks")),
            (GPT2, "soft", "float32"),
            (DEEPSEEK, "soft", "float32"),
        ],
    ),
)
def test_the_ids_are_those_without_the_file(config, kind, dtype, tmp_path):
    config = dataclasses.replace(config, parameter_dtype=dtype, compute_dtype=dtype)
    expected = ids(config, kind, tmp_path)
    file, count = write_prefixes(tmp_path, *engine_model(config, kind))
    assert file == tmp_path / FILE and count >= 3
    with mock.patch.object(module, "_compute", side_effect=AssertionError):
        assert ids(config, kind, tmp_path) == expected


def test_a_file_of_another_prompt_or_model_is_not_used(tmp_path, caplog):
    path = tmp_path / "soft.npy"
    model, parameters = engine_model(LLAMA, "prefix")
    file, _ = write_prefixes(path, model, parameters)
    assert file == prefix_file(path) == tmp_path / f"soft.{FILE}"
    for changed in ("decoder/prompt/prompt", "decoder/final_norm/scale"):
        others = parameters | {changed: parameters[changed] + 1}
        (prompt,) = prompt_prefixes(model, others, path)
        (computed,) = prompt_prefixes(model, others)
        for ours, expected in zip(prompt.prefixes, computed.prefixes, strict=True):
            np.testing.assert_array_equal(
                ours.key_values.keys, expected.key_values.keys
            )
        assert "write it again" in caplog.messages.pop()
        caplog.clear()
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(InputError, match=file.name):
        prompt_prefixes(model, parameters, path)


def test_a_constant_prompt_with_other_vectors_has_another_digest():
    model, _ = engine_model(LLAMA, "none")
    table = np.zeros((LLAMA.vocabulary_size, LLAMA.width), np.float32)

    def digest(number):
        prompt = InferenceOnlyPrompt(
            jax.random.key(0),
            Vocabulary(table),
            length=2,
            initializer=lambda key, shape, vocabulary: jnp.full(shape, number),
        )
        graph, parameters = with_numbers(lambda key: build_model(key, LLAMA, prompt))
        return module.adapted_digest(
            dataclasses.replace(model, graph=graph), parameters
        ).tolist()

    assert digest(1.0) == digest(1.0) != digest(2.0)


def test_an_adapter_without_prompt_has_nothing_to_store(tmp_path):
    with pytest.raises(InputError, match="no keys and values to store"):
        write_prefixes(tmp_path, *engine_model(LLAMA, "lora"))
