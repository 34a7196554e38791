"""Settings of a frozen model: where it comes from, how it is stored and computed."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.model_choices import AttentionMethod
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.number_ranges import (
    BlockCount,
    NonnegativeInteger,
    PositiveInteger,
    ShareBelowOne,
)
from prompt_tuning.core.quantization.stores import INT4, NF4, SMALLEST_GROUP, STORES
from prompt_tuning.core.rematerialization import Rematerialization
from prompt_tuning.core.setting_hints import how_to_set

AssignmentMap = Sequence[tuple[str, str | None]]
WeightLocation = Literal["device", "pinned_host", "streamed"]
PROMPT_IS_FRESH = (r".*/prompt/.*", None)
TUNED_ARE_FRESH = (PROMPT_IS_FRESH, (r".*/adapters/.*", None))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A frozen model: where it comes from, how it is stored and how it is computed.

    `pt.load(checkpoint, ...)` takes the same fields; use `Pretrained` itself in a
    `Run`.

    Attributes:
      checkpoint: a Hugging Face folder; a GGUF file or a folder with one; a T5X
        checkpoint; a bundled model, e.g. "bundled:skills-decoder"; or a model of the
        Hugging Face hub, e.g. "Qwen/Qwen3-0.6B", optionally with a revision after `@`.
      config: config of a T5X checkpoint, which has none of its own; None for other
        checkpoints.
      tokenizer: file or folder of the tokenizer, or a bundled model, which has one;
        None for the checkpoint's folder.
      compute_dtype: dtype of activations, "float32" or "bfloat16".
      parameter_dtype: dtype of the frozen weights, cast once when read: "float32",
        "bfloat16", or "int8", "int4" or "nf4" for the projections of the blocks, with
        bfloat16 for the other parameters. A four-bit weight takes 0.56 bytes including
        its share of a scale. None is "float32", except that quantized checkpoints are
        held as published.
      quantization_group: number of inputs that share a scale in "int4" and "nf4", a
        power of two; None for 64. A projection whose inputs it does not divide uses the
        largest power of two that does.
      quantized_tables: whether to quantize the embedding table and the output head,
        too, if `parameter_dtype` is "int8", "int4" or "nf4". Otherwise they are in
        bfloat16, or as a quantized checkpoint publishes them.
      weights: where the weights of the blocks are kept: in "device" memory; in
        "pinned_host" memory, from which each block is copied to the device; or
        "streamed" layer by layer from the files, for models larger than host memory.
      trained_weights: where to keep checkpoint weights that parameter groups train: on
        the "device", or, with streamed weights, on the "host" with their gradients and
        optimizer state, updated layer by layer.
      slices: with streamed weights, number of slices that a stack's layers are read in;
        two slices are in memory at a time. None for slices of one layer.
      checkpoint_activation: with streamed weights, whether the backward pass recomputes
        each layer from its input, which is kept in host memory. If False, the
        activations of all layers stay on the device.
      dropout_rate: dropout rate in training.
      attention: "flash" uses the device's fused kernel, cuDNN's on NVIDIA GPUs;
        "reference" uses none; "auto" uses one where possible.
      rematerialization: activations that the backward pass recomputes; None for none.
      encoder_rematerialization: the same for an encoder; None for the decoder's.
      eos_id: token that ends a text, instead of the tokenizer's EOS. Generation also
        stops at the tokens that the model's files name.
      assignment_map: (regex, source or None) pairs; see `plan_restore`.
      fallback_to_scratch: whether parameters that the map assigns None may start fresh.

    Raises:
      InputError: if settings contradict each other.

    Examples:
      >>> pt.Pretrained(checkpoint="bundled:skills-decoder", compute_dtype="bfloat16")
      Pretrained(checkpoint='bundled:skills-decoder', compute_dtype='bfloat16')
    """

    checkpoint: str
    config: ModelConfig | None = None
    tokenizer: str | None = None
    compute_dtype: str = "float32"
    parameter_dtype: str | None = None
    quantization_group: PositiveInteger | None = None
    quantized_tables: bool = False
    weights: WeightLocation = "device"
    trained_weights: Literal["device", "host"] = "device"
    slices: BlockCount | None = None
    checkpoint_activation: bool = True
    dropout_rate: ShareBelowOne = 0.0
    attention: AttentionMethod = "auto"
    rematerialization: Rematerialization | None = None
    encoder_rematerialization: Rematerialization | None = None
    eos_id: NonnegativeInteger | None = None
    assignment_map: AssignmentMap = TUNED_ARE_FRESH
    fallback_to_scratch: bool = True

    def __post_init__(self):
        check_fields(self)
        self._check_group()
        if self.quantized_tables and self.parameter_dtype not in STORES:
            raise InputError(
                "Pretrained.quantized_tables is True and Pretrained.parameter_dtype "
                f"{shown(self.parameter_dtype)}: tables are quantized with the "
                "projections; leave it out, or give "
                f"{how_to_set('Pretrained.parameter_dtype', NF4)}"
            )
        if self.slices is not None and self.weights != "streamed":
            raise InputError(
                f"Pretrained.slices is {self.slices} and Pretrained.weights "
                f"{shown(self.weights)}: only streamed weights are read in slices; "
                "leave slices out, or set weights to 'streamed'"
            )
        if not self.checkpoint_activation and self.weights != "streamed":
            raise InputError(
                "Pretrained.checkpoint_activation is False and Pretrained.weights "
                f"{shown(self.weights)}: it is a setting of streamed weights; set it "
                "to True, and use Rematerialization for other weights"
            )

    def _check_group(self) -> None:
        group = self.quantization_group
        if group is None:
            return
        if self.parameter_dtype not in (INT4, NF4):
            raise InputError(
                f"Pretrained.quantization_group is {group} and "
                f"Pretrained.parameter_dtype {shown(self.parameter_dtype)}: only "
                "weights that are packed when they are read have such groups; leave "
                f"it out, or give {how_to_set('Pretrained.parameter_dtype', NF4)}"
            )
        if group < SMALLEST_GROUP or group & (group - 1):
            raise InputError(
                f"Pretrained.quantization_group is {group}, expected a power of two "
                f"from {SMALLEST_GROUP}, e.g. 32 or 128"
            )
