"""Weights and advantages that the data contains for its tokens and rows."""

import json
from typing import Any

import h5py
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_choices import Architecture
from prompt_tuning.data.batching.batch_plan import PlannedBatch
from prompt_tuning.data.batching.batches import build_batch
from prompt_tuning.data.examples.class_examples import ClassExamples
from prompt_tuning.data.model_interface import ModelInterface
from prompt_tuning.data.rows.token_columns import ClassBalance, TokenColumns
from tests.support import dummies
from tests.support.example_tables import load_for

IDS = np.array([[3, 4, 5, 6, 7], [8, 9, 10, 11, 0], [12, 13, 14, 15, 16]], np.int32)
TYPES = np.array([[0, 0, 1, 1, 3], [0, 1, 1, 3, 2], [0, 1, 1, 1, 3]], np.int32)
DECODER = ModelInterface(architecture="decoder_only", vocabulary_size=31)
LEARNED = np.isin(TYPES, (1, 3))
WEIGHTS = np.where(TYPES == 2, 0, np.arange(1, 16).reshape(3, 5) / 8).astype("f4")


def write(path, **columns):
    with h5py.File(path, "w") as file:
        file["input_ids"], file["token_type_ids"] = IDS, TYPES
        for name, values in columns.items():
            file[name] = values
    return path


def load(path, architecture: Architecture = "decoder_only", **choices: Any):
    model = {"tokenizer": dummies.LetterTokenizer(), "vocabulary_size": 31, "eos_id": 7}
    return load_for(path, architecture, add_eos=False, **model, **choices)


def weights(examples):
    return [examples[i].weights.tolist() for i in range(len(examples))]


def without_padding(table):
    return [row[types != 2].tolist() for row, types in zip(table, TYPES, strict=True)]


def test_loss_weights_multiply_the_weights_of_the_types(tmp_path):
    path = write(tmp_path / "a.hdf5", loss_weights=WEIGHTS)
    expected = np.where(LEARNED, WEIGHTS, np.where(TYPES == 0, 0.5 * WEIGHTS, 0))
    examples = load(path, prompt_loss_weight=0.5)
    assert weights(examples) == without_padding(expected)
    assert examples.weight_counts.tolist() == [5, 4, 5]
    plain = load(path, use_loss_weights=False)
    assert weights(plain) == without_padding(LEARNED.astype("f4"))


def test_a_target_with_zero_loss_weight_is_not_computed(tmp_path):
    chosen = WEIGHTS * (np.arange(5) != 3)
    examples = load(write(tmp_path / "a.hdf5", loss_weights=chosen))
    assert examples.weight_counts.tolist() == [2, 2, 3]
    rows = np.array([0, 2])
    batch = build_batch(examples, PlannedBatch(rows, 5, 5, 3, True), 0)
    assert batch.loss_positions.tolist() == [[2, 4, 0], [1, 2, 4]]
    np.testing.assert_allclose(
        batch.loss_weights, [[0.375, 0.625, 0], [1.5, 1.625, 1.875]]
    )


def test_an_encoder_decoder_has_weights_for_its_targets(tmp_path):
    path = write(tmp_path / "a.hdf5", loss_weights=WEIGHTS)
    examples = load(path, "encoder_decoder")
    # The first row ends with EOS; the others get one with the last token's weight.
    assert examples[0].targets.tolist() == [5, 6, 7]
    assert weights(examples) == [
        [0.375, 0.5, 0.625],
        [0.875, 1.0, 1.125, 1.125],
        [1.5, 1.625, 1.75, 1.875, 1.875],
    ]


def test_every_row_has_its_weight_in_the_data(tmp_path):
    of_rows = np.array([2.0, 0.5, 1.0])
    path = write(tmp_path / "a.hdf5", loss_weights=WEIGHTS, example_weights=of_rows)
    examples = load(path, example_weight_key="example_weights")
    expected = np.where(LEARNED, WEIGHTS * of_rows[:, None], 0)
    assert weights(examples) == without_padding(expected)
    assert weights(load(path)) == without_padding(np.where(LEARNED, WEIGHTS, 0))


def write_lines(path, *lines):
    texts = ({"prompt": "ab", "completion": "cd"} | line for line in lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in texts))
    return path


def test_lines_contain_weights_classes_and_advantages(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl",
        {"w": 2, "label": "x", "a": -1.5},
        {"w": 0.5, "label": "x", "a": 0},
        {"w": 1, "label": "y", "a": 3},
    )
    assert weights(load(path)) == [[0, 0, 1, 1]] * 3
    examples = load(
        path, example_weight_key="w", balance_key="label", advantages_key="a"
    )
    # Two of "x" and one of "y": 3 / (2 * 2) and 3 / (2 * 1).
    assert weights(examples) == [[0, 0, w, w] for w in (1.5, 0.375, 1.5)]
    advantages = [examples[i].columns["advantages"] for i in range(3)]
    assert [x is not None and x.tolist() for x in advantages] == [
        [-1.5] * 4,
        [0] * 4,
        [3] * 4,
    ]


def test_all_classes_have_equal_total_weight(tmp_path):
    labels = np.array([4, 7, 7])
    examples = load(write(tmp_path / "a.hdf5", label=labels), balance_key="label")
    each = [max(row) for row in weights(examples)]
    np.testing.assert_allclose(each, [3 / 2, 3 / 4, 3 / 4])
    assert sum(each) == 3


def test_token_categories_count_only_learned_tokens(tmp_path):
    categories = np.array([[0, 0, 0, 1, 1], [0, 0, 0, 0, -1], [1, 0, 0, 0, 0]])
    path = write(tmp_path / "a.hdf5", category_ids=categories)
    examples = load(path, balance_key="category_ids")
    # Two of ten learned tokens are in category 1.
    table = np.where(categories == 1, 10 / (2 * 2), 10 / (2 * 8))
    expected = np.where(LEARNED, table, 0).astype("f4")
    assert weights(examples) == without_padding(expected)
    assert sum(map(sum, weights(examples))) == LEARNED.sum()


@pytest.mark.parametrize(
    "reading",
    [
        {},
        {"prompt_loss_weight": 0.5},
        {"use_token_type_ids": False, "use_loss_weights": False},
        {"use_token_type_ids": False, "bos_id": 8, "use_loss_weights": False},
        {"prompt_loss_weight": 0.5, "predicts_first_token": False},
        {"example_weight_key": "of_rows"},
        {"architecture": "encoder_decoder"},
    ],
)
def test_token_classes_have_equal_weight_however_weights_are_set(tmp_path, reading):
    categories = np.array([[0, 0, 5, 5, 5], [5, 5, 0, 0, 5], [0, 0, 0, 0, 0]])
    # The rows end with EOS, so that an encoder-decoder does not append targets.
    ids = np.where(TYPES == 3, 7, IDS)
    path = write(
        tmp_path / "a.hdf5",
        loss_weights=WEIGHTS,
        category_ids=categories,
        of_rows=np.array([2.0, 0.5, 1.0]),
    )
    with h5py.File(path, "a") as file:
        file["input_ids"][:] = ids  # pyright: ignore
    plain, balanced = (
        load(path, **reading),
        load(path, balance_key="category_ids", **reading),
    )
    total = dict.fromkeys((0, 5), 0.0)
    for index in range(len(balanced)):
        row, start, stop = balanced.locate(index)
        of_row = categories[row, start:stop]
        if reading.get("architecture"):
            of_row = of_row[LEARNED[row, start:stop]]
        for name in total:
            total[name] += balanced[index].weights[of_row == name].sum()
    whole = sum(plain[index].weights.sum() for index in range(len(plain)))
    np.testing.assert_allclose(list(total.values()), whole / 2, rtol=1e-6)


def test_tokens_without_a_class_have_weight_one():
    balance = ClassBalance({-1: 50, 0: 1, 1: 3})
    np.testing.assert_allclose(
        balance.weights(np.array([[-1, 0], [1, 1]])), [[1, 2], [2 / 3, 2 / 3]]
    )


@pytest.mark.parametrize("of_tokens", [True, False])
def test_advantages_have_the_positions_of_the_targets(tmp_path, of_tokens):
    given = np.arange(15).reshape(3, 5) - 7.0 if of_tokens else np.array([2.0, 0, -1])
    path = write(tmp_path / "a.hdf5", advantages=given)
    examples = load(path, advantages_key="advantages")
    assert examples.columns == ("advantages",)
    rows = np.array([2, 1])
    planned = PlannedBatch(rows, 5, 5, 4, True)
    batch = build_batch(examples, planned, 0, columns=["advantages"])
    expected = [[4, 5, 6, 7], [-1, 0, 1, 0]] if of_tokens else [[-1] * 4, [0] * 4]
    assert batch.columns["advantages"].tolist() == expected
    assert build_batch(examples, planned, 0).columns == {}


def test_examples_with_classes_have_their_answers_weights(tmp_path):
    of_rows = np.array([2.0, 0.5, 1.0])
    path = write(tmp_path / "a.hdf5", example_weights=of_rows)
    examples = load(path, example_weight_key="example_weights", prompt_loss_weight=0.1)
    class_examples = ClassExamples(examples, [[1], [2]], [0, 1, 0], DECODER)
    assert class_examples.weights.tolist() == [2, 0.5, 1]
    rows = np.array([1, -1, 0])
    batch = build_batch(class_examples, PlannedBatch(rows, 4, 4, 1, True), 0)
    assert batch.example_weights.tolist() == [0.5, 0, 2]


def changed(table, row, token, value):
    copy = np.array(table, np.float32)
    copy[row, token] = value
    return copy


@pytest.mark.parametrize(
    ("value", "row", "token", "message"),
    [
        (-0.5, 1, 2, r"row 1, token 2: loss_weights is -0.5, expected a finite"),
        (np.nan, 2, 0, r"row 2, token 0: loss_weights is nan, expected a finite"),
        (np.inf, 0, 4, r"row 0, token 4: loss_weights is inf, expected a finite"),
        (1.0, 1, 4, r"row 1, token 4: loss_weights is 1.0, expected 0: .* padding"),
    ],
)
def test_invalid_loss_weights_are_refused(tmp_path, value, row, token, message):
    bad = changed(WEIGHTS, row, token, value)
    with pytest.raises(InputError, match=message):
        load(write(tmp_path / "a.hdf5", loss_weights=bad))


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan])
def test_invalid_example_weights_are_refused(tmp_path, value):
    path = write(tmp_path / "a.hdf5", example_weights=np.array([1, 1, value]))
    with pytest.raises(InputError, match=r"a.hdf5, row 2: example_weights is"):
        load(path, example_weight_key="example_weights")
    lines = write_lines(tmp_path / "a.jsonl", {"w": 1}, {"w": value})
    with pytest.raises(InputError, match=r"a.jsonl, line 2: w is"):
        load(lines, example_weight_key="w")


@pytest.mark.parametrize("digits", [50, 300, 400])
def test_integers_beyond_float32_are_refused(tmp_path, digits):
    lines = write_lines(tmp_path / "a.jsonl", {"w": 1}, {"w": 10**digits})
    with pytest.raises(InputError, match=r"a.jsonl, line 2: w is 1000000"):
        load(lines, example_weight_key="w")


def test_missing_columns_and_columns_of_another_kind_are_refused(tmp_path):
    path = write(tmp_path / "a.hdf5", label=np.array([0.5, 1, 2]), short=np.ones(2))
    with pytest.raises(InputError, match=r"'w', which DataSource.example_weight_key"):
        load(path, example_weight_key="w")
    with pytest.raises(
        InputError, match=r"label has type float64, expected an integer"
    ):
        load(path, balance_key="label")
    with pytest.raises(InputError, match=r"short has 2 rows, expected 3"):
        load(path, advantages_key="short")
    other = write(tmp_path / "b.hdf5", loss_weights=WEIGHTS)
    with pytest.raises(InputError, match=r"only one has loss_weights"):
        load([path, other])
    lines = write_lines(tmp_path / "a.jsonl", {"w": "much", "label": [1]})
    with pytest.raises(
        InputError, match=r"line 1: 'w' is 'much', expected int or float"
    ):
        load(lines, example_weight_key="w")
    with pytest.raises(InputError, match=r"line 1: 'label' is \[1\], expected str or"):
        load(lines, balance_key="label")
    with pytest.raises(
        InputError, match=r"name the key with --gin.DataSource.advantages_key"
    ):
        load(lines, advantages_key="a")


def test_a_row_whose_weights_are_all_zero_is_refused(tmp_path):
    bad = WEIGHTS * (np.arange(3) != 1)[:, None]
    path = write(tmp_path / "a.hdf5", loss_weights=bad)
    with pytest.raises(InputError, match=r"row 1: no token has a loss weight"):
        load(path)
    with pytest.raises(InputError, match=r"row 1, from token 0: no token has"):
        load(path, "encoder_decoder")


def test_an_objective_may_read_several_columns(tmp_path):
    path = write(tmp_path / "a.hdf5", margin=[1, 2, 3], advantages=np.full((3, 5), 0.5))
    columns = {"margins": "margin", "advantages": "advantages"}
    examples = load(path, columns=columns)
    planned = PlannedBatch(np.array([2, 0]), 5, 5, 4)
    batch = build_batch(examples, planned, 0, columns=examples.columns)
    learned = batch.loss_weights != 0
    assert batch.columns["margins"].tolist() == (learned * [[3], [1]]).tolist()
    assert batch.columns["advantages"].tolist() == (learned * 0.5).tolist()


def test_two_columns_cannot_have_the_same_name():
    with pytest.raises(InputError, match="name 'balance', which has another meaning"):
        TokenColumns(columns={"balance": "margin"})


def test_an_objective_names_the_setting_of_a_column_that_is_missing(tmp_path):
    path = write(tmp_path / "a.hdf5")
    with pytest.raises(
        InputError, match=r"which DataSource.columns\['margins'\] names"
    ):
        load(path, columns={"margins": "margin"})
