import re
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from prompt_tuning.checkpoints.formats import t5x_checkpoint
from prompt_tuning.checkpoints.formats.safetensors import open_safetensors
from prompt_tuning.checkpoints.restore_plan import plan_restore
from prompt_tuning.checkpoints.stored_tensors import (
    FusedPart,
    Recipe,
    StoredTensor,
    layered,
    transpose,
)
from prompt_tuning.core.errors import InputError
from prompt_tuning.families import hf_folder, t5x
from prompt_tuning.settings.pretrained import PROMPT_IS_FRESH
from tests.support.expected_shapes import abstract
from tests.support.shared_data import FIXTURES
from tests.support.t5x_fixtures import T5X_CONFIG, ZARR

LLAMA_TIED = FIXTURES / "peft/llama_tied/base"


def stored_tensors(arrays: dict[str, np.ndarray]) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(array.shape, array.dtype, "/ckpt/file", array.__getitem__)
        for name, array in arrays.items()
    }


def shapes(**paths: tuple[int, ...]):
    return {
        path.replace("__", "/"): jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for path, shape in paths.items()
    }


ARRAYS = {
    "table": np.arange(6, dtype=np.float32).reshape(3, 2),
    "block.0.w": np.arange(8, dtype=np.float32).reshape(4, 2),
    "block.1.w": np.arange(8, 16, dtype=np.float32).reshape(4, 2),
    "mask": np.ones((1, 4), np.uint8),
}
RECIPES = {
    "embedder/embedding": Recipe(("table",)),
    "layers/kernel": layered("block.{}.w", 2, transpose),
}
MODEL = shapes(embedder__embedding=(3, 2), layers__kernel=(2, 2, 4))
PROMPTED = MODEL | shapes(encoder__prompt__prompt=(5, 2))


def plan(model=PROMPTED, arrays=ARRAYS, recipes=RECIPES, **options):
    return plan_restore(model, recipes, stored_tensors(arrays), **options)


def test_layers_are_stacked_and_cast_to_the_models_dtype():
    restored = plan().restore()
    assert set(restored) == {"embedder/embedding", "layers/kernel"}
    assert restored["layers/kernel"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(
        restored["layers/kernel"].astype(np.float32),
        np.arange(16).reshape(2, 4, 2).swapaxes(1, 2),
    )
    assert plan().restore(np.float32)["layers/kernel"].dtype == np.float32


def test_restoring_does_not_alias_the_checkpoint():
    arrays = {"table": np.zeros((3, 2), np.float32)}
    restored = plan_restore(
        {"t": jax.ShapeDtypeStruct((3, 2), jnp.float32)},
        {"t": Recipe(("table",))},
        stored_tensors(arrays),
    ).restore()
    restored["t"][:] = 1
    assert not arrays["table"].any()


def test_the_report_accounts_for_every_array():
    report = plan(fresh_by={"encoder/prompt/prompt": "sampled vocabulary"}).report()
    counts = {
        row.split()[0]: row.split()[1:4]
        for row in report.splitlines()
        if re.match("(restored|fresh|ignored) ", row)
    }
    assert counts["restored"] == ["2", "22", "44"]
    assert counts["fresh"] == ["1", "10", "20"]
    assert counts["ignored"] == ["1", "4", "4"]
    assert "/ckpt/file" in report.splitlines()[0]
    assert "encoder/prompt/prompt (5, 2): sampled vocabulary" in report
    assert "mask (1, 4) uint8, in /ckpt/file" in report
    assert "from 3 of 4 stored" in report


def test_a_function_may_select_fresh_parameters():
    report = plan(fresh_by=lambda path: f"by {path.upper()}").report()
    assert "by ENCODER/PROMPT/PROMPT" in report


def test_a_long_list_of_ignored_arrays_is_shortened():
    masks = {f"extra.{i}": np.zeros(1, np.float32) for i in range(13)}
    report = plan(arrays={**ARRAYS, **masks}).report()
    assert "extra.8" in report and "extra.9" not in report
    assert "and 4 more" in report


def test_the_first_matching_pattern_decides():
    assigned = plan(
        assignment_map=(
            (r"encoder/prompt/(prompt)", r"old/\1"),
            (r".*prompt", None),
            (r"embedder/.*", None),
        ),
        arrays={**ARRAYS, "old/prompt": np.ones((5, 2), np.float32)},
    )
    assert assigned.restored["encoder/prompt/prompt"].sources == ("old/prompt",)
    assert set(assigned.fresh) == {"embedder/embedding"}
    assert set(assigned.ignored) == {"table", "mask"}


def test_a_source_may_be_another_parameters_path():
    model = shapes(embedder__embedding=(3, 2), copy__embedding=(3, 2))
    renamed = plan(model, assignment_map=((r"copy/(.*)", r"embedder/\1"),)).restore()
    np.testing.assert_array_equal(
        renamed["copy/embedding"], renamed["embedder/embedding"]
    )


def test_only_a_whole_path_matches():
    with pytest.raises(
        InputError, match=r"'embedder' matches no complete path.*embedding"
    ):
        plan(assignment_map=(("embedder", None), PROMPT_IS_FRESH))


@pytest.mark.parametrize("pattern", (".*prompt.*", r"encoder/prompt/.*", ".*lora.*"))
def test_a_pattern_of_tuned_parameters_is_dropped_in_a_model_without_any(pattern):
    assert not plan(MODEL, assignment_map=((pattern, None),)).fresh


def test_another_pattern_without_a_match_is_refused_in_a_model_without_a_prompt():
    with pytest.raises(InputError, match="matches no complete path"):
        plan(MODEL, assignment_map=((r".*promt.*", None),))


def test_a_model_without_a_prompt_needs_no_axis_rules():
    assert not plan(MODEL).fresh
    assert not plan(MODEL, fallback_to_scratch=False).fresh
    assert not plan(MODEL, assignment_map=()).fresh


def test_no_parameter_is_fresh_unless_allowed():
    with pytest.raises(InputError, match=r"(?s)fallback_to_scratch.*prompt/prompt"):
        plan(fallback_to_scratch=False)


@pytest.mark.parametrize("fallback", [True, False])
def test_an_unlisted_parameter_is_never_fresh(fallback):
    model = MODEL | shapes(adapter__kernel=(2, 2))
    with pytest.raises(InputError, match="adapter/kernel needs adapter/kernel"):
        plan(model, fallback_to_scratch=fallback)


def test_a_missing_array_is_named_with_its_neighbors():
    arrays = {name: a for name, a in ARRAYS.items() if name != "block.1.w"}
    with pytest.raises(InputError) as raised:
        plan(arrays=arrays)
    message = str(raised.value)
    assert "/ckpt/file has 3 arrays, but lacks 1 more" in message
    assert "layers/kernel needs block.1.w; nearest: block.0.w" in message


def test_shapes_are_compared_before_reading():
    def read(block):
        raise AssertionError("read before its shape was checked")

    stored = stored_tensors(ARRAYS) | {
        "table": StoredTensor((3, 2), np.dtype("f4"), "/ckpt/file", read),
        "block.1.w": StoredTensor((4, 3), np.dtype("f4"), "/ckpt/file", read),
    }
    with pytest.raises(InputError) as raised:
        plan_restore(MODEL, RECIPES, stored)
    message = str(raised.value)
    for part in ("layers/kernel", "block.1.w", "/ckpt/file", "(3, 4)", "(2, 4)"):
        assert part in message


@pytest.mark.parametrize(
    ("model", "recipes", "expected"),
    [
        (shapes(w=(3, 4, 2)), {"w": layered("block.{}.w", 2)}, "stacks 2 arrays"),
        (shapes(w=()), {"w": layered("block.{}.w", 2)}, "stacks 2 arrays"),
        (shapes(w=(4,)), {"w": Recipe(("mask",))}, "mask .* is uint8"),
        (
            shapes(w=(3, 0)),
            {"w": Recipe(("table",), transform=FusedPart(0, (1, 1, 1)))},
            r"table .* shape \(3, 2\), which cannot be split",
        ),
    ],
)
def test_recipes_of_other_shapes_are_refused(model, recipes, expected):
    with pytest.raises(InputError, match=expected):
        plan(model, recipes=recipes)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [(("(", None), "is not a regular expression"), ((".*", r"\3"), "does not fit")],
)
def test_an_invalid_regular_expression_is_refused(entry, expected):
    with pytest.raises(InputError, match=expected):
        plan(assignment_map=(entry,))


def test_an_empty_checkpoint_is_refused():
    with pytest.raises(InputError, match="no arrays"):
        plan(arrays={})


def test_a_config_with_more_layers_than_the_checkpoint_is_refused():
    config = hf_folder.read_config(LLAMA_TIED, layers=3)
    stored = open_safetensors(LLAMA_TIED)
    with pytest.raises(InputError, match=r"needs model\.layers\.2\..*nearest: model"):
        plan_restore(abstract(config), hf_folder.find_recipes(config, stored), stored)


def test_a_prompted_t5x_model_restores_all_but_its_prompt():
    prompt = {"encoder/prompt/prompt": (5, 8)}
    planned = plan_restore(
        abstract(T5X_CONFIG, **prompt),
        t5x.t5x_recipes(T5X_CONFIG),
        t5x_checkpoint.open_t5x(ZARR),
    )
    assert set(planned.fresh) == set(prompt)
    assert planned.ignored == ()
    assert str(ZARR / "checkpoint_3") in planned.report().splitlines()[0]


def test_a_long_list_of_names_is_compared_in_limited_time():
    names = (f"other.{number}.{'x' * 50}" for number in range(50_000))
    stored = stored_tensors(dict.fromkeys(names, np.zeros(1, np.float32)))
    wanted = {f"a{i}": jax.ShapeDtypeStruct((1,), np.float32) for i in range(20)}
    start = time.monotonic()
    with pytest.raises(InputError, match="lacks 20 more"):
        plan_restore(wanted, {}, stored)
    assert time.monotonic() - start < 10
