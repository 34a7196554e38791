"""The public names, as editors and type checkers see them.

Written by `python -m scripts.make_stub`; change the sources.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from optax import GradientTransformation, Schedule

from prompt_tuning.api.memories import remember as remember
from prompt_tuning.api.memory_composition import compose as compose
from prompt_tuning.api.memory_composition import retrieve as retrieve
from prompt_tuning.api.model import Model as Model
from prompt_tuning.api.reinforcement import reinforce as reinforce
from prompt_tuning.api.tune import TunedModel as TunedModel
from prompt_tuning.api.tune import load as load
from prompt_tuning.api.tune import load_tuned as load_tuned
from prompt_tuning.api.tune import tune as tune
from prompt_tuning.config.deferred_factories import Configured
from prompt_tuning.config.run import Run as Run
from prompt_tuning.core.batch import Batch as Batch
from prompt_tuning.core.errors import InputError as InputError
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameter_groups import ParameterGroup as _ParameterGroup
from prompt_tuning.core.rematerialization import BlockRange as _BlockRange
from prompt_tuning.core.rematerialization import Rematerialization as _Rematerialization
from prompt_tuning.decoding.beam_search import BeamSearch as BeamSearch
from prompt_tuning.decoding.sampling_settings import Sampling as Sampling
from prompt_tuning.losses.class_objective import ClassObjective as _ClassObjective
from prompt_tuning.losses.context_distillation import (
    ContextDistillation as _ContextDistillation,
)
from prompt_tuning.losses.context_distillation import (
    OnPolicyDistillation as _OnPolicyDistillation,
)
from prompt_tuning.losses.contrastive import Contrastive as _Contrastive
from prompt_tuning.losses.dpo import DPO as _DPO
from prompt_tuning.losses.fixed_gradients import OutputGradients as _OutputGradients
from prompt_tuning.losses.grpo import GRPO as _GRPO
from prompt_tuning.losses.kto import KTO as _KTO
from prompt_tuning.losses.orpo import ORPO as _ORPO
from prompt_tuning.losses.policy_gradient import PolicyGradient as _PolicyGradient
from prompt_tuning.losses.simpo import SimPO as _SimPO
from prompt_tuning.losses.token_objective import TokenObjective as _TokenObjective
from prompt_tuning.prompts.cpt import ContextPrompt as _ContextPrompt
from prompt_tuning.prompts.deep import AddedDeepPrompt as _AddedDeepPrompt
from prompt_tuning.prompts.deep import DeepPrompt as _DeepPrompt
from prompt_tuning.prompts.factorized import (
    FactorizedMultiTaskPrompt as _FactorizedMultiTaskPrompt,
)
from prompt_tuning.prompts.factorized import Factors
from prompt_tuning.prompts.initializers import Initializer, TextInitializer
from prompt_tuning.prompts.input_dependent import InstancePrompt as _InstancePrompt
from prompt_tuning.prompts.input_dependent import PromptPool as _PromptPool
from prompt_tuning.prompts.low_rank_adapters import LoRA as _LoRA
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
from prompt_tuning.prompts.prompt_module import InputPrompt
from prompt_tuning.prompts.reparameterized import MLPPrompt as _MLPPrompt
from prompt_tuning.prompts.reparameterized import ResidualPrompt as _ResidualPrompt
from prompt_tuning.prompts.soft import InferenceOnlyPrompt as _InferenceOnlyPrompt
from prompt_tuning.prompts.soft import SoftPrompt as _SoftPrompt
from prompt_tuning.prompts.state_prefix import StatePrefix as _StatePrefix
from prompt_tuning.prompts.wayward import WaywardPrompt as _WaywardPrompt
from prompt_tuning.prompts.wrapped import DroppedPrompt as _DroppedPrompt
from prompt_tuning.settings.axis_rules import AxisRules as _AxisRules
from prompt_tuning.settings.class_head import ClassHead as _ClassHead
from prompt_tuning.settings.data_source import DataSource as _DataSource
from prompt_tuning.settings.evaluation_settings import Evaluation as _Evaluation
from prompt_tuning.settings.mesh_shape import MeshShape as _MeshShape
from prompt_tuning.settings.pipeline import Pipeline as _Pipeline
from prompt_tuning.settings.pretrained import Pretrained as _Pretrained
from prompt_tuning.settings.prompting import Prompting as _Prompting
from prompt_tuning.settings.rollout_settings import Rollouts as _Rollouts
from prompt_tuning.settings.trained_tokens import TrainedTokens as _TrainedTokens
from prompt_tuning.training.gradients import gradients as gradients
from prompt_tuning.training.loop import TrainingResult as TrainingResult
from prompt_tuning.training.loop import train as train
from prompt_tuning.training.opening import open_run as open_run
from prompt_tuning.training.state import TrainState as TrainState
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
    """Prompts of `N` tasks, each the sum `shared + task[n]` of shared and own vectors.

    Prefer a multi-task prompt to `N` runs if the tasks are similar: through `shared`,
    each learns from all examples. The data choose each example's task with
    `DataSource.prompt_id_key`; texts choose it with `prompt_id`.

    Args:
      length: number of vectors `P` of each task's prompt, at least 1.
      tasks: number of tasks `N`, at least 1.
      initializer: where the shared vectors start; uniform on `[0, 0.5)` if None.
      task_initializer: where each task's vectors start, as if they were a prompt;
        uniform on `[0, 0.5)` if None.

    Attributes:
      shared: `[P, D]`, float32.
      task: `[N, P, D]`, float32.

    Raises:
      InputError: if a number is below 1, or an initializer fails.

    Examples:
      >>> prompt = pt.AddMultiTaskPrompt(length=5, tasks=2)
      >>> trained, _ = model.attach(prompt).partition()
      >>> for path, array in trained.items():
      ...     print(path, array.shape)
      decoder/prompt/shared (5, 128)
      decoder/prompt/task (2, 5, 128)
    """

def AddedDeepPrompt(
    *, length: int, initializer: Initializer | Configured[Initializer] | None = None
) -> Configured[_AddedDeepPrompt]:
    """A soft prompt, plus vectors added to its hidden states in later blocks.

    `PromptEncoderLayer` of google-research/prompt-tuning with `add_prompt`. The added
    vectors start at zero, and the soft prompt has the same path as on its own, so a
    tuned `SoftPrompt` is a good start: `tune(..., start_from="runs/soft")`.

    Args:
      length: number of vectors `P`, at least 1.
      initializer: where the soft prompt starts; uniform on `[0, 0.5)` if None.

    Attributes:
      prompt: vectors of the first block, `[P, D]`, float32.
      added: vectors of the other blocks, `[L - 1, P, D]`, float32; initially zero.

    Raises:
      InputError: if the length is below 1, or the initializer fails.

    Examples:
      >>> trained, _ = model.attach(pt.AddedDeepPrompt(length=5)).partition()
      >>> for path, array in trained.items():
      ...     print(path, array.shape)
      decoder/prompt/added (3, 5, 128)
      decoder/prompt/prompt (5, 128)
    """

def AxisRules(
    preset: Literal[
        "megatron", "t5x_1_1", "t5x_2_1", "t5x_1_2", "t5x_2_2"
    ] = "megatron",
    rules: Sequence[Sequence[Any]] = (),
) -> Configured[_AxisRules]:
    """Mesh axes that the dimensions of the parameters are split over.

    You need it only for a layout other than Megatron's, e.g. to repeat one of T5X.
    Rules are tried in order; a mesh axis splits at most one dimension of an array.

    Attributes:
      preset: rules that apply after `rules`: "megatron", or one of T5X's layouts
        "t5x_1_1", "t5x_2_1", "t5x_1_2", "t5x_2_2", named after T5X's numbers of
        activation and parameter dimensions.
      rules: pairs of a dimension name and a mesh axis, a list of axes, or None.

    Raises:
      InputError: if a preset, name or mesh axis does not exist, or a rule is not
        supported.

    Examples:
      >>> rules = pt.AxisRules(rules=[("vocab", None)])
      >>> pt.MeshShape(tensor=2, rules=rules).build().rules.table[0]
      ('vocab', ())
    """

def BlockRange(
    *,
    start: int,
    stop: int,
    policy: Literal["none", "dots", "attention", "names", "nothing"] = "none",
    names: Sequence[str] = (),
    offload: bool = False,
    every: int = 1,
) -> Configured[_BlockRange]:
    """Consecutive blocks that rematerialize differently from the rest of their stack.

    Attributes:
      start: index of the first block.
      stop: index after the last block.
      policy: as in `Rematerialization`, like the other fields.
      names: names for the policy "names".
      offload: whether inputs of blocks are moved to the host's memory.
      every: number of consecutive blocks that are wrapped together.

    Raises:
      InputError: if the fields contradict each other.

    Examples:
      >>> first_two = pt.BlockRange(start=0, stop=2, policy="nothing")
      >>> small = pt.load(
      ...     "bundled:skills-decoder",
      ...     rematerialization=pt.Rematerialization(ranges=[first_two]),
      ... )
    """

def ClassHead(
    *,
    labels: Sequence[str] | None = None,
    pooling: Literal["last", "first", "mean"] | None = None,
    dense: bool = False,
    problem: Literal["single_label", "multi_label", "regression", "tokens"]
    | None = None,
) -> Configured[_ClassHead]:
    """A classification head `[C, D]`, trained on a frozen model.

    Use it alone or with any prompt or adapter. With many examples or classes, prefer it
    to ranking label texts (`pt.ClassObjective`): a step reads each example once. The
    model reads only the prompt; the completion names the class. The head scores the
    classes from the last state of the prompt, as `AutoModelForSequenceClassification`
    of transformers does, or from another pooling.

    `problem` selects the task and its loss, both as in transformers. With several
    labels per text or with regression, the completion is a list of names or a number.
    For tagging, the data has words and a tag for each (`tokens`, `tags`), and the head
    is that of `AutoModelForTokenClassification`. A model with a class head generates no
    text.

    An encoder (e.g. BERT) gets the same head as in transformers, with a bias per class
    and, for whole texts, a dense layer on the first state. That layer is trained where
    PEFT trains it (RoBERTa) or where the checkpoint has none; otherwise it is frozen
    (BERT's pooler).

    The head starts from the checkpoint's own if that has the same number of classes;
    rows are matched by name, or by position if the names differ. Otherwise it starts
    from a normal distribution with standard deviation 0.02, as in transformers.

    Attributes:
      labels: names of the `C` classes, or of the numbers in a regression; None for
        those of the checkpoint ("value" for a regression with one number).
      pooling: state that the head reads: the "last" state of the prompt, the "first"
        (encoders only; a soft prompt's first vector if one comes before the text), or
        the "mean" over all tokens. None for the model's own choice: "last" in decoders,
        "first" in most encoders.
      problem: "single_label" for one class per text; "multi_label" for any number of
        classes, each with its own probability; "regression" for numbers with squared
        error; "tokens" for the class of each word, read from the state of its first
        token. None for the checkpoint's problem, or else "single_label".
      dense: whether to train the dense layer where PEFT and the default leave it frozen
        (BERT's pooler).

    Raises:
      InputError: if there are fewer than two labels (one in a regression), or two are
        equal.

    Examples:
      >>> reviews = [("good: ", "yes"), ("awful: ", "no")] * 4
      >>> tuned = pt.tune(
      ...     model,
      ...     [pt.SoftPrompt(length=5), pt.ClassHead(labels=["yes", "no"])],
      ...     reviews,
      ...     steps=2,
      ...     progress=False,
      ... )
      >>> sorted(tuned.predict("good: ").probabilities)
      ['no', 'yes']
    """

def ClassObjective(
    labels: Sequence[str],
    loss: Literal["cross_entropy", "hinge"] = "cross_entropy",
    hinge: float = 0.2,
    length_normalize: bool = True,
) -> Configured[_ClassObjective]:
    """Loss over the `C` classes of an example; the model scores the text of each.

    Prefer it to `TokenObjective` for classification: it compares the labels with each
    other instead of with the whole vocabulary. Each example is read as `C` rows, one
    per label, so a step costs `C` times as much. The loss is averaged over the
    examples, using the data's example weights if there are any.

    Attributes:
      labels: texts of the classes; the completion of each example is one of them.
      loss: "cross_entropy" of the scores, or "hinge".
      hinge: margin of the hinge loss, in nats.
      length_normalize: whether a score is the (weighted) mean of its tokens'
        log-probabilities instead of their sum.

    Raises:
      InputError: if there are fewer than two labels, two are equal, or another setting
        is out of range.

    Examples:
      >>> reviews = [("good: ", "yes"), ("awful: ", "no")] * 4
      >>> tuned = pt.tune(
      ...     model,
      ...     pt.SoftPrompt(length=5),
      ...     reviews,
      ...     objective=pt.ClassObjective(labels=["yes", "no"]),
      ...     steps=2,
      ...     progress=False,
      ... )
      >>> tuned.predict("good: ").label in ("yes", "no")
      True
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
    """Prompts of `N` tasks with each vector's first features shared.

    The remaining features are the task's own. See `AddMultiTaskPrompt` on how an
    example chooses its task.

    Args:
      length: number of vectors `P` of each task's prompt, at least 1.
      tasks: number of tasks `N`, at least 1.
      shared_features: number of features that all tasks share.
      task_features: number of each task's features; both add up to the model's width
        `D`.
      initializer: where the shared vectors start; uniform on `[0, 0.5)` if None.
      task_initializer: where each task's vectors start, as if they were a prompt;
        uniform on `[0, 0.5)` if None.

    Attributes:
      shared: `[P, shared_features]`, float32.
      task: `[N, P, task_features]`, float32.

    Raises:
      InputError: if a number is below 1, the features do not add up to `D`, or an
        initializer fails.

    Examples:
      >>> prompt = pt.ConcatFeaturesMultiTaskPrompt(
      ...     length=5, tasks=2, shared_features=100, task_features=28
      ... )
      >>> trained, _ = model.attach(prompt).partition()
      >>> for path, array in trained.items():
      ...     print(path, array.shape)
      decoder/prompt/shared (5, 100)
      decoder/prompt/task (2, 5, 28)
    """

def ConcatTimeMultiTaskPrompt(
    *,
    length: int,
    tasks: int,
    task_length: int | None = None,
    initializer: Initializer | Configured[Initializer] | None = None,
    task_initializer: Initializer | Configured[Initializer] | None = None,
) -> Configured[_ConcatTimeMultiTaskPrompt]:
    """Prompts of `N` tasks: shared vectors, followed by the task's own.

    Shared and task vectors have different positions, so you can reuse the shared ones
    as a prompt. See `AddMultiTaskPrompt` on how an example chooses its task.

    Args:
      length: number of shared vectors, at least 1.
      tasks: number of tasks `N`, at least 1.
      task_length: number of each task's vectors after them; `length` if None.
      initializer: where the shared vectors start; uniform on `[0, 0.5)` if None.
      task_initializer: where each task's vectors start, as if they were a prompt;
        uniform on `[0, 0.5)` if None.

    Attributes:
      shared: `[P - task_length, D]`, float32.
      task: `[N, task_length, D]`, float32.

    Raises:
      InputError: if a number is below 1, or an initializer fails.

    Examples:
      >>> prompt = pt.ConcatTimeMultiTaskPrompt(length=4, tasks=2, task_length=1)
      >>> model.attach(prompt).partition()[0]["decoder/prompt/task"].shape
      (2, 1, 128)
    """

def ContextDistillation(
    context: str = "",
    context_key: str | None = None,
    contexts: Sequence[str] | str | None = None,
    cache_bytes: int = 1073741824,
    divergence: Literal["forward", "reverse", "jsd"] = "forward",
    beta: float | None = None,
    targets: Literal["exact", "top", "hidden"] = "exact",
    mass: float = 0.99,
    top: int = 64,
) -> Configured[_ContextDistillation]:
    """Teaches a prompt to replace a long text; the teacher is the model reading it.

    The loss at a position is a divergence over the whole vocabulary, in nats. Use it to
    replace an instruction or a handful of examples, which every request would repeat,
    by a few vectors. Positions and weights come from the data. Both models read its
    tokens, so its completions need not be right.

    Attributes:
      context: text that the teacher reads before each row, after the row's BOS. Set
        this or `context_key`.
      context_key: jsonl key or HDF5 data set `[rows]` with the text that the teacher
        reads before each example, or with its index in `contexts`. Rows with the same
        text share its keys and values.
      contexts: the texts that `context_key` numbers, from 0: a list, or a jsonl file
        with a `text`, or its token `ids`, per line. None if the column has texts.
      cache_bytes: maximum size of the keys and values of all `contexts`, which are then
        computed once for the run; if they are larger, each step computes those of its
        rows.
      divergence: "forward" for `KL(teacher || student)`: the student covers all that
        the teacher finds likely; "reverse" for `KL(student || teacher)`: it avoids what
        the teacher finds unlikely; "jsd" for the generalized Jensen-Shannon divergence,
        a mixture of both (Agarwal et al. 2024, equation 1).
      beta: weight of the teacher in the mixture of "jsd": near 0 it resembles the
        forward divergence, near 1 the reverse one. None for 0.5.
      targets: "exact" runs the teacher in each step. The other two run it once for
        every record, before the first step, and store its predictions in the run
        directory (`teacher.npz`): "hidden" its last hidden states, in the model's
        dtype, from which each step computes the teacher's exact distributions; "top"
        its likeliest tokens at each position, which take less room. Evaluations always
        run the teacher.
      mass: total probability of the tokens that "top" keeps at a position. The rest
        count as one outcome.
      top: maximum number of tokens that "top" keeps at a position.

    Raises:
      InputError: if the context is empty, or too long for the model together with a
        row, rows have contexts and are packed, or `beta` is given for another
        divergence.

    Examples:
      >>> loss = pt.ContextDistillation(context="upper: ")
      >>> prompt = pt.SoftPrompt(length=5)
      >>> tuned = pt.tune(
      ...     model, prompt, pairs, objective=loss, steps=2, progress=False
      ... )
    """

def ContextPrompt(
    *,
    examples: str | Sequence[Mapping[str, str]] | None = None,
    token_ids: Sequence[int] | None = None,
    token_types: Sequence[int] | None = None,
    epsilon: float = 0.1,
    format_epsilon: float = 0.1,
    decay: float = 1.0,
) -> Configured[_ContextPrompt]:
    """Vectors that start as examples in the context and stay near them (CPT).

    Examples in front of each text already steer a model. Here their embeddings are
    trained, each within a small distance, except for the answers, which stay (Blau et
    al. 2024). The loss also counts the answers in the context, once per row. Use it
    with few examples, where a free prompt overfits.

    Args:
      examples: the examples, each with a `prompt` and a `completion` that continues it
        (end each completion with your separator of examples), or a file with one as
        JSON per line.
      token_ids: ids of the tokens instead, PEFT's `cpt_token_ids`.
      token_types: type of each of these tokens, `cpt_tokens_type_mask`: in the first
        example 1 for the input's template, 2 for the input, 3 for the answer's template
        and 4 for the answer; 4 more in each next example. By default all are 1.
      epsilon: largest distance of an input token's vector from its embedding, in a
        model of width 2,048; it grows with the root of the width.
      format_epsilon: the same for tokens of templates.
      decay: factor of the loss of the last answer in the context, squared for the one
        before it, and so on; 1 counts all alike.

    Attributes:
      prompt: the vectors, `[P, D]`, float32; `P` is the number of tokens.

    Raises:
      InputError: if there are no examples, both forms are given, or the lists do not
        match.

    Examples:
      >>> shots = [{"prompt": "upper: ab=", "completion": "AB "}]
      >>> attached = model.attach(pt.ContextPrompt(examples=shots))
      >>> attached.prompt_vectors()["decoder/prompt"].shape
      (13, 128)
    """

def Contrastive(
    temperature: float = 0.05, pooling: Literal["last", "first", "mean"] = "mean"
) -> Configured[_Contrastive]:
    """InfoNCE of texts (van den Oord et al. 2018, equation 4).

    Use it to tune embeddings, i.e. the vectors from `Model.embed`. Each record has a
    `query`, a `positive` text and perhaps `negatives`. With the cosine `s` of two
    vectors, the loss of a query is `-log softmax(s / temperature)` of its positive
    among the positives and negatives of all records of the batch (Henderson et al.
    2017, section 4.4), so larger batches are harder. Micro-batches of `accumulate` do
    not share candidates. `accuracy` is the share of queries with the positive as the
    nearest candidate.

    Attributes:
      temperature: divisor of the cosines.
      pooling: states that make a text's vector: the mean over its tokens, the last or
        the first; as in `Model.embed`.

    Raises:
      InputError: if a setting is out of range.

    Examples:
      >>> rows = [{"query": p, "positive": c} for p, c in pairs]
      >>> tuned = pt.tune(
      ...     model,
      ...     pt.LoRA(rank=2),
      ...     rows,
      ...     objective=pt.Contrastive(temperature=0.05),
      ...     steps=2,
      ...     progress=False,
      ... )
      >>> tuned.embed(["abc"]).shape
      (1, 128)
    """

def DPO(
    beta: float = 0.1,
    loss: Literal["sigmoid", "robust", "hinge", "ipo"] = "sigmoid",
    label_smoothing: float = 0.0,
    length_normalize: bool = False,
    reference: str = "in_step",
) -> Configured[_DPO]:
    """Direct preference optimization (Rafailov et al. 2023, equation 7).

    Use it to teach which of two answers is better. Each record has a `prompt`, a
    `chosen` and a `rejected` answer. With `r` the log-ratio of an answer's
    probabilities under the trained and the frozen model, and `d = r_chosen -
    r_rejected`, the loss of a pair is

    - "sigmoid": `-(1 - s) log sigmoid(beta d) - s log sigmoid(-beta d)`, with `s =
      label_smoothing`;
    - "robust": `(-(1 - s) log sigmoid(beta d) + s log sigmoid(-beta d)) / (1 - 2 s)`,
      if a share `s` of the labels is wrong (Chowdhury et al. 2024, equation 9);
    - "hinge": `max(0, 1 - beta d)` (Zhao et al. 2023, equation 6);
    - "ipo": `(d - 1 / (2 beta))**2`, where `d` has means over the tokens of each answer
      (Azar et al. 2023, equation 17).

    The frozen model is the reference, so a step needs no second copy of the weights: it
    runs the same weights once more without the trained parameters. `accuracy` is the
    share of pairs with `d > 0`.

    Attributes:
      beta: strength of the pull towards the frozen model.
      loss: "sigmoid", "robust", "hinge" or "ipo".
      label_smoothing: assumed share of wrongly labeled pairs, for "sigmoid" and
        "robust".
      length_normalize: whether log-ratios are means over the tokens of each answer
        instead of sums; always so for "ipo".
      reference: "in_step" runs the frozen model in each step; "precomputed" runs it
        once for every record, before the first step, and stores its log-probabilities
        in the run directory (`reference.npz`), which takes less time from the second
        epoch on; "none" compares the probabilities themselves. To use another run of
        the same model as the reference, e.g. the one that this run starts from, give
        its directory; its log-probabilities are precomputed.

    Raises:
      InputError: if a number is out of range, or smoothing does not apply to the loss.

    Examples:
      >>> rows = [
      ...     {"prompt": p, "chosen": c.upper(), "rejected": c} for p, c in pairs
      ... ]
      >>> tuned = pt.tune(
      ...     model, pt.SoftPrompt(5), rows, objective=pt.DPO(), steps=2, progress=False
      ... )
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
    chat_template_kwargs: Mapping[str, Any] | None = None,
    turns: Literal["auto", "together", "apart"] = "auto",
    prompt_key: str | None = "prompt",
    completion_key: str = "completion",
    joiner: str = "",
    template: str | None = None,
    prompt_id_key: str | None = None,
    prompt_id_names: Sequence[str] | None = None,
    prompt_id_aliases: Mapping[str, str] | None = None,
    task_token: Literal["index", "sentinel"] | None = None,
    sentinel_vocabulary_size: int | None = None,
    add_eos: bool = True,
    on_too_long: Literal[
        "error", "skip", "truncate", "truncate_left", "truncate_right"
    ] = "error",
    maximum_examples: int | None = None,
) -> Configured[_DataSource]:
    """A data set: its files, and how they are read and batched.

    `tune` and other functions take these fields directly. Files of text have one object
    per line, with a prompt and a completion or with a conversation. HDF5 files have one
    row of token ids per example, with optional token types (0 prompt, 1 completion, 2
    padding, 3 separator).

    Attributes:
      files: files of one kind: HDF5 (`.hdf5`, `.h5`), `.jsonl`, `.json` (one list),
        `.csv`, `.tsv` (these four also with `.gz` or `.zst`) or `.parquet`; a glob such
        as "data/*.jsonl"; a folder of such files; or a folder that `prepare` wrote.
      split: which files to read from a folder that `prepare` wrote: "train", "dev" or
        "test". None for "train" in training data and "dev" in evaluation data.
      batch_size: rows per batch over all devices; a multiple of the number of devices
        that share the rows.
      batch_tokens: maximum number of tokens per batch, padding included. It replaces
        `batch_size`, so that batches of shorter rows have more rows; `batch_size` then
        only applies when rows are generated from or ranked.
      buckets: maximum number of lengths that rows are padded to. Lengths are chosen to
        minimize padding; each is compiled once. None for as many as save more time per
        pass over the data than a share of their compilation takes.
      packing: whether to pack several examples into a row. Each attends only to itself
        and its prompt. All batches then have the same shape, and `batch_size` counts
        packed rows.
      packed_length: number of tokens of a packed row (of its inputs in an
        encoder-decoder); None for four times the average length of an example.
      use_token_type_ids: whether token types decide which tokens are learned. True
        requires types in the data. With False every token is learned, including the
        padding of HDF5 rows. None for True if the data has types, else False.
      prompt_loss_weight: loss weight of prompt tokens (type 0) if token types are used.
      on_nothing_learned: what to do with a row that has no learned token: "error", or
        "skip" to leave it out and count it.
      separate_articles: whether a decoder-only model treats each part of an HDF5 row
        that ends with a separator (type 3) as a separate example, which does not attend
        to the rest of the row and is generated or ranked from its own prompt. If False,
        each row is one example, so texts are learned in the context of those before
        them.
      use_loss_weights: whether to multiply loss weights by the HDF5 data set
        `loss_weights [rows, length]`, if present.
      example_weight_key: jsonl key or HDF5 data set `[rows]` (usually
        `example_weights`) with the weight of each example; None for equal weights.
      balance_key: jsonl key or HDF5 data set with the class of each example, `[rows]`,
        or in HDF5 of each token, `[rows, length]` (e.g. `category_ids`). Loss weights
        are scaled so that every class has the same total weight over the files. None
        for no balancing.
      advantages_key: jsonl key or HDF5 data set with the advantage of each example,
        `[rows]`, or in HDF5 of each token, `[rows, length]`; required by
        `PolicyGradient`.
      columns: other numeric columns that an objective reads, in the same forms as
        `advantages_key`: a dict from the objective's name for a column to its jsonl key
        or HDF5 data set.
      format: format of the lines: "pairs" (prompt and completion), "messages",
        "sharegpt" or "alpaca", see `prompt_tuning.data.text.conversations`. "auto"
        recognizes it by the keys of the first line.
      chat: whether to render pairs with the tokenizer's chat template, too. Messages
        are always rendered with it, and so are alpaca tasks if there is a template.
      chat_template: file of a chat template to use instead; it renders pairs, too.
      chat_date: date for chat templates that print the current date, e.g. "2026-07-26".
      chat_template_kwargs: variables for the chat template, e.g. {"enable_thinking":
        False}. A conversation can set them itself.
      turns: "together" learns all answers of a conversation in one example; "apart"
        makes an example of each, with the context it has when it is answered; "auto"
        uses "together" where both give the answers the same context, else "apart".
      prompt_key: jsonl key of the prompt; None if lines have no prompt.
      completion_key: jsonl key of the completion, which is learned.
      joiner: text inserted between prompt and completion.
      template: prompt as a template of text, keys of the line and prompt vectors, e.g.
        "{soft:20} Review: {text} {soft:5} Mood:"; replaces `prompt_key`. Requires
        `Prompting.placement = 'template'`. See `prompt_tuning.data.text.templates` for
        the format.
      prompt_id_key: jsonl key or HDF5 data set `[rows]` (usually `prompt_ids`) that
        selects each example's prompt in a multi-task prompt.
      prompt_id_names: names of the prompts in order, if jsonl lines have names instead
        of numbers.
      prompt_id_aliases: other names for tasks, e.g. {"mnli_mismatched": "mnli"}.
      task_token: "index" or "sentinel" if the first token of each example (after the
        tokenizer's BOS) selects its prompt, instead of `prompt_id_key`. The token is
        the number `k` of the prompt or T5's `<extra_id_k>`, and is removed from the
        example.
      sentinel_vocabulary_size: one more than the id of `<extra_id_0>`: 32100 for T5;
        None for the size of the tokenizer's vocabulary.
      add_eos: whether to append the end-of-sequence token to each completion, and learn
        it.
      on_too_long: what to do with examples that exceed the model's positions: "error";
        "skip" to leave them out and count them; "truncate" or "truncate_left" to cut
        their beginning, which keeps the end of the completion; "truncate_right" to cut
        their end. See `Truncation`.
      maximum_examples: number of examples to use, from the first; None for all.

    Examples:
      >>> held_out = pt.DataSource(files=pairs[:4], batch_size=4)
      >>> evaluation = pt.Evaluation(data=held_out, exact_match=True)
    """

def DeepPrompt(
    *, length: int, initializer: Initializer | Configured[Initializer] | None = None
) -> Configured[_DeepPrompt]:
    """Separate vectors in every block, at the positions of the prompt (P-tuning v2).

    In each block they replace the previous block's output (Liu et al. 2022, section
    3.2; `PromptEncoderLayer` of google-research/prompt-tuning with `replace_prompt`).
    Prefer it to `SoftPrompt` on small models: it has `L` times the parameters at the
    same cost per step. `KeyValuePrefix` is its cheaper relative.

    Args:
      length: number of vectors `P` in each block, at least 1.
      initializer: where the vectors start, with the same values in every block; uniform
        on `[0, 0.5)` if None.

    Attributes:
      prompt: `[L, P, D]`, float32.

    Raises:
      InputError: if the length is below 1, or the initializer fails.

    Examples:
      >>> trained, _ = model.attach(pt.DeepPrompt(length=5)).partition()
      >>> trained["decoder/prompt/prompt"].shape
      (4, 5, 128)
    """

def DroppedPrompt(
    *, inner: Configured[InputPrompt], rate: float = 0.1
) -> Configured[_DroppedPrompt]:
    """Another prompt with dropout: each training step zeroes some of its numbers.

    The remaining numbers are scaled by `1 / (1 - rate)`. Try it where a prompt overfits
    few examples. Generation, evaluation and export drop nothing.

    Args:
      inner: the prompt, e.g. `SoftPrompt(length=5)`.
      rate: probability that a number is dropped, from 0 to below 1.

    Raises:
      InputError: if the rate is out of range, or the inner prompt cannot be built.

    Examples:
      >>> prompt = pt.DroppedPrompt(inner=pt.SoftPrompt(length=5), rate=0.2)
      >>> model.attach(prompt).prompt_vectors()["decoder/prompt"].shape
      (5, 128)
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
    """Metrics on held-out data, during training and afterwards.

    `tune(..., evaluation=pairs)` measures loss and accuracy; pass an `Evaluation` for
    more.

    Attributes:
      data: held-out data, in any form that `tune` takes or as a `DataSource`; columns
        of a training objective are not read.
      exact_match: whether to measure the share of completions that greedy decoding
        reproduces token for token.
      metrics: additional metrics: "squad" (F1 and exact match of normalized words),
        "rouge" and "bleu" of generated completions, and "perplexity".
      labels: texts of the classes; each example's completion is one of them. The
        model's answer is the one that it finds most likely. None for a task without
        labels.
      length_normalize: whether to score a label by the mean of its tokens'
        log-probabilities instead of their sum.
      calibrate: inputs without content, e.g. ["N/A"]. Labels are ranked a second time,
        by their probability relative to that given these inputs.
      new_tokens: maximum number of generated tokens.
      references_key: jsonl key of the reference completions, a text or a list of texts,
        for the metrics of generated text; None for the completion alone.
      category_key: key of each example's category, for metrics by category: a jsonl
        key, or an HDF5 data set (usually `category_ids`) with -1 for no category.
      category_names: names of the numbers in that data set, in order, or a JSON file
        that maps names to numbers, e.g. `category_to_id.json`.
      resamples: number of bootstrap resamples for the 95 % intervals.
      bootstrap_seed: seed of the resampling.

    Raises:
      InputError: if the settings contradict each other or name an unknown metric.

    Examples:
      >>> tuned = pt.tune(
      ...     model,
      ...     pt.SoftPrompt(length=5),
      ...     pairs,
      ...     evaluation=pt.Evaluation(data=pairs[:4], metrics=["perplexity"]),
      ...     steps=2,
      ...     progress=False,
      ... )
      >>> sorted(tuned.result.metrics)
      ['accuracy', 'loss', 'perplexity']
    """

def FactorizedMultiTaskPrompt(
    *,
    length: int,
    tasks: int,
    rank: int = 1,
    initializer: Initializer | Configured[Initializer] | None = None,
    factors: Factors | Configured[Factors] | None = None,
) -> Configured[_FactorizedMultiTaskPrompt]:
    """Prompts of `N` tasks, each `shared * (columns[n] @ rows[n])` (Wang et al. 2023).

    The smallest multi-task prompt (a task has `r * (P + D)` parameters), and the one
    that PEFT reads, as MULTITASK_PROMPT_TUNING. See `AddMultiTaskPrompt` on how an
    example chooses its task.

    Args:
      length: number of vectors `P`, at least 1.
      tasks: number of tasks `N`, at least 1.
      rank: rank `r` of each task's factors, at least 1.
      initializer: where the shared vectors start; uniform on `[0, 0.5)` if None.
      factors: where columns and rows start; `factors_of_ones()` if None.

    Attributes:
      shared: `[P, D]`, float32.
      columns: `[N, P, r]`, float32.
      rows: `[N, r, D]`, float32.

    Raises:
      InputError: if a number is below 1, or the initializer fails.

    Examples:
      >>> prompt = pt.FactorizedMultiTaskPrompt(length=5, tasks=2)
      >>> trained, _ = model.attach(prompt).partition()
      >>> for path, array in trained.items():
      ...     print(path, array.shape)
      decoder/prompt/columns (2, 5, 1)
      decoder/prompt/rows (2, 1, 128)
      decoder/prompt/shared (5, 128)
    """

def GRPO(
    clip: float = 0.2,
    clip_above: float | None = None,
    beta: float = 0.0,
    divergence: Literal["k3", "k1"] = "k3",
    ratio: Literal["token", "sequence"] = "token",
    average: Literal["token", "sequence", "constant"] = "token",
    reference: str | None = None,
) -> Configured[_GRPO]:
    """Policy optimization on sampled answers (Shao et al. 2024, equation 3).

    Use it with `Run.rollouts`, which samples answers, has them judged and computes
    their advantages `A`. With `r` a token's probability over the probability that it
    was sampled with, the loss of a token is

        -min(r A, clip(r, 1 - clip, 1 + clip_above) A) + beta (exp(d) - d - 1)

    where `d` is the log-probability under the frozen model minus that under the trained
    one, so the second term estimates the divergence from the frozen model (Schulman
    2020, "Approximating KL divergence", k3; k1 is `-d`). The frozen model runs only if
    `beta` is not 0.

    Attributes:
      clip: how far a ratio may fall below 1 where that lowers the loss.
      clip_above: how far it may rise above 1; None for the same as `clip`.
      beta: strength of the pull towards the frozen model.
      divergence: estimate of the divergence, "k3" or "k1". The value of k1 is noisier.
        Its gradient is that of `d^2 / 2`, which on average is the gradient of the
        divergence (Tang and Munos 2025, "On a few pitfalls in KL divergence gradient
        estimation for RL").
      ratio: "token", or "sequence" for the geometric mean of the ratios of an answer's
        tokens (GSPO, Zheng et al. 2025, equation 7).
      average: "token" divides the sum over all tokens by their number (DAPO, Yu et al.
        2025, equation 8); "sequence" averages the means of the answers (GRPO);
        "constant" divides by the number of answers times the maximum length (Dr. GRPO,
        Liu et al. 2025, section 3.2).
      reference: directory of another run of the same model; in the divergence the
        frozen model then has its prompts and adapters. None for the frozen model alone.

    Raises:
      InputError: if a number is out of range, or `reference` is given without `beta`.

    Examples:
      >>> def shout(prompt: str, completion: str, row: dict) -> float:
      ...     return float(completion.isupper())
      >>> tuned = pt.reinforce(
      ...     model,
      ...     pt.SoftPrompt(length=5),
      ...     ["apple=", "bread="],
      ...     rewards=[shout],
      ...     objective=pt.GRPO(beta=0.01),
      ...     new_tokens=8,
      ...     steps=2,
      ...     batch_size=2,
      ...     progress=False,
      ... )
    """

def IA3(*, regexes: Sequence[str] = ...) -> Configured[_IA3]:
    """Trained scales of keys, values and feed-forward values (Liu et al. 2022).

    The smallest adapter: one number per column that it scales. It can be merged into
    the weights, like `LoRA`. For `mlp/down` it scales the input, also in a shared
    expert, and for any other projection the output. All scales start at 1.

    Attributes:
      regexes: expressions that match the whole paths of the projections to adapt. By
        default, keys, values, and what feed-forward layers compute last, except in
        routed experts.

    Raises:
      InputError: if an expression matches no projection.

    Examples:
      >>> trained, _ = model.attach(pt.IA3()).partition()
      >>> for path, array in trained.items():
      ...     print(path, array.shape)
      decoder/layers/mlp/down/adapters/ia3/scale (4, 344)
      decoder/layers/self_attention/key/adapters/ia3/scale (4, 128)
      decoder/layers/self_attention/value/adapters/ia3/scale (4, 128)
    """

def InferenceOnlyPrompt(
    *, length: int, initializer: Initializer | Configured[Initializer] | None = None
) -> Configured[_InferenceOnlyPrompt]:
    """A constant prompt without parameters: it is neither restored nor trained.

    Use it to run a model behind existing vectors, e.g. a prompt that
    google-research/prompt-tuning released. Generation and evaluation take it; `tune`
    refuses it, as there would be nothing to train.

    Args:
      length: number of vectors `P`, at least 1.
      initializer: the vectors, e.g. `from_file("prompt.npy")`; uniform on `[0, 0.5)` if
        None.

    Raises:
      InputError: if the length is below 1, or the initializer fails.

    Examples:
      >>> prompt = pt.InferenceOnlyPrompt(length=4, initializer=pt.from_text("tail"))
      >>> attached = model.attach(prompt)
      >>> attached.prompt_vectors()["decoder/prompt"].shape
      (4, 128)
      >>> attached.partition()[0]  # nothing to train
      {}
    """

def InstancePrompt(
    *,
    length: int,
    hidden_width: int = 16,
    initializer: Initializer | Configured[Initializer] | None = None,
) -> Configured[_InstancePrompt]:
    """Trained vectors plus a small network's output for the example's own text.

    The network `up(relu(down(mean)))` reads the mean embedding of the input tokens and
    has one narrow hidden layer (Wu et al. 2022, "IDPG", section 3.2). Its output is
    initially zero, so the prompt starts as a soft prompt. Prefer it where inputs need
    to be treated differently. It runs once per example instead of once per batch, which
    costs time, and no PEFT form can store it.

    Args:
      length: number of vectors `P`, at least 1.
      hidden_width: width `W` of the hidden layer, at least 1.
      initializer: where the shared vectors start; uniform on `[0, 0.5)` if None.

    Attributes:
      prompt: vectors that all examples share, `[P, D]`, float32.
      down: `[D, W]`, float32.
      down_bias: `[W]`, float32.
      up: `[W, P, D]`, float32.

    Raises:
      InputError: if the length or the hidden width is below 1, or the initializer
        fails.

    Examples:
      >>> prompt = pt.InstancePrompt(length=5, hidden_width=4)
      >>> trained, _ = model.attach(prompt).partition()
      >>> for path, array in trained.items():
      ...     print(path, array.shape)
      decoder/prompt/down (128, 4)
      decoder/prompt/down_bias (4,)
      decoder/prompt/prompt (5, 128)
      decoder/prompt/up (4, 5, 128)
    """

def KTO(
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    reference: str = "in_step",
) -> Configured[_KTO]:
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, equation 7).

    Use it if people have rated single answers. Each record has a `prompt`, a
    `completion`, and a `label`: true for a good answer, false for a bad one. With `r`
    the log-ratio of an answer's probabilities under the trained and the frozen model,
    the loss is `1 - sigmoid(beta (r - z))` for a good answer and `1 - sigmoid(beta (z -
    r))` for a bad one. The reference point `z`, at least 0, is the mean log-ratio of
    mismatched answers: each prompt is also read with the preceding record's answer. The
    mean is over a micro-batch, as in TRL, and has no gradient.

    The frozen model is the reference, as for `DPO`. `accuracy` is the share of good
    answers with `r > z` and bad ones with `r < z`.

    Attributes:
      beta: strength of the pull towards the frozen model.
      reference: "in_step", "precomputed", "none" or a run's directory, as for `DPO`.
      desirable_weight: weight of good answers, e.g. above 1 if there are fewer of them.
      undesirable_weight: weight of bad answers.

    Raises:
      InputError: if a number is not above 0.

    Examples:
      >>> rows = [
      ...     {"prompt": p, "completion": c, "label": len(c) > 4} for p, c in pairs
      ... ]
      >>> tuned = pt.tune(
      ...     model, pt.SoftPrompt(5), rows, objective=pt.KTO(), steps=2, progress=False
      ... )
    """

def KeyValuePrefix(
    *,
    length: int,
    initializer: PrefixInitializer | Configured[PrefixInitializer] | None = None,
    frozen_slots: int = 0,
) -> Configured[_KeyValuePrefix]:
    """Trained keys and values of `P` positions before every row, in every block.

    Prefix tuning (Li and Liang 2021). No vector runs through the model, so a prefix
    costs only attention: the cheapest method per step that acts in every block. PEFT
    reads it as PREFIX_TUNING. Keys are stored as attention reads them, i.e. after any
    rotation; text starts at position `P`.

    Args:
      length: number of positions `P`, at least 1.
      initializer: where keys and values start; `normal()` if None.
      frozen_slots: how many of the first positions stay as they start, below `P`.
        Models attend to their first position from everywhere, so a memory of a text
        freezes it (Eyuboglu et al. 2025, "Cartridges"). PEFT then reads the prefix as
        CARTRIDGE.

    Attributes:
      prompt: keys and values, `[L, 2, P, G, K]`, float32, for `G` key/value heads of
        width `K`.

    Raises:
      InputError: if the length is below 1, all slots are frozen, or the initializer
        returns another shape.

    Examples:
      >>> trained, _ = model.attach(pt.KeyValuePrefix(length=5)).partition()
      >>> trained["decoder/prompt/prompt"].shape
      (4, 2, 5, 4, 32)
    """

def LoRA(
    *,
    regexes: Sequence[str] = ...,
    at: Sequence[str] | str | None = None,
    rank: int = 8,
    alpha: float = 16.0,
    rank_stabilized: bool = False,
    dropout: float = 0.0,
    layers: Sequence[int] | None = None,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    initial: Literal[
        "kaiming", "gaussian", "orthogonal", "pissa", "olora", "eva"
    ] = "kaiming",
    eva_rho: float = 2.0,
    dora: bool = False,
    bias: Literal["none", "lora_only", "all"] = "none",
    invocation: Sequence[int] | None = None,
) -> Configured[_LoRA]:
    """Low-rank products next to projections: `y + alpha / r * x @ a @ b`.

    The usual choice on small models, and where a prompt does not reach the loss that
    you need (Hu et al. 2022). It can be merged into the weights (`TunedModel.save(...,
    form="merged")`), and then costs nothing at inference. It starts as the identity,
    since `a @ b` is 0.

    Attributes:
      regexes: expressions that match the whole paths of the projections to adapt, e.g.
        `.*/(query|key|value|out)` or `.*/mlp/.*`; queries and values by default.
      at: modules to adapt, by their names in transformers instead, like PEFT's
        `target_modules`: `"all-linear"` for all projections of all blocks, a list such
        as `["q_proj", "v_proj"]` of names or their ends after a dot, or one expression
        that matches whole names. A list may also name the parameters of experts and
        routers, like PEFT's `target_parameters`: `["experts.gate_up_proj",
        "experts.down_proj", "gate.weight"]`.
      rank: rank `r` of the product.
      alpha: scale; the product is multiplied by `alpha / r`.
      rank_stabilized: whether to multiply by `alpha / sqrt(r)` instead (Kalajdzievski
        2023), which keeps high ranks trainable.
      dropout: share of the product's input that each training step zeroes.
      layers: indices of the blocks to adapt; all if None.
      rank_pattern: ranks of some modules, by expressions that match a module's name in
        transformers or its end after a dot. The first match counts.
      alpha_pattern: the same for `alpha`. All layers of a projection must have the same
        scaling, so a rank for one layer needs an `alpha` in proportion.
      initial: first values of `a` and `b`, by PEFT's names: "kaiming" (uniform `a`, `b`
        0), "gaussian" (normal `a`, `b` 0), "orthogonal" (both nonzero, with the product
        0), or from the frozen weights, "pissa" (singular vectors, Meng et al. 2024) or
        "olora" (QR, Büyükakyüz 2024). From weights, the first product is subtracted,
        and the run is exported as a plain LoRA of twice the rank. With "eva", `a`
        starts from the principal components of the projections' inputs in the first
        batches (Paischer et al. 2024), and `b` is 0.
      eva_rho: maximum rank of a layer with "eva", in units of `rank`: ranks go to the
        layers and projections with components that explain most of the variance, and
        their sum stays. With 1 all keep theirs. The arrays have the maximum rank.
      dora: whether a trained magnitude rescales each output, as in DoRA (Liu et al.
        2024); the frozen weights must be on the device.
      invocation: ids of tokens from whose last occurrence in a row on the product is
        added, and nowhere in rows without them (aLoRA, Greenewald et al. 2025), so that
        the frozen model's keys and values of the text before remain valid. If None, it
        is added everywhere. For decoder-only models without prompts.
      bias: which biases of the model are trained, too, by PEFT's names: "none",
        "lora_only" (in adapted modules) or "all" (in norms and the head, too). The
        model must have such biases; the frozen weights must be on the device.

    Raises:
      InputError: if a number is out of range, or an expression or name matches nothing.

    Examples:
      >>> trained, _ = model.attach(pt.LoRA(rank=4)).partition()
      >>> for path, array in trained.items():
      ...     print(path, array.shape)
      decoder/layers/self_attention/query/adapters/lora/a (4, 128, 4)
      decoder/layers/self_attention/query/adapters/lora/b (4, 4, 128)
      decoder/layers/self_attention/value/adapters/lora/a (4, 128, 4)
      decoder/layers/self_attention/value/adapters/lora/b (4, 4, 128)
    """

def MLPPrompt(
    *, inner: Configured[InputPrompt], hidden_width: int | None = None
) -> Configured[_MLPPrompt]:
    """Passes another prompt's vectors through two hidden layers (P-tuning).

    Liu et al. 2021, "GPT Understands, Too". Computes
    `output(relu(middle(relu(hidden(x)))))`, like PEFT's P_TUNING. The network only
    helps training, e.g. where a plain soft prompt stays at a high loss: the result is
    exported as plain vectors. They start at the network's output instead of the inner
    prompt's vectors, so the inner prompt's initializer has little effect.

    Args:
      inner: the prompt that feeds the network, e.g. `SoftPrompt(length=5)`.
      hidden_width: width `W` of the hidden layers; the model's `D` if None.

    Attributes:
      hidden, middle, output: linear layers `[D, W]`, `[W, W]` and `[W, D]`.

    Raises:
      InputError: if the hidden width is below 1, or the inner prompt cannot be built.

    Examples:
      >>> attached = model.attach(pt.MLPPrompt(inner=pt.SoftPrompt(length=5)))
      >>> attached.prompt_vectors()["decoder/prompt"].shape
      (5, 128)
    """

def MeshShape(
    *,
    stage: int = 1,
    data: int = -1,
    fsdp: int = 1,
    tensor: int = 1,
    rules: Configured[_AxisRules] | None = None,
) -> Configured[_MeshShape]:
    """Number of devices along each axis of the mesh; -1 takes all that remain.

    Pass it to `tune` as `mesh`. Start with `MeshShape()`, which splits the rows of a
    batch over all devices. Use `fsdp` when the weights do not fit one device, `tensor`
    when a block is too slow, and `stage` when devices are far apart. Results do not
    depend on the mesh, up to rounding.

    Attributes:
      stage: pipeline stages, each with a share of the model's blocks and with devices
        along the other axes; never -1.
      data: devices that split the rows of a batch; every group along the other axes
        holds all parameters.
      fsdp: devices that split rows and parameters; parameters are gathered one block at
        a time.
      tensor: devices that split heads, feed-forward columns and the vocabulary.
      rules: mesh axes of each parameter dimension; None for Megatron's layout.

    Raises:
      InputError: if a number is neither -1 nor at least 1, or two are -1.

    Examples:
      >>> pt.MeshShape(data=2, fsdp=4).build().sizes
      {'data': 2, 'fsdp': 4, 'tensor': 1}
    """

def ORPO(beta: float = 0.1) -> Configured[_ORPO]:
    """Odds ratio preference optimization (Hong et al. 2024, equations 6 and 7).

    In one run and without a reference, it learns the chosen answers like
    `TokenObjective`, and also that they are more likely than the rejected ones. With
    `p` the probability of an answer, as the geometric mean over its tokens, and `odds =
    p / (1 - p)`, the loss of a pair is `-log p_chosen - beta * log sigmoid(log
    odds_chosen - log odds_rejected)`.

    Attributes:
      beta: weight of the odds ratio; the paper calls it lambda.

    Raises:
      InputError: if `beta` is not above 0.

    Examples:
      >>> rows = [
      ...     {"prompt": p, "chosen": c.upper(), "rejected": c} for p, c in pairs
      ... ]
      >>> loss = pt.ORPO()
      >>> tuned = pt.tune(
      ...     model, pt.SoftPrompt(5), rows, objective=loss, steps=2, progress=False
      ... )
    """

def OnPolicyDistillation(
    context: str = "",
    context_key: str | None = None,
    contexts: Sequence[str] | str | None = None,
    cache_bytes: int = 1073741824,
    divergence: Literal["forward", "reverse", "jsd"] = "reverse",
    beta: float | None = None,
    targets: Literal["exact", "top", "hidden"] = "exact",
    mass: float = 0.99,
    top: int = 64,
) -> Configured[_OnPolicyDistillation]:
    """`ContextDistillation` on answers that the trained model writes itself.

    In each step the model answers the prompts of a batch (`Run.rollouts`, without
    rewards). At each token of an answer it learns to predict what the frozen model
    predicts after the context and the same tokens (Agarwal et al. 2024, "On-policy
    distillation of language models", with its own outputs alone). So it learns from its
    own mistakes, and the data needs no completions. The sampling temperature only
    selects the answers: the divergence is at temperature 1.

    The attributes are the same as in `ContextDistillation`, except:

    Attributes:
      divergence: "reverse" by default.
      targets: "exact", as answers are new in each step.

    Raises:
      InputError: as `ContextDistillation`, and if the teacher's targets are to be
        stored.

    Examples:
      >>> tuned = pt.tune(
      ...     model,
      ...     pt.SoftPrompt(length=5),
      ...     [{"prompt": "apple="}, {"prompt": "bread="}],
      ...     objective=pt.OnPolicyDistillation(context="upper: "),
      ...     rollouts=pt.Rollouts(group=1, new_tokens=8),
      ...     steps=2,
      ...     batch_size=2,
      ...     progress=False,
      ... )
    """

def OutputGradients(
    files: Mapping[str, str], objective: Configured[_TokenObjective] = ...
) -> Configured[_OutputGradients]:
    """Adds fixed output gradients of intermediate arrays to the loss of the tokens.

    For experiments that push a model's activations in a given direction. The loss is
    `(loss sum + sum(array * gradient)) / divisor`, so each array's gradient is its
    file's content over the objective's divisor.

    Attributes:
      files: `.npy` file for each intermediate array, by the array's path, e.g.
        `decoder/layers/3/hidden` (or `.../self_attention`, `.../cross_attention`,
        `.../mlp`). Its shape is `[D]`, for every position, or `[S, D]`; it is the same
        for every row. Padding gets none.
      objective: loss of the tokens.

    Raises:
      InputError: if no file is given, or a path or a shape does not fit the model.

    Examples:
      >>> numpy.save("direction.npy", numpy.ones(model.config.width, "float32"))
      >>> loss = pt.OutputGradients(files={"decoder/layers/0/hidden": "direction.npy"})
      >>> loss.build().intermediates
      ('decoder/layers/0/hidden',)
    """

def ParameterGroup(
    regexes: Sequence[str],
    optimizer: GradientTransformation | Configured[GradientTransformation],
    lora_plus_ratio: float = 1.0,
) -> Configured[_ParameterGroup]:
    """Parameters that one optimizer trains; everything that no group names is frozen.

    `tune` makes the groups of prompts and adapters itself. Pass `groups` to use
    different optimizers for different parts, or to train some of the model's own
    weights, too.

    Attributes:
      regexes: expressions that each match the whole slash-joined path of a parameter.
      optimizer: transformation that updates the parameters, e.g. `adamw()`.
      lora_plus_ratio: learning rate of LoRA's `b`, DoRA's magnitudes and trained
        biases, divided by that of `a` (LoRA+, Hayou et al. 2024).

    Raises:
      InputError: if `regexes` is not a list, `optimizer` is not an optimizer, an
        expression matches no parameter, or the ratio is given without LoRA.

    Examples:
      >>> prompt = pt.ParameterGroup([".*/prompt/.*"], pt.adafactor(0.3))
      >>> norms = pt.ParameterGroup([".*/final_norm/.*"], pt.adamw(1e-4))
      >>> tuned = pt.tune(
      ...     model,
      ...     pt.SoftPrompt(length=5),
      ...     pairs,
      ...     groups=[prompt, norms],
      ...     steps=2,
      ...     progress=False,
      ... )
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

    The defaults choose a schedule for you. The page on pipelines explains when stages
    pay off.

    Attributes:
      schedule: order of the operations: "none", "gpipe", "1f1b", "1f1b-2" or "zb-h1".
        "auto" chooses "zb-h1" if the backward pass has two parts, else "1f1b".
      microbatches: number of micro-batches per step, a multiple of `Run.accumulate`;
        None for `Run.accumulate`.
      two_stage: whether to compute the weights' gradients separately from the inputs',
        at times when a stage would otherwise wait. None does so if they take more than
        a tenth of the backward pass; those of prompts and small adapters take less.
      layers: number of blocks per stage, an encoder's first; None balances the stages
        by counted operations, including the head. With `virtual`, the number per chunk:
        first the first chunk of every stage, then the second of every stage, and so on.
      virtual: chunks of blocks per stage, `v`. Stage `s` of `N` then holds the model's
        chunks `s`, `s + N`, `s + 2 N`, ..., and "1f1b" interleaves them as Megatron
        does: a step waits `v` times less and sends `v` times more.
      joined_p2: whether to compute the weights' gradients that remain at the end of a
        step as one product over all their micro-batches.

    Raises:
      InputError: if a value is invalid, or two contradict each other.

    Examples:
      >>> pt.Pipeline(microbatches=8).build().schedule_for(two_stage=False)
      '1f1b'
    """

def PolicyGradient() -> Configured[_PolicyGradient]:
    """Cross-entropy of each token times its advantage: REINFORCE on texts in the data.

    If the model itself wrote the texts, the gradient is that of minus the expected
    advantage (Williams 1992, with a baseline in the advantage): texts that did better
    than expected become more likely, the rest less likely. The advantages come from the
    data (`DataSource.advantages_key`). Their weighted sum is divided by the sum of the
    weights.

    Raises:
      InputError: when the run is opened, if the data have no advantages.

    Examples:
      >>> rows = [{"prompt": p, "completion": c, "better": 1.0} for p, c in pairs]
      >>> tuned = pt.tune(
      ...     model,
      ...     pt.SoftPrompt(length=5),
      ...     rows,
      ...     objective=pt.PolicyGradient(),
      ...     advantages_key="better",
      ...     steps=2,
      ...     progress=False,
      ... )
    """

def Pretrained(
    *,
    checkpoint: str,
    config: Configured[ModelConfig] | None = None,
    tokenizer: str | None = None,
    compute_dtype: str = "float32",
    parameter_dtype: str | None = None,
    quantization_group: int | None = None,
    quantized_tables: bool = False,
    weights: Literal["device", "pinned_host", "streamed"] = "device",
    trained_weights: Literal["device", "host"] = "device",
    slices: int | None = None,
    checkpoint_activation: bool = True,
    dropout_rate: float = 0.0,
    attention: Literal["auto", "reference", "flash"] = "auto",
    rematerialization: Configured[_Rematerialization] | None = None,
    encoder_rematerialization: Configured[_Rematerialization] | None = None,
    eos_id: int | None = None,
    assignment_map: Sequence[tuple[str, str | None]] = ...,
    fallback_to_scratch: bool = True,
) -> Configured[_Pretrained]:
    """A frozen model: where it comes from, how it is stored and how it is computed.

    `pt.load(checkpoint, ...)` takes the same fields; use `Pretrained` itself in a
    `Run`.

    Attributes:
      checkpoint: a Hugging Face folder; a GGUF file or a folder with one; a T5X
        checkpoint; a bundled model, e.g. "bundled:skills-decoder"; or a model of the
        Hugging Face hub, e.g. "Qwen/Qwen3-0.6B", optionally with a revision after `@`.
      config: config of a T5X checkpoint, which has none of its own; None for other
        checkpoints.
      tokenizer: file or folder of the tokenizer, or a bundled model, which has one;
        None for the checkpoint's folder.
      compute_dtype: dtype of activations, "float32" or "bfloat16".
      parameter_dtype: dtype of the frozen weights, cast once when read: "float32",
        "bfloat16", or "int8", "int4" or "nf4" for the projections of the blocks, with
        bfloat16 for the other parameters. A four-bit weight takes 0.56 bytes including
        its share of a scale. None is "float32", except that quantized checkpoints are
        held as published.
      quantization_group: number of inputs that share a scale in "int4" and "nf4", a
        power of two; None for 64. A projection whose inputs it does not divide uses the
        largest power of two that does.
      quantized_tables: whether to quantize the embedding table and the output head,
        too, if `parameter_dtype` is "int8", "int4" or "nf4". Otherwise they are in
        bfloat16, or as a quantized checkpoint publishes them.
      weights: where the weights of the blocks are kept: in "device" memory; in
        "pinned_host" memory, from which each block is copied to the device; or
        "streamed" layer by layer from the files, for models larger than host memory.
      trained_weights: where to keep checkpoint weights that parameter groups train: on
        the "device", or, with streamed weights, on the "host" with their gradients and
        optimizer state, updated layer by layer.
      slices: with streamed weights, number of slices that a stack's layers are read in;
        two slices are in memory at a time. None for slices of one layer.
      checkpoint_activation: with streamed weights, whether the backward pass recomputes
        each layer from its input, which is kept in host memory. If False, the
        activations of all layers stay on the device.
      dropout_rate: dropout rate in training.
      attention: "flash" uses the device's fused kernel, cuDNN's on NVIDIA GPUs;
        "reference" uses none; "auto" uses one where possible.
      rematerialization: activations that the backward pass recomputes; None for none.
      encoder_rematerialization: the same for an encoder; None for the decoder's.
      eos_id: token that ends a text, instead of the tokenizer's EOS. Generation also
        stops at the tokens that the model's files name.
      assignment_map: (regex, source or None) pairs; see `plan_restore`.
      fallback_to_scratch: whether parameters that the map assigns None may start fresh.

    Raises:
      InputError: if settings contradict each other.

    Examples:
      >>> pt.Pretrained(checkpoint="bundled:skills-decoder", compute_dtype="bfloat16")
      Pretrained(checkpoint='bundled:skills-decoder', compute_dtype='bfloat16')
    """

def ProjectMultiTaskPrompt(
    *,
    length: int,
    tasks: int,
    shared_features: int | None = None,
    initializer: Initializer | Configured[Initializer] | None = None,
    task_initializer: Initializer | Configured[Initializer] | None = None,
) -> Configured[_ProjectMultiTaskPrompt]:
    """Prompts of `N` tasks, each an affine map of shared vectors.

    The map is `K[n] @ shared[p] + bias[n]`. The most expressive of the multi-task
    prompts and by far the largest: a task has `D * H + D` parameters. See
    `AddMultiTaskPrompt` on how an example chooses its task.

    Args:
      length: number of vectors `P`, at least 1.
      tasks: number of tasks `N`, at least 1.
      shared_features: width `H` of the shared vectors; `D` if None.
      initializer: where the shared vectors start; uniform on `[0, 0.5)` if None.
      task_initializer: initializer of all maps, of the shape `(N, D * H + D)`; if None,
        normal kernels that keep a vector's length, and biases of 0.

    Attributes:
      shared: `[P, H]`, float32.
      task: `[N, D * H + D]`, float32: flattened kernel `[D, H]`, then bias `[D]`.

    Raises:
      InputError: if a number is below 1, or an initializer fails.

    Examples:
      >>> prompt = pt.ProjectMultiTaskPrompt(length=5, tasks=2, shared_features=8)
      >>> trained, _ = model.attach(prompt).partition()
      >>> for path, array in trained.items():
      ...     print(path, array.shape)
      decoder/prompt/shared (5, 8)
      decoder/prompt/task (2, 1152)
    """

def ProjectedKeyValuePrefix(
    *, length: int, hidden: int | None = None
) -> Configured[_ProjectedKeyValuePrefix]:
    """A prefix that a small network computes (Li and Liang 2021, section 4.3).

    The network is `Linear(tanh(Linear(embedding)))`. Li and Liang find the plain prefix
    unstable to train; the projection (PEFT's `prefix_projection`) helps. It exists only
    in training: the export has plain keys and values.

    Args:
      length: number of positions `P`, at least 1.
      hidden: width between the two layers; the model's `D` if None.

    Attributes:
      embedding: `[P, D]`.
      inner: linear layer `[D, hidden]`.
      outer: linear layer `[hidden, L * 2 * G * K]`.

    Raises:
      InputError: if the length is below 1.

    Examples:
      >>> prompt = pt.ProjectedKeyValuePrefix(length=5, hidden=16)
      >>> trained, _ = model.attach(prompt).partition()
      >>> trained["decoder/prompt/embedding"].shape
      (5, 128)
    """

def PromptPool(
    *,
    length: int,
    size: int = 4,
    initializer: Initializer | Configured[Initializer] | None = None,
) -> Configured[_PromptPool]:
    """A mixture of `K` prompts, weighted by how well the text matches their keys.

    Each prompt has a trained key. L2P (Wang et al. 2022, "Learning to Prompt for
    Continual Learning", section 4.1) picks the prompts with the nearest keys; here the
    weights are a softmax over all keys, so no second loss is needed to train them (Asai
    et al. 2022, "ATTEMPT", section 3.2). Prefer it to a multi-task prompt if nobody can
    name the task of an example.

    Args:
      length: number of vectors `P` of each prompt, at least 1.
      size: number of prompts `K`, at least 2.
      initializer: where each prompt starts; uniform on `[0, 0.5)` if None.

    Attributes:
      prompts: `[K, P, D]`, float32.
      keys: `[K, D]`, float32.

    Raises:
      InputError: if the length is below 1, the size below 2, or the initializer fails.

    Examples:
      >>> trained, _ = model.attach(pt.PromptPool(length=5, size=3)).partition()
      >>> for path, array in trained.items():
      ...     print(path, array.shape)
      decoder/prompt/keys (3, 128)
      decoder/prompt/prompts (3, 5, 128)
    """

def Prompting(
    placement: Literal[
        "prefix", "after_bos", "suffix", "suffix_after_eos", "template"
    ] = "prefix",
    prefix_attention: bool = False,
    visibility: Sequence[str] | None = None,
    execution: Literal["auto", "shared", "joined"] = "auto",
    beyond_window: bool = False,
) -> Configured[_Prompting]:
    """Where a prompt stands in the row, what it sees, and how it is computed.

    The defaults suit most runs: the prompt comes before the text, and is computed once
    for the whole batch wherever that gives the same numbers.

    Attributes:
      placement: position in the row: "prefix", "after_bos", "suffix" (before the EOS of
        an encoder's row), "suffix_after_eos", or "template" if the data sets it
        (`DataSource.template`).
      prefix_attention: whether, in a decoder-only model, the prompt and the row's given
        tokens attend to each other in both directions, as in a prefix language model.
      visibility: what the prompt sees where attention is bidirectional (encoders,
        `prefix_attention`): any of "prompt->prompt", "prompt->prompt;causal" and
        "prompt->input"; None for the whole row. Text always sees the prompt.
      execution: "shared" computes the prompt once per batch, which requires that it
        comes first and sees no text; "joined" computes it in each row; "auto" shares
        wherever possible.
      beyond_window: whether layers with a sliding window keep the prompt or prefix in
        sight of every token. If False, it leaves the window like any token, as in PEFT.

    Raises:
      InputError: if a value is unknown, or settings contradict each other or the model.

    Examples:
      >>> tuned = pt.tune(
      ...     model,
      ...     pt.SoftPrompt(length=5),
      ...     pairs,
      ...     prompting=pt.Prompting(placement="after_bos"),
      ...     steps=2,
      ...     progress=False,
      ... )
      >>> tuned.run.prompting.placement
      'after_bos'
    """

def Rematerialization(
    *,
    policy: Literal["none", "dots", "attention", "names", "nothing"] = "none",
    names: Sequence[str] = (),
    skip_first: int = 0,
    skip_last: int = 0,
    offload: bool = False,
    every: int = 1,
    ranges: Sequence[Configured[_BlockRange]] = (),
) -> Configured[_Rematerialization]:
    """Which activations of the blocks are saved for the backward pass, and where.

    Turn it on when a step runs out of memory; it changes no number. Try "dots" first,
    then "attention", then "nothing", which runs each block twice; add `offload` if even
    the blocks' inputs do not fit.

    Attributes:
      policy: which inner activations are saved: "none" saves all, i.e. recomputes
        nothing; "dots" saves the output of each projection; "attention" saves the
        output of attention before its output projection; "names" saves the activations
        listed in `names`; "nothing" saves none, so each block runs twice. All but the
        last two also save what a recurrent mixer computes before its gate.
      names: names for the policy "names": the blocks name "query", "keys", "values",
        "attention", "memory" (of a recurrent mixer), "gate" and "up", and your code may
        name others with `named`.
      skip_first: number of blocks at the start that recompute only element-wise
        operations and offload nothing.
      skip_last: number of such blocks at the end.
      offload: whether each block's input is moved to the host's pinned memory, and back
        when the backward pass reaches the block.
      every: number of consecutive blocks that are wrapped together: only the input of
        the first is saved (or offloaded), and all of them are recomputed together. A
        remainder at the end of a stack is wrapped together.
      ranges: blocks that follow another policy than the fields above.

    Raises:
      InputError: if the fields contradict each other.

    Examples:
      >>> small = pt.load(
      ...     "bundled:skills-decoder",
      ...     rematerialization=pt.Rematerialization(policy="nothing", skip_last=1),
      ... )
    """

def ResidualPrompt(
    *,
    inner: Configured[InputPrompt],
    hidden_width: int | None = None,
    norm_scale: float = 1.0,
) -> Configured[_ResidualPrompt]:
    """Adds a small network's output to another prompt's vectors.

    Computes `x + norm(up(relu(down(x))))` for each vector `x` (Razdaibiedina et al.
    2023). Like `MLPPrompt` it only helps training and is exported as plain vectors, but
    with a small `norm_scale` it starts near the inner prompt, whose initializer keeps
    its effect.

    Args:
      inner: the prompt to change, e.g. `SoftPrompt(length=5)`.
      hidden_width: width `W` between the two layers; the model's `D` if None.
      norm_scale: initial scale of the norm. With 1, as published, the network's output
        has unit variance, which drowns vectors that start at small token embeddings;
        with 0 the prompt starts at the inner one.

    Attributes:
      down, up: linear layers `[D, W]` and `[W, D]`.
      scale, bias: `[D]`, parameters of the norm.

    Raises:
      InputError: if the hidden width is below 1, or the inner prompt cannot be built.

    Examples:
      >>> prompt = pt.ResidualPrompt(
      ...     inner=pt.SoftPrompt(length=5, initializer=pt.from_text("tail")),
      ...     hidden_width=16,
      ...     norm_scale=0.0,
      ... )
      >>> model.attach(prompt).prompt_vectors()["decoder/prompt"].shape
      (5, 128)
    """

def Rollouts(
    *,
    rewards: Sequence[str | Callable[..., Any]] = (),
    weights: Sequence[float] | None = None,
    group: int = 8,
    new_tokens: int = 64,
    temperature: float = 1.0,
    stop: Sequence[str] = (),
    advantage: Literal["deviation", "mean", "leave_one_out", "batch"] = "deviation",
    mask_truncated: bool = False,
    updates: int = 1,
    slots: int = 64,
    reward_seconds: float = 10.0,
    resample: int = 0,
    replay: bool = False,
    equal_steps: int = 20,
) -> Configured[_Rollouts]:
    """How answers are sampled during training, and how they are rewarded.

    In each step the model in training answers each prompt of a batch several times.
    With `GRPO`, rewards judge the answers, and the step learns from their differences.
    `OnPolicyDistillation` learns from a teacher instead, without rewards.

    Attributes:
      rewards: what judges an answer; rewards are added up. Each is "exact_match" or
        "numeric_answer" (compared with the record's completion), "regex=EXPRESSION" (1
        if it matches the whole answer), "json_schema=FILE" (1 if the answer is JSON
        that the file's schema allows), "length=CHARACTERS" (1 up to that length,
        falling to 0 at twice that), "logprob" (mean log-probability of the answer's
        tokens under the frozen model, in nats), a function `(prompt, completion, row)
        -> number`, or the name of a function, "module:function".
      weights: factor of each reward; None for 1.
      group: number of answers per prompt; rewards need at least 2.
      new_tokens: maximum number of tokens of an answer, its end token included.
      temperature: sampling temperature.
      stop: texts that end an answer.
      advantage: how a group's rewards become advantages: "deviation" as in GRPO, "mean"
        as in Dr. GRPO, "leave_one_out" as in RLOO, "batch" as in REINFORCE++; see
        `group_advantages`.
      mask_truncated: whether to learn nothing from answers without an end.
      updates: number of steps that learn from each answer.
      slots: maximum number of answers that are sampled in parallel.
      reward_seconds: time limit for one call of a reward.
      resample: how often a step replaces groups with equal rewards, which teach
        nothing, by groups of new prompts (dynamic sampling of DAPO, Yu et al. 2025,
        section 3.2). Groups that are still equal after that stay.
      replay: whether to replace the last answer of a group with equal rewards by the
        best earlier answer to the prompt, if its reward is higher. Its ratio is
        relative to the probabilities that it was sampled with.
      equal_steps: number of consecutive rollouts in which all groups have equal
        rewards, so that nothing is learned, after which the run stops; 0 to never stop.

    Raises:
      InputError: if a value is out of range.

    Examples:
      >>> rollouts = pt.Rollouts(rewards=["regex=[A-Z]+"], group=4, new_tokens=8)
      >>> tuned = pt.tune(
      ...     model,
      ...     pt.SoftPrompt(length=5),
      ...     pairs,
      ...     objective=pt.GRPO(),
      ...     rollouts=rollouts,
      ...     steps=2,
      ...     batch_size=4,
      ...     progress=False,
      ... )
    """

def SimPO(
    beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0
) -> Configured[_SimPO]:
    """Simple preference optimization (Meng et al. 2024, equation 6).

    With `p` the probability of an answer, as the geometric mean over its tokens, the
    loss of a pair is `-log sigmoid(beta * (log p_chosen - log p_rejected) - gamma)`. It
    needs no reference, so a step costs less than one of `DPO`.

    Attributes:
      beta: factor of the log-probabilities.
      gamma: margin by which the chosen answer should lead.
      label_smoothing: assumed share of wrongly labeled pairs.

    Raises:
      InputError: if a number is out of range.

    Examples:
      >>> rows = [
      ...     {"prompt": p, "chosen": c.upper(), "rejected": c} for p, c in pairs
      ... ]
      >>> loss = pt.SimPO()
      >>> tuned = pt.tune(
      ...     model, pt.SoftPrompt(5), rows, objective=loss, steps=2, progress=False
      ... )
    """

def SoftPrompt(
    *, length: int, initializer: Initializer | Configured[Initializer] | None = None
) -> Configured[_SoftPrompt]:
    """Trained vectors in the input: prompt tuning (Lester et al. 2021, section 2).

    All examples share the `P` vectors. Start here: you train a few kilobytes, you can
    serve any number of such prompts over one model, and PEFT reads the result. Lester
    et al. find it as good as full tuning from about ten billion parameters on; on
    smaller models `DeepPrompt`, `KeyValuePrefix` or `LoRA` usually reach a lower loss.

    Args:
      length: number of vectors `P`, at least 1; 5 to 100 are common.
      initializer: where the vectors start, e.g. `from_text("Reverse the word:")`;
        uniform on `[0, 0.5)` if None. Embeddings of words usually train faster.

    Attributes:
      prompt: the vectors, `[P, D]`, in float32 whatever the model computes in.

    Raises:
      InputError: if the length is below 1, or the initializer fails.

    Examples:
      >>> prompt = pt.SoftPrompt(length=5)
      >>> tuned = pt.tune(model, prompt, pairs, steps=2, progress=False)
      >>> tuned.prompt_vectors()["decoder/prompt"].shape
      (5, 128)
    """

def StatePrefix(
    *,
    length: int,
    initializer: PrefixInitializer | Configured[PrefixInitializer] | None = None,
) -> Configured[_StatePrefix]:
    """A prefix for models with recurrent layers, which get a trained initial state.

    Layers with attention read `P` trained keys and values, as with `KeyValuePrefix`.
    Recurrent layers (Mamba, gated delta rule, short convolution) begin every text with
    a trained state, as if they had read those positions: the window of their
    convolution, and the memory of each head. This costs them no time. Use it for hybrid
    models such as Qwen 3.5, Granite 4, Nemotron-H or LFM2, and `KeyValuePrefix` for all
    others. PEFT has no such prompt.

    Args:
      length: number of positions `P`, at least 1.
      initializer: where keys and values start; `normal()` if None. States start at 0,
        as in the model without a prompt.

    Attributes:
      prompt: keys and values of the layers with attention, `[L, 2, P, G, K]`.
      state: initial state of each of the `M` recurrent layers, `[M, S]`, float32: the
        window `[W, C]`, then the memory `[H, K, V]` if the layer has one.

    Raises:
      InputError: if no layer is recurrent, or for the reasons of `KeyValuePrefix`.

    Examples:
      >>> model.attach(pt.StatePrefix(length=5))
      Traceback (most recent call last):
      ...
      prompt_tuning.core.errors.InputError: StatePrefix trains the initial state of ...
    """

def TokenObjective(
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    normalizer: str | float | None = "num_real_target_tokens",
    soft_cap: float | None = None,
) -> Configured[_TokenObjective]:
    """Cross-entropy of the target tokens: what `tune` minimizes unless told otherwise.

    The losses are summed with the loss weights of the data (by default 1 for completion
    tokens and 0 for prompt tokens) and divided by `normalizer`.

    Attributes:
      z_loss: weight of `log(Z)**2`, which keeps the logits' normalizer near 1.
      label_smoothing: share of the target spread over the vocabulary, from 0 to below
        1.
      normalizer: divisor of the weighted sum, by its T5X name: "num_real_target_tokens"
        (the sum of the weights), "num_total_target_tokens" (all targets, padding
        included, except in rows that only fill a batch), "average_per_sequence" (the
        mean of each sequence, averaged; in packed rows each example is a sequence), a
        number, or None for the plain sum.
      soft_cap: bound on the absolute value of each logit, or None. It applies to this
        loss only: evaluation and generation use the model's own logits.

    Raises:
      InputError: if a number is out of range, or there is no such normalizer.

    Examples:
      >>> loss = pt.TokenObjective(label_smoothing=0.1)
      >>> prompt = pt.SoftPrompt(length=5)
      >>> tuned = pt.tune(
      ...     model, prompt, pairs, objective=loss, steps=2, progress=False
      ... )
    """

def TrainedTokens(
    *, tokens: Sequence[str | int], head: Sequence[str | int] | None = None
) -> Configured[_TrainedTokens]:
    """Trained embedding rows of single tokens, new or existing; the table stays frozen.

    Use it for words that the model does not know, e.g. `<tool>` before a call, alone or
    with any prompt or adapter. A text that is already one token names that token, and
    its row starts from the table's. Any other text becomes a new token of the run's
    tokenizer; its row starts from the mean of the table, as with
    `resize_token_embeddings` in transformers. An output head that shares the table uses
    these rows as well; a separate head gets a row for each new token. This is PEFT's
    `trainable_token_indices`.

    Attributes:
      tokens: texts of tokens, or ids.
      head: tokens whose rows in a separate output head are trained, too; None for the
        new tokens.

    Raises:
      InputError: if a token is named twice, or none is.

    Examples:
      >>> tuned = model.attach(pt.TrainedTokens(tokens=["<tool>", "a"]))
      >>> trained, _ = tuned.partition()
      >>> for path, array in trained.items():
      ...     print(path, array.shape)
      token_embedder/adapters/tokens/rows (2, 128)
    """

def WaywardPrompt(
    *,
    text: str,
    gamma: float = 0.01,
    initializer: Initializer | Configured[Initializer] | None = None,
) -> Configured[_WaywardPrompt]:
    """Vectors that start at a text's embeddings, with a penalty on leaving them.

    The loss gains `gamma * sum_p |prompt[p] - discrete[p]|^2 / P` (Khashabi et al.
    2022, "Prompt Waywardness"). Use it to see how far a readable prompt can be
    improved, or to keep one readable: `prompt-tuning inspect` shows each vector's
    nearest tokens.

    Args:
      text: the discrete prompt; each of its tokens is a vector.
      gamma: weight of the squared distance, at least 0.
      initializer: where the vectors start, if not at the text.

    Attributes:
      prompt: the vectors, `[P, D]`, float32; `P` is the number of the text's tokens.

    Raises:
      InputError: if gamma is negative, the text has no tokens, or the model has no
        tokenizer.

    Examples:
      >>> attached = model.attach(pt.WaywardPrompt(text="tail: ", gamma=0.01))
      >>> attached.prompt_vectors()["decoder/prompt"].shape  # with the BOS token
      (6, 128)
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
    """Adafactor (Shazeer and Stern 2018), with the recipe of Lester et al. 2021.

    The default of `tune` for prompts. Its steps do not depend on the gradient's scale,
    which suits vectors whose gradient passes through the whole model.

    Args:
      learning_rate: a number or a schedule such as `warmup_constant(0.3)`.
      decay_rate: exponent with which second moments decay.
      decay_offset: number of steps that the decay counts as done.
      multiply_by_parameter_scale: whether an update is multiplied by the RMS of its
        parameter.
      clipping_threshold: maximum RMS of an update; None for none.
      momentum: decay of the average of updates; None for no average.
      dtype_momentum: dtype of this average.
      weight_decay_rate: fraction of the parameter subtracted per step, independent of
        the learning rate; None for none.
      eps: added to squared gradients.
      factored: whether second moments of matrices are stored by row and column.
      min_dim_size_to_factor: smallest matrices to factor.

    Raises:
      InputError: if a number is out of range.

    Examples:
      >>> tuned = pt.tune(
      ...     model,
      ...     pt.SoftPrompt(length=5),
      ...     pairs,
      ...     optimizer=pt.adafactor(0.1, weight_decay_rate=None),
      ...     steps=2,
      ...     progress=False,
      ... )
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
    """AdamW (Loshchilov and Hutter 2019), with gradient clipping.

    The default of `tune` for LoRA, IA3 and prefixes.

    Args:
      learning_rate: a number or a schedule such as `warmup_cosine_decay(1e-3)`.
      weight_decay: fraction of the parameter subtracted per step, times the learning
        rate.
      clip_norm: maximum global norm of the group's gradient; None for no clipping.
      b1: decay of the average of gradients.
      b2: decay of the average of squared gradients.
      eps: added to the square root of the latter.
      eps_root: added to it under the square root.
      mu_dtype: dtype of the average of gradients; None for the parameter's.
      nesterov: whether the momentum is Nesterov's.

    Raises:
      InputError: if a number is out of range.

    Examples:
      >>> tuned = pt.tune(
      ...     model,
      ...     pt.LoRA(rank=4),
      ...     pairs,
      ...     optimizer=pt.adamw(3e-3, clip_norm=1.0),
      ...     steps=2,
      ...     progress=False,
      ... )
    """

def factors_of_ones(scale: float = 0.02) -> Configured[Factors]:
    """Starts each task of a `FactorizedMultiTaskPrompt` at the shared prompt.

    The product of the factors is 1, thanks to the first rank alone. The other ranks
    start with columns of standard deviation `scale` and rows of 0, so they can diverge.

    Args:
      scale: standard deviation of the columns after the first.

    Examples:
      >>> prompt = pt.FactorizedMultiTaskPrompt(
      ...     length=5, tasks=2, rank=2, factors=pt.factors_of_ones(scale=0.1)
      ... )
      >>> model.attach(prompt).partition()[0]["decoder/prompt/columns"][0, 0, 0].item()
      1.0
    """

def from_attention_matching(
    text: str, windows: int = 16
) -> Configured[TextInitializer]:
    """Starts a `KeyValuePrefix` so that attending to it is like attending to a text.

    In each block and head, the slots are the keys of the text that get most attention
    while the model rereads windows of the text. The values follow by least squares, so
    that the prefix gives the same attention output as the whole text. No gradient is
    computed. It is the closed form of Zweiger et al. (2026, "Attention Matching", arXiv
    2602.16284), without its bias per slot, and the best start of a memory: training
    then takes a fraction of the steps. If a text is longer than the model's positions,
    the model reads it in parts, each of which gets its share of the slots.

    Args:
      text: the text, with more tokens than the prefix has slots.
      windows: number of windows of the text that the model rereads.

    Raises:
      InputError: when it initializes the prompt, if the text is too short, or the model
        has attention that the closed form does not support.

    Examples:
      >>> start = pt.from_attention_matching("reverse: abcdefghijkl", windows=2)
      >>> prefix = pt.KeyValuePrefix(length=6, initializer=start)
      >>> trained, _ = model.attach(prefix).partition()
      >>> trained["decoder/prompt/prompt"].shape
      (4, 2, 6, 4, 32)
    """

def from_chunks(text: str, chunks: int = 8) -> Configured[TextInitializer]:
    """Starts a `KeyValuePrefix` from windows spread evenly over a text.

    The model reads the tokens that begin every text, e.g. BOS, and then the windows,
    one after the other. Their keys and values are the prefix. Prefer it to `from_text`
    if the text is much longer than the prefix, and all of it matters.

    Args:
      text: the text, with at least as many tokens as the prefix has slots.
      chunks: number of windows; at most one per slot.

    Raises:
      InputError: when it initializes the prompt, if the text is too short, or the
        prompt has no keys and values.

    Examples:
      >>> start = pt.from_chunks("reverse: abcdefghijkl", chunks=2)
      >>> prefix = pt.KeyValuePrefix(length=6, initializer=start)
      >>> trained, _ = model.attach(prefix).partition()
      >>> trained["decoder/prompt/prompt"].shape
      (4, 2, 6, 4, 32)
    """

def from_class_labels(
    labels: Sequence[str], fallback: Initializer | Configured[Initializer] | None = None
) -> Configured[Initializer]:
    """Starts vector `i` at the mean embedding of label `i`: best for classification.

    Args:
      labels: the texts of the classes; labels beyond the prompt's length are dropped,
        with a warning.
      fallback: where the remaining vectors start; uniform if None.

    Raises:
      InputError: when it initializes the prompt, if a label has no tokens.

    Examples:
      >>> start = pt.from_class_labels(["yes", "no"], pt.from_sampled_vocabulary())
      >>> prompt = pt.SoftPrompt(length=5, initializer=start)
      >>> model.attach(prompt).prompt_vectors()["decoder/prompt"].shape
      (5, 128)
    """

def from_file(path: str | Path | Sequence[str]) -> Configured[TextInitializer]:
    """Starts at the vectors in a file, e.g. to continue from another task's prompt.

    A `KeyValuePrefix` may start at the slots of many files, concatenated. As in
    `compose`, keys with a rotary embedding are then rotated further, to keep their
    distance to the text.

    Args:
      path: NumPy file, a run's checkpoint, or PEFT adapter folder, with vectors `[P,
        D]`. For a prefix also a cartridge of HazyResearch/cartridges (`.pt`), or a list
        of paths.

    Raises:
      InputError: when it initializes the prompt, if the file cannot be read or its
        shape is not the prompt's.

    Examples:
      >>> numpy.save("prompt.npy", numpy.ones((5, 128), "float32"))
      >>> prompt = pt.SoftPrompt(length=5, initializer=pt.from_file("prompt.npy"))
      >>> model.attach(prompt).prompt_vectors()["decoder/prompt"].mean().item()
      1.0
    """

def from_sampled_vocabulary(
    population_size: int | None = 5000,
) -> Configured[Initializer]:
    """Starts at the embeddings of random tokens: Lester et al.'s "sampled vocabulary".

    The first rows of most vocabularies are the most frequent tokens. Rows are drawn
    without replacement, unless the prompt is longer than the population (with a
    warning).

    Args:
      population_size: draw from this many rows at the start of the table; None, or more
        than the table has, for all.

    Raises:
      InputError: when it initializes the prompt, if the population is not positive.

    Examples:
      >>> start = pt.from_sampled_vocabulary(population_size=20)
      >>> prompt = pt.SoftPrompt(length=5, initializer=start)
      >>> model.attach(prompt).prompt_vectors()["decoder/prompt"].shape
      (5, 128)
    """

def from_template(
    template: str, fallback: Initializer | Configured[Initializer] | None = None
) -> Configured[Initializer]:
    """Starts the vectors of `{soft:"words"}` in a template at the words' embeddings.

    Pass the template of your data (`DataSource.template`), which says where the vectors
    are in the text.

    Args:
      template: the template, e.g. `{soft:"Reverse"} {prompt} {soft:2}`; a soft part is
        a number of vectors, words in double quotes, or both, as in `{soft:5:"words"}`.
      fallback: where the vectors without words start; uniform if None.

    Raises:
      InputError: when it initializes the prompt, if the template cannot be read, or has
        another number of vectors.

    Examples:
      >>> template = '{soft:3:"abc"}{prompt}{soft:2}'
      >>> prompt = pt.SoftPrompt(length=5, initializer=pt.from_template(template))
      >>> model.attach(prompt).prompt_vectors()["decoder/prompt"].shape
      (5, 128)
    """

def from_text(
    text: str, fallback: Initializer | Configured[Initializer] | None = None
) -> Configured[TextInitializer]:
    """Starts a prompt from a text, e.g. an instruction or a document.

    Vector `i` of a prompt starts at the embedding of the text's token `i`. Slot `i` of
    a `KeyValuePrefix` starts at the keys and values that the frozen model computes for
    token `i`, so the prefix acts like the beginning of the text; its first slots are
    for the tokens that begin every text, e.g. BOS.

    Args:
      text: the text; tokens beyond the prompt's length are dropped, with a warning.
      fallback: where the vectors after the text start; uniform if None. A prefix must
        not be longer than its text.

    Raises:
      InputError: when it initializes the prompt, if the text has no tokens, or fewer
        than a prefix has slots.

    Examples:
      >>> prompt = pt.SoftPrompt(length=8, initializer=pt.from_text("reverse"))
      >>> model.attach(prompt).prompt_vectors()["decoder/prompt"].shape
      (8, 128)
      >>> prefix = pt.KeyValuePrefix(length=4, initializer=pt.from_text("reverse: a=a"))
      >>> trained, _ = model.attach(prefix).partition()
      >>> trained["decoder/prompt/prompt"].shape
      (4, 2, 4, 4, 32)
    """

def normal(deviation: float = 0.02) -> Configured[PrefixInitializer]:
    """Starts a `KeyValuePrefix` at normally distributed numbers.

    PEFT uses a deviation of 1, far from the keys and values that a model computes.

    Args:
      deviation: standard deviation, at least 0.

    Examples:
      >>> prefix = pt.KeyValuePrefix(length=5, initializer=pt.normal(deviation=0.1))
      >>> trained, _ = model.attach(prefix).partition()
      >>> round(float(trained["decoder/prompt/prompt"].std()), 1)
      0.1
    """

def normal_factors(scale: float = 0.02) -> Configured[Factors]:
    """Starts a `FactorizedMultiTaskPrompt`'s factors at normal numbers, like PEFT.

    Their product has the standard deviation `sqrt(r) * scale**2`: with 0.02 all prompts
    start near zero, whatever the shared prompt is. Prefer `factors_of_ones` unless you
    repeat a PEFT run.

    Args:
      scale: standard deviation of both factors.

    Examples:
      >>> prompt = pt.FactorizedMultiTaskPrompt(
      ...     length=5, tasks=2, factors=pt.normal_factors()
      ... )
      >>> model.attach(prompt).partition()[0]["decoder/prompt/rows"].shape
      (2, 1, 128)
    """

def optax_chain(parts: Sequence[Any]) -> Configured[GradientTransformation]:
    """Applies transformations one after another; the first receives the gradient.

    Args:
      parts: the transformations, at least one.

    Raises:
      InputError: if a part is not a transformation.

    Examples:
      >>> clip = pt.optax_transformation("clip_by_global_norm", {"max_norm": 1.0})
      >>> clipped = pt.optax_chain([clip, pt.adafactor(0.3)])
      >>> pt.ParameterGroup([".*/prompt/.*"], clipped).parameters["regexes"]
      ['.*/prompt/.*']
    """

def optax_transformation(
    name: str,
    arguments: Mapping[str, float | bool | str | None] | None = None,
    learning_rate: float | Schedule | Configured[Schedule] | None = None,
) -> Configured[GradientTransformation]:
    """Names any transformation of optax, so that a run's config can record it.

    From Python you may also pass optax's own object, `tune(...,
    optimizer=optax.lion(1e-4))`, but then the command line cannot resume the run.

    Args:
      name: name of a public function of optax, e.g. `lion`, `sgd` or
        `clip_by_global_norm`.
      arguments: its arguments by name: numbers, texts, true, false or None.
      learning_rate: the argument of this name, a number or a schedule.

    Raises:
      InputError: if there is no such function, an argument is missing, unknown or
        refused, or the transformation needs more than gradients and parameters.

    Examples:
      >>> lion = pt.optax_transformation("lion", {"b1": 0.95}, learning_rate=1e-2)
      >>> isinstance(lion.build(), optax.GradientTransformation)
      True
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
    """The architecture of a T5, version 1.0 (tied, ReLU) or 1.1 (untied, gated GELU).

    Only for T5X checkpoints, which do not contain it; a Hugging Face folder does.

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

    Examples:
      >>> small = pt.t5_config(width=512, feed_forward_width=1024, layers=8, heads=6)
      >>> small.build().activation
      'gelu_tanh'
    """

def uniform(scale: float = 0.5) -> Configured[Initializer]:
    """Starts vectors at uniform numbers from `[0, scale)`, as prompts do by default.

    The range is not symmetric as in the paper (Lester et al. 2021), but as in its
    published code.

    Args:
      scale: upper bound, at least 0.

    Examples:
      >>> prompt = pt.SoftPrompt(length=5, initializer=pt.uniform(scale=0.1))
      >>> vectors = model.attach(prompt).prompt_vectors()["decoder/prompt"]
      >>> bool(vectors.min() >= 0 and vectors.max() < 0.1)
      True
    """

def warmup_constant(peak: float, *, warmup_steps: int = 10) -> Configured[Schedule]:
    """Learning rate that rises linearly to `peak` and stays there.

    Args:
      peak: maximum learning rate.
      warmup_steps: number of warm-up steps; 0 for none.

    Raises:
      InputError: if a number is out of range.

    Examples:
      >>> rate = pt.warmup_constant(0.4, warmup_steps=2).build()
      >>> print(numpy.array(rate(jax.numpy.arange(4))).round(2))
      [0.2 0.3 0.4 0.4]
    """

def warmup_cosine_decay(
    peak: float,
    steps: int = ...,
    *,
    warmup_steps: int = 10,
    final_fraction: float = 0.05,
) -> Configured[Schedule]:
    """Learning rate that rises linearly to `peak`, then falls like half a cosine.

    Loshchilov and Hutter 2017, "SGDR", equation 5, without restarts.

    Args:
      peak: maximum learning rate.
      steps: number of steps of the whole run; `tune` fills it in.
      warmup_steps: as in `warmup_linear_decay`.
      final_fraction: fraction of `peak` that the step after the last would have.

    Raises:
      InputError: if a number is out of range.

    Examples:
      >>> rate = pt.warmup_cosine_decay(
      ...     0.4, steps=6, warmup_steps=2, final_fraction=0.0
      ... ).build()
      >>> print(numpy.array(rate(jax.numpy.arange(6))).round(2))
      [0.2  0.3  0.4  0.34 0.2  0.06]
    """

def warmup_linear_decay(
    peak: float,
    steps: int = ...,
    *,
    warmup_steps: int = 10,
    final_fraction: float = 0.05,
) -> Configured[Schedule]:
    """Learning rate that rises linearly to `peak`, then falls linearly.

    Args:
      peak: maximum learning rate.
      steps: number of steps of the whole run; `tune` fills it in.
      warmup_steps: number of steps of the rise; half of the run, with a warning, if the
        run has no more steps than this.
      final_fraction: fraction of `peak` that the step after the last would have.

    Raises:
      InputError: if a number is out of range.

    Examples:
      >>> rate = pt.warmup_linear_decay(
      ...     0.4, steps=6, warmup_steps=2, final_fraction=0.0
      ... ).build()
      >>> print(numpy.array(rate(jax.numpy.arange(6))).round(2))
      [0.2 0.3 0.4 0.3 0.2 0.1]
    """

def warmup_rsqrt_decay(peak: float, *, warmup_steps: int = 10) -> Configured[Schedule]:
    """Learning rate that rises linearly to `peak`, then falls as `1 / sqrt(step)`.

    Use it if you do not know how long the run will be. It is the schedule of T5's
    training (Raffel et al. 2020, section 3.1.2), except that T5's rate was constant
    during warm-up.

    Args:
      peak: maximum learning rate.
      warmup_steps: number of warm-up steps, at least 1.

    Raises:
      InputError: if a number is out of range.

    Examples:
      >>> rate = pt.warmup_rsqrt_decay(0.4, warmup_steps=2).build()
      >>> print(numpy.array(rate(jax.numpy.arange(4))).round(2))
      [0.2  0.3  0.4  0.33]
    """
