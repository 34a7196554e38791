"""Runs whose model is divided into stages."""

import jax
import numpy as np


def staged(monkeypatch, stages, **inner):
    """Returns the arguments of a run in stages, with as many devices as it needs."""
    sizes = {"stage": stages, "data": 1, **inner}
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    monkeypatch.setattr(jax, "devices", lambda *arguments: devices)
    shape = [f"--gin.MeshShape.{name}={size}" for name, size in sizes.items()]
    return ["--gin.Run.mesh=@MeshShape()", *shape]
