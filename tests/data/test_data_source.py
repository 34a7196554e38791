"""Data files opened for a model: the plans that come of them, and what is refused."""

import functools

import jax
import numpy as np
import pytest

from prompt_tuning.data.packing import PackedPlan
from prompt_tuning.data.plan import BucketPlan
from prompt_tuning.errors import InputError
from prompt_tuning.models.prompted import Prompting
from prompt_tuning.pretrained import Pretrained, open_pretrained
from prompt_tuning.prompts.modules import SoftPrompt
from prompt_tuning.run import DataSource
from tests.small_runs import LENGTH, files

__all__ = ["files"]


prompt = functools.partial(SoftPrompt, length=LENGTH)


@pytest.fixture(scope="module")
def decoder(files):
    return open_pretrained(
        Pretrained(checkpoint=str(files.decoder)),
        prompt=prompt,
        key=jax.random.key(0),
    )


def source(files, **choices):
    return DataSource(files=str(files.train), **choices)


def planned(data, model, **choices):
    return data.plan(model, data.load(model), **({"shuffle": True} | choices))


def test_batches_have_batch_size_rows(files, decoder):
    plan = planned(source(files, batch_size=8), decoder)
    assert isinstance(plan, BucketPlan)
    assert {len(batch.rows) for batch in plan.one_pass()} == {8}


def test_a_budget_of_tokens_stands_in_place_of_batch_size(files, decoder):
    plan = planned(source(files, batch_size=8, batch_tokens=400), decoder)
    sizes = {len(batch.rows) * batch.input_length for batch in plan.one_pass()}
    assert max(sizes) <= 400
    assert max(len(batch.rows) for batch in plan.one_pass()) > 8


def test_packed_rows_have_the_length_asked_for(files, decoder):
    data = source(files, packing=True, packed_length=60, batch_size=2)
    plan = planned(data, decoder)
    assert isinstance(plan, PackedPlan)
    assert plan.shapes()[0].input_length == 60
    rows = np.concatenate([batch.rows for batch in plan.one_pass()])
    assert sorted(rows[rows >= 0]) == list(range(32))


def test_packed_rows_fit_the_positions_beside_the_prompt(files, decoder):
    data = source(files, packing=True, packed_length=64 - LENGTH + 1)
    with pytest.raises(InputError, match="packed_length is 61, expected at most 60"):
        planned(data, decoder)


@pytest.mark.parametrize(
    ("prompting", "message"),
    [
        (Prompting(prefix_attention=True), "prefix_attention lets given tokens see"),
        (Prompting(placement="after_bos"), "placement is 'after_bos'"),
        (Prompting(execution="joined"), "execution is 'joined'"),
    ],
)
def test_packing_is_refused_where_examples_cannot_be_kept_apart(
    files, prompting, message
):
    model = open_pretrained(
        Pretrained(checkpoint=str(files.decoder)),
        prompt=prompt,
        prompting=prompting,
        key=jax.random.key(0),
    )
    with pytest.raises(InputError, match=f"packing is True, but .*{message}"):
        source(files, packing=True).load(model)


def test_an_encoder_decoder_is_not_packed(files):
    model = open_pretrained(
        Pretrained(checkpoint=str(files.t5)), prompt=prompt, key=jax.random.key(0)
    )
    with pytest.raises(InputError, match="an encoder-decoder model cannot read packed"):
        source(files, packing=True).load(model)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0, expected at least 1"),
        ({"batch_tokens": 0}, "batch_tokens is 0, expected at least 1"),
        ({"buckets": 0}, "buckets is 0, expected at least 1"),
        ({"packed_length": 60}, "packed_length is 60, but rows are not packed"),
        ({"packed_length": 0, "packing": True}, "packed_length is 0, expected"),
    ],
)
def test_sizes_that_cannot_be_are_refused(files, decoder, choices, message):
    with pytest.raises(InputError, match=message):
        source(files, **choices).load(decoder)
