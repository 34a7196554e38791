"""Folders of tokenizers whose tokens are spread over several files.

Every combination of a source of the vocabulary and a place of further tokens is one
folder. `scripts.make_tokenizer_values` writes what transformers reads of every third.
"""

# transformers is only in the `bench` extra.
# pyright: reportMissingImports=false

import json
import shutil
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

FIXTURES = Path(__file__).parents[1] / "fixtures/tokenizers"
VALUES = FIXTURES / "values.json"
"""What transformers reads of some combinations."""

SOURCES = {
    "llama pieces": ("bpe/tokenizer.model", "llama", "LlamaTokenizer"),
    "generic pieces": ("bpe/tokenizer.model", "mistral", "LlamaTokenizer"),
    "gemma pieces": ("bpe/tokenizer.model", "gemma", "GemmaTokenizer"),
    "t5 pieces": ("unigram/spiece.model", "t5", "T5Tokenizer"),
    "gpt2 merges": ("byte_level/vocab.json", "gpt2", "GPT2Tokenizer"),
    "qwen2 merges": ("byte_level/vocab.json", "qwen2", "Qwen2Tokenizer"),
    "bart merges": ("byte_level/vocab.json", "bart", "BartTokenizer"),
    "generic file": (None, "llama", "PreTrainedTokenizerFast"),
    "llama file": (None, "llama", "LlamaTokenizer"),
    "gpt2 file": (None, "gpt2", "GPT2Tokenizer"),
    "neox file": (None, "gpt_neox", "GPTNeoXTokenizer"),
}
"""File of the vocabulary (None for a tokenizer.json), model type and class."""
SIZES = {"bpe": 400, "unigram": 400, "byte_level": 512}
"""Number of ids of each vocabulary; T5's class adds 100 to its 300."""
PLACES = (
    "added_tokens.json",
    "added_tokens_decoder",
    "tokenizer_config",
    "special_tokens_map",
    "class",
)
COMBINATIONS = [f"{source}, {place}" for source in SOURCES for place in PLACES]
TEMPLATE = (
    "{{ bos_token or '' }}{% for message in messages %}<x>{{ message.content }}"
    "{{ eos_token }}{% endfor %}"
)
MESSAGES = [{"role": "user", "content": "Once upon a time"}]
TEXTS = [
    "hi<x>the dog <end>, <|y|> end",
    "Once  upon\n a time ",
    "<s>hello</s><unk>",
    "\u2581a  b<|endoftext|>x",
    "The <extra_id_0> walks in <extra_id_99>park",
    "\u65e5\u672c \u00e9\t12 <x> y",
]
FLAGS = {"lstrip": False, "rstrip": False, "single_word": False}


def write_folder(folder: Path, combination: str) -> Path:
    """Writes the folder of a combination."""
    source, place = combination.split(", ")
    file, model_type, kind = SOURCES[source]
    folder.mkdir(parents=True)
    if file is None:
        size = _write_library_file(folder, "llama" in source)
    else:
        path = FIXTURES / file
        size = SIZES[path.parent.name]
        for name in (path.name, "merges.txt"):
            if (path.parent / name).exists():
                shutil.copy(path.parent / name, folder)
    # Gemma's and Bart's classes add tokens with a role, from the first free id on.
    config, others = _settings(place, size, kind)
    config |= {"tokenizer_class": kind, "chat_template": TEMPLATE}
    others |= {"tokenizer_config.json": config}
    others |= {"config.json": {"model_type": model_type}}
    for name, content in others.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def _settings(place: str, size: int, kind: str) -> tuple[dict, dict[str, Any]]:
    """Returns `tokenizer_config.json` and the other files that give tokens."""
    roles: dict[str, Any] = {"eos_token": "<end>"}
    texts = ["<x>", "<end>", "<|y|>"]
    if place == "class":
        return {}, {}
    if place == "added_tokens.json":
        ids = {text: size + number for number, text in enumerate(texts)}
        return roles | {"add_bos_token": True}, {"added_tokens.json": ids}
    if place == "added_tokens_decoder":
        decoder = {
            str(size + number): {
                "content": text,
                "special": text != "<|y|>",
                "normalized": text == "<|y|>",
                **FLAGS,
                "lstrip": text == "<x>",
            }
            for number, text in enumerate(texts)
        }
        return roles | {"add_bos_token": False, "added_tokens_decoder": decoder}, {}
    if place == "tokenizer_config":
        further = {"extra_special_tokens": ["<x>", "<|y|>"], "add_bos_token": True}
        return roles | further, {}
    end = {"content": "<end>", **FLAGS, "normalized": True}
    content = {"eos_token": end, "additional_special_tokens": ["<x>"]}
    return {"add_eos_token": True}, {"special_tokens_map.json": content}


def _write_library_file(folder: Path, has_spaces: bool) -> int:
    """Writes a tokenizer.json that puts a token before texts; returns its size.

    Args:
      folder: existing folder.
      has_spaces: whether it has the vocabulary of sentencepiece, not of bytes.
    """
    if has_spaces:
        pieces = [chr(code) for code in range(33, 127)]
        entries = ["<unk>", "<s>", "</s>", "\u2581", *pieces, "\u2581a", "he", "th"]
        merges = [("\u2581", "a"), ("h", "e"), ("t", "h")]
        vocabulary = {entry: i for i, entry in enumerate(entries)}
        model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True)
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = tokenizers.normalizers.Sequence(
            [
                tokenizers.normalizers.Prepend("\u2581"),
                tokenizers.normalizers.Replace(" ", "\u2581"),
            ]
        )
        tokenizer.decoder = decoders.Metaspace()
        tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
        first = "<s>"
    else:
        path = FIXTURES / "byte_level"
        files = (str(path / name) for name in ("vocab.json", "merges.txt"))
        tokenizer = tokenizers.Tokenizer(models.BPE.from_file(*files))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<|endoftext|>"])
        first = "<|endoftext|>"
    id = tokenizer.token_to_id(first)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} {first} $A", special_tokens=[(first, id)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer.get_vocab_size()


def transformers_values(folder: Path) -> dict[str, Any]:
    """Returns what transformers reads of a folder, by the names of `our_values`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    marked = tokenizer("a", return_special_tokens_mask=True)
    mask = [*marked["special_tokens_mask"], 0]
    rendered = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    return {
        "texts": [tokenizer(x, add_special_tokens=False).input_ids for x in TEXTS],
        "eos": tokenizer.eos_token_id,
        "bos": tokenizer.bos_token_id,
        "begin": marked["input_ids"][: mask.index(0)],
        "template": tokenizer(rendered, add_special_tokens=False).input_ids,
    }
