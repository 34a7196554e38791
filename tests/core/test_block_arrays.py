"""Views of the blocks of a stack."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core.block_arrays import BlockArrays, view_blocks

needs_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="arrays share memory on CPUs only"
)


@needs_cpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_views_are_in_the_memory_of_their_stack(dtype):
    stack = jnp.arange(3 * 4 * 16).reshape(3, 4, 16).astype(dtype)
    views = view_blocks(stack)
    assert isinstance(views, BlockArrays) and views.shape == stack.shape
    start, size = stack.unsafe_buffer_pointer(), stack.nbytes // 3
    for i, view in enumerate(views.blocks):
        assert view.unsafe_buffer_pointer() == start + i * size
        np.testing.assert_array_equal(view, stack[i])
    np.testing.assert_array_equal(jax.jit(views.stacked)(), stack)


def test_a_stack_whose_blocks_are_not_aligned_remains():
    stack = jnp.zeros((3, 5))
    assert view_blocks(stack) is stack
