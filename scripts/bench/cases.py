"""Benchmark cases: model shapes, batches, and the limits of each measure."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

IGNORED = -100
"""Label of a token without loss, as in transformers."""


class Limit(NamedTuple):
    """A limit on both kinds of processors.

    Attributes:
      slow_products: where XLA's large products are slow, next to torch's.
      elsewhere: where they are about as fast.
    """

    slow_products: float
    elsewhere: float

    def on(self, slow_products: bool) -> float:
        """Returns the limit on one kind of processor."""
        return self.slow_products if slow_products else self.elsewhere


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One training step that both sides run.

    Attributes:
      title: the shape in words.
      family: `model_type` of transformers.
      config: fields of transformers' config class.
      batch: number of rows `B`.
      prompt: number of prompt vectors `P`.
      rank: rank of a LoRA of all linear layers, if there is no prompt. With neither,
        the input embeddings are differentiated.
      length: tokens `T` of a row (of the encoder in T5), without padding.
      target_length: tokens of the decoder in T5; 0 for other families.
      loss_on: number of last tokens of a row that are learned; None for all.
      least_speedup: minimum of PEFT's median time divided by ours; None for no limit.
      most_memory: maximum of our peak memory divided by PEFT's.
      least_share: minimum of the ideal time divided by our step's time.
      least_attention: minimum of the rate of the batched products, those of attention,
        divided by torch's for the same products.
    """

    title: str
    family: str
    config: dict[str, Any]
    batch: int
    prompt: int
    length: int
    rank: int = 0
    target_length: int = 0
    loss_on: int | None = None
    least_speedup: Limit | None = None
    most_memory: float | None = None
    least_share: float | None = None
    least_attention: Limit | None = None

    @property
    def real_tokens(self) -> int:
        """Tokens of a batch without the prompt."""
        return self.batch * (self.length + self.target_length)


LLAMA_CONFIG = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY_CONFIG = LLAMA_CONFIG | {
    "vocab_size": 2000,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
LINEAR = [*["linear_attention"] * 3, "full_attention"]
HYBRID_CONFIG = TINY_CONFIG | {
    # Three layers of four have Mamba-2, with four heads of width 64 and one group.
    "layer_types": LINEAR,
    **{"mamba_n_heads": 4, "mamba_d_head": 64, "mamba_expand": 2, "mamba_d_conv": 4},
    **{"mamba_n_groups": 1, "mamba_d_state": 64, "mamba_chunk_size": 64},
    **{"num_local_experts": 0, "shared_intermediate_size": 344},
}
DELTA_CONFIG = TINY_CONFIG | {
    **{"layer_types": LINEAR, "head_dim": 32},
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 32, "linear_value_head_dim": 64},
}
CONVOLUTION_CONFIG = TINY_CONFIG | {
    "layer_types": [*["conv"] * 3, "full_attention"],
    **{"block_auto_adjust_ff_dim": False, "conv_L_cache": 3},
}
MAMBA_CONFIG = TINY_CONFIG | {
    **{"attn_layer_period": 4, "attn_layer_offset": 3, "num_experts": 1},
    **{"mamba_expand": 2, "mamba_d_state": 16, "mamba_d_conv": 4},
}
GPT2_CONFIG = {
    "vocab_size": 50257,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
T5_CONFIG = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 1024,
    "num_layers": 8,
    "num_decoder_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}

ATTENTION = Limit(0.6, 0.8)
LLAMA = Case(
    title="Llama 8 layers, width 512, 16 x (100 + 32), loss on the last 8",
    family="llama",
    config=LLAMA_CONFIG,
    batch=16,
    prompt=100,
    length=32,
    loss_on=8,
    least_speedup=Limit(6.0, 9.0),
    most_memory=0.32,
    least_attention=ATTENTION,
)
HYBRID = Case(
    title="Granite 4 with Mamba-2 in 3 of 4 layers, width 128, 8 x (20 + 32)",
    family="granitemoehybrid",
    config=HYBRID_CONFIG,
    batch=8,
    prompt=20,
    length=32,
    least_speedup=Limit(3.0, 3.0),
)
TINY_HYBRIDS = {
    "hybrid": HYBRID,
    "delta": dataclasses.replace(
        HYBRID,
        title="Qwen 3.5 with the gated delta rule, likewise",
        family="qwen3_5_text",
        config=DELTA_CONFIG,
    ),
    "convolution": dataclasses.replace(
        HYBRID,
        title="LFM2 with short convolutions, likewise",
        family="lfm2",
        config=CONVOLUTION_CONFIG,
    ),
    "mamba": dataclasses.replace(
        HYBRID,
        title="Jamba with Mamba, likewise",
        family="jamba",
        config=MAMBA_CONFIG,
    ),
}
HYBRIDS = TINY_HYBRIDS | {
    f"{name}_long": dataclasses.replace(
        case,
        title=f"{name} with rows longer than a chunk, 8 x (20 + 108)",
        length=108,
        least_speedup=None,
    )
    for name, case in TINY_HYBRIDS.items()
}
CASES = {
    "llama_0": dataclasses.replace(
        LLAMA,
        title="llama without a prompt, 16 x (0 + 32), embeddings differentiated",
        prompt=0,
        least_speedup=None,
        most_memory=None,
        least_attention=None,
    ),
    "llama": LLAMA,
    "llama_200": dataclasses.replace(
        LLAMA,
        title="llama with a longer prompt, 16 x (200 + 32)",
        prompt=200,
        least_speedup=None,
        most_memory=None,
        least_attention=None,
    ),
    "llama_lora": dataclasses.replace(
        LLAMA,
        title="llama with a LoRA of rank 16 of all linear layers, 16 x 132",
        prompt=0,
        rank=16,
        length=132,
        least_speedup=None,
        most_memory=0.5,
        least_attention=None,
    ),
    "gpt2": Case(
        title="GPT-2 small, 8 x (100 + 64), loss on all",
        family="gpt2",
        config=GPT2_CONFIG,
        batch=8,
        prompt=100,
        length=64,
        least_speedup=Limit(2.5, 4.5),
        least_attention=ATTENTION,
    ),
    "t5": Case(
        title="T5 1.1 small, 16 x (100 + 128) and 16 targets",
        family="t5",
        config=T5_CONFIG,
        batch=16,
        prompt=100,
        length=128,
        target_length=16,
        least_speedup=Limit(1.2, 1.8),
        least_attention=ATTENTION,
        least_share=0.65,
    ),
    "tiny": Case(
        title="Llama 4 layers, width 128, 8 x (20 + 32), loss on all",
        family="llama",
        config=TINY_CONFIG,
        batch=8,
        prompt=20,
        length=32,
        least_speedup=Limit(2.5, 3.0),
    ),
} | HYBRIDS
GROWTH = ("llama_0", "llama", "llama_200")
"""Cases measured in one rotation, for the growth of the step with the prompt."""

MOST_GROWTH = {"llama": Limit(1.30, 1.27), "llama_200": Limit(1.55, 1.50)}
"""Maximum of our step's time divided by the time without a prompt."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """The batch of both sides.

    Attributes:
      tokens: input tokens, `[B, T]`.
      labels: target tokens or `IGNORED`, `[B, U]`. In a decoder-only model they are the
        input tokens, and label `i` is predicted from the tokens before token `i`.
    """

    tokens: np.ndarray
    labels: np.ndarray


def make_rows(case: Case, seed: int = 1) -> Rows:
    """Draws random tokens, and sets the labels that the case learns.

    Without a prompt nothing precedes the first token, so it has no label.
    """
    random = np.random.default_rng(seed)
    vocabulary = case.config["vocab_size"]
    tokens = random.integers(3, vocabulary, (case.batch, case.length))
    if case.target_length:
        shape = (case.batch, case.target_length)
        return Rows(tokens, random.integers(3, vocabulary, shape))
    labels = tokens.copy()
    if case.loss_on is not None:
        labels[:, : -case.loss_on] = IGNORED
    if not case.prompt:
        labels[:, 0] = IGNORED
    return Rows(tokens, labels)


def width(case: Case) -> int:
    """Returns the model width `D`."""
    names = {"gpt2": "n_embd", "t5": "d_model"}
    return case.config[names.get(case.family, "hidden_size")]


def make_prompt(case: Case, seed: int = 2) -> np.ndarray:
    """Draws the initial prompt of both sides, float32 `[P, D]`."""
    shape = (case.prompt, width(case))
    return np.random.default_rng(seed).normal(0, 0.5, shape).astype(np.float32)
