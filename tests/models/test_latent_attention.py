"""Compressed keys and values; `tests/families` compares logits with transformers."""

import dataclasses
import math
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core.parameters import merge
from prompt_tuning.decoding.request import Request
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.models.attention import KeyValues
from prompt_tuning.models.build import build_model
from prompt_tuning.models.decoder_only import DecoderOnly
from tests.decoding.test_decoding_engine import one_after_the_other, open_engine
from tests.support.dummies import DEEPSEEK
from tests.support.engine_models import engine_model

ROW, LATER = [*range(6, 17)], [3, 1, 4]
NUMBERS = DEEPSEEK.key_value_rank + DEEPSEEK.rotated_width
SLOTS = 4 * 32 * DEEPSEEK.layers
"""Columns of all layers of an engine's slots."""


def ids(handle) -> list[int]:
    return list(handle.completions[0].ids)


def expected(kind: str, row: list[int]) -> list[int]:
    model, parameters = engine_model(DEEPSEEK, kind)
    return one_after_the_other(model, parameters, [row], None)[0]


def test_the_cache_of_deepseek_v3_has_576_numbers_for_each_token_and_layer():
    config = dataclasses.replace(
        DEEPSEEK,
        **{"heads": 128, "key_value_heads": 128, "head_width": 192},
        **{"rotary_width": 64, "value_width": 128, "key_value_rank": 512},
    )

    def read(key):
        model = build_model(key, config)
        _, cache = model.prefill(jnp.ones((2, 5), jnp.int32), jnp.full(2, 5), 7)
        return cache.past[-1].key_values, cache.generated

    text, generated = jax.eval_shape(read, jax.random.key(0))
    for held, tokens in ((text, 5), (generated, 7)):
        size = sum(math.prod(part.shape) for part in held)
        assert size == config.layers * 2 * tokens * 576


@pytest.mark.slow
def test_few_queries_have_the_same_states_after_compressed_and_expanded_keys():
    model, parameters = engine_model(DEEPSEEK, "none")
    merged = cast(DecoderOnly, merge(model.graph, parameters))
    rows, lengths, tokens = [ROW, ROW[::-1]], jnp.array([11, 7]), jnp.array([3, 5])
    _, cache = jax.jit(lambda x: merged.prefill(x, lengths, 2))(jnp.array(rows))
    decode = jax.jit(lambda cache: merged.decode(tokens, cache))
    compressed, _ = decode(cache)
    (past,), whole = cache.past, merged.decoder.expanded
    assert isinstance(past.key_values, KeyValues)
    wide = dataclasses.replace(
        cache,
        past=(past._replace(key_values=whole(past.key_values)),),
        generated=whole(cache.generated),
    )
    expanded, after = decode(wide)
    assert after.generated.keys.shape[1] == DEEPSEEK.heads
    np.testing.assert_allclose(compressed, expanded, atol=1e-5)


@pytest.mark.slow
def test_slots_are_compressed_until_an_adapter_changes_keys_or_values():
    engine = open_engine(DEEPSEEK, ("none", "soft"), page=8)
    (page,) = engine.find_adapter("soft").prompts[0].pages
    assert page.key_value_bytes == DEEPSEEK.layers * 8 * NUMBERS * 4
    compressed = engine.metrics().key_value_bytes
    assert compressed == (SLOTS + DEEPSEEK.layers * 8) * NUMBERS * 4
    # "lora" adapts values; it is loaded while two rows run.
    sampling = Sampling(new_tokens=6)
    rows = [Request(ids=ROW, adapter=x, sampling=sampling) for x in (None, "soft")]
    running = [engine.submit(row) for row in rows]
    for _ in range(4):
        engine.step()
    assert not any(handle.finished for handle in running)
    engine.add_adapter("lora", *engine_model(DEEPSEEK, "lora"))
    assert engine.metrics().key_value_bytes > 3 * compressed
    (adapted,) = engine.run([Request(ids=ROW, adapter="lora", sampling=sampling)])
    while not engine.idle:
        engine.step()
    kinds = ("none", "soft", "lora")
    tokens = [ids(handle) for handle in (*running, adapted)]
    assert tokens == [expected(kind, ROW) for kind in kinds]
    # It is unloaded while a row runs, and again while none does.
    handle = engine.submit(Request(ids=ROW, sampling=sampling))
    for _ in range(4):
        engine.step()
    engine.unload_adapter("lora")
    while not engine.idle:
        engine.step()
    assert ids(handle) == tokens[0]
    engine.unload_adapter("soft")
    assert engine.metrics().key_value_bytes == SLOTS * NUMBERS * 4
    (handle,) = engine.run([Request(ids=ROW, sampling=sampling)])
    assert ids(handle) == tokens[0]


@pytest.mark.slow
def test_rows_with_a_prefix_of_keys_run_beside_compressed_ones():
    engine = open_engine(DEEPSEEK, ("none", "prefix"))
    own, sampling = SLOTS * NUMBERS * 4, Sampling(new_tokens=6)
    pages = engine.find_adapter("prefix").prompts[0].pages
    prefix = sum(page.key_value_bytes for page in pages)
    assert engine.metrics().key_value_bytes == own + prefix
    kinds = ("none", "prefix")
    requests = [
        Request(ids=row, adapter=None if kind == "none" else kind, sampling=sampling)
        for kind in kinds
        for row in (ROW, LATER)
    ]
    alone = [ids(engine.run([request])[0]) for request in requests]
    assert [ids(handle) for handle in engine.run(requests)] == alone
    assert alone == [expected(kind, row) for kind in kinds for row in (ROW, LATER)]
