"""Sizes of models that no checkpoint has."""

from typing import Any

import pytest

import prompt_tuning as pt
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.t5_config import t5_config


def test_the_sizes_of_t5_xxl_are_accepted():
    t5_config(width=4096, feed_forward_width=10_240, layers=24, heads=64)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"heads": 2**20, "head_width": 2**10},
            "head_width would be 1,073,741,824",
        ),
        ({"width": 2**20, "layers": 9_000}, "number of parameters would be 164,"),
    ],
)
def test_products_of_sizes_have_limits(sizes, message):
    usual = {"width": 64, "feed_forward_width": 2**12, "layers": 2, "heads": 2}
    with pytest.raises(InputError, match=message):
        t5_config(**usual | sizes)


def test_python_names_any_field_of_a_t5():
    """The bias of a block has a row for each bucket and a column for each head."""
    sizes: dict[str, Any] = {
        "width": 8,
        "feed_forward_width": 16,
        "layers": 1,
        "heads": 2,
    }
    assert t5_config(**sizes, relative_buckets=4).relative_buckets == 4
    settings = pt.t5_config(**sizes, relative_buckets=4)
    assert settings.build().relative_buckets == 4
    with pytest.raises(
        InputError, match="relative_buckets is 2, expected a number from 4"
    ):
        t5_config(**sizes, relative_buckets=2)
    with pytest.raises(InputError, match="no parameter 'choices'"):
        pt.t5_config(**sizes, choices=4)  # pyright: ignore[reportCallIssue]
