"""Texts for an adapter are encoded by its run or folder, at every door."""

import asyncio
import json
import re

import pytest

import prompt_tuning as pt
from prompt_tuning.cli.main import main
from prompt_tuning.config.config_values import CONFIG_FILE
from prompt_tuning.core.errors import InputError
from prompt_tuning.data.text.conversations import answers_of
from prompt_tuning.data.text.tokenizers import load_tokenizer
from prompt_tuning.server.served_models import ServedModels
from prompt_tuning.settings.data_source import DataSource
from prompt_tuning.texts.text_settings import TextSettings
from prompt_tuning.tuned import adapter_texts
from scripts import skills
from tests.support.small_runs import LENGTH, add_chat_template, write_pairs

TALK = answers_of([{"role": "user", "content": "ab"}])
DOUBLED = "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"
SIZE = len(skills.VOCABULARY)
TEMPLATED = [skills.BOS_ID, *range(SIZE, SIZE + LENGTH), *skills.encode("ab=")]


def train(files, directory, *options, **macros):
    macros = {"Run__steps": 1, "Run__save_every": 1, **macros}
    assert main(["train", *files.arguments(directory, **macros), *options]) == 0
    return directory


@pytest.fixture(scope="module")
def templated(files, tmp_path_factory):
    """A run whose data has a template."""
    directory = tmp_path_factory.mktemp("runs") / "templated"
    template = f"--gin.TEMPLATE='{{soft:{LENGTH}}}{{prompt}}='"
    return train(files, directory, "--gin_file=data/template.gin", template)


@pytest.fixture(scope="module")
def conversed(files, tmp_path_factory):
    """A run whose data has a chat template of its own."""
    folder = tmp_path_factory.mktemp("chat")
    (folder / "chat.jinja").write_text(DOUBLED)
    setting = {"DataSource__chat_template": str(folder / "chat.jinja")}
    return train(files, folder / "run", **setting)


@pytest.fixture(scope="module")
def model(files):
    return pt.load(files.decoder)


@pytest.mark.slow
def test_a_template_is_that_of_the_adapters_run(files, model, templated):
    model.load_adapter("a", templated)
    settings = TextSettings(adapter="a", new_tokens=4)
    assert model.texts.request("ab", settings).ids == TEMPLATED
    plain = model.texts.request("ab", TextSettings(adapter="base", new_tokens=4))
    assert plain.ids == [skills.BOS_ID, *skills.encode("ab")]
    served = ServedModels(model.texts, "frozen", 64)
    assert asyncio.run(served.encode_texts(["ab"], "a", "me")) == [TEMPLATED]
    tuned = pt.load_tuned(templated, base=files.decoder)
    assert tuned.texts.request("ab", TextSettings(new_tokens=4)).ids == TEMPLATED
    # The vectors of the template are those of the prompt.
    bare = tuned.texts.request("ab", TextSettings(adapter="base", new_tokens=4))
    assert bare.ids == plain.ids
    for chat in (
        lambda: model.texts.request(TALK, settings),
        lambda: asyncio.run(served.encode_chat(TALK, "a", "me")),
    ):
        with pytest.raises(InputError, match="both determine the text"):
            chat()


def test_a_chat_template_is_that_of_the_adapters_run(model, conversed):
    expected = skills.encode("abab")
    model.load_adapter("c", conversed)
    settings = TextSettings(adapter="c", chat=True, new_tokens=4)
    assert model.texts.request("ab", settings).ids == expected
    served = ServedModels(model.texts, "frozen", 64)
    ids = asyncio.run(served.encode_chat(TALK, "c", "me")).ids
    assert ids == expected
    # The model itself has no chat template.
    with pytest.raises(InputError, match="has no chat_template"):
        model.texts.request("ab", TextSettings(adapter="base", chat=True))


def test_evaluation_reads_texts_as_the_run_of_its_prompt(
    files, templated, tmp_path, capsys
):
    data = ["--eval", str(write_pairs(tmp_path / "x.jsonl", [("ab", "AB")]))]
    alone = ["--model", str(files.decoder), "--prompt", str(templated), *data]
    losses = []
    for options in (["--run", str(templated), *data], alone):
        assert main(["evaluate", *options]) == 0
        losses += re.findall(r"loss\D+([\d.]+)", capsys.readouterr().out)
    assert len(losses) == 2 and losses[0] == losses[1]
    assert main(["evaluate", *alone, "--joiner", " "]) == 2
    message = "was trained with DataSource.joiner = '', and the data is read with ' '"
    assert message in capsys.readouterr().err


def test_the_run_of_a_checkpoint_is_found(templated, tmp_path):
    (checkpoint,) = (templated / "numpy_checkpoints").glob("checkpoint_1")
    for path in (templated, checkpoint, next(checkpoint.glob("*.npy"))):
        assert adapter_texts.run_folder(path) == templated
    (tmp_path / CONFIG_FILE).touch()
    assert adapter_texts.run_folder(tmp_path / "other/prompt.npy") is None


def test_a_folder_with_a_chat_template_is_used(model, tmp_path):
    skills.save_tokenizer(tmp_path, add_bos=True)
    folder = add_chat_template(tmp_path, DOUBLED)
    source = DataSource(files=())
    encoding = adapter_texts.text_encoding_of(folder, model.prompted, source)
    assert encoding.chat(TALK, "here") == skills.encode("abab")
    settings = adapter_texts.AdapterTextSettings.read(folder)
    run = adapter_texts.with_texts_of(model.run, [settings])
    assert run.model.tokenizer == str(folder)


def test_another_tokenizer_is_refused(tmp_path):
    skills.save_tokenizer(tmp_path, add_bos=True)
    tokenizer = load_tokenizer(tmp_path)
    adapter_texts.check_same_tokenizer(tmp_path, tokenizer)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["normalizer"] = {"type": "Lowercase"}
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match="give it by --tokenizer"):
        adapter_texts.check_same_tokenizer(tmp_path, tokenizer)
