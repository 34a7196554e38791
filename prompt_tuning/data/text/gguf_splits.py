"""How byte-level tokenizers of GGUF files divide a text, by `tokenizer.ggml.pre`.

A file names the way and llama.cpp has the expressions. These are the ones of the
published `tokenizer.json` files, which llama.cpp's own reproduce (llama-vocab.cpp).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
QWEN_2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_SEED_CODER = (
    rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_FIRST}{_UPPER}*{_LOWER}+|{_FIRST}{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHES}"
_GPT_4O = (
    rf"{_FIRST}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|{_FIRST}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SLASHES}"
)
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")


@dataclasses.dataclass(frozen=True)
class Split:
    """A way of dividing a text.

    Attributes:
      expressions: each divides the remains of the ones before, at its matches.
      gpt2: whether GPT-2's expression divides the parts again.
      digits: whether each digit is a part, before everything else.
      composed: whether accents are joined with their letters before (NFC).
      whole_words: whether a part in the vocabulary is one token, regardless of the
        merges.
      add_bos: whether BOS is put before a text, unless the file says.
    """

    expressions: tuple[str, ...] = ()
    gpt2: bool = False
    digits: bool = False
    composed: bool = False
    whole_words: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> Any:
        """Returns the part of a tokenizer that divides a text into byte-level words."""
        from tokenizers import Regex, pre_tokenizers

        steps: list[Any] = [
            pre_tokenizers.Split(Regex(expression), "isolated")
            for expression in self.expressions
        ]
        if self.digits:
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
        steps.append(pre_tokenizers.ByteLevel(False, use_regex=self.gpt2))
        return pre_tokenizers.Sequence(steps)


_GPT_2 = Split(gpt2=True)
_DIGITS = Split(gpt2=True, digits=True)
_LLAMA_BPE = Split((LLAMA_3,), whole_words=True, add_bos=True)
SPLITS: Mapping[str, Split] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), _GPT_2),
    **dict.fromkeys(("starcoder", "refact", "smollm", "codeshell"), _DIGITS),
    "minerva-7b": _DIGITS,
    "command-r": dataclasses.replace(_DIGITS, composed=True),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), _LLAMA_BPE),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Split((LLAMA_3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Split((QWEN_2,), composed=True)),
    **dict.fromkeys(("stablelm2", "megrez"), Split((QWEN_2,))),
    "seed-coder": Split((_SEED_CODER,)),
    "tekken": Split((_TEKKEN,), whole_words=True, add_bos=True),
    "gpt-4o": Split((_GPT_4O,)),
    "deepseek-coder": Split(_DEEPSEEK_CODER),
}
"""Ways of dividing a text, by their names."""
UNNAMED = {
    **dict.fromkeys(("gpt2", "gptneox", "phi2"), "gpt-2"),
    "starcoder2": "starcoder",
}
"""The way of old files, which do not name it, by their architecture."""
