"""Matrix products of attention that support sources shared by rows of queries.

The dimensions are those in `attention`.
"""

import jax.numpy as jnp
from jaxtyping import Array


def bias_of_scores(bias: Array, scores: Array) -> Array:
    """Reshapes a bias `[1 or R, H, Q, S]` to broadcast against a source's scores."""
    groups, n, rows, heads, *_ = scores.shape
    lead = (1, 1) if len(bias) == 1 else (n, rows)
    split = bias.reshape(*lead, groups, heads, *bias.shape[2:])  # [N, r, G, h, Q, S]
    return jnp.moveaxis(split, 2, 0)  # [G, N, r, h, Q, S]


def bias_gradient(d_score: Array, bias: Array) -> Array:
    """Computes the gradient of a bias, summed over rows if they all share it."""
    if len(bias) == 1:
        d_score = d_score.sum((1, 2), keepdims=True)
    by_rows = jnp.moveaxis(d_score, 0, 2)  # [N, r, G, h, Q, S]
    return by_rows.reshape(bias.shape).astype(bias.dtype)


def _by_keys(query: Array, keys: Array) -> Array:
    """Groups queries `[G, R, h, Q, K]` by their row of keys, `[G, N, r, h, Q, K]`."""
    groups, rows, *rest = query.shape
    n = keys.shape[1]
    check_groups(rows, n)
    return query.reshape(groups, n, rows // n, *rest)


def check_groups(rows: int, n: int) -> None:
    """Checks that `n` prompts can share `rows` rows evenly.

    Raises:
      ValueError: if `n` does not divide `rows`.
    """
    if rows % n:
        raise ValueError(
            f"{rows} rows cannot be grouped evenly by {n} prompts; set "
            "Batch.prompt_ids to the prompt of each row"
        )


def query_key_products(query: Array, keys: Array) -> Array:
    """Multiplies every query with every key: `[G, N, r, h, Q, S]`, in float32."""
    return jnp.einsum(
        "gnrhqk,gnsk->gnrhqs",
        _by_keys(query, keys),
        keys,
        preferred_element_type=jnp.float32,
    )


def key_query_products(query: Array, keys: Array) -> Array:
    """Computes `query_key_products` with the keys first.

    On CPUs it takes a quarter of the time where all heads read the same keys.
    """
    products = jnp.einsum(
        "gnsk,gnrhqk->gnsrhq",
        keys,
        _by_keys(query, keys),
        preferred_element_type=jnp.float32,
    )
    return jnp.moveaxis(products, 2, -1)


def sum_over_keys(weights: Array, values: Array, query: Array) -> Array:
    """Sums values over keys, with weights `[G, N, r, h, Q, S]`: `[G, R, h, Q, V]`."""
    summed = jnp.einsum(
        "gnrhqs,gnsk->gnrhqk", weights, values, preferred_element_type=jnp.float32
    )
    return summed.reshape(*query.shape[:-1], values.shape[-1])


def sum_over_queries(weights: Array, query: Array, keys: Array) -> Array:
    """Sums queries over queries, with weights `[G, N, r, h, Q, S]`: `[G, N, S, K]`."""
    summed = jnp.einsum(
        "gnrhqs,gnrhqk->gnsk",
        weights,
        _by_keys(query, keys),
        preferred_element_type=jnp.float32,
    )
    return summed.astype(keys.dtype)


def over_keys(x: Array, scores: Array) -> Array:
    """Reshapes one number per query, `[G, R, h, Q]`, to `[G, N, r, h, Q, 1]`."""
    return x.reshape(*scores.shape[:-1], 1)
