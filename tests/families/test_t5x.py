import json
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.checkpoints.formats import t5x_checkpoint
from prompt_tuning.checkpoints.restore_plan import plan_restore
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import merge
from prompt_tuning.core.t5_config import t5_config
from prompt_tuning.families import t5x
from prompt_tuning.models.build import build_model
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.settings.class_head import ClassHead
from prompt_tuning.settings.pretrained import Pretrained
from tests.support import dummies
from tests.support.exhaustive import sample
from tests.support.expected_shapes import abstract
from tests.support.shared_data import FIXTURES, SHARED, released
from tests.support.t5x_fixtures import MSGPACK, T5X_CONFIG, ZARR

TOY_MSGPACK = SHARED / "data/models/t5x_tiny_msgpack/test_t5_tiny.checkpoint_0"
TOY_ZARR = SHARED / "data/models/t5x_tiny_zarr"
CONFIGS = {
    MSGPACK: T5X_CONFIG,
    ZARR: T5X_CONFIG,
    TOY_MSGPACK: t5_config(
        width=8, feed_forward_width=16, layers=2, heads=4, head_width=3
    ),
    TOY_ZARR: t5_config(
        width=4,
        feed_forward_width=8,
        layers=2,
        heads=2,
        head_width=2,
        relative_buckets=4,
        relative_maximum_distance=8,
    ),
}


def test_a_class_head_is_refused_by_name():
    source = Pretrained(checkpoint=str(MSGPACK), config=T5X_CONFIG)
    tuning = Tuning(adapters=[ClassHead(labels=["no", "yes"])])
    with pytest.raises(InputError, match="a class head needs a Hugging Face folder"):
        open_pretrained(source, tuning, key=jax.random.key(0))


@pytest.mark.parametrize(
    "path", [MSGPACK, ZARR, *map(released, (TOY_MSGPACK, TOY_ZARR))]
)
def test_every_array_is_restored(path):
    config, stored = CONFIGS[path], t5x_checkpoint.open_t5x(path)
    plan = plan_restore(abstract(config), t5x.t5x_recipes(config), stored)
    assert len(stored) == 52
    assert not plan.fresh
    assert plan.ignored == ()
    restored = plan.restore()
    assert set(restored) == set(abstract(config))
    for layer in range(2):
        for ours, theirs in {
            "encoder/layers/mlp/gate/kernel": "encoder/layers_{}/mlp/wi_0/kernel",
            "encoder/layers/self_attention/out/kernel": (
                "encoder/layers_{}/attention/out/kernel"
            ),
            "decoder/layers/mlp/up/kernel": "decoder/layers_{}/mlp/wi_1/kernel",
            "decoder/layers/cross_attention/key/kernel": (
                "decoder/layers_{}/encoder_decoder_attention/key/kernel"
            ),
            "decoder/layers/cross_attention_norm/scale": (
                "decoder/layers_{}/pre_cross_attention_layer_norm/scale"
            ),
        }.items():
            np.testing.assert_array_equal(
                restored[ours][layer], stored[theirs.format(layer)].read()
            )
    np.testing.assert_array_equal(
        restored["head/kernel"], stored["decoder/logits_dense/kernel"].read().T
    )


FACTS = json.loads((FIXTURES / "t5x/losses.json").read_text())
# Of each checkpoint: negative log likelihoods of the targets, computed by
# transformers' T5ForConditionalGeneration with the arrays of the file under its names.
FORWARD = {
    MSGPACK: FACTS["losses"],
    ZARR: FACTS["losses"],
    TOY_MSGPACK: [9.96828, 10.69108, 9.89685, 11.24543],
    TOY_ZARR: [10.71295, 10.94903, 11.12268, 10.51361],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sample(2, [ZARR, released(TOY_ZARR), MSGPACK, released(TOY_MSGPACK)])
)
def test_losses_equal_those_of_transformers(path):
    config, stored = CONFIGS[path], t5x_checkpoint.open_t5x(path)
    graph, shapes = dummies.abstract(lambda key: build_model(key, config))
    parameters = plan_restore(shapes, t5x.t5x_recipes(config), stored).restore()
    batch = Batch(
        tokens=jnp.array([FACTS["inputs"]]),
        lengths=jnp.array([6]),
        targets=jnp.array([FACTS["targets"]]),
        loss_positions=jnp.arange(4)[None],
        loss_weights=jnp.ones((1, 4)),
        prefix_lengths=jnp.zeros(1, int),
    )

    @jax.jit
    def logits(parameters):
        model = cast(LanguageModel, merge(graph, parameters))
        return model.logits(model.hidden(batch))

    scores = jax.nn.log_softmax(logits(parameters))[0]
    losses = -scores[np.arange(4), batch.targets[0]]
    np.testing.assert_allclose(losses, FORWARD[path], atol=2e-5)


def test_t5_1_0_has_one_input_projection_and_no_head():
    config = t5_config(width=8, feed_forward_width=16, layers=1, heads=2, version="1.0")
    table = t5x.t5x_recipes(config)
    assert set(table) == set(abstract(config))
    up = table["encoder/layers/mlp/up/kernel"].sources
    assert up == ("encoder/layers_0/mlp/wi/kernel",)
