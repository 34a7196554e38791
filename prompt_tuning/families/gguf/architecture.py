"""Definition of a GGUF architecture: its names of settings and tensors."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from prompt_tuning.core.gguf_files import GgufFile
from prompt_tuning.core.typed_json import JsonObject

SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
"""Settings in `config.json` by the fields that have them."""
TABLES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
"""Modules outside of the layers in Hugging Face folders, by those of GGUF files."""
MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Modules of a layer, likewise."""


@dataclasses.dataclass(frozen=True)
class Fields:
    """An architecture's fields in a file's metadata, plus facts from the tensors.

    Attributes:
      values: the fields by name, without the architecture's prefix.
      file: the file.
    """

    values: JsonObject
    file: GgufFile

    def has(self, tensor: str) -> bool:
        """Returns whether the file has a tensor."""
        return tensor in self.file.tensors

    @property
    def head_width(self) -> int:
        """Number of elements of each head."""
        width = self.values.integer("embedding_length", minimum=1)
        heads = self.values.integer("attention.head_count", minimum=1)
        return self.values.integer("attention.key_length", width // heads, minimum=1)

    def rotated_part(self) -> float:
        """Returns the fraction of each head that is rotated.

        Times the width of a head, rounded down, it gives the field's number.
        """
        rotated = self.values.integer("rope.dimension_count", self.head_width)
        if rotated == self.head_width:
            return 1.0
        return math.nextafter(rotated / self.head_width, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture of GGUF files, by `general.architecture`.

    Attributes:
      model_type: the family that reads it.
      also: other families with the same tensors, for a `config.json` next to the file.
      sizes: fields that give the sizes in settings, if not as in Llama.
      settings: returns more settings.
      changes: fields that change the logits and that `settings` reads.
      tables: modules outside the layers, if not as in Llama.
      layers: prefix of a layer's tensors, with `{}` for its index.
      modules: modules of a layer, if not as in Llama.
      permuted: whether the halves of each query and key head are interleaved.
      norm_offset: number that was added to the weights of norms.
      transposed: modules of a layer that are stored transposed.
      by_part: module with the queries of all heads, then keys, then values, instead of
        all three together for each head.
      experts: modules with the projections of all experts of a layer, and the name of
        one, with `{}` for the expert's index.
    """

    model_type: str
    also: tuple[str, ...] = ()
    sizes: Mapping[str, str] = dataclasses.field(default_factory=lambda: SIZES)
    settings: Callable[[Fields], dict[str, Any]] = lambda fields: {}
    changes: Collection[str] = ()
    tables: Mapping[str, str] = dataclasses.field(default_factory=lambda: TABLES)
    layers: str = "model.layers.{}."
    modules: Mapping[str, str] = dataclasses.field(default_factory=lambda: MODULES)
    permuted: bool = False
    norm_offset: float = 0.0
    transposed: Collection[str] = ()
    by_part: str = ""
    experts: Mapping[str, str] = dataclasses.field(default_factory=dict)
