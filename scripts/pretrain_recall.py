"""Pretrains the bundled model that answers from a table of facts, from a seed.

    python -m scripts.pretrain_recall --output DIR

Writes a Hugging Face folder with the training log (`pretraining.jsonl`) and the share
of right answers to questions about new tables (`accuracy.json`). The tables grow from 4
to 48 facts as the model learns.
"""

import argparse
import functools
import json
import time
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from prompt_tuning.core import parameter_groups
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters, split
from prompt_tuning.families.hf_folder import write_folder
from prompt_tuning.models.build import build_model
from prompt_tuning.models.rotary import rotary_frequencies
from prompt_tuning.models.scoring import token_losses
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.settings.pretrained import Pretrained
from scripts import recall, skill_tuning

STEPS = 700
RATE, WARMUP = 3e-3, 60
SHARPNESS, MATCH = 5.0, 2.0
"""Size of the first block's queries and keys, and of matches in the second block."""
SIZES = (4, 8, 16, 32, 48)
"""Numbers of facts of the tables, in the order of the curriculum."""
THRESHOLD = 0.88
"""Running share of right answers at which the tables grow."""
TOKENS = 2048
"""Number of tokens of a batch, about."""
ASKED = 24
"""Maximum number of facts that follow a table."""
WEIGHTS = (0.1, 1.0, 0.1, 1.0, 1.0, 0.1)
"""Loss weights of the tokens of a fact; the key's let the model ask by itself."""
ALIKE = 0.7
"""Share of batches whose keys share their syllables."""
QUESTIONS = 0.75
"""Share of batches whose tables are followed by questions, and not by lines."""

CONFIG = ModelConfig(
    family="llama",
    architecture="decoder_only",
    vocabulary_size=len(recall.VOCABULARY),
    width=96,
    feed_forward_width=192,
    layers=2,
    heads=4,
    key_value_heads=4,
    head_width=32,
    norm="rms",
    positions="rotary",
    rotary_base=1e8,  # keys are found by their content at distances up to 500
    activation="silu",
    gated=True,
    tied_head=False,
    maximum_positions=1024,
    pad_id=recall.PAD_ID,
    eos_id=recall.EOS_ID,
)


CONTENT, SLOT = slice(1, 32), 16
"""Features of a token, and number of features of each token before it."""
TURNING = 6
"""Number of rotary frequencies that tell the neighbors of a token apart."""


def place_heads(
    parameters: Mapping[str, Array], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Lets the heads begin near what they have to do.

    Head `i` of the first block reads the token `i + 1` before, by one input that is the
    same for all tokens and that the highest rotary frequencies turn into a peak at one
    distance, and copies it to features of its own. The heads of the second block look
    for a token behind the same key, by the frequencies that hardly turn. From the usual
    values a model of this size reads millions of tokens before it begins to copy at
    all, and then it compares only one syllable of a key.

    Args:
      parameters: initial parameters by path.
      rng: source of the values.
    """
    heads, width, half = CONFIG.heads, CONFIG.head_width, CONFIG.head_width // 2
    path = "decoder/layers/self_attention"
    changed = {path: np.array(array) for path, array in parameters.items()}
    query, key, value, out = (
        changed[f"{path}/{name}/kernel"] for name in ("query", "key", "value", "out")
    )
    table = changed["token_embedder/embedding"]  # [V, D]
    table[:] = 0
    content = rng.normal(size=(len(table), 31))
    content *= np.sqrt(31) / np.linalg.norm(content, axis=1, keepdims=True)
    table[:, 0], table[:, CONTENT] = 1, content
    changed["head/kernel"][:, CONTENT] = content * 0.2
    changed["decoder/layers/mlp/down/kernel"] *= 0.2
    # Each head's columns of [D, H, K], and rows of [H, K, D].
    query, key, value = (x.reshape(2, -1, heads, width) for x in (query, key, value))
    out = out.reshape(2, heads, width, -1)
    angles = rotary_frequencies(CONFIG)[:TURNING]
    query[0], key[0], value[0], out[0] = 0, 0, 0, 0
    copied = rng.normal(size=(31, SLOT)) / 31**0.5
    for head in range(heads):
        turn = -angles * (head + 1)
        key[0, 0, head, :TURNING] = SHARPNESS
        query[0, 0, head, :TURNING] = SHARPNESS * np.cos(turn)
        query[0, 0, head, half : half + TURNING] = SHARPNESS * np.sin(turn)
        value[0, CONTENT, head, :SLOT] = copied
        out[0, head, :SLOT, _slot(head)] = np.eye(SLOT) / 3**0.5
    still = [*range(TURNING, half), *range(half + TURNING, width)]
    for head in range(heads):
        query[1, :, head], key[1, :, head], value[1, :, head] = 0, 0, 0
        for before in (0, 1):  # the syllables that end and begin a key
            mixed = rng.normal(size=(SLOT, len(still))) * (MATCH / len(still)) ** 0.5
            asked = before + head // 2  # for either syllable of the value
            for column, index in zip(mixed.T, still, strict=True):
                query[1, _slot(asked), head, index] += column
                key[1, _slot(asked + 1), head, index] += column
        value[1, CONTENT, head, :31] = np.eye(31)
        out[1, head, :31, CONTENT] = 2 * np.eye(31)
    return changed


def _slot(head: int) -> slice:
    """Returns the features that a head of the first block writes."""
    return slice(32 + SLOT * head, 32 + SLOT * (head + 1))


def draw_rows(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draws tables of `count` facts, each followed by some of them, `[B, T]`."""
    asked = min(count, ASKED)
    rows = max(4, TOKENS // (recall.FACT * (count + asked)))
    draw = recall.alike_facts if rng.random() < ALIKE else recall.random_facts
    facts = draw(rng, rows, count)
    order = np.argsort(rng.random((rows, count)), axis=1)[:, :asked]
    chosen = np.take_along_axis(facts, order[..., None], axis=1)
    follow = recall.questions if rng.random() < QUESTIONS else recall.lines
    return np.concatenate([recall.lines(facts), follow(chosen)], axis=1)


def make_batch(rows: np.ndarray, count: int) -> Batch:
    """Makes a batch of rows with the loss on what follows the tables of `count`."""
    given = recall.FACT * count
    learned = np.arange(given, rows.shape[1], dtype=np.int32)
    weights = np.tile(np.array(WEIGHTS, np.float32), len(learned) // recall.FACT)
    lengths = np.full(len(rows), rows.shape[1], np.int32)
    return Batch(
        tokens=rows,
        lengths=lengths,
        targets=rows,
        loss_positions=np.tile(learned, (len(rows), 1)),
        loss_weights=np.tile(weights, (len(rows), 1)),
        prefix_lengths=np.full(len(rows), given, np.int32),
    )


def loss(
    parameters: Parameters, graph: nnx.GraphDef, batch: Batch
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Computes the mean loss, and the share of values that are right."""
    losses = token_losses(graph, parameters, batch)
    weights = batch.loss_weights
    right = losses.correct.reshape(len(batch.tokens), -1, recall.FACT)[..., 3:5]
    return jnp.sum(losses.nll * weights) / jnp.sum(weights), right.all(-1).mean()


def pretrain(*, steps: int, seed: int, log: Path) -> dict[str, np.ndarray]:
    """Trains all parameters with Adam; returns them by path."""
    graph, initial = split(build_model(jax.random.key(seed), CONFIG))
    placed = place_heads(initial, np.random.default_rng([seed, 1]))
    parameters: Parameters = {k: jnp.array(v) for k, v in placed.items()}
    rate = optax.join_schedules(
        [
            optax.linear_schedule(0, RATE, WARMUP),
            optax.constant_schedule(RATE),
            optax.linear_schedule(RATE, 0, steps - int(steps * 0.6)),
        ],
        [WARMUP, int(steps * 0.6)],
    )
    optimizer = parameter_groups.adamw(rate, clip_norm=1.0, b2=0.98)
    state = optimizer.init(parameters)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(parameters, state, batch):
        values, gradient = jax.value_and_grad(loss, has_aux=True)(
            parameters, graph, batch
        )
        updates, state = optimizer.update(gradient, state, parameters)
        return optax.apply_updates(parameters, updates), state, values

    rng = np.random.default_rng(seed)
    started, stage, running = time.monotonic(), 0, 0.0
    with log.open("w") as file:
        for number in range(1, steps + 1):
            # A quarter of the batches come from the stages before.
            earlier = stage > 0 and rng.random() < 0.25
            count = SIZES[rng.integers(stage) if earlier else stage]
            batch = make_batch(draw_rows(rng, count), count)
            parameters, state, (value, right) = step(parameters, state, batch)
            if not earlier:
                running = 0.95 * running + 0.05 * float(right)
            if number % 50 == 0 or number == steps:
                row = {"step": number, "facts": SIZES[stage], "loss": float(value)}
                row |= {
                    "batch": count,
                    "right": running,
                    "seconds": time.monotonic() - started,
                }
                row = {k: round(x, 4) for k, x in row.items()}
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(row, flush=True)
            if running > THRESHOLD and stage + 1 < len(SIZES):
                stage, running = stage + 1, 0.0
    return {path: np.asarray(array) for path, array in parameters.items()}


def measure(folder: Path, *, tables: int = 20, seed: int = 1) -> dict[str, float]:
    """Computes the share of exact answers about new tables, by their number of facts.

    The questions of a table follow it one by one; "none" is 48 facts without any table.
    """
    model = open_pretrained(Pretrained(checkpoint=str(folder)), key=jax.random.key(0))
    parameters, matches = model.read_parameters(), {}
    for name, count in {"24": 24, "48": 48, "64": 64, "none": 48}.items():
        documents = [recall.document(seed + i, count) for i in range(tables)]
        given, expected = [], []
        for text, questions in documents:
            for question, answer in questions[:ASKED]:
                given.append(question if name == "none" else text + question)
                expected.append(answer)
        answers = skill_tuning.answers(model, parameters, given)
        matches[name] = skill_tuning.exact_match(answers, expected)
    return matches


def main() -> None:
    """Parses the command line and pretrains the model."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    arguments = parser.parse_args()
    folder = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "pretraining.jsonl"
    parameters = pretrain(steps=arguments.steps, seed=arguments.seed, log=log)
    write_folder(folder, CONFIG, parameters)
    recall.save_tokenizer(folder)
    matches = measure(folder)
    (folder / "accuracy.json").write_text(json.dumps(matches, indent=2) + "\n")
    print(matches)


if __name__ == "__main__":
    main()
