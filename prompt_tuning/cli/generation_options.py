"""Options of `generate` for the decoding engine, and their contradictions."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prompt_tuning.cli.adapter_options import add_adapter_option, named_adapters
from prompt_tuning.cli.sampling_options import VALUES, add_values, read_sampling
from prompt_tuning.core.adapter_names import BASE, TRAINED
from prompt_tuning.core.errors import InputError, did_you_mean, shown
from prompt_tuning.core.number_ranges import (
    BeamCount,
    LengthPenalty,
    LogprobCount,
    SampleCount,
)
from prompt_tuning.core.resumable_lines import check_startable

if TYPE_CHECKING:
    from prompt_tuning.texts.text_settings import TextSettings

ROOM = 4096
"""Number of new tokens to check options with, before the model is known."""


def add_line_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for files of lines."""
    parser.add_argument(
        "--input",
        type=Path,
        metavar="FILE",
        help="a jsonl file instead of texts; a line has prompt, or messages for the "
        "chat template, and may have adapter, prompt_id and seed",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write the results of --input to this file, in the order of its lines; "
        "after an interruption the same command continues (default: standard output)",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="start the output over, replacing an existing file",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds the choice of adapters, and engine options other than sampling."""
    add_adapter_option(parser, "--use_adapter or a line of --input names")
    parser.add_argument(
        "--use_adapter",
        metavar="NAME",
        help="adapter for texts, and for lines that name none: the name of an "
        "--adapter, trained (what the run trained) or base (the model alone) "
        "(default: the only --adapter, else trained if it exists)",
    )
    group = parser.add_argument_group("results")
    numbers = {
        "n": (
            SampleCount,
            "N",
            "number of samples per text, or of beams to return",
        ),
        "logprobs": (
            LogprobCount,
            "N",
            "log-probability of each token, and of the N most probable ones (in JSON)",
        ),
        "beams": (
            BeamCount,
            "N",
            "find the most probable text by beam search with N beams",
        ),
        "length_penalty": (
            LengthPenalty,
            "X",
            "divide the log-probability of beams by their length to the power X",
        ),
    }
    add_values(group, numbers)


def check_generation(options: argparse.Namespace) -> None:
    """Checks for options that are out of range or contradict each other."""
    if options.system is not None and not options.chat:
        raise InputError("--system is the first message of a conversation: add --chat")
    if options.chat_template_kwargs and not (options.chat or options.input):
        raise InputError("--chat_template_kwargs is for conversations: add --chat")
    _check_files(options)
    _check_adapters(options)
    if options.beams is None:
        if options.length_penalty is not None:
            raise InputError("--length_penalty is for beams: add --beams")
        read_sampling(
            options, _new_tokens(options), n=options.n, logprobs=options.logprobs
        )
    else:
        _check_beams(options)
    if options.logprobs is not None and not (options.json or options.input):
        raise InputError("--logprobs are written as JSON: add --json")


def _check_files(options: argparse.Namespace) -> None:
    if options.input is None:
        for name in ("output", "force"):
            if getattr(options, name):
                raise InputError(f"--{name} is for the results of --input: add --input")
        return
    if options.texts:
        raise InputError(
            f"--input {options.input} and the text {shown(options.texts[0])} were "
            "given: leave out one of them"
        )
    if options.output is None:
        if options.force:
            raise InputError("--force replaces a file: add --output")
        return
    if options.output.resolve() == options.input.resolve():
        raise InputError(f"--output is the file of --input, {options.input}")
    check_startable(options.output, force=options.force)


def _check_adapters(options: argparse.Namespace) -> None:
    adapters = named_adapters(options.adapter)
    for name in (BASE, TRAINED):
        if name in adapters:
            raise InputError(
                f"--adapter is named {name}, which --use_adapter has for the model "
                f"{'alone' if name == BASE else 'as trained'}: choose another name"
            )
    known = (*adapters, BASE, TRAINED)
    if options.use_adapter is not None and options.use_adapter not in known:
        raise InputError(
            f"--use_adapter is {shown(options.use_adapter)}"
            f"{did_you_mean(options.use_adapter, known)}"
        )
    if len(adapters) > 1 and options.use_adapter is None and options.input is None:
        raise InputError(
            f"{len(adapters)} adapters are named: choose that of the texts by "
            f"--use_adapter, {', '.join(known)}"
        )


def _check_beams(options: argparse.Namespace) -> None:
    sampled = (*VALUES, "stop", "ignores_end", "logprobs")
    for name in sampled:
        if name != "ends" and _is_given(options, name):
            raise InputError(
                f"--beams finds the most probable texts, so --{name} has no effect: "
                "leave out one of them"
            )


def _is_given(options: argparse.Namespace, name: str) -> bool:
    value = getattr(options, name)
    return value is not None and value is not False and value != []


def text_settings(options: argparse.Namespace, slots: int) -> "TextSettings":
    """Returns the settings that the options describe."""
    from prompt_tuning.decoding.beam_search import BeamSearch
    from prompt_tuning.texts.text_settings import TextSettings

    beams, count = None, options.n
    if options.beams is not None:
        chosen: dict[str, Any] = {"beams": options.beams}
        if options.n is not None:
            chosen["returned"] = options.n
        if options.length_penalty is not None:
            chosen["length_penalty"] = options.length_penalty
        beams, count = BeamSearch(**chosen), None
    sampling = read_sampling(
        options, _new_tokens(options), n=count, logprobs=options.logprobs
    )
    adapter = options.use_adapter
    if adapter is None and len(options.adapter) == 1:
        (adapter,) = named_adapters(options.adapter)
    return TextSettings(
        sampling=sampling,
        beams=beams,
        new_tokens=options.new_tokens,
        chat=options.chat,
        system=options.system,
        chat_template_kwargs=options.chat_template_kwargs,
        adapter=adapter,
        prompt_id=options.prompt_id,
        slots=slots,
    )


def _new_tokens(options: argparse.Namespace) -> int:
    """Returns the number of new tokens to check other options with."""
    return ROOM if options.new_tokens is None else options.new_tokens
