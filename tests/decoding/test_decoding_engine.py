import dataclasses
import itertools

import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.decoding import row_queue, slot_state
from prompt_tuning.decoding.batch_decoding import continue_batch
from prompt_tuning.decoding.continue_rows import continue_rows
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.request import Request
from prompt_tuning.decoding.row_encoding import pad_rows, strip_end
from prompt_tuning.decoding.row_progress import first_choices
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.decoding.slots import read_page
from tests.support.dummies import (
    DEEPSEEK,
    FALCON_H1,
    FAMILIES,
    GEMMA4,
    GPT2,
    GRANITE4,
    JAMBA,
    LFM2,
    LLAMA,
    LLAMA4,
    MAMBA2,
    MINIMAX,
    QWEN3_5,
    T5_GATED,
    LetterTokenizer,
    V,
)
from tests.support.engine_models import KINDS, engine_model
from tests.support.exhaustive import sample

NEW = 6
ROWS = [[3, 1, 4], [*range(6, 11), *range(5, 11)]]  # one invokes the aLoRA


def open_engine(config, kinds=KINDS, **sizes) -> DecodingEngine:
    sizes = {"slots": 4, "length": 32, "chunk": 8, "page": 4, **sizes}
    engine = DecodingEngine(*engine_model(config, "none"), **sizes)
    for kind in kinds:
        if kind != "none":
            engine.add_adapter(kind, *engine_model(config, kind))
    return engine


def random_requests(count: int, seed: int = 0, kinds=KINDS) -> list[Request]:
    """Greedy and sampled rows of unlike lengths, with adapters in random order."""
    random = np.random.default_rng(seed)
    requests = []
    for i in range(count):
        kind = kinds[random.integers(len(kinds))]
        ids = random.integers(0, V, random.integers(1, 13)).tolist()
        sampling = Sampling(new_tokens=int(random.integers(1, 10)), seed=i)
        if i % 2:
            sampling = dataclasses.replace(sampling, temperature=1.5, top_k=9)
        requests.append(
            Request(
                ids=ids,
                adapter=None if kind == "none" else kind,
                prompt_id=1 if kind == "tasks" else None,
                sampling=sampling,
            )
        )
    return requests


def one_after_the_other(model, parameters, rows, prompt) -> list[list[int]]:
    """Generates tokens without an engine, each row by itself."""
    continued = []
    for row in rows:
        tokens, lengths = pad_rows([row], 0, 16)
        generated = continue_batch(
            parameters,
            tokens,
            lengths,
            first_choices(Sampling(), model.stop_ids, [0]),
            None if prompt is None else np.array([prompt]),
            graph=model.graph,
            new_tokens=NEW,
            pad_id=model.config.pad_id,
        )
        continued.append(strip_end(generated[0].tolist(), model.stop_ids))
    return continued


FEW = ("soft", "lora", "dora", "alora")
SOME = ("deep", "prefix", "alora", "ia3", "suffix")
OTHERS = {
    **{"lfm2": LFM2, "qwen3_5": QWEN3_5, "granite4": GRANITE4},
    **{"falcon_h1": FALCON_H1, "mamba2": MAMBA2, "jamba": JAMBA},
    "minimax": MINIMAX,
    **{"deepseek": DEEPSEEK, "llama4": LLAMA4, "gemma4": GEMMA4},
}
RECURRENT = ("none", "soft", "state", "suffix", "tasks", "lora")
BIASED = ("none", "biases", "both")
EXPERTS = ("none", "experts", "alora", "experts_down")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kinds"),
    sample(
        3,
        [
            ("llama", FEW),
            ("gpt2", BIASED),
            ("deepseek", EXPERTS),
            ("deepseek", ("none", "suffix", "tasks", "prefix")),
            ("deepseek", ("none", "suffix", "lora")),
            *((x, RECURRENT) for x in ("lfm2", "qwen3_5", "granite4", "falcon_h1")),
            *((x, RECURRENT) for x in ("mamba2", "jamba", "minimax")),
            *((x, (*FEW, "prefix")) for x in ("deepseek", "llama4", "gemma4")),
            ("llama4", EXPERTS),
            *((x, KINDS) for x in FAMILIES),
        ],
    ),
)
def test_tokens_equal_those_of_the_model_with_the_adapter_alone(name, kinds):
    config = (FAMILIES | OTHERS)[name]
    engine = open_engine(config, kinds)
    for kind in kinds:
        prompt = 1 if kind == "tasks" else None
        requests = [
            Request(
                ids=row,
                adapter=None if kind == "none" else kind,
                prompt_id=prompt,
                sampling=Sampling(new_tokens=NEW),
            )
            for row in ROWS
        ]
        expected = one_after_the_other(*engine_model(config, kind), ROWS, prompt)
        ids = [list(h.completions[0].ids) for h in engine.run(requests)]
        assert ids == expected, kind


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "kind"),
    sample(
        3,
        [
            *((LLAMA, "alora"), (T5_GATED, "tasks"), (LFM2, "state")),
            *((DEEPSEEK, "experts_down"), (GPT2, "both"), (GEMMA4, "prefix")),
            *itertools.product(OTHERS.values(), ["none"]),
        ],
    ),
)
def test_rows_that_are_continued_together_do_not_change(config, kind):
    model, parameters = engine_model(config, kind)
    prompt = 1 if kind == "tasks" else None
    together = continue_rows(
        model,
        parameters,
        ROWS,
        Sampling(new_tokens=NEW),
        prompt_ids=None if prompt is None else [prompt] * 2,
    )
    assert together == one_after_the_other(model, parameters, ROWS, prompt)


def test_an_invoked_lora_with_ia3_reads_no_keys_of_the_frozen_model():
    kind = "alora_ia3"
    engine = open_engine(LLAMA, ("none", kind), slots=1)
    sampling = Sampling(new_tokens=1, logprobs=1)
    row = [*range(6, 20), 5, 7]  # invoked near its end

    def logprob(ids, adapter=None):
        (handle,) = engine.run([Request(ids=ids, adapter=adapter, sampling=sampling)])
        logprobs = handle.completions[0].logprobs
        assert logprobs is not None
        return logprobs[0].logprob

    logprob(row)
    after_the_same_text = logprob(row, kind)
    logprob([1, 2])
    after_another = logprob(row, kind)
    assert after_the_same_text == pytest.approx(after_another, abs=1e-5)


def test_a_kept_slot_is_taken_by_short_rows_only(monkeypatch):
    monkeypatch.setattr(row_queue, "SHORT", 2)
    engine = open_engine(LLAMA, FEW, kept=1)
    endless = Sampling(new_tokens=NEW, ignores_end=True)
    long = Request(ids=[3, 1], client="one", sampling=endless)
    handles = [engine.submit(long) for _ in range(5)]
    engine.step()
    assert (engine.metrics().active, engine.metrics().queued) == (3, 2)
    sampling = dataclasses.replace(endless, new_tokens=2)
    (short,) = engine.run([Request(ids=[3, 1], client="two", sampling=sampling)])
    assert len(short.completions[0].ids) == 2
    assert not any(handle.finished for handle in handles)
    while not engine.idle:
        engine.step()
    assert all(handle.finished for handle in handles)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "dtype", "kinds", "count"),
    sample(
        1,
        [
            (LLAMA, "float32", SOME, 32),
            (DEEPSEEK, "float32", EXPERTS, 24),
            (DEEPSEEK, "float32", ("none", "soft", "prefix"), 24),
            *itertools.product([LLAMA, GPT2, T5_GATED], ["float32"], [KINDS], [1000]),
            *itertools.product([LLAMA, GPT2, T5_GATED], ["bfloat16"], [KINDS], [100]),
        ],
    ),
)
def test_a_row_does_not_depend_on_the_other_rows(
    config, dtype, kinds, count, monkeypatch
):
    # A step reads one to three sections, as many as its longest row has.
    monkeypatch.setattr(slot_state, "SECTION", 8)
    config = dataclasses.replace(config, parameter_dtype=dtype, compute_dtype=dtype)
    requests = random_requests(count, kinds=kinds)
    engine = open_engine(config, kinds, slots=32)
    alone = [engine.run([request])[0].completions[0].ids for request in requests]
    random = np.random.default_rng(1)
    order = random.permutation(len(requests))
    handles = {}
    waiting = list(order)
    while waiting or not engine.idle:
        for _ in range(random.integers(0, 3)):
            if waiting:
                number = waiting.pop()
                handles[number] = engine.submit(requests[number])
        engine.step()
    together = [handles[i].completions[0].ids for i in range(len(requests))]
    assert together == alone


def test_an_unknown_adapter_is_refused_with_the_names_of_the_others():
    engine = open_engine(LLAMA, ["soft"])
    with pytest.raises(InputError, match="no adapter is named 'x'; loaded are: soft"):
        engine.submit(Request(ids=[1], adapter="x"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("config", [LLAMA, GPT2, *OTHERS.values()])
@pytest.mark.parametrize("kind", ["none", "soft", "lora"])
def test_a_shared_text_is_read_as_if_each_row_began_with_it(config, kind):
    engine = open_engine(config, [kind])
    shared, rows = list(range(2, 13)), [[3, 1, 4], [1, 5, 9, 2], [6]]
    fields = {
        "adapter": None if kind == "none" else kind,
        "sampling": Sampling(new_tokens=NEW),
    }
    whole = engine.run([Request(ids=[*shared, *row], **fields) for row in rows])
    parts = engine.run([Request(ids=row, shared_ids=shared, **fields) for row in rows])
    ids = [[handle.completions[0].ids for handle in each] for each in (whole, parts)]
    assert ids[0] == ids[1]


@pytest.mark.exhaustive
def test_keys_and_states_of_a_text_that_all_rows_share_are_computed_once(monkeypatch):
    read = []

    def counted(parameters, tokens, lengths, *others, **fields):
        read.extend(lengths)
        return read_page(parameters, tokens, lengths, *others, **fields)

    monkeypatch.setattr("prompt_tuning.decoding.resident_adapters.read_page", counted)
    config = dataclasses.replace(GRANITE4, maximum_positions=1024)
    engine = open_engine(config, [], slots=64, length=16, page=256)
    shared = (np.arange(512) % V).tolist()
    rows = [Request(ids=[i % V], shared_ids=shared) for i in range(64)]
    rows = [dataclasses.replace(x, sampling=Sampling(new_tokens=2)) for x in rows]
    handles = engine.run(rows)
    assert len({tuple(x.completions[0].ids) for x in handles}) > 1
    assert sum(read) == 512


def test_a_cancelled_request_frees_its_slots():
    engine = open_engine(LLAMA, [], slots=1)
    sampling = Sampling(new_tokens=4)
    first = engine.submit(Request(ids=[1, 2], sampling=sampling))
    second = engine.submit(Request(ids=[3], sampling=sampling))
    engine.step()
    engine.cancel(first)
    assert [one.reason for one in first.completions] == ["cancelled"]
    while not second.finished:
        engine.step()
    assert engine.metrics().cancelled == 1
    assert len(second.completions[0].ids) == 4


def test_a_row_longer_than_a_slot_names_both_numbers():
    engine = open_engine(LLAMA, [])
    request = Request(ids=[1] * 30, sampling=Sampling(new_tokens=9))
    with pytest.raises(InputError, match=r"30 tokens and 9 new .* a slot has 32"):
        engine.submit(request)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "vectors"), sample(2, [("suffix", 2), ("deep", 5), ("tasks", 2)])
)
def test_an_encoders_text_and_its_prompt_fit_into_a_slot_or_are_refused(kind, vectors):
    engine = open_engine(T5_GATED, (kind,), length=16)
    prompt = 1 if kind == "tasks" else None
    fits = list(range(3, 19 - vectors))
    sampling = Sampling(new_tokens=NEW)
    request = Request(ids=fits, adapter=kind, prompt_id=prompt, sampling=sampling)
    (handle,) = engine.run([request])
    expected = one_after_the_other(*engine_model(T5_GATED, kind), [fits], prompt)
    assert [list(handle.completions[0].ids)] == expected
    with pytest.raises(InputError, match=rf"16 positions, and .* takes {vectors}"):
        engine.submit(dataclasses.replace(request, ids=[*fits, 3]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("config", [LLAMA, GPT2, T5_GATED])
def test_guesses_save_steps_and_leave_the_tokens_as_they_are(config):
    kinds = ("none", "soft", "lora")
    text = [7, 3, 9, 1] * 3
    requests = [
        Request(
            ids=[*text, last],
            adapter=None if kind == "none" else kind,
            sampling=Sampling(new_tokens=18),
        )
        for kind in kinds
        for last in range(4)
    ]
    steps, ids = [], []
    for guesses in (0, 3):
        engine = open_engine(config, kinds, slots=len(requests), guesses=guesses)
        handles = [engine.submit(request) for request in requests]
        count = 0
        while not engine.idle:
            engine.step()
            count += 1
        steps.append(count)
        ids.append([handle.completions[0].ids for handle in handles])
    assert ids[0] == ids[1]
    assert steps[1] <= steps[0]


@pytest.mark.exhaustive
def test_a_users_own_function_changes_the_logits():
    def only_even(logits, choices):
        del choices
        odd = np.arange(logits.shape[-1]) % 2 == 1
        return logits - 1e9 * odd

    model = engine_model(LLAMA, "none")
    engine = DecodingEngine(*model, slots=2, length=32, chunk=8, process=only_even)
    (handle,) = engine.run([Request(ids=[1, 2], sampling=Sampling(new_tokens=8))])
    assert not any(token % 2 for token in handle.completions[0].ids)


def test_stop_texts_wait_for_the_minimum_of_tokens():
    engine = open_engine(LLAMA, [])
    letters = LetterTokenizer()
    engine.model = dataclasses.replace(engine.model, tokenizer=letters)
    forced = tuple(letters.encode("abcedefegh"))
    sampling = Sampling(new_tokens=10, forced=forced, stop=("e",), minimum_new_tokens=6)
    (handle,) = engine.run([Request(ids=[1], sampling=sampling)])
    (completion,) = handle.completions
    assert (completion.text, completion.reason) == ("abcedef", "stop")
