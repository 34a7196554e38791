"""The options of the command line that set values of a run, in one table.

Commands make their options from it, a run is configured by it, and messages name the
option to type by it. It imports nothing heavy, so that help is instant; a test compares
its defaults with those of the settings.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

MODEL, DATA, METHOD = "model", "data", "method"
TRAINING, EVALUATION, OUTPUT = "training", "evaluation", "output"
GROUPS = (MODEL, DATA, METHOD, TRAINING, EVALUATION, OUTPUT)
"""Groups of options, in the order of help."""


@dataclasses.dataclass(frozen=True)
class FlatOption:
    """One option.

    Attributes:
      name: name without dashes.
      group: one of `GROUPS`.
      help: description, without the default.
      setting: parameter that it sets, as configs write it; empty if it depends on the
        method.
      kind: `str`, `int`, `float`, `list` for several texts, or `bool` for a flag.
      macro: name that shipped configs use for the value, if any.
      default: default that help shows; None if there is none, and a text where the
        default depends on other options.
      choices: values that are accepted; empty for all.
      metavar: name of the value in help.
      minimum: smallest value of an integer.
    """

    name: str
    group: str
    help: str
    setting: str = ""
    kind: type = str
    macro: str = ""
    default: Any = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    minimum: int = 1

    @property
    def flag(self) -> str:
        """The option as it is typed."""
        return f"--{self.name}"


OPTIMIZERS = ("adafactor", "adamw")
SCHEDULES = ("constant", "linear")
LOSSES = {
    "cross_entropy": "mean over the tokens of completions",
    "average_per_sequence": "every example has the same weight",
    "label_smoothing": "a tenth of the target probability for other tokens",
    "reference": "z-loss, summed over a batch",
    "class_cross_entropy": "over the scores of --labels",
    "class_hinge": "hinge loss of the scores of --labels",
    "policy_gradient": "cross-entropy times each example's 'advantages'",
    "context_distillation": "predict as the model does after --context",
}
"""Objectives by the name of their shipped config; the first is the default."""
DTYPES = ("float32", "bfloat16")

TABLE = (
    FlatOption(
        "model",
        MODEL,
        "Hugging Face folder, T5X checkpoint, or a bundled model such as "
        "bundled:skills-decoder",
        "Pretrained.checkpoint",
        macro="MODEL",
        metavar="PATH",
    ),
    FlatOption(
        "tokenizer",
        MODEL,
        "file or folder of the tokenizer",
        "Pretrained.tokenizer",
        macro="TOKENIZER",
        default="the model's folder",
        metavar="PATH",
    ),
    FlatOption(
        "parameter_dtype",
        MODEL,
        "type that the frozen weights are stored in",
        "Pretrained.parameter_dtype",
        default="float32",
        choices=(*DTYPES, "int8"),
    ),
    FlatOption(
        "compute_dtype",
        MODEL,
        "type of activations",
        "Pretrained.compute_dtype",
        default="float32",
        choices=DTYPES,
    ),
    FlatOption(
        "train",
        DATA,
        "training data: files (jsonl, json, csv, tsv, parquet, HDF5), globs or folders",
        "train/DataSource.files",
        kind=list,
        macro="TRAIN_FILES",
        metavar="FILE",
    ),
    FlatOption(
        "eval",
        DATA,
        "held-out data, in the same forms",
        "evaluation/DataSource.files",
        kind=list,
        macro="EVALUATION_FILES",
        default="no evaluation",
        metavar="FILE",
    ),
    FlatOption(
        "format",
        DATA,
        "form of the lines; auto recognizes it by the keys",
        "DataSource.format",
        default="auto",
        choices=("auto", "pairs", "messages", "sharegpt", "alpaca"),
    ),
    FlatOption(
        "chat",
        DATA,
        "put pairs into the model's chat template too",
        "DataSource.chat",
        kind=bool,
        default=False,
    ),
    FlatOption(
        "chat_template",
        DATA,
        "file of another chat template",
        "DataSource.chat_template",
        metavar="FILE",
    ),
    FlatOption(
        "chat_date",
        DATA,
        "date for a chat template that uses the current date",
        "DataSource.chat_date",
        metavar="DAY",
    ),
    FlatOption(
        "prompt_key",
        DATA,
        "key or column of the input",
        "DataSource.prompt_key",
        default="prompt",
        metavar="KEY",
    ),
    FlatOption(
        "completion_key",
        DATA,
        "key or column of the text to learn",
        "DataSource.completion_key",
        default="completion",
        metavar="KEY",
    ),
    FlatOption(
        "template",
        DATA,
        "prompt of each example as text, keys and vectors, such as "
        "'{soft:20} Review: {text} Mood:'",
        "DataSource.template",
        macro="TEMPLATE",
    ),
    FlatOption(
        "prompt_id_key",
        DATA,
        "key or column of an example's task, for multitask methods",
        "DataSource.prompt_id_key",
        macro="PROMPT_ID_KEY",
        metavar="KEY",
    ),
    FlatOption(
        "on_too_long",
        DATA,
        "examples longer than the model's positions: stop, leave them out, or remove "
        "their beginning (truncate) or their end",
        "DataSource.on_too_long",
        default="error",
        choices=("error", "skip", "truncate", "truncate_left", "truncate_right"),
    ),
    FlatOption(
        "max_examples",
        DATA,
        "use the first N examples of each data set",
        "DataSource.maximum_examples",
        kind=int,
        default="all",
    ),
    FlatOption(
        "method",
        METHOD,
        "what to train; the methods are listed below",
        default="soft",
        metavar="NAME",
    ),
    FlatOption(
        "prompt_length",
        METHOD,
        "number of prompt vectors, or of keys and values",
        kind=int,
        macro="PROMPT_LENGTH",
        default=20,
    ),
    FlatOption(
        "rank",
        METHOD,
        "rank of LoRA (its alpha is 16; --gin.LoRA.alpha=N), or of "
        "multitask_factorized",
        "LoRA.rank",
        kind=int,
        macro="RANK",
        default="8 for lora, 1 for multitask_factorized",
    ),
    FlatOption(
        "prompt_text",
        METHOD,
        "text of the methods text and wayward",
        macro="PROMPT_TEXT",
        metavar="TEXT",
    ),
    FlatOption(
        "prompt_file",
        METHOD,
        "NumPy file, run directory or PEFT folder of the method file",
        macro="PROMPT_FILE",
        metavar="PATH",
    ),
    FlatOption(
        "tasks",
        METHOD,
        "number of tasks of a multitask method",
        kind=int,
        macro="TASKS",
    ),
    FlatOption(
        "shared_features",
        METHOD,
        "shared columns of multitask_concat_features and multitask_project",
        kind=int,
        macro="SHARED_FEATURES",
    ),
    FlatOption(
        "task_features",
        METHOD,
        "columns of each task of multitask_concat_features",
        kind=int,
        macro="TASK_FEATURES",
    ),
    FlatOption(
        "learning_rate",
        TRAINING,
        "learning rate",
        kind=float,
        macro="LEARNING_RATE",
        default="the method's",
        metavar="RATE",
    ),
    FlatOption(
        "optimizer",
        TRAINING,
        "optimizer",
        default="the method's",
        choices=OPTIMIZERS,
    ),
    FlatOption(
        "schedule",
        TRAINING,
        "learning rate over the run: constant, or linear with a short warm-up and a "
        "decay to 5 %%",
        default="constant",
        choices=SCHEDULES,
    ),
    FlatOption(
        "steps",
        TRAINING,
        "optimizer steps of the whole run",
        "Run.steps",
        kind=int,
        macro="STEPS",
        default=1000,
    ),
    FlatOption(
        "batch_size",
        TRAINING,
        "examples of a batch",
        "DataSource.batch_size",
        kind=int,
        macro="BATCH_SIZE",
        default=32,
    ),
    FlatOption(
        "accumulate",
        TRAINING,
        "batches whose gradients are summed for a step",
        "Run.accumulate",
        kind=int,
        default=1,
    ),
    FlatOption(
        "loss",
        TRAINING,
        "what to minimize; the losses are listed below",
        default="cross_entropy",
        choices=tuple(LOSSES),
        metavar="NAME",
    ),
    FlatOption(
        "context",
        TRAINING,
        "text that context_distillation puts into the prompt",
        "ContextDistillation.context",
        macro="CONTEXT",
        metavar="TEXT",
    ),
    FlatOption(
        "start_from",
        TRAINING,
        "run directory, checkpoint, PEFT folder or prompt file to start from",
        "Run.start_from",
        metavar="PATH",
    ),
    FlatOption(
        "seed",
        TRAINING,
        "seed of initial values, the order of examples, and dropout",
        "Run.seed",
        kind=int,
        default=0,
        minimum=0,
    ),
    FlatOption(
        "labels",
        EVALUATION,
        "the possible completions of a classification task, to measure the accuracy "
        "among them",
        "Evaluation.labels",
        kind=list,
        macro="CLASS_LABELS",
        metavar="LABEL",
    ),
    FlatOption(
        "exact_match",
        EVALUATION,
        "also generate completions and compare them",
        "Evaluation.exact_match",
        kind=bool,
        default=False,
    ),
    FlatOption(
        "eval_every",
        EVALUATION,
        "steps between evaluations; 0 for only one at the end",
        "Run.evaluate_every",
        kind=int,
        default=0,
        minimum=0,
    ),
    FlatOption(
        "out",
        OUTPUT,
        "run directory: checkpoints, log and config",
        "Run.directory",
        macro="RUN_DIRECTORY",
        default="runs/MODEL-METHOD",
        metavar="DIRECTORY",
    ),
    FlatOption(
        "save_every",
        OUTPUT,
        "steps between checkpoints; 0 for only those of evaluations and the end",
        "Run.save_every",
        kind=int,
        default=100,
        minimum=0,
    ),
    FlatOption(
        "log_every",
        OUTPUT,
        "steps between lines of the log",
        "Run.log_every",
        kind=int,
        default=10,
    ),
)
OPTIONS: Mapping[str, FlatOption] = {option.name: option for option in TABLE}
