"""Sizes and factors that follow from a model's config."""


class DerivedSizes:
    """Base class of `ModelConfig`; computes what its fields determine."""

    attention_multiplier: float | None
    convolution_width: int
    experts: int
    head_width: int
    norm_epsilon: float
    recurrence: str
    recurrent_heads: int
    recurrent_key_heads: int
    recurrent_key_width: int
    recurrent_norm_epsilon: float | None
    recurrent_width: int
    rotary_width: int | None
    routing: str
    scale_scores: bool
    value_width: int | None
    width: int

    @property
    def convolution_channels(self) -> int:
        """Number of channels of the convolutions in recurrent layers."""
        keys = 2 * self.recurrent_key_heads * self.recurrent_key_width
        keys *= self.recurrence != "mamba"  # which computes them afterwards
        return keys + self.recurrent_heads * self.recurrent_width or self.width

    @property
    def separate_norms(self) -> bool:
        """Whether the router, experts and shared expert each have norms (Gemma 4)."""
        return self.experts > 0 and self.routing == "separate_norms"

    @property
    def window_inputs(self) -> int:
        """How many earlier inputs the convolutions in recurrent layers read."""
        return max(self.convolution_width - 1, 0)

    @property
    def memory_epsilon(self) -> float:
        """The epsilon of the norm of a recurrent mixer's output."""
        epsilon = self.recurrent_norm_epsilon
        return self.norm_epsilon if epsilon is None else epsilon

    @property
    def rotated_width(self) -> int:
        """Number of leading elements of each head that are rotated."""
        return self.head_width if self.rotary_width is None else self.rotary_width

    @property
    def width_of_values(self) -> int:
        """Number of elements of each head's values."""
        return self.value_width or self.head_width

    @property
    def score_scale(self) -> float:
        """Factor of attention scores."""
        if self.attention_multiplier is not None:
            return self.attention_multiplier
        return self.head_width**-0.5 if self.scale_scores else 1.0
