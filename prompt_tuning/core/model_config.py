"""Configuration of a frozen model, as named choices.

One description covers all decoder-only and encoder-decoder families in `families`; they
differ only in the choices below.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from prompt_tuning.core import model_choices as choices
from prompt_tuning.core.derived_sizes import DerivedSizes
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.model_sizes import check_products, check_sizes
from prompt_tuning.core.quantization.stores import Store
from prompt_tuning.core.rematerialization import Rematerialization
from prompt_tuning.core.rotary_scaling import (
    QueryScaling,
    RotaryDivisors,
    RotaryScaling,
)

if TYPE_CHECKING:
    from jax.numpy import dtype as DType
else:
    DType = Any  # settings are read without JAX, which takes a second to import


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(DerivedSizes):
    """Shape and named choices of one frozen model.

    Attributes:
      architecture: decoder-only or encoder-decoder.
      bidirectional: whether tokens of a decoder-only stack attend in both directions,
        as in an encoder-only model (BERT), which generates no text.
      vocabulary_size: number of tokens `V`, including the table's padding.
      width: model width `D`.
      feed_forward_width: `F`, per expert if there are experts; 0 if no layer has a
        feed-forward layer (Mamba-2).
      experts: number of experts `E` in each feed-forward layer (see `models.experts`).
      expert_limit: bound in their clamped SwiGLU (gpt-oss), or None.
      experts_per_token: number of experts that process each token.
      normalize_experts: whether the weights of these experts sum to 1.
      routing: how experts are chosen (see `models.expert_routing`): by the softmax of
        their scores, by sigmoids (DeepSeek V3), which may weigh the experts' inputs
        instead of their outputs (Llama 4), by SparseMixer (Phi 3.5 MoE), or by the
        softmax after a norm for routing alone (Gemma 4).
      expert_margin: relative distance to the best score that SparseMixer accepts.
      expert_groups: number of groups of experts.
      expert_groups_per_token: number of the best groups that a token may use.
      expert_multiplier: factor of the experts' weights.
      expert_sum_epsilon: added to the sum that normalizes sigmoids.
      shared_expert_width: width of an expert for every token (Qwen 2 MoE), or 0.
      shared_expert_gated: whether a learned score weighs the shared expert.
      dense_layers: layers without experts in a model with experts, or with another
        width among the `sharing_layers`.
      dense_width: width of their feed-forward layers; 0 without such layers.
      layers: number of blocks `L` of the decoder.
      family: name of the family (see `families`) that names tensors in checkpoints and
        adapters; None for a model without either.
      encoder_layers: number of blocks of the encoder; 0 in a decoder-only model.
      heads: number of query heads `H`.
      key_value_heads: number of key/value heads `G`; `H` is a multiple of it.
      head_width: `K`.
      windowed_head_width: width of heads in `windowed_layers`, if narrower (Gemma 4),
        else 0; their keys and values are stored with the sizes of the other layers.
      full_key_value_heads: number of key/value heads in layers without a window, if
        lower, else 0.
      keys_as_values: whether layers without a window use their projected keys as
        values.
      value_norm: whether each head's values are normalized, without a scale.
      sharing_layers: how many of the last layers reuse the keys and values of the last
        earlier layer of their kind (with a window or without).
      layer_input_width: width of each layer's extra input, made from the token and its
        vector (Gemma 4; see `models.layer_inputs`); 0 for none.
      layer_factors: whether each layer's output is multiplied by a learned factor.
      norm: root-mean-square (scale only), the same with the scale `1 + w` (Gemma), or
        layer norm: with a bias, without (Cohere) or without parameters (OLMo 1).
      norm_epsilon: added to the mean square.
      norm_placement: norm before each sublayer, after it (OLMo 2), or both (Gemma 2),
        always before the sum with the residual stream; or after that sum ("after_sum":
        BART), and then there is no norm after all blocks.
      query_key_norm: norm of queries and keys. Before the rotary embedding: none, per
        head (Qwen3, Gemma 3), per head with separate scales (Cohere), or over all heads
        (OLMo 2). After it: per head (Hunyuan), or per head without a scale, in layers
        with rotary embedding (Llama 4).
      parallel: whether attention and the feed-forward layer read the same states and
        are added together (GPT-NeoX).
      shared_norm: whether both also read the output of one norm (GPT-J).
      positions: rotary on queries and keys, a table added to the input, learned or of
        sines (see `models.input_layers`), T5's relative position bias on the scores,
        vectors of relative positions (DeBERTa; see `models.disentangled`), a bias that
        is linear in the distance (ALiBi; see `models.linear_bias`), or none.
      maximum_positions: maximum sequence length, prompt vectors included; None if
        positions are unlimited (T5).
      rotary_base: base of the rotary frequencies.
      rotary_scaling: scaling of the rotary frequencies, or None.
      rotary_width: leading elements of a head that are rotated (Phi-3); None for all.
      rotary_interleaved: whether rotated pairs are neighbors instead of one from each
        half.
      query_scaling: factor of queries by position, or None (Ministral 3).
      unrotated_layers: layers without rotary embedding (SmolLM3).
      window: number of positions that a token in `windowed_layers` attends to, itself
        included; None without such layers.
      windowed_layers: layers in which attention is limited to a window.
      chunked: whether `window` is instead the size of chunks of positions, and tokens
        attend only within their chunk (Llama 4).
      encoder_windowed_layers: encoder layers in which a token attends to `window`
        positions on each side, and to itself (T5Gemma).
      window_rotary_base: base of the unscaled rotary frequencies in `windowed_layers`;
        None for the same as elsewhere (Gemma 3: Gemma Team 2025, section 2).
      recurrence: mixer in `recurrent_layers`, named like its module: short convolution
        (LFM2), gated delta rule (Qwen 3.5), Mamba-2 (Granite 4), Mamba or lightning
        attention.
      recurrent_layers: layers with this mixer.
      recurrence_beside_attention: whether these layers have attention, too (Falcon-H1).
      feed_forward_layers: layers without a mixer; the rest then have only a mixer
        (Nemotron-H). Empty if all layers have both.
      convolution_width: number of positions that the mixer's convolution reads,
        including the current one; 0 without it.
      recurrent_heads: number of the mixer's value heads; 0 without heads.
      recurrent_key_heads: number of its query and key heads; divides the former.
      recurrent_width: width of its value heads.
      recurrent_key_width: width of its query and key heads.
      recurrent_norm: whether Mamba-2's output has a norm (not in Falcon-H1), or Mamba's
        keys, queries and steps have one (not in plain Mamba).
      recurrent_norm_scaled: whether Mamba's norms have scales (not in Falcon Mamba).
      step_rank: width of the vector from which Mamba computes steps; 0 in other mixers.
      recurrent_norms_before: whether recurrent layers have norms before their parts
        while layers with attention have them after (OLMo Hybrid).
      recurrent_norm_epsilon: that of its output's norm, if not `norm_epsilon`.
      maximum_strength: largest strength of the delta rule.
      minimum_step: smallest step of Mamba-2.
      key_value_rank: width of the compressed vector of keys and values in latent
        attention (DeepSeek V3; see `models.latent_attention`); 0 for other attention.
      query_rank: width of its compressed queries; 0 for none.
      value_width: width of its values, if narrower than keys.
      gated_attention: whether a projection gates attention's output (Qwen3-Next).
      relative_buckets: number of buckets of the relative position bias; with vectors of
        relative positions, the number in each direction.
      relative_maximum_distance: distance from which all keys share the last bucket.
      relative_bias_in_each_block: whether each block has a separate bias (UMT5).
      activation: activation function of the feed-forward layer.
      gated: whether a second projection multiplies the activation (SwiGLU, GEGLU).
      biases: which projections have a bias; see `BIASED`.
      tied_head: whether the head is the embedding table.
      separate_tables: whether the decoder has its own embedding table and tied head
        (T5Gemma).
      head_bias: whether logits have a bias (GPT-J, Phi, BART).
      scale_tied_hidden: whether hidden states are multiplied by `D ** -0.5` before a
        tied head (T5 1.0).
      scale_scores: whether attention scores are divided by `sqrt(K)`; T5 folds that
        factor into the initialization of the query projection.
      attention_multiplier: factor of scores instead of `K ** -0.5`, if set.
      attention_sinks: whether heads also attend to a score without a value (gpt-oss).
      attention_soft_cap: bound on the absolute value of attention scores, or None
        (Gemma 2; see `attention.attend`).
      logit_soft_cap: the same for logits, or None (Gemma 2; see `losses.output_head`).
      embedding_norm: whether inputs with positions are normalized (BLOOM, BART).
      embedding_multiplier: factor of token vectors, but not of prompts (Gemma).
      input_multiplier: factor of all input vectors (Granite).
      residual_multiplier: factor of each sublayer's output (Granite).
      skip_multiplier: factor of the states that it is added to (MiniMax).
      logit_multiplier: factor of logits (Granite).
      projection_multipliers: factors of projections' outputs (Falcon-H1), by path in a
        block, e.g. `self_attention/key`.
      bos_id: token that begins every row, if the model has one.
      eos_id: token that ends a completion, if the model has one.
      stop_ids: more tokens that end a generated text.
      pad_id: token used as padding; any token, as lengths are stored separately.
      decoder_start_id: first input of an encoder-decoder's decoder.
      encoder_input: special tokens of an encoder's input: EOS after the text (T5), also
        BOS before it (BART), or only BOS (T5Gemma).
      token_types: number of token types, whose vectors are added to the input (BERT).
      separator_id: token after which a text's tokens have the second type; None if all
        have the first. Opening a model sets it to the tokenizer's end token.
      unnormed_first: whether the first block has no norm before attention (ModernBERT).
      transform_activation: activation of a dense layer before the head (BERT's pooler,
        or the transform of its masked language model); None without that layer.
      transform_norm: whether a norm follows that activation.
      transform_bias: whether that dense layer has a bias.
      pooling: state of a row that a class head reads: at the last or the first
        position, or the mean over input tokens.
      dropout_rate: dropout rate of embeddings, attention weights, feed-forward
        activations and block outputs, in training only.
      compute_dtype: dtype of activations, "float32" or "bfloat16".
      attention: whether a fused kernel computes attention ("flash"), none does
        ("reference"), or one does where available ("auto").
      rematerialization: which activations the backward pass recomputes.
      encoder_rematerialization: the same for the encoder; as in the decoder if None.
      parameter_dtype: dtype of the frozen weights, "float32" or "bfloat16"; or "int8",
        "int4" or "nf4" for the blocks' projections, and bfloat16 for the rest.
      quantization_group: inputs that share a scale in "int4" and "nf4"; None for 64.
      quantized_tables: whether embeddings and the head are quantized like projections.
      stores: parameters that are stored differently, by path.
      new_tokens: number of tokens at the end of the vocabulary that the checkpoint
        lacks; a run trains their rows (`prompts.token_rows`).
      labels: names of the classes that the head scores, in the order of its rows; empty
        for a head that scores tokens (see `prompts.class_rows`).
      problem: what a class head decides: one class, which of the classes, a number in
        place of each class, or a class for each token.
      unscored_end: token at the end of a row that a class head skips.
    """

    architecture: choices.Architecture
    vocabulary_size: int
    width: int
    feed_forward_width: int
    layers: int
    heads: int
    key_value_heads: int
    head_width: int
    norm: choices.Norm
    positions: choices.Positions
    activation: choices.Activation
    gated: bool
    tied_head: bool
    bidirectional: bool = False
    family: str | None = None
    experts: int = 0
    experts_per_token: int = 0
    expert_limit: float | None = None
    normalize_experts: bool = True
    routing: choices.Routing = "softmax"
    expert_margin: float = 0.0
    expert_groups: int = 1
    expert_groups_per_token: int = 1
    expert_multiplier: float = 1.0
    expert_sum_epsilon: float = 1e-20
    shared_expert_width: int = 0
    shared_expert_gated: bool = True
    dense_layers: tuple[int, ...] = ()
    dense_width: int = 0
    encoder_layers: int = 0
    windowed_head_width: int = 0
    full_key_value_heads: int = 0
    keys_as_values: bool = False
    value_norm: bool = False
    sharing_layers: int = 0
    layer_input_width: int = 0
    layer_factors: bool = False
    norm_epsilon: float = 1e-6
    norm_placement: choices.NormPlacement = "before"
    query_key_norm: choices.QueryKeyNorm = "none"
    parallel: bool = False
    shared_norm: bool = False
    maximum_positions: int | None = None
    rotary_base: float = 10_000.0
    rotary_scaling: RotaryScaling | RotaryDivisors | None = None
    rotary_width: int | None = None
    rotary_interleaved: bool = False
    query_scaling: QueryScaling | None = None
    unrotated_layers: tuple[int, ...] = ()
    window: int | None = None
    windowed_layers: tuple[int, ...] = ()
    chunked: bool = False
    encoder_windowed_layers: tuple[int, ...] = ()
    window_rotary_base: float | None = None
    recurrence: choices.Recurrence = "none"
    recurrent_layers: tuple[int, ...] = ()
    recurrence_beside_attention: bool = False
    feed_forward_layers: tuple[int, ...] = ()
    convolution_width: int = 0
    recurrent_heads: int = 0
    recurrent_key_heads: int = 0
    recurrent_width: int = 0
    recurrent_key_width: int = 0
    step_rank: int = 0
    recurrent_norm: bool = True
    recurrent_norm_scaled: bool = True
    recurrent_norms_before: bool = False
    recurrent_norm_epsilon: float | None = None
    maximum_strength: float = 1.0
    minimum_step: float = 0.0
    key_value_rank: int = 0
    query_rank: int = 0
    value_width: int | None = None
    gated_attention: bool = False
    relative_buckets: int = 32
    relative_maximum_distance: int = 128
    relative_bias_in_each_block: bool = False
    biases: choices.Biases = "none"
    separate_tables: bool = False
    head_bias: bool = False
    scale_tied_hidden: bool = False
    scale_scores: bool = True
    attention_multiplier: float | None = None
    attention_sinks: bool = False
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embedding_norm: bool = False
    embedding_multiplier: float = 1.0
    input_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    skip_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    projection_multipliers: tuple[tuple[str, float], ...] = ()
    bos_id: int | None = None
    eos_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    pad_id: int = 0
    decoder_start_id: int = 0
    encoder_input: choices.EncoderInput = "text_eos"
    token_types: int = 0
    separator_id: int | None = None
    unnormed_first: bool = False
    transform_activation: choices.TransformActivation | None = None
    transform_norm: bool = False
    transform_bias: bool = True
    pooling: choices.Pooling = "last"
    dropout_rate: float | int = 0.0
    compute_dtype: str = "float32"
    parameter_dtype: str = "float32"
    quantization_group: int | None = None
    quantized_tables: bool = False
    stores: tuple[tuple[str, Store], ...] = ()
    new_tokens: int = 0
    labels: tuple[str, ...] = ()
    problem: choices.ClassProblem = "single_label"
    unscored_end: int | None = None
    attention: choices.AttentionMethod = "auto"
    rematerialization: Rematerialization = dataclasses.field(
        default_factory=Rematerialization
    )
    encoder_rematerialization: Rematerialization | None = None

    def __post_init__(self):
        check_fields(self)
        check_sizes(self)
        check_products(self)
        for name in ("compute_dtype", "parameter_dtype"):
            choices.check_dtype(name, getattr(self, name))
        choices.check_combinations(self)
        choices.check_layers(self)
        if not 0 <= self.dropout_rate < 1:
            raise InputError(
                f"dropout_rate is {self.dropout_rate}, expected a number in [0, 1)"
            )
        self.rematerialization.check_layers("decoder", self.layers)
        if self.encoder_layers:
            self.encoder_policy.check_layers("encoder", self.encoder_layers)

    @property
    def table_rows(self) -> int:
        """Number of rows of the checkpoint's embedding table."""
        return self.vocabulary_size - self.new_tokens

    @property
    def without_new_tokens(self) -> "ModelConfig":
        """The checkpoint's config, without a run's new tokens."""
        if not self.new_tokens:
            return self
        return dataclasses.replace(self, vocabulary_size=self.table_rows, new_tokens=0)

    @property
    def biased_projections(self) -> tuple[str, ...]:
        """Names of the projections of a block that have a bias."""
        return choices.BIASED[self.biases]

    @property
    def positions_note(self) -> str:
        """Why there are not more positions, as the end of a message, or nothing."""
        scaling = self.rotary_scaling
        return scaling.note if isinstance(scaling, RotaryDivisors) else ""

    @property
    def encoder_policy(self) -> Rematerialization:
        """Rematerialization of the encoder."""
        return self.encoder_rematerialization or self.rematerialization

    @property
    def dtype(self) -> DType:
        """Dtype of activations."""
        import jax.numpy as jnp

        return jnp.dtype(self.compute_dtype)
