import json
import shutil

import pytest
import sentencepiece
import tokenizers

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.text.text_encoder import TextEncoder
from prompt_tuning.data.text.tokenizers import (
    continued_pair,
    encode_prompt,
    load_tokenizer,
    separate_pair,
)
from tests.support.shared_data import FIXTURES, SHARED, released
from tests.support.small_tokenizer import write_tokenizer

BPE, BYTE_LEVEL, UNIGRAM = (
    FIXTURES / "tokenizers" / name for name in ("bpe", "byte_level", "unigram")
)
STORIES = SHARED / "data/models/stories260k"
GPT2 = SHARED / "data/tokenizers/gpt2"
T5 = SHARED / "data/tokenizers/t5"


TEXT = "Once upon a time, there was a little girl named Lily."


@pytest.fixture(scope="module")
def bpe():
    return load_tokenizer(BPE)


@pytest.fixture(scope="module")
def unigram():
    return load_tokenizer(UNIGRAM)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "special", "size"),
    [
        (BPE, (1, 2, 2, (1,)), 400),
        (BYTE_LEVEL, (511, 511, 511, ()), 512),
        (UNIGRAM, (None, 1, 0, ()), 300),
        released(STORIES, (1, 2, 2, (1,)), 512),
        released(GPT2, (50256, 50256, 50256, ()), 50257),
        released(T5, (None, 1, 0, ()), 32000),
    ],
)
def test_special_tokens_equal_the_models(folder, special, size):
    tokenizer = load_tokenizer(folder)
    roles = tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.begin_ids
    assert (roles, tokenizer.vocabulary_size) == (special, size)


@pytest.mark.parametrize("folder", [BPE, BYTE_LEVEL, UNIGRAM])
def test_ids_equal_those_of_the_library_that_trained_the_tokenizer(folder):
    if folder == BYTE_LEVEL:
        files = (str(folder / name) for name in ("vocab.json", "merges.txt"))
        ids = tokenizers.ByteLevelBPETokenizer(*files).encode(TEXT).ids
    else:
        (file,) = folder.glob("*.model")
        ids = sentencepiece.SentencePieceProcessor(model_file=str(file)).encode(TEXT)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode(TEXT) == ids
    assert tokenizer.decode(ids) == TEXT


@pytest.mark.released
def test_byte_level_ids_are_the_published_ones():
    gpt2 = load_tokenizer(GPT2)
    # "Hello world" of OpenAI's encoder.
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.token(995) == "\u0120world"
    assert gpt2.decode([15496, 995, 50256]) == "Hello world"
    assert encode_prompt(gpt2, "Hello world") == [15496, 995]


def test_byte_level_tokens_encode_any_text():
    tokenizer = load_tokenizer(BYTE_LEVEL)
    odd = "  two  spaces,\n\ttab, é, 日本 "
    assert tokenizer.decode(tokenizer.encode(odd)) == odd
    assert tokenizer.decode([*tokenizer.encode(odd), 511]) == odd


@pytest.mark.parametrize("folder", [BPE, BYTE_LEVEL, UNIGRAM])
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("hello=", "olleh"),
        ("Question: why?", " Because."),
        ("Once upon a", " time"),
        ("Answer: ", "yes"),
        ("", "Once upon a time"),
    ],
)
def test_a_pair_decodes_to_the_exact_text(folder, prompt, completion):
    tokenizer = load_tokenizer(folder)
    prompt_ids, completion_ids = continued_pair(tokenizer, prompt, completion)
    assert prompt_ids == tokenizer.encode(prompt)
    assert tokenizer.decode(prompt_ids + completion_ids) == prompt + completion


def test_separate_texts_are_encoded_separately(unigram):
    prompt, completion = separate_pair(unigram, "good movie", "positive")
    assert unigram.decode(completion) == "positive"
    assert unigram.token(completion[0]) == "\u2581positive"
    assert prompt == unigram.encode("good movie")


def test_prompts_begin_with_bos_if_the_model_expects_it(bpe, unigram):
    for tokenizer, begin in ((bpe, [1]), (unigram, [])):
        expected = [*begin, *tokenizer.encode("Once upon a time")]
        assert encode_prompt(tokenizer, "Once upon a time") == expected


@pytest.mark.released
def test_the_prompt_of_the_story_model():
    tokenizer = load_tokenizer(STORIES)
    assert encode_prompt(tokenizer, "Once upon a time") == [1, 403, 407, 261, 378]


def test_special_and_unknown_ids_have_no_text(bpe, unigram):
    ids = bpe.encode("a time")
    assert bpe.decode([1, *ids, 2]) == "a time"
    assert bpe.token(1) == "<s>"
    # T5's sentinels are beyond the file's vocabulary.
    assert unigram.decode([*unigram.encode("a time"), 399, 1, 0]) == "a time"
    assert unigram.token(399) == "<unused 399>"


def test_an_argument_overrides_the_files():
    assert load_tokenizer(UNIGRAM, eos_id=3).eos_id == 3


def words_tokenizer(folder, **model):
    """A tokenizer.json of three words after a leading-space mark, BOS first."""
    vocabulary = {"<s>": 0, "</s>": 1, "?": 2, "\u2581": 3, "a": 4, "b": 5, ".": 6}
    content = {
        "version": "1.0",
        "truncation": {
            "max_length": 2,
            "strategy": "LongestFirst",
            "stride": 0,
            "direction": "Right",
        },
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for i, token in enumerate(["<s>", "</s>"])
        ],
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "\u2581",
            "prepend_scheme": "always",
            "split": True,
        },
        "decoder": {
            "type": "Metaspace",
            "replacement": "\u2581",
            "prepend_scheme": "always",
            "split": True,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        },
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "?"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_tokenizer_json_and_its_config_are_read(tmp_path):
    words_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 1)
    assert tokenizer.begin_ids == (0,)
    assert tokenizer.vocabulary_size == 7
    # Longer than the length to which the file truncates texts.
    assert tokenizer.encode("a b a") == [3, 4, 3, 5, 3, 4]
    assert tokenizer.encode_continuation("b") == [5]
    assert continued_pair(tokenizer, "a", "b a") == ([3, 4], [5, 3, 4])
    assert tokenizer.decode([0, 3, 4, 5, 1]) == "ab"


def test_the_older_map_of_special_tokens_is_read(tmp_path):
    """It overrides a config without `added_tokens_decoder`, as in transformers."""
    words_tokenizer(tmp_path)
    tokens = {"eos_token": {"content": "?"}, "pad_token": "."}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 2, 6)
    config = {"eos_token": "</s>", "added_tokens_decoder": {}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    # The post-processor puts <s> first, whatever the settings call it.
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 1)


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "LlamaTokenizer"])
def test_a_token_with_a_role_is_special_whatever_its_file_says(tmp_path, name):
    """As in transformers, so that decoded texts leave it out."""
    words_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"][1]["special"] = False
    file.write_text(json.dumps(content))
    config = {"tokenizer_class": name, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).decode([3, 4, 1, 5]) == "ab"


def test_a_missing_tokenizer_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such file or folder"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(InputError, match=r"0 \.model files"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.model", b"not a model", "not a sentencepiece model"),
        ("tokenizer.json", b"{", "is not valid JSON"),
        ("tokenizer.json", b"[]", "contains a list, expected a JSON object"),
        ("tokenizer.json", b"{}", "is not a tokenizer.json"),
    ],
)
def test_an_unusable_tokenizer_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_tokenizer(tmp_path)


def test_the_only_model_file_of_a_folder_is_read(tmp_path, unigram):
    shutil.copy(UNIGRAM / "spiece.model", tmp_path / "other.model")
    assert load_tokenizer(tmp_path).encode("good") == unigram.encode("good")


def changed_tokenizer(folder, **changes):
    """A tokenizer.json with other settings."""
    write_tokenizer(folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def test_a_panic_of_the_library_is_reported(tmp_path):
    """The class of a panic derives from BaseException alone."""
    normalizer = {"type": "Precompiled", "precompiled_charsmap": ""}
    folder = changed_tokenizer(tmp_path / "tokenizer", normalizer=normalizer)
    with pytest.raises(InputError, match="precompiled_charsmap") as caught:
        load_tokenizer(folder)
    assert type(caught.value.__cause__).__name__ == "PanicException"


def test_padding_of_a_tokenizer_is_never_applied(tmp_path):
    """The library would end the process for lack of memory."""
    padding = {
        "strategy": {"Fixed": 10**12},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    tokenizer = load_tokenizer(changed_tokenizer(tmp_path / "a", padding=padding))
    assert len(tokenizer.encode("the")) < 10


def test_long_texts_and_large_ids_are_refused(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer"))
    with pytest.raises(InputError, match="5,000,000 characters, expected at most 4,19"):
        tokenizer.encode("a" * 5_000_000)
    with pytest.raises(InputError, match="5,000,000 characters, expected at most 4,19"):
        TextEncoder(tokenizer)([["a" * 5_000_000]])
    folder = changed_tokenizer(tmp_path / "large")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["zz"] = 2**31
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="json go up to 2,147,483,648, expected"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"add_bos_token": "yes"}, "add_bos_token = 'yes', expected true or false"),
        ({"eos_token": 5}, "eos_token = 5, expected a text, or an object"),
        ({"eos_token": {"content": []}}, "expected a text, or an object"),
    ],
)
def test_settings_of_another_type_are_refused(tmp_path, settings, message):
    folder = write_tokenizer(tmp_path / "tokenizer")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=message):
        load_tokenizer(folder)


def test_half_a_surrogate_pair_is_named(tmp_path):
    """As JSON has it where a text was cut within an emoji."""
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer"))
    with pytest.raises(InputError, match=r"encoded, because it has half a surrogate"):
        tokenizer.encode(json.loads('"a\\ud83d"'))
    assert tokenizer.decode(tokenizer.encode("a\U0001f600")) == "a\U0001f600"
