"""Messages about unknown options, with the most similar known ones."""

import argparse
import difflib
import shlex
from collections.abc import Sequence

from prompt_tuning.config.flat_options import TABLE
from prompt_tuning.core.errors import shortened
from prompt_tuning.core.private_parts import options_of

GIN_PREFIX = "--gin."
SYNONYMS = {
    "lr": "learning_rate",
    "output_dir": "out",
    "output": "out",
    "dev": "eval",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "model_name_or_path": "model",
    "lora_r": "rank",
    "num_virtual_tokens": "prompt_length",
    "max_train_samples": "max_examples",
} | {option.macro.lower(): option.name for option in TABLE if option.macro}
"""Names of options in other programs and in configs."""


def describe_unknown(unknown: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """Describes arguments that a command does not know."""
    flags = [argument for argument in unknown if argument.startswith("-")]
    if not flags:
        text = f"unrecognized arguments: {shortened(shlex.join(unknown))}"
        if _has(parser, "--vary"):
            text += f"; values follow a '=', as in --vary NAME={shortened(unknown[0])}"
        return text
    flag, equals, value = flags[0].partition("=")
    if not equals:
        value = next(iter(unknown[unknown.index(flags[0]) + 1 :]), "VALUE")
    if flag.startswith(GIN_PREFIX):
        return _describe_binding(flag, value, parser)
    near = _nearest(flag, parser)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"unrecognized arguments: {shortened(shlex.join(unknown))}{hint}"


def _describe_binding(flag: str, value: str, parser: argparse.ArgumentParser) -> str:
    """Explains how to write a binding that lacks its `=`."""
    name = flag.removeprefix(GIN_PREFIX)
    ways = [f"{flag}={shlex.quote(_literal(value))}"]
    for option in TABLE:
        if name in (option.macro, option.setting) and _has(parser, option.flag):
            ways.append(f"{option.flag} {shlex.quote(value)}")
    return f"{shortened(flag)} has no '=': write {' or '.join(ways)}"


def _literal(value: str) -> str:
    """Formats a value as in a config: texts in quotes."""
    plain = value in ("None", "True", "False", "VALUE") or value[:1] in "@%[({'\""
    try:
        float(value)
    except ValueError:
        return value if plain else f'"{value}"'
    return value


def _has(parser: argparse.ArgumentParser, flag: str) -> bool:
    return flag in _flags(parser)


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for option in options_of(parser) for flag in option.option_strings]


def _nearest(flag: str, parser: argparse.ArgumentParser) -> list[str]:
    """Returns the options that a flag may stand for."""
    name = flag.lstrip("-").lower().replace("-", "_")
    for candidate in (name, SYNONYMS.get(name, "")):
        if _has(parser, f"--{candidate}"):
            return [f"--{candidate}"]
    known = [flag for flag in _flags(parser) if flag[:2] == "--"]
    return difflib.get_close_matches(f"--{name[:100]}", known, n=3)
