"""Names of long stages, as a display gets them."""

import jax
import jax.numpy as jnp

from prompt_tuning.core.activity import activity, clear, displayed_by, rename


def test_the_display_gets_the_name_of_the_innermost_stage():
    names = []
    with displayed_by(names.append):
        with activity("reading"), activity("opening"):
            pass
        with activity("computing"):
            pass
    assert names == ["reading", "opening", "reading", None, "computing", None]


def test_only_a_function_that_is_compiled_names_itself():
    names = []

    @jax.jit
    def double(x):
        rename(f"compiling {x.shape}")
        return 2 * x

    with displayed_by(names.append):
        for size in (3, 3, 4):
            with activity():
                double(jnp.zeros(size))
    assert names == ["compiling (3,)", None, "compiling (4,)", None]


def test_a_name_outside_of_a_stage_does_not_stay():
    names = []
    rename("compiling")
    with displayed_by(names.append):
        rename("compiling")
        with activity("reading"):
            pass
        clear()
    assert names == ["reading", None, None]


def test_nothing_is_shown_without_a_display():
    names = []
    with displayed_by(names.append), displayed_by(None), activity("reading"):
        pass
    assert names == []
