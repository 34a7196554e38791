"""The options of the command line that set values of a run, in one table.

Commands make their options from it, a run is configured by it, and messages look up the
option to type in it. An option for a parameter has its type and default, which
`config.options` reads. Imports nothing heavy, so that help is instant.
"""

from typing import get_args

from prompt_tuning.config import flat_option
from prompt_tuning.config.data_options import DATA_OPTIONS
from prompt_tuning.config.flat_option import FlatOption, in_group
from prompt_tuning.config.lora_options import LORA_OPTIONS
from prompt_tuning.config.rollout_options import ROLLOUT_OPTIONS
from prompt_tuning.core import number_ranges
from prompt_tuning.core.metric_directions import AUTO, DIRECTIONS
from prompt_tuning.core.model_choices import ClassProblem
from prompt_tuning.core.quantization.stores import DTYPES, PARAMETER_DTYPES

ADDED, HEAD, PROBLEM = "add_tokens", "head", "problem"
BESIDE = (ADDED, HEAD, PROBLEM)
"""The options of what is trained beside any method."""

OF_LOSSES = (
    *("context", "context_key", "contexts", "divergence", "beta", "reference"),
    *("margin", "reward", "group", "new_tokens", "temperature"),
    *("updates", "resample", "replay"),
)
"""Options that only some losses have."""

MODEL_OPTIONS = in_group(
    flat_option.MODEL,
    FlatOption(
        "model",
        "Hugging Face folder or hub name such as Qwen/Qwen3-0.6B, T5X checkpoint, or a "
        "bundled model such as bundled:skills-decoder",
        "Pretrained.checkpoint",
        macro="MODEL",
        metavar="PATH",
    ),
    FlatOption(
        "tokenizer",
        "file or folder of the tokenizer",
        "Pretrained.tokenizer",
        macro="TOKENIZER",
        default="the model's folder",
        metavar="PATH",
    ),
    FlatOption(
        "parameter_dtype",
        "dtype of the frozen weights",
        "Pretrained.parameter_dtype",
        choices=PARAMETER_DTYPES,
        default="float32, or as published if already quantized",
    ),
    FlatOption(
        "quantization_group",
        "number of inputs that share a scale in int4 and nf4 weights",
        "Pretrained.quantization_group",
        default=64,
    ),
    FlatOption(
        "quantized_tables",
        "quantize the embedding table and the output head, too",
        "Pretrained.quantized_tables",
        kind=bool,
    ),
    FlatOption(
        "compute_dtype",
        "dtype of activations",
        "Pretrained.compute_dtype",
        choices=DTYPES,
    ),
    FlatOption(
        "attention",
        "attention kernel: flash is the GPU's fused kernel, reference uses none, auto "
        "uses flash where possible",
        "Pretrained.attention",
    ),
)
METHOD_OPTIONS = in_group(
    flat_option.METHOD,
    FlatOption(
        "method",
        "what to train; the methods are listed below",
        default="soft",
        metavar="NAME",
    ),
    FlatOption(
        "prompt_length",
        "number of prompt vectors, or of keys and values",
        kind=number_ranges.AxisLength,
        macro="PROMPT_LENGTH",
        default=20,
    ),
    FlatOption(
        "rank",
        "rank of LoRA, or of multitask_factorized",
        "LoRA.rank",
        macro="RANK",
        default="8 for lora, 1 for multitask_factorized",
    ),
    *LORA_OPTIONS,
    FlatOption(
        ADDED,
        "tokens whose embedding rows are trained, too, with any method; a text that is "
        "not yet a token is added to the tokenizer",
        "TrainedTokens.tokens",
        kind=list,
        macro="ADDED_TOKENS",
        metavar="TOKEN",
    ),
    FlatOption(
        HEAD,
        "train a head that scores the --labels from the last state of a prompt, the "
        "first (encoders), or the mean of its states, with any method; the model then "
        "generates no text",
        "ClassHead.pooling",
        choices=("last", "first", "mean"),
    ),
    FlatOption(
        PROBLEM,
        "what a head predicts: one of the --labels, any number of them, a number, or "
        "one label per word (default: single_label)",
        "ClassHead.problem",
        choices=get_args(ClassProblem),
    ),
    FlatOption(
        "prompt_text",
        "text for the methods text, text_prefix, memory and wayward",
        macro="PROMPT_TEXT",
        metavar="TEXT",
    ),
    FlatOption(
        "prompt_examples",
        "jsonl file of prompts and completions that the method cpt starts from",
        macro="PROMPT_EXAMPLES",
        metavar="FILE",
    ),
    FlatOption(
        "prompt_file",
        "NumPy file, run directory or PEFT folder for the method file",
        macro="PROMPT_FILE",
        metavar="PATH",
    ),
    FlatOption(
        "tasks",
        "number of tasks of a multitask method",
        kind=number_ranges.AxisLength,
        macro="TASKS",
    ),
    FlatOption(
        "shared_features",
        "shared columns of multitask_concat_features and multitask_project",
        kind=number_ranges.AxisLength,
        macro="SHARED_FEATURES",
    ),
    FlatOption(
        "task_features",
        "columns per task of multitask_concat_features",
        kind=number_ranges.AxisLength,
        macro="TASK_FEATURES",
    ),
)
TRAINING_OPTIONS = in_group(
    flat_option.TRAINING,
    FlatOption(
        "learning_rate",
        "learning rate",
        kind=number_ranges.PositiveNumber,
        macro="LEARNING_RATE",
        default="the method's",
        metavar="RATE",
    ),
    FlatOption("optimizer", "optimizer", default="the method's"),
    FlatOption(
        "schedule",
        "learning rate over the run: constant, or after a short warm-up linear, cosine "
        "(a decay to 5 %%) or rsqrt (the inverse square root of the step)",
        default="constant",
    ),
    FlatOption("steps", "optimizer steps of the whole run", "Run.steps", macro="STEPS"),
    FlatOption(
        "epochs",
        "passes over the data, instead of --steps; rounded up to whole steps",
        kind=number_ranges.PositiveNumber,
    ),
    FlatOption(
        "batch_size", "examples per batch", "DataSource.batch_size", macro="BATCH_SIZE"
    ),
    FlatOption(
        "accumulate",
        "number of batches to sum gradients over in each step",
        "Run.accumulate",
    ),
    FlatOption(
        "loss",
        "what to minimize; the losses are listed below",
        default="cross_entropy",
        metavar="NAME",
    ),
    FlatOption(
        "context",
        "text to distill into the prompt",
        "ContextDistillation.context",
        macro="CONTEXT",
        metavar="TEXT",
    ),
    FlatOption(
        "context_key",
        "key of the context that a distillation's teacher reads before each record",
        "ContextDistillation.context_key",
        macro="CONTEXT_KEY",
        metavar="KEY",
    ),
    FlatOption(
        "contexts",
        "jsonl file of contexts, which the context_key names by number",
        "ContextDistillation.contexts",
        kind=str,
        macro="CONTEXTS",
        metavar="FILE",
        default="none",
    ),
    FlatOption(
        "divergence",
        "how a distillation compares the model with its teacher",
        "ContextDistillation.divergence",
        macro="DIVERGENCE",
        default="forward; reverse for on_policy_distillation",
    ),
    FlatOption(
        "beta",
        "strength of a preference: the pull towards the frozen model in dpo, kto and "
        "losses that learn from rewards, the weight of the odds ratio in orpo, the "
        "factor in simpo; in a distillation, the teacher's weight in the divergence "
        "jsd",
        kind=number_ranges.NonnegativeNumber,
        macro="BETA",
        default="0.1; 2 for simpo; 0 with rewards; 0.5 for jsd",
    ),
    FlatOption(
        "reference",
        "reference of dpo and kto: the frozen model, computed in_step or precomputed; "
        "a run directory; or none",
        macro="REFERENCE",
        default="in_step",
        metavar="NAME",
    ),
    FlatOption(
        "margin",
        "target margin of simpo",
        kind=number_ranges.NonnegativeNumber,
        macro="MARGIN",
        default="1",
    ),
    *ROLLOUT_OPTIONS,
    FlatOption(
        "start_from",
        "run directory, checkpoint, PEFT folder or prompt file to start from",
        "Run.start_from",
        metavar="PATH",
    ),
    FlatOption(
        "seed", "seed of initial values, the order of examples, and dropout", "Run.seed"
    ),
)
EVALUATION_OPTIONS = in_group(
    flat_option.EVALUATION,
    FlatOption(
        "labels",
        "completions of a classification task, to measure the accuracy of choosing "
        "among them",
        "Evaluation.labels",
        kind=list,
        macro="CLASS_LABELS",
        metavar="LABEL",
    ),
    FlatOption(
        "exact_match",
        "also measure the share of completions that greedy decoding reproduces",
        "Evaluation.exact_match",
    ),
    FlatOption(
        "keep_best",
        "held-out metric that selects the best checkpoint; auto is label_accuracy with "
        "--labels, entity_f1 with entity tags, and loss otherwise",
        "Run.keep_best",
        choices=(AUTO, *DIRECTIONS),
        metavar="METRIC",
    ),
    FlatOption(
        "eval_every",
        "steps between evaluations; 0 for only one at the end",
        "Run.evaluate_every",
    ),
)
OUTPUT_OPTIONS = in_group(
    flat_option.OUTPUT,
    FlatOption(
        "out",
        "run directory: checkpoints, log and config",
        "Run.directory",
        macro="RUN_DIRECTORY",
        default="runs/MODEL-METHOD",
        metavar="DIRECTORY",
    ),
    FlatOption(
        "save_every",
        "steps between checkpoints; 0 for only those of evaluations and the end",
        "Run.save_every",
    ),
    FlatOption("log_every", "steps between lines of the log", "Run.log_every"),
    FlatOption(
        "loggers",
        "programs to log to, too: tensorboard, wandb and trackio",
        "Run.loggers",
        kind=list,
        default="tensorboard if tensorboardX is installed",
        metavar="NAME",
    ),
)
TABLE = (
    *MODEL_OPTIONS,
    *DATA_OPTIONS,
    *METHOD_OPTIONS,
    *TRAINING_OPTIONS,
    *EVALUATION_OPTIONS,
    *OUTPUT_OPTIONS,
)
