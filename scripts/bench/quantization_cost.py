"""Measures the cost of narrower frozen weights: nats per token and changed answers.

    python -m scripts.bench.quantization_cost
    python -m scripts.bench.quantization_cost --text_model DIR --text stories.txt

For both bundled models a prompt is tuned on float32 weights and evaluated on held-out
words with each type of weights; with `--own`, a prompt is also tuned on each type. With
`--text_model`, that model is evaluated without a prompt on the texts of a file (split
at `<|endoftext|>`). "Agreement" is the fraction of tokens with the same most likely
prediction as with float32.
"""

import argparse
import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from prompt_tuning.cli.main import set_up_process
from prompt_tuning.config.gin_files import read_run
from prompt_tuning.config.run import DataSource, Run
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.parameters import Parameters, merge
from prompt_tuning.core.quantization.stores import PARAMETER_DTYPES
from prompt_tuning.data.batching.batches import build_batch
from prompt_tuning.data.batching.plan_batches import plan_batches
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.pretrained.prompted_model import PromptedModel, open_pretrained
from prompt_tuning.settings.pretrained import Pretrained
from prompt_tuning.tuned.load_tuned import load_tuned
from scripts import skill_tuning, skills

WIDTH = 120
END_OF_TEXT = "<|endoftext|>"
HEADINGS = (
    "model and text",
    "weights",
    "bytes",
    "nats/token",
    "agreement",
    "exact match",
)


@dataclasses.dataclass(frozen=True)
class Reading:
    """A model's predictions of a text.

    Attributes:
      bytes: bytes of the frozen weights.
      nats: mean negative log-likelihood per token.
      predicted: most likely token at each learned position.
    """

    bytes: int
    nats: float
    predicted: np.ndarray


def main() -> None:
    """Measures all models, then prints one table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--skills", nargs="+", default=["tail", "reverse upper"])
    parser.add_argument(
        "--own", action="store_true", help="also tune a prompt on each type of weights"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/quantization_cost"))
    parser.add_argument("--text_model", help="checkpoint to evaluate on --text")
    parser.add_argument("--text", type=Path, help="file of texts")
    arguments = parser.parse_args()
    if (arguments.text_model is None) != (arguments.text is None):
        parser.error("--text_model and --text require each other")
    set_up_process()
    console = Console()
    rows = []
    if arguments.text is not None:
        rows += text_rows(arguments.text_model, arguments.text)
    for model in ("decoder", "t5"):
        for skill in arguments.skills:
            rows += skill_rows(console, model, skill, arguments.runs, arguments.own)
    table = Table(*HEADINGS)
    for row in rows:
        table.add_row(*row)
    Console(width=None if console.is_terminal else WIDTH).print(table)


def text_rows(checkpoint: str, file: Path) -> list[tuple[str, ...]]:
    """Evaluates a model without a prompt on texts: one row per type of weights."""
    readings = []
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "texts.jsonl"
        texts = [text.strip() for text in file.read_text().split(END_OF_TEXT)]
        lines.write_text(
            "".join(json.dumps({"completion": text}) + "\n" for text in texts if text)
        )
        data = DataSource(files=str(lines), prompt_key=None, batch_size=4)
        for dtype in PARAMETER_DTYPES:
            source = Pretrained(checkpoint=checkpoint, parameter_dtype=dtype)
            model = open_pretrained(source, key=jax.random.key(0))
            readings.append(read(model, model.read_parameters(), data))
    name = f"{Path(checkpoint).name}, {file.stem}"
    return [
        (name, dtype, *described(reading, readings[0]), "")
        for dtype, reading in zip(PARAMETER_DTYPES, readings, strict=True)
    ]


def skill_rows(
    console: Console, name: str, skill: str, runs: Path, retune: bool
) -> list[tuple[str, ...]]:
    """Evaluates a bundled model on held-out words: one row per type of weights."""
    tuned = tune(console, name, skill, runs, PARAMETER_DTYPES[0])
    run = read_run([f"{tuned['run']}/config.gin"], [])
    rows, first = [], None
    for dtype in PARAMETER_DTYPES:
        narrow = dataclasses.replace(run.model, parameter_dtype=dtype)
        reading, matched = with_prompt(
            dataclasses.replace(run, model=narrow), Path(tuned["prompt_file"]), skill
        )
        first = first or reading
        answers = f"{matched:.1%}"
        if retune:
            retuned = tune(console, name, skill, runs, dtype) if rows else tuned
            answers += f", {retuned['tuned_prompt']:.1%}"
        rows.append(
            (f"skills-{name}, {skill}", dtype, *described(reading, first), answers)
        )
    return rows


def tune(console: Console, name: str, skill: str, runs: Path, dtype: str) -> dict:
    """Tunes one prompt on one type of weights."""
    overrides = [f"Pretrained.parameter_dtype = {dtype!r}"]
    return skill_tuning.tune_and_measure(console, name, skill, 0, runs, overrides)


def with_prompt(run: Run, prompt: Path, skill: str) -> tuple[Reading, float]:
    """Evaluates a prompt on a run's held-out rows; returns its exact match too."""
    assert run.evaluation is not None
    model, parameters = load_tuned(run, prompt)
    words = skill_tuning.words(0).test
    given = [skills.prompt_text(None, word) for word in words]
    expected = [skills.apply(skill, word) for word in words]
    answers = skill_tuning.answers(model, parameters, given)
    return (
        read(model, parameters, run.evaluation.data),
        skill_tuning.exact_match(answers, expected),
    )


def read(model: PromptedModel, parameters: Parameters, data: DataSource) -> Reading:
    """Evaluates every row once."""
    examples = load_examples(data, model.interface)
    nats, predicted = [], []
    for planned in plan_batches(
        data, model.interface, examples, shuffle=False
    ).one_pass():
        batch = build_batch(examples, planned, model.config.pad_id)
        weighted = batch.loss_weights > 0
        nll, best = jax.device_get(outcome(model.graph, parameters, batch))
        nats.append(nll[weighted])
        predicted.append(best[weighted])
    frozen = [leaf for path, leaf in parameters.items() if "/prompt/" not in path]
    size = sum(leaf.nbytes for leaf in frozen)
    return Reading(size, float(np.concatenate(nats).mean()), np.concatenate(predicted))


@functools.partial(jax.jit, static_argnums=0)
def outcome(
    graph: nnx.GraphDef, parameters: Parameters, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """Computes the target's loss and the most likely token at each loss position."""
    model = cast(LanguageModel, merge(graph, parameters))
    scores = jax.nn.log_softmax(model.logits(model.hidden(batch)))
    targets = jnp.take_along_axis(batch.targets, batch.loss_positions, axis=1)
    nll = -jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    return nll, scores.argmax(axis=-1)


def described(reading: Reading, reference: Reading) -> tuple[str, str, str]:
    """Formats bytes, nats and agreement for the table."""
    agreement = np.mean(reading.predicted == reference.predicted)
    return f"{reading.bytes:,}", f"{reading.nats:.4f}", f"{agreement:.2%}"


if __name__ == "__main__":
    main()
