"""Lets many processes run one command together: joining, sharing, watching."""

from prompt_tuning.processes.group import (
    Launch,
    check_same,
    count,
    is_first,
    own_address,
    run_on_first,
    run_together,
    share,
    wait_for_all,
)

__all__ = [
    "Launch",
    "check_same",
    "count",
    "is_first",
    "own_address",
    "run_on_first",
    "run_together",
    "share",
    "wait_for_all",
]
