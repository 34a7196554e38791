"""The tiny models, and a process's settings put back after each test."""

from tests.support.small_runs import clean_process, files

__all__ = ["clean_process", "files"]
