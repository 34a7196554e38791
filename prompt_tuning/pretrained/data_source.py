"""Data files and how they are read: from a config to examples and their order."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from prompt_tuning import processes
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.data.batching.batch_plan import BatchPlan, BucketPlan
from prompt_tuning.data.batching.packed_plan import PackedPlan
from prompt_tuning.data.examples.candidates import Candidates
from prompt_tuning.data.examples.example_table import Examples, load_examples
from prompt_tuning.data.rows.tasks import PROMPT_IDS, Tasks, TaskToken
from prompt_tuning.data.rows.token_columns import ADVANTAGES, TokenColumns
from prompt_tuning.data.text.templates import TokenTemplate, parse_template
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.sharding.shard_map import check_row_count


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSource:
    """Data files and how they are read.

    Attributes:
      files: HDF5 files (`.hdf5`, `.h5`) or jsonl files of pairs, all of one kind.
      batch_size: rows of a batch, of all devices together, which it must divide among.
      batch_tokens: in its place, most tokens of a batch, padding included: short rows
        come in larger batches. `batch_size` is then of rows that are generated or
        ranked alone.
      buckets: most lengths that rows are padded to, each of which is compiled; they are
        chosen to leave little padding.
      packing: whether a row holds several examples, each of which sees its prompt and
        itself alone. All batches have one shape then, and `batch_size` is of packed
        rows.
      packed_length: tokens of a packed row, and in an encoder-decoder its inputs; None
        for room for four average examples.
      use_token_type_ids: whether token types say which tokens are learned; if not, all
        are, and padding of HDF5 rows too.
      prompt_loss_weight: weight of type-0 tokens, with token types.
      separate_articles: whether an HDF5 row of several articles, each closed by a
        separator (type 3), is as many examples of a decoder-only model: no article sees
        another, and each is generated or ranked from its own prompt. If not, a row is
        one example, as wanted where texts are to be learned in the context of those
        before them.
      use_loss_weights: whether an HDF5 data set `loss_weights [rows, length]`, where
        there is one, multiplies these weights token by token.
      example_weight_key: what each example weighs, a jsonl key or an HDF5 data set
        `[rows]` (usually `example_weights`); None for 1.
      balance_key: the class of each example, a jsonl key or an HDF5 data set `[rows]`,
        or `[rows, length]` of each token (`category_ids`): each class then weighs the
        same in all, counted over all rows of the files. None for no balance.
      advantages_key: of `PolicyGradient`: the advantage of each example, a jsonl key or
        an HDF5 data set `[rows]`, or `[rows, length]` of each token.
      columns: other columns of numbers that an objective reads: the key of each, as in
        `advantages_key`, by the name that the objective gives it.
      prompt_key: jsonl key of what is given; None if nothing is.
      completion_key: jsonl key of what is learned.
      joiner: text between the two.
      template: what is given, as text, keys of a line and prompt vectors, such as
        "{soft:20} Review: {text} {soft:5} Mood:", in place of the text under
        `prompt_key`; see `templates`. It goes with `Prompting.placement = 'template'`.
      prompt_id_key: of a multi-task prompt: what says which of its prompts an example
        has, a jsonl key or an HDF5 data set `[rows]` (usually `prompt_ids`).
      prompt_id_names: of the prompts in order, where lines name and do not number them.
      task_token: in place of the key, "index" or "sentinel": the first token of each
        example (behind a BOS that the tokenizer puts first) says it, by its id or as
        `<extra_id_k>` does in T5, and is dropped.
      sentinel_vocabulary_size: one more than the id of `<extra_id_0>`, 32100 in T5; the
        tokenizer's vocabulary size if None.
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
    separate_articles: bool = True
    use_loss_weights: bool = True
    example_weight_key: str | None = None
    balance_key: str | None = None
    advantages_key: str | None = None
    columns: Mapping[str, str] | None = None
    prompt_key: str | None = "prompt"
    completion_key: str = "completion"
    joiner: str = ""
    template: str | None = None
    prompt_id_key: str | None = None
    prompt_id_names: Sequence[str] | None = None
    task_token: str | None = None
    sentinel_vocabulary_size: int | None = None
    add_eos: bool = True
    on_too_long: Literal["error", "skip"] = "error"
    maximum_examples: int | None = None

    def __post_init__(self):
        check_fields(self)
        columns = self.columns
        if columns is not None and not (
            isinstance(columns, Mapping)
            and all(isinstance(text, str) for pair in columns.items() for text in pair)
        ):
            raise InputError(
                f"DataSource.columns is {columns!r}, expected a dict of names and keys "
                "such as {'margins': 'margin'}, or None"
            )

    def load(
        self, model: PromptedModel, *, given_before: Sequence[int] = ()
    ) -> Examples:
        """Opens and checks the files.

        Args:
          model: that is to read them.
          given_before: ids of a text that is put before what each example is given.

        Raises:
          InputError: if a file or a row cannot be used with this model.
        """
        self._check_batches()
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
            separate_articles=self.separate_articles,
            prompt_key=self.prompt_key,
            completion_key=self.completion_key,
            joiner=self.joiner,
            add_eos=self.add_eos,
            on_too_long=self.on_too_long,
            maximum_examples=self.maximum_examples,
            bos_id=model.config.bos_id,
            eos_id=model.config.eos_id,
            template=self.token_template(model),
            tasks=self.tasks(model),
            given_before=given_before,
            columns=TokenColumns(
                self.use_loss_weights,
                self.example_weight_key,
                self.balance_key,
                self._objective_columns,
            ),
        )

    @property
    def _objective_columns(self) -> dict[str, str]:
        """The key of each column that an objective reads, by its name."""
        columns = dict(self.columns or {})
        if self.advantages_key is not None:
            columns[ADVANTAGES] = self.advantages_key
        return columns

    def token_template(self, model: PromptedModel) -> TokenTemplate | None:
        """The template in the ids of a model's tokenizer; None if there is none.

        For a model without a prompt it is its text alone.

        Raises:
          InputError: if it cannot be read, or does not fit the model's prompt.
        """
        placement = model.prompting.placement
        if (self.template is None) == (placement == "template"):
            found = "None" if self.template is None else "set"
            raise InputError(
                f"DataSource.template is {found} and Prompting.placement is "
                f"{placement!r}: a template says where the prompt stands, so set both "
                "(data/template.gin does), or neither"
            )
        if self.template is None:
            return None
        if self.task_token is not None:
            raise InputError(
                "DataSource.task_token is set, but what is given begins with the "
                "template: say the task by DataSource.prompt_id_key"
            )
        parsed = parse_template(self.template)
        template = TokenTemplate(
            parsed if model.prompt_length else parsed.without_soft(),
            model.needed_tokenizer(),
            model.config.vocabulary_size,
            separate=model.config.architecture == "encoder_decoder",
        )
        template.check_length(model.prompt_length)
        return template

    def tasks(self, model: PromptedModel) -> Tasks | None:
        """Where the data says which prompt each example has; None if there is one.

        Raises:
          InputError: if it does not say what the model's prompt needs.
        """
        by_token = self.task_token is not None
        says = by_token or self.prompt_id_key is not None
        if model.prompt_count == 1:
            if says:
                name = "task_token" if by_token else "prompt_id_key"
                raise InputError(
                    f"DataSource.{name} is {getattr(self, name)!r}, but the model has "
                    "one prompt for all tasks: leave it out, or use a multi-task prompt"
                )
            return None
        if not says:
            raise InputError(
                f"the model has {model.prompt_count} prompts, and the data does not "
                "say which an example has: set DataSource.prompt_id_key to a jsonl key "
                f"or an HDF5 data set ({PROMPT_IDS!r}), or DataSource.task_token"
            )
        token = TaskToken(self._first_sentinel(model)) if by_token else None
        return Tasks(
            model.prompt_count, self.prompt_id_key, self.prompt_id_names, token
        )

    def _first_sentinel(self, model: PromptedModel) -> int | None:
        """One more than the id of task 0's token; None where ids are tasks."""
        if self.task_token not in ("index", "sentinel"):
            raise InputError(
                f"DataSource.task_token is {self.task_token!r}, expected 'index' or "
                "'sentinel'"
            )
        if self.task_token == "index":
            return None
        if self.sentinel_vocabulary_size is not None:
            return self.sentinel_vocabulary_size
        return model.needed_tokenizer().vocabulary_size

    def plan(
        self,
        model: PromptedModel,
        examples: Examples | Candidates,
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
          InputError: if the examples do not fit the sizes asked for, rows cannot be
            divided among the devices, given tokens are to be learned of examples with
            classes, or another process found other examples.
        """
        layout = model.layout
        if layout is not None and self.batch_tokens is None:
            check_row_count(layout, self.batch_size)
        processes.check_same("examples", lambda: _described(self.files, examples))
        if isinstance(examples, Candidates) and self.prompt_loss_weight > 0:
            raise InputError(
                f"prompt_loss_weight is {self.prompt_loss_weight}, but Run.objective "
                "is a ClassObjective, which scores labels alone and learns nothing of "
                "what is given: set DataSource.prompt_loss_weight = 0.0, or use a "
                "TokenObjective"
            )
        return self._kind_of_plan(model, examples)(
            examples.input_lengths,
            weight_counts=examples.weight_counts,
            batch_size=self.batch_size if self.batch_tokens is None else None,
            batch_tokens=self.batch_tokens,
            seed=seed,
            shuffle=shuffle,
            maximum_length=model.maximum_length,
            accumulate=accumulate,
            row_parts=1 if layout is None else layout.row_parts,
        )

    def _kind_of_plan(
        self, model: PromptedModel, examples: Examples | Candidates
    ) -> Callable[..., BatchPlan]:
        """A plan of packed rows, or of buckets, without what both are given."""
        same_tokens = model.config.architecture == "decoder_only"
        if self.packing:
            return functools.partial(
                PackedPlan,
                target_lengths=None if same_tokens else examples.target_lengths,
                length=self.packed_length,
            )
        per_example = examples.classes if isinstance(examples, Candidates) else 1
        return functools.partial(
            BucketPlan,
            target_lengths=examples.target_lengths,
            same_tokens=same_tokens,
            buckets=self.buckets,
            rows_per_example=per_example,
        )

    def _check_batches(self) -> None:
        for name in ("batch_size", "batch_tokens", "buckets", "packed_length"):
            found = getattr(self, name)
            if found is not None and found < 1:
                raise InputError(f"{name} is {found}, expected at least 1")
        if self.packed_length is not None and not self.packing:
            raise InputError(
                f"packed_length is {self.packed_length}, but rows are not packed: set "
                "DataSource.packing = True as well, or leave it out"
            )


def _described(
    files: Sequence[str] | str, examples: Examples | Candidates, samples: int = 64
) -> list[str]:
    """Lines by which two readings of the files are told apart.

    Args:
      files: their names.
      examples: what they hold.
      samples: examples, evenly spaced, of which all tokens are looked at.
    """
    tables = (examples.input_lengths, examples.target_lengths, examples.weight_counts)
    lengths, tokens = hashlib.sha256(), hashlib.sha256()
    for table in tables:
        lengths.update(np.asarray(table, np.int64).tobytes())
    count = len(examples)
    for index in np.linspace(0, count - 1, min(samples, count)).astype(int).tolist():
        rows = examples[index]
        for row in rows if isinstance(rows, list) else [rows]:
            tokens.update(np.asarray(row.inputs, np.int64).tobytes())
            tokens.update(np.asarray(row.targets, np.int64).tobytes())
    return [
        f"{count} examples of {files}",
        f"{int(np.sum(tables[0]))} inputs and {int(np.sum(tables[2]))} learned targets",
        f"digest of their lengths: {lengths.hexdigest()[:16]}",
        f"digest of {min(samples, count)} of them: {tokens.hexdigest()[:16]}",
    ]
