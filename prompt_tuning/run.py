"""All that one run is made of, as plain dataclasses; gin only fills them in."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

from prompt_tuning.data.examples import Examples, load_examples
from prompt_tuning.data.packing import PackedPlan
from prompt_tuning.data.plan import BatchPlan, BucketPlan
from prompt_tuning.errors import InputError
from prompt_tuning.models.config import Architecture
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
      batch_tokens: in its place, most tokens of a batch, padding included: short rows
        come in larger batches. `batch_size` is then of rows that are generated or
        ranked alone.
      buckets: most lengths that rows are padded to, each of which is compiled; they are
        chosen to leave little padding.
      packing: whether a row holds several examples, each of which sees the prompt and
        itself alone (decoder-only models, with the prompt as a prefix). All batches
        have one shape then, and `batch_size` is of packed rows.
      packed_length: tokens of a packed row; None for room for four average examples.
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
    batch_tokens: int | None = None
    buckets: int = 8
    packing: bool = False
    packed_length: int | None = None
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
        self._check_batches(model)
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

        Raises:
          InputError: if the examples do not fit the sizes asked for.
        """
        if self.packing:
            plan = functools.partial(PackedPlan, length=self.packed_length)
        else:
            plan = functools.partial(
                BucketPlan,
                target_lengths=examples.target_lengths,
                same_tokens=model.config.architecture == "decoder_only",
                buckets=self.buckets,
            )
        return plan(
            examples.input_lengths,
            weight_counts=examples.weight_counts,
            batch_size=self.batch_size if self.batch_tokens is None else None,
            batch_tokens=self.batch_tokens,
            seed=seed,
            shuffle=shuffle,
            maximum_length=model.maximum_length,
            accumulate=accumulate,
        )

    def _check_batches(self, model: PromptedModel) -> None:
        for name in ("batch_size", "batch_tokens", "buckets", "packed_length"):
            found = getattr(self, name)
            if found is not None and found < 1:
                raise InputError(f"{name} is {found}, expected at least 1")
        if self.packing:
            check_packing(model.config.architecture, model.prompting)
        elif self.packed_length is not None:
            raise InputError(
                f"packed_length is {self.packed_length}, but rows are not packed: set "
                "DataSource.packing = True as well, or leave it out"
            )


def check_packing(architecture: Architecture, prompting: Prompting) -> None:
    """Refuses to pack where the model cannot keep the examples of a row apart.

    Raises:
      InputError: with what stands against it, and what to set.
    """
    reasons = {
        "an encoder-decoder model cannot read packed rows": (
            architecture != "decoder_only"
        ),
        "Prompting.prefix_attention lets given tokens see each other both ways": (
            prompting.prefix_attention
        ),
        f"Prompting.placement is {prompting.placement!r}, and the examples of a row "
        "share one prompt, which stands before them all ('prefix')": (
            prompting.placement != "prefix"
        ),
        "Prompting.execution is 'joined', and the examples of a row share one prompt "
        "('auto' or 'shared')": prompting.execution == "joined",
    }
    for reason, holds in reasons.items():
        if holds:
            raise InputError(
                f"DataSource.packing is True, but {reason}: set packing = False"
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
      data_seed: of the order of rows; `seed` if None. Members of a sweep that share
        it share each batch.
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
    data_seed: int | None = None

    @property
    def order_seed(self) -> int:
        """The seed of the order of rows."""
        return self.seed if self.data_seed is None else self.data_seed

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
