"""Counts the floating-point operations of a model's blocks and head.

Only matrix products are counted, from the shapes of parameters: they are almost all of
the work, and the counts divide a model among stages before anything is compiled.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import ParameterAxes
from prompt_tuning.core.quantization.stores import describes_kernel, weight_shape
from prompt_tuning.pipeline.simulation import Cost, OperationCosts

LAYERS, EXPERTS = "layers", "experts"
READS_ENCODER = ("cross_attention/key/", "cross_attention/value/")
"""Projections that the decoder applies to the encoder's output."""
FACTORS = 2
"""Number of dimensions of a matrix, besides that of layers."""


@dataclasses.dataclass(frozen=True)
class MicroBatchShape:
    """Sizes of a micro-batch on one device's rows.

    Attributes:
      rows: `B`.
      inputs: `T`, tokens of a row that the model, or its encoder, reads.
      targets: `U`, tokens of a row that an encoder-decoder's decoder reads.
      positions: `m`, learned positions of a row.
      prompt: `P`, prompt vectors shared by all rows.
      decoder_prompt: the same in an encoder-decoder's decoder.
    """

    rows: int
    inputs: int
    targets: int
    positions: int
    prompt: int = 0
    decoder_prompt: int = 0


@dataclasses.dataclass(frozen=True)
class ModelWork:
    """Operations of a model for one micro-batch.

    Attributes:
      encoder: of each block of the encoder.
      decoder: of each block of the decoder.
      head: of the output head and the loss.
    """

    encoder: tuple[OperationCosts, ...]
    decoder: tuple[OperationCosts, ...]
    head: OperationCosts

    @property
    def blocks(self) -> tuple[OperationCosts, ...]:
        """All blocks in the order of stages; the head is part of the last one."""
        blocks = [*self.encoder, *self.decoder]
        blocks[-1] += self.head
        return tuple(blocks)


def count_work(
    config: ModelConfig,
    axes: Mapping[str, ParameterAxes],
    shapes: Mapping[str, Any],
    trained: Collection[str],
    batch: MicroBatchShape,
) -> ModelWork:
    """Counts the operations of a model for one micro-batch."""
    encoder: tuple[OperationCosts, ...] = ()
    decoder_tokens, prompt = batch.inputs, batch.prompt
    if config.architecture == "encoder_decoder":
        decoder_tokens, prompt = batch.targets, batch.decoder_prompt
        stack = _Stack("encoder", batch, batch.inputs, batch.prompt)
        block = stack.block(config, axes, shapes, trained)
        encoder = (block,) * config.encoder_layers
    stack = _Stack("decoder", batch, decoder_tokens, prompt)
    block = stack.block(config, axes, shapes, trained)
    return ModelWork(encoder, (block,) * config.layers, _head(config, trained, batch))


@dataclasses.dataclass(frozen=True)
class _Stack:
    """The blocks of one stack; all have the same shapes."""

    name: str
    batch: MicroBatchShape
    tokens: int
    prompt: int

    def block(
        self,
        config: ModelConfig,
        axes: Mapping[str, ParameterAxes],
        shapes: Mapping[str, Any],
        trained: Collection[str],
    ) -> OperationCosts:
        """Returns the operations of one block."""
        work = self._attention(config)
        for path, logical in axes.items():
            names = logical.names
            in_stack = path.startswith(f"{self.name}/") and LAYERS in names
            if in_stack and _is_matrix(path, names) and not describes_kernel(path):
                size = _used_size(config, names, weight_shape(path, shapes[path]))
                work += self._product(path, size, path in trained)
        if self._policy(config) == "nothing":  # p1 runs the block again
            forward, prefix = work.forward, work.prefix_forward
            work += OperationCosts(input_gradient=forward, prefix_backward=prefix)
        return work

    def _policy(self, config: ModelConfig) -> str:
        how = config.rematerialization
        if self.name == "encoder":
            how = config.encoder_rematerialization or how
        return how.policy

    def _product(self, path: str, size: Cost, trained: bool) -> OperationCosts:
        """Returns the operations of a projection: two per weight and token."""
        reads_encoder = any(part in path for part in READS_ENCODER)
        tokens = self.batch.inputs if reads_encoder else self.tokens
        operations = 2 * self.batch.rows * tokens * size
        prefix = 0 if reads_encoder else 2 * self.prompt * size
        return OperationCosts(
            operations, operations, operations if trained else 0, prefix, prefix
        )

    def _attention(self, config: ModelConfig) -> OperationCosts:
        """Returns the operations of scores and of their weighted sums of values."""
        keys = self.prompt + self.tokens
        if self.name == "decoder" and config.architecture == "encoder_decoder":
            keys += self.batch.prompt + self.batch.inputs
        width = config.heads * config.head_width
        operations = 4 * self.batch.rows * self.tokens * keys * width
        prefix = 4 * self.prompt * self.prompt * width
        # Both factors of a product are activations, so both have a gradient.
        return OperationCosts(operations, 2 * operations, 0, prefix, 2 * prefix)


def _is_matrix(path: str, names: Sequence[str]) -> bool:
    factors = [name for name in names if name != LAYERS]
    several = EXPERTS in factors and len(factors) > FACTORS
    return len(factors) == FACTORS + several and "relative_position_bias" not in path


def _used_size(config: ModelConfig, names: Sequence[str], shape: Sequence[int]) -> Cost:
    sizes = {n: s for n, s in zip(names, shape, strict=True) if n != LAYERS}
    size = math.prod(sizes.values())
    several = EXPERTS in sizes and len(sizes) > FACTORS
    return size * config.experts_per_token / config.experts if several else size


def _head(
    config: ModelConfig, trained: Collection[str], batch: MicroBatchShape
) -> OperationCosts:
    """Returns the operations of the logits, and of the gradient of hidden states.

    That gradient is computed with the loss, in the forward pass.
    """
    operations = (
        2 * batch.rows * batch.positions * config.width * config.vocabulary_size
    )
    table = "head/kernel"
    if config.tied_head:
        owner = "decoder" if config.separate_tables else "token"
        table = f"{owner}_embedder/embedding"
    return OperationCosts(2 * operations, 0, operations if table in trained else 0)
