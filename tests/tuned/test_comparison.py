"""Compared systems are measured on the same tokens."""

import dataclasses
from pathlib import Path

import h5py
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from prompt_tuning.config.gin_files import read_run
from prompt_tuning.core.errors import InputError
from prompt_tuning.data.examples.context_reader import ContextRowReader
from prompt_tuning.data.examples.decoder_only_reader import DecoderOnlyRowReader
from prompt_tuning.data.rows.row_sources import Row
from prompt_tuning.data.text.tokenizers import load_tokenizer
from prompt_tuning.evaluation import aligned_examples
from prompt_tuning.settings.data_source import DataSource
from prompt_tuning.tuned.comparison import open_comparison
from scripts import random_model, skills
from tests.support.example_tables import load_for
from tests.support.small_runs import DECODER, LENGTH, write_pairs

# Only the prompt precedes the first token of the first and of the last row.
ROWS = ["abc", "nu", "fed"]
GIVEN = [0, 1, 0]
EOS = skills.EOS_ID


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model whose tokenizer does not add BOS."""
    folder = tmp_path_factory.mktemp("model") / "plain"
    random_model.write_random_model(folder, DECODER)
    skills.save_tokenizer(folder, add_bos=False)
    return folder


@pytest.fixture(scope="module")
def spaced(tmp_path_factory) -> Path:
    """A model whose tokenizer puts a space before each text, as sentencepiece does."""
    folder = tmp_path_factory.mktemp("model") / "spaced"
    random_model.write_random_model(folder, DECODER)
    pieces = ["<pad>", "<eos>", "<bos>", "\u2581", *"abcdefnup:"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_rows(path: Path, rows=ROWS, given=GIVEN, encode=skills.encode) -> Path:
    ids = np.zeros((len(rows), 8), np.int32)
    types = np.full((len(rows), 8), 2, np.int32)
    for row, (text, first) in enumerate(zip(rows, given, strict=True)):
        encoded = encode(text)
        whole = [*encoded, EOS]
        ids[row, : len(whole)] = whole
        types[row, : len(whole)] = [0] * first + [1] * (len(encoded) - first) + [3]
    with h5py.File(path, "w") as file:
        file["input_ids"], file["token_type_ids"] = ids, types
    return path


def opened(model: Path, files: Path, prompt: Path | None, **choices):
    data = {"packing": choices.pop("packing", False)}
    arguments = {
        "MODEL": str(model),
        "TRAIN_FILES": str(files),
        "EVALUATION_FILES": str(files),
        "RUN_DIRECTORY": str(files.parent / "run"),
        "PROMPT_LENGTH": LENGTH,
        "BATCH_SIZE": 4,
    } | ({} if prompt else {"Run.prompt": None})
    arguments |= {k: choices.pop(k) for k in list(choices) if "." in k}
    bindings = [f"{name}={value!r}" for name, value in arguments.items()]
    run = read_run(["runs/first_prompt.gin"], bindings)
    assert run.evaluation is not None
    held_out = dataclasses.replace(run.evaluation.data, **data)
    evaluation = dataclasses.replace(run.evaluation, data=held_out)
    return open_comparison(run, evaluation, prompt_file=prompt, **choices)


def measured(systems):
    """Returns the nats and the weight of each example, by system."""
    return {
        one.name: one.evaluator.measure(one.read()).metrics["loss"].rows
        for one in systems
    }


@pytest.fixture
def prompt(tmp_path) -> Path:
    vectors = np.random.default_rng(0).standard_normal((LENGTH, 16)).astype("f4")
    np.save(tmp_path / "mine.npy", vectors)
    return tmp_path / "mine.npy"


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
def test_an_unpredicted_first_token_counts_in_no_column(
    model, prompt, tmp_path, packing
):
    rows = write_rows(tmp_path / "rows.hdf5")
    choices = {"baseline": True, "text_prompts": ["up:"], "packing": packing}
    compared = measured(opened(model, rows, prompt, **choices))
    assert list(compared) == ["mine", "no prompt", "text 'up:'"]
    for comparison in compared.values():
        # Letters and EOS, without the first letter, which is given in the second row.
        assert comparison[:, 1].tolist() == [3, 2, 3]
    # Only the dropped tokens differ: the others have the same loss as alone.
    alone = measured(opened(model, rows, None))["no prompt"]
    np.testing.assert_allclose(compared["no prompt"], alone, rtol=1e-5)
    whole = measured(opened(model, rows, prompt))["mine"]
    assert whole[:, 1].tolist() == [4, 2, 4]
    assert (whole[[0, 2], 0] > compared["mine"][[0, 2], 0] + 0.1).all()
    np.testing.assert_allclose(whole[1], compared["mine"][1], rtol=1e-5)


@pytest.mark.slow
def test_lines_are_compared_on_the_same_tokens_too(model, prompt, tmp_path):
    lines = write_pairs(tmp_path / "a.jsonl", [("", "abc"), ("n", "u"), ("", "fed")])
    rows = write_rows(tmp_path / "rows.hdf5")
    choices = {"baseline": True, "text_prompts": ["up:"]}
    of_lines = measured(opened(model, lines, prompt, **choices))
    of_rows = measured(opened(model, rows, prompt, **choices))
    for name, metric in of_lines.items():
        np.testing.assert_allclose(metric, of_rows[name], rtol=1e-5)


@pytest.mark.slow
def test_a_text_before_empty_prompts_leaves_their_rows_unchanged(
    spaced, prompt, tmp_path
):
    """After a text, "abc" would be encoded without its leading space."""
    lines = write_pairs(tmp_path / "a.jsonl", [("", "abc"), ("", "fed")])
    tokenizer = load_tokenizer(spaced)
    assert len(tokenizer.encode("abc")) == 1 + len(tokenizer.encode_continuation("abc"))
    rows = tmp_path / "rows.hdf5"
    write_rows(rows, ["abc", "fed"], [0, 0], tokenizer.encode)
    of_lines, of_rows = (
        measured(opened(spaced, file, prompt, text_prompts=["up:"]))
        for file in (lines, rows)
    )
    for name, metric in of_lines.items():
        # The space, three letters and EOS.
        assert metric[:, 1].tolist() == [5, 5]
        np.testing.assert_allclose(metric, of_rows[name], rtol=1e-5)


@pytest.mark.slow
def test_an_example_without_remaining_tokens_is_in_no_column(model, prompt, tmp_path):
    path = write_rows(tmp_path / "rows.hdf5", ["abc", "nu"], [0, 1])
    with h5py.File(path, "a") as file:
        # The row begins with the separator of an example that is not in it.
        file["token_type_ids"][0, 0] = 3  # pyright: ignore
    systems = opened(model, path, prompt, baseline=True)
    uncounted = systems[0].evaluator.examples.uncounted
    for metric in measured(systems).values():
        assert metric[:, 1].tolist() == [2, 2]
    alone = measured(opened(model, path, prompt))["mine"]
    assert len(alone) == 3
    assert uncounted == alone[:, 1].sum() - 4 > 0


def test_a_text_prompts_tokens_count_in_no_column(model, prompt, tmp_path):
    lines = write_pairs(tmp_path / "a.jsonl", [("ab", "c"), ("n", "u")])
    every = {"evaluation/DataSource.use_token_type_ids": False}
    compared = measured(opened(model, lines, prompt, text_prompts=["up:"], **every))
    assert [comparison[:, 1].tolist() for comparison in compared.values()] == [
        [4, 3]
    ] * 2


def test_targets_are_compared_from_the_right():
    aligned = aligned_examples.align_weights
    weights = np.array([0, 1, 2], np.float32)
    assert aligned(weights, 5).tolist() == [0, 0, 0, 1, 2]
    assert aligned(weights, 2).tolist() == [1, 2]


def test_a_text_precedes_the_end_of_an_example_and_follows_bos():
    """GPT-2 has one ID for both, which types distinguish."""
    source = DataSource(files="a", use_token_type_ids=True)
    row_reader = DecoderOnlyRowReader(source, 70, 2, predicts_first_token=True)
    reading = ContextRowReader(row_reader, (8, 9), (2,))
    ids = np.array([2, 5, 2], np.int32)
    behind = reading.example(Row(ids, np.array([0, 1, 3], np.int32)))
    assert behind.inputs.tolist() == [2, 8, 9, 5, 2]
    before = reading.example(Row(ids[:1], np.array([3], np.int32)))
    assert before.inputs.tolist() == [8, 9, 2]
    assert before.weights.tolist() == [0, 0, 1]


def test_tables_with_other_examples_or_tokens_are_refused(tmp_path):
    def table(name, rows, **choices):
        file = write_rows(tmp_path / f"{name}.hdf5", rows, [0] * len(rows))
        common = {"tokenizer": None, "vocabulary_size": 70}
        examples = load_for(file, architecture="decoder_only", **common, **choices)
        return name, examples

    one = table("one", ["abc", "nu"])
    bare = table("bare", ["abc", "see"], predicts_first_token=False)
    with pytest.raises(InputError, match=r"example 1: one would count 3 tokens, which"):
        aligned_examples.align_examples([one, bare])
    with pytest.raises(InputError, match="fewer: 1 examples fit, and 2 with one"):
        aligned_examples.align_examples([one, table("fewer", ["abc"])])
