"""Shapes of the GPU benchmark, as plain data that both sides read."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape of a model.

    Attributes:
      family: "llama", "gpt2" or "t5".
      vocabulary: `V`.
      width: `D`.
      feed_forward: `F`.
      layers: `L`, of T5's encoder and of its decoder.
      heads: `H`.
      groups: key/value heads `G`.
      head_width: `K`.
    """

    family: str
    vocabulary: int
    width: int
    feed_forward: int
    layers: int
    heads: int
    groups: int
    head_width: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuCase:
    """A model that is tuned in one way, on batches of one size.

    Attributes:
      shape: the model.
      method: "soft" prompt, "prefix" of keys and values, or "lora".
      size: prompt vectors, prefix slots, or the rank.
      rows: `B`.
      length: `T`.
      learned: tokens of each row that carry loss; T5's targets.
    """

    shape: Shape
    method: str
    size: int
    rows: int
    length: int
    learned: int

    @property
    def title(self) -> str:
        """Describes the case."""
        shape = self.shape
        tuned = {"soft": "P", "prefix": "prefix ", "lora": "LoRA r "}[self.method]
        return (
            f"{shape.family} {shape.layers}L d{shape.width} V{shape.vocabulary}, "
            f"{tuned}{self.size}, B{self.rows} T{self.length}"
        )

    def flops(self) -> float:
        """Counts the FLOPs of a step's products, without recomputation.

        Frozen weights take part in one product forward and one backward; the scores
        and weighted values of attention in two forward and four backward.
        """
        shape = self.shape
        inner, shared = (n * shape.head_width for n in (shape.heads, shape.groups))
        attention = 2 * shape.width * (inner + shared)
        gated = 2 if shape.family == "gpt2" else 3
        block = attention + gated * shape.width * shape.feed_forward
        vectors = self.size if self.method == "soft" else 0
        keys = 0 if self.method == "lora" else self.size
        head = 4 * shape.width * shape.vocabulary * self.rows * self.learned
        if shape.family == "t5":
            # The prompt is joined with each row; the decoder also projects the
            # encoder's outputs to keys and values.
            read = self.rows * (self.length + vectors)
            written = self.rows * self.learned
            weights = read * block + written * (block + 2 * shape.width * inner)
            weights += read * 2 * shape.width * inner
            pairs = read * (self.length + vectors) + written * self.learned / 2
            pairs += written * (self.length + vectors)
        else:
            weights = (self.rows * self.length + vectors) * block
            pairs = self.rows * self.length * (self.length / 2 + keys)
        return shape.layers * (4 * weights + 12 * inner * pairs) + head


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingCase:
    """Rows that a model continues behind one soft prompt.

    Attributes:
      shape: the model.
      prompt: prompt vectors.
      length: tokens of each row.
      new_tokens: tokens that are written after each row.
      rows: numbers of rows.
      together: rows that our engine reads at once.
    """

    shape: Shape
    prompt: int = 100
    length: int = 128
    new_tokens: int = 64
    rows: tuple[int, ...] = (1, 32)
    together: int = 8

    @property
    def title(self) -> str:
        """Describes the case."""
        shape = self.shape
        return (
            f"{shape.family} {shape.layers}L d{shape.width} V{shape.vocabulary}, "
            f"P{self.prompt}, {self.length} + {self.new_tokens} tokens"
        )


LLAMA_8B = Shape(
    family="llama",
    vocabulary=128_256,
    width=4096,
    feed_forward=14_336,
    layers=32,
    heads=32,
    groups=8,
    head_width=128,
)
T5_XL = Shape(
    family="t5",
    vocabulary=32_128,
    width=2048,
    feed_forward=5120,
    layers=24,
    heads=32,
    groups=32,
    head_width=64,
)
GPT2 = Shape(
    family="gpt2",
    vocabulary=50_257,
    width=768,
    feed_forward=3072,
    layers=12,
    heads=12,
    groups=12,
    head_width=64,
)


def _case(shape: Shape, method: str, size: int, learned: int = 128) -> GpuCase:
    return GpuCase(
        shape=shape, method=method, size=size, rows=8, length=512, learned=learned
    )


CASES = {
    "llama_soft": _case(LLAMA_8B, "soft", 100),
    "llama_lora": _case(LLAMA_8B, "lora", 16),
    "llama_prefix": _case(LLAMA_8B, "prefix", 2048),
    "t5_soft": _case(T5_XL, "soft", 100, learned=64),
    "gpt2_soft": _case(GPT2, "soft", 100),
}


def _small_shape(shape: Shape) -> Shape:
    return dataclasses.replace(
        shape,
        vocabulary=64,
        width=32,
        feed_forward=48,
        layers=2,
        heads=4,
        groups=2 if shape.groups < shape.heads else 4,
        head_width=8,
    )


def _small(case: GpuCase) -> GpuCase:
    """Returns a case with the same form and tiny sizes."""
    shape = _small_shape(case.shape)
    return dataclasses.replace(case, shape=shape, size=4, rows=2, length=16, learned=4)


SMOKE = {name: _small(case) for name, case in CASES.items()}


def find_cases(smoke: bool) -> dict[str, GpuCase]:
    """Returns the cases, in real or in tiny sizes."""
    return SMOKE if smoke else CASES


def decoding_case(smoke: bool) -> DecodingCase:
    """Returns the case of decoding, in real or in tiny sizes."""
    if not smoke:
        return DecodingCase(shape=LLAMA_8B)
    shape = _small_shape(LLAMA_8B)
    return DecodingCase(shape=shape, prompt=4, length=8, new_tokens=4, rows=(1, 2))
