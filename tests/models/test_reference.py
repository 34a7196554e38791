"""Compares the models with outputs of transformers and PEFT for the same weights."""

import dataclasses
import functools
import json
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from prompt_tuning.adapters.peft.folder import read_folder
from prompt_tuning.adapters.peft.peft_conversion import from_peft
from prompt_tuning.checkpoints.formats.safetensors import open_safetensors
from prompt_tuning.checkpoints.restore_plan import plan_restore
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.parameters import merge
from prompt_tuning.data.text.tokenizers import load_tokenizer
from prompt_tuning.decoding.batch_decoding import continue_batch
from prompt_tuning.decoding.row_progress import first_choices
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.families.hf_folder import find_recipes, read_config
from prompt_tuning.models.build import build_model
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.scoring import token_losses
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.source import open_checkpoint
from prompt_tuning.pretrained.tuning import rebuild_tuning
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.settings.pretrained import Pretrained
from prompt_tuning.settings.prompting import Prompting
from tests.support import dummies
from tests.support.exhaustive import sample
from tests.support.shared_data import FIXTURES, SHARED

PEFT = FIXTURES / "peft"
STORIES = SHARED / "data/models/stories260k"
DECODERS = ("llama_gqa_untied", "gpt2_tied", "qwen2_bias_tied")
CASES = (*DECODERS, "t5v11_untied_gated", "t5_orig_tied_relu")
P = 6
TASKS = np.array([0, 1, 2])


def restored(folder, prompt=None, execution: Any = "auto"):
    """Config, structure and parameters of a folder, from the library's own reader."""
    config = read_config(folder)

    def build(key):
        if prompt is None:
            return build_model(key, config)
        vocabulary = Vocabulary(np.zeros((1, config.width), "f4"))
        module = SoftPrompt(key, vocabulary, length=len(prompt))
        return build_model(key, config, module, Prompting(execution=execution))

    graph, abstract = dummies.abstract(build)
    stored = open_safetensors(folder)
    plan = plan_restore(abstract, find_recipes(config, stored), stored)
    parameters = {path: jnp.asarray(x) for path, x in plan.restore().items()}
    return config, graph, parameters | {path: prompt for path in plan.fresh}


@functools.partial(jax.jit, static_argnames="graph")
def logits(parameters, batch, *, graph):
    model = cast(LanguageModel, merge(graph, parameters))
    return model.logits(model.hidden(batch))


@functools.cache
def reference(case):
    return dict(np.load(PEFT / case / "ref.npz"))


def adapter(case):
    """Returns the vectors that PEFT uses."""
    file = PEFT / case / "prompt_tuning/adapter_model.safetensors"
    return jnp.asarray(load_file(file)["prompt_embeddings"])


def rows_of(case):
    """Inputs of a case, as a batch with a target at every position.

    In a decoder-only row these are the targets 0 to T: the prompt predicts target 0,
    and the last token predicts target T, one past the end.
    """
    ref = reference(case)
    lengths = ref["attention_mask"].sum(1)
    tokens = targets = ref["input_ids"]
    positions = np.arange(tokens.shape[1] + 1)
    if case not in DECODERS:
        targets = np.where(ref["labels"] < 0, 0, ref["labels"])
        positions = np.arange(targets.shape[1])
    positions = np.tile(positions, (len(tokens), 1))
    batch = Batch(
        tokens=tokens,
        lengths=lengths,
        targets=targets,
        loss_positions=positions,
        loss_weights=np.ones(positions.shape, "f4"),
        prefix_lengths=np.zeros_like(lengths),
    )
    return jax.tree.map(lambda x: jnp.asarray(x.astype(x.dtype.kind + "4")), batch)


def real_logits(case, ours, theirs):
    """Selects both models' logits at the positions that are not padding."""
    if case not in DECODERS:
        return ours, theirs
    real = reference(case)["attention_mask"].astype(bool)
    return ours[:, 1:][real], theirs[:, -real.shape[1] :][real]


@pytest.mark.parametrize("case", CASES)
def test_base_logits_equal_those_from_transformers(case):
    _, graph, parameters = restored(PEFT / case / "base")
    ours = np.asarray(logits(parameters, rows_of(case), graph=graph))
    pair = real_logits(case, ours, reference(case)["base.logits"])
    np.testing.assert_allclose(*pair, atol=1e-4)


@functools.cache
def adapted(case, kind):
    """Config, structure and parameters of a case's model with one of its adapters."""
    folder = PEFT / case / kind
    source = Pretrained(checkpoint=str(PEFT / case / "base"))
    config = open_checkpoint(source)[0]
    adapter = from_peft(read_folder(folder), config, str(folder))
    model = open_pretrained(
        source, rebuild_tuning(adapter, config), key=jax.random.key(0)
    )
    read = {path: jnp.asarray(leaf) for path, leaf in adapter.parameters.items()}
    parameters = model.read_parameters()
    assert read.keys() <= parameters.keys()
    return config, model.graph, parameters | read


ADAPTERS = [
    (folder.parent.name, folder.name)
    for folder in sorted(PEFT.glob("*/*/"))
    if (folder / "adapter_config.json").exists()
]
FIRST = [(case, kind) for case, kind in ADAPTERS if case in (CASES[1], CASES[3])]
OTHERS = [adapter for adapter in ADAPTERS if adapter not in FIRST]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "kind"), ADAPTERS)
def test_adapted_logits_equal_pefts(case, kind):
    _, graph, parameters = adapted(case, kind)
    batch = rows_of(case)
    if kind == "mpt":
        batch = dataclasses.replace(batch, prompt_ids=TASKS)
    ours = np.asarray(logits(parameters, batch, graph=graph))
    assert_same_logits(case, kind, ours)


def assert_same_logits(case, kind, ours):
    theirs = reference(case)[f"{kind}.logits"]
    if case not in DECODERS:
        # PEFT also returns scores at the positions of its decoder's prompt.
        theirs = theirs[:, -ours.shape[1] :]
    np.testing.assert_allclose(*real_logits(case, ours, theirs), atol=1e-4)
    if case in DECODERS and kind == "prompt_tuning":
        # The first token is predicted by the last prompt vector.
        np.testing.assert_allclose(ours[:, 0], theirs[:, P - 1], atol=1e-4)


# Every kind of adapter on one decoder-only model and on one T5.
@pytest.mark.slow
@pytest.mark.parametrize(("case", "kind"), sample(len(FIRST), [*FIRST, *OTHERS]))
def test_adapted_rows_in_a_batch_continue_as_peft_continues_each_alone(case, kind):
    config, graph, parameters = adapted(case, kind)
    if kind == "mpt" and case not in DECODERS:
        graph, parameters = without_decoder_prompt(case, kind, parameters)
    tasks = jnp.array(TASKS) if kind == "mpt" else None
    generated = continued(config, graph, parameters, rows_of(case), tasks)
    expected = reference(case)[f"{kind}.greedy_single"]
    np.testing.assert_array_equal(generated, expected)


def ends_of(config):
    """Returns the token that ends a row, if the model has one."""
    return () if config.eos_id is None else (config.eos_id,)


def continued(config, graph, parameters, batch, tasks=None):
    """Generates the eight tokens that follow each row."""
    return continue_batch(
        parameters,
        batch.tokens,
        batch.lengths,
        first_choices(Sampling(), ends_of(config), range(len(batch.lengths))),
        tasks,
        graph=graph,
        new_tokens=8,
        pad_id=config.pad_id,
    )


def without_decoder_prompt(case, kind, parameters):
    """Drops the decoder's prompts, as PEFT's `generate` (not its `forward`) does."""
    source = Pretrained(checkpoint=str(PEFT / case / "base"))
    config = open_checkpoint(source)[0]
    folder = PEFT / case / kind
    adapter = from_peft(read_folder(folder), config, str(folder))
    tuning = dataclasses.replace(rebuild_tuning(adapter, config), decoder_prompt=None)
    model = open_pretrained(source, tuning, key=jax.random.key(0))
    return model.graph, {path: parameters[path] for path in model.plan.abstract}


def test_a_prompt_joined_to_the_rows_equals_pefts():
    """The adapters' tests cover the other execution, shared."""
    case = "llama_gqa_untied"
    config, graph, parameters = restored(PEFT / case / "base", adapter(case), "joined")
    batch, ref = rows_of(case), reference(case)
    ours = np.asarray(logits(parameters, batch, graph=graph))
    assert_same_logits(case, "prompt_tuning", ours)
    generated = continued(config, graph, parameters, batch)
    np.testing.assert_array_equal(generated, ref["prompt_tuning.greedy_single"])


def verify_lines():
    return (STORIES / "verify.txt").read_text().split("\n")


LLAMA_TIED = PEFT / "llama_tied"


def generated(folder, new_tokens):
    """Returns the tokens that greedy decoding appends to BOS."""
    config, graph, parameters = restored(folder)
    tokens = continue_batch(
        parameters,
        jnp.array([[config.bos_id]]),
        jnp.array([1]),
        first_choices(Sampling(), ends_of(config), [0]),
        graph=graph,
        new_tokens=new_tokens,
        pad_id=config.pad_id,
    )
    return tokens[0].tolist()


def assert_nats(folder, nats, atol):
    """Compares the mean negative log likelihoods of sentences after BOS."""
    config, graph, parameters = restored(folder)
    tokenizer = load_tokenizer(folder)
    assert config.bos_id is not None
    rows = [([config.bos_id], tokenizer.encode(sentence)) for sentence in nats]
    batch = dummies.make_batch(config, rows)
    losses = jax.jit(functools.partial(token_losses, graph))(parameters, batch)
    nll = (batch.loss_weights * losses.nll).sum(1)
    per_token = nll / batch.loss_weights.sum(1)
    np.testing.assert_allclose(per_token, list(nats.values()), atol=atol)


def test_texts_have_the_nats_and_continuation_of_transformers():
    texts = json.loads((LLAMA_TIED / "texts.json").read_text("utf-8"))
    assert generated(LLAMA_TIED / "base", 16) == texts["generated"]
    assert_nats(LLAMA_TIED / "base", texts["nats"], 1e-5)


@pytest.mark.released
def test_generated_stories_equal_the_published_ones():
    lines = verify_lines()
    first = next(i for i, line in enumerate(lines) if line.startswith("GREEDY: "))
    last = next(i for i, line in enumerate(lines) if line.startswith("matches"))
    story = "\n".join(lines[first:last]).removeprefix("GREEDY: ")
    tokenizer = load_tokenizer(STORIES)
    tokens = generated(STORIES, len(tokenizer.encode(story)))
    assert tokenizer.decode(tokens) == story


@pytest.mark.released
def test_sentences_have_the_nats_of_transformers():
    scored = [line.split("  ") for line in verify_lines() if "nll/token" in line]
    assert len(scored) == 4
    nats = {sentence: float(score.split()[1]) for score, *_, sentence in scored}
    assert_nats(STORIES, nats, 5.1e-4)
