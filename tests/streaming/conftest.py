"""The tiny models, and a fixture that restores settings after each test."""

from tests.support.small_runs import clean_process, files

__all__ = ["clean_process", "files"]
