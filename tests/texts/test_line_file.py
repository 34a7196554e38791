"""Continuing the lines of a file, on the bundled decoder."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.resumable_lines import partial_file, settings_file
from prompt_tuning.decoding.beam_search import BeamSearch
from prompt_tuning.texts.line_file import LineFile
from prompt_tuning.texts.text_settings import TextSettings

ROWS = [
    {"prompt": "upper: hello=", "id": 7},
    {"prompt": "abc=", "adapter": "tuned"},
    {"prompt": "abc=", "adapter": "base", "seed": 4},
    {"prompt": "reverse: word="},
    {"prompt": "abc="},
]
TEXTS = [row["prompt"] for row in ROWS]
NEW = 5


@pytest.fixture(scope="module")
def prompt(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("lines") / "prompt.npy"
    rows = 3 * np.random.default_rng(2).normal(size=(4, 128))
    np.save(file, rows.astype("f4"))
    return file


@pytest.fixture(scope="module")
def model(prompt) -> pt.Model:
    model = pt.load("bundled:skills-decoder")
    model.load_adapter("tuned", prompt)
    return model


def write_rows(file: Path, rows: list[Any]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file.write_text("".join(f"{line}\n" for line in lines), "utf-8", "surrogatepass")
    return file


def opened(model: pt.Model, file: Path, **settings) -> LineFile:
    settings = {"new_tokens": NEW, "slots": 3, **settings}
    return LineFile(model.texts, TextSettings(**settings), file)


def generated(model: pt.Model, file: Path, **settings) -> list[dict]:
    return [json.loads(line) for line in opened(model, file, **settings).results()]


SAMPLED = pt.Sampling(temperature=1.5, top_k=9, n=2, logprobs=2, seed=1)


@pytest.mark.slow
def test_results_are_those_of_python_in_order(model, tmp_path):
    file = write_rows(tmp_path / "in.jsonl", [*ROWS[:2], "", *ROWS[2:]])
    results = generated(model, file)
    names = [None, "tuned", None, None, None]
    expected = model.generate(TEXTS, adapters=names, new_tokens=NEW)
    assert [each["output"] for each in results] == [each.text for each in expected]
    assert results[1]["output"] != results[2]["output"] == results[4]["output"]
    # An empty line has a number and no result.
    assert [each["line"] for each in results] == [1, 2, 4, 5, 6]
    assert [each["input"] for each in results] == TEXTS
    assert results[0]["output"] == "HELLO" and results[0]["output_tokens"] == 5
    # A token is a letter, and BOS precedes them.
    assert results[0]["input_tokens"] == len(TEXTS[0]) + 1
    assert results[0]["finish_reason"] == "length"
    assert [each.get("record") for each in results] == [
        {"id": 7},
        {"adapter": "tuned"},
        {"adapter": "base", "seed": 4},
        None,
        None,
    ]


@pytest.mark.slow
def test_samples_and_their_probabilities_are_those_of_python(model, tmp_path):
    file = write_rows(tmp_path / "in.jsonl", [{"prompt": text} for text in TEXTS])
    results = generated(model, file, sampling=SAMPLED)
    settings = pt.Sampling(
        temperature=1.5, top_k=9, n=2, logprobs=2, seed=1, new_tokens=NEW
    )
    completions = iter(model.generate(TEXTS, sampling=settings))
    for result in results:
        assert "output" not in result and len(result["outputs"]) == 2
        for output, completion in zip(result["outputs"], completions, strict=False):
            assert output["output"] == completion.text
            ids = [token["id"] for token in output["logprobs"]]
            assert ids == list(completion.ids)
            for token in output["logprobs"]:
                assert token["logprob"] <= token["top"][0]["logprob"] <= 0
                assert len(token["top"]) == 2
    # Equal texts draw differently, but for those with a seed.
    seeded = [{"prompt": "abc=", "seed": 5}] * 2
    one, two = generated(
        model, write_rows(tmp_path / "seeded.jsonl", seeded), sampling=SAMPLED
    )
    assert one["outputs"] == two["outputs"]
    assert results[1]["outputs"] != results[2]["outputs"]


def test_a_result_does_not_depend_on_other_lines(model, tmp_path):
    together = generated(
        model, write_rows(tmp_path / "all.jsonl", ROWS), sampling=SAMPLED
    )
    for row, expected in zip(ROWS, together, strict=True):
        (alone,) = generated(
            model, write_rows(tmp_path / "one.jsonl", [row]), sampling=SAMPLED
        )
        assert {**alone, "line": 0} == {**expected, "line": 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.5, "top_k": 9, "seed": 3, "new_tokens": NEW},
        {"sampling": pt.Sampling(temperature=1.5, top_k=9, seed=3, new_tokens=NEW)},
    ],
    ids=["texts", "completions"],
)
def test_a_drawn_row_does_not_depend_on_its_number(model, settings):
    upper, *same, word, again = model.generate(TEXTS, **settings)
    # Equal texts draw differently, in their order.
    assert TEXTS[1] == TEXTS[2] == TEXTS[4]
    assert same[0] != same[1] != again != same[0]
    order = [TEXTS[i] for i in (3, 1, 2, 0)]
    assert model.generate(order, **settings) == [word, *same, upper]
    assert model.generate(TEXTS[3], **settings) == [word]


def test_beams_are_those_of_python(model, tmp_path):
    file = write_rows(tmp_path / "in.jsonl", [{"prompt": text} for text in TEXTS[:2]])
    beams = BeamSearch(beams=3, returned=2)
    results = generated(model, file, beams=beams)
    expected = model.generate(
        TEXTS[:2], sampling=BeamSearch(beams=3, returned=2, new_tokens=NEW)
    )
    outputs = [each["output"] for result in results for each in result["outputs"]]
    assert outputs == [each.text for each in expected]
    for result in results:
        scores = [each["score"] for each in result["outputs"]]
        assert scores == sorted(scores, reverse=True)


def write(model, file: Path, output: Path, **settings) -> int:
    generation = opened(model, file, **settings)
    return generation.write(output, lambda _: None)


def test_a_file_that_is_cut_is_continued_to_the_same_bytes(model, tmp_path):
    file = write_rows(tmp_path / "in.jsonl", [*ROWS[:2], "", *ROWS[2:]])
    lines = opened(model, file, sampling=SAMPLED)
    output = tmp_path / "out.jsonl"
    assert lines.write(output, lambda _: None) == 0
    whole = output.read_bytes()
    assert [json.loads(line)["line"] for line in whole.splitlines()] == [1, 2, 4, 5, 6]
    # A write that stops before its first result leaves the settings.
    state = tmp_path / "state.jsonl"

    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lines.write(state, stop)
    settings = settings_file(state).read_bytes()
    ends = [0, *itertools.accumulate(map(len, whole.splitlines(keepends=True)))]
    # `test_resumable_lines` cuts at every byte.
    for size in {1, *ends, *(end - 1 for end in ends[1:])}:
        cut = tmp_path / f"{size}.jsonl"
        partial_file(cut).write_bytes(whole[:size])
        settings_file(cut).write_bytes(settings)
        moved = []
        assert lines.write(cut, moved.append) == whole[:size].count(b"\n")
        assert cut.read_bytes() == whole
        assert sum(moved) == lines.count


def test_results_of_others_are_not_continued(model, tmp_path):
    file = write_rows(tmp_path / "in.jsonl", ROWS)
    output = tmp_path / "out.jsonl"

    def stop(count):
        if count:
            raise KeyboardInterrupt

    def begin(**settings):
        generation = opened(model, file, **settings)
        with pytest.raises(KeyboardInterrupt):
            generation.write(output, stop)

    begin()
    begun = partial_file(output).read_bytes()
    with pytest.raises(InputError, match=r"temperature \(0.0, now 0.5\).*--force"):
        write(model, file, output, sampling=pt.Sampling(temperature=0.5))
    other = write_rows(tmp_path / "other.jsonl", [*ROWS[:4], {"prompt": "abd="}])
    with pytest.raises(InputError, match="with other settings: input"):
        write(model, other, output)
    without = pt.load("bundled:skills-decoder")
    plain = write_rows(tmp_path / "plain.jsonl", [ROWS[0]])
    with pytest.raises(InputError, match="weights of tuned"):
        write(without, plain, output)
    assert partial_file(output).read_bytes() == begun
    assert write(model, file, output) == 1
    # Results of other lines, though with these settings.
    output.unlink()
    begin()
    partial_file(output).write_text('{"line": 2}\n')
    with pytest.raises(InputError, match=r"end with line 2 .* expected 1"):
        write(model, file, output)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": ', "is not valid JSON"),
        ("[1]", "expected an object"),
        ({}, "has no 'prompt'"),
        ({"prompt": 3}, "expected a text"),
        ({"prompt": "a=", "messages": []}, "leave out one"),
        ({"prompt": "a=", "adapter": "tunde"}, "did you mean tuned?"),
        ({"prompt": "a=", "adapter": 1}, "expected a text"),
        ({"prompt": "a=", "seed": -1}, "expected a whole number from 0"),
        ({"prompt": "a=", "prompt_id": 0}, "leave them out"),
        ({"prompt": "a" * 200}, "do not fit"),
        ({"prompt": "h\u00e9="}, "cannot be encoded"),
        ({"messages": [{"role": "user"}]}, "must be a list of objects"),
        ({"messages": [{"role": "user", "content": "a"}]}, "chat_template"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "chat_template"),
        ({"prompt": "\ud800"}, "cannot be encoded"),
    ],
)
def test_a_line_that_cannot_be_continued_is_named(row, message, model, tmp_path):
    file = write_rows(tmp_path / "in.jsonl", [ROWS[0], row, ROWS[1]])
    with pytest.raises(InputError, match=r"in\.jsonl, line 2") as found:
        opened(model, file)
    assert message in str(found.value) and str(found.value).count("in.jsonl") == 1
