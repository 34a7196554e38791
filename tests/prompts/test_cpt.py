"""Prompts of examples in the context train as PEFT's CPT and are its folders."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prompt_tuning as pt
from prompt_tuning.cli.main import main
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.bounded_updates import Ball, stay_in_balls
from prompt_tuning.core.errors import InputError
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts.cpt import ContextPrompt
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.settings.pretrained import Pretrained
from tests.support.dummies import LetterTokenizer
from tests.support.shared_data import FIXTURES

# torch is only in the `bench` extra.
# pyright: reportMissingImports=false

KEY = jax.random.key(0)
TABLE = np.random.default_rng(0).standard_normal((9, 8)).astype("f4")
VOCABULARY = Vocabulary(TABLE, LetterTokenizer())
IDS = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
TYPES = [0, 1, 2, 2, 3, 4, 5, 6, 6, 7, 8, 8]
EXAMPLES = [
    {"prompt": "upper: ab=", "completion": "AB "},
    {"prompt": "upper: cd=", "completion": "CD "},
]
ROWS = [{"prompt": f"upper: {x}=", "completion": x.upper()} for x in ("ef", "gh", "ij")]


def test_rows_go_back_to_the_surface_of_their_balls():
    ball = Ball(np.ones((3, 2), "f4"), np.array([1, 0, 5], "f4"))
    rows = jnp.asarray([[4.0, 5.0], [2.0, 2.0], [2.0, 3.0]])
    expected = [[1.6, 1.8], [1, 1], [2, 3]]
    np.testing.assert_allclose(ball.nearest(rows), expected, rtol=1e-6)


def test_examples_become_typed_tokens_at_their_embeddings():
    rows = [
        {"prompt": "ab", "completion": "c"},
        {"prompt": "d", "completion": "ef"},
    ]
    prompt = ContextPrompt(KEY, VOCABULARY, examples=rows, epsilon=0.4, decay=0.5)
    np.testing.assert_array_equal(prompt(), TABLE[:6])
    assert prompt.types == (2, 2, 4, 6, 8, 8)
    inputs = 0.4 * (8 / 2048) ** 0.5
    expected = [inputs, inputs, 0, inputs, 0, 0]
    np.testing.assert_allclose(prompt.ball.radius, expected, rtol=1e-6)
    assert prompt.answers == ((2, 4, 5), (2, 4, 5), (0.25, 0.5, 0.5))


@pytest.mark.parametrize(
    "settings, found",
    [
        ({}, "give one of them"),
        ({"examples": EXAMPLES, "token_ids": [1]}, "give one of them"),
        ({"token_ids": [1, 2], "token_types": [1]}, "2 tokens and 1 types"),
        ({"examples": [*EXAMPLES, {"prompt": "a"}]}, r"\[2\] has no 'completion'"),
        ({"examples": []}, "expected an example"),
    ],
)
def test_a_context_needs_examples_or_typed_tokens(settings, found):
    with pytest.raises(InputError, match=found):
        ContextPrompt(KEY, VOCABULARY, **settings)


@pytest.mark.parametrize("line", ["5", "[1, 2]", '["ab"]'])
def test_a_line_of_examples_that_is_no_object_is_refused(line, tmp_path):
    content = f"{json.dumps(EXAMPLES[0])}\n\n{line}\n"
    (tmp_path / "shots.jsonl").write_text(content)
    with pytest.raises(InputError, match=r"shots.jsonl, line 3 .* a JSON object"):
        ContextPrompt(KEY, VOCABULARY, examples=str(tmp_path / "shots.jsonl"))


def open_context(base, **settings):
    prompt = functools.partial(
        ContextPrompt, token_ids=IDS, token_types=TYPES, decay=0.8, **settings
    )
    source = Pretrained(checkpoint=str(base))
    return open_pretrained(source, Tuning(prompt=prompt), key=KEY)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama_gqa_untied", "gpt2_tied"])
@pytest.mark.filterwarnings("ignore")  # of PEFT and transformers
def test_training_is_pefts(model, tmp_path):
    import peft
    import torch
    import transformers

    base, steps, rate = FIXTURES / "peft" / model / "base", 20, 0.1
    random = np.random.default_rng(1)
    tokens = random.integers(3, 40, (4, 9)).astype(np.int32)
    learned = np.arange(9) >= 6
    config = peft.CPTConfig(
        task_type="CAUSAL_LM",
        cpt_token_ids=IDS,
        cpt_tokens_type_mask=TYPES,
        opt_weighted_loss_type="decay",
        opt_loss_decay_factor=0.8,
        opt_projection_epsilon=0.5,
        opt_projection_format_epsilon=0.3,
    )
    network = transformers.AutoModelForCausalLM.from_pretrained(base)
    network = peft.get_peft_model(network, config).double()
    trained = [x for x in network.parameters() if x.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=rate, momentum=0.9)
    ids = torch.tensor(tokens.astype("i8"))
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.tensor(np.where(learned, tokens, -100).astype("i8")),
    }
    expected = []
    for _ in range(steps):
        loss = network(**inputs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    network.save_pretrained(tmp_path / "theirs")

    opened = open_context(base, epsilon=0.5, format_epsilon=0.3)
    prompt = opened.prompts.prompt
    assert isinstance(prompt, ContextPrompt)
    batch = Batch(
        tokens=jnp.asarray(tokens),
        lengths=jnp.full(4, 9),
        targets=jnp.asarray(tokens),
        loss_positions=jnp.tile(jnp.arange(6, 9), (4, 1)),
        loss_weights=jnp.ones((4, 3)),
        prefix_lengths=jnp.full(4, 6),
    )
    # PEFT divides by the number of all answers' tokens: 3 of a row, 3 in the context.
    scale = 3 / (3 + 3)
    own = stay_in_balls(
        optax.sgd(rate * scale, momentum=0.9), opened.prompts.balls("decoder_only")
    )
    parameters = opened.read_parameters()
    path = "decoder/prompt/prompt"
    start, frozen = {path: parameters.pop(path)}, parameters
    step = jax.jit(
        functools.partial(
            pt.train_step, graph=opened.graph, optimizer=own, dropout=False
        )
    )
    state, losses = pt.TrainState.create(start, own, KEY), []
    for _ in range(steps):
        state, metrics = step(state, frozen, batch)
        losses.append(float(metrics["loss"]) * scale)
    np.testing.assert_allclose(losses, expected, atol=3e-6)
    assert losses[-1] < losses[0] - 1e-3
    moved = np.linalg.norm(state.trained[path] - start[path], axis=1)
    radius = prompt.ball.radius
    assert (moved <= radius * 1.0001).all()
    assert (moved[radius > 0] > 0.9999 * radius[radius > 0]).any()
    saved = peft.utils.load_peft_weights(str(tmp_path / "theirs"))
    theirs = saved["prompt_embeddings"].float().numpy()
    np.testing.assert_allclose(state.trained[path], theirs, atol=1e-5)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    return pt.tune(
        "bundled:skills-decoder",
        pt.ContextPrompt(examples=EXAMPLES, epsilon=1.0),
        ROWS,
        steps=2,
        batch_size=3,
        directory=str(tmp_path_factory.mktemp("runs") / "run"),
        progress=False,
    )


@pytest.mark.slow
def test_a_run_is_exported_as_cpt(tuned, tmp_path):
    tuned.save(tmp_path / "peft")
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert settings["peft_type"] == "CPT"
    count = settings["num_virtual_tokens"]
    assert len(settings["cpt_token_ids"]) == count
    assert set(settings["cpt_tokens_type_mask"]) == {2, 4, 6, 8}
    assert settings["opt_projection_epsilon"] == 1.0
    loaded = pt.load_tuned(tmp_path / "peft", base="bundled:skills-decoder")
    loss = tuned.evaluate(ROWS)["loss"]
    assert loaded.evaluate(ROWS)["loss"] == pytest.approx(loss)


@pytest.mark.slow
def test_convert_names_the_kind_that_it_writes(tuned, tmp_path, capsys):
    target = tmp_path / "peft"
    assert main(["convert", tuned.run.directory, str(target)]) == 0
    assert f"{target}: CPT" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_keeps_the_examples_of_its_file(tmp_path):
    shots, run = tmp_path / "shots.jsonl", tmp_path / "run"
    shots.write_text("".join(f"{json.dumps(x)}\n" for x in EXAMPLES))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps(x)}\n" for x in ROWS))
    options = ["--model", "bundled:skills-decoder", "--method", "cpt", "--train", rows]
    options += ["--prompt_examples", shots, "--steps", 1, "--batch_size", 3]
    assert main(["train", *map(str, [*options, "--out", run])]) == 0
    before = pt.load_tuned(run).prompt_vectors()
    shots.unlink()
    after = pt.load_tuned(run).prompt_vectors()
    assert before.keys() == after.keys() and before
    for path, vectors in before.items():
        np.testing.assert_array_equal(after[path], vectors)


@pytest.mark.slow
def test_packed_rows_meshes_and_micro_batches_count_each_example(tmp_path):
    losses = []
    rows = [ROWS[0]] * 4
    streamed = pt.load("bundled:skills-decoder", weights="streamed")
    runs: dict[str, Any] = {
        "plain": {"batch_size": 4},
        "parts": {"batch_size": 2, "accumulate": 2},
        "mesh": {"batch_size": 8, "mesh": pt.MeshShape(data=4, tensor=2)},
        "stages": {"batch_size": 4, "mesh": pt.MeshShape(data=4, stage=2)},
        "streamed": {"batch_size": 4, "model": streamed},
        "packed": {"batch_size": 1, "packing": True, "packed_length": 64},
    }
    for name, settings in runs.items():
        pt.tune(
            settings.pop("model", "bundled:skills-decoder"),
            pt.ContextPrompt(examples=EXAMPLES),
            rows,
            steps=1,
            directory=str(tmp_path / name),
            progress=False,
            **settings,
        )
        log = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append(json.loads(log[-1])["loss"])
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


@pytest.mark.parametrize(
    "settings, found",
    [
        ({"prompting": pt.Prompting(placement="suffix")}, "Run.prompting"),
        ({"objective": pt.DPO()}, "Run.objective is a DPO"),
        ({"model": "bundled:skills-t5"}, "the model has an encoder"),
    ],
)
def test_a_context_without_a_decoders_prompt_is_refused(settings, found, tmp_path):
    given: dict[str, Any] = {"model": "bundled:skills-decoder", **settings}
    with pytest.raises(InputError, match=found):
        pt.tune(
            given.pop("model"),
            pt.ContextPrompt(examples=EXAMPLES),
            ROWS,
            steps=1,
            directory=str(tmp_path / "run"),
            progress=False,
            **given,
        )
