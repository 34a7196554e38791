"""Several prompts over one frozen model that answer together.

Prompt ensembling (Lester et al. 2021, section 6). The `k` prompts are one module, and
each question is asked once for each prompt, in the same batches: the frozen model is in
memory once, and every prompt is run once for a batch.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.adapters.prompt_files import read_prompt
from prompt_tuning.config.run import Evaluation, Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.examples.class_examples import label_example
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.evaluation.ranking import (
    add_end,
    completion_nats,
    completion_tokens,
    encode_labels,
    given_tokens,
    gold_label_indices,
    label_nats,
)
from prompt_tuning.generation.text_generation import check_rows, continue_all
from prompt_tuning.pretrained.prompted_model import PromptedModel, open_pretrained
from prompt_tuning.pretrained.tuning import PromptPair, Tuning
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.soft import StackedPrompts

Rows = list[list[int]]
Vote = Callable[[Int[np.ndarray, "k"], Float[np.ndarray, "k C"]], int]


def majority_vote(answers: Int[np.ndarray, "k"], nats: Float[np.ndarray, "k C"]) -> int:
    """The answer of most prompts; of tied ones the most likely, on average.

    Args:
      answers: which of the `C` candidates each of `k` prompts gives.
      nats: what each candidate costs with each prompt.
    """
    votes = np.bincount(answers, minlength=nats.shape[1])
    return int(np.where(votes == votes.max(), nats.mean(0), np.inf).argmin())


def mean_vote(answers: Int[np.ndarray, "k"], nats: Float[np.ndarray, "k C"]) -> int:
    """The candidate of the greatest mean log-probability; see `majority_vote`."""
    del answers
    return int(nats.mean(0).argmin())


VOTES: dict[str, Vote] = {"majority": majority_vote, "mean": mean_vote}


class EnsembleResult(NamedTuple):
    """A share of right answers.

    Attributes:
      together: of the prompts' vote.
      alone: of each prompt.
    """

    together: float
    alone: tuple[float, ...]


def open_ensemble(run: Run, files: Sequence[Path]) -> tuple[PromptedModel, Parameters]:
    """A run's frozen model with several prompts from elsewhere.

    Args:
      run: of which model and `prompting` are used.
      files: prompts of one length, as `read_prompt` reads them.

    Returns:
      the model with `k` prompts, and all of its parameters by path.

    Raises:
      InputError: if a prompt cannot be read or is of another shape, or the run tunes
        more than a prompt among its input.
    """
    if run.tuning.adapters or run.tuning.decoder_prompt is not None:
        raise InputError(
            "an ensemble is of prompts among the input alone; this run has adapters or "
            "a prompt in the decoder beside them"
        )
    prompts = [read_prompt(file) for file in files]
    for file, prompt in zip(files, prompts, strict=True):
        if prompt.shape != prompts[0].shape:
            raise InputError(
                f"{file} holds a prompt {prompt.shape} and {files[0]} one "
                f"{prompts[0].shape}; the prompts of an ensemble have one shape"
            )
    vectors = np.stack(prompts)

    def stacked(key: Key[Array, ""], vocabulary: Vocabulary) -> StackedPrompts:
        del key
        if vectors.shape[2] != vocabulary.width:
            raise InputError(
                f"{files[0]} is {vectors.shape[2]} wide and the model "
                f"{vocabulary.width}: it was trained on another model"
            )
        return StackedPrompts(jnp.asarray(vectors))

    tuning = Tuning(prompt=stacked, prompting=run.tuning.prompting)
    model = open_pretrained(
        run.model, tuning, key=jax.random.key(run.seed), mesh=run.mesh
    )
    return model, model.read_parameters()


def evaluate_ensemble(
    model: PromptedModel,
    parameters: Parameters,
    evaluation: Evaluation,
    vote: str = "majority",
) -> dict[str, EnsembleResult]:
    """Measures what several prompts answer together, and each alone.

    Args:
      model: with `k` prompts, as `open_ensemble` makes it.
      parameters: all of its parameters by path.
      evaluation: held-out data, with labels to rank or with `exact_match`.
      vote: "majority", or "mean" for the greatest mean log-probability. Generated
        answers are candidates that all prompts score.

    Returns:
      `label_accuracy` and `exact_match`, as far as the evaluation asks for them.

    Raises:
      InputError: if it asks for neither, or its files cannot be used.
    """
    if not evaluation.labels and not evaluation.exact_match:
        raise InputError(
            "prompts vote on answers, and this evaluation has none: set "
            "Evaluation.labels, or Evaluation.exact_match = True"
        )
    one = _as_one(model)
    examples = load_examples(evaluation.data, one.interface)
    rows = [given_tokens(examples[i], one) for i in range(len(examples))]
    wanted = [completion_tokens(examples[i], one) for i in range(len(examples))]
    outcomes = {}
    if evaluation.exact_match:
        answers = _generate(model, parameters, evaluation, rows)
        chosen = _elect(model, parameters, evaluation, rows, answers, VOTES[vote])
        outcomes["exact_match"] = _outcome(chosen, answers, wanted)
    if evaluation.labels:
        labels = encode_labels(one, evaluation.data, evaluation.labels)
        gold = gold_label_indices(one, wanted, labels, evaluation.labels)
        nats = _rank(model, parameters, evaluation, rows, labels)
        ranked = nats.argmin(2)
        voted = [VOTES[vote](ranked[:, row], nats[:, row]) for row in range(len(rows))]
        outcomes["label_accuracy"] = _outcome(voted, ranked.tolist(), gold)
    return outcomes


def _as_one(model: PromptedModel) -> PromptedModel:
    """The model as its data see it: no row is of one prompt and not of another."""
    prompt = model.prompts.prompt
    assert isinstance(prompt, StackedPrompts)
    return dataclasses.replace(model, prompts=PromptPair(StackedPrompts(prompt()[:1])))


def _outcome(
    chosen: Sequence, alone: Sequence[Sequence], wanted: Sequence
) -> EnsembleResult:
    def right(answers: Sequence) -> float:
        return float(np.mean([a == b for a, b in zip(answers, wanted, strict=True)]))

    return EnsembleResult(right(chosen), tuple(map(right, alone)))


def _asked(model: PromptedModel, rows: Rows) -> tuple[Rows, list[int]]:
    """Every row once for each prompt, prompt by prompt, and the ids of the prompts."""
    count = model.prompt_count
    return rows * count, np.repeat(np.arange(count), len(rows)).tolist()


def _rank(
    model: PromptedModel,
    parameters: Parameters,
    evaluation: Evaluation,
    rows: Rows,
    labels: Rows,
) -> Float[np.ndarray, "k n C"]:
    """The nats of each label after each row with each prompt."""
    add_eos = evaluation.data.add_eos
    check_rows(model, rows, max(map(len, add_end(labels, model, add_eos))))
    asked, prompt_ids = _asked(model, rows)
    nats = label_nats(
        model,
        parameters,
        asked,
        labels,
        add_eos=add_eos,
        length_normalize=evaluation.length_normalize,
        batch_size=evaluation.data.batch_size,
        prompt_ids=prompt_ids,
    )
    return nats.reshape(model.prompt_count, len(rows), len(labels))


def _generate(
    model: PromptedModel, parameters: Parameters, evaluation: Evaluation, rows: Rows
) -> list[Rows]:
    """What each prompt continues each row with."""
    asked, prompt_ids = _asked(model, rows)
    made = continue_all(
        model,
        parameters,
        asked,
        new_tokens=evaluation.new_tokens,
        batch_size=evaluation.data.batch_size,
        prompt_ids=prompt_ids,
    )
    starts = range(0, len(made), len(rows))
    return [made[start : start + len(rows)] for start in starts]


def _elect(
    model: PromptedModel,
    parameters: Parameters,
    evaluation: Evaluation,
    rows: Rows,
    answers: list[Rows],
    vote: Vote,
) -> Rows:
    """The answer that wins for each row.

    Where prompts differ, each answer is a candidate, and all prompts say what it costs.
    """
    count = model.prompt_count
    found = [[prompt[row] for prompt in answers] for row in range(len(rows))]
    candidates = [_distinct(own) for own in found]
    contested = [row for row, own in enumerate(candidates) if len(own) > 1]
    examples = [
        label_example(model.config.architecture, rows[row], answer, prompt)
        for row in contested
        for prompt in range(count)
        for answer in _ended(candidates[row], model, evaluation.new_tokens)
    ]
    winners = [own[0] for own in candidates]
    if not contested:
        return winners
    nats = completion_nats(
        model,
        parameters,
        examples,
        batch_size=evaluation.data.batch_size,
        prompt_ids=True,
    )
    sizes = [count * len(candidates[row]) for row in contested]
    parts = np.split(nats, np.cumsum(sizes)[:-1])
    for row, part in zip(contested, parts, strict=True):
        own = candidates[row]
        given_answers = np.array([own.index(answer) for answer in found[row]])
        winners[row] = own[vote(given_answers, part.reshape(count, len(own)))]
    return winners


def _ended(answers: Rows, model: PromptedModel, new_tokens: int) -> Rows:
    """Answers with the token that ended them; one of `new_tokens` was cut instead."""
    return [
        add_end([answer], model, add_eos=len(answer) < new_tokens)[0]
        for answer in answers
    ]


def _distinct(answers: Rows) -> Rows:
    """The answers without repetitions, in their order."""
    return [list(ids) for ids in dict.fromkeys(map(tuple, answers))]
