"""Prepared data of `scripts/make_text_fixtures.py`, with what its script counted."""

from tests.support.shared_data import FIXTURES

TUNING = FIXTURES / "data_prep/tuning.hdf5"
PRETRAINING = FIXTURES / "data_prep/pretraining.hdf5"
LENGTH = 128
VOCABULARY, END = 512, 511
PROMPTS, COMPLETIONS, ROWS = 3835, 1409, 99
"""Tokens of prompts and of completions, and rows, each with one separator."""
TEXTS, ARTICLES, TEXT_ROWS = 4368, 100, 35
"""The same of `PRETRAINING`: tokens of completions, separators, and rows."""
