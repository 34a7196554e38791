"""The tokenizer classes of transformers, and the parts that only their code defines.

A sentencepiece file, and `vocab.json` with `merges.txt`, contain only a vocabulary. The
code of a class says how to divide a text before, how to join it after, and which tokens
to add. The table has the classes for the families that this package reads, as in
transformers 5.24.
"""

import base64
import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from prompt_tuning.core.errors import shown
from prompt_tuning.data.text.gguf_splits import QWEN_2

GENERIC = "TokenizersBackend"
"""The class of tokenizers that are described by their files alone."""
GENERIC_NAMES = ("PreTrainedTokenizer", "PythonBackend", "BloomTokenizer", GENERIC)
END = "<|endoftext|>"

_QWEN_3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE_LEVEL = {
    "continuing_subword_prefix": "",
    "end_of_word_suffix": "",
    "fuse_unk": False,
}
_BYTE_FALLBACK = {"fuse_unk": True, "byte_fallback": True}


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a tokenizer without its vocabulary and added tokens.

    Attributes:
      options: arguments of its model, `tokenizers.models.BPE` or `Unigram`.
      normalizer: replaces characters of a text; None if it is left as it is.
      pre_tokenizer: divides a text.
      decoder: joins the texts of tokens.
    """

    options: Mapping[str, Any]
    normalizer: Any
    pre_tokenizer: Any
    decoder: Any


@dataclasses.dataclass(frozen=True)
class TokenizerClass:
    """A class of tokenizers.

    Attributes:
      build: returns the parts, from the settings of `tokenizer_config.json` and the
        table of characters in a sentencepiece file.
      roles: texts of the tokens with a role, by role, unless the settings name others.
      is_unigram: whether its model is `Unigram`; `BPE` otherwise.
      add_bos: whether BOS is put before a text, unless the settings say and there is no
        `tokenizer.json`.
      begin_role: role of the token that is always put before a text, or None.
      keeps_post_processor: whether the post-processor of a `tokenizer.json` counts.
      is_shifted: whether BOS, padding, EOS and the unknown token take the place of a
        sentencepiece file's first three pieces, and the mask follows, as in fairseq.
    """

    build: Callable[[Mapping[str, Any], bytes], Parts]
    roles: Mapping[str, str]
    is_unigram: bool = False
    add_bos: bool = False
    begin_role: str | None = None
    keeps_post_processor: bool = True
    is_shifted: bool = False


def _gpt2(settings: Mapping[str, Any], charsmap: bytes) -> Parts:
    from tokenizers import decoders, pre_tokenizers

    space = bool(settings.get("add_prefix_space"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=space)
    return Parts(_BYTE_LEVEL, None, byte_level, decoders.ByteLevel())


def _gpt_neox(settings: Mapping[str, Any], charsmap: bytes) -> Parts:
    from tokenizers import normalizers

    return dataclasses.replace(_gpt2(settings, charsmap), normalizer=normalizers.NFC())


def _cohere(settings: Mapping[str, Any], charsmap: bytes) -> Parts:
    from tokenizers import pre_tokenizers

    parts = _gpt_neox(settings, charsmap)
    digits = pre_tokenizers.Digits(individual_digits=True)
    split = pre_tokenizers.Sequence([digits, parts.pre_tokenizer])
    return dataclasses.replace(parts, pre_tokenizer=split)


def _qwen(pattern: str) -> Callable[[Mapping[str, Any], bytes], Parts]:
    def build(settings: Mapping[str, Any], charsmap: bytes) -> Parts:
        from tokenizers import Regex, pre_tokenizers

        space = bool(settings.get("add_prefix_space"))
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        byte_level = pre_tokenizers.ByteLevel(space, use_regex=False)
        return dataclasses.replace(
            _gpt_neox(settings, charsmap),
            pre_tokenizer=pre_tokenizers.Sequence([split, byte_level]),
        )

    return build


def _llama(settings: Mapping[str, Any], charsmap: bytes) -> Parts:
    from tokenizers import decoders, pre_tokenizers

    space = settings.get("add_prefix_space") is not False
    scheme = "never" if not space else "always" if settings.get("legacy") else "first"
    steps: list[Any] = [decoders.Replace("\u2581", " ")]
    steps += [decoders.ByteFallback(), decoders.Fuse()]
    if space:
        steps.append(decoders.Strip(" ", left=1))
    split = pre_tokenizers.Metaspace("\u2581", scheme, split=False)
    return Parts(_BYTE_FALLBACK, None, split, decoders.Sequence(steps))


def _code_llama(settings: Mapping[str, Any], charsmap: bytes) -> Parts:
    parts = _llama({**settings, "legacy": False}, charsmap)
    unknown = str(settings.get("unk_token") or "<unk>")
    with_space = _llama({}, charsmap)
    options = {**_BYTE_FALLBACK, "unk_token": unknown}
    return dataclasses.replace(parts, options=options, decoder=with_space.decoder)


def _gemma(settings: Mapping[str, Any], charsmap: bytes) -> Parts:
    from tokenizers import decoders, normalizers, pre_tokenizers

    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    return Parts(
        {**_BYTE_FALLBACK, "unk_token": str(settings.get("unk_token") or "<unk>")},
        normalizers.Replace(" ", "\u2581"),
        pre_tokenizers.Split(" ", "merged_with_previous"),
        decoders.Sequence(steps),
    )


def _t5(settings: Mapping[str, Any], charsmap: bytes) -> Parts:
    from tokenizers import decoders, normalizers, pre_tokenizers

    split = pre_tokenizers.Metaspace("\u2581", "always", split=True)
    return Parts(
        {"unk_id": 2, "byte_fallback": False},
        normalizers.Precompiled(charsmap) if charsmap else None,
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), split]),
        decoders.Metaspace("\u2581", "always", split=True),
    )


def _xlm_roberta(settings: Mapping[str, Any], charsmap: bytes) -> Parts:
    from tokenizers import decoders, pre_tokenizers

    parts = _t5(settings, charsmap)
    scheme = "never" if settings.get("add_prefix_space") is False else "always"
    split = pre_tokenizers.Metaspace("\u2581", scheme)
    return dataclasses.replace(
        parts,
        options={"unk_id": 3, "byte_fallback": False},
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), split]
        ),
        decoder=decoders.Metaspace("\u2581", scheme),
    )


def _ends(text: str, *roles: str) -> dict[str, str]:
    return dict.fromkeys((*roles, "eos_token", "unk_token"), text)


_PIECES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_ROBERTA_ROLES = {
    **_PIECES,
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
    "mask_token": "<mask>",
}
_ROBERTA = TokenizerClass(_gpt2, _ROBERTA_ROLES, begin_role="cls_token")
CLASSES: Mapping[str, TokenizerClass] = {
    "GPT2Tokenizer": TokenizerClass(_gpt2, _ends(END, "bos_token")),
    "CodeGenTokenizer": TokenizerClass(_gpt2, _ends(END, "bos_token")),
    "GPTNeoXTokenizer": TokenizerClass(
        _gpt_neox,
        _ends(END, "bos_token") | {"pad_token": "<|padding|>"},
        keeps_post_processor=False,
    ),
    "Qwen2Tokenizer": TokenizerClass(_qwen(QWEN_2), _ends(END, "pad_token")),
    "Qwen3_5Tokenizer": TokenizerClass(_qwen(_QWEN_3_5), _ends(END, "pad_token")),
    "CohereTokenizer": TokenizerClass(
        _cohere,
        {
            "bos_token": "<BOS_TOKEN>",
            "eos_token": "<|END_OF_TURN_TOKEN|>",
            "unk_token": "<UNK>",
            "sep_token": "<SEP>",
            "pad_token": "<PAD>",
            "cls_token": "<CLS>",
            "mask_token": "<MASK_TOKEN>",
        },
    ),
    "RobertaTokenizer": _ROBERTA,
    "BartTokenizer": _ROBERTA,
    "LlamaTokenizer": TokenizerClass(_llama, _PIECES),
    "CodeLlamaTokenizer": TokenizerClass(_code_llama, _PIECES, add_bos=True),
    "GemmaTokenizer": TokenizerClass(
        _gemma,
        {
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
    ),
    "XLMRobertaTokenizer": TokenizerClass(
        _xlm_roberta,
        _ROBERTA_ROLES,
        is_unigram=True,
        begin_role="bos_token",
        is_shifted=True,
    ),
    "T5Tokenizer": TokenizerClass(
        _t5,
        {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
        is_unigram=True,
    ),
}
"""Classes by name, without `Fast`."""

_GPT2_MODELS = ("gpt2", "gpt_neo", "gptj", "opt", "phi", "codegen", "starcoder2")
_QWEN_MODELS = (
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl"),
    "qwen3_vl_moe",
)
_QWEN_3_5_MODELS = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
_GPT_NEOX_MODELS = (
    "gpt_neox",
    "mpt",
    "olmo",
    "olmoe",
    "mamba",
    "mamba2",
    "falcon_mamba",
)
_GEMMA_MODELS = ("gemma", "gemma2", "gemma3", "gemma3_text", "t5gemma")
_GENERIC_MODELS = (
    *("ernie4_5", "flex_olmo", "glm", "glm4", "glm4_moe", "jamba", "modernbert"),
    *("granite", "granitemoe", "granitemoehybrid", "olmo_hybrid"),
    *("ministral", "ministral3", "mistral"),
    *("mistral3", "mixtral", "olmo2", "olmo3", "phi3", "phimoe", "stablelm", "umt5"),
)
MODEL_CLASSES: Mapping[str, str] = {
    **dict.fromkeys(_GPT2_MODELS, "GPT2Tokenizer"),
    **dict.fromkeys(_QWEN_MODELS, "Qwen2Tokenizer"),
    **dict.fromkeys(_GEMMA_MODELS, "GemmaTokenizer"),
    **dict.fromkeys(_GENERIC_MODELS, GENERIC),
    **dict.fromkeys(_QWEN_3_5_MODELS, "Qwen3_5Tokenizer"),
    **dict.fromkeys(_GPT_NEOX_MODELS, "GPTNeoXTokenizer"),
    **dict.fromkeys(("cohere", "cohere2"), "CohereTokenizer"),
    **dict.fromkeys(("t5", "mt5", "switch_transformers"), "T5Tokenizer"),
    **dict.fromkeys(("bert", "distilbert", "electra"), "BertTokenizer"),
    **dict.fromkeys(("bart", "roberta"), "RobertaTokenizer"),
    "code_llama": "CodeLlamaTokenizer",
    "mbart": "MBartTokenizer",
    "nllb-moe": "NllbTokenizer",
    "m2m_100": "M2M100Tokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
}
"""Class of each model type in `TOKENIZER_MAPPING_NAMES` of transformers."""
UNREGISTERED = ("bloom", "falcon", "gpt_oss", "helium", "llama", "smollm3")
"""Model types of this package's families that are not in that table."""
WRONGLY_NAMED = (
    *("ernie4_5", "jamba", "modernbert", "phi3", "phimoe"),
    *("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"),
)
"""Model types whose folders name a wrong class, which transformers does not use."""


def class_name(named: str | None, model_type: str | None, is_byte_level: bool) -> str:
    """Returns the class that `AutoTokenizer` of transformers chooses for a folder.

    Args:
      named: class that the settings name, or None.
      model_type: `model_type` of `config.json`, or None.
      is_byte_level: whether a `tokenizer.json` has parts of the type `ByteLevel`.
    """
    registered = MODEL_CLASSES.get(model_type or "")
    wrong = model_type in WRONGLY_NAMED
    if named is None:
        known = model_type is None or model_type in UNREGISTERED
        return registered or (GENERIC if known else f"tokenizer of {model_type}")
    named = named.removesuffix("Fast")
    named = GENERIC if named in GENERIC_NAMES else named
    if named == "LlamaTokenizer" and is_byte_level and not wrong:
        return GENERIC
    if registered is None or registered == named:
        return named
    if registered == GENERIC:
        return GENERIC
    return registered if wrong else named


def refusal(source: str, name: str) -> str:
    """Returns why a tokenizer without `tokenizer.json` cannot be read."""
    return (
        f"{source} is the vocabulary of a {shown(name)} (tokenizer_class in "
        "tokenizer_config.json, or model_type in config.json), which splits texts, "
        "orders ids or adds tokens by rules that are in no file: write tokenizer.json "
        "by AutoTokenizer.from_pretrained(FOLDER).save_pretrained('tokenizer') in "
        "transformers, and give the new folder"
    )


def charsmap_of(normalizer: Any) -> bytes:
    """Returns the table of characters in the normalizer of a `tokenizer.json`."""
    steps = [normalizer] if isinstance(normalizer, dict) else []
    if steps and normalizer.get("type") == "Sequence":
        steps = normalizer["normalizers"]
    tables = (step.get("precompiled_charsmap") for step in steps)
    return base64.b64decode(next((table for table in tables if table), ""))


def same_parts(settings: Mapping[str, Any], parts: Parts) -> bool:
    """Tests whether a `tokenizer.json` has the parts of a class."""
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        part = getattr(parts, name)
        expected = None if part is None else json.loads(part.__getstate__())
        if settings.get(name) != expected:
            return False
    model = settings.get("model", {})
    return all(
        (model.get(name) or None) == (value or None)
        for name, value in parts.options.items()
    )
