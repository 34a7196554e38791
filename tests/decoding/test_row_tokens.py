"""Rows of a batch that each have their own rows of tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.request import Request
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts.low_rank_adapters import LoRA
from prompt_tuning.settings.pretrained import Pretrained
from prompt_tuning.settings.trained_tokens import TrainedTokens
from scripts import skills
from tests.support.small_runs import DECODER, write_model

SIZE = len(skills.VOCABULARY)
TUNINGS = {
    "two": [TrainedTokens(tokens=["<a>", "<b>"]), LoRA(rank=2, initial="orthogonal")],
    "one": [TrainedTokens(tokens=["b", "<c>"])],
    "old": [TrainedTokens(tokens=["c"])],
    "lora": [LoRA(rank=2, initial="orthogonal")],
}
SAMPLING = Sampling(new_tokens=12, ignores_end=True, given_logprobs=0, logprobs=1)


def opened(folder, adapters, seed):
    source = Pretrained(checkpoint=str(folder))
    model = open_pretrained(source, Tuning(adapters=adapters), key=jax.random.key(seed))
    parameters = model.read_parameters()
    for path in [path for path in parameters if "/tokens/" in path]:
        numbers = np.random.default_rng(seed).standard_normal(parameters[path].shape)
        # So large that the tokens are generated.
        parameters[path] = jnp.asarray(3 * numbers, jnp.float32)
    return model, parameters


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def models(request, tmp_path_factory):
    config = dataclasses.replace(DECODER, tied_head=request.param)
    folder = write_model(tmp_path_factory.mktemp("model"), config)
    return {
        name: opened(folder, adapters, seed)
        for seed, (name, adapters) in enumerate(TUNINGS.items())
    }


def request(name, ids):
    return Request(ids=ids, adapter=name, sampling=SAMPLING)


GIVEN = {
    "two": [SIZE, 5, SIZE + 1, 7],
    "one": [SIZE, 9, skills.encode("b")[0]],
    "old": skills.encode("ccab"),
    "lora": skills.encode("acb"),
}


def results(handle):
    (completion,) = handle.completions
    given = [round(score.logprob, 4) for score in completion.given_logprobs]
    return list(completion.ids), given


@pytest.mark.slow
def test_rows_together_have_the_tokens_of_each_alone(models):
    engine = DecodingEngine(*models["two"], slots=5, length=40, guesses=2)
    for name, each in models.items():
        engine.add_adapter(name, *each)
    requests = [request(name, ids) for name, ids in GIVEN.items()]
    requests.append(request(None, skills.encode("acb")))
    together = [results(handle) for handle in engine.run(requests)]
    for (name, ids), found in zip(GIVEN.items(), together, strict=False):
        alone = DecodingEngine(*models[name], slots=1, length=40, adapted=True)
        (handle,) = alone.run([request(None, ids)])
        expected = results(handle)
        assert found[0] == expected[0]
        np.testing.assert_allclose(found[1], expected[1], atol=2e-4)
    assert any(token >= SIZE for token in together[0][0])
    # What has no row of a new token never generates it.
    for _, ids in zip(("lora", "base"), together[3:], strict=True):
        assert all(token < SIZE for token in ids[0])


def test_a_row_without_the_new_tokens_cannot_read_them(models):
    engine = DecodingEngine(*models["two"], slots=1, length=40)
    with pytest.raises(InputError, match=f"has id {SIZE}, expected 0 to {SIZE - 1}"):
        engine.submit(request(None, [SIZE]))


def test_more_new_tokens_than_the_models_are_refused(models):
    engine = DecodingEngine(*models["lora"], slots=1, length=40)
    with pytest.raises(InputError, match="has 2 new tokens behind"):
        engine.add_adapter("two", *models["two"])
