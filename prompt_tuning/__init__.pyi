"""The public names, as editors and type checkers see them.

Written by `python -m scripts.make_stub`; change the sources.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from optax import GradientTransformation, Schedule

from prompt_tuning.api import load as load
from prompt_tuning.api import load_tuned as load_tuned
from prompt_tuning.api import tune as tune
from prompt_tuning.config.configured import Configured
from prompt_tuning.config.run import Run as Run
from prompt_tuning.core.batch import Batch as Batch
from prompt_tuning.core.errors import InputError as InputError
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameter_groups import ParameterGroup as _ParameterGroup
from prompt_tuning.core.rematerialization import BlockRange as _BlockRange
from prompt_tuning.core.rematerialization import Rematerialization as _Rematerialization
from prompt_tuning.data.data_source import DataSource as _DataSource
from prompt_tuning.decoding.beam_search import BeamSearch as BeamSearch
from prompt_tuning.decoding.sampling_settings import Sampling as Sampling
from prompt_tuning.evaluation.evaluation_settings import Evaluation as _Evaluation
from prompt_tuning.losses.class_objective import ClassObjective as _ClassObjective
from prompt_tuning.losses.context_distillation import (
    ContextDistillation as _ContextDistillation,
)
from prompt_tuning.losses.fixed_gradients import OutputGradients as _OutputGradients
from prompt_tuning.losses.policy_gradient import PolicyGradient as _PolicyGradient
from prompt_tuning.losses.token_objective import TokenObjective as _TokenObjective
from prompt_tuning.model import Model as Model
from prompt_tuning.model import TunedModel as TunedModel
from prompt_tuning.pipeline.pipeline_settings import Pipeline as _Pipeline
from prompt_tuning.pretrained.source import Pretrained as _Pretrained
from prompt_tuning.prompts.deep import AddedDeepPrompt as _AddedDeepPrompt
from prompt_tuning.prompts.deep import DeepPrompt as _DeepPrompt
from prompt_tuning.prompts.dropped import DroppedPrompt as _DroppedPrompt
from prompt_tuning.prompts.factorized import (
    FactorizedMultiTaskPrompt as _FactorizedMultiTaskPrompt,
)
from prompt_tuning.prompts.factorized import Factors
from prompt_tuning.prompts.initializers import Initializer
from prompt_tuning.prompts.input_dependent import InstancePrompt as _InstancePrompt
from prompt_tuning.prompts.input_dependent import PromptPool as _PromptPool
from prompt_tuning.prompts.multitask import AddMultiTaskPrompt as _AddMultiTaskPrompt
from prompt_tuning.prompts.multitask import (
    ConcatFeaturesMultiTaskPrompt as _ConcatFeaturesMultiTaskPrompt,
)
from prompt_tuning.prompts.multitask import (
    ConcatTimeMultiTaskPrompt as _ConcatTimeMultiTaskPrompt,
)
from prompt_tuning.prompts.multitask import (
    ProjectMultiTaskPrompt as _ProjectMultiTaskPrompt,
)
from prompt_tuning.prompts.prefix import KeyValuePrefix as _KeyValuePrefix
from prompt_tuning.prompts.prefix import PrefixInitializer
from prompt_tuning.prompts.prefix import (
    ProjectedKeyValuePrefix as _ProjectedKeyValuePrefix,
)
from prompt_tuning.prompts.projection_adapters import IA3 as _IA3
from prompt_tuning.prompts.projection_adapters import LoRA as _LoRA
from prompt_tuning.prompts.prompt_module import InputPrompt
from prompt_tuning.prompts.prompt_settings import Prompting as _Prompting
from prompt_tuning.prompts.reparameterized import MLPPrompt as _MLPPrompt
from prompt_tuning.prompts.reparameterized import ResidualPrompt as _ResidualPrompt
from prompt_tuning.prompts.soft import InferenceOnlyPrompt as _InferenceOnlyPrompt
from prompt_tuning.prompts.soft import SoftPrompt as _SoftPrompt
from prompt_tuning.prompts.wayward import WaywardPrompt as _WaywardPrompt
from prompt_tuning.sharding.axis_rules import AxisRules as _AxisRules
from prompt_tuning.sharding.mesh import MeshShape as _MeshShape
from prompt_tuning.training.loop import TrainingResult as TrainingResult
from prompt_tuning.training.loop import train as train
from prompt_tuning.training.run_plan import open_run as open_run
from prompt_tuning.training.state import TrainState as TrainState
from prompt_tuning.training.step import gradients as gradients
from prompt_tuning.training.step import train_step as train_step
from prompt_tuning.training.step import update as update

__all__: list[str]
__version__: str
MODULES: dict[str, str]
CONFIGURABLE: tuple[str, ...]

def AddMultiTaskPrompt(
    *,
    length: int,
    tasks: int,
    initializer: Initializer | Configured[Initializer] | None = None,
    task_initializer: Initializer | Configured[Initializer] | None = None,
) -> Configured[_AddMultiTaskPrompt]:
    """A task's prompt is `shared + task[n]`.

    Attributes:
      shared: `[P, D]`, float32.
      task: `[N, P, D]`, float32.
    """

def AddedDeepPrompt(
    *, length: int, initializer: Initializer | Configured[Initializer] | None = None
) -> Configured[_AddedDeepPrompt]:
    """A soft prompt, and vectors that are added to its hidden states in later blocks.

    `PromptEncoderLayer` of google-research/prompt-tuning with `add_prompt`. The soft
    prompt is stored at the path that it has alone, so that a run can start from a
    tuned one.

    Attributes:
      prompt: vectors of the first block, `[P, D]`, float32.
      added: vectors of the other blocks, `[L - 1, P, D]`, float32; initially zero.
    """

def AxisRules(
    preset: str = "megatron", rules: Sequence[Sequence[Any]] = ()
) -> Configured[_AxisRules]:
    """A table of rules from dimension names to mesh axes.

    Attributes:
      preset: name of the rule set that applies after `rules`.
      rules: pairs of a dimension name and a mesh axis, several axes, or None.

    Raises:
      InputError: if a preset, name or mesh axis does not exist, or a rule is not
        supported.
    """

def BlockRange(
    *,
    start: int,
    stop: int,
    policy: str = "none",
    names: Sequence[str] = (),
    offload: bool = False,
    every: int = 1,
) -> Configured[_BlockRange]:
    """Consecutive blocks of a stack with another rematerialization than the rest.

    Attributes:
      start: number of the first block, counted from 0.
      stop: number of the block after the last.
      policy: as in `Rematerialization`, like the other fields.
      names: names for the policy "names".
      offload: whether inputs of blocks are moved to the host's memory.
      every: number of consecutive blocks that are wrapped together.

    Raises:
      InputError: if the fields contradict each other.
    """

def ClassObjective(
    labels: Sequence[str],
    loss: str = "cross_entropy",
    hinge: float = 0.2,
    length_normalize: bool = True,
) -> Configured[_ClassObjective]:
    """Loss of an example's class among `C`, each scored by its verbalizer.

    Each example comes as `C` consecutive rows, one for each class. The loss is averaged
    over the examples, with the example weights of the data if it has any.

    Attributes:
      labels: verbalizers of the classes; the completion of each example is one of them.
      loss: "cross_entropy" of the scores, or "hinge"; see `class_hinge`.
      hinge: margin of the hinge loss, in nats.
      length_normalize: whether a score is the mean of its tokens' log-probabilities
        (their weighted sum over the sum of the weights) instead of the sum.

    Raises:
      InputError: if there are fewer than two labels, two are equal, or another setting
        is out of range.
    """

def ConcatFeaturesMultiTaskPrompt(
    *,
    length: int,
    tasks: int,
    shared_features: int,
    task_features: int,
    initializer: Initializer | Configured[Initializer] | None = None,
    task_initializer: Initializer | Configured[Initializer] | None = None,
) -> Configured[_ConcatFeaturesMultiTaskPrompt]:
    """The first features of each vector are shared, the others belong to the task.

    Attributes:
      shared: `[P, shared_features]`, float32.
      task: `[N, P, task_features]`, float32.
    """

def ConcatTimeMultiTaskPrompt(
    *,
    length: int,
    tasks: int,
    task_length: int | None = None,
    initializer: Initializer | Configured[Initializer] | None = None,
    task_initializer: Initializer | Configured[Initializer] | None = None,
) -> Configured[_ConcatTimeMultiTaskPrompt]:
    """A task's prompt is the shared vectors followed by the task's vectors.

    Attributes:
      shared: `[P - task_length, D]`, float32.
      task: `[N, task_length, D]`, float32.
    """

def ContextDistillation(context: str) -> Configured[_ContextDistillation]:
    """Trains the model to predict what the frozen model predicts after a text.

    The loss of a position is `KL(teacher || student)` over the whole vocabulary, in
    nats. Positions and weights come from the data, whose tokens both models read.

    Attributes:
      context: text that the teacher reads before each row, after the row's BOS.
    """

def DataSource(
    *,
    files: Any,
    split: Literal["train", "dev", "test"] | None = None,
    batch_size: int = 32,
    batch_tokens: int | None = None,
    buckets: int | None = None,
    packing: bool = False,
    packed_length: int | None = None,
    use_token_type_ids: bool | None = None,
    prompt_loss_weight: float = 0.0,
    on_nothing_learned: Literal["error", "skip"] = "error",
    separate_articles: bool = True,
    use_loss_weights: bool = True,
    example_weight_key: str | None = None,
    balance_key: str | None = None,
    advantages_key: str | None = None,
    columns: Mapping[str, str] | None = None,
    format: Literal["auto", "pairs", "messages", "sharegpt", "alpaca"] = "auto",
    chat: bool = False,
    chat_template: str | None = None,
    chat_date: str | None = None,
    prompt_key: str | None = "prompt",
    completion_key: str = "completion",
    joiner: str = "",
    template: str | None = None,
    prompt_id_key: str | None = None,
    prompt_id_names: Sequence[str] | None = None,
    prompt_id_aliases: Mapping[str, str] | None = None,
    task_token: str | None = None,
    sentinel_vocabulary_size: int | None = None,
    add_eos: bool = True,
    on_too_long: Literal[
        "error", "skip", "truncate", "truncate_left", "truncate_right"
    ] = "error",
    maximum_examples: int | None = None,
) -> Configured[_DataSource]:
    """Data files, how they are read as examples, and how these are batched.

    A data set consists of HDF5 files, whose rows are token ids with optional token
    types (0 prompt, 1 completion, 2 padding, 3 separator), or of files of text, whose
    lines are objects with a prompt and a completion, or a conversation.

    Attributes:
      files: files of one kind: HDF5 (`.hdf5`, `.h5`), `.jsonl`, `.json` (one list),
        `.csv`, `.tsv` (these four also with `.gz` or `.zst`) or `.parquet`; a glob such
        as "data/*.jsonl", a folder of such files, or a folder that `prepare` wrote.
      split: which files of a folder that `prepare` wrote: "train", "dev" or "test".
        None for "train" in training data, and "dev" in evaluation data.
      batch_size: number of rows of a batch, over all devices; must be a multiple of the
        number of devices that the rows are divided among.
      batch_tokens: maximum number of tokens of a batch, padding included. If set, it
        replaces `batch_size`: batches of shorter rows hold more rows. `batch_size`
        then applies only to rows that are generated from or ranked.
      buckets: maximum number of lengths that rows are padded to. The lengths are chosen
        to minimize padding; each of them is compiled once. None for as many as save
        more time in every pass over the data than a share of their compilation takes.
      packing: whether a row holds several examples, each of which attends only to
        itself and its prompt. All batches then have the same shape, and `batch_size`
        counts packed rows.
      packed_length: number of tokens of a packed row (of its inputs in an
        encoder-decoder); None for four times the average length of an example.
      use_token_type_ids: whether token types determine which tokens are learned. If
        True, data without types is refused. If False, every token is learned, including
        the padding of HDF5 rows. None for True if the data has types, and else False.
      prompt_loss_weight: loss weight of prompt tokens (type 0) if token types are used.
      on_nothing_learned: "error" to reject a row without a learned token; "skip" to
        leave such rows out and count them.
      separate_articles: whether a decoder-only model reads each part of an HDF5 row
        that ends with a separator (type 3) as a separate example, which does not attend
        to the others and is generated or ranked from its own prompt. If False, each row
        is one example, so that texts are learned in the context of those before them.
      use_loss_weights: whether loss weights are multiplied by the HDF5 data set
        `loss_weights [rows, length]`, if the files contain it.
      example_weight_key: jsonl key or HDF5 data set `[rows]` (usually
        `example_weights`) that contains the weight of each example; None for equal
        weights.
      balance_key: jsonl key or HDF5 data set that contains the class of each example,
        `[rows]`, or in HDF5 of each token, `[rows, length]` (such as `category_ids`).
        Loss weights are scaled so that all classes have the same total weight over the
        files. None for no balancing.
      advantages_key: jsonl key or HDF5 data set that contains the advantage of each
        example, `[rows]`, or in HDF5 of each token, `[rows, length]`; required by
        `PolicyGradient`.
      columns: further columns of numbers that an objective reads, each as in
        `advantages_key`: a dict of jsonl keys or HDF5 data sets by the name that the
        objective gives the column.
      format: format of the lines: "pairs" of a prompt and a completion, "messages",
        "sharegpt" or "alpaca"; see `prompt_tuning.data.text.conversations`. "auto"
        recognizes it by the keys of the first line.
      chat: whether the chat template of the tokenizer renders pairs too; it always
        renders messages, and tasks of the format alpaca if there is one.
      chat_template: file of another chat template, which renders pairs too.
      chat_date: date for a chat template that uses the current date: "2026-07-26".
      prompt_key: jsonl key of the prompt; None if lines have no prompt.
      completion_key: jsonl key of the completion, which is learned.
      joiner: text inserted between prompt and completion.
      template: prompt of each example as a template of text, keys of the line and
        prompt vectors, such as "{soft:20} Review: {text} {soft:5} Mood:"; replaces
        `prompt_key`. Requires `Prompting.placement = 'template'`. The format is
        described in `prompt_tuning.data.text.templates`.
      prompt_id_key: jsonl key or HDF5 data set `[rows]` (usually `prompt_ids`) that
        selects each example's prompt in a multi-task prompt.
      prompt_id_names: names of the prompts in order, if jsonl lines contain names
        instead of numbers.
      prompt_id_aliases: further names of tasks and the names that they stand for, such
        as {"mnli_mismatched": "mnli"}.
      task_token: "index" or "sentinel" if the first token of each example (after the
        BOS that the tokenizer adds) selects its prompt, instead of `prompt_id_key`. The
        token is the prompt's number, or `<extra_id_k>` of T5 for prompt `k`, and is
        removed from the example.
      sentinel_vocabulary_size: one more than the id of `<extra_id_0>`: 32100 for T5;
        None for the size of the tokenizer's vocabulary.
      add_eos: whether the end-of-sequence token is appended to each completion and
        learned.
      on_too_long: "error" to reject examples that exceed the model's positions; "skip"
        to leave them out and count them; "truncate" or "truncate_left" to remove their
        beginning, so that a completion keeps its end; "truncate_right" to remove their
        end. See `Truncation`.
      maximum_examples: number of examples to use, from the first; None for all.
    """

def DeepPrompt(
    *, length: int, initializer: Initializer | Configured[Initializer] | None = None
) -> Configured[_DeepPrompt]:
    """Vectors that replace the previous block's output (Liu et al. 2022, section 3.2).

    `PromptEncoderLayer` of google-research/prompt-tuning with `replace_prompt`.

    Attributes:
      prompt: `[L, P, D]`, float32.
    """

def DroppedPrompt(
    *, inner: Configured[InputPrompt], rate: float = 0.1
) -> Configured[_DroppedPrompt]:
    """A prompt with dropout: each training step sets some of its numbers to 0.

    The other numbers are scaled by `1 / (1 - rate)`. Without a key nothing is dropped.

    Attributes:
      inner: the prompt without dropout.
      rate: probability that a number is dropped.
    """

def Evaluation(
    *,
    data: Any,
    exact_match: bool = False,
    metrics: Sequence[str] = (),
    labels: Sequence[str] | None = None,
    length_normalize: bool = False,
    calibrate: Sequence[str] | None = None,
    new_tokens: int = 32,
    references_key: str | None = None,
    category_key: str | None = None,
    category_names: Sequence[str] | str | None = None,
    resamples: int = 1000,
    bootstrap_seed: int = 0,
) -> Configured[_Evaluation]:
    """Metrics to compute on held-out data.

    Attributes:
      data: held-out files; columns for a training objective are not read.
      exact_match: whether to measure the share of completions that greedy decoding
        generates token for token.
      metrics: additional metrics: "squad" (F1 and exact match of normalized words),
        "rouge" and "bleu" of generated completions, and "perplexity".
      labels: verbalizers. The completion of each example is one of them, and the
        model's answer is the one that it finds most likely. None for a task without
        labels.
      length_normalize: whether a label's score is the mean of its tokens'
        log-probabilities instead of the sum.
      calibrate: inputs without content, such as ["N/A"]; the labels are ranked a second
        time by their probabilities relative to those for these inputs. See
        `calibration`.
      new_tokens: maximum number of generated tokens.
      references_key: jsonl key of the right completions, a text or a list of texts, for
        the metrics of generated text; if None, the completion is the only one.
      category_key: key of each example's category, for metrics by category: a jsonl
        key, or an HDF5 data set (usually `category_ids`) with -1 for no category.
      category_names: names of the numbers in that data set, in order, or a JSON file
        that maps names to numbers, such as `category_to_id.json`.
      resamples: bootstrap resamples for the 95 % intervals.
      bootstrap_seed: seed of the resampling.

    Raises:
      InputError: if the settings contradict each other or name an unknown metric.
    """

def FactorizedMultiTaskPrompt(
    *,
    length: int,
    tasks: int,
    rank: int = 1,
    initializer: Initializer | Configured[Initializer] | None = None,
    factors: Factors | Configured[Factors] | None = None,
) -> Configured[_FactorizedMultiTaskPrompt]:
    """A task's prompt is `shared * (columns[n] @ rows[n])` (Wang et al. 2023).

    Attributes:
      shared: `[P, D]`, float32.
      columns: `[N, P, r]`, float32.
      rows: `[N, r, D]`, float32.
    """

def IA3(*, regexes: Sequence[str] = ...) -> Configured[_IA3]:
    """Trained scales of keys, values and the feed-forward layer's inner values.

    The input of `mlp/down` is scaled, also of a shared expert, and the output of any
    other projection.
    """

def InferenceOnlyPrompt(
    *, length: int, initializer: Initializer | Configured[Initializer] | None = None
) -> Configured[_InferenceOnlyPrompt]:
    """A constant prompt without parameters: nothing is restored or trained."""

def InstancePrompt(
    *,
    length: int,
    hidden_width: int = 16,
    initializer: Initializer | Configured[Initializer] | None = None,
) -> Configured[_InstancePrompt]:
    """Trained vectors plus a network's output for the mean embedding of the text.

    The network has one narrow hidden layer: `up(relu(down(mean)))` (Wu et al. 2022,
    "IDPG: An Instance-Dependent Prompt Generation Method", section 3.2). Its output is
    initially zero, so that the prompt starts as a soft prompt.

    Attributes:
      prompt: vectors that all examples share, `[P, D]`, float32.
      down: `[D, W]`, float32.
      down_bias: `[W]`, float32.
      up: `[W, P, D]`, float32.
    """

def KeyValuePrefix(
    *,
    length: int,
    initializer: PrefixInitializer | Configured[PrefixInitializer] | None = None,
) -> Configured[_KeyValuePrefix]:
    """Trained keys and values of `P` positions before every row, in every block.

    Keys are stored as attention reads them, after any rotation, as in PEFT. Text starts
    at position `P`.

    Attributes:
      prompt: keys and values, `[L, 2, P, G, K]`, float32.
    """

def LoRA(
    *,
    regexes: Sequence[str] = ...,
    rank: int = 8,
    alpha: float = 16.0,
    rank_stabilized: bool = False,
) -> Configured[_LoRA]:
    """Low-rank adaptation. Initially it changes nothing.

    Attributes:
      rank: rank `r` of the product.
      alpha: the product is multiplied by `alpha / r`.
      rank_stabilized: whether it is multiplied by `alpha / sqrt(r)` instead
        (Kalajdzievski 2023).
    """

def MLPPrompt(
    *, inner: Configured[InputPrompt], hidden_width: int | None = None
) -> Configured[_MLPPrompt]:
    """Two hidden layers over each vector (Liu et al. 2021, "GPT Understands, Too").

    Computes `output(relu(middle(relu(hidden(x)))))`, as PEFT's P_TUNING does. The
    initial vectors are the network's output, not the inner prompt's vectors.

    Attributes:
      inner: the prompt whose vectors are the network's input.
      hidden, middle, output: linear layers `[D, W]`, `[W, W]` and `[W, D]`.
    """

def MeshShape(
    *,
    stage: int = 1,
    data: int = -1,
    fsdp: int = 1,
    tensor: int = 1,
    rules: Configured[_AxisRules] | None = None,
) -> Configured[_MeshShape]:
    """Number of devices along each axis; -1, for one axis at most, means the rest.

    The number of stages is always given.

    Attributes:
      stage: stages of a pipeline, each with blocks of the model and with devices along
        the other axes.
      data: devices that split the rows of a batch; each group along the other axes has
        all parameters.
      fsdp: devices that split rows and also parameters, which are gathered one block at
        a time.
      tensor: devices that split heads, feed-forward columns and the vocabulary.
      rules: mesh axis of each parameter dimension; Megatron's if None.

    Raises:
      InputError: if a number is neither -1 nor at least 1, or two are -1.
    """

def OutputGradients(
    files: Mapping[str, str], objective: Configured[_TokenObjective] = ...
) -> Configured[_OutputGradients]:
    """Adds fixed output gradients of intermediate arrays to the loss of the tokens.

    The loss is `(loss sum + sum(array * gradient)) / divisor`, so the gradient at each
    array is that of its file over the objective's divisor.

    Attributes:
      files: `.npy` file by path of an intermediate array, such as
        `decoder/layers/3/hidden`; see `core.intermediates`. It has shape `[D]`, for
        every position, or `[S, D]`, and is the same for every row. Padding has none.
      objective: loss of the tokens.

    Raises:
      InputError: if no file is given, or a path is malformed.
    """

def ParameterGroup(
    regexes: Sequence[str],
    optimizer: GradientTransformation | Configured[GradientTransformation],
) -> Configured[_ParameterGroup]:
    """Parameters that one optimizer trains.

    Attributes:
      regexes: expressions that each match the whole slash-joined path of a parameter.
      optimizer: transformation that updates the parameters.
    """

def Pipeline(
    *,
    schedule: Literal["auto", "none", "gpipe", "1f1b", "1f1b-2", "zb-h1"] = "auto",
    microbatches: int | None = None,
    two_stage: bool | None = None,
    layers: Sequence[int] | None = None,
    joined_p2: bool = False,
    virtual: int = 1,
) -> Configured[_Pipeline]:
    """How the stages of a pipeline (`MeshShape.stage`) share a step.

    Attributes:
      schedule: order of the operations; see `schedules.stage_orders`. "auto" chooses
        "zb-h1" if the backward pass has two parts, and else "1f1b".
      microbatches: number of micro-batches into which the rows of a step are divided,
        a multiple of `Run.accumulate`; `Run.accumulate` if None.
      two_stage: whether the weights' gradients are computed apart from the inputs',
        where a stage would otherwise wait. If None, they are where they take more than
        a tenth of the backward pass, which is not so for prompts and small adapters.
      layers: number of blocks of each stage, an encoder's first; None balances
        the stages by counted operations, the head included. With `virtual`, of each
        chunk: the first one of each stage, then the second one of each, and so on.
      virtual: chunks of blocks of each stage, `v`. With several, stage `s` of `N` has
        the model's chunks `s`, `s + N`, `s + 2 N`, ..., and "1f1b" interleaves them as
        Megatron does: a step waits `v` times less, and sends `v` times more.
      joined_p2: whether the gradients of weights that are left at the end of a step are
        computed as one product for all of their micro-batches.

    Raises:
      InputError: if a value cannot be used, or two contradict each other.
    """

def PolicyGradient() -> Configured[_PolicyGradient]:
    """Cross-entropy of each token times its advantage: REINFORCE on given texts.

    If the model itself wrote the texts, the gradient is that of minus the expected
    advantage (Williams 1992, with a baseline in the advantage): texts that did better
    than expected become more likely, others less likely. The advantages come from the
    data (`DataSource.advantages_key`). Their weighted sum is divided by the sum of the
    weights.
    """

def Pretrained(
    *,
    checkpoint: str,
    config: Configured[ModelConfig] | None = None,
    tokenizer: str | None = None,
    compute_dtype: str = "float32",
    parameter_dtype: str = "float32",
    weights: str = "device",
    trained_weights: str = "device",
    slices: int | None = None,
    checkpoint_activation: bool = True,
    dropout_rate: float = 0.0,
    attention: str = "auto",
    rematerialization: Configured[_Rematerialization] | None = None,
    encoder_rematerialization: Configured[_Rematerialization] | None = None,
    eos_id: int | None = None,
    assignment_map: Sequence[tuple[str, str | None]] = ...,
    fallback_to_scratch: bool = True,
) -> Configured[_Pretrained]:
    """Source of a frozen model, and how it is stored and computed.

    Attributes:
      checkpoint: a Hugging Face folder, a T5X checkpoint, the name of a bundled model
        such as "bundled:skills-decoder", or of a model of the Hugging Face hub such as
        "Qwen/Qwen3-0.6B", with a revision after `@` if it is not the main one.
      config: config of a T5X checkpoint, which contains none; None for a Hugging Face
        folder.
      tokenizer: file or folder of the tokenizer, or a bundled model, which has one; the
        checkpoint's folder if None.
      compute_dtype: dtype of activations, "float32" or "bfloat16".
      parameter_dtype: dtype of the frozen weights, cast once when read: "float32",
        "bfloat16", or "int8" for the projections of the blocks and bfloat16 for the
        other parameters.
      weights: where the weights of the blocks are kept: "device" memory;
        "pinned_host" memory, from which each block is copied to the device; or
        "streamed" layer by layer from the files, for models larger than host memory.
      trained_weights: where the checkpoint's weights are kept that parameter groups
        train: on the "device", or, with streamed weights, on the "host" with their
        gradients and optimizer state, and updated layer by layer.
      slices: number of slices that the layers of a stack are read in with streamed
        weights, two of which are in memory; None for slices of one layer.
      checkpoint_activation: with streamed weights, whether the backward pass computes
        each layer again from its input, which waits in host memory; if not, the
        activations of all layers stay on the device.
      dropout_rate: dropout rate in training.
      attention: "flash" computes attention with a fused kernel of the device, cuDNN's
        on NVIDIA GPUs; "reference" without one; "auto" with one where it can be used.
      rematerialization: activations that the backward pass recomputes; None for none.
      encoder_rematerialization: the same for an encoder; as in the decoder if None.
      eos_id: token that ends a text, instead of the tokenizer's EOS; generation also
        stops at the tokens that the model's files name.
      assignment_map: (regex, source or None) pairs; see `plan_restore`.
      fallback_to_scratch: whether parameters to which the map assigns None may be
        fresh.
    """

def ProjectMultiTaskPrompt(
    *,
    length: int,
    tasks: int,
    shared_features: int | None = None,
    initializer: Initializer | Configured[Initializer] | None = None,
    task_initializer: Initializer | Configured[Initializer] | None = None,
) -> Configured[_ProjectMultiTaskPrompt]:
    """A task's prompt is an affine map of the shared vectors: `K shared[p] + bias`.

    Attributes:
      shared: `[P, H]`, float32, with `H` shared features.
      task: `[N, D * H + D]`, float32: flattened kernel `[D, H]`, then bias `[D]`.
    """

def ProjectedKeyValuePrefix(
    *, length: int, hidden: int | None = None
) -> Configured[_ProjectedKeyValuePrefix]:
    """A prefix computed by `Linear(tanh(Linear(embedding)))` (Li and Liang 2021, 4.3).

    PEFT's `prefix_projection`. On export it is evaluated into plain keys and values.

    Attributes:
      embedding: `[P, D]`.
      inner: linear layer `[D, hidden]`.
      outer: linear layer `[hidden, L * 2 * G * K]`.
    """

def PromptPool(
    *,
    length: int,
    size: int = 4,
    initializer: Initializer | Configured[Initializer] | None = None,
) -> Configured[_PromptPool]:
    """A mixture of `K` prompts, weighted by attention of the text over their keys.

    Each prompt has a trained key, as in L2P (Wang et al. 2022, "Learning to Prompt for
    Continual Learning", section 4.1), which picks the prompts with the nearest keys.
    Here the weights are a softmax over all keys, so that no second loss is needed to
    train them (Asai et al. 2022, "ATTEMPT", section 3.2).

    Attributes:
      prompts: `[K, P, D]`, float32.
      keys: `[K, D]`, float32.
    """

def Prompting(
    placement: str = "prefix",
    prefix_attention: bool = False,
    visibility: Sequence[str] | None = None,
    execution: str = "auto",
    beyond_window: bool = False,
) -> Configured[_Prompting]:
    """Position, visibility and execution of a prompt at the input.

    Attributes:
      placement: position in the row: "prefix", "after_bos", "suffix" (before the EOS of
        an encoder's row), "suffix_after_eos", or "template" if the data sets it.
      prefix_attention: whether, in a decoder-only model, the prompt and the row's given
        tokens see each other in both directions, as in a prefix language model.
      visibility: what the prompt sees where attention is bidirectional (encoders,
        `prefix_attention`): some of "prompt->prompt", "prompt->prompt;causal" and
        "prompt->input"; the whole row if None. Text sees the prompt in any case. A
        prompt that comes first and sees no text runs once for the batch.
      execution: "shared", "joined", or "auto", which is shared wherever that gives the
        same results.
      beyond_window: whether layers with a window keep the prompt or prefix in sight of
        every token; if not, they leave the window like any token, as in PEFT.
    """

def Rematerialization(
    *,
    policy: str = "none",
    names: Sequence[str] = (),
    skip_first: int = 0,
    skip_last: int = 0,
    offload: bool = False,
    every: int = 1,
    ranges: Sequence[Configured[_BlockRange]] = (),
) -> Configured[_Rematerialization]:
    """Which activations of a stack are saved for the backward pass, and where.

    Attributes:
      policy: which inner activations are saved, while the others are recomputed: "none"
        recomputes nothing; "dots" saves the output of each projection; "attention"
        saves the output of attention before its output projection; "names" saves the
        activations listed in `names`; "nothing" saves none, so that each block runs
        twice.
      names: names for the policy "names": the blocks name "query", "keys", "values",
        "attention", "gate" and "up", and your code may name others with `named`.
      skip_first: number of blocks at the start that recompute only element-wise
        operations and offload nothing.
      skip_last: number of such blocks at the end.
      offload: whether each block's input is moved to the host's pinned memory, and back
        when the backward pass reaches the block.
      every: number of consecutive blocks that are wrapped together: only the input of
        the first is saved (or offloaded), and all of them are recomputed at once. The
        last blocks of a stack that this number does not divide are wrapped together.
      ranges: blocks that follow another policy than the fields above.

    Raises:
      InputError: if the fields contradict each other.
    """

def ResidualPrompt(
    *,
    inner: Configured[InputPrompt],
    hidden_width: int | None = None,
    norm_scale: float = 1.0,
) -> Configured[_ResidualPrompt]:
    """`x + norm(up(relu(down(x))))` over each vector (Razdaibiedina et al. 2023).

    Attributes:
      inner: the prompt whose vectors are the network's input.
      down, up: linear layers `[D, W]` and `[W, D]`.
      scale, bias: `[D]`, parameters of the layer norm after them.
    """

def SoftPrompt(
    *, length: int, initializer: Initializer | Configured[Initializer] | None = None
) -> Configured[_SoftPrompt]:
    """`P` trained vectors, shared by all examples (Lester et al. 2021, section 2).

    Attributes:
      prompt: the vectors, `[P, D]`, in float32 whatever the model computes in.
    """

def TokenObjective(
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    normalizer: str | float | None = "num_real_target_tokens",
    soft_cap: float | None = None,
) -> Configured[_TokenObjective]:
    """Cross-entropy of each target token, summed with the loss weights of the data.

    Attributes:
      z_loss: weight of `log(Z)**2`; see `token_loss`.
      label_smoothing: from 0 to below 1; see `token_loss`.
      normalizer: divisor of the weighted sum, by its T5X name:
        "num_real_target_tokens" (the sum of the weights), "num_total_target_tokens"
        (all targets, padding included, except in rows that only fill a batch),
        "average_per_sequence" (the mean of each sequence, averaged; in packed rows
        each example is a sequence), a number, or None for the plain sum.
      soft_cap: bound on the absolute value of each logit, or None; see `token_loss`.
        It applies to this loss alone: evaluation and generation use the model's own
        logits.

    Raises:
      InputError: if a number is out of range, or a normalizer of that name does not
        exist.
    """

def WaywardPrompt(
    *,
    text: str,
    gamma: float = 0.01,
    initializer: Initializer | Configured[Initializer] | None = None,
) -> Configured[_WaywardPrompt]:
    """Vectors that start at a text's embeddings, with a penalty on their distance.

    The loss gains `gamma * sum_p |prompt[p] - discrete[p]|^2 / P` (Khashabi et al.
    2022, "Prompt Waywardness").

    Attributes:
      prompt: the vectors, `[P, D]`, float32; `P` is the number of the text's tokens.
      gamma: weight of the distance.
    """

def adafactor(
    learning_rate: float | Schedule | Configured[Schedule] = 0.3,
    *,
    decay_rate: float = 0.8,
    decay_offset: int = 0,
    multiply_by_parameter_scale: bool = False,
    clipping_threshold: float | None = 1.0,
    momentum: float | None = None,
    dtype_momentum: Literal["float32", "bfloat16"] = "float32",
    weight_decay_rate: float | None = 1e-05,
    eps: float = 1e-30,
    factored: bool = True,
    min_dim_size_to_factor: int = 128,
) -> Configured[GradientTransformation]:
    """Adafactor (Shazeer and Stern 2018); the defaults are the recipe of Lester 2021.

    Args:
      learning_rate: a number or an optax schedule.
      decay_rate: exponent with which second moments decay.
      decay_offset: number of steps that the decay counts as done.
      multiply_by_parameter_scale: whether an update is multiplied by the RMS of its
        parameter.
      clipping_threshold: maximum RMS of an update; None for none.
      momentum: decay of the average of updates; None for no such average.
      dtype_momentum: type in which this average is stored.
      weight_decay_rate: fraction of the parameter subtracted per step, independent of
        the learning rate; None for none.
      eps: added to squared gradients.
      factored: whether second moments of matrices are stored by row and column.
      min_dim_size_to_factor: smallest matrices of which they are.

    Raises:
      InputError: if a number is out of range, which its type states.
    """

def adamw(
    learning_rate: float | Schedule | Configured[Schedule] = 0.001,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-08,
    eps_root: float = 0.0,
    mu_dtype: Literal["float32", "bfloat16"] | None = None,
    nesterov: bool = False,
) -> Configured[GradientTransformation]:
    """AdamW, after clipping the global norm of the gradient if `clip_norm` is set.

    Loshchilov and Hutter 2019, "Decoupled weight decay regularization".

    Args:
      learning_rate: a number or an optax schedule.
      weight_decay: fraction of the parameter subtracted per step, times the learning
        rate.
      clip_norm: maximum global norm of the group's gradient.
      b1: decay of the average of gradients.
      b2: decay of the average of squared gradients.
      eps: added to the root of that average.
      eps_root: added to that average under the root.
      mu_dtype: type in which the average of gradients is stored; None for that of the
        parameter.
      nesterov: whether the momentum is Nesterov's.

    Raises:
      InputError: if a number is out of range, which its type states.
    """

def factors_of_ones(scale: float = 0.02) -> Configured[Factors]:
    """Factors whose product is 1, so that each task starts at the shared prompt.

    The first rank gives that product. The other ranks have columns of standard
    deviation `scale` and rows of 0, so that they can diverge.
    """

def from_class_labels(
    labels: Sequence[str], fallback: Initializer | Configured[Initializer] | None = None
) -> Configured[Initializer]:
    """Vector `i` is the mean embedding of label `i`; the rest comes from `fallback`.

    Args:
      labels: the verbalizers; those beyond the prompt's length are dropped, with a
        warning.
      fallback: initializer of the other vectors; uniform if None.

    Raises (when it initializes the prompt):
      InputError: if a label has no tokens.
    """

def from_file(path: str | Path) -> Configured[Initializer]:
    """The vectors in a file: NumPy, a run's checkpoint, or a PEFT adapter folder.

    Raises (when it initializes the prompt):
      InputError: if the file cannot be read or its shape is not the prompt's.
    """

def from_sampled_vocabulary(
    population_size: int | None = 5000,
) -> Configured[Initializer]:
    """Rows drawn from the first `population_size` rows of the embedding table.

    Rows are drawn without replacement, unless the prompt is longer than the population
    (with a warning).

    Args:
      population_size: number of rows to draw from, which are the most frequent tokens
        in most vocabularies; None, or more than the table has, for all.

    Raises (when it initializes the prompt):
      InputError: if the population is not positive.
    """

def from_template(
    template: str, fallback: Initializer | Configured[Initializer] | None = None
) -> Configured[Initializer]:
    """The vectors of `{soft:"words"}` are the embeddings of the words' tokens.

    Args:
      template: the data's template; see `prompt_tuning.data.text.templates`.
      fallback: initializer of the vectors without words; uniform if None.

    Raises (when it initializes the prompt):
      InputError: if the template cannot be read, or has another number of vectors.
    """

def from_text(
    text: str, fallback: Initializer | Configured[Initializer] | None = None
) -> Configured[Initializer]:
    """Vector `i` is the embedding of the text's token `i`.

    Args:
      text: the text; tokens beyond the prompt's length are dropped, with a warning.
      fallback: initializer of the vectors after the text; uniform if None.

    Raises (when it initializes the prompt):
      InputError: if the text has no tokens.
    """

def normal(deviation: float = 0.02) -> Configured[PrefixInitializer]:
    """Normally distributed numbers.

    PEFT uses a deviation of 1, far from the keys and values that a model computes.

    Args:
      deviation: standard deviation.
    """

def normal_factors(scale: float = 0.02) -> Configured[Factors]:
    """Normal factors of standard deviation `scale`, as in PEFT.

    Their product has the deviation `sqrt(r) * scale**2`. With 0.02 all prompts start
    near zero, whatever the shared prompt is.
    """

def optax_chain(parts: Sequence[Any]) -> Configured[GradientTransformation]:
    """Returns transformations one after another; the first receives the gradient.

    Args:
      parts: the transformations, at least one.

    Raises:
      InputError: if a part is not a transformation.
    """

def optax_transformation(
    name: str,
    arguments: Mapping[str, float | bool | str | None] | None = None,
    learning_rate: float | Schedule | Configured[Schedule] | None = None,
) -> Configured[GradientTransformation]:
    """Returns the transformation that a public function of optax makes.

    Args:
      name: name of the function, such as `lion`, `sgd` or `clip_by_global_norm`.
      arguments: its arguments by name: numbers, texts, true, false or None.
      learning_rate: the argument of this name, a number or a schedule.

    Raises:
      InputError: if there is no such function, an argument is missing, unknown or
        refused, or the transformation needs more than gradients and parameters.
    """

def t5_config(
    *,
    width: int,
    feed_forward_width: int,
    layers: int,
    heads: int,
    head_width: int = 64,
    encoder_layers: int | None = None,
    vocabulary_size: int = 32128,
    version: Literal["1.0", "1.1"] = "1.1",
    relative_buckets: int = 32,
    relative_maximum_distance: int = 128,
    relative_bias_in_each_block: bool = False,
    norm_epsilon: float = 1e-06,
    maximum_positions: int | None = None,
    pad_id: int = 0,
    bos_id: int | None = None,
    eos_id: int | None = 1,
    decoder_start_id: int = 0,
) -> Configured[ModelConfig]:
    """Returns the config of a T5, version 1.0 (tied, ReLU) or 1.1 (untied, gated GELU).

    Args:
      width: `D`.
      feed_forward_width: `F`.
      layers: number of blocks of the decoder, and of the encoder unless
        `encoder_layers` is given.
      heads: `H`.
      head_width: `K`; `H * K` may differ from `D`.
      encoder_layers: number of blocks of the encoder.
      vocabulary_size: `V`.
      version: "1.0" or "1.1".
      relative_buckets: buckets of the relative position bias, at least 4.
      relative_maximum_distance: distance from which all keys share the last bucket.
      relative_bias_in_each_block: whether blocks have their own bias (UMT5).
      norm_epsilon: added to the mean square.
      maximum_positions: maximum sequence length; None if it is unlimited.
      pad_id: token that fills rows.
      bos_id: token that begins a text; None for none.
      eos_id: token that ends a text; None for none.
      decoder_start_id: token that the decoder starts from.

    Raises:
      InputError: for an unknown version, and for sizes that are out of range.
    """

def uniform(scale: float = 0.5) -> Configured[Initializer]:
    """Uniform on `[0, scale)`.

    The range is not symmetric, unlike in the paper (Lester et al. 2021), but as in
    its published code.
    """

def warmup_constant(peak: float, *, warmup_steps: int = 10) -> Configured[Schedule]:
    """Linear warm-up to `peak`, then `peak`.

    Args:
      peak: maximum learning rate.
      warmup_steps: number of steps of the warm-up; 0 for none.

    Raises:
      InputError: if a number is out of range, which its type states.
    """

def warmup_cosine_decay(
    peak: float,
    steps: int = ...,
    *,
    warmup_steps: int = 10,
    final_fraction: float = 0.05,
) -> Configured[Schedule]:
    """Linear warm-up to `peak`, then half a cosine down to `final_fraction` of it.

    Loshchilov and Hutter 2017, "SGDR", equation 5, without restarts.

    Args:
      peak: maximum learning rate.
      steps: number of steps of the whole run.
      warmup_steps: as in `warmup_linear_decay`.
      final_fraction: fraction of `peak` that the step after the last would have.

    Raises:
      InputError: if a number is out of range, which its type states.
    """

def warmup_linear_decay(
    peak: float,
    steps: int = ...,
    *,
    warmup_steps: int = 10,
    final_fraction: float = 0.05,
) -> Configured[Schedule]:
    """Linear warm-up to `peak`, then linear decay to `final_fraction` of it.

    Args:
      peak: maximum learning rate.
      steps: number of steps of the whole run.
      warmup_steps: number of steps of the warm-up; half of the run, with a warning, if
        the run has no more steps than this.
      final_fraction: fraction of `peak` that the step after the last would have.

    Raises:
      InputError: if a number is out of range, which its type states.
    """

def warmup_rsqrt_decay(peak: float, *, warmup_steps: int = 10) -> Configured[Schedule]:
    """Linear warm-up to `peak`, then `peak * sqrt(warmup_steps / step)`.

    The schedule with which T5 was trained (Raffel et al. 2020, section 3.1.2), apart
    from the warm-up, during which T5's rate was constant.

    Args:
      peak: maximum learning rate.
      warmup_steps: number of steps of the warm-up, at least 1.

    Raises:
      InputError: if a number is out of range, which its type states.
    """
