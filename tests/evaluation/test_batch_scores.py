"""Batches that are computed at once have the scores of batches that run alone."""

from unittest import mock

import jax.numpy as jnp
import numpy as np

from prompt_tuning.checkpoints.restore_plan import RestorePlan
from prompt_tuning.evaluation.batch_scores import bind, score_batches
from prompt_tuning.losses.dpo import DPO
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.pretrained.tuning import PromptPair
from prompt_tuning.settings.prompting import Prompting
from tests.support import dummies

# Sizes of the rows of each batch: texts and completions.
SIZES = [[(5, 3)] * 4, [(9, 4)] * 4, [(5, 3)] * 4, [(9, 4)] * 4, [(5, 3)] * 4]


def test_batches_at_once_are_scored_in_order_and_each_shape_is_compiled_once():
    config = dummies.FAMILIES["llama"]
    graph, parameters = dummies.prompted(config, length=2)
    plan = mock.Mock(spec=RestorePlan, origin="folder")
    model = PromptedModel(config, graph, PromptPair(), Prompting(), None, plan, dict)
    batches = [
        dummies.make_batch(config, dummies.random_rows(sizes, seed=i))
        for i, sizes in enumerate(SIZES)
    ]
    traced = []

    def running_sums(graph, parameters, batch):
        traced.append(batch.tokens.shape)
        return jnp.cumsum(batch.tokens, axis=1)

    scored = list(score_batches(running_sums, model, parameters, batches))
    for (batch, scores), expected in zip(scored, batches, strict=True):
        assert batch is expected
        np.testing.assert_array_equal(scores, np.cumsum(expected.tokens, axis=1))
    assert sorted(traced) == sorted({batch.tokens.shape for batch in batches})


def test_equal_objectives_give_one_function_and_so_one_program():
    losses = [DPO(beta=beta) for beta in (0.1, 0.1, 0.2)]
    one, same, other = (bind(dummies.logits, loss) for loss in losses)
    assert one is same and one is not other
