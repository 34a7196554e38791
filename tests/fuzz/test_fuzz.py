"""A short fuzz test of every kind of input; `scripts/fuzz.py` runs longer ones."""

import pytest

from tests.fuzz.fuzz_runner import describe, fuzz
from tests.fuzz.kinds import KINDS

SEED = 13
CASES = 2


@pytest.mark.slow
def test_damaged_inputs_are_accepted_or_refused_with_a_message():
    outcomes = list(fuzz(list(KINDS.values()), SEED, CASES))
    assert {outcome.kind for outcome in outcomes} == set(KINDS)
    failures = [describe(outcome, SEED) for outcome in outcomes if outcome.failed]
    assert not failures, "\n\n".join(failures)


def test_there_are_at_least_forty_kinds():
    assert len(KINDS) >= 40
