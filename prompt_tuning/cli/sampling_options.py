"""Sampling options, for commands that use the decoding engine."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin

from prompt_tuning.cli.option_types import numeric, token_biases, token_ids
from prompt_tuning.core.number_ranges import (
    NonnegativeInteger,
    Penalty,
    PositiveFactor,
    PositiveInteger,
    PositiveShare,
    Share,
    Temperature,
)
from prompt_tuning.core.typed_json import read_json, read_limited
from prompt_tuning.core.utf8_text import decode_text

if TYPE_CHECKING:
    from prompt_tuning.decoding.sampling_settings import Sampling

VALUES = {
    "temperature": (
        Temperature,
        "T",
        "sampling temperature; 0 is greedy (default: 0.0)",
    ),
    "top_k": (
        PositiveInteger,
        "K",
        "sample only from the K most probable tokens",
    ),
    "top_p": (
        PositiveShare,
        "P",
        "sample only from the most probable tokens with a total probability of P",
    ),
    "min_p": (
        Share,
        "P",
        "sample only tokens at least P times as probable as the most probable one",
    ),
    "repetition_penalty": (
        PositiveFactor,
        "X",
        "divide positive scores of tokens that occurred by X, and multiply negative "
        "ones",
    ),
    "presence_penalty": (
        Penalty,
        "X",
        "subtract X from scores of generated tokens",
    ),
    "frequency_penalty": (
        Penalty,
        "X",
        "subtract X for each time a token was generated",
    ),
    "seed": (NonnegativeInteger, "N", "seed of sampling (default: 0)"),
    "logit_bias": (
        token_biases,
        "ID=X,...",
        "add X to the score of the token with this id",
    ),
    "forbidden": (token_ids, "ID,...", "never choose tokens with these ids"),
    "forced": (token_ids, "ID,...", "start with the tokens with these ids"),
    "minimum_new_tokens": (
        NonnegativeInteger,
        "N",
        "do not end before N new tokens (default: 0)",
    ),
    "ends": (token_ids, "ID,...", "also end at tokens with these ids"),
    "regex": (str, "REGEX", "write a text that matches this regular expression"),
    "json_schema": (str, "FILE", "write JSON that matches the schema in this file"),
    "grammar": (str, "FILE", "write a text of the Lark grammar in this file"),
}
"""Type, placeholder and help of options with a value."""


def add_values(group: Any, values: Mapping[str, tuple[Any, str, str]]) -> None:
    """Adds options with a value.

    `values` has type, placeholder and help of each option, by name. The help states the
    range of a number's type.
    """
    for name, (kind, metavar, text) in values.items():
        parse = numeric(kind) if get_origin(kind) is Annotated else kind
        group.add_argument(f"--{name}", type=parse, metavar=metavar, help=text)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options; those not given keep the defaults of `Sampling`."""
    group = parser.add_argument_group("choosing tokens")
    add_values(group, VALUES)
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end before this text; may be repeated",
    )
    group.add_argument(
        "--ignores_end",
        action="store_true",
        help="continue after the model's own end tokens",
    )


def read_sampling(
    options: argparse.Namespace,
    new_tokens: int,
    ends: tuple[int, ...] = (),
    *,
    n: int | None = None,
    logprobs: int | None = None,
) -> "Sampling":
    """Returns the settings that the options describe."""
    from prompt_tuning.decoding.sampling_settings import Sampling
    from prompt_tuning.decoding.text_constraints import MAXIMUM_GRAMMAR, MAXIMUM_SCHEMA

    values = {
        name: getattr(options, name)
        for name in VALUES
        if getattr(options, name) is not None
    }
    values["ends"] = (*values.get("ends", ()), *ends)
    if "json_schema" in values:
        file = Path(values["json_schema"])
        schema = read_json(file, maximum_bytes=MAXIMUM_SCHEMA)
        values["json_schema"] = json.dumps(schema)
    if "grammar" in values:
        file = Path(values["grammar"])
        content = read_limited(file, 4 * MAXIMUM_GRAMMAR)
        values["grammar"] = decode_text(content, str(file))
    stop = tuple(options.stop or ())
    return Sampling(
        new_tokens=new_tokens,
        stop=stop,
        ignores_end=options.ignores_end,
        n=1 if n is None else n,
        logprobs=logprobs,
        **values,
    )
