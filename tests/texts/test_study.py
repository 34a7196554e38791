"""Rows about texts that a model writes itself."""

import dataclasses
import itertools
from pathlib import Path

import h5py
import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.cli.main import main
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.resumable_lines import partial_file
from prompt_tuning.core.token_weights import COMPLETION, PROMPT
from prompt_tuning.data.text.tokenizers import load_tokenizer
from prompt_tuning.decoding.continue_rows import continue_rows
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.texts.study_files import ROWS_FILE, write_study
from prompt_tuning.texts.study_rows import StudyWriter
from prompt_tuning.texts.text_study import (
    LINES,
    SEEDS,
    TextStudy,
    cut_evenly,
    cut_text,
    read_texts,
)
from scripts import random_model, recall
from tests.support import dummies, small_runs
from tests.support.small_tokenizer import CHAT, write_tokenizer

RECALL = "bundled:recall"
FACTS, _ = recall.document(3, 24)


class Words(dummies.LetterTokenizer):
    """Each word and each line break is a token, its number of characters."""

    def encode(self, text):
        words = text.replace("\n", " \n ").replace("  ", " ").strip(" ").split(" ")
        return [len(word) if word != "\n" else 0 for word in words]


def test_chunks_end_with_paragraphs_if_they_can():
    words = Words()
    short, long = "a b c d e\n\n", "ff gg\nhh ii\njj k l m n o p\n\n"
    chunks = [list(chunk) for chunk in cut_text(short * 3 + long, words, 8)]
    assert chunks[:3] == [[1] * 5 + [0, 0]] * 3
    assert max(map(len, chunks)) <= 8
    # A paragraph that is too long is cut after its lines.
    assert chunks[3] == [2, 2, 0, 2, 2, 0] and chunks[4][0] == 2


def test_parts_have_nearly_the_same_length():
    assert [len(x) for x in cut_evenly(range(10), 4)] == [3, 4, 3]


@pytest.fixture(scope="module")
def model():
    return pt.load(RECALL)


def test_lines_are_written_as_after_the_whole_chunk(model):
    study = TextStudy(rows=6, held_out=0, chunk=72, passage=4, kinds=("line",))
    texts = read_texts({"facts": FACTS}, model.prompted, study)
    assert [len(chunk.ids) for chunk in texts.chunks] == [72, 72]
    written = list(StudyWriter(texts, study, model.prompted, model.parameters).rows())
    whole = [[*texts.chunks[row.chunk].ids, *row.given] for row in written]
    sampling = Sampling(new_tokens=4)
    alone = continue_rows(model.prompted, model.parameters, whole, sampling)
    line = recall.LINE_ID
    for row, expected in zip(written, alone, strict=True):
        if line in expected:
            expected = expected[: expected.index(line) + 1]
        assert row.learned[: len(expected)] == expected
        # What is given is the beginning of a line of the chunk.
        text = list(texts.chunks[row.chunk].ids)
        starts = [0, *(n + 1 for n, token in enumerate(text) if token == line)]
        assert any(text[n : n + len(row.given)] == row.given for n in starts)


def test_continuations_begin_in_turn_with_the_first_tokens_of_all_lines(model):
    kinds = ("continuation",)
    study = TextStudy(rows=16, held_out=0, passage=4, kinds=kinds)
    facts = recall.document(3, 8)[0]
    texts = read_texts({"facts": facts}, model.prompted, study)
    written = list(StudyWriter(texts, study, model.prompted, model.parameters).rows())
    (chunk,) = texts.chunks
    firsts = [chunk.ids[n] for n in range(0, len(chunk.ids), recall.FACT)]
    assert sorted(row.given[0] for row in written[::2]) == sorted(firsts)


@pytest.mark.slow
def test_a_model_that_can_chat_asks_and_answers_about_each_chunk(tmp_path):
    template = f"{CHAT}{{% if enable_thinking %}}Hm:{{% endif %}}"
    folder = write_tokenizer(tmp_path / "model", chat_template=template)
    config = dataclasses.replace(
        small_runs.DECODER,
        vocabulary_size=264,
        maximum_positions=1024,
        pad_id=261,
        eos_id=260,
        bos_id=None,
    )
    random_model.write_random_model(folder, config)
    model = pt.load(str(folder))
    study = TextStudy(rows=10, held_out=2, chunk=32, answer=6, rounds=2)
    texts = read_texts(
        {"words": "Apple bread. Chair, dance? " * 2}, model.prompted, study
    )
    assert texts.kinds == tuple(SEEDS)
    rows = list(StudyWriter(texts, study, model.prompted, model.parameters).rows())
    assert [row.chunk for row in rows] == [0] * 6 + [1] * 6
    assert [len(row.messages) for row in rows[:4]] == [2, 4, 2, 4]
    roles = [message["role"] for message in rows[1].messages]
    assert roles == ["user", "assistant"] * 2
    for row in rows:
        *before, answer = row.messages
        text = model.prompted.needed_tokenizer().decode(row.given)
        # What was asked is the end of the row, before the turn of the assistant.
        asked = f"<|user|>\n{before[-1]['content']}\n<|assistant|>\n"
        assert text.endswith(asked)
        assert len(row.learned) in (6, *range(1, 7))
        del answer
    writer = StudyWriter(texts, study, model.prompted, model.parameters)
    summaries = writer.summaries(12)
    assert len(summaries) == 2 and all(len(x) <= 6 for x in summaries)
    # A share of the answers follows what the template writes for reasoning.
    half = dataclasses.replace(study, reasoning=0.5, rounds=1, rows=22)
    reasoned = StudyWriter(texts, half, model.prompted, model.parameters).rows()
    decode = model.prompted.needed_tokenizer().decode
    count = sum(decode(row.given).endswith("<|assistant|>\nHm:") for row in reasoned)
    assert 6 <= count <= 18
    plain = load_tokenizer(write_tokenizer(tmp_path / "plain", chat_template=CHAT))
    other = dataclasses.replace(model.prompted, tokenizer=plain)
    with pytest.raises(InputError, match="does not read the variable"):
        StudyWriter(texts, half, other, model.parameters)
    with pytest.raises(InputError, match="passage have no answers"):
        read_texts(
            {"a": FACTS}, model.prompted, TextStudy(reasoning=1, kinds=LINES[:1])
        )
    # The same chunk, number and seed are the same row.
    again = StudyWriter(texts, study, model.prompted, model.parameters)
    assert list(again.rows(done=7)) == rows[7:]


def test_rows_without_bos_have_a_token_that_predicts_the_learned_ones(tmp_path, model):
    study = TextStudy(rows=6, held_out=3, passage=4)
    texts = read_texts({"facts": FACTS}, model.prompted, study)
    assert texts.kinds == LINES and texts.begin == ()
    files = write_study(tmp_path, texts, study, model.prompted, model.parameters)
    for path in files[:2]:
        with h5py.File(path) as file:
            types = np.asarray(file["token_type_ids"])
            assert set(np.asarray(file["chunk"])) == {0}
        assert (types[:, 0] == PROMPT).all()
        assert (types == COMPLETION).any(axis=1).all()


def test_unknown_characters_are_named(tmp_path):
    folder = write_tokenizer(tmp_path / "plain", ["<unk>"])
    model = dataclasses.replace(
        pt.load("bundled:skills-decoder").prompted, tokenizer=load_tokenizer(folder)
    )
    with pytest.warns(UserWarning, match="2 of the 17 tokens of story stand for"):
        read_texts({"story": "<unk>ord of <unk> letters"}, model, TextStudy())


def test_a_short_text_shortens_no_rows_about_others(model):
    study = TextStudy(rows=64, held_out=0, kinds=["passage"])
    texts = read_texts({"short": FACTS[:20], "long": FACTS}, model.prompted, study)
    short, long = (len(chunk.ids) for chunk in texts.chunks)
    assert short < 16 and long > 40
    rows = list(StudyWriter(texts, study, model.prompted, model.parameters).rows())
    lengths = [{len(row.learned) for row in rows if row.chunk == n} for n in (0, 1)]
    assert 0 not in lengths[0] and max(lengths[1]) > 32


def test_what_is_missing_of_a_study_is_written_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("facts.txt").write_text(FACTS)
    command = ["study", "facts.txt", "--model", RECALL, "--out", "of facts"]
    sizes = ["--rows", "4", "--held_out", "0", "--kinds", "passage"]
    assert main([*command, *sizes]) == 0
    printed = capsys.readouterr().out
    assert "4 rows about 1 chunk are in" in printed
    assert "--contexts 'of facts/chunks.jsonl'" in printed
    for name in ("chunks.jsonl", ROWS_FILE):
        content = Path("of facts", name).read_bytes()
        Path("of facts", name).unlink()
        assert main([*command, *sizes]) == 0
        assert Path("of facts", name).read_bytes() == content


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        (FACTS, {"kinds": ["summary"]}, "the model has no chat template"),
        (FACTS, {"reasoning": 0.5}, "reasoning is 0.5, but the model has no chat"),
        (FACTS, {"kinds": ["summaries"]}, "expected some of passage"),
        (FACTS, {"chunk": 3}, "expected at least 8"),
        (FACTS * 9, {}, "cut it into chunks"),
        ("modu", {}, "has 2 tokens, expected at least 8"),
    ],
)
def test_what_cannot_be_studied_is_refused(model, text, settings, message):
    with pytest.raises(InputError, match=message):
        read_texts({"facts": text}, model.prompted, TextStudy(**settings))


@pytest.mark.slow
def test_a_killed_command_goes_on_with_the_same_bits_and_train_reads_them(
    files, tmp_path, monkeypatch
):
    document, out = tmp_path / "words.txt", tmp_path / "study"
    document.write_text("upper: apple=APPLE tail: chair=hair reverse: dog=god")
    sizes = ["--rows", "20", "--held_out", "4", "--chunk", "24", "--passage", "4"]
    model = ["--model", str(files.decoder)]

    def command(folder):
        return ["study", str(document), *model, "--out", str(folder), *sizes]

    write = StudyWriter.rows

    def killed(self, done=0):
        yield from itertools.islice(write(self, done), 11)
        raise small_runs.Killed

    with monkeypatch.context() as patched, pytest.raises(small_runs.Killed):
        patched.setattr(StudyWriter, "rows", killed)
        main(command(out))
    assert partial_file(out / ROWS_FILE).read_bytes().count(b"\n") == 11
    assert main(command(out)) == 0
    assert main(command(tmp_path / "whole")) == 0
    for name in ("rows.jsonl", "chunks.jsonl", "train.hdf5", "held_out.hdf5"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    loss = ["--loss", "own_context_distillation", "--context_key", "chunk"]
    data = ["--train", str(out / "train.hdf5"), "--eval", str(out / "held_out.hdf5")]
    train = ["train", *model, *data, *loss, "--steps", "2", "--batch_size", "8"]
    table = ["--contexts", str(out / "chunks.jsonl"), "--method", "prefix"]
    assert main([*train, *table, "--out", str(tmp_path / "run")]) == 0
    losses = [
        x["loss"] for x in small_runs.logged(Path(tmp_path / "run")) if "loss" in x
    ]
    assert np.isfinite(losses).all()
