"""A byte-level tokenizer with 262 tokens, saved in a folder as in checkpoints."""

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

EOS = "<|end|>"
PAD = "<|pad|>"
CHAT = (
    "{% for message in messages %}"
    "<|{{ message.role }}|>\n{{ message.content }}" + EOS + "\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def write_tokenizer(folder: Path, special: Sequence[str] = (), **config) -> Path:
    """Writes the folder.

    Args:
      folder: the folder.
      special: further special tokens.
      **config: added to tokenizer_config.json.
    """
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "a")]
    pieces = [*alphabet, *("".join(pair) for pair in merges)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS, PAD, *special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": EOS, "pad_token": PAD} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
