"""Reads tensors written by `torch.save`, without unpickling.

Since PyTorch 1.6 such a file is an archive: `NAME/data.pkl` is a pickle that describes
the tensors, and `NAME/data/KEY` has the bytes of each storage. A pickle is a program.
Here `pickletools` only splits it into instructions. We follow the instructions that
build a dictionary of tensors, with our own version of the few functions that tensors
need, and refuse any other instruction or function, so nothing in the file can run.
"""

import dataclasses
import math
import pickletools
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.numpy_files import check_members, check_shape

LARGEST_PICKLE = 2**24
"""Bytes of a pickle: some hundred thousand tensors."""
MOST_COPIES = 4
"""Numbers of all tensors over those stored: tensors may share a storage."""
DTYPES: dict[str, Any] = {
    "torch FloatStorage": np.float32,
    "torch HalfStorage": np.float16,
    "torch BFloat16Storage": ml_dtypes.bfloat16,
    "torch DoubleStorage": np.float64,
}
PARAMETER_LIST = "torch.nn.modules.container ParameterList"
CONSTANTS = {"NEWTRUE": True, "NEWFALSE": False, "NONE": None}
VALUES = {"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
EXPECTED = "expected a dictionary of tensors by their names"
_MARK = object()


class _ParameterList(dict[str, Any]):
    """A `torch.nn.ParameterList`: its parameters by their numbers."""


@dataclasses.dataclass(frozen=True)
class _Named:
    """A function or a type that a pickle names."""

    name: str


def read_torch_archive(file: Path) -> dict[str, np.ndarray]:
    """Reads a dictionary of tensors, by name.

    Raises:
      InputError: if the file is in an older format, damaged or compressed, or contains
        anything but named tensors of floating-point numbers.
    """
    content = _read(file)
    if not all(isinstance(tensor, np.ndarray) for tensor in content.values()):
        raise InputError(f"{file}: {EXPECTED}")
    return content


def read_torch_lists(file: Path) -> dict[str, list[np.ndarray]]:
    """Reads a dictionary of lists of tensors, or of `torch.nn.ParameterList`."""
    content = _read(file)
    lists = {
        name: list(value.values()) if isinstance(value, _ParameterList) else value
        for name, value in content.items()
    }
    for name, value in lists.items():
        if not isinstance(value, list) or not all(
            isinstance(tensor, np.ndarray) for tensor in value
        ):
            raise InputError(f"{file}: {shown(name)} is not a list of tensors")
    return lists


def _read(file: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(file) as archive:
            check_members(archive, file.stat().st_size, file)
            return _TensorPickle(archive).read()
    except InputError as error:
        raise InputError(f"{file}: {error}") from error
    # Damaged archives and pickles raise these and more; nothing of them was run.
    except Exception as error:
        raise InputError(
            f"{file} is not an archive of tensors: {shown(str(error))}"
        ) from error


class _TensorPickle:
    """Follows the pickle of an archive."""

    def __init__(self, archive: zipfile.ZipFile):
        self._archive = archive
        pickles = [x for x in archive.infolist() if x.filename.endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > LARGEST_PICKLE:
            raise InputError(
                "expected one data.pkl of at most "
                f"{LARGEST_PICKLE:,} bytes, as torch.save writes it"
            )
        self._pickle = pickles[0].filename
        order = self._pickle.removesuffix("data.pkl") + "byteorder"
        if order in archive.namelist() and archive.read(order) != b"little":
            raise InputError("its numbers are big-endian, expected little-endian ones")
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._storages: dict[str, np.ndarray] = {}
        self._stored = self._numbers = 0

    def read(self) -> dict[str, Any]:
        for opcode, argument, _ in pickletools.genops(self._archive.read(self._pickle)):
            self._follow(opcode.name, argument)
        (content,) = self._stack
        if not isinstance(content, dict):
            raise InputError(EXPECTED)
        return content

    def _follow(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in ("PROTO", "FRAME", "STOP"):
            return
        if name in VALUES:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name == "GLOBAL":
            stack.append(_Named(argument))
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "EMPTY_TUPLE":
            stack.append(())
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            # A tuple of two times itself, and so on, takes forever to print.
            if isinstance(self._memo[argument], tuple | dict | list):
                raise InputError("its pickle has a tuple, dict or list more than once")
            stack.append(self._memo[argument])
        else:
            self._combine(name)

    def _combine(self, name: str) -> None:
        stack = self._stack
        if name == "TUPLE":
            stack.append(tuple(self._marked()))
        elif name in TUPLES:
            items = [stack.pop() for _ in range(TUPLES[name])]
            stack.append(tuple(reversed(items)))
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            stack[-1].update(_named([key], [value]))
        elif name == "SETITEMS":
            items = self._marked()
            stack[-1].update(_named(items[::2], items[1::2]))
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else self._marked()
            if not isinstance(stack[-1], list):
                raise InputError("its pickle appends to what is not a list")
            stack[-1].extend(items)
        elif name == "NEWOBJ":
            arguments, kind = stack.pop(), stack.pop()
            if getattr(kind, "name", None) != PARAMETER_LIST or arguments != ():
                raise InputError("its pickle builds an object that no tensor needs")
            stack.append(_ParameterList())
        elif name == "BINPERSID":
            stack.append(self._storage(*stack.pop()))
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(self._call(function)(*arguments))
        elif name == "BUILD":  # the metadata of a module's state
            state = stack.pop()
            if not (isinstance(stack[-1], dict) and isinstance(state, dict)):
                raise InputError("an object has a state, expected tensors alone")
            if isinstance(stack[-1], _ParameterList):
                stack[-1].update(_parameters(state))
        else:
            raise InputError(
                f"its pickle has the instruction {name}, which no tensor needs: it "
                "was not read"
            )

    def _marked(self) -> list[Any]:
        """Removes and returns what follows the last mark."""
        items = []
        while (item := self._stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def _call(self, function: Any) -> Callable[..., Any]:
        known: dict[str, Callable[..., Any]] = {
            "collections OrderedDict": lambda: {},
            "__builtin__ set": lambda items: None,  # in the state of a module
            "torch._utils _rebuild_tensor_v2": self._tensor,
            "torch._utils _rebuild_parameter": lambda tensor, *_: tensor,
        }
        name = getattr(function, "name", None)
        if not isinstance(function, _Named) or name not in known:
            raise InputError(
                f"its pickle calls {shown(name)}, which no tensor needs: it was not run"
            )
        return known[function.name]

    def _storage(self, kind: Any, dtype: Any, key: Any, device: Any, size: Any):
        """Returns the numbers of a storage, `[size]`."""
        del device
        name = dtype.name if isinstance(dtype, _Named) else None
        if kind != "storage" or name not in DTYPES:
            raise InputError(
                f"found {shown(name)}, expected one of {', '.join(DTYPES)}"
            )
        if not isinstance(key, str):
            raise InputError("a storage has no text as its key")
        if key not in self._storages:
            member = f"{self._pickle.removesuffix('.pkl')}/{key}"
            numbers = np.frombuffer(self._archive.read(member), DTYPES[name])
            self._storages[key] = numbers
            self._stored += len(numbers)
        if len(self._storages[key]) != size:
            raise InputError(
                f"the storage {shown(key)} has {len(self._storages[key]):,} numbers, "
                f"expected {shown(size)}"
            )
        return self._storages[key]

    def _tensor(self, storage: Any, offset: Any, shape: Any, strides: Any, *_: Any):
        """Returns a tensor as an array with its own memory."""
        sizes = check_shape(shape, "a tensor")
        steps = check_shape(strides, "the strides of a tensor")
        count = math.prod(sizes)
        last = sum((n - 1) * step for n, step in zip(sizes, steps, strict=True))
        fits = isinstance(storage, np.ndarray) and type(offset) is int and offset >= 0
        self._numbers += count
        if not fits or self._numbers > MOST_COPIES * self._stored:
            raise InputError(f"a tensor {shown(sizes)} is larger than what is stored")
        if count and offset + last >= len(storage):
            raise InputError(f"a tensor {shown(sizes)} passes the end of its storage")
        if not count:
            return np.zeros(sizes, storage.dtype)
        size = storage.dtype.itemsize
        view = np.lib.stride_tricks.as_strided(
            storage[offset:], sizes, [step * size for step in steps]
        )
        return view.copy()


def _parameters(state: dict[str, Any]) -> dict[str, Any]:
    parameters = state.get("_parameters", {})
    if not isinstance(parameters, dict):
        raise InputError(EXPECTED)
    return parameters


def _named(names: list[Any], values: list[Any]) -> dict[str, Any]:
    if not all(isinstance(name, str) for name in names):
        raise InputError(EXPECTED)
    return dict(zip(names, values, strict=True))
