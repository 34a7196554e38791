"""Thinning of curves."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prompt_tuning.report.curves import panels_of, thinned
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
    for part in np.array_split(np.arange(count), 1):
        assert {values[i] for i in (part[np.argmax(np.array(values)[part])],)} <= {
            *kept
        }
    assert min(values) in kept


def test_training_and_held_out_share_an_axis():
    run = recorded(log_of([3, 2], **{"evaluation/loss": [4, 3]}, gradient_norm=[1, 1]))
    panels = panels_of([run, run])
    assert [panel.metric for panel in panels] == ["loss", "gradient_norm"]
    kinds = [(series.run, series.kind) for series in panels[0].series]
    assert sorted(kinds) == [
        *((0, "held out"), (0, "training"), (1, "held out"), (1, "training"))
    ]
