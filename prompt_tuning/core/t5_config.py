"""Architectures of T5 in T5X's format, which does not contain them."""

from typing import Literal

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.number_ranges import (
    AxisLength,
    BlockCount,
    NonnegativeInteger,
    PositiveInteger,
    PositiveNumber,
    RowCount,
    VocabularySize,
)


def t5_config(
    *,
    width: RowCount,
    feed_forward_width: RowCount,
    layers: BlockCount,
    heads: BlockCount,
    head_width: AxisLength = 64,
    encoder_layers: BlockCount | None = None,
    vocabulary_size: VocabularySize = 32_128,
    version: Literal["1.0", "1.1"] = "1.1",
    relative_buckets: RowCount = 32,
    relative_maximum_distance: RowCount = 128,
    relative_bias_in_each_block: bool = False,
    norm_epsilon: PositiveNumber = 1e-6,
    maximum_positions: PositiveInteger | None = None,
    pad_id: NonnegativeInteger = 0,
    bos_id: NonnegativeInteger | None = None,
    eos_id: NonnegativeInteger | None = 1,
    decoder_start_id: NonnegativeInteger = 0,
) -> ModelConfig:
    """The architecture of a T5, version 1.0 (tied, ReLU) or 1.1 (untied, gated GELU).

    Only for T5X checkpoints, which do not contain it; a Hugging Face folder does.

    Args:
      width: `D`.
      feed_forward_width: `F`.
      layers: number of blocks of the decoder, and of the encoder unless
        `encoder_layers` is given.
      heads: `H`.
      head_width: `K`; `H * K` may differ from `D`.
      encoder_layers: number of blocks of the encoder.
      vocabulary_size: `V`.
      version: "1.0" or "1.1".
      relative_buckets: buckets of the relative position bias, at least 4.
      relative_maximum_distance: distance from which all keys share the last bucket.
      relative_bias_in_each_block: whether blocks have their own bias (UMT5).
      norm_epsilon: added to the mean square.
      maximum_positions: maximum sequence length; None if it is unlimited.
      pad_id: token that fills rows.
      bos_id: token that begins a text; None for none.
      eos_id: token that ends a text; None for none.
      decoder_start_id: token that the decoder starts from.

    Raises:
      InputError: for an unknown version, and for sizes that are out of range.

    Examples:
      >>> small = pt.t5_config(width=512, feed_forward_width=1024, layers=8, heads=6)
      >>> small.build().activation
      'gelu_tanh'
    """
    if version not in ("1.0", "1.1"):
        raise InputError(f"T5 version is {shown(version)}, expected '1.0' or '1.1'")
    original = version == "1.0"
    return ModelConfig(
        family="t5",
        architecture="encoder_decoder",
        vocabulary_size=vocabulary_size,
        width=width,
        feed_forward_width=feed_forward_width,
        layers=layers,
        encoder_layers=layers if encoder_layers is None else encoder_layers,
        heads=heads,
        key_value_heads=heads,
        head_width=head_width,
        norm="rms",
        norm_epsilon=norm_epsilon,
        positions="relative",
        relative_buckets=relative_buckets,
        relative_maximum_distance=relative_maximum_distance,
        relative_bias_in_each_block=relative_bias_in_each_block,
        maximum_positions=maximum_positions,
        activation="relu" if original else "gelu_tanh",
        gated=not original,
        tied_head=original,
        scale_tied_hidden=original,
        scale_scores=False,
        pad_id=pad_id,
        bos_id=bos_id,
        eos_id=eos_id,
        decoder_start_id=decoder_start_id,
    )
