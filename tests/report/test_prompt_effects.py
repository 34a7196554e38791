"""Shares of attention and costs of removal, against computations that are slow."""

# transformers and torch are in the `bench` extra only.
# pyright: reportMissingImports=false

import dataclasses
import functools

import jax
import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.models.scoring import token_losses
from prompt_tuning.report.prompt_effects import (
    DEAD_SHARE,
    PromptEffects,
    attention_shares,
    nats_without,
)
from prompt_tuning.settings.prompting import Prompting
from scripts import skills
from tests.support import dummies
from tests.support.small_runs import write_model

TINY = dataclasses.replace(
    dummies.GPT2,
    vocabulary_size=len(skills.VOCABULARY),
    pad_id=skills.PAD_ID,
    eos_id=skills.EOS_ID,
    bos_id=skills.BOS_ID,
)
PAIRS = [("ab=", "AB"), ("dogs=", "DOGS"), ("x=", "X")]


@pytest.mark.torch
def test_effects_are_those_of_transformers(tmp_path):
    import torch
    import transformers

    folder = write_model(tmp_path / "gpt2", TINY)
    prompt = pt.SoftPrompt(length=3, initializer=pt.uniform(1.0))
    model = pt.load(folder).attach(prompt)
    batch = next(model.batches(PAIRS, batch_size=3))
    run = (model.graph, model.parameters, batch)
    shares = jax.jit(attention_shares, static_argnums=(0, 1))("decoder", *run)
    without = jax.jit(nats_without, static_argnums=(0, 1))("decoder", *run)

    slow = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()
    vectors = torch.tensor(model.prompt_vectors()["decoder/prompt"])

    def run_slow(row, vectors):
        """Returns the attention `[L, H, S, S]` and the weighted loss of a row."""
        ids = torch.tensor(batch.tokens[row, : batch.lengths[row]])
        embedded = torch.cat([vectors, slow.transformer.wte(ids)])[None]
        with torch.no_grad():
            output = slow(inputs_embeds=embedded, output_attentions=True)
        logprobs = output.logits[0, len(vectors) - 1 : -1].log_softmax(-1)
        nats = -logprobs[torch.arange(len(ids)), ids]
        weights = torch.tensor(batch.loss_weights[row])
        chosen = nats[torch.tensor(batch.loss_positions[row])]
        return torch.stack(output.attentions)[:, 0], float((chosen * weights).sum())

    for row in range(3):
        attention, nats = run_slow(row, vectors)
        by_hand = attention[:, :, 3:, :3].mean(1).sum(1).numpy()
        np.testing.assert_allclose(shares.sums[row], by_hand, atol=1e-5)
        np.testing.assert_allclose(shares.nats[row], nats, rtol=1e-5)
        for vector in range(3):
            kept = vectors[[i for i in range(3) if i != vector]]
            expected = run_slow(row, kept)[1]
            np.testing.assert_allclose(without[row, vector], expected, rtol=1e-5)


def run_effects(config, prompting=None):
    graph, parameters = dummies.prompted(config, prompting=prompting)
    batch = dummies.make_batch(config, dummies.random_rows([(3, 2), (4, 3)]))
    stack = "encoder" if config.architecture == "encoder_decoder" else "decoder"
    effects = functools.partial(attention_shares, stack, graph)
    shares = jax.jit(effects)(parameters, batch)
    losses = jax.jit(functools.partial(token_losses, graph))(parameters, batch)
    nats = (losses.nll * batch.loss_weights).sum(1)
    np.testing.assert_allclose(shares.nats, nats, rtol=1e-5)
    return shares


def test_a_prompt_in_the_rows_has_the_shares_of_one_ahead_of_them():
    ahead = run_effects(dummies.LLAMA)
    joined = run_effects(dummies.LLAMA, Prompting(execution="joined"))
    np.testing.assert_allclose(ahead.sums, joined.sums, rtol=1e-5)
    assert 0 < float((ahead.sums.sum(2) / ahead.tokens[:, None]).max()) < 1


def test_an_encoder_is_measured():
    shares = run_effects(dummies.T5_GATED)
    assert shares.sums.shape[1:] == (2, dummies.P)
    assert (np.asarray(shares.sums) > 0).all()


def test_a_vector_is_dead_if_nothing_reads_and_misses_it():
    shares = np.full((2, 3), 0.1)
    shares[:, 1:] = DEAD_SHARE / 2
    effects = PromptEffects("decoder", 8, shares, np.array([0.0, 0.5, 0.0]))
    assert effects.dead == [2]
