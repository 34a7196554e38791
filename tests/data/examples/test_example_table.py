import json
from typing import Any

import h5py
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.examples.row_splitting import find_turns
from prompt_tuning.data.text.tokenizers import load_tokenizer
from tests.support import prepared_rows as prepared
from tests.support.dummies import LetterTokenizer
from tests.support.example_tables import load_for as load
from tests.support.prepared_rows import PRETRAINING, TUNING
from tests.support.refusals import refuses
from tests.support.shared_data import FIXTURES

# The two examples of "Backpropagation best practices".
FIRST = [9, 5, 6, 10, 7, 8, 2]
SECOND = [9, 5, 6, 10, 7, 8, 2, 69, 69, 69, 69]


def write(path, input_ids, token_types=None):
    with h5py.File(path, "w") as file:
        file.create_dataset("input_ids", data=np.array(input_ids, np.int32))
        if token_types is not None:
            types = np.array(token_types, np.int32)
            file.create_dataset("token_type_ids", data=types)
    return path


@pytest.mark.parametrize(
    ("ids", "types", "learned", "prefix_length"),
    [
        (FIRST, [0, 0, 0, 1, 1, 1, 3], [10, 7, 8, 2], 3),
        (FIRST, [1, 1, 0, 0, 1, 1, 3], [9, 5, 7, 8, 2], 0),
        (SECOND, [0, 0, 0, 1, 1, 1, 3, 2, 2, 2, 2], [10, 7, 8, 2], 3),
    ],
)
def test_published_examples(tmp_path, ids, types, learned, prefix_length):
    examples = load(write(tmp_path / "a.hdf5", [ids], [types]))
    example = examples[0]
    assert example.inputs.tolist() == FIRST
    assert example.targets.tolist() == FIRST
    assert example.targets[example.weights == 1].tolist() == learned
    assert example.prefix_length == prefix_length
    assert examples.input_lengths.tolist() == [7]
    assert examples.target_lengths.tolist() == [7]
    assert examples.weight_counts.tolist() == [len(learned)]


def test_an_unpredicted_first_token_has_no_weight(tmp_path):
    path = write(tmp_path / "a.hdf5", [[9, 5, 6]])
    prompted = load(path, use_token_type_ids=False)
    assert prompted[0].weights.tolist() == [1, 1, 1]
    bare = load(path, use_token_type_ids=False, predicts_first_token=False)
    assert bare[0].weights.tolist() == [0, 1, 1]
    after_bos = load(path, use_token_type_ids=False, bos_id=9)
    assert after_bos[0].weights.tolist() == [0, 1, 1]
    assert after_bos[0].prefix_length == 1
    assert after_bos.weight_counts.tolist() == [2]


def test_prompt_tokens_have_the_configured_weight(tmp_path):
    path = write(tmp_path / "a.hdf5", [[9, 5, 6]], [[0, 0, 1]])
    example = load(path, prompt_loss_weight=0.25)[0]
    assert example.weights.tolist() == [0.25, 0.25, 1]
    every = load(path, use_token_type_ids=False)[0]
    assert every.weights.tolist() == [1, 1, 1]
    assert every.prefix_length == 2


def test_prepared_files_become_examples_of_their_real_tokens():
    tuning = load(TUNING, vocabulary_size=prepared.VOCABULARY)
    assert len(tuning) == prepared.ROWS
    # One separator ends each example.
    learned = prepared.COMPLETIONS + prepared.ROWS
    assert tuning.input_lengths.sum() == prepared.PROMPTS + learned
    assert tuning.weight_counts.sum() == learned
    given = sum(tuning[index].prefix_length for index in range(prepared.ROWS))
    assert given == prepared.PROMPTS
    both = load([TUNING, PRETRAINING], vocabulary_size=prepared.VOCABULARY)
    # An example begins in a row after each separator but the last one.
    begun = prepared.TEXT_ROWS + prepared.ARTICLES - 1
    assert len(both) == prepared.ROWS + begun
    learned = prepared.TEXTS + prepared.ARTICLES
    assert both.weight_counts[prepared.ROWS :].sum() == learned
    assert both[prepared.ROWS].prefix_length == 0
    first = load(PRETRAINING, vocabulary_size=prepared.VOCABULARY, maximum_examples=3)
    assert len(first) == 3
    np.testing.assert_array_equal(first[2].inputs, both[prepared.ROWS + 2].inputs)


def test_length_tables_equal_the_examples_lengths():
    examples = load(
        TUNING,
        "encoder_decoder",
        vocabulary_size=prepared.VOCABULARY,
        eos_id=prepared.END,
    )
    read = [examples[index] for index in range(len(examples))]
    assert examples.input_lengths.tolist() == [len(e.inputs) for e in read]
    assert examples.target_lengths.tolist() == [len(e.targets) for e in read]
    assert examples.weight_counts.tolist() == [
        np.count_nonzero(e.weights) for e in read
    ]
    # The separator that ends each row is the EOS of its target.
    assert examples.target_lengths.sum() == prepared.COMPLETIONS + prepared.ROWS
    assert examples.input_lengths.sum() == prepared.PROMPTS + prepared.ROWS


def test_each_turn_of_a_row_is_an_example_of_an_encoder_decoder(tmp_path):
    ids = [[4, 9, 5, 10, 7, 2, 6, 8, 2, 69, 69], [9, 5, 10, 7, 8, 9, 6, 2, 10, 11, 12]]
    types = [[0, 0, 0, 1, 1, 3, 0, 1, 3, 2, 2], [0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1]]
    path = write(tmp_path / "a.hdf5", ids, types)
    examples = load(path, "encoder_decoder", eos_id=2, bos_id=4)
    actual = [
        (examples[i].inputs.tolist(), examples[i].targets.tolist()) for i in range(4)
    ]
    assert len(examples) == 4
    assert actual == [
        ([9, 5, 2], [10, 7, 2]),
        ([6, 2], [8, 2]),
        ([9, 5, 2], [10, 7, 8, 2]),
        ([9, 6, 2], [10, 11, 12, 2]),
    ]
    assert examples[0].weights.tolist() == [1, 1, 1]
    assert examples.input_lengths.tolist() == [3, 2, 3, 3]


@pytest.mark.parametrize(
    ("form", "inputs"),
    [("bos_text_eos", [[4, 9, 5, 2], [4, 6, 2]]), ("bos_text", [[4, 9, 5], [4, 6]])],
)
def test_inputs_have_the_special_tokens_of_the_encoder(tmp_path, form, inputs):
    ids, types = [[4, 9, 5, 10, 2, 6, 8, 2]], [[0, 0, 0, 1, 3, 0, 1, 3]]
    path = write(tmp_path / "a.hdf5", ids, types)
    choices = {"eos_id": 2, "bos_id": 4, "encoder_input": form}
    examples = load(path, "encoder_decoder", **choices)
    assert [examples[i].inputs.tolist() for i in range(2)] == inputs
    assert [examples[i].targets.tolist() for i in range(2)] == [[10, 2], [8, 2]]


def test_a_prompt_after_a_completion_begins_a_turn():
    types = np.array([0, 0, 1, 2, 3, 2, 0, 2, 0, 1])
    assert find_turns(types) == [(0, 6), (6, 10)]


def test_lines_of_movie_reviews_for_t5(tmp_path):
    path = tmp_path / "reviews.jsonl"
    path.write_text(json.dumps({"prompt": "good movie", "completion": "positive"}))
    tokenizer = load_tokenizer(FIXTURES / "tokenizers/unigram")
    example = load(path, "encoder_decoder", tokenizer=tokenizer, vocabulary_size=400)[0]
    assert tokenizer.decode(example.inputs) == "good movie"
    assert [tokenizer.token(int(i)) for i in example.targets] == [
        "\u2581positive",
        "</s>",
    ]
    assert example.inputs[-1] == 1


def test_questions_without_answers_are_learned_texts(tmp_path):
    tokenizer = load_tokenizer(FIXTURES / "tokenizers/bpe")
    path = tmp_path / "questions.jsonl"
    line = {"question": "Janet\u2019s ducks lay 16 eggs.", "answer": "16"}
    path.write_text(6 * (json.dumps(line) + "\n"))
    examples = load(
        path,
        tokenizer=tokenizer,
        vocabulary_size=400,
        prompt_key=None,
        completion_key="question",
        maximum_examples=5,
    )
    assert len(examples) == 5
    example = examples[0]
    assert tokenizer.decode(example.inputs).startswith("Janet\u2019s ducks lay 16 eggs")
    # BOS is not learned; everything else is, including EOS.
    assert example.weights.tolist() == [0] + [1] * (len(example.inputs) - 1)
    assert example.prefix_length == 1


def test_rows_that_are_too_long_are_refused_or_counted(tmp_path):
    rows = [[9, 5, 6], [9, 5, 69], [9, 69, 69]]
    types = [[0, 1, 3], [0, 1, 2], [1, 2, 2]]
    path = write(tmp_path / "a.hdf5", rows, types)
    with pytest.raises(
        InputError, match=r"a\.hdf5, row 0: 3 tokens, expected at most 2"
    ):
        load(path, maximum_length=2)
    with pytest.raises(InputError, match="prompt vectors, which are few"):
        load(path, maximum_length=2, positions_note=", which are few")
    examples = load(path, maximum_length=2, on_too_long="skip")
    assert examples.skipped == 1
    assert examples.input_lengths.tolist() == [2, 1]
    assert examples[1].inputs.tolist() == [9]
    with pytest.raises(IndexError):
        examples[2]


BAD_ROWS = [
    (
        [[9, 5], [9, 70]],
        [[0, 1], [0, 1]],
        {},
        "row 1, token 1: input_ids is 70, expected",
    ),
    (
        [[9, 5], [-1, 5]],
        None,
        {"use_token_type_ids": False},
        "row 1, .* is -1, expected",
    ),
    (
        [[9, 5], [9, 5]],
        [[0, 1], [0, 4]],
        {},
        "row 1, token 1: token_type_ids is 4, exp",
    ),
    ([[9, 5]], [[0, -1]], {}, "row 0, token 1: token_type_ids is -1, expected 0 to 3"),
    ([[9, 5], [9, 5]], [[0, 1], [0, 0]], {}, "row 1: no token has a loss weight"),
    ([[9, 5], [9, 5]], [[0, 1], [2, 2]], {}, "row 1: no token has a loss weight"),
    ([[9, 5]], [[1, 0]], {"bos_id": 9}, "row 0: no token has a loss weight"),
    (
        [[9, 5]],
        [[1, 0]],
        {"predicts_first_token": False},
        "row 0: no token has a loss weight",
    ),
    (
        [[9, 5]],
        None,
        {"use_token_type_ids": True},
        "row 0: use_token_type_ids is set, but the data has no",
    ),
    (
        [[9, 5]],
        [[0, 1]],
        {"maximum_length": 1, "on_too_long": "skip"},
        "row 0, and all 1 rows: longer than the maximum of 1",
    ),
]


@pytest.mark.parametrize(("ids", "types", "choices", "message"), BAD_ROWS)
def test_unusable_rows_are_refused(tmp_path, ids, types, choices, message):
    path = write(tmp_path / "bad.hdf5", ids, types)
    with pytest.raises(InputError, match=r"bad\.hdf5, .*" + message):
        load(path, **choices)


BAD_TURNS = [
    ([[1, 1, 3]], {}, "row 0, from token 0: no prompt .type 0. before the completion"),
    ([[1, 0, 1]], {}, "row 0, from token 0: no prompt .type 0. before the completion"),
    ([[0, 1, 0]], {}, "row 0, from token 2: no token has a loss weight"),
    ([[0, 0, 0]], {}, "row 0, from token 0: no token has a loss weight"),
    (None, {}, "row 0: no token_type_ids, which an encoder-decoder model needs"),
    ([[0, 1, 3]], {"prompt_loss_weight": 0.1}, "prompt_loss_weight is 0.1, but"),
    ([[0, 1, 3]], {"use_token_type_ids": False}, "use_token_type_ids is False, but"),
    ([[0, 1, 3]], {"joiner": " "}, "joiner is ' ', but prompt and completion"),
    ([[0, 1, 3]], {"eos_id": None}, "neither the tokenizer nor"),
]


@pytest.mark.parametrize(("types", "choices", "message"), BAD_TURNS)
def test_rows_unusable_by_an_encoder_decoder_are_refused(
    tmp_path, types, choices, message
):
    path = write(tmp_path / "bad.hdf5", [[9, 5, 2]], types)
    with pytest.raises(InputError, match=message):
        load(path, "encoder_decoder", **({"eos_id": 2} | choices))


def test_files_of_two_kinds_are_refused(tmp_path):
    table = write(tmp_path / "a.hdf5", [[9, 5]], [[0, 1]])
    lines = tmp_path / "b.jsonl"
    lines.write_text('{"prompt": "a", "completion": "b"}')
    other = tmp_path / "c.txt"
    other.write_text("a")
    for files in ([table, lines], other):
        with pytest.raises(InputError, match="expected all of one kind: "):
            load(files)
    with pytest.raises(InputError, match=r"b\.jsonl contains text, .* tokenizer"):
        load(lines)
    with pytest.raises(InputError, match=r"absent\.h5 not found"):
        load(tmp_path / "absent.h5")


def test_invalid_limits_are_refused():
    with refuses("on_too_long is 'cut', expected one of 'error'"):
        load(PRETRAINING, on_too_long="cut")
    with refuses("maximum_examples is 0, expected at least 1"):
        load(PRETRAINING, maximum_examples=0)


def with_column(path, name, values):
    with h5py.File(path, "a") as file:
        file[name] = values
    return path


def tasks_of(examples):
    return [examples[i].prompt_id for i in range(len(examples))]


def test_a_column_of_tasks(tmp_path):
    rows, types = [[9, 5, 6, 7], [9, 5, 2, 6]], [[0, 1, 0, 1], [0, 1, 2, 2]]
    path = with_column(write(tmp_path / "a.hdf5", rows, types), "prompt_ids", [2, 0])
    tasks = {"prompt_count": 3, "prompt_id_key": "prompt_ids"}
    examples = load(path, **tasks)
    assert examples.has_prompt_ids
    assert tasks_of(examples) == [2, 0]
    assert examples[0].inputs.tolist() == [9, 5, 6, 7]
    # Each turn of a row has the row's task.
    turned = load(path, "encoder_decoder", eos_id=2, **tasks)
    assert tasks_of(turned) == [2, 2, 0]
    plain = load(path)
    assert not plain.has_prompt_ids
    assert tasks_of(plain) == [0, 0]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"prompt_ids": [0, 3]}, "row 1: the task is 3, expected 0 to 2"),
        ({"prompt_ids": [-1, 0]}, "row 0: the task is -1, expected 0 to 2"),
        ({"tasks": [0, 1]}, "expected 'prompt_ids', the task of each row"),
        ({"prompt_ids": [0]}, "prompt_ids has 1 rows, expected 2"),
        ({"prompt_ids": [[0], [1]]}, r"shape \(2, 1\), expected \[rows\]"),
        ({"prompt_ids": [0.0, 1.0]}, "type float64, expected an integer type"),
    ],
)
def test_columns_that_name_no_prompt_are_refused(tmp_path, column, message):
    path = write(tmp_path / "a.hdf5", [[9, 5], [9, 6]], [[0, 1], [0, 1]])
    with pytest.raises(InputError, match=r"a\.hdf5.*" + message):
        path = with_column(path, *column.popitem())
        load(path, prompt_count=3, prompt_id_key="prompt_ids")


def test_a_task_token_is_removed_from_its_row(tmp_path):
    # Sentinels 68 and 67 select tasks 0 and 1; the rest is the example.
    rows = [[68, *FIRST], [67, 9, 5, 10, 2, 0, 0, 0]]
    types = [[0, 0, 0, 0, 1, 1, 1, 3], [0, 0, 1, 1, 3, 2, 2, 2]]
    path = write(tmp_path / "a.hdf5", rows, types)
    sentinel = {"task_token": "sentinel", "sentinel_vocabulary_size": 69}
    examples = load(path, prompt_count=2, **sentinel)
    assert tasks_of(examples) == [0, 1]
    assert [examples[i].inputs.tolist() for i in (0, 1)] == [FIRST, [9, 5, 10, 2]]
    assert examples[0].weights.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert [examples[i].prefix_length for i in (0, 1)] == [3, 1]
    assert examples.input_lengths.tolist() == [7, 4]
    assert examples.weight_counts.tolist() == [4, 3]
    without = load(path, "encoder_decoder", eos_id=2, prompt_count=2, **sentinel)
    assert tasks_of(without) == [0, 1]
    assert without[1].inputs.tolist() == [9, 2]
    assert without.input_lengths.tolist() == [4, 2]


def test_each_turn_sets_its_own_task(tmp_path):
    ids = [[1, 9, 10, 2, 0, 6, 8, 2]]
    path = write(tmp_path / "a.hdf5", ids, [[0, 0, 1, 3, 0, 0, 1, 3]])
    choices = {"eos_id": 2, "prompt_count": 2, "task_token": "index"}
    examples = load(path, "encoder_decoder", **choices)
    assert tasks_of(examples) == [1, 0]
    assert [examples[i].inputs.tolist() for i in (0, 1)] == [[9, 2], [6, 2]]


def test_rows_without_types_lose_their_task_token_too(tmp_path):
    path = write(tmp_path / "a.hdf5", [[1, 9, 5], [0, 6, 7]])
    tasks = {"prompt_count": 2, "task_token": "index"}
    examples = load(path, use_token_type_ids=False, bos_id=9, **tasks)
    assert tasks_of(examples) == [1, 0]
    # BOS follows the token, and is not learned.
    assert examples[0].inputs.tolist() == [9, 5]
    assert examples[0].weights.tolist() == [0, 1]
    assert examples[1].weights.tolist() == [1, 1]


class Beginning(LetterTokenizer):
    """A tokenizer of letters that adds BOS, 26, before a text; EOS is 27."""

    bos_id: int | None = 26
    eos_id: int | None = 27
    begin_ids: tuple[int, ...] = (26,)


def lines(path, *objects):
    path.write_text("".join(json.dumps(each) + "\n" for each in objects))
    return path


def test_a_lines_task_token_follows_bos(tmp_path):
    path = lines(tmp_path / "a.jsonl", {"prompt": "bxy", "completion": "z"})
    tasks = {"prompt_count": 2, "task_token": "index"}
    example = load(path, tokenizer=Beginning(), **tasks)[0]
    assert example.prompt_id == 1
    assert example.inputs.tolist() == [26, 23, 24, 25, 27]
    assert example.weights.tolist() == [0, 0, 0, 1, 1]
    separate = load(path, "encoder_decoder", tokenizer=Beginning(), **tasks)[0]
    assert (separate.prompt_id, separate.inputs.tolist()) == (1, [23, 24, 27])


@pytest.mark.parametrize(
    ("ids", "types", "architecture", "message"),
    [
        ([[5, 9]], [[0, 1]], "decoder_only", "row 0: the task is 5, .*id of token 0"),
        ([[1]], [[1]], "decoder_only", "row 0: no token has a loss weight"),
        ([[1, 2]], [[2, 2]], "decoder_only", "row 0: token 0 should be the task"),
        ([[1, 9]], [[0, 1]], "encoder_decoder", "no prompt .type 0. after the task"),
    ],
)
def test_rows_without_a_task_are_refused(tmp_path, ids, types, architecture, message):
    path = write(tmp_path / "a.hdf5", ids, types)
    with pytest.raises(InputError, match=message):
        load(path, architecture, eos_id=2, prompt_count=2, task_token="index")


def test_lines_name_their_task(tmp_path):
    path = lines(
        tmp_path / "a.jsonl",
        {"prompt": "a", "completion": "b", "task": "rte"},
        {"prompt": "a", "completion": "b", "task": "boolq"},
    )
    count = {"prompt_count": 2, "tokenizer": Beginning()}
    tasks = {"prompt_id_key": "task", "prompt_id_names": ["boolq", "rte"]}
    examples = load(path, **count, **tasks)
    assert tasks_of(examples) == [1, 0]
    renamed: dict[str, Any] = {"prompt_id_names": ["boolq", "entailment"]}
    renamed["prompt_id_aliases"] = {"rte": "entailment"}
    assert tasks_of(load(path, **count, **tasks | renamed)) == [1, 0]
    for alias, name in (("rte", "wic"), ("boolq", "entailment")):
        wrong = renamed | {"prompt_id_aliases": {alias: name}}
        with pytest.raises(InputError, match=f"aliases contain '{alias}' for '{name}'"):
            load(path, **count, **tasks | wrong)
    with pytest.raises(InputError, match=r"a\.jsonl, line 1: 'task' is 'rte', expect"):
        load(path, prompt_id_key="task", **count)
    with pytest.raises(InputError, match=r"line 1: found the keys .* expected 'id'"):
        load(path, prompt_id_key="id", **count)
    numbered = lines(tmp_path / "b.jsonl", {"prompt": "a", "completion": "b", "t": 4})
    with pytest.raises(InputError, match="line 1: the task is 4, expected 0 to 1"):
        load(numbered, prompt_id_key="t", **count)
    table = write(tmp_path / "a.hdf5", [[9, 5]], [[0, 1]])
    with pytest.raises(InputError, match=r"prompt_id_names are .* numbers its tasks"):
        load(table, **count, **tasks)


TEMPLATE = "{soft:2}a{text}{soft:1}"


IN_TEMPLATE: dict[str, Any] = {
    "placement": "template",
    "prompt_length": 3,
    "tokenizer": Beginning(),
}


def test_vectors_of_a_template_are_in_the_row_and_are_not_learned(tmp_path):
    path = lines(tmp_path / "a.jsonl", {"text": "bc", "completion": "de"})
    choices = {"template": TEMPLATE, "vocabulary_size": 28, **IN_TEMPLATE}
    example = load(path, **choices)[0]
    assert example.inputs.tolist() == [26, 28, 29, 0, 1, 2, 30, 3, 4, 27]
    assert example.weights.tolist() == [0] * 7 + [1] * 3
    assert example.prefix_length == 7
    # The text of a prompt may be learned, but not its vectors.
    learned = load(path, prompt_loss_weight=0.5, **choices)[0]
    assert learned.weights.tolist() == [0, 0, 0, 0.5, 0.5, 0.5, 0, 1, 1, 1]
    every = load(path, use_token_type_ids=False, **choices)
    assert every[0].weights.tolist() == [0, 0, 0, 1, 1, 1, 0, 1, 1, 1]
    assert every.weight_counts.tolist() == [6]


def test_an_encoder_reads_a_template_followed_by_eos(tmp_path):
    path = lines(tmp_path / "a.jsonl", {"text": "bc", "completion": "de"})
    examples = load(
        path,
        "encoder_decoder",
        vocabulary_size=28,
        template=TEMPLATE,
        **IN_TEMPLATE,
    )
    assert examples[0].inputs.tolist() == [28, 29, 0, 1, 2, 30, 27]
    assert examples[0].targets.tolist() == [3, 4, 27]


def test_a_template_accepts_only_texts_of_lines(tmp_path):
    table = write(tmp_path / "a.hdf5", [[9, 5]], [[0, 1]])
    with pytest.raises(InputError, match="contains token ids, not text"):
        load(table, template=TEMPLATE, **IN_TEMPLATE)
    path = lines(tmp_path / "a.jsonl", {"txt": "bc", "completion": "de"})
    choices = {"template": TEMPLATE, "vocabulary_size": 28, **IN_TEMPLATE}
    with pytest.raises(InputError, match=r"line 1: found .* with DataSource\.templ"):
        load(path, **choices)
    with pytest.raises(InputError, match="line 1: a text contains token 4, expected 0"):
        small = IN_TEMPLATE | {"prompt_length": 1, "vocabulary_size": 2}
        load(path, template="{txt}{soft:1}", **small)
