"""Thinning of curves."""

import dataclasses
import re

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prompt_tuning.report.charts import draw_parallel
from prompt_tuning.report.curves import learning_rate_curve, panels_of, thinned
from prompt_tuning.report.varied_settings import (
    heat_map,
    parallel_axes,
    varied_settings,
)
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


def test_settings_that_differ_have_axes_and_a_heat_map():
    runs = [
        dataclasses.replace(
            recorded(directory=f"{rate}{seed}"),
            values={
                "macro": {"value": rate},
                "Run": {"directory": f"{rate}{seed}", "seed": seed, "steps": 9},
                "adamw": {"learning_rate": rate},
                "other": {"rate": rate},
            },
        )
        for rate in (0.01, 1.0)
        for seed in (0, 1, 2)
    ]
    settings = varied_settings(runs)
    assert list(settings) == ["Run.seed", "adamw.learning_rate"]
    values = [6.0, 5.0, 4.0, 3.0, 2.0, np.nan]
    seed, rate, loss = parallel_axes(settings, "loss", values)
    np.testing.assert_allclose(seed.places, [0, 0.5, 1] * 2)
    assert rate.ticks == [(0.0, "0.01"), (1.0, "1")]
    np.testing.assert_allclose(loss.places, [1, 0.75, 0.5, 0.25, 0, np.nan])
    found = heat_map(settings, "loss", values)
    assert found is not None and found.rows[0] == "adamw.learning_rate"
    np.testing.assert_array_equal(found.values, [[6, 5, 4], [3, 2, np.nan]])
    assert (found.shades[1, 1], found.shades[0, 0]) == (1, 0)  # a low loss is good
    drawn = draw_parallel([seed, rate, loss])
    # The outer names, however long, end within the picture.
    names = re.findall(r'<text x="(\S+)" y="\d+" text-anchor="(\w+)">([\w.]+)<', drawn)
    assert names == [
        ("0.0", "start", "Run.seed"),
        ("440.0", "middle", "adamw.learning_rate"),
        ("880.0", "end", "loss"),
    ]


def test_a_page_of_the_log_has_the_values_of_the_best_step():
    log = log_of([3, 2, 1], **{"evaluation/loss": [4, 2, 9]})
    run = dataclasses.replace(recorded(log), checkpoint={"step": 2, "files": {}})
    assert run.best_evaluation() == {"loss": 2}
    assert run.last_evaluation() == {"loss": 9}
    later = dataclasses.replace(run, checkpoint={"step": 7, "files": {}})
    assert later.best_evaluation() == {"loss": 9}


def test_the_learning_rate_is_that_of_the_config():
    # The values in the docstring of `warmup_constant`; step 1 takes the rate at 0.
    schedule = {"warmup_constant": {"peak": 0.4, "warmup_steps": 2}}
    steps, rates = learning_rate_curve(schedule, [1, 2, 3, 4])
    assert steps == [1, 2, 3, 4]
    np.testing.assert_allclose(rates, [0.2, 0.3, 0.4, 0.4], rtol=1e-6)
    constant = {"adamw": {"learning_rate": 0.5}}
    assert learning_rate_curve(constant, [7]) == ([7], [0.5])
    assert learning_rate_curve(constant | schedule, [7]) == ([], [])
