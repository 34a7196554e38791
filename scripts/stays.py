"""Count the stays of a run's options, or of one text, on their way through the package.

    python -m scripts.stays train
    python -m scripts.stays generate

A stay is a call from one module of `prompt_tuning` to another that passes the object
on as an argument, `self` included. The counting begins with the command's first call
and ends with the first call of the training step or of the model. A loop that passes
the object to the same function again counts once. Code of other packages in between
counts as part of the caller.

`train` follows the options as a whole: an argument holds them if options of two or
more groups (model, data, method, training) can be reached from it, in a namespace, a
container, a config's text, a closure or an object of the package. A part, such as the
settings of the data, goes its own way to its own readers and is not followed.
`generate` follows the text, alone or in such an object, and its tokens.
"""

import argparse
import contextlib
import functools
import inspect
import itertools
import json
import re
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import prompt_tuning as pt
from prompt_tuning.cli import main as command

Values = Mapping[str | int | float | tuple[int, ...], str]
"""Group of each value by which an object is recognized; a tuple is tokens."""

PACKAGE = "prompt_tuning."
MODEL = "bundled:skills-decoder"
TEXT = "a planted text="
WORDS = ("apple", "bread", "chair", "dance", "eagle", "flame", "grape", "house")
SEED, LENGTH, RATE = 7919, 11, 0.0317


class Stay(NamedTuple):
    """A call that passes the object from one module to another."""

    caller: str
    module: str
    function: str


class Walk:
    """Profiles a command, and records where an object goes.

    Args:
      values: values that only the object has, with the group of each.
      needed: number of groups that an argument holds if it holds the object.
      last: function that ends the walk: prefix of its module, and qualified name.
    """

    def __init__(self, values: Values, needed: int, last: tuple[str, str]):
        self._values, self._needed, self._last = values, needed, last
        self._generators: list[types.FrameType] = []
        self.stays: list[Stay] = []
        self.files: list[str] = []

    def run(self, arguments: list[str]) -> None:
        """Runs the command until it ends, and records until the last call."""
        sys.setprofile(self._record)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                command.main(arguments)
        finally:
            sys.setprofile(None)
        if not self.files:
            raise RuntimeError(f"the command never called {'.'.join(self._last)}")

    def _record(self, frame: types.FrameType, event: str, _: Any) -> None:
        module, code = _module(frame), frame.f_code
        if event != "call" or module is None or frame in self._generators:
            return
        if code.co_flags & inspect.CO_GENERATOR:
            # Each next() is a call, too.
            self._generators.append(frame)
        if module.startswith(self._last[0]) and code.co_qualname == self._last[1]:
            sys.setprofile(None)
            files = [name for each in _stack(frame) if (name := _module(each))]
            self.files = list(dict.fromkeys(reversed(files)))
            return
        callers = (_module(each) for each in _stack(frame.f_back))
        caller = next((name for name in callers if name), module)
        if caller == module:
            return
        stay, arguments = Stay(caller, module, code.co_qualname), _arguments(frame)
        held = any(len(self._groups(x)) >= self._needed for x in arguments)
        if held and self.stays[-1:] != [stay]:
            self.stays.append(stay)

    def _groups(self, argument: Any) -> set[str]:
        """Returns the groups of the values that can be reached from an argument."""
        found, seen, left = set(), {}, [argument]
        while left:
            value = left.pop()
            if id(value) in seen:
                continue
            seen[id(value)] = value
            found |= {
                group for known, group in self._values.items() if _holds(value, known)
            }
            left += _contents(value)
        return found


def _module(frame: types.FrameType) -> str | None:
    """Returns the short name of a frame's module; None outside the package."""
    name = frame.f_globals.get("__name__", "")
    return name.removeprefix(PACKAGE) if name.startswith(PACKAGE) else None


def _stack(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _arguments(frame: types.FrameType) -> list[Any]:
    code = frame.f_code
    starred = bool(code.co_flags & inspect.CO_VARARGS)
    starred += bool(code.co_flags & inspect.CO_VARKEYWORDS)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + starred]
    values = frame.f_locals
    return [values[name] for name in names if name in values]


def _holds(value: Any, known: Any) -> bool:
    """Whether a value is a known one: a number, a text with it, or the same tokens."""
    if isinstance(known, tuple):
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
            value = value.ravel().tolist()
        if not isinstance(value, list | tuple):
            return False
        starts = range(len(value) - len(known) + 1)
        return any(tuple(value[n : n + len(known)]) == known for n in starts)
    if isinstance(known, str):
        return isinstance(value, str | Path) and known in str(value)
    if isinstance(value, str):
        # As a word: the name of a temporary folder may contain the digits.
        pattern = rf"(?<![\w.]){re.escape(str(known))}(?![\w.])"
        return re.search(pattern, value) is not None
    return type(value) is type(known) and value == known


def _contents(value: Any) -> list[Any]:
    """Returns what can be reached from a value in one step."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        return [x.cell_contents for x in cells if x != types.CellType()]
    if type(value) is argparse.Namespace or type(value).__module__.startswith(PACKAGE):
        slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
        names = itertools.chain.from_iterable(
            [names] if isinstance(names, str) else names for names in slots
        )
        kept = [getattr(value, name) for name in names if hasattr(value, name)]
        return [*getattr(value, "__dict__", {}).values(), *kept]
    return []


def follow(chosen: str, folder: Path) -> Walk:
    """Runs a small `train` or `generate` in a folder and follows its object."""
    data, out = str(folder / "planted.jsonl"), str(folder / "run")
    rows = [{"prompt": word, "completion": word[1:]} for word in WORDS]
    Path(data).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    train = ["train", "--model", MODEL, "--train", data, "--out", out, "--steps", "2"]
    train += ["--seed", str(SEED), "--prompt_length", str(LENGTH), "--no_report"]
    train += ["--learning_rate", str(RATE), "--batch_size", "5"]
    if chosen == "train":
        values: Values = {MODEL: "model", data: "data", LENGTH: "method"}
        values |= dict.fromkeys((out, SEED, RATE), "training")
        walk = Walk(values, 2, ("training.step", "CompiledStep.__call__"))
        walk.run(train)
        return walk
    with contextlib.redirect_stdout(sys.stderr):
        command.main(train)
    tokens = tuple(pt.load(MODEL).tokenizer.encode(TEXT))
    walk = Walk(
        dict.fromkeys((TEXT, tokens), "text"), 1, ("models.", "DecoderOnly.extend")
    )
    walk.run(["generate", "--run", out, "--new_tokens", "4", TEXT])
    return walk


def main() -> None:
    """Prints the walk, the number of stays, and the files on the stack at its end."""
    parser = argparse.ArgumentParser(
        description="Count stays on the way to the step or the model."
    )
    parser.add_argument("command", choices=("train", "generate"))
    chosen = parser.parse_args().command
    with tempfile.TemporaryDirectory() as folder:
        walk = follow(chosen, Path(folder))
    for number, stay in enumerate(walk.stays, 1):
        print(f"{number:4} {stay.caller} -> {stay.module}: {stay.function}")
    modules = {stay.module for stay in walk.stays}
    print(f"{len(walk.stays)} stays in {len(modules)} modules")
    print(f"{len(walk.files)} files on the stack at the end: {', '.join(walk.files)}")


if __name__ == "__main__":
    main()
