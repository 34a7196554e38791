"""Writes folders of tiny random encoders that read words of letters."""

import json
from pathlib import Path

import jax
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, processors

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import split
from prompt_tuning.families import FAMILIES
from prompt_tuning.families.hf_folder import find_recipes, stored_arrays
from prompt_tuning.families.hf_settings import HuggingFaceSettings
from prompt_tuning.models.build import build_model

LETTERS = "abcdefghijklmnopqrstuvwxyz="
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
SETTINGS = {
    "model_type": "bert",
    "vocab_size": len(VOCABULARY),
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 48,
    "pad_token_id": 0,
}


def write_bert(folder: Path) -> Path:
    """Writes a BERT with the head of a masked language model and without a pooler."""
    folder.mkdir(parents=True)
    settings = HuggingFaceSettings("config.json", SETTINGS)
    config = ModelConfig(
        family="bert", head_bias=True, **FAMILIES["bert"].read_fields(settings)
    )
    _, parameters = split(build_model(jax.random.key(0), config))
    random = np.random.default_rng(0)
    arrays = {
        path: random.normal(1.0 if "scale" in path else 0.0, 0.3, x.shape)
        for path, x in parameters.items()
    }
    stored = dict(stored_arrays(arrays, find_recipes(config)))
    save_file(
        {name: np.ascontiguousarray(x, np.float32) for name, x in stored.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(SETTINGS))
    write_word_pieces(folder)
    return folder


def write_word_pieces(folder: Path) -> None:
    """Writes a tokenizer as BERT's, which reads each letter as a token."""
    numbers = {token: number for number, token in enumerate(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, numbers[token]) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
