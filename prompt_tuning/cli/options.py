"""The options of the commands that compute.

Those that only read and write files of data say theirs beside what they do. Nothing
heavy is imported, so that help is instant.
"""

import argparse

from prompt_tuning.cli import launch
from prompt_tuning.cli import memory as memory_command

EPILOG = (
    "Any value of a config is overridden by --gin.NAME=value, for example "
    "--gin.STEPS=200 or --gin.MODEL='\"folder\"'."
)
OTHER_PROMPT = "a prompt file, checkpoint or PEFT folder in place of the run's best"


def add_options(name: str, command: argparse.ArgumentParser) -> None:
    """Adds the options of a command.

    Args:
      name: of a command in `COMMANDS`.
      command: its parser.
    """
    COMMANDS[name](command)


def _train(train: argparse.ArgumentParser) -> None:
    _add_config_option(train)
    launch.add_options(train)


def _sweep(sweep: argparse.ArgumentParser) -> None:
    _add_config_option(sweep)
    sweep.description = (
        "Tunes K prompts at once over one copy of the frozen model: one compiled step, "
        "each member an ordinary run in a directory of its own below RUN_DIRECTORY, "
        "then a table, sweep.json and curves.png. The frozen model takes the memory of "
        "one run, activations that of the members computed at once. Members whose "
        "Run.data_seed is the same share each batch. Started again, a sweep that was "
        "stopped goes on."
    )
    sweep.add_argument(
        "--at_once",
        type=int,
        metavar="N",
        help="members whose gradients are computed at once, group after group; by "
        "default all on an accelerator, and on a CPU as many as its caches hold",
    )
    sweep.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="NAME=VALUE,VALUE,...",
        help="what tells the members apart: the prompt (PROMPT_LENGTH=5,20), its "
        "initialiser, the optimiser (adafactor.learning_rate=0.1,0.3), the seed "
        "(Run.seed=0,1,2); several --vary give every combination, and "
        "--vary NAME,NAME=(VALUE,VALUE),(VALUE,VALUE) changes values together",
    )


def _evaluate(evaluate: argparse.ArgumentParser) -> None:
    _add_config_option(evaluate)
    _add_run_option(evaluate)
    launch.add_options(evaluate)
    _add_voting_options(evaluate)
    _add_comparison_options(evaluate)


def _generate(generate: argparse.ArgumentParser) -> None:
    _add_config_option(generate)
    _add_run_option(generate)
    launch.add_options(generate)
    _add_prompt_option(generate)
    generate.add_argument(
        "texts",
        nargs="*",
        metavar="TEXT",
        help="texts to continue; lines of standard input if none is given",
    )
    generate.add_argument("--new_tokens", type=int, default=64, help="at most so many")
    generate.add_argument(
        "--temperature", type=float, default=0.0, help="0 is greedy (the default)"
    )
    generate.add_argument("--seed", type=int, default=0, help="of sampling")
    generate.add_argument("--batch_size", type=int, default=32)
    generate.add_argument(
        "--prompt_id",
        type=int,
        metavar="N",
        help="which prompt of a multi-task run continues the texts, from 0",
    )


def _inspect(inspect: argparse.ArgumentParser) -> None:
    _add_config_option(inspect)
    _add_run_option(inspect)
    _add_prompt_option(inspect)
    inspect.add_argument(
        "--nearest", type=int, default=5, help="tokens shown for each vector"
    )


def _similar(similar: argparse.ArgumentParser) -> None:
    similar.add_argument(
        "prompts",
        nargs="+",
        metavar="PROMPT",
        help="a prompt file, run directory, checkpoint or PEFT folder",
    )
    similar.add_argument(
        "--query", metavar="PROMPT", help="the prompt to compare the others with"
    )
    similar.add_argument(
        "--average",
        action="store_true",
        help="rank by the cosine similarity of mean vectors, not by the mean "
        "similarity of all pairs of vectors",
    )
    similar.add_argument(
        "--nearest", type=int, default=5, help="prompts shown for each, without --query"
    )
    similar.add_argument("--picture", metavar="FILE", help="a heat map, as PNG")


def _recycle(recycle: argparse.ArgumentParser) -> None:
    recycle.add_argument(
        "prompt",
        metavar="PROMPT",
        help="a prompt file, run directory, checkpoint or PEFT folder",
    )
    for flag, name, whose in (
        ("--from", "source", "it was trained on"),
        ("--to", "target", "it is to serve"),
    ):
        recycle.add_argument(
            flag,
            dest=name,
            required=True,
            metavar="MODEL",
            help=f"the model that {whose}: a Hugging Face folder, or bundled:NAME",
        )
    recycle.add_argument(
        "--out", required=True, metavar="FILE", help="a NumPy file to write"
    )
    recycle.add_argument(
        "--method",
        choices=("v2v_linear", "v2v_mlp", "linear_combination"),
        default="v2v_linear",
        help="a linear map of embeddings by least squares (the default), a network, or "
        "each vector as a combination of tokens",
    )
    recycle.add_argument(
        "--skip_first", type=int, default=1000, help="of the shared tokens"
    )
    recycle.add_argument(
        "--words",
        type=int,
        default=4000,
        help="shared tokens used, after those skipped",
    )


def _convert(convert: argparse.ArgumentParser) -> None:
    convert.add_argument(
        "source",
        metavar="SOURCE",
        help="a run's directory (its best checkpoint), a checkpoint, a PEFT folder, or "
        "a file of one array",
    )
    convert.add_argument("target", metavar="TARGET", help="a folder or file to write")
    convert.add_argument(
        "--to",
        choices=("peft", "checkpoint", "npy", "safetensors", "t5x"),
        help="the form; by default what TARGET's name ends with, else a checkpoint to "
        "start runs from for PEFT's, and a PEFT folder for ours. npy and safetensors "
        "hold one array, t5x is a folder with google-research/prompt-tuning's names",
    )
    convert.add_argument(
        "--merge",
        action="store_true",
        help="write the frozen model, as a Hugging Face folder, with LoRA and IA3 "
        "multiplied into its weights",
    )
    _add_what_source_does_not_say(convert)
    convert.add_argument(
        "--force", action="store_true", help="replace what such a command wrote before"
    )


def _memory(memory: argparse.ArgumentParser) -> None:
    _add_config_option(memory)
    memory_command.add_options(memory)


COMMANDS = {
    "train": _train,
    "sweep": _sweep,
    "evaluate": _evaluate,
    "generate": _generate,
    "inspect": _inspect,
    "similar": _similar,
    "recycle": _recycle,
    "convert": _convert,
    "memory": _memory,
}
"""Adds the options of each command."""


def _add_config_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--gin_file",
        action="append",
        default=[],
        metavar="FILE",
        help="a gin file, by path or by name below configs/; may be repeated",
    )
    command.epilog = EPILOG


def _add_run_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--run",
        metavar="DIRECTORY",
        help="a run's directory: short for --gin_file DIRECTORY/config.gin; a sweep's "
        "stands for its best member",
    )


def _add_prompt_option(command: argparse.ArgumentParser) -> None:
    command.add_argument("--prompt", metavar="PATH", help=OTHER_PROMPT)


def _add_voting_options(evaluate: argparse.ArgumentParser) -> None:
    evaluate.add_argument(
        "--prompt",
        dest="prompts",
        action="append",
        default=[],
        metavar="PATH",
        help=f"{OTHER_PROMPT}; given several times, the prompts answer together",
    )
    evaluate.add_argument(
        "--vote",
        choices=("majority", "mean"),
        help="how several prompts come to an answer: that of most of them, and of tied "
        "ones the likelier (the default), or that of the greatest mean log-probability",
    )


def _add_comparison_options(evaluate: argparse.ArgumentParser) -> None:
    evaluate.add_argument(
        "--baseline",
        action="store_true",
        help="measure the frozen model without a prompt too, side by side",
    )
    evaluate.add_argument(
        "--text_prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="measure the frozen model with this text before what it is given, too; "
        "may be repeated",
    )
    evaluate.add_argument(
        "--predictions",
        metavar="FILE",
        help="write what was given, wanted and made, and each example's scores, as "
        "jsonl",
    )
    evaluate.add_argument(
        "--force", action="store_true", help="replace the file of predictions"
    )


def _add_what_source_does_not_say(convert: argparse.ArgumentParser) -> None:
    convert.add_argument(
        "--base_model",
        metavar="PATH",
        help="the frozen model of a SOURCE that is no run: a Hugging Face folder or "
        "bundled:NAME; it is also noted in a PEFT folder",
    )
    convert.add_argument(
        "--task_type",
        choices=("CAUSAL_LM", "SEQ_2_SEQ_LM"),
        help="noted in a PEFT folder; by default by the model",
    )
    convert.add_argument(
        "--only",
        action="append",
        choices=(
            "PROMPT_TUNING",
            "PREFIX_TUNING",
            "MULTITASK_PROMPT_TUNING",
            "DEEP_PROMPT",
            "ADDED_DEEP_PROMPT",
            "LORA",
            "IA3",
        ),
        help="of a run that tuned several things, those to write; may be repeated",
    )
