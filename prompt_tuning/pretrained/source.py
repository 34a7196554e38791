"""Configures the source of a frozen model, and opens it without reading arrays."""

import dataclasses
from pathlib import Path

import numpy as np

from prompt_tuning.checkpoints.formats import t5x_checkpoint
from prompt_tuning.checkpoints.published_stores import is_quantized, published_stores
from prompt_tuning.checkpoints.quantized.codes import SMALLEST_GROUP
from prompt_tuning.checkpoints.restore_plan import TUNED_ARE_FRESH, AssignmentMap
from prompt_tuning.checkpoints.stored_table import StoredTable
from prompt_tuning.checkpoints.stored_tensors import Recipe, StoredTensor
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.gguf_files import is_gguf
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.number_ranges import (
    BlockCount,
    NonnegativeInteger,
    PositiveInteger,
    ShareBelowOne,
)
from prompt_tuning.core.quantization.stores import DTYPES, INT4, NF4, UNQUANTIZED
from prompt_tuning.core.rematerialization import Rematerialization
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.text.tokenizers import Tokenizer, has_tokenizer, load_tokenizer
from prompt_tuning.families import t5x
from prompt_tuning.families.hf_folder import (
    find_recipes,
    open_stored,
    read_config,
)
from prompt_tuning.pretrained.checkpoint_path import BUNDLED_PREFIX, find_checkpoint
from prompt_tuning.pretrained.weight_storage import check_by_layer
from prompt_tuning.prompts.initializers import Vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A frozen model: where it comes from, how it is stored and how it is computed.

    `pt.load(checkpoint, ...)` takes the same fields; use `Pretrained` itself in a
    `Run`.

    Attributes:
      checkpoint: a Hugging Face folder, a GGUF file or a folder with one, a T5X
        checkpoint, the name of a bundled model such as "bundled:skills-decoder", or of
        a model of the Hugging Face hub such as "Qwen/Qwen3-0.6B", with a revision after
        `@` if it is not the main one.
      config: config of a T5X checkpoint, which contains none; None for a Hugging Face
        folder.
      tokenizer: file or folder of the tokenizer, or a bundled model, which has one; the
        checkpoint's folder if None.
      compute_dtype: dtype of activations, "float32" or "bfloat16".
      parameter_dtype: dtype of the frozen weights, cast once when read: "float32",
        "bfloat16", or "int8", "int4" or "nf4" for the projections of the blocks and
        bfloat16 for the other parameters. A weight in four bits takes 0.56 bytes with
        its share of a scale. None is "float32", except that a folder with quantized
        weights is held as it is published.
      quantization_group: number of inputs that share a scale in "int4" and "nf4", a
        power of two; None for 64. Where it does not divide the inputs of a projection,
        the largest power of two that does is used.
      weights: where the weights of the blocks are kept: "device" memory; "pinned_host"
        memory, from which each block is copied to the device; or "streamed" layer by
        layer from the files, for models larger than host memory.
      trained_weights: where the checkpoint's weights are kept that parameter groups
        train: on the "device", or, with streamed weights, on the "host" with their
        gradients and optimizer state, and updated layer by layer.
      slices: number of slices that the layers of a stack are read in with streamed
        weights, two of which are in memory; None for slices of one layer.
      checkpoint_activation: with streamed weights, whether the backward pass computes
        each layer again from its input, which waits in host memory; if not, the
        activations of all layers stay on the device.
      dropout_rate: dropout rate in training.
      attention: "flash" computes attention with a fused kernel of the device, cuDNN's
        on NVIDIA GPUs; "reference" without one; "auto" with one where it can be used.
      rematerialization: activations that the backward pass recomputes; None for none.
      encoder_rematerialization: the same for an encoder; as in the decoder if None.
      eos_id: token that ends a text, instead of the tokenizer's EOS; generation also
        stops at the tokens that the model's files name.
      assignment_map: (regex, source or None) pairs; see `plan_restore`.
      fallback_to_scratch: whether parameters to which the map assigns None may be
        fresh.

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
    weights: str = "device"
    trained_weights: str = "device"
    slices: BlockCount | None = None
    checkpoint_activation: bool = True
    dropout_rate: ShareBelowOne = 0.0
    attention: str = "auto"
    rematerialization: Rematerialization | None = None
    encoder_rematerialization: Rematerialization | None = None
    eos_id: NonnegativeInteger | None = None
    assignment_map: AssignmentMap = TUNED_ARE_FRESH
    fallback_to_scratch: bool = True

    def __post_init__(self):
        check_fields(self)
        self._check_group()
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

    @property
    def path(self) -> Path:
        """Path of the checkpoint.

        Raises:
          InputError: if there is none.
        """
        return find_checkpoint(self.checkpoint)


def open_checkpoint(
    source: Pretrained,
) -> tuple[ModelConfig, dict[str, Recipe], dict[str, StoredTensor]]:
    """Opens a checkpoint of either format without reading its arrays.

    Returns:
      The config of the model, the recipes of its parameters, and the stored tensors.

    Raises:
      InputError: if the checkpoint does not exist or cannot be opened.
    """
    choices = {
        "compute_dtype": source.compute_dtype,
        "parameter_dtype": source.parameter_dtype or DTYPES[0],
        "quantization_group": source.quantization_group,
        "dropout_rate": source.dropout_rate,
        "attention": source.attention,
        "rematerialization": source.rematerialization or Rematerialization(),
        "encoder_rematerialization": source.encoder_rematerialization,
    }
    if source.eos_id is not None:
        choices["eos_id"] = source.eos_id
    path = source.path
    if is_gguf(path) or (path / "config.json").exists():
        if source.config is not None:
            found = "is a GGUF file" if is_gguf(path) else "has a config.json"
            raise InputError(f"{path} {found}; remove the binding of Pretrained.config")
        config = read_config(path, **choices)
        check_by_layer(source.weights, config)
        stored = open_stored(path)
        recipes = find_recipes(config, stored)
        config = _as_published(config, source.parameter_dtype, recipes, stored)
        return config, recipes, stored
    if source.config is None:
        raise InputError(
            f"{path} has no config.json. If it is a T5X checkpoint, give its "
            "Pretrained.config, for example by --gin_file models/t5_1_1_base.gin"
        )
    config = dataclasses.replace(source.config, **choices)
    return config, t5x.t5x_recipes(config), t5x_checkpoint.open_t5x(path)


def _as_published(
    config: ModelConfig,
    parameter_dtype: str | None,
    recipes: dict[str, Recipe],
    stored: dict[str, StoredTensor],
) -> ModelConfig:
    """Returns the config of a model that is held as it is published.

    All parameters are, if no type is given; if it is that of a quantized store, only
    kernels that are published in it, which need not be rounded again.
    """
    if not is_quantized(stored):
        return config
    stores = published_stores(recipes, stored)
    if parameter_dtype is not None:
        stores = {p: x for p, x in stores.items() if x.name == parameter_dtype}
        kept = {p: x for p, x in stores.items() if x.quantized}
        return dataclasses.replace(config, stores=tuple(kept.items()))
    return dataclasses.replace(
        config, parameter_dtype=UNQUANTIZED, stores=tuple(stores.items())
    )


def read_frozen(source: Pretrained, path: str) -> np.ndarray:
    """Reads one parameter of a checkpoint, in its stored type.

    Raises:
      InputError: if the checkpoint cannot be read, or lacks an array of it.
    """
    _, recipes, stored = open_checkpoint(source)
    recipe, arrays = recipes[path], []
    for name in recipe.sources:
        if name not in stored:
            raise InputError(f"{source.checkpoint} has no array {name}")
        arrays.append(recipe.transform(stored[name].read()))
    return np.stack(arrays) if recipe.stacked else arrays[0]


def read_vocabulary(source: Pretrained) -> Vocabulary:
    """Opens the embedding table and the tokenizer of a checkpoint.

    Rows of the table are read on request.

    Raises:
      InputError: if the checkpoint cannot be read.
    """
    config, recipes, stored = open_checkpoint(source)
    return Vocabulary(
        open_embeddings(config, recipes, stored), find_tokenizer(source, config)
    )


def with_tokenizer(
    source: Pretrained, config: ModelConfig
) -> tuple[ModelConfig, Tokenizer | None]:
    """Loads the tokenizer, whose end token separates texts of different types."""
    tokenizer = find_tokenizer(source, config)
    if config.token_types > 1 and tokenizer is not None:
        config = dataclasses.replace(config, separator_id=tokenizer.eos_id)
    return config, tokenizer


def find_tokenizer(source: Pretrained, config: ModelConfig) -> Tokenizer | None:
    """Loads the tokenizer of the source or the checkpoint; None if absent.

    A tokenizer that defines no EOS gets the model's.
    """
    if source.tokenizer is not None:
        bundled = source.tokenizer.startswith(BUNDLED_PREFIX)
        path = Path(find_checkpoint(source.tokenizer) if bundled else source.tokenizer)
    else:
        path = source.path
        if path.is_file() and (has_tokenizer(path.parent) or not is_gguf(path)):
            path = path.parent
        if not has_tokenizer(path):
            return None
    tokenizer = load_tokenizer(path, eos_id=source.eos_id)
    if tokenizer.eos_id is None and config.eos_id is not None:
        return load_tokenizer(path, eos_id=config.eos_id)
    return tokenizer


def open_embeddings(
    config: ModelConfig, recipes: dict[str, Recipe], stored: dict[str, StoredTensor]
) -> StoredTable:
    """Opens the embedding table, given the results of `open_checkpoint`.

    Its rows are what the model reads for a token: Gemma's are multiplied.

    Raises:
      InputError: if there is none, or its shape differs from the config.
    """
    path = "token_embedder/embedding"
    missing = [name for name in recipes[path].sources if name not in stored]
    if missing:
        raise InputError(
            f"the checkpoint has no array {missing[0]}, the embedding table; it "
            f"contains {shown(sorted(stored)[:5])}, ..."
        )
    shape = (config.vocabulary_size, config.width)
    return StoredTable(path, shape, recipes[path], stored, config.embedding_multiplier)
