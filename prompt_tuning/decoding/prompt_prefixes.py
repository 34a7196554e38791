"""Keys and values of prompts: computed, or read from a file next to them.

`prompt-tuning convert RUN prompt_kv` writes the file. It contains digests of the frozen
weights and of the prompt, so a file that belongs to another model or an earlier state
of the prompt is ignored.
"""

import functools
import hashlib
import logging
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int
from safetensors.numpy import save

from prompt_tuning.checkpoints.formats.safetensors import read_header
from prompt_tuning.core.atomic_files import write_file
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.layer_kinds import (
    check_all_attention,
    key_layers,
    key_value_sizes,
)
from prompt_tuning.core.parameters import Parameters, merge
from prompt_tuning.models.attention import KeyValues
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.recurrent_state import RecurrentState
from prompt_tuning.pretrained.frozen_fingerprint import fingerprint
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.prompts.prompt_module import constants

FILE = "prompt_kv.safetensors"
DIGEST = "digest"
ADDED = ("/prompt/", "/adapters/")
"""Path parts of the parameters that prompts and adapters add to a model."""

_logger = logging.getLogger(__name__)


def is_added(path: str) -> bool:
    """Whether a parameter belongs to a prompt or an adapter."""
    return any(part in path for part in ADDED)


class Prefix(NamedTuple):
    """Consecutive keys and values before a row.

    Attributes:
      key_values: `[L, G, 1, P, K]`, valid ones first.
      count: number of valid ones.
      start: position of the first key.
    """

    key_values: KeyValues
    count: int
    start: int


class PromptPrefixes(NamedTuple):
    """Everything that precedes the rows of one prompt.

    Attributes:
      prefixes: keys and values, in order.
      length: position of a row's first token.
      state: state of the recurrent layers after them, `[L, 1, ...]`, or None.
    """

    prefixes: tuple[Prefix, ...] = ()
    length: int = 0
    state: RecurrentState | None = None


def prompt_prefixes(
    model: PromptedModel, parameters: Parameters, path: Path | None = None
) -> tuple[PromptPrefixes, ...]:
    """Returns what precedes a row, for each prompt of a model.

    The file may be where the adapter was read from, `path`.

    Raises:
      InputError: if the file is damaged.
    """
    file = None if path is None else prefix_file(path)
    if file is not None and file.is_file():
        stored = _read(file, model, parameters)
        if stored is not None:
            return stored
        _logger.warning(
            "%s belongs to another model or an earlier state of the prompt, and is not "
            "used: write it again by `prompt-tuning convert %s prompt_kv`",
            file,
            path,
        )
    if not cast(LanguageModel, merge(model.graph, parameters)).prompts():
        return (PromptPrefixes(),)
    count = model.prompt_count
    return tuple(
        _compute(model, parameters, number if count > 1 else None)
        for number in range(count)
    )


def prefix_file(path: Path) -> Path:
    """Returns the file for an adapter's keys and values, in or next to its folder."""
    return path / FILE if path.is_dir() else path.with_name(f"{path.stem}.{FILE}")


def write_prefixes(
    path: Path, model: PromptedModel, parameters: Parameters, *, force: bool = False
) -> tuple[Path, int]:
    """Writes what precedes an adapter's rows next to the adapter.

    `path` is where the adapter was read from; `force` replaces a file that this
    function did not write. Returns the file, and the number of keys of all prompts.

    Raises:
      InputError: if nothing precedes a row, or the file exists.
    """
    check_all_attention(
        model.config,
        "prompt_kv stores keys and values of a prompt",
        "the engine computes the prompt when it loads it",
    )
    prompts = prompt_prefixes(model, parameters)
    count = sum(prefix.count for each in prompts for prefix in each.prefixes)
    if not count:
        raise InputError(
            f"{path} has no prompt of the decoder that precedes the text, so there are "
            "no keys and values to store"
        )
    arrays: dict[str, Any] = {DIGEST: adapted_digest(model, parameters)}
    for number, prompt in enumerate(prompts):
        arrays[f"{number}/length"] = np.array([prompt.length])
        for i, prefix in enumerate(prompt.prefixes):
            name = f"{number}/{i}"
            real = (part[:, :, 0, : prefix.count] for part in prefix.key_values)
            for part, array in zip(("keys", "values"), real, strict=True):
                # Every number of a narrower type is one of float32.
                arrays[f"{name}/{part}"] = np.asarray(array, np.float32)
            arrays[f"{name}/start"] = np.array([prefix.start])
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    file = prefix_file(path)
    own = file.is_file() and DIGEST in read_header(file)
    write_file(file, save(arrays), force=force or own)
    return file, count


def _read(
    file: Path, model: PromptedModel, parameters: Parameters
) -> tuple[PromptPrefixes, ...] | None:
    """Reads the file of `write_prefixes`; None if it belongs to other parameters."""
    stored = read_header(file)
    if DIGEST not in stored:
        raise InputError(f"{file} has no digest: delete it, or write it again")
    if not np.array_equal(stored[DIGEST].read(), adapted_digest(model, parameters)):
        return None
    config = model.config
    prompts = []
    for number in range(model.prompt_count):
        prefixes = []
        while (name := f"{number}/{len(prefixes)}") + "/keys" in stored:
            arrays = [stored[f"{name}/{part}"].read() for part in ("keys", "values")]
            found, count = [x.shape for x in arrays], arrays[0].shape[2]
            groups, *widths = key_value_sizes(
                config, compressed=found[0][-1] < config.head_width
            )
            expected = [(key_layers(config), groups, count, x) for x in widths]
            if found != expected:
                raise InputError(
                    f"{file}: {name} has the shapes {found}, expected {expected}: "
                    "delete it, or write it again"
                )
            both = (jnp.asarray(x, config.dtype)[:, :, None] for x in arrays)
            start = int(stored[f"{name}/start"].read()[0])
            prefixes.append(Prefix(KeyValues(*both), count, start))
        length = int(stored[f"{number}/length"].read()[0])
        prompts.append(PromptPrefixes(tuple(prefixes), length))
    return tuple(prompts)


def adapted_digest(model: PromptedModel, parameters: Parameters) -> np.ndarray:
    """Returns the SHA-256 of everything that determines the keys and values."""
    frozen = {path: x for path, x in parameters.items() if not is_added(path)}
    digest = hashlib.sha256(fingerprint(frozen).encode())
    digest.update(f"{model.config} {model.prompting}".encode())
    for path in sorted(filter(is_added, parameters)):
        array = np.asarray(parameters[path])
        digest.update(f"{path} {array.shape} {array.dtype}".encode())
        digest.update(array.tobytes())
    for array in constants(model.graph):
        digest.update(f"{array.shape} {array.dtype}".encode())
        digest.update(array.tobytes())
    return np.frombuffer(digest.digest(), np.uint8)


class _Traced(NamedTuple):
    """A `Prefix` with arrays instead of numbers."""

    key_values: KeyValues
    real: Bool[Array, "P"]
    start: Int[Array, ""]


def _compute(
    model: PromptedModel, parameters: Parameters, number: int | None
) -> PromptPrefixes:
    ids = None if number is None else jnp.array([number])
    prefixes, length, state = _run(parameters, ids, graph=model.graph)
    return PromptPrefixes(
        tuple(
            Prefix(each.key_values, int(each.real.sum()), int(each.start))
            for each in prefixes
        ),
        int(length),
        state,
    )


@functools.partial(jax.jit, static_argnames="graph")
def _run(
    parameters: Parameters, prompt_ids: Int[Array, "1"] | None, *, graph: nnx.GraphDef
) -> tuple[list[_Traced], Int[Array, ""], RecurrentState | None]:
    """Returns the prefixes, the position of a row's first token, and a state.

    It runs a row of one token and discards that token's results.
    """
    model = cast(LanguageModel, merge(graph, parameters))
    ones = jnp.ones(1, jnp.int32)
    _, cache = model.prefill(jnp.zeros((1, 1), jnp.int32), ones, 1, prompt_ids)
    *preceding, text = cache.past
    prefixes, state = [], None
    for context in preceding:
        key_values = context.key_values
        if context.state is not None:
            state = _state_of_row(context.state, context.rows)
        assert isinstance(key_values, KeyValues)
        if context.rows is not None:
            key_values = KeyValues(*(part[:, :, context.rows] for part in key_values))
        size = key_values.keys.shape[3]
        real = jnp.ones(size, bool)
        if context.mask is not None:
            real = jnp.broadcast_to(context.mask, (1, 1, 1, size)).reshape(-1)
        # Keys that windows leave in sight are as if at the end of all positions.
        start = jnp.array(1 << 30)
        if context.positions is not None:
            start = context.positions[0, 0]
        prefixes.append(_Traced(key_values, real, start))
    assert isinstance(text.key_values, KeyValues)
    length = text.key_values.keys.shape[3] if text.mask is None else text.mask.sum()
    return prefixes, cache.next_positions[0] - length, state


def _state_of_row(
    state: RecurrentState, rows: Int[Array, "1"] | None
) -> RecurrentState:
    """Returns the state that the only row starts from."""
    if rows is None:
        return state
    return jax.tree.map(lambda part: part[:, rows], state)
