"""The structure of a model is one object, however often it is built."""

import dataclasses

from tests.support import dummies


def test_equal_structures_are_one_object():
    first, _ = dummies.prompted(dummies.LLAMA)
    again, _ = dummies.prompted(dummies.LLAMA)
    assert first is again and hash(first) == hash(again)
    other, _ = dummies.prompted(dataclasses.replace(dummies.LLAMA, layers=3))
    assert other != first and other != "text"
