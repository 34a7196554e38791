"""Thinning of curves."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prompt_tuning.report.curves import panels_of, thinned
from prompt_tuning.report.schedule import learning_rate_curve
from tests.support.staged_reports import log_of, recorded


@given(st.integers(1, 5000), st.integers(1, 60), st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_no_peak_is_lost(count, bins, seed):
    values = np.random.default_rng(seed).normal(size=count).tolist()
    curve = ([*range(1, count + 1)], values)
    steps, kept = thinned(curve, bins)
    assert len(steps) <= 2 * bins + 2
    assert (steps[0], steps[-1]) == (1, count)
    assert sorted(set(steps)) == list(steps)
    assert all(
        values[step - 1] == value for step, value in zip(steps, kept, strict=True)
    )
    assert {min(values), max(values)} <= {*kept}


def test_training_and_held_out_share_an_axis():
    run = recorded(log_of([3, 2], **{"evaluation/loss": [4, 3]}, gradient_norm=[1, 1]))
    panels = panels_of([run, run])
    assert [panel.metric for panel in panels] == ["loss", "gradient_norm"]
    kinds = [(series.run, series.kind) for series in panels[0].series]
    assert sorted(kinds) == [
        *((0, "held out"), (0, "training"), (1, "held out"), (1, "training"))
    ]


def test_the_learning_rate_is_that_of_the_config():
    # The values in the docstring of `warmup_constant`; step 1 takes the rate at 0.
    schedule = {"warmup_constant": {"peak": 0.4, "warmup_steps": 2}}
    steps, rates = learning_rate_curve(schedule, [1, 2, 3, 4])
    assert steps == [1, 2, 3, 4]
    np.testing.assert_allclose(rates, [0.2, 0.3, 0.4, 0.4], rtol=1e-6)
    constant = {"adamw": {"learning_rate": 0.5}}
    assert learning_rate_curve(constant, [7]) == ([7], [0.5])
    assert learning_rate_curve(constant | schedule, [7]) == ([], [])
