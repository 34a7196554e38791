"""Vocabularies of word pieces in `vocab.txt` have the ids of transformers."""

# transformers is only in the `bench` extra.
# pyright: reportMissingImports=false

import json

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.text.tokenizers import load_tokenizer

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the The cafe café Café un ##believ ##able 漢 字"
PIECES = "##e ##s ! , . ' ’ ##a ##b ##c ##é a b c é ü Ü 漢字 ß 1 ##2 [ ] unused"
VOCABULARY = [*WORDS.split(), *PIECES.split(), "##漢"]
TEXTS = [
    "The Cafés, the café!",
    "unbelievable unbelievably",
    "漢字 a漢b",
    "\tÜber\u00a0ü\u200b 12\x00 \ufffd",
    "[MASK] the [SEP]a [CLS]",
    "x" * 101 + " ab",
    "",
    "’ß' cafe\u0301",
    "[NEW] the new",
    "the ' café . ' s",
]
SETTINGS = {
    "defaults": {},
    "cased": {"do_lower_case": False},
    "accents stay": {"strip_accents": False},
    "cased without accents": {"do_lower_case": False, "strip_accents": True},
    "no spaces around ideographs": {"tokenize_chinese_chars": False},
    "null": {"strip_accents": None, "tokenizer_class": "BertTokenizerFast"},
    "other roles": {"unk_token": "unused", "cls_token": "a", "sep_token": "b"},
    "further": {"additional_special_tokens": ["[NEW]"]},
    "distilbert": {"tokenizer_class": "DistilBertTokenizer"},
    "spaces cleaned": {"clean_up_tokenization_spaces": True},
    "spaces kept": {"clean_up_tokenization_spaces": None},
}


def write_folder(folder, settings, end="\n"):
    folder.mkdir()
    content = "".join(token + end for token in VOCABULARY)
    (folder / "vocab.txt").write_text(content, encoding="utf-8", newline="")
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "bert"}')
    return folder


@pytest.mark.torch
@pytest.mark.parametrize("name", SETTINGS)
def test_ids_are_those_of_transformers(name, tmp_path):
    import transformers

    folder = write_folder(tmp_path / "tokenizer", SETTINGS[name])
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    ours = load_tokenizer(folder)
    for text in TEXTS:
        expected = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text) == expected, text
        assert ours.decode(expected) == theirs.decode(
            expected, skip_special_tokens=True
        )
    first, last = theirs("").input_ids
    assert (ours.begin_ids, ours.eos_id) == ((first,), last)
    assert ours.pad_id == theirs.pad_token_id
    assert ours.vocabulary_size == len(theirs)


@pytest.mark.parametrize(
    ("settings", "ids"),
    [
        ({"tokenizer_class": "BertTokenizer"}, "the cafe"),
        ({"do_lower_case": False}, "The Café"),
        ({"do_lower_case": False, "strip_accents": True}, "The Cafe"),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "The café"),
    ],
)
def test_settings_override_how_tokenizer_json_normalizes(settings, ids, tmp_path):
    """The ids are those of transformers 5.24, whose class makes these parts anew."""
    folder = write_folder(tmp_path / "tokenizer", settings)
    content = json.loads(load_tokenizer(folder).tokenizer.to_str())  # pyright: ignore
    content["normalizer"] = {"type": "Replace", "pattern": {"String": "C"}}
    content["normalizer"] |= {"content": "c"}
    vocabulary = content["model"]["vocab"]
    vocabulary["Cafe"] = len(vocabulary)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "vocab.txt").unlink()
    tokenizer = load_tokenizer(folder)
    assert [tokenizer.token(i) for i in tokenizer.encode("The Café")] == ids.split()


@pytest.mark.parametrize(("flag", "text"), [(True, "a'b"), (False, "a ' b")])
def test_spaces_around_an_apostrophe_are_cleaned_if_the_settings_say(
    flag, text, tmp_path
):
    """The texts are those of transformers 5.24."""
    settings = {"clean_up_tokenization_spaces": flag}
    tokenizer = load_tokenizer(write_folder(tmp_path / "tokenizer", settings))
    assert tokenizer.decode(tokenizer.encode("a ' b")) == text


def test_lines_may_end_as_on_windows(tmp_path):
    folder = write_folder(tmp_path / "tokenizer", {}, "\r\n")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocabulary_size == len(VOCABULARY)
    assert [tokenizer.token(i) for i in tokenizer.encode("unbelievable!")] == [
        *("un", "##believ", "##able", "!")
    ]


@pytest.mark.parametrize(
    "settings, found",
    [
        ({"do_lower_case": "yes"}, "do_lower_case"),
        ({"clean_up_tokenization_spaces": 1}, "clean_up_tokenization_spaces"),
        ({"tokenizer_class": "MPNetTokenizer"}, "MPNetTokenizer"),
        ({"cls_token": None}, r"cls_token of .* expected the text of a token"),
        ({"cls_token": "$A"}, r"cls_token of .* is '\$A'"),
    ],
)
def test_other_settings_and_classes_are_refused(settings, found, tmp_path):
    folder = write_folder(tmp_path / "tokenizer", settings)
    with pytest.raises(InputError, match=found):
        load_tokenizer(folder)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    folder = write_folder(tmp_path / "tokenizer", {})
    (folder / "vocab.txt").write_bytes(b"[UNK]\n\xff\n")
    with pytest.raises(InputError, match="UTF-8"):
        load_tokenizer(folder)
