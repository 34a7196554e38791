"""Compares evaluations with the model's results for each example."""

import collections
import dataclasses
import json
from pathlib import Path
from unittest import mock

import h5py
import numpy as np
import pytest

from prompt_tuning.config.gin_files import read_run
from prompt_tuning.config.run import Evaluation, Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.decoding.continue_rows import continue_rows
from prompt_tuning.decoding.row_encoding import decode_continuations
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.evaluation.evaluator import Evaluator
from prompt_tuning.evaluation.exact_match import exact_matches
from prompt_tuning.evaluation.ranking import (
    candidate_nats,
    encode_labels,
    given_tokens,
    label_nats,
)
from prompt_tuning.evaluation.results import calibrate_nats
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.pretrained.text_encoding import encode_given
from prompt_tuning.tuned.load_tuned import load_tuned
from tests.support.exhaustive import sample
from tests.support.small_runs import LENGTH, Files, write_rows

LABELS = ["fe", "nu", "se"]
PAIRS = [(f"{'ab' * n}c=", LABELS[n % 3]) for n in (1, 2, 3, 4, 5, 6)]
KINDS = ["x", "y", None, "x", "y", "y"]


def write_lines(path: Path) -> Path:
    lines = [
        {"prompt": p, "completion": c, "kind": kind, "all": [c, "other words"]}
        for (p, c), kind in zip(PAIRS, KINDS, strict=True)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with a random prompt, and a config with adjustable evaluation."""

    run: Run
    model: PromptedModel
    parameters: Parameters

    def evaluation(self, **changes) -> Evaluation:
        assert self.run.evaluation is not None
        data = {k: changes.pop(k) for k in ("files", "packing") if k in changes}
        held_out = self.run.evaluation
        return dataclasses.replace(
            held_out, data=dataclasses.replace(held_out.data, **data), **changes
        )

    def evaluator(self, **changes) -> Evaluator:
        return Evaluator(self.model, self.evaluation(**changes))

    def measured(self, **changes) -> dict[str, float]:
        return self.evaluator(**changes)(self.parameters)


def read_case(files: Files, family: str, folder: Path) -> Case:
    arguments = files.arguments(
        folder / "run",
        getattr(files, family),
        EVALUATION_FILES=str(write_lines(folder / "data.jsonl")),
    )
    bindings = [line.removeprefix("--gin.") for line in arguments[1:]]
    run = read_run(["runs/first_prompt.gin"], bindings)
    prompt = np.random.default_rng(0).standard_normal((LENGTH, 16))
    np.save(folder / "prompt.npy", 3 * prompt.astype("f4"))
    return Case(run, *load_tuned(run, folder / "prompt.npy"))


@pytest.fixture(scope="module", params=sample(1, ["decoder", "t5"]))
def case(request, files, tmp_path_factory) -> Case:
    return read_case(files, request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def decoder(files, tmp_path_factory) -> Case:
    return read_case(files, "decoder", tmp_path_factory.mktemp("decoder"))


def inputs(case: Case) -> list[list[int]]:
    """Returns the tokens of each example that are given."""
    examples = load_examples(case.evaluation().data, case.model.interface)
    return [given_tokens(examples[i], case.model) for i in range(len(examples))]


def completion_nats(case: Case) -> np.ndarray:
    """Returns the nats of each example's completion, including its end token."""
    evaluation, rows = case.evaluation(), inputs(case)
    labels = encode_labels(case.model, evaluation.data, LABELS)
    nats = label_nats(case.model, case.parameters, rows, labels, add_eos=True)
    return nats[np.arange(len(PAIRS)), [LABELS.index(c) for _, c in PAIRS]]


def test_loss_and_perplexity_are_of_all_learned_tokens(case):
    results = case.measured(metrics=["perplexity"])
    # Two letters and the end of each completion.
    nats = completion_nats(case).sum() / (3 * len(PAIRS))
    assert results["loss"] == pytest.approx(nats, rel=1e-5)
    assert results["perplexity"] == pytest.approx(np.exp(nats), rel=1e-5)


def test_rows_have_their_own_candidates_in_batches_of_bounded_size(case):
    rows = [[3 + i] * size for i, size in enumerate((1, 4, 2, 5, 3))]
    candidates = [[[4 + i], [5, 6 + i], [7] * (i + 1)] for i in range(len(rows))]
    counts = []
    model, parameters = case.model, case.parameters
    together = candidate_nats(
        model, parameters, rows, candidates, batch_size=4, on_batch=counts.append
    )
    for row, own, nats in zip(rows, candidates, together, strict=True):
        alone = label_nats(model, parameters, [row], own, add_eos=False)
        np.testing.assert_allclose(nats, alone[0], rtol=1e-5)
    # A text of 5 tokens and 3 candidates of 5 take 20; 4 rows of 10 take 40.
    assert max(counts) == 2 * 3
    assert sum(counts) == 5 * 3


def test_no_rows_are_checked_like_others(case):
    with pytest.raises(InputError, match="the model has one prompt for all rows"):
        candidate_nats(case.model, case.parameters, [], [], batch_size=4, prompt_ids=[])


def test_exact_matches_are_the_completions_that_are_generated(case):
    rows, settings = inputs(case), Sampling(new_tokens=6)
    endless = continue_rows(case.model, case.parameters, rows, settings)
    # A token that ends some rows and not others.
    counts = collections.Counter(token for row in endless for token in row[1:])
    end = counts.most_common()[-1][0]
    config = dataclasses.replace(case.model.config, stop_ids=(end,))
    model = dataclasses.replace(case.model, config=config)
    generated = continue_rows(model, case.parameters, rows, settings)
    assert 1 <= min(map(len, generated)) < max(map(len, generated)) == 6
    other = min(set(range(3, 30)) - set(counts) - {row[0] for row in endless})
    for name, changed in {
        "same": generated,
        "shorter": [row[:-1] for row in generated],
        "longer": [[*row, other] for row in generated],
        "first": [[other, *row[1:]] for row in generated],
        "last": [[*row[:-1], other] for row in generated],
    }.items():
        matches = exact_matches(
            model, case.parameters, rows, changed, new_tokens=6, batch_size=4
        )
        assert matches.tolist() == [name == "same"] * len(rows), name


def test_exact_match_is_the_same_where_texts_are_generated_too(case, monkeypatch):
    rows, settings = inputs(case), Sampling(new_tokens=6)
    generated = continue_rows(case.model, case.parameters, rows, settings)
    cut = [row[: 3 + i] for i, row in enumerate(generated)]
    texts = decode_continuations(case.model, rows, cut)
    file = Path(case.run.directory).parent / "generated.jsonl"
    lines = [
        {"prompt": p, "completion": text}
        for (p, _), text in zip(PAIRS, texts, strict=True)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluator = case.evaluator(files=str(file), exact_match=True, new_tokens=6)
    with_texts = evaluator.measure(case.parameters, with_texts=True)
    assert with_texts.generated == generated
    expected = with_texts.metrics["exact_match"].each().tolist()
    assert 0 < sum(expected) < len(PAIRS)
    passes = mock.Mock(wraps=exact_matches)
    monkeypatch.setattr("prompt_tuning.evaluation.evaluator.exact_matches", passes)
    results = evaluator.measure(case.parameters)
    assert results.metrics["exact_match"].each().tolist() == expected
    assert results.generated is None
    # The end of each completion is learned, so its loss decides.
    assert passes.call_args.args[2] == []


def test_packed_rows_are_evaluated_as_unpacked_rows(case):
    packed, whole = (case.measured(packing=packing) for packing in (True, False))
    assert packed == pytest.approx(whole, rel=1e-5)


def test_each_category_has_its_own_examples(case):
    evaluator = case.evaluator(category_key="kind", labels=LABELS)
    results = evaluator.measure(case.parameters)
    nats = completion_nats(case)
    assert list(results.by_category) == ["x", "y"]
    for name, category in results.by_category.items():
        inside = [kind == name for kind in KINDS]
        assert category["loss"].value == pytest.approx(
            nats[inside].mean() / 3, rel=1e-5
        )
        assert (
            len(category["loss"].rows)
            == sum(inside)
            == len(category["label_accuracy"].rows)
        )
    assert results.metrics["loss"].value == pytest.approx(nats.mean() / 3, rel=1e-5)


def test_text_metrics_compare_generated_texts_with_the_references(case):
    options = {"metrics": ["squad", "rouge", "bleu"], "new_tokens": 3}
    rows = [encode_given(case.model, prompt) for prompt, _ in PAIRS]
    new = continue_rows(case.model, case.parameters, rows, Sampling(new_tokens=3))
    continuations = decode_continuations(case.model, rows, new)
    wanted = {"squad_f1", "squad_exact_match", "rouge1", "rouge2", "rougeL", "bleu"}
    assert case.measured(**options).keys() == wanted | {"loss", "accuracy"}
    # A line with an empty completion is left out, and so are its references.
    lines = [{"prompt": "a", "completion": "", "all": "b"}]
    lines += [
        {"prompt": p, "completion": c, "all": [c, text + "."]}
        for (p, c), text in zip(PAIRS, continuations, strict=True)
    ]
    file = Path(case.run.directory).parent / "references.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    results = case.measured(files=str(file), references_key="all", **options)
    assert results["squad_f1"] == results["squad_exact_match"] == 1


def test_calibration_divides_by_the_scores_of_a_text_without_content(case):
    evaluator = case.evaluator(labels=LABELS, calibrate=["n=", "a"])
    results = evaluator.measure(case.parameters).ranking
    assert results is not None and results.calibrated is not None
    evaluation = case.evaluation()
    data = evaluation.data
    free = [(text, LABELS[0]) for text in ("n=", "a")]
    file = Path(case.run.directory).parent / "free.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in free)
    )
    examples = load_examples(
        dataclasses.replace(data, files=str(file)), case.model.interface
    )
    rows = [given_tokens(examples[i], case.model) for i in range(2)]
    labels = encode_labels(case.model, data, LABELS)
    without = label_nats(case.model, case.parameters, rows, labels, add_eos=True)
    expected = calibrate_nats(
        results.nats, np.repeat(without[None], len(PAIRS), axis=0)
    )
    np.testing.assert_allclose(results.calibrated, expected, rtol=1e-4, atol=1e-4)
    measured = case.measured(labels=LABELS, calibrate=["n=", "a"])
    gold = np.array([LABELS.index(c) for _, c in PAIRS])
    assert measured["calibrated_accuracy"] == np.mean(expected.argmin(1) == gold)
    assert measured["label_accuracy"] == np.mean(results.nats.argmin(1) == gold)


def test_token_categories_divide_a_row(decoder, tmp_path):
    """Several short examples can share a row of an HDF5 file."""
    rows = write_rows(tmp_path / "rows.hdf5", PAIRS)
    categories = np.full((len(PAIRS), 24), -1)
    categories[:, :] = 4
    with h5py.File(rows, "a") as file:
        types = file["token_type_ids"]
        assert isinstance(types, h5py.Dataset)
        categories[types[:] == 3] = 9
        categories[1] = -1
        file["category_ids"] = categories
    options = {"files": str(rows), "category_key": "category_ids"}
    results = decoder.evaluator(**options).measure(decoder.parameters)
    assert list(results.by_category) == ["4", "9"]
    letters, ends = (category["loss"].rows for category in results.by_category.values())
    whole = np.delete(results.metrics["loss"].rows, 1, axis=0)
    np.testing.assert_allclose(letters + ends, whole)
    assert letters[:, 1].tolist() == [2] * 5 and ends[:, 1].tolist() == [1] * 5
    names = tmp_path / "category_to_id.json"
    names.write_text(json.dumps({"letters": 4, "ends": 9}))
    named = decoder.evaluator(**options, category_names=str(names))
    assert named.categories is not None
    assert named.categories.names == ("letters", "ends")


def test_examples_that_share_a_row_are_measured_separately(decoder, tmp_path):
    """Several pairs share a row, as `prepare` packs them, after some padding."""
    alone = write_rows(tmp_path / "alone.hdf5", PAIRS)
    with h5py.File(alone, "a") as file:
        ids, types = np.array(file["input_ids"]), np.array(file["token_type_ids"])
        file["category_ids"] = np.where(types == 2, -1, np.arange(6)[:, None] % 2)
    together = tmp_path / "together.hdf5"
    packed = np.zeros((3, 3, 64), np.int32)
    packed[1], packed[2] = 2, -1
    for row in range(3):
        pair = slice(2 * row, 2 * row + 2)
        real = types[pair] != 2
        numbers = np.broadcast_to(np.arange(2)[:, None], real.shape)
        for index, values in enumerate((ids[pair], types[pair], numbers)):
            packed[index, row, 5 * row :][: real.sum()] = values[real]
    with h5py.File(together, "w") as file:
        for name, table in zip(
            ("input_ids", "token_type_ids", "category_ids"), packed, strict=True
        ):
            file[name] = table
    options = {"labels": LABELS, "exact_match": True, "new_tokens": 3}
    options |= {"category_key": "category_ids", "metrics": ["squad"]}
    measured = [
        decoder.evaluator(files=str(file), **options).measure(decoder.parameters)
        for file in (alone, together)
    ]
    assert measured[1].generated == measured[0].generated
    for expected, tallies in zip(
        *(one.groups.values() for one in measured), strict=True
    ):
        for name, tally in tallies.items():
            np.testing.assert_allclose(tally.rows, expected[name].rows, rtol=1e-5)


def test_advantages_are_used_only_in_training(decoder):
    """A setting without a scope applies to both; held-out data need not have them."""
    data = dataclasses.replace(decoder.evaluation().data, advantages_key="advantages")
    evaluation = dataclasses.replace(decoder.evaluation(), data=data)
    results = Evaluator(decoder.model, evaluation)(decoder.parameters)
    assert results == decoder.measured()


def test_a_category_without_a_name_is_refused(decoder, tmp_path):
    rows = write_rows(tmp_path / "rows.hdf5", PAIRS)
    options = {"files": str(rows), "category_key": "category_ids"}
    with pytest.raises(InputError, match=r"expected 'category_ids'; --gin\.Evaluation"):
        decoder.evaluator(**options)
    with h5py.File(rows, "a") as file:
        file["category_ids"] = np.arange(len(PAIRS))
    assert decoder.evaluator(**options).categories is not None
    with pytest.raises(InputError, match="has category 2, expected -1 for none or one"):
        decoder.evaluator(**options, category_names=["a", "b"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": ["fe"]}, "expected at least two to rank"),
        ({"labels": "fe"}, "is 'fe', a str; expected a list"),
        ({"labels": ["fe", "nu"]}, "line 2: the completion is 'se', which is none"),
        ({"calibrate": ["n"]}, "there are no labels to calibrate"),
        ({"labels": LABELS, "calibrate": []}, "calibrate is empty"),
        ({"metrics": ["f1"]}, "has 'f1', expected some of perplexity, squad, rouge"),
        ({"metrics": "squad"}, "is 'squad', a str; expected a list"),
        ({"references_key": "all"}, "but no metric uses references"),
        ({"metrics": ["squad"], "references_key": "kind"}, "line 3: 'kind' is null"),
        ({"category_key": "sort"}, "expected 'sort'; name the key with --gin.Eval"),
        ({"category_key": "all"}, "'all' is a list, expected the category's name"),
        ({"category_names": ["a"]}, "set without category_key"),
        ({"category_key": "kind", "category_names": ["a"]}, "lines name their categ"),
        ({"resamples": 0}, "resamples is 0, expected a number from 1"),
    ],
)
def test_unsupported_evaluations_are_refused(decoder, changes, message):
    with pytest.raises(InputError, match=message):
        decoder.evaluator(**changes)


def test_an_empty_file_is_refused(decoder, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="has no line, expected at least one"):
        decoder.evaluator(files=str(tmp_path / "empty.jsonl"))


def test_the_best_checkpoint_may_be_chosen_by_any_computed_metric(decoder):
    evaluator = decoder.evaluator(labels=LABELS, calibrate=["n"], metrics=["squad"])
    for name in evaluator(decoder.parameters):
        evaluator.check_metric(name, "Run.keep_best")
    with pytest.raises(InputError, match="'bleu', but the evaluation measures loss, a"):
        evaluator.check_metric("bleu", "Run.keep_best")
