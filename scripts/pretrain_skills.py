"""Pretrains the two bundled models on string skills, from a seed.

    python -m scripts.pretrain_skills --model decoder --output DIR
    python -m scripts.pretrain_skills --model t5 --output DIR

Writes a Hugging Face folder with the training log (`pretraining.jsonl`) and the
accuracy on words held out of pretraining (`accuracy.json`). Each model takes about
twenty minutes on two cores.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import numpy as np

from prompt_tuning.core import learning_rates, parameter_groups
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import split
from prompt_tuning.core.t5_config import t5_config
from prompt_tuning.families.hf_folder import write_folder
from prompt_tuning.models.build import build_model
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.settings.pretrained import Pretrained
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import compile_step
from scripts import skill_tuning, skills

BATCH_SIZE = 128
STEPS = {"decoder": 3500, "t5": 5000}
SORTED = 4  # batches that are drawn together and sorted by length

CONFIGS = {
    "decoder": ModelConfig(
        family="llama",
        architecture="decoder_only",
        vocabulary_size=len(skills.VOCABULARY),
        width=128,
        feed_forward_width=344,
        layers=4,
        heads=4,
        key_value_heads=4,
        head_width=32,
        norm="rms",
        positions="rotary",
        activation="silu",
        gated=True,
        tied_head=True,
        maximum_positions=128,
        pad_id=skills.PAD_ID,
        eos_id=skills.EOS_ID,
        bos_id=skills.BOS_ID,
    ),
    "t5": t5_config(
        vocabulary_size=len(skills.VOCABULARY),
        width=128,
        feed_forward_width=344,
        layers=2,
        heads=4,
        head_width=32,
        pad_id=skills.PAD_ID,
        eos_id=skills.EOS_ID,
        bos_id=skills.BOS_ID,
    ),
}


def pad(rows: list[list[int]], length: int) -> np.ndarray:
    """Pads rows on the right to `[len(rows), length]`."""
    padded = np.full((len(rows), length), skills.PAD_ID, np.int32)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


Pair = tuple[list[int], list[int]]


def draw_batches(rng: np.random.Generator, model: str) -> list[Batch]:
    """Draws batches of random lines; lines of one batch have similar lengths."""
    pairs: list[Pair] = [
        (skills.encode(prompt), [*skills.encode(completion), skills.EOS_ID])
        for prompt, completion in skills.pretraining_pairs(rng, SORTED * BATCH_SIZE)
    ]
    pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
    make = encoder_decoder_batch if model == "t5" else decoder_only_batch
    batches = [
        make(pairs[i : i + BATCH_SIZE]) for i in range(0, len(pairs), BATCH_SIZE)
    ]
    return [batches[i] for i in rng.permutation(SORTED)]


def round_up(length: int) -> int:
    """Rounds up to a multiple of 8, so that few shapes are compiled."""
    return -(-length // 8) * 8


def completion_weights(pairs: list[Pair]) -> np.ndarray:
    """Returns weight 1 for each token of the completion, including its EOS."""
    counts = np.array([len(completion) for _, completion in pairs])
    positions = np.arange(round_up(counts.max()))
    return (positions < counts[:, None]).astype(np.float32)


def encoder_decoder_batch(pairs: list[Pair]) -> Batch:
    """Builds a batch of prompts for the encoder and completions for the decoder."""
    weights = completion_weights(pairs)
    rows = [[*prompt, skills.EOS_ID] for prompt, _ in pairs]
    lengths = np.array([len(row) for row in rows], np.int32)
    return Batch(
        tokens=pad(rows, round_up(lengths.max())),
        lengths=lengths,
        targets=pad([completion for _, completion in pairs], weights.shape[1]),
        loss_positions=np.where(weights > 0, np.arange(weights.shape[1]), 0).astype(
            np.int32
        ),
        loss_weights=weights,
        prefix_lengths=lengths,
    )


def decoder_only_batch(pairs: list[Pair]) -> Batch:
    """Builds a batch of whole lines with the loss on the completions."""
    weights = completion_weights(pairs)
    prefixes = np.array([1 + len(prompt) for prompt, _ in pairs], np.int32)
    rows = [[skills.BOS_ID, *prompt, *completion] for prompt, completion in pairs]
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = pad(rows, round_up(lengths.max()))
    positions = prefixes[:, None] + np.arange(weights.shape[1], dtype=np.int32)
    return Batch(
        tokens=tokens,
        lengths=lengths,
        targets=tokens,
        loss_positions=np.where(weights > 0, positions, 0).astype(np.int32),
        loss_weights=weights,
        prefix_lengths=prefixes,
    )


def pretrain(model: str, *, steps: int, seed: int, log: Path) -> dict[str, np.ndarray]:
    """Trains all parameters with AdamW; returns them by path."""
    graph, parameters = split(build_model(jax.random.key(seed), CONFIGS[model]))
    schedule = learning_rates.warmup_linear_decay(2e-3, steps, warmup_steps=100)
    optimizer = parameter_groups.adamw(schedule, weight_decay=0.01, clip_norm=1.0)
    state = TrainState.create(parameters, optimizer, jax.random.key(seed))
    step = compile_step(graph, optimizer, dropout=False)
    rng = np.random.default_rng(seed)
    started = time.monotonic()
    waiting: list[Batch] = []
    with log.open("w") as lines:
        for number in range(1, steps + 1):
            waiting = waiting or draw_batches(rng, model)
            state, metrics = step(state, {}, waiting.pop())
            if number % 100 == 0 or number == steps:
                row = {"step": number, **{k: float(v) for k, v in metrics.items()}}
                row["seconds"] = round(time.monotonic() - started, 1)
                lines.write(json.dumps(row) + "\n")
                lines.flush()
                print(row, flush=True)
    return {path: np.asarray(leaf) for path, leaf in state.trained.items()}


def measure(folder: Path, *, count: int = 300, seed: int = 1) -> dict[str, float]:
    """Computes each named skill's exact match on words held out of pretraining."""
    source = Pretrained(checkpoint=str(folder))
    model = open_pretrained(source, key=jax.random.key(0))
    parameters = model.read_parameters()
    words = skills.splits(seed, train=1, dev=1, test=count).test
    matches = {}
    for name in (*skills.TRAINED, *skills.KEPT_OUT):
        given = [skills.prompt_text(name, word) for word in words]
        answers = skill_tuning.answers(model, parameters, given)
        expected = [skills.apply(name, word) for word in words]
        matches[name] = float(
            np.mean([a == b for a, b in zip(answers, expected, strict=True)])
        )
    return matches


def main() -> None:
    """Parses the command line and pretrains one model."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", choices=sorted(CONFIGS), required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only_measure", action="store_true", help="measure an existing folder"
    )
    arguments = parser.parse_args()
    folder = arguments.output
    if not arguments.only_measure:
        folder.mkdir(parents=True, exist_ok=True)
        parameters = pretrain(
            arguments.model,
            steps=arguments.steps or STEPS[arguments.model],
            seed=arguments.seed,
            log=folder / "pretraining.jsonl",
        )
        config = CONFIGS[arguments.model]
        write_folder(folder, config, parameters)
        skills.save_tokenizer(folder, add_bos=arguments.model == "decoder")
    matches = measure(folder)
    (folder / "accuracy.json").write_text(json.dumps(matches, indent=2) + "\n")
    for name, share in matches.items():
        print(f"{name:16} {share:.3f}{'  excluded' if name in skills.KEPT_OUT else ''}")


if __name__ == "__main__":
    main()
