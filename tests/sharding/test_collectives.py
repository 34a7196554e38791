"""The arrays that devices exchange in a compiled step."""

import functools

import jax
import pytest

from prompt_tuning.core import parameter_groups
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import train_step
from scripts.bench import hlo
from tests.support import dummies, meshes

D, L, P = 16, 2, dummies.P
SUMS = 3  # loss, weight and correct of a batch, exchanged with the gradient
ROWS = [(4, 3)] * 4
TEXT = 4 * 7 * D
"""The size of the text's hidden states in a decoder-only model."""


@functools.cache
def exchanges(
    family: str, *, data: int = 1, fsdp: int = 1, tensor: int = 1
) -> list[hlo.Collective]:
    """The collectives of a step that trains a soft prompt."""
    config = dummies.FAMILIES[family]
    graph, parameters = dummies.prompted(config)
    groups = [
        parameter_groups.ParameterGroup(
            (".*/prompt/.*",), parameter_groups.adafactor(0.3)
        )
    ]
    labels = parameter_groups.label(parameters, groups)
    trained, frozen = parameter_groups.partition(parameters, labels)
    optimizer = parameter_groups.group_optimizer(groups, labels)
    layout = meshes.layout_of(MeshShape(data=data, fsdp=fsdp, tensor=tensor), config)
    placement = meshes.placed(layout, graph, parameters)
    state = TrainState.create(trained, optimizer, jax.random.key(0))
    batch = dummies.make_batch(config, dummies.random_rows(ROWS))
    step = functools.partial(
        train_step, graph=graph, optimizer=optimizer, dropout=False, placement=placement
    )
    lowered = jax.jit(step).lower(
        placement.put_tree(state),
        {path: placement.put(path, leaf) for path, leaf in frozen.items()},
        placement.put_batch(batch),
    )
    return hlo.collectives(lowered.compile())


def exchanged_by_blocks(exchanged: list[hlo.Collective]) -> tuple[list[int], list[int]]:
    """Sizes of the arrays that one block exchanges, forward and backward."""
    loops = [x for x in exchanged if x.runs > 1]
    assert all(x.runs == L and x.kind == "all-reduce" for x in loops)
    back = [x.size for x in loops if "transpose(" in x.scope]
    return [x.size for x in loops if "transpose(" not in x.scope], back


@pytest.mark.parametrize("family", ["llama", "t5_gated"])
def test_data_parallel_devices_exchange_the_prompts_gradient_once(family):
    exchanged = exchanges(family, data=2)
    assert all(x.kind == "all-reduce" and x.runs == 1 for x in exchanged)
    *small, gradient = sorted(x.size for x in exchanged)
    # With the batch's sums, and with its divisor if the compiler merges them.
    assert P * D + SUMS <= gradient <= P * D + SUMS + 1
    assert sum(small) <= 1


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_block_has_residual_sums_after_attention_and_feed_forward(family):
    # Both streams, the shared prompt and the text, in one exchange: two forward and two
    # backward, as in Shoeybi et al. 2019, section 3.
    streams = P * D + TEXT
    assert exchanged_by_blocks(exchanges(family, tensor=2)) == (
        [streams] * 2,
        [streams] * 2,
    )


def test_a_decoder_block_with_cross_attention_has_three_residual_sums():
    forth, back = exchanged_by_blocks(exchanges("t5_gated", tensor=2))
    encoder, decoder = 4 * (4 + P) * D, 4 * 3 * D
    assert sorted(forth) == sorted(back) == [decoder] * 3 + [encoder] * 2


@pytest.mark.parametrize("family", ["llama", "t5_gated"])
def test_collectives_are_no_larger_than_the_streams(family):
    encoder, decoder = 4 * (4 + P) * D, 4 * 3 * D
    streams = P * D + TEXT if family == "llama" else encoder + decoder
    assert max(x.size for x in exchanges(family, tensor=2)) <= streams


def test_fully_sharded_blocks_are_gathered_one_at_a_time():
    exchanged = exchanges("llama", fsdp=2)
    largest = D * dummies.LLAMA.feed_forward_width
    gathered = [x for x in exchanged if x.kind == "all-gather" and x.runs == L]
    assert max(x.size for x in gathered) == largest
    # Seven kernels and two norms, forward and again backward.
    assert len(gathered) == 2 * (7 + 2)
    assert not [x for x in exchanged if x.kind == "all-reduce" and x.runs > 1]
