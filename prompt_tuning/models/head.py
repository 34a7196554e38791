"""Output head of a model, and the layers before it in encoder-only models."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import KernelParameters, declare, fan_in, named_key
from prompt_tuning.core.quantization.tables import Table
from prompt_tuning.models.layers import ACTIVATIONS, TableModule
from prompt_tuning.models.norms import Norm, layer_norm, normalize
from prompt_tuning.prompts.class_rows import ClassRows


class HeadTransform(nnx.Module):
    """A dense layer with an activation, and perhaps a norm, before the output head.

    It is a sequence classifier's pooler or head, or the transform of a masked language
    model (Devlin et al. 2018, section 3.1).

    Attributes:
      kernel: `[D, D]`; None if the class head trains the dense layer.
      bias: `[D]`, or None.
      norm: norm after the activation, or None.
    """

    def __init__(self, key: Key[Array, ""], config: ModelConfig):
        assert config.transform_activation is not None
        self.activation = config.transform_activation
        width, dtype = config.width, config.parameter_dtype
        shape, axes = (width, width), ("transform", "transform")
        self.kernel = declare(key, shape, axes, fan_in(width), dtype)
        zeros, shape, axes = jax.nn.initializers.zeros, (width,), ("transform",)
        biased = config.transform_bias
        self.bias = declare(key, shape, axes, zeros, dtype) if biased else None
        norm = functools.partial(Norm, named_key(key, "norm"), config, stacked=None)
        self.norm = norm() if config.transform_norm else None
        self.epsilon = config.norm_epsilon

    def leave_out_dense(self) -> None:
        """Removes the frozen dense layer, because a trained one takes its place."""
        self.kernel = self.bias = self.norm = None

    def __call__(
        self, x: Float[Array, "*lead D"], classes: ClassRows | None
    ) -> Float[Array, "*lead D"]:
        """Applies the layers to states after the final norm.

        `classes` is the trained class head, which may include the dense layer.
        """
        kernel, bias = self.kernel, self.bias
        if kernel is None:
            assert classes is not None and classes.dense is not None
            kernel, bias = classes.dense, classes.dense_bias
        y = x @ kernel[...].astype(x.dtype)
        if bias is not None:
            y = y + bias[...].astype(x.dtype)
        y = ACTIVATIONS[self.activation](y)
        if classes is not None and classes.dense_norm is not None:
            scale = classes.dense_norm[...]
            return layer_norm(y, scale, jnp.zeros_like(scale), self.epsilon)
        return normalize(self.norm, y)


class Head(TableModule):
    """Output head, apart from a tied embedding table.

    Attributes:
      kernel: `[V, D]` or `[C, D]`; None if tied to the embedding table or replaced by
        `adapters`. Quantized, its scales are attributes, too.
      bias: bias of each logit, `[V]`, or None.
      transform: layers between the final norm and the head, or None.
      adapters: a trained bias or rows of classes; see `TrainedBias` and `ClassRows`.
    """

    def __init__(self, key: Key[Array, ""], config: ModelConfig):
        self.kernel = None
        # A mesh shards the rows of tokens, but not the rows of classes.
        names = ("adapter", "adapter") if config.labels else ("vocab", "embed")
        if not config.tied_head:
            kernel = declare(
                key,
                (len(config.labels) or config.table_rows, config.width),
                names,
                fan_in(config.width),
                config.parameter_dtype,
            )
            KernelParameters(kernel).set_in(self, "kernel")
        zeros = jax.nn.initializers.zeros
        shape = (len(config.labels) or config.vocabulary_size,)
        dtype = config.parameter_dtype
        self.bias = (
            declare(key, shape, names[:1], zeros, dtype) if config.head_bias else None
        )
        transforms = config.transform_activation is not None
        own_key = named_key(key, "transform")
        self.transform = HeadTransform(own_key, config) if transforms else None
        self.adapters = nnx.Dict()

    @property
    def table(self) -> Table | None:
        """The kernel in its store; None if tied to the embedding table."""
        kernel = self.kernel
        return None if kernel is None else KernelParameters.table_in(self, "kernel")
