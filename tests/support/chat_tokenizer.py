"""A byte-level tokenizer with the special tokens that a chat template writes."""

import json
import re
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

_SPECIAL = re.compile(
    r"<\|[^|<>{}]+\|>|<｜[^｜<>]+｜>|<\|\w+>|<\w+\|>|\[/?INST\]|</?s>"
    r"|<(?:start|end)_of_(?:turn|utterance)>|</?(?:bos|eos)>|</?think>"
)
NOT_SPECIAL = ("<think>", "</think>")
"""Tokens of their own that are text, as in Qwen3."""


def write_chat_tokenizer(folder: Path, source: str, eos: str) -> Path:
    """Writes a folder with a tokenizer and a chat template.

    Two line feeds are one token, so that texts may share a token.

    Args:
      folder: the folder.
      source: text of the template, whose special tokens are added.
      eos: text of EOS.
    """
    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ċ", "Ċ")]
    pieces = [*alphabet, *("".join(pair) for pair in merges)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    found = sorted({eos, "<s>", *_SPECIAL.findall(source)})
    tokenizer.add_special_tokens([x for x in found if x not in NOT_SPECIAL])
    tokenizer.add_tokens([x for x in found if x in NOT_SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": eos,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(source)
    return folder
