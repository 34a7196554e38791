"""Prompt ensembles: prompts of one frozen model vote on each answer.

Prompt ensembling (Lester et al. 2021, section 6). The `k` prompts are one module, and
every row runs once with each prompt, in the same batches. The frozen model is thus in
memory once, and each prompt is computed once per batch.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.adapters.prompt_files import read_prompt
from prompt_tuning.config.run import Evaluation, Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.decoding.continue_rows import continue_rows
from prompt_tuning.decoding.row_checks import check_rows
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.evaluation import ranking
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.pretrained.tuning import PromptPair, Tuning
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.soft import StackedPrompts
from prompt_tuning.tuned.load_tuned import open_with

Rows = list[list[int]]
Vote = Callable[[Int[np.ndarray, "k"], Float[np.ndarray, "k C"]], int]


def majority_vote(answers: Int[np.ndarray, "k"], nats: Float[np.ndarray, "k C"]) -> int:
    """Returns the most frequent answer; among ties, the most likely one on average.

    Args:
      answers: answer of each of the `k` prompts, an index into `C` candidates.
      nats: negative log likelihood of each candidate with each prompt.
    """
    votes = np.bincount(answers, minlength=nats.shape[1])
    return int(np.where(votes == votes.max(), nats.mean(0), np.inf).argmin())


def mean_vote(answers: Int[np.ndarray, "k"], nats: Float[np.ndarray, "k C"]) -> int:
    """Returns the candidate with the highest mean log-probability."""
    del answers
    return int(nats.mean(0).argmin())


VOTES: dict[str, Vote] = {"majority": majority_vote, "mean": mean_vote}


class EnsembleResult(NamedTuple):
    """Shares of right answers."""

    together: float
    alone: tuple[float, ...]


def open_ensemble(run: Run, files: Sequence[Path]) -> tuple[PromptedModel, Parameters]:
    """Opens a run's frozen model with prompts from files.

    Args:
      run: run whose model and `prompting` are used.
      files: prompts of the same shape, in any format of `read_prompt`.

    Returns the model with `k` prompts, and all of its parameters by path.

    Raises:
      InputError: if a prompt cannot be read or has another shape, or the run tunes more
        than an input prompt.
    """
    if run.tuning.adapters or run.tuning.decoder_prompt is not None:
        raise InputError(
            "an ensemble can only use input prompts, but this run also has adapters or "
            "a prompt in the decoder"
        )
    prompts = [read_prompt(file) for file in files]
    for file, prompt in zip(files, prompts, strict=True):
        if prompt.shape != prompts[0].shape:
            raise InputError(
                f"{file} has a prompt of shape {prompt.shape} and {files[0]} one of "
                f"{prompts[0].shape}: expected prompts of the same shape"
            )
    vectors = np.stack(prompts)

    def stack(key: Key[Array, ""], vocabulary: Vocabulary) -> StackedPrompts:
        del key
        if vectors.shape[2] != vocabulary.width:
            raise InputError(
                f"{files[0]} is {vectors.shape[2]} wide and the model "
                f"{vocabulary.width}: it was trained on another model"
            )
        return StackedPrompts(jnp.asarray(vectors))

    tuning = Tuning(prompt=stack, prompting=run.tuning.prompting)
    model = open_with(run, tuning)
    return model, model.read_parameters()


def evaluate_ensemble(
    model: PromptedModel,
    parameters: Parameters,
    evaluation: Evaluation,
    vote: str = "majority",
) -> dict[str, EnsembleResult]:
    """Measures the vote of prompts, and each prompt alone.

    Args:
      model: model with `k` prompts, from `open_ensemble`.
      parameters: all of its parameters by path.
      evaluation: settings of the evaluation, with labels or `exact_match`.
      vote: "majority", or "mean" for the highest mean log-probability. The candidates
        are the labels or all generated answers; every prompt scores each of them.

    Returns:
      `label_accuracy` and `exact_match`, if the evaluation requests them.

    Raises:
      InputError: if it requests neither, or its files cannot be used.
    """
    if not evaluation.labels and not evaluation.exact_match:
        raise InputError(
            "prompts vote on answers, and this evaluation has none: give "
            f"{how_to_set('Evaluation.labels', ['LABEL', 'LABEL'])}, or "
            f"{how_to_set('Evaluation.exact_match', True)}"
        )
    single = _with_single_prompt(model)
    examples = load_examples(evaluation.data, single.interface)
    rows = [ranking.given_tokens(examples[i], single) for i in range(len(examples))]
    expected = [
        ranking.completion_tokens(examples[i], single) for i in range(len(examples))
    ]
    voters, results = _Voters(model, parameters, evaluation, rows), {}
    if evaluation.exact_match:
        answers = voters.generate()
        chosen = voters.elect(answers, VOTES[vote])
        results["exact_match"] = _ensemble_result(chosen, answers, expected)
    if evaluation.labels:
        labels = ranking.encode_labels(single, evaluation.data, evaluation.labels)
        gold = ranking.gold_label_indices(single, examples, labels, evaluation.labels)
        nats = voters.rank(labels)
        ranked = nats.argmin(2)
        voted = [VOTES[vote](ranked[:, row], nats[:, row]) for row in range(len(rows))]
        results["label_accuracy"] = _ensemble_result(voted, ranked.tolist(), gold)
    return results


def _with_single_prompt(model: PromptedModel) -> PromptedModel:
    """Returns the model with one prompt, because data rows name no prompt."""
    prompt = model.prompts.prompt
    assert isinstance(prompt, StackedPrompts)
    return dataclasses.replace(model, prompts=PromptPair(StackedPrompts(prompt()[:1])))


def _ensemble_result(
    chosen: Sequence, alone: Sequence[Sequence], expected: Sequence
) -> EnsembleResult:
    def right(answers: Sequence) -> float:
        return float(np.mean([a == b for a, b in zip(answers, expected, strict=True)]))

    return EnsembleResult(right(chosen), tuple(map(right, alone)))


@dataclasses.dataclass(frozen=True)
class _Voters:
    """The prompts of a model, which answer the rows of an evaluation."""

    model: PromptedModel
    parameters: Parameters
    evaluation: Evaluation
    rows: Rows

    def _repeated(self, rows: Rows) -> tuple[Rows, list[int]]:
        """Repeats rows for each prompt, and returns the prompt of each row."""
        count = self.model.prompt_count
        return rows * count, np.repeat(np.arange(count), len(rows)).tolist()

    def rank(self, labels: Rows) -> Float[np.ndarray, "k n C"]:
        """Computes the cost of each label for each row with each prompt."""
        model, evaluation, rows = self.model, self.evaluation, self.rows
        add_eos = evaluation.data.add_eos
        check_rows(model, rows, max(map(len, ranking.add_end(labels, model, add_eos))))
        repeated, prompt_ids = self._repeated(rows)
        nats = ranking.label_nats(
            model,
            self.parameters,
            repeated,
            labels,
            add_eos=add_eos,
            length_normalize=evaluation.length_normalize,
            batch_size=evaluation.data.batch_size,
            prompt_ids=prompt_ids,
        )
        return nats.reshape(model.prompt_count, len(rows), len(labels))

    def generate(self) -> list[Rows]:
        """Generates the answer of each prompt to each row."""
        repeated, prompt_ids = self._repeated(self.rows)
        generated = continue_rows(
            self.model,
            self.parameters,
            repeated,
            Sampling(new_tokens=self.evaluation.new_tokens),
            batch_size=self.evaluation.data.batch_size,
            prompt_ids=prompt_ids,
        )
        count = len(self.rows)
        starts = range(0, len(generated), count)
        return [generated[start : start + count] for start in starts]

    def elect(self, answers: list[Rows], vote: Vote) -> Rows:
        """Returns the winning answer of each row.

        If the prompts' answers differ, all prompts score each of them as a candidate.
        """
        rows, count = self.rows, self.model.prompt_count
        by_row = [[prompt[row] for prompt in answers] for row in range(len(rows))]
        candidates = [_distinct(row_answers) for row_answers in by_row]
        contested = [row for row, options in enumerate(candidates) if len(options) > 1]
        winners = [options[0] for options in candidates]
        if not contested:
            return winners
        most, longest = max(map(len, candidates)), self.evaluation.new_tokens
        ended = [_add_ends(candidates[row], self.model, longest) for row in contested]
        # Every row has as many candidates as the row with most: the last one repeats.
        equal = [options + options[-1:] * (most - len(options)) for options in ended]
        repeated, prompt_ids = self._repeated([rows[row] for row in contested])
        nats = ranking.candidate_nats(
            self.model,
            self.parameters,
            repeated,
            equal * count,
            batch_size=self.evaluation.data.batch_size,
            prompt_ids=prompt_ids,
        ).reshape(count, len(contested), most)
        for index, row in enumerate(contested):
            options = candidates[row]
            votes = np.array([options.index(answer) for answer in by_row[row]])
            winners[row] = options[vote(votes, nats[:, index, : len(options)])]
        return winners


def _add_ends(answers: Rows, model: PromptedModel, new_tokens: int) -> Rows:
    """Appends the end token to answers shorter than `new_tokens`."""
    return [
        ranking.add_end([answer], model, add_eos=len(answer) < new_tokens)[0]
        for answer in answers
    ]


def _distinct(answers: Rows) -> Rows:
    """Removes repeated answers, keeping the order."""
    return [list(ids) for ids in dict.fromkeys(map(tuple, answers))]
