"""Fixtures: tiny models, and process settings restored after each test."""

from tests.support.small_runs import clean_process, files

__all__ = ["clean_process", "files"]
