"""Scores of given tokens against a plain pass of the model over each beginning."""

import dataclasses
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import describe, split
from prompt_tuning.decoding import given_scores, slot_reader
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.request import Request
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.decoding.slot_state import RowStates, Slots
from prompt_tuning.decoding.slots import read_chunks
from prompt_tuning.models.build import build_model
from prompt_tuning.models.scoring import merge_model
from tests.support.dummies import FAMILIES, GPT2, LLAMA, T5_GATED, V
from tests.support.engine_models import engine_model
from tests.support.exhaustive import sample

KINDS = ("none", "soft", "deep", "prefix", "lora", "ia3")
FEW = ("none", "prefix", "lora")
ALL = Sampling(new_tokens=0, given_logprobs=2)


def open_engine(config, kinds=KINDS, **sizes) -> DecodingEngine:
    sizes = {"slots": 4, "length": 48, "chunk": 8, "page": 4, **sizes}
    engine = DecodingEngine(*engine_model(config, "none"), **sizes)
    for kind in kinds:
        if kind != "none":
            engine.add_adapter(kind, *engine_model(config, kind))
    return engine


def name_of(kind: str) -> str | None:
    return None if kind == "none" else kind


def expected_logprobs(config, kind, ids) -> np.ndarray:
    """Log-probabilities `[T - 1, V]` after each beginning, read by itself."""
    model, parameters = engine_model(config, kind)
    count = len(ids) - 1
    rows = np.tile(np.array(ids[:-1], np.int32), (count, 1))

    def run(parameters):
        merged = merge_model(model.graph, parameters)
        hidden, _ = merged.prefill(jnp.array(rows), jnp.arange(1, count + 1), 1, None)
        return jax.nn.log_softmax(merged.token_logits(hidden))

    return np.asarray(jax.jit(run)(parameters))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    sample(
        4,
        [
            *(("llama", kind) for kind in ("none", "soft", "prefix", "lora")),
            *(("llama", kind) for kind in ("deep", "ia3")),
            *(("gpt2", kind) for kind in KINDS),
        ],
    ),
)
def test_scores_are_those_of_the_model_with_the_adapter_alone(name, kind):
    config = FAMILIES[name]
    ids = np.random.default_rng(0).integers(0, V, 21).tolist()
    engine = open_engine(config, (kind,))
    (handle,) = engine.run([Request(ids=ids, adapter=name_of(kind), sampling=ALL)])
    (completion,) = handle.completions
    scores = completion.given_logprobs or ()
    expected = expected_logprobs(config, kind, ids)
    assert [each.token for each in scores] == ids[1:]
    chosen = expected[np.arange(20), ids[1:]]
    np.testing.assert_allclose(
        [x.logprob for x in scores], chosen, rtol=1e-5, atol=1e-5
    )
    best = np.argsort(-expected, axis=1)[:, :2]
    assert [[i for i, _ in each.top] for each in scores] == best.tolist()
    ranks = (expected >= chosen[:, None]).sum(1)
    assert [each.rank for each in scores] == ranks.tolist()
    assert (completion.ids, completion.reason) == ((), "length")


def scored_requests() -> list[Request]:
    """Rows that share beginnings of unlike lengths, some of which generate too."""
    random = np.random.default_rng(0)
    context = random.integers(0, V, 27).tolist()
    requests = []
    for i in range(30):
        ids = context[: random.integers(1, 27)]
        ids += random.integers(0, V, random.integers(1, 12)).tolist()
        sampling = Sampling(
            new_tokens=i % 3,
            given_logprobs=None if i % 6 == 5 else (1, 5)[i % 2],
            temperature=i % 2 * 1.0,
            seed=i,
            n=7 if i % 6 == 5 else 1,
        )
        first = int(random.integers(1, len(ids) + 1)) if i % 4 else 1
        kind = name_of(FEW[random.integers(len(FEW))])
        requests.append(
            Request(ids=ids, adapter=kind, scored_from=first, sampling=sampling)
        )
    return requests


def results(handle) -> list:
    completions = sorted(handle.completions, key=lambda each: each.sample)
    return [(each.ids, each.given_logprobs) for each in completions]


@pytest.mark.slow
@pytest.mark.parametrize("together", sample(1, [1, 2]))
def test_scores_do_not_depend_on_what_is_read_before_or_beside(together):
    requests, alone = scored_requests(), []
    engine = open_engine(LLAMA, FEW, together=together)
    for request in requests:
        engine._reader.forget()
        alone.append(results(*engine.run([request])))
    assert [results(each) for each in engine.run(requests)] == alone
    assert [results(*engine.run([each])) for each in requests[::-1]] == alone[::-1]


def test_rows_whose_leader_is_cancelled_read_on_by_themselves():
    engine = open_engine(GPT2, ("none",))
    ids = list(range(20))
    first = engine.submit(Request(ids=ids, sampling=ALL))
    expected = results(*open_engine(GPT2, ("none",)).run([first.request]))
    engine._admit()
    second = engine.submit(Request(ids=ids, sampling=ALL))
    engine._admit()
    engine.cancel(first)
    while not engine.idle:
        engine.step()
    assert results(second) == expected


def lowered(function, arguments, **settings):
    """Lowers a function of leaves: types of trees are not those of arrays' shapes."""
    leaves, tree = jax.tree.flatten(arguments)

    def call(leaves):
        return function(*jax.tree.unflatten(tree, leaves), **settings)

    return jax.jit(call).lower(leaves)


def program_costs(monkeypatch) -> Counter:
    """Counts the operations of the programs that run from now on, from their HLO."""
    costs: Counter = Counter()
    for module, names in (
        (slot_reader, ("read_chunks", "copy_slot")),
        (given_scores, ("gather_states", "score_states")),
    ):
        for name in names:
            program, known = getattr(module, name), {}

            def run(*args, program=program, known=known, **settings):
                leaves = jax.tree.leaves((args, settings.get("top")))
                key = str([jnp.shape(leaf) for leaf in leaves])
                if key not in known:
                    cost = lowered(program, args, **settings).compile().cost_analysis()
                    known[key] = dict(cost or {}).get("flops", 0.0)
                costs["flops"] += known[key]
                return program(*args, **settings)

            monkeypatch.setattr(module, name, run)
    return costs


@pytest.mark.slow
def test_candidates_share_their_context(monkeypatch):
    costs = program_costs(monkeypatch)
    random = np.random.default_rng(0)
    context = random.integers(0, V, 512).tolist()
    rows = [[*context, *random.integers(0, V, 8).tolist()] for _ in range(64)]
    requests = [
        Request(
            ids=row, scored_from=512, sampling=Sampling(new_tokens=0, given_logprobs=1)
        )
        for row in rows
    ]
    engine = open_engine(
        dataclasses.replace(LLAMA, maximum_positions=None),
        (),
        slots=8,
        length=576,
        chunk=64,
    )
    shared = [results(each) for each in engine.run(requests)]
    together = costs.pop("flops")
    for number in (0, 63):
        engine._reader.forget()
        assert results(*engine.run([requests[number]])) == shared[number]
    assert together <= 64 * costs["flops"] / 2 / 6


@pytest.mark.slow
def test_no_array_has_a_logit_for_each_token_of_a_long_text():
    length, chunk, size = 4096, 64, 150_000
    config = dataclasses.replace(
        LLAMA, vocabulary_size=size, maximum_positions=length, width=8
    )
    graph, parameters = describe(
        lambda key: split(build_model(key, config)), jax.random.key(0)
    )
    slots = Slots.create(config, 1, length, chunk)
    one, tokens = np.zeros(1, np.int32), np.zeros((1, chunk), np.int32)
    states = RowStates(one, one, one == 0, one, np.zeros((1, 0), np.int32))
    reading = (parameters, slots, one, tokens, one, states, ())
    block = jax.ShapeDtypeStruct((given_scores.BLOCK, config.width), jnp.float32)
    tokens = np.zeros(given_scores.BLOCK, np.int32)
    scoring = (parameters, block, tokens, np.int32(0))
    largest = 0
    for program in (
        lowered(read_chunks, reading, graph=graph, sections=len(slots.own)),
        lowered(given_scores.score_states, scoring, graph=graph, top=20),
    ):
        text = str(program.compile().as_text())
        shapes = re.findall(r"[a-z]\w*\[([\d,]+)\]", text)
        sizes = [math.prod(map(int, shape.split(","))) for shape in shapes]
        largest = max(largest, *sizes)
    # The logits of a block are the largest array, and there are some.
    assert largest == given_scores.BLOCK * size < length * size / 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "kind", "request_fields"),
    [
        (T5_GATED, "none", {"ids": [1, 2]}),
        (LLAMA, "suffix", {"ids": [1, 2]}),
        (LLAMA, "none", {"embeddings": np.zeros((2, LLAMA.width), np.float32)}),
    ],
    ids=["encoder", "suffix", "vectors"],
)
def test_tokens_that_no_causal_state_predicts_are_refused(config, kind, request_fields):
    engine = open_engine(config, (kind,))
    request = Request(adapter=name_of(kind), sampling=ALL, **request_fields)
    with pytest.raises(InputError, match="need a causal model"):
        engine.submit(request)


def test_a_row_without_new_tokens_or_scores_is_refused():
    for settings in ({}, {"given_logprobs": 1, "n": 2, "temperature": 1.0}):
        with pytest.raises(InputError, match="new_tokens is 0"):
            Sampling(new_tokens=0, **settings)
