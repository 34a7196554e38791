"""The output head as losses take it: an array, or one with a bias or a soft cap."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from prompt_tuning.core.model_choices import ClassProblem
from prompt_tuning.core.quantization.tables import QuantizedTable, Table


@dataclasses.dataclass(frozen=True)
class ReplacedColumns:
    """Tokens with head rows outside the kernel.

    Attributes:
      ids: id of each row. Ids from the kernel's length on are new tokens.
      total: number of tokens `V`; `ids` has all that the kernel lacks.
    """

    ids: tuple[int, ...]
    total: int

    def split(
        self, d_logits: Float[Array, "*lead V"], size: int
    ) -> tuple[Float[Array, "*lead v"], Float[Array, "*lead n"]]:
        """Splits a gradient of all logits into the kernel's part and the rows' part.

        The kernel has `size` rows.
        """
        ids = jnp.asarray(self.ids)
        return d_logits.at[..., ids].set(0)[..., :size], d_logits[..., ids]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OutputHead:
    """A head whose logits are more than products of hidden states and a kernel.

    Attributes:
      kernel: `[V, D]`, with the layout of an embedding table; it may be quantized.
      bias: bias of each logit, `[V]`, or None (GPT-J, Phi).
      soft_cap: bound `c` on the absolute value of the logits, which become `c *
        tanh(logits / c)` (Gemma Team 2024, "Gemma 2", section 2); None for none.
      rows: `[n, D]`, rows that replace the kernel's or follow them, without a bias;
        None for none.
      columns: the tokens of these rows.
      problem: what a class head decides; it determines the loss (`value_loss`).
      of_classes: whether it scores classes. On a mesh each device then has all rows of
        the kernel, and scores its own hidden states, whatever shards the vocabulary.
    """

    kernel: Table
    bias: Float[Array, "V"] | None = None
    soft_cap: float | int | None = dataclasses.field(
        default=None, metadata={"static": True}
    )
    rows: Float[Array, "n D"] | None = None
    columns: ReplacedColumns | None = dataclasses.field(
        default=None, metadata={"static": True}
    )
    problem: ClassProblem = dataclasses.field(
        default="single_label", metadata={"static": True}
    )
    of_classes: bool = dataclasses.field(default=False, metadata={"static": True})


FEW_ROWS = range(2, 65)
"""Numbers of rows of which XLA's products with a whole vocabulary are slow on CPUs. In
parts they take a third to nine tenths of the time."""

MAXIMUM_PARTS = 64

MINIMUM_PART = 256
"""Least number of tokens in a part; products with fewer are not slow."""

LARGEST_WIDENED = 2**20
"""Numbers of a narrow kernel that are widened at once on CPUs: 4 MiB, which stay in the
cache. Larger arrays get fresh pages from the system each time, which takes
longer than the product."""

LARGEST_ON_DEVICES = 2**26
"""The same of a quantized kernel on other devices, where products must be larger."""

AnyHead = Float[Array, "V D"] | OutputHead
"""A head: its kernel alone, if the logits have neither a bias nor a soft cap."""


def as_output_head(head: AnyHead) -> OutputHead:
    """Returns a head in either form as an `OutputHead`."""
    return head if isinstance(head, OutputHead) else OutputHead(head)


def tempered(head: AnyHead, temperature: float) -> OutputHead:
    """Returns the head that turns hidden states over a temperature into logits over it.

    A cap divided by the temperature does this for capped logits.
    """
    head = as_output_head(head)
    bias = None if head.bias is None else head.bias / temperature
    cap = None if head.soft_cap is None else head.soft_cap / temperature
    return OutputHead(head.kernel, bias, cap, head.rows, head.columns)


def head_logits(
    hidden: Float[Array, "*lead D"], head: OutputHead
) -> Float[Array, "*lead V"]:
    """Computes the logits of this device's shard of tokens, in float32."""
    rows = hidden.size // hidden.shape[-1]
    kernel = head.kernel
    few, size = _parts(len(kernel)), _narrow_part(kernel, rows)
    in_parts = jax.default_backend() == "cpu" and rows in FEW_ROWS and few > 1
    if isinstance(kernel, QuantizedTable):
        assert size is not None
        logits = _logits_part_by_part(hidden, kernel, size)
    # XLA multiplies numbers of 16 bits in parts without widening them.
    elif in_parts and (size is None or kernel.dtype == hidden.dtype):
        logits = _logits_in_parts(hidden, kernel.astype(hidden.dtype), few)
    elif size is not None:
        logits = _logits_part_by_part(hidden, kernel, size)
    else:
        logits = _product(hidden, kernel)
    if head.bias is not None:
        logits = logits + head.bias.astype(jnp.float32)
    if head.rows is not None and head.columns is not None:
        logits = replace_columns(logits, _product(hidden, head.rows), head.columns)
    return soft_capped(logits, head.soft_cap)


def replace_columns(
    logits: Float[Array, "*lead v"],
    row_logits: Float[Array, "*lead n"],
    columns: ReplacedColumns,
) -> Float[Array, "*lead V"]:
    """Replaces a kernel's logits by the logits of single rows, or appends these."""
    missing = columns.total - logits.shape[-1]
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, missing)]
    logits = jnp.pad(logits, padding, constant_values=-jnp.inf)
    return logits.at[..., jnp.asarray(columns.ids)].set(row_logits)


def hidden_gradient(
    d_logits: Float[Array, "*lead V"], kernel: Table
) -> Float[Array, "*lead D"]:
    """Computes the gradient of hidden states from that of their logits."""
    size = _narrow_part(kernel, d_logits.size // len(kernel))
    if size is None:
        assert not isinstance(kernel, QuantizedTable)
        return jnp.einsum("...v,vd->...d", d_logits, kernel.astype(d_logits.dtype))
    wide = d_logits.astype(_dtype_in_parts(d_logits))

    def product(start: Array, size: int) -> Array:
        return jnp.einsum(
            "...v,vd->...d",
            jax.lax.dynamic_slice_in_dim(wide, start, size, -1),
            _widened_rows(kernel, start, size).astype(wide.dtype),
            preferred_element_type=jnp.float32,
        )

    def add(total: Array, start: Array) -> tuple[Array, None]:
        return total + product(start, size), None

    count, rest = divmod(len(kernel), size)
    # Beginning with a product and not with zeros, the sum varies over a mesh as it.
    total = product(jnp.zeros((), jnp.int32), size)
    total, _ = jax.lax.scan(add, total, size * jnp.arange(1, count))
    if rest:
        total = total + product(jnp.asarray(count * size), rest)
    return total.astype(d_logits.dtype)


def _product(
    hidden: Float[Array, "*lead D"], kernel: Float[Array, "V D"]
) -> Float[Array, "*lead V"]:
    return jnp.einsum(
        "...d,vd->...v",
        hidden,
        kernel.astype(hidden.dtype),
        preferred_element_type=jnp.float32,
    )


def _narrow_part(kernel: Table, rows: int) -> int | None:
    """Returns how many tokens of a narrow kernel to widen at a time; None for all.

    On CPUs, XLA's products first convert a 16-bit kernel to float32: 2.1 GB for the
    whole head of an 8B model. `rows` is the number of hidden states.
    """
    cpu = jax.default_backend() == "cpu"
    size = max((LARGEST_WIDENED if cpu else LARGEST_ON_DEVICES) // kernel.shape[1], 1)
    if isinstance(kernel, QuantizedTable):
        return min(size, len(kernel))
    if not cpu or kernel.dtype.itemsize != 2:
        return None
    if rows > kernel.shape[1]:
        # Logits are larger than the wide kernel, and parts of them must be joined.
        return None
    return size if size < len(kernel) else None


def _dtype_in_parts(x: Array) -> jnp.dtype:
    """Returns the dtype in which a factor is multiplied by parts of a kernel."""
    return jnp.dtype(jnp.float32) if jax.default_backend() == "cpu" else x.dtype


def _widened_rows(
    kernel: Table, start: Int[Array, ""], size: int
) -> Float32[Array, "size D"]:
    """Returns some rows of a kernel in float32, within a loop."""
    # If the kernel did not depend on the iteration, XLA would move the conversion of
    # all rows out of the loop.
    kernel, start = jax.lax.optimization_barrier((kernel, start))
    if isinstance(kernel, QuantizedTable):
        return kernel.part(start, size)
    return jax.lax.dynamic_slice_in_dim(kernel, start, size).astype(jnp.float32)


def _logits_part_by_part(
    hidden: Float[Array, "*lead D"], kernel: Table, size: int
) -> Float[Array, "*lead V"]:
    """Computes the logits in a loop over parts of the vocabulary."""
    wide = hidden.astype(_dtype_in_parts(hidden))
    count, rest = divmod(len(kernel), size)

    # A differentiated loop would keep the wide parts of all iterations.
    @functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(1,))
    def product(start: Array, size: int) -> Array:
        return _product(wide, _widened_rows(kernel, start, size))

    logits = jax.lax.map(lambda start: product(start, size), size * jnp.arange(count))
    logits = jnp.moveaxis(logits, 0, -2).reshape(*hidden.shape[:-1], count * size)
    if not rest:
        return logits
    last = product(jnp.asarray(count * size), rest)
    return jnp.concatenate([logits, last], axis=-1)


def _parts(size: int) -> int:
    """Returns the least number of equal parts of a vocabulary, or 1 if none fits."""
    most = min(MAXIMUM_PARTS, size // MINIMUM_PART)
    return next((n for n in range(2, most + 1) if size % n == 0), 1)


def _logits_in_parts(
    hidden: Float[Array, "*lead D"], kernel: Float[Array, "V D"], parts: int
) -> Float[Array, "*lead V"]:
    """Computes the logits of all parts of the vocabulary with one batched product."""
    size, width = kernel.shape
    rows = hidden.reshape(-1, width)  # [n, D]
    logits = jnp.einsum(
        "pvd,pnd->pvn",
        kernel.reshape(parts, size // parts, width),
        jnp.broadcast_to(rows, (parts, *rows.shape)),
        preferred_element_type=jnp.float32,
    )
    logits = logits.reshape(size, -1).T.reshape(*hidden.shape[:-1], size)
    # Without it, XLA joins a softmax to the transposition, and its results are wrong.
    return jax.lax.optimization_barrier(logits)


def soft_capped(
    logits: Float[Array, "*lead"], cap: float | int | None
) -> Float[Array, "*lead"]:
    """Computes `c * tanh(logits / c)`, or returns the logits without a cap."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)
