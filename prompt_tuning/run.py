"""All that one run is made of, as plain dataclasses; gin only fills them in."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from prompt_tuning.data.examples import Examples, load_examples
from prompt_tuning.data.plan import BatchPlan
from prompt_tuning.errors import InputError
from prompt_tuning.models.prompted import Prompting
from prompt_tuning.optim import ParameterGroup
from prompt_tuning.pretrained import Pretrained, PromptedModel, PromptFactory
from prompt_tuning.settings import check_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSource:
    """Data files and how they are read.

    Attributes:
      files: HDF5 files (`.hdf5`, `.h5`) or jsonl files of pairs, all of one kind.
      batch_size: rows of a batch, of all processes together.
      use_token_type_ids: whether token types say which tokens are learned.
      prompt_loss_weight: weight of type-0 tokens, with token types.
      prompt_key: jsonl key of what is given; None if nothing is.
      completion_key: jsonl key of what is learned.
      joiner: text between the two.
      add_eos: whether the end-of-sequence token closes each row and is learned.
      on_too_long: "error", or "skip" to leave long rows out and count them.
      maximum_examples: the first so many alone; None for all.
    """

    files: Sequence[str] | str
    batch_size: int = 32
    use_token_type_ids: bool = True
    prompt_loss_weight: float = 0.0
    prompt_key: str | None = "prompt"
    completion_key: str = "completion"
    joiner: str = ""
    add_eos: bool = True
    on_too_long: Literal["error", "skip"] = "error"
    maximum_examples: int | None = None

    def __post_init__(self):
        check_fields(self)

    def load(self, model: PromptedModel) -> Examples:
        """Opens and checks the files.

        Raises:
          InputError: if a file or a row cannot be used with this model.
        """
        if self.batch_size < 1:
            raise InputError(f"batch_size is {self.batch_size}, expected at least 1")
        if model.prompting.prefix_attention and (
            self.prompt_loss_weight > 0 or not self.use_token_type_ids
        ):
            raise InputError(
                "Prompting.prefix_attention lets given tokens see each other, and this "
                "data asks to learn them: they would see their own targets. Set "
                "DataSource.use_token_type_ids = True and prompt_loss_weight = 0.0"
            )
        return load_examples(
            [self.files] if isinstance(self.files, str) else list(self.files),
            architecture=model.config.architecture,
            tokenizer=model.tokenizer,
            vocabulary_size=model.config.vocabulary_size,
            maximum_length=model.maximum_length,
            predicts_first_token=model.predicts_first_token,
            use_token_type_ids=self.use_token_type_ids,
            prompt_loss_weight=self.prompt_loss_weight,
            prompt_key=self.prompt_key,
            completion_key=self.completion_key,
            joiner=self.joiner,
            add_eos=self.add_eos,
            on_too_long=self.on_too_long,
            maximum_examples=self.maximum_examples,
            bos_id=model.config.bos_id,
            eos_id=model.config.eos_id,
        )

    def plan(
        self,
        model: PromptedModel,
        examples: Examples,
        *,
        seed: int = 0,
        shuffle: bool,
        accumulate: int = 1,
    ) -> BatchPlan:
        """The order of batches: shuffled to train on, one pass to measure.

        Args:
          model: gives the positions there are.
          examples: what `load` gave.
          seed: of the order.
          shuffle: whether to shuffle; unshuffled, no batch exceeds the examples.
          accumulate: micro-batches of a batch.
        """
        size = self.batch_size if shuffle else min(self.batch_size, len(examples))
        return BatchPlan(
            examples.input_lengths,
            examples.target_lengths,
            examples.weight_counts,
            batch_size=size,
            seed=seed,
            shuffle=shuffle,
            same_tokens=model.config.architecture == "decoder_only",
            maximum_length=model.maximum_length,
            accumulate=accumulate,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is measured on held-out data.

    Attributes:
      data: the held-out files.
      exact_match: whether completions are generated and compared.
      labels: verbalizers; each example's completion is one of them, and the model's
        answer is the one it finds most likely. None if the task has no labels.
      new_tokens: most tokens to generate for an exact match.
    """

    data: DataSource
    exact_match: bool = False
    labels: Sequence[str] | None = None
    new_tokens: int = 32

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A frozen model, a prompt, data, and how long to train.

    Attributes:
      directory: where the run keeps its prompt, its log and its config.
      model: the frozen model.
      prompt: makes the prompt module; None for the model alone.
      prompting: how the prompt stands among the text; as a prefix if None.
      groups: which parameters are trained, and by which optimisers.
      data: training files; None for a run that only evaluates.
      evaluation: what is measured during and after training, or None.
      steps: optimiser steps of the whole run.
      accumulate: micro-batches of `data.batch_size` rows that make one step.
      evaluate_every: steps between evaluations; 0 for the end alone.
      save_every: steps between checkpoints; 0 for evaluations and the end alone.
      log_every: steps between lines of the log.
      keep_last: newest checkpoints that are kept.
      keep_best: metric of the evaluation and "min" or "max"; its best checkpoint is
        kept too, and is the one that evaluation and generation use.
      seed: of the prompt's start, the order of rows, and dropout.
    """

    directory: str
    model: Pretrained
    prompt: PromptFactory | None = None
    prompting: Prompting | None = None
    groups: Sequence[ParameterGroup] = ()
    data: DataSource | None = None
    evaluation: Evaluation | None = None
    steps: int = 1000
    accumulate: int = 1
    evaluate_every: int = 0
    save_every: int = 100
    log_every: int = 10
    keep_last: int = 2
    keep_best: tuple[str, str] | None = ("loss", "min")
    seed: int = 0

    def __post_init__(self):
        check_fields(self)
        for name, least in (
            ("steps", 1),
            ("accumulate", 1),
            ("evaluate_every", 0),
            ("save_every", 0),
            ("log_every", 1),
            ("keep_last", 1),
        ):
            found = getattr(self, name)
            if found < least:
                raise InputError(f"Run.{name} is {found}, expected at least {least}")
        if not isinstance(self.groups, Sequence):
            raise InputError("Run.groups is no list; write [@ParameterGroup()]")
        best = self.keep_best
        if best is not None and (len(best) != 2 or best[1] not in ("min", "max")):
            raise InputError(
                f"Run.keep_best is {best}, expected a metric and 'min' or 'max'"
            )
