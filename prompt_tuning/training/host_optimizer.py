"""Update trained parameters in host memory, one layer at a time.

Parameters, gradients and optimizer state are NumPy arrays. Each layer moves to the
device with its gradient and state, is updated there, and is written back in place.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Key

from prompt_tuning.checkpoints.run_store.checkpoint_files import check_storable
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.losses.objective import AnySums
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import Finish, Metrics
from prompt_tuning.training.transfer import Transfer

TRAINED_WEIGHTS = "Pretrained.trained_weights"

OptimizerOf = Callable[[Collection[str]], optax.GradientTransformation]
"""Returns the optimizer for some of the trained parameters."""

StateLeaves = dict[str, Any]
"""Leaves of an optimizer's state by key path, as `jax.tree_util.keystr` writes it."""


class HostOptimizer:
    """The optimizer of parameters in host memory."""

    def __init__(self, paths: Mapping[str, bool], optimizer_of: OptimizerOf):
        """Sets up the updates.

        Raises:
          InputError: if an optimizer does not treat each layer separately.
        """
        self.paths = dict(paths)
        self._optimizer_of = optimizer_of
        for path in self.paths:
            _check_separable(path, optimizer_of([path]))
        self._updates = {
            path: jax.jit(_update(path, optimizer_of([path]))) for path in paths
        }

    def device_state(self, trained: Mapping[str, Any], state: Any) -> Any:
        """Returns the state of the parameters on the device."""
        there = {p: x for p, x in trained.items() if p not in self.paths}
        template = jax.eval_shape(self._optimizer_of(list(there)).init, there)
        return _select_leaves(template, _named_leaves(state))

    def init(self, trained: Mapping[str, Any]) -> Any:
        """Returns the state before the first step, of all trained parameters."""
        optimizer = self._optimizer_of(list(trained))
        template = jax.eval_shape(optimizer.init, jax.eval_shape(lambda x: x, trained))
        there = {p: x for p, x in trained.items() if p not in self.paths}
        leaves = _named_leaves(self._optimizer_of(list(there)).init(there))
        abstract = _named_leaves(template)
        for path, stacked in self.paths.items():
            start = jax.jit(self._optimizer_of([path]).init)
            for index in _layers(trained[path], stacked):
                part = _named_leaves(start({path: np.array(trained[path][index])}))
                for name, leaf in part.items():
                    if not _belongs(name, path):
                        leaves.setdefault(name, leaf)
                        continue
                    shape, dtype = abstract[name].shape, abstract[name].dtype
                    whole = leaves.setdefault(name, np.zeros(shape, dtype))
                    whole[index] = np.asarray(leaf)
        return _select_leaves(template, leaves)

    def start(
        self,
        paths: Iterable[str],
        parameters: Mapping[str, Any],
        transfer: Transfer | None,
        key: Key[Array, ""],
    ) -> TrainState:
        """Returns the state of a run before its first step.

        `transfer` must be None: the run cannot start from another one.
        """
        if transfer is not None:
            raise InputError(
                "Run.start_from cannot be combined with trained weights in host memory "
                f"yet: set it to None, or {how_to_set(TRAINED_WEIGHTS, 'device')}"
            )
        trained = {
            path: parameters[path]
            if path in self.paths
            else jnp.array(parameters[path], jnp.float32)
            for path in paths
        }
        state = self.init(trained)
        check_storable(trained, state)
        return TrainState(trained, state, jnp.zeros((), jnp.int32), key)

    def update(
        self, trained: Mapping[str, Any], gradient: Mapping[str, Any], state: Any
    ) -> StateLeaves:
        """Updates the parameters and their state in place.

        Returns the leaves of the state that belong to no parameter, e.g. step counts.
        """
        leaves, shared = _named_leaves(state), {}
        for path, stacked in self.paths.items():
            names = _named_leaves(
                jax.eval_shape(self._optimizer_of([path]).init, {path: trained[path]})
            )
            for index in _layers(trained[path], stacked):
                part = {
                    name: np.array(leaves[name][index])
                    if _belongs(name, path)
                    else leaves[name]
                    for name in names
                }
                values = np.array(trained[path][index]), np.array(gradient[path][index])
                value, part = self._updates[path](*values, part)
                trained[path][index] = np.asarray(value)
                for name, leaf in part.items():
                    if _belongs(name, path):
                        leaves[name][index] = np.asarray(leaf)
                    else:
                        shared[name] = np.asarray(leaf)
        return shared


class HostFinish:
    """`finish` for a step with some trained parameters in host memory."""

    def __init__(
        self,
        host: HostOptimizer,
        compile_with: Callable[[Mapping[str, jax.ShapeDtypeStruct]], Finish],
    ):
        """Sets it up; nothing is compiled yet.

        Args:
          host: updates the parameters in host memory.
          compile_with: compiles `finish` for the parameters on the device, given the
            shapes of the others.
        """
        self._host, self._compile_with = host, compile_with
        self._finish_on_device: Finish | None = None

    def __call__(
        self,
        state: TrainState,
        frozen: Parameters,
        gradient: Mapping[str, Any],
        batch: Batch,
        sums: AnySums,
    ) -> tuple[TrainState, Metrics]:
        """Updates the parameters on the device, then those in host memory."""
        there, here = self._divide(state.trained)
        there_gradient, here_gradient = self._divide(gradient)
        if self._finish_on_device is None:
            self._finish_on_device = self._compile_with(
                {p: jax.ShapeDtypeStruct(x.shape, x.dtype) for p, x in here.items()}
            )
        # The device's step donates its state; leaves that both share are copied first.
        old = jax.tree.map(
            lambda leaf: leaf if isinstance(leaf, np.ndarray) else np.array(leaf),
            state.optimizer_state,
        )
        device = dataclasses.replace(
            state,
            trained=there,
            optimizer_state=jax.device_put(self._host.device_state(state.trained, old)),
        )
        device, metrics = self._finish_on_device(
            device, frozen, there_gradient, batch, sums
        )
        with jax.profiler.TraceAnnotation("update in host memory"):
            shared = self._host.update(here, here_gradient, old)
        leaves = _named_leaves(old) | shared
        leaves |= _named_leaves(device.optimizer_state)
        flat = (array.ravel() for array in here_gradient.values())
        squares = metrics["gradient_norm"] ** 2
        squares += float(sum(np.vdot(array, array) for array in flat))
        every = {path: {**device.trained, **here}[path] for path in state.trained}
        state = dataclasses.replace(
            device, trained=every, optimizer_state=_select_leaves(old, leaves)
        )
        return state, metrics | {"gradient_norm": jnp.sqrt(squares)}

    def _divide(
        self, leaves: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Splits trained leaves into those on the device and those in host memory."""
        here = {path: leaf for path, leaf in leaves.items() if path in self._host.paths}
        return {path: leaf for path, leaf in leaves.items() if path not in here}, here


def _named_leaves(state: Any) -> StateLeaves:
    pairs = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in pairs}


def _select_leaves(template: Any, leaves: Mapping[str, Any]) -> Any:
    """Returns a tree like the template, with leaves chosen by key path."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: leaves[jax.tree_util.keystr(path)], template
    )


def _belongs(name: str, path: str) -> bool:
    return name.endswith(f"[{path!r}]")


def _layers(array: Any, stacked: bool) -> Iterator[Any]:
    yield from range(len(array)) if stacked else [...]


def _update(path: str, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """Returns the update of a layer, given its state as leaves by key path."""

    def update(value: Any, gradient: Any, leaves: StateLeaves) -> tuple[Any, Any]:
        template = jax.eval_shape(optimizer.init, {path: value})
        state = _select_leaves(template, leaves)
        changes, state = optimizer.update({path: gradient}, state, {path: value})
        value = optax.apply_updates({path: value}, changes)[path]  # pyright: ignore
        return value, _named_leaves(state)

    return update


def _check_separable(path: str, optimizer: optax.GradientTransformation) -> None:
    """Checks that an optimizer updates stacked layers exactly as single ones."""
    random = np.random.default_rng(0)
    values = random.normal(size=(2, 3, 4)).astype(np.float32)
    # The gradients of one layer grow, so that a clipped norm or mean changes the other.
    gradients = [
        (random.normal(size=values.shape) * scale).astype(np.float32)
        for scale in (1.0, np.array([1e3, 1.0])[:, None, None])
    ]

    def trained(start: np.ndarray, steps: list[np.ndarray]) -> np.ndarray:
        parameters: Any = {path: start}
        state = optimizer.init(parameters)
        for gradient in steps:
            changes, state = optimizer.update({path: gradient}, state, parameters)
            parameters = optax.apply_updates(parameters, changes)
        return np.asarray(parameters[path])

    together = trained(values, gradients)
    alone = [trained(values[i], [g[i] for g in gradients]) for i in range(2)]
    if not np.allclose(together, np.stack(alone), rtol=1e-5, atol=1e-7):
        raise InputError(
            f"the optimizer of {path} does not update each number alone: Adafactor "
            "divides by means over an array, and a clipped norm is of all gradients. "
            "Weights in host memory are updated layer by layer: choose @adamw() "
            f"without clip_norm, or give "
            f"{how_to_set(TRAINED_WEIGHTS, 'device')}"
        )
