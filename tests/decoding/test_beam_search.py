# transformers is in the `bench` extra only.
# pyright: reportMissingImports=false

import numpy as np
import pytest

from prompt_tuning.decoding.beam_search import BeamSearch, search_beams
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.request import Request
from prompt_tuning.decoding.sampling_settings import Sampling
from tests.support.dummies import DEEPSEEK, LLAMA, V, logits, make_batch
from tests.support.engine_models import engine_model
from tests.support.exhaustive import sample

TEXTS = ["rev:abc=", "copy:dbca=", "abca"]


@pytest.mark.slow
@pytest.mark.parametrize("config", sample(1, [LLAMA, DEEPSEEK]))
def test_beams_that_hold_every_continuation_find_the_most_probable_two_tokens(config):
    model, parameters = engine_model(config, "soft")
    row = [4, 9, 2]
    settings = BeamSearch(beams=V, returned=3, new_tokens=2)
    (best,) = search_beams(model, parameters, [row], settings)
    batch = make_batch(config, [(row, [i, 0]) for i in range(V)])
    scores = np.asarray(logits(parameters, batch, graph=model.graph), np.float64)
    logprobs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))  # [V, 2, V]
    totals = logprobs[0, 0][:, None] + logprobs[:, 1]
    order = np.argsort(-totals, axis=None)[:3]
    assert [one.ids for one in best] == [(i // V, i % V) for i in order.tolist()]
    expected = totals.reshape(-1)[order] / 2
    scores = np.array([one.score for one in best], np.float64)
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


@pytest.fixture(scope="module", params=["skills-decoder", "skills-t5"])
def bundled(request):
    import torch
    import transformers

    import prompt_tuning as pt
    from prompt_tuning.pretrained.checkpoint_path import find_checkpoint

    folder = find_checkpoint(f"bundled:{request.param}")
    if "t5" in request.param:
        theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    else:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return pt.load(f"bundled:{request.param}"), theirs.eval(), torch


def generate(bundled, row, **settings):
    model, theirs, torch = bundled
    ids = theirs.generate(
        torch.tensor([row]),
        attention_mask=torch.ones(1, len(row), dtype=torch.long),
        max_new_tokens=8,
        do_sample=False,
        **settings,
    )
    separate = model.config.architecture == "encoder_decoder"
    start = 1 if separate else len(row)
    ends = {*model.prompted.stop_ids, model.config.pad_id}
    return [[i for i in each if i not in ends] for each in ids[:, start:].tolist()]


@pytest.mark.torch
@pytest.mark.exhaustive
@pytest.mark.parametrize("penalty", [1.0, 0.6, 2.0])
def test_beams_are_those_of_transformers(bundled, penalty):
    from prompt_tuning.pretrained.text_encoding import encode_given

    model = bundled[0]
    settings = BeamSearch(beams=4, returned=3, length_penalty=penalty, new_tokens=8)
    for text in TEXTS:
        row = encode_given(model.prompted, text)
        expected = generate(
            bundled,
            row,
            num_beams=4,
            num_return_sequences=3,
            length_penalty=penalty,
        )
        (ours,) = search_beams(model.prompted, model.parameters, [row], settings)
        assert [list(one.ids) for one in ours] == expected


@pytest.mark.torch
@pytest.mark.exhaustive
def test_greedy_tokens_with_a_repetition_penalty_are_those_of_transformers(bundled):
    from prompt_tuning.pretrained.text_encoding import encode_given

    model = bundled[0]
    engine = DecodingEngine(model.prompted, model.parameters, slots=2, length=64)
    sampling = Sampling(new_tokens=8, repetition_penalty=1.7)
    for text in TEXTS:
        row = encode_given(model.prompted, text)
        (handle,) = engine.run([Request(ids=row, sampling=sampling)])
        (expected,) = generate(bundled, row, repetition_penalty=1.7)
        assert list(handle.completions[0].ids) == expected
