"""Names of long stages, as a display gets them."""

import jax
import jax.numpy as jnp

from prompt_tuning.core.status_line import (
    clear_status,
    show_status,
    status,
    update_status,
)


def test_the_display_gets_the_name_of_the_innermost_stage():
    names = []
    with show_status(names.append):
        with status("reading"), status("opening"):
            pass
        with status("computing"):
            pass
    assert names == ["reading", "opening", "reading", None, "computing", None]


def test_only_a_function_that_is_compiled_names_itself():
    names = []

    @jax.jit
    def double(x):
        update_status(f"compiling {x.shape}")
        return 2 * x

    with show_status(names.append):
        for size in (3, 3, 4):
            with status():
                double(jnp.zeros(size))
    assert names == ["compiling (3,)", None, "compiling (4,)", None]


def test_a_name_outside_of_a_stage_does_not_stay():
    names = []
    update_status("compiling")
    with show_status(names.append):
        update_status("compiling")
        with status("reading"):
            pass
        clear_status()
    assert names == ["reading", None, None]


def test_nothing_is_shown_without_a_display():
    names = []
    with show_status(names.append), show_status(None), status("reading"):
        pass
    assert names == []
