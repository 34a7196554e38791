"""Rows of several examples, each ended by a separator (type 3)."""

import h5py
import numpy as np
import pytest

from prompt_tuning.cli.main import main
from prompt_tuning.core.errors import InputError
from prompt_tuning.data.batching.batches import build_batch
from prompt_tuning.data.batching.packed_plan import PackedPlan
from tests.support import prepared_rows as prepared
from tests.support.example_tables import load_for as load
from tests.support.prepared_rows import PRETRAINING
from tests.support.shared_data import FIXTURES

# Two examples and padding; one example that fills a row.
IDS = [[9, 5, 10, 2, 6, 8, 2, 0], [9, 5, 6, 7, 7, 7, 7, 2]]
TYPES = [[0, 0, 1, 3, 0, 1, 3, 2], [0, 0, 0, 1, 1, 1, 1, 3]]
ARTICLES = [[9, 5, 10, 2], [6, 8, 2], [9, 5, 6, 7, 7, 7, 7, 2]]


def write(path, input_ids, token_types=None, **columns):
    with h5py.File(path, "w") as file:
        file["input_ids"] = np.array(input_ids, np.int32)
        if token_types is not None:
            file["token_type_ids"] = np.array(token_types, np.int32)
        for name, values in columns.items():
            file[name] = values
    return path


def read(examples):
    return [examples[i] for i in range(len(examples))]


def inputs(examples):
    return [example.inputs.tolist() for example in read(examples)]


def weights(examples):
    return [example.weights.tolist() for example in read(examples)]


def test_each_segment_of_a_row_is_an_example(tmp_path):
    examples = load(write(tmp_path / "a.hdf5", IDS, TYPES))
    assert inputs(examples) == ARTICLES
    assert weights(examples) == [[0, 0, 1, 1], [0, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1]]
    assert [example.prefix_length for example in read(examples)] == [2, 1, 3]
    assert examples.input_lengths.tolist() == [4, 3, 8]
    assert examples.target_lengths.tolist() == [4, 3, 8]
    assert examples.weight_counts.tolist() == [2, 2, 5]
    assert [examples.locate(i) for i in range(3)] == [(0, 0, 4), (0, 4, 7), (1, 0, 8)]


def test_rows_without_separators_are_one_example_each(tmp_path):
    path = write(tmp_path / "a.hdf5", IDS, TYPES)
    examples = load(path, separate_articles=False)
    assert inputs(examples) == [IDS[0][:7], IDS[1]]
    assert weights(examples)[0] == [0, 0, 1, 1, 0, 1, 1]
    with pytest.raises(InputError, match=r"separate_articles is False, but .* encoder"):
        load(path, "encoder_decoder", eos_id=2, separate_articles=False)


def test_every_example_begins_with_an_unlearned_token(tmp_path):
    """As at a row's start: BOS, and in a model without a prompt the first token."""
    ids, types = [[1, 5, 2, 1, 6, 7, 2]], [[1, 1, 3, 1, 1, 1, 3]]
    path = write(tmp_path / "a.hdf5", ids, types)
    assert weights(load(path)) == [[1, 1, 1], [1, 1, 1, 1]]
    assert weights(load(path, bos_id=1)) == [[0, 1, 1], [0, 1, 1, 1]]
    bare = load(path, predicts_first_token=False)
    assert weights(bare) == [[0, 1, 1], [0, 1, 1, 1]]
    assert bare.weight_counts.tolist() == [2, 3]


def test_padding_between_segments_belongs_to_neither(tmp_path):
    ids, types = [[5, 2, 0, 0, 6, 7, 2, 0]], [[1, 3, 2, 2, 0, 1, 3, 2]]
    path = write(tmp_path / "a.hdf5", ids, types)
    examples = load(path)
    assert [examples.locate(i)[1] for i in range(2)] == [0, 4]
    assert inputs(examples) == [[5, 2], [6, 7, 2]]
    # If types do not determine weights, the whole row is learned, including padding.
    every = load(path, use_token_type_ids=False)
    assert inputs(every) == [[5, 2, 0, 0], [6, 7, 2, 0]]
    assert every.weight_counts.tolist() == [4, 4]


@pytest.mark.parametrize(
    ("ids", "types", "first"),
    [
        ([0, 0, 0, 5, 6, 7, 2], [2, 2, 2, 0, 0, 1, 3], 3),
        ([0, 5, 0, 6, 7, 0, 2], [2, 0, 2, 0, 1, 2, 3], 1),
    ],
)
def test_padding_is_removed_wherever_it_stands(tmp_path, ids, types, first):
    """The examples equal those of rows without padding, whatever reads them."""
    row, row_types = [5, 6, 7, 2], [0, 0, 1, 3]
    padded = write(tmp_path / "a.hdf5", [ids], [types])
    plain = write(tmp_path / "b.hdf5", [row], [row_types])
    expected = [9, 5, 6, 7, 2]
    for choices in ({}, {"separate_articles": False}, {"context_ids": [9]}):
        one, other = load(padded, **choices), load(plain, **choices)
        assert (
            inputs(one) == inputs(other) == [expected["context_ids" not in choices :]]
        )
        assert weights(one) == weights(other)
        assert one[0].prefix_length == other[0].prefix_length
        assert one.input_lengths.tolist() == other.input_lengths.tolist()
        assert one.weight_counts.tolist() == [2]
        assert one.locate(0) == (0, first, 7)
        assert int(one.kept(0).sum()) == 4
    # Nothing predicts the first token that is not padding.
    types = [1 if kind == 0 else kind for kind in types]
    padded = write(tmp_path / "c.hdf5", [ids], [types])
    bare = load(padded, predicts_first_token=False)
    assert weights(bare) == [[0, 1, 1, 1]] and bare.weight_counts.tolist() == [3]


def test_a_task_token_after_padding_selects_the_prompt(tmp_path):
    ids, types = [[0, 0, 1, 9, 0, 8, 2]], [[2, 2, 0, 0, 2, 1, 3]]
    path = write(tmp_path / "a.hdf5", ids, types)
    examples = load(path, prompt_count=2, task_token="index")
    assert (examples[0].prompt_id, inputs(examples)) == (1, [[9, 8, 2]])
    assert examples.input_lengths.tolist() == [3]


def test_rows_padded_on_the_left_are_packed_without_padding(tmp_path):
    ids = [[0, 0, 5, 6, 7, 2], [0, 5, 0, 8, 9, 2]]
    types = [[2, 2, 0, 0, 1, 3], [2, 0, 2, 0, 1, 3]]
    examples = load(write(tmp_path / "a.hdf5", ids, types))
    plan = PackedPlan(
        examples.input_lengths,
        examples.weight_counts,
        batch_size=1,
        length=8,
        seed=0,
        shuffle=False,
    )
    batch = build_batch(examples, plan.batch(0), 0)
    assert sorted(np.asarray(batch.tokens)[0].tolist()) == [2, 2, 5, 5, 6, 7, 8, 9]
    assert batch.lengths.tolist() == [8]


def test_an_example_without_learned_tokens_is_dropped(tmp_path):
    ids, types = [[5, 6, 7, 2, 8, 9], [5, 6, 7, 7, 7, 7]], [[0] * 6, [0] * 6]
    types[0] = [0, 0, 1, 3, 0, 0]
    path = write(tmp_path / "a.hdf5", ids[:1], types[:1])
    assert inputs(load(path)) == [[5, 6, 7, 2]]
    path = write(tmp_path / "b.hdf5", ids, types)
    with pytest.raises(InputError, match="row 1: no token has a loss weight"):
        load(path)


@pytest.mark.parametrize("architecture", ["decoder_only", "encoder_decoder"])
def test_rows_in_which_nothing_is_learned_are_skipped_on_request(
    tmp_path, architecture
):
    ids = [[5, 6, 7, 2], [5, 6, 7, 7], [8, 9, 3, 2], [6, 2, 2, 2]]
    types = [[0, 0, 1, 3], [0] * 4, [0, 1, 1, 3], [0, 2, 2, 2]]
    path = write(tmp_path / "a.hdf5", ids, types)
    with pytest.raises(InputError, match=r"row 1.*on_nothing_learned"):
        load(path, architecture, eos_id=2)
    options = {"eos_id": 2, "on_nothing_learned": "skip"}
    examples = load(path, architecture, **options)
    assert [examples.locate(i)[0] for i in range(len(examples))] == [0, 2]
    assert (examples.unlearned, examples.skipped) == (2, 0)
    path = write(tmp_path / "b.hdf5", ids[1:2], types[1:2])
    with pytest.raises(InputError, match="all 1 rows: nothing is learned"):
        load(path, architecture, **options)


def test_a_row_that_loses_what_is_learned_by_a_cut_is_skipped_on_request(tmp_path):
    ids = [[5, 6, 7, 2], [8, 9, 3, 2]]
    path = write(tmp_path / "a.hdf5", ids, [[0, 0, 1, 3], [0, 1, 1, 3]])
    cut = {"maximum_length": 2, "on_too_long": "truncate_right"}
    examples = load(path, on_nothing_learned="skip", **cut)
    assert inputs(examples) == [[8, 9]]
    assert (examples.unlearned, examples.truncated) == (1, 1)


def test_a_separator_at_a_rows_start_is_learned_even_if_it_is_bos(tmp_path):
    """GPT-2 has one ID for both; `full` packing may end a row before the separator."""
    ids, types = [[2, 5, 6, 2], [2, 0, 0, 0]], [[3, 0, 1, 3], [3, 2, 2, 2]]
    path = write(tmp_path / "a.hdf5", ids, types)
    examples = load(path, bos_id=2)
    assert inputs(examples) == [[2], [5, 6, 2], [2]]
    assert weights(examples) == [[1], [0, 1, 1], [1]]
    assert [example.prefix_length for example in read(examples)] == [0, 1, 0]
    whole = load(path, bos_id=2, separate_articles=False)
    assert weights(whole) == [[1, 0, 1, 1], [1]]
    # Nothing predicts it in a model without a prompt; only the next example remains.
    path = write(tmp_path / "b.hdf5", ids[:1], types[:1])
    bare = load(path, bos_id=2, predicts_first_token=False)
    assert inputs(bare) == [[5, 6, 2]]


def test_the_columns_of_a_row_apply_to_each_of_its_examples(tmp_path):
    path = write(
        tmp_path / "a.hdf5",
        *(IDS, TYPES),
        prompt_ids=[2, 0],
        advantages=np.arange(16.0).reshape(2, 8),
        example_weights=[2.0, 0.5],
    )
    columns = {
        "advantages_key": "advantages",
        "example_weight_key": "example_weights",
    }
    actual = read(load(path, prompt_count=3, prompt_id_key="prompt_ids", **columns))
    assert [example.prompt_id for example in actual] == [2, 2, 0]
    assert [max(example.weights) for example in actual] == [2, 2, 0.5]
    advantages = [example.columns["advantages"] for example in actual]
    assert advantages[1] is not None and advantages[1].tolist() == [4, 5, 6]


def test_each_example_sets_its_own_task(tmp_path):
    ids, types = [[1, 9, 10, 2, 0, 6, 8, 2]], [[0, 0, 1, 3, 0, 0, 1, 3]]
    tasks = {"prompt_count": 2, "task_token": "index"}
    examples = load(write(tmp_path / "a.hdf5", ids, types), **tasks)
    assert [example.prompt_id for example in read(examples)] == [1, 0]
    assert inputs(examples) == [[9, 10, 2], [6, 8, 2]]
    assert weights(examples) == [[0, 1, 1], [0, 1, 1]]
    assert examples.input_lengths.tolist() == [3, 3]
    assert examples.weight_counts.tolist() == [2, 2]
    ended = write(tmp_path / "b.hdf5", [[1, 9, 2, 2]], [[0, 1, 3, 3]])
    with pytest.raises(InputError, match="row 0: token 3 should be the task"):
        load(ended, **tasks)


def test_long_rows_of_short_examples_fit(tmp_path):
    path = write(tmp_path / "a.hdf5", IDS, TYPES)
    examples = load(path, maximum_length=4, on_too_long="skip")
    assert inputs(examples) == ARTICLES[:2]
    assert examples.skipped == 1
    assert inputs(load(path, maximum_examples=2)) == ARTICLES[:2]


def test_repacked_examples_stay_separate(tmp_path):
    examples = load(write(tmp_path / "a.hdf5", IDS, TYPES))
    lengths, counts = examples.input_lengths, examples.weight_counts
    plan = PackedPlan(lengths, counts, batch_size=2, length=8, seed=0, shuffle=False)
    batch = build_batch(examples, plan.batch(0), 0)
    assert sorted(batch.lengths.tolist()) == [7, 8]
    assert sorted(map(max, batch.segment_ids.tolist())) == [1, 2]


def test_pretraining_rows_become_examples_and_their_parts():
    with h5py.File(PRETRAINING) as file:
        types = np.array(file["token_type_ids"])
    ends_a_row = [int(row[row != 2][-1] == 3) for row in types]
    examples = load(
        PRETRAINING, vocabulary_size=prepared.VOCABULARY, bos_id=prepared.END
    )
    # An example begins after each separator in a row.
    begun = prepared.TEXT_ROWS + prepared.ARTICLES - sum(ends_a_row)
    assert len(examples) == begun
    learned = prepared.TEXTS + prepared.ARTICLES
    assert examples.weight_counts.sum() == learned
    whole = load(
        PRETRAINING, vocabulary_size=prepared.VOCABULARY, separate_articles=False
    )
    assert len(whole) == prepared.TEXT_ROWS
    assert whole.weight_counts.sum() == learned
    joined = np.concatenate([example.inputs for example in read(examples)])
    rows = np.concatenate([example.inputs for example in read(whole)])
    np.testing.assert_array_equal(joined, rows)


@pytest.mark.exhaustive
def test_examples_do_not_depend_on_how_a_file_was_packed(tmp_path):
    source = FIXTURES / "data_prep/tuning.jsonl"
    tables = []
    for packing in ("single::drop", "greedy::drop"):
        output = tmp_path / packing[:6]
        options = (
            "--output",
            output,
            "--packing",
            packing,
            "--length",
            prepared.LENGTH,
        )
        tokenizer = ("--tokenizer", FIXTURES / "tokenizers/byte_level")
        assert main(["prepare", *map(str, (source, *options, *tokenizer))]) == 0
        files = sorted(output.glob("train_*.hdf5"))
        tables.append(
            load(files, vocabulary_size=prepared.VOCABULARY, bos_id=prepared.END)
        )
        assert len(tables[-1]) == prepared.ROWS
    for alone, shared in zip(*map(read, tables), strict=True):
        assert alone.inputs.tolist() == shared.inputs.tolist()
        assert alone.weights.tolist() == shared.weights.tolist()
        assert alone.prefix_length == shared.prefix_length
