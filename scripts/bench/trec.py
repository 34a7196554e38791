"""Measures a key/value prefix: a model of stories classifies TREC's questions.

    python -m scripts.bench.trec --model DIR --questions train_5500.label

Tunes three prefixes together with the shipped config `runs/trec_stories`, on all
questions but the last 500. Prints their accuracy on the last 500 at the end of
training, and the fraction of the most common class. The six classes are from Li and
Roth (2002); each is represented by a word of the model's small vocabulary.
"""

import argparse
import collections
import json
import statistics
from pathlib import Path

from rich.console import Console

from prompt_tuning.cli.main import main as prompt_tuning
from prompt_tuning.core.errors import InputError

HELD_OUT = 500
METRIC = "evaluation/label_accuracy"
WORDS = {
    "ABBR": " big",
    "DESC": " was",
    "ENTY": " it",
    "HUM": " she",
    "LOC": " there",
    "NUM": " time",
}


def main() -> None:
    """Tunes the prefixes, measures them and prints the results."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", required=True, help="the stories260k folder")
    parser.add_argument("--questions", required=True, help="TREC's train_5500.label")
    parser.add_argument("--run", default="runs/trec_stories", help="sweep directory")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    folder = Path(arguments.run)
    folder.mkdir(parents=True, exist_ok=True)
    pairs = read_questions(Path(arguments.questions))
    files = {"train": folder / "train.jsonl", "held_out": folder / "held_out.jsonl"}
    write_pairs(files["train"], pairs[:-HELD_OUT])
    write_pairs(files["held_out"], pairs[-HELD_OUT:])
    values = {
        "MODEL": arguments.model,
        "TRAIN_FILES": str(files["train"]),
        "EVALUATION_FILES": str(files["held_out"]),
        "RUN_DIRECTORY": str(folder / "sweep"),
    }
    seeds = ",".join(map(str, arguments.seeds))
    command = ["sweep", "--gin_file", "runs/trec_stories.gin"]
    command += ["--vary", f"Run.seed={seeds}"]
    prompt_tuning([*command, *(f"--gin.{k}={v!r}" for k, v in values.items())])
    accuracies = [
        final_accuracy(path) for path in sorted((folder / "sweep").glob("*/"))
    ]
    counts = collections.Counter(pair["completion"] for pair in pairs[-HELD_OUT:])
    commonest = max(counts.values()) / HELD_OUT
    Console().print(
        f"the last {HELD_OUT} questions: mean of {len(accuracies)} seeds "
        f"{statistics.mean(accuracies):.1%} "
        f"({', '.join(f'{x:.1%}' for x in accuracies)}); "
        f"the most common class alone {commonest:.1%}"
    )


def read_questions(path: Path) -> list[dict[str, str]]:
    """Reads lines `CLASS:subclass question`; returns questions and class words.

    Raises:
      InputError: if a line has an unknown class.
    """
    pairs = []
    for number, line in enumerate(path.read_text("latin-1").splitlines(), 1):
        label, _, question = line.strip().partition(" ")
        name = label.partition(":")[0]
        if name not in WORDS:
            raise InputError(
                f"{path}, line {number}: the class is {name!r}, expected one of "
                f"{', '.join(WORDS)}"
            )
        pairs.append({"prompt": question, "completion": WORDS[name]})
    return pairs


def write_pairs(path: Path, pairs: list[dict[str, str]]) -> None:
    """Writes a JSONL file."""
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def final_accuracy(run: Path) -> float:
    """Returns the last label accuracy in a run's log."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return [entry[METRIC] for entry in entries if METRIC in entry][-1]


if __name__ == "__main__":
    main()
