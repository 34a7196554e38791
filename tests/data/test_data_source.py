"""Data files opened for a model: the resulting plans, and rejected settings."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

from prompt_tuning.config.run import DataSource
from prompt_tuning.core.errors import InputError
from prompt_tuning.data.batching.batch_plan import BucketPlan
from prompt_tuning.data.batching.batches import build_batch
from prompt_tuning.data.batching.packed_plan import PackedPlan
from prompt_tuning.data.batching.plan_batches import plan_batches
from prompt_tuning.data.examples.class_examples import ClassExamples
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.data.source_reading import joined_words
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts.multitask import AddMultiTaskPrompt
from prompt_tuning.prompts.prompt_module import PromptFactory
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.settings.pretrained import Pretrained
from prompt_tuning.settings.prompting import Prompting
from scripts import skills
from tests.support.refusals import refuses
from tests.support.small_runs import LENGTH, files, write_pairs, write_rows

__all__ = ["files"]


prompt = functools.partial(SoftPrompt, length=LENGTH)


multitask = functools.partial(AddMultiTaskPrompt, length=LENGTH, tasks=3)


def opened(folder, *, prompt: PromptFactory | None = prompt, prompting=None):
    return open_pretrained(
        Pretrained(checkpoint=str(folder)),
        Tuning(prompt=prompt, prompting=prompting),
        key=jax.random.key(0),
    )


@pytest.fixture(scope="module")
def decoder(files):
    return opened(files.decoder)


@pytest.mark.parametrize(
    ("prompt", "completion", "choices", "expected"),
    [
        ("a dull film", "bad taste", {}, "filmbad"),
        ("a dull film", " bad", {}, None),
        ("film:", "bad", {}, None),
        ("The film was bad.", "negative", {}, "bad.negative"),
        ("film", "bad", {"joiner": " "}, None),
        ("film", "bad", {"chat": True}, None),
    ],
)
def test_texts_without_a_space_between_them_are_noticed(
    tmp_path, prompt, completion, choices, expected
):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"prompt": prompt, "completion": completion}))
    assert joined_words(DataSource(files=str(file), **choices)) == expected


WORDS = ["ab=", "cd=", "ef=", "gh="]


@pytest.mark.parametrize(
    ("write", "suffix"), [(write_pairs, "jsonl"), (write_rows, "h5")]
)
def test_a_folder_is_a_data_set_of_all_its_files_in_order(
    decoder, tmp_path, write, suffix
):
    # Written in another order than that of their names.
    for name, words in (("b", WORDS[2:3]), ("c", WORDS[3:]), ("a", WORDS[:2])):
        pairs = [(word, word[:2].upper()) for word in words]
        write(tmp_path / f"{name}.{suffix}", pairs)
    (tmp_path / "README.md").write_text("About these files.")
    examples = load_examples(DataSource(files=str(tmp_path)), decoder.interface)
    ids = [examples[i].inputs.tolist() for i in range(len(examples))]
    # The first token is BOS.
    assert [row[1:4] for row in ids] == [skills.encode(word) for word in WORDS]


def source(files, **choices):
    return DataSource(files=str(files.train), **choices)


def planned(data, model, **choices):
    return plan_batches(
        data,
        model.interface,
        load_examples(data, model.interface),
        **({"shuffle": True} | choices),
    )


def test_batches_have_batch_size_rows(files, decoder):
    plan = planned(source(files, batch_size=8), decoder)
    assert isinstance(plan, BucketPlan)
    assert {len(batch.rows) for batch in plan.one_pass()} == {8}


def test_a_token_budget_replaces_batch_size(files, decoder):
    plan = planned(source(files, batch_size=8, batch_tokens=400), decoder)
    sizes = {len(batch.rows) * batch.input_length for batch in plan.one_pass()}
    assert max(sizes) <= 400
    assert max(len(batch.rows) for batch in plan.one_pass()) > 8


def test_packed_rows_have_the_requested_length(files, decoder):
    data = source(files, packing=True, packed_length=60, batch_size=2)
    plan = planned(data, decoder)
    assert isinstance(plan, PackedPlan)
    assert plan.shapes()[0].input_length == 60
    rows = np.concatenate([batch.rows for batch in plan.one_pass()])
    assert sorted(rows[rows >= 0]) == list(range(32))


def test_packed_rows_fit_the_positions_after_the_prompt(files, decoder):
    data = source(files, packing=True, packed_length=64 - LENGTH + 1)
    with pytest.raises(InputError, match="packed_length is 61, expected at most 60"):
        planned(data, decoder)


def test_examples_are_packed_for_any_prompt_placement(files):
    for prompting in (
        Prompting(prefix_attention=True),
        Prompting(placement="after_bos"),
        Prompting(execution="joined"),
    ):
        model = opened(files.decoder, prompting=prompting)
        plan = planned(source(files, packing=True, batch_size=2), model)
        assert isinstance(plan, PackedPlan)


def test_an_encoder_decoder_has_inputs_and_targets_packed(files):
    model = opened(files.t5)
    data = source(files, packing=True, packed_length=40, batch_size=2)
    examples = load_examples(data, model.interface)
    plan = plan_batches(data, model.interface, examples, shuffle=True)
    (shape,) = plan.shapes()
    batches = [build_batch(examples, planned, 0) for planned in plan.one_pass()]
    assert shape.input_length == 40
    inputs = sum(int((batch.segment_ids > 0).sum()) for batch in batches)
    targets = sum(int((batch.target_segment_ids > 0).sum()) for batch in batches)
    assert inputs == examples.input_lengths.sum()
    assert targets == examples.target_lengths.sum()
    weight = sum(float(batch.loss_weights.sum()) for batch in batches)
    assert weight == examples.weight_counts.sum()
    assert max(int(batch.segment_ids.max()) for batch in batches) > 2


def write_lines(path, **columns):
    count = len(columns["completion"])
    rows = [{key: values[i] for key, values in columns.items()} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_each_example_selects_its_prompt(files, tmp_path):
    model = opened(files.decoder, prompt=multitask)
    assert model.prompt_count == 3
    texts = {"prompt": ["ab", "cd"], "completion": ["e", "f"]}
    path = write_lines(tmp_path / "a.jsonl", **texts, task=["wic", "rte"])
    names = ["rte", "boolq", "wic"]
    data = DataSource(files=str(path), prompt_id_key="task", prompt_id_names=names)
    examples = load_examples(data, model.interface)
    assert [examples[i].prompt_id for i in (0, 1)] == [2, 0]
    # "a" and "c" are tokens 3 and 5, so sentinels from 6 down number them 2 and 0.
    token = DataSource(
        files=str(path), task_token="sentinel", sentinel_vocabulary_size=6
    )
    examples = load_examples(token, model.interface)
    assert [examples[i].prompt_id for i in (0, 1)] == [2, 0]
    assert len(examples[0].inputs) == 1 + 1 + 1 + 1
    with pytest.raises(
        InputError, match=r"task is -2, .*token 1 is 5, and task 0 is 3"
    ):
        load_examples(
            dataclasses.replace(token, sentinel_vocabulary_size=4), model.interface
        )
    # By default, the last token of the vocabulary selects the first task.
    with pytest.raises(InputError, match=f"task 0 is {len(skills.VOCABULARY) - 1}"):
        load_examples(
            dataclasses.replace(token, sentinel_vocabulary_size=None), model.interface
        )


def test_data_and_prompt_agree_on_tasks(files, decoder):
    several = opened(files.decoder, prompt=multitask)
    with pytest.raises(InputError, match="3 prompts, and the data does not select"):
        load_examples(source(files), several.interface)
    with pytest.raises(InputError, match=r"prompt_id_key is 'task', but .* one prompt"):
        load_examples(source(files, prompt_id_key="task"), decoder.interface)
    with pytest.raises(InputError, match=r"task_token is 'index', but .* one prompt"):
        load_examples(source(files, task_token="index"), decoder.interface)
    both = source(files, prompt_id_key="task", task_token="index")
    with pytest.raises(InputError, match="set one of them"):
        load_examples(both, several.interface)
    with refuses("is 'first', expected one of 'index'"):
        load_examples(source(files, task_token="first"), several.interface)


IN_TEMPLATE = Prompting(placement="template")


def test_a_template_requires_a_prompt_of_its_length(files, decoder):
    model = opened(files.decoder, prompting=IN_TEMPLATE)
    data = source(files, template="{soft:3}A: {prompt}{soft:1}")
    example = load_examples(data, model.interface)[0]
    first = model.config.vocabulary_size
    soft = [id for id in example.inputs.tolist() if id >= first]
    assert soft == [first, first + 1, first + 2, first + 3]
    # The prompt vectors are among the tokens, which can use all positions.
    assert model.maximum_length == 64
    with pytest.raises(InputError, match=r"set and Prompting.placement is 'prefix'"):
        load_examples(data, decoder.interface)
    with pytest.raises(InputError, match=r"None and Prompting.placement is 'template'"):
        load_examples(source(files), model.interface)
    with pytest.raises(InputError, match=r"5 soft vectors \(5\), but the prompt has 4"):
        load_examples(source(files, template="{soft:5}{prompt}"), model.interface)
    with pytest.raises(InputError, match=r"character 8, '{soft:x}'"):
        load_examples(source(files, template="{text} {soft:x}"), model.interface)
    rows = DataSource(files=str(files.train_rows), template="{soft:4}{prompt}")
    with pytest.raises(InputError, match="contains token ids"):
        load_examples(rows, model.interface)


def test_the_frozen_model_reads_the_templates_text(files):
    model = opened(files.decoder, prompt=None, prompting=IN_TEMPLATE)
    data = source(files, template="A: {prompt}{soft:4}")
    bare = opened(files.decoder, prompt=None)
    words = load_examples(source(files, joiner=""), bare.interface)[0]
    example = load_examples(data, model.interface)[0]
    begin, *rest = words.inputs.tolist()
    assert example.inputs.tolist() == [begin, *skills.encode("A: "), *rest]


def test_a_task_token_in_a_template_is_not_removed(files):
    model = opened(files.decoder, prompt=multitask, prompting=IN_TEMPLATE)
    data = source(files, template="{soft:4}{prompt}", task_token="index")
    with pytest.raises(InputError, match=r"the task by --prompt_id_key KEY"):
        load_examples(data, model.interface)


def test_a_prompt_loss_weight_is_refused_for_classes(files, decoder):
    data = source(files, prompt_loss_weight=0.5)
    class_examples = ClassExamples(
        load_examples(data, decoder.interface), [[5], [6]], [0] * 32, decoder.interface
    )
    with pytest.raises(InputError, match=r"prompt_loss_weight is 0.5, but .* answers"):
        plan_batches(data, decoder.interface, class_examples, shuffle=True)
    assert len(
        plan_batches(source(files), decoder.interface, class_examples, shuffle=True)
        .batch(0)
        .rows
    )


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0, expected a number from 1"),
        ({"batch_tokens": 0}, "batch_tokens is 0, expected at least 1"),
        ({"buckets": 0}, "buckets is 0, expected a number from 1"),
        ({"packed_length": 60}, "packed_length is 60, but rows are not packed"),
        ({"packed_length": 0, "packing": True}, "packed_length is 0, expected"),
    ],
)
def test_sizes_that_cannot_be_are_refused(files, decoder, choices, message):
    with pytest.raises(InputError, match=message):
        load_examples(source(files, **choices), decoder.interface)
