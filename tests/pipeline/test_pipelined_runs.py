"""Runs in stages: the same curve as on one device, and resuming with other stages."""

import numpy as np
import pytest

from tests.support.small_runs import logged, tune

STAGES = {"Run__mesh": "@MeshShape()", "MeshShape__data": 1, "Run__accumulate": 2}


def losses(directory):
    return np.array([x["loss"] for x in logged(directory) if "loss" in x])


def staged(stages, **more):
    """Returns the bindings of a run in stages."""
    return {"MeshShape__stage": stages, **STAGES, **more}
