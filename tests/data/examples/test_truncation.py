"""Examples that are too long keep the tokens that a model needs."""

import h5py
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.examples.class_examples import ClassExamples
from prompt_tuning.data.model_interface import ModelInterface
from tests.support.dummies import LetterTokenizer
from tests.support.example_tables import load_for as load

BOS, EOS = 1, 2


def write(path, ids, types, **columns):
    with h5py.File(path, "w") as file:
        file["input_ids"] = np.array(ids, np.int32)
        file["token_type_ids"] = np.array(types, np.int32)
        for name, values in columns.items():
            file[name] = np.array(values, np.float32)
    return path


@pytest.fixture
def rows(tmp_path):
    """Two rows: prompt 10 to 14 with completion 20, 21; a short one."""
    return write(
        tmp_path / "a.hdf5",
        [[BOS, 10, 11, 12, 13, 14, 20, 21, EOS], [BOS, 10, 20, EOS, *[0] * 5]],
        [[0, 0, 0, 0, 0, 0, 1, 1, 3], [0, 0, 1, 3, *[2] * 5]],
    )


def cut(rows, how, length, architecture="decoder_only", **choices):
    choices = {"bos_id": BOS, "eos_id": EOS} | choices
    return load(rows, architecture, maximum_length=length, on_too_long=how, **choices)


@pytest.mark.parametrize("how", ["truncate", "truncate_left"])
def test_a_prompt_loses_its_beginning_after_bos(rows, how):
    examples = cut(rows, how, 6)
    assert examples[0].inputs.tolist() == [BOS, 13, 14, 20, 21, EOS]
    assert examples[0].weights.tolist() == [0, 0, 0, 1, 1, 1]
    assert examples[0].prefix_length == 3
    assert examples[1].inputs.tolist() == [BOS, 10, 20, EOS]
    assert (examples.truncated, examples.skipped, len(examples)) == (1, 0, 2)
    assert examples.input_lengths.tolist() == [6, 4]
    assert examples.weight_counts.tolist() == [3, 2]


def test_a_completion_keeps_its_end(rows):
    examples = cut(rows, "truncate", 3)
    assert examples[0].inputs.tolist() == [BOS, 21, EOS]
    assert examples.weight_counts.tolist() == [2, 2]
    assert examples[1].inputs.tolist() == [BOS, 20, EOS]
    assert examples.truncated == 2


def test_the_first_token_is_learned_only_after_another(tmp_path):
    path = write(tmp_path / "a.hdf5", [[10, 20, 21, 22]], [[0, 1, 1, 1]])
    assert cut(path, "truncate", 3)[0].weights.tolist() == [1, 1, 1]
    alone = cut(path, "truncate", 3, predicts_first_token=False)
    assert alone[0].weights.tolist() == [0, 1, 1]
    assert alone.weight_counts.tolist() == [2]


def test_the_right_is_cut_if_a_learned_token_is_left(rows):
    examples = cut(rows, "truncate_right", 7)
    assert examples[0].inputs.tolist() == [BOS, 10, 11, 12, 13, 14, 20]
    assert examples[0].weights.tolist() == [0, 0, 0, 0, 0, 0, 1]
    with pytest.raises(InputError, match=r"a\.hdf5, row 0: 9 tokens, .* no learned"):
        cut(rows, "truncate_right", 6)


def test_columns_follow_their_tokens(tmp_path):
    path = write(
        tmp_path / "a.hdf5",
        [[BOS, 10, 11, 20, 21]],
        [[0, 0, 0, 1, 1]],
        loss_weights=[[0, 0, 0, 2, 3]],
        advantages=[[0, 1, 2, 3, 4]],
    )
    example = cut(path, "truncate", 3, advantages_key="advantages")[0]
    assert example.weights.tolist() == [0, 2, 3]
    assert example.columns["advantages"].tolist() == [0, 3, 4]


def test_both_texts_of_an_encoder_decoder_keep_their_eos(tmp_path):
    path = write(
        tmp_path / "a.hdf5",
        [[10, 11, 12, 13, 20, 21, 22, 23, EOS]],
        [[0, 0, 0, 0, 1, 1, 1, 1, 3]],
    )
    left = cut(path, "truncate", 3, "encoder_decoder")[0]
    assert left.inputs.tolist() == [12, 13, EOS]
    assert left.targets.tolist() == [22, 23, EOS]
    right = cut(path, "truncate_right", 3, "encoder_decoder")
    assert right[0].inputs.tolist() == [10, 11, EOS]
    assert right[0].targets.tolist() == [20, 21, EOS]
    assert right.target_lengths.tolist() == [3]
    for form, inputs in (
        ("bos_text_eos", [BOS, 13, EOS]),
        ("bos_text", [BOS, 12, 13]),
    ):
        cut_rows = cut(path, "truncate", 3, "encoder_decoder", encoder_input=form)
        assert cut_rows[0].inputs.tolist() == inputs


def test_classes_leave_room_for_the_longest_label(rows):
    model = ModelInterface(
        architecture="decoder_only", vocabulary_size=70, maximum_length=6
    )
    labels = [[20, EOS], [30, 31, 32, EOS]]
    examples = ClassExamples(cut(rows, "truncate", 6), labels, [0, 0], model)
    first, second = (row.inputs.tolist() for row in examples[0])
    assert first == [BOS, 14, 20, EOS] and second == [BOS, 14, 30, 31, 32, EOS]
    assert examples.input_lengths.tolist() == [6, 6]
    assert [row.inputs.tolist()[:2] for row in examples[1]] == [[BOS, 10]] * 2
    long = [[20, EOS], [30, 31, 32, 33, EOS]]
    with pytest.raises(InputError, match=r"a\.hdf5, row 0: with the longest label"):
        ClassExamples(cut(rows, "truncate", 6), long, [0, 0], model)


def test_the_message_about_a_long_row_names_the_options(rows):
    message = r"row 0: 9 tokens, expected at most 6 .*on_too_long.*truncate.*skip"
    with pytest.raises(InputError, match=message):
        cut(rows, "error", 6)


class TwoFirst(LetterTokenizer):
    """A tokenizer of letters that begins a text with two tokens, as GLM-4's does."""

    eos_id: int | None = 27
    begin_ids: tuple[int, ...] = (28, 29)


def test_all_tokens_that_begin_a_text_stay_together(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "abcd", "completion": "e"}\n')
    example = load(
        path, tokenizer=TwoFirst(), maximum_length=6, on_too_long="truncate"
    )[0]
    assert example.inputs.tolist() == [28, 29, 2, 3, 4, 27]
    assert example.prefix_length == 4
    example = load(path, tokenizer=TwoFirst(), context_ids=(9, 9))[0]
    assert example.inputs.tolist() == [28, 29, 9, 9, 0, 1, 2, 3, 4, 27]
    with pytest.raises(InputError, match=r"begins each row with 2 tokens \(28, 29\)"):
        load(path, tokenizer=TwoFirst(), placement="after_bos")
