"""Fixtures: a small tokenizer, and a preparation that uses it."""

from typing import Any

import pytest

from prompt_tuning.data.preparation.preparation import prepare
from prompt_tuning.data.preparation.preparation_settings import (
    Preparation,
    TokenizerChoice,
)
from tests.support.small_tokenizer import write_tokenizer


@pytest.fixture
def tokenizer(tmp_path):
    return write_tokenizer(tmp_path / "tokenizer")


@pytest.fixture
def make(tmp_path, tokenizer):
    """Returns a function that prepares an input and returns the output folder."""

    def run(source, *, name="out", workers=1, **choices):
        chosen: dict[str, Any] = {"length": 32} | choices
        preparation = Preparation(
            (str(source),),
            str(tmp_path / name),
            TokenizerChoice(str(tokenizer)),
            **chosen,
        )
        return prepare(preparation, workers=workers)

    return run
