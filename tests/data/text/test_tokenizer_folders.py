"""Tokens of tokenizer folders have the ids that transformers gives them."""

# transformers is only in the `bench` extra.
# pyright: reportMissingImports=false

import json
import shutil

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.text.chat_templates import chat_template_of
from prompt_tuning.data.text.template_renderer import ChatRecord
from prompt_tuning.data.text.tokenizer_classes import MODEL_CLASSES, WRONGLY_NAMED
from prompt_tuning.data.text.tokenizers import load_tokenizer
from prompt_tuning.families.hf_folder import ALIASES, FAMILIES
from tests.support.tokenizer_folders import (
    COMBINATIONS,
    FIXTURES,
    MESSAGES,
    TEXTS,
    VALUES,
    transformers_values,
    write_folder,
)

COMMITTED = json.loads(VALUES.read_text())


def our_values(folder):
    tokenizer = load_tokenizer(folder)
    record = ChatRecord(tuple(MESSAGES), (False,))
    ((text,),) = chat_template_of(tokenizer).render_many("text", [record])
    return {
        "texts": [tokenizer.encode(text) for text in TEXTS],
        "eos": tokenizer.eos_id,
        "bos": tokenizer.bos_id,
        "begin": list(tokenizer.begin_ids),
        "template": tokenizer.encode(text),
    }


@pytest.mark.slow
@pytest.mark.parametrize("combination", COMMITTED)
def test_tokens_of_every_file_have_the_ids_of_transformers(combination, tmp_path):
    folder = write_folder(tmp_path / "tokenizer", combination)
    assert our_values(folder) == COMMITTED[combination]


@pytest.mark.torch
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_all_combinations_equal_transformers(combination, tmp_path):
    folder = write_folder(tmp_path / "tokenizer", combination)
    expected = transformers_values(folder)
    assert COMMITTED.get(combination, expected) == expected
    assert our_values(folder) == expected


def write_class(folder, name, files):
    """Writes a folder with the vocabulary files of a class."""
    folder.mkdir()
    for file in files:
        if file.endswith((".model", ".spm")):
            shutil.copy(FIXTURES / "unigram/spiece.model", folder / file)
    if "merges.txt" in files:
        for file in ("vocab.json", "merges.txt"):
            shutil.copy(FIXTURES / "byte_level" / file, folder)
    config = {"tokenizer_class": name}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("MBartTokenizer", "sentencepiece.bpe.model"),
        ("MBart50TokenizerFast", "sentencepiece.bpe.model"),
        ("NllbTokenizer", "sentencepiece.bpe.model"),
        ("M2M100Tokenizer", "sentencepiece.bpe.model"),
        ("PegasusTokenizer", "spiece.model"),
        ("BlenderbotTokenizer", "merges.txt"),
    ],
)
def test_classes_that_change_ids_are_refused_by_name(name, file, tmp_path):
    folder = write_class(tmp_path / "tokenizer", name, [file])
    with pytest.raises(InputError, match=name.removesuffix("Fast")):
        load_tokenizer(folder)


def test_pieces_of_an_unknown_model_type_are_refused(tmp_path):
    folder = write_class(tmp_path / "tokenizer", None, ["spiece.model"])
    (folder / "config.json").write_text('{"model_type": "pegasus"}')
    with pytest.raises(InputError, match=r"spiece\.model is .*'tokenizer of pegasus'"):
        load_tokenizer(folder)


@pytest.mark.parametrize("model_type", ["jamba", "ernie4_5", "modernbert"])
def test_the_file_counts_where_the_settings_name_a_wrong_class(model_type, tmp_path):
    """As in transformers 5.24, which replaces the class of Jamba and ERNIE 4.5."""
    folder = write_folder(tmp_path / "tokenizer", "llama file, class")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    found = load_tokenizer(folder)
    alone = shutil.copytree(folder, tmp_path / "alone")
    (alone / "tokenizer_config.json").unlink()
    assert found.encode(" a") == load_tokenizer(alone).encode(" a")


@pytest.mark.torch
@pytest.mark.parametrize("named", ["XLMRobertaTokenizerFast", None])
@pytest.mark.parametrize("settings", [{}, {"cls_token": "t", "mask_token": "<m>"}])
def test_pieces_of_xlm_roberta_have_the_ids_of_transformers(named, settings, tmp_path):
    import transformers

    folder = write_class(tmp_path / "tokenizer", named, ["sentencepiece.bpe.model"])
    config = {"tokenizer_class": named} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "xlm-roberta"}')
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    theirs.save_pretrained(str(tmp_path / "saved"))  # as tokenizer.json
    for ours in map(load_tokenizer, (folder, tmp_path / "saved")):
        for text in [*TEXTS, "The <mask> dog <m>", ""]:
            ids = theirs(text, add_special_tokens=False).input_ids
            assert ours.encode(text) == ids, text
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert (*ours.begin_ids, ours.eos_id) == tuple(theirs("").input_ids)
        assert (ours.pad_id, ours.vocabulary_size) == (theirs.pad_token_id, len(theirs))


def test_pieces_of_xlm_roberta_follow_four_tokens(tmp_path):
    """BOS, padding, EOS and unknown have the ids 0 to 3, as in fairseq."""
    name, file = "XLMRobertaTokenizer", "sentencepiece.bpe.model"
    ours = load_tokenizer(write_class(tmp_path / "tokenizer", name, [file]))
    first = [ours.token(id) for id in range(5)]
    assert first == ["<s>", "<pad>", "</s>", "<unk>", "\u2581"]
    assert ours.token(ours.vocabulary_size - 1) == "<mask>"
    assert (ours.begin_ids, ours.eos_id, ours.pad_id) == ((0,), 2, 1)


@pytest.mark.torch
@pytest.mark.parametrize("source", ["t5 pieces", "llama pieces", "gpt2 merges"])
def test_spaces_are_cleaned_as_in_transformers(source, tmp_path):
    import transformers

    folder = write_folder(tmp_path / "tokenizer", f"{source}, class")
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text()) if file.exists() else {}
    settings["clean_up_tokenization_spaces"] = True
    file.write_text(json.dumps(settings))
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    ids = theirs(
        "The dog ' s park . It do n't walk", add_special_tokens=False
    ).input_ids
    decoded = theirs.decode(ids, skip_special_tokens=True)
    assert load_tokenizer(folder).decode(ids) == decoded


@pytest.mark.torch
def test_model_types_have_the_classes_of_transformers():
    from transformers.models.auto import tokenization_auto

    theirs = tokenization_auto.TOKENIZER_MAPPING_NAMES
    for model_type, name in MODEL_CLASSES.items():
        assert str(theirs[model_type]).removesuffix("Fast") == name, model_type
    wrong = tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    known = {*FAMILIES, *ALIASES, *MODEL_CLASSES}
    assert known & wrong == set(WRONGLY_NAMED)


@pytest.mark.torch
def test_each_class_of_transformers_is_read_as_there_or_refused_by_name(tmp_path):
    import transformers
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    found = {}
    for name in sorted(set(TOKENIZER_MAPPING_NAMES.values()) - {None}):
        files = getattr(getattr(transformers, name), "vocab_files_names", {}).values()
        vocabularies = (".model", ".spm", "merges.txt")
        if not any(file.endswith(vocabularies) for file in files if file):
            continue
        folder = write_class(tmp_path / name, name, [file for file in files if file])
        try:
            ours = load_tokenizer(folder)
        except InputError as problem:
            found[name] = "refused" if name.removesuffix("Fast") in str(problem) else ""
            continue
        theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
        ids = [theirs(text, add_special_tokens=False).input_ids for text in TEXTS]
        same = ids == [ours.encode(text) for text in TEXTS]
        found[name] = "read" if same else ""
    assert {name for name, how in found.items() if not how} == set()
    assert sum(how == "read" for how in found.values()) >= 12
