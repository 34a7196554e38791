import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.preparation.preparation_settings import (
    Share,
    Splits,
    parse_share,
)
from prompt_tuning.data.preparation.record_order import (
    DEV,
    TEST,
    TRAIN,
    Permutation,
    RecordOrder,
    record_order,
)


def all_records(order, split):
    actual, first = [], 0
    while first < order.positions(split):
        records, first = order.block(split, first)
        actual += records.tolist()
    return actual


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 17, 64, 1000, 70_000])
def test_a_permutation_is_a_bijection_with_an_inverse(size):
    permutation = Permutation(size, seed=3)
    indices = np.arange(size)
    values = permutation.forward(indices)
    assert np.array_equal(np.sort(values), indices)
    assert np.array_equal(permutation.backward(values), indices)


def test_a_permutation_looks_random():
    values = Permutation(10_000, seed=0).forward(np.arange(10_000))
    steps = np.abs(np.diff(values))
    # Two random numbers below n differ by n / 3 on average.
    assert abs(steps.mean() - 10_000 / 3) < 100
    assert abs(np.corrcoef(values, np.arange(10_000))[0, 1]) < 0.03


def test_seeds_name_different_permutations():
    first, second = (
        Permutation(1000, seed).forward(np.arange(1000)) for seed in (0, 1)
    )
    assert (first == second).mean() < 0.01


def test_splits_partition_the_records_shuffled_or_not():
    for shuffle in (False, True):
        order = RecordOrder(100_000, dev=1000, test=50, shuffle=shuffle, seed=5)
        parts = [all_records(order, split) for split in (TRAIN, DEV, TEST)]
        assert [len(part) for part in parts] == [98_950, 1000, 50]
        assert sorted(record for part in parts for record in part) == list(
            range(100_000)
        )
        in_order = [part == sorted(part) for part in parts]
        assert in_order == [not shuffle] * 3


def test_shuffling_holds_out_the_same_records():
    plain, shuffled = (
        RecordOrder(500, dev=20, test=30, shuffle=shuffle, seed=1)
        for shuffle in (False, True)
    )
    for split in (DEV, TEST):
        assert sorted(all_records(plain, split)) == sorted(all_records(shuffled, split))


def test_splits_are_ratios_or_counts():
    assert parse_share("0.25", "--dev").resolve(200) == 50
    assert parse_share("25", "--dev").resolve(200) == 25
    assert parse_share("0", "--dev").resolve(200) == 0
    for wrong in ("1.5", "-0.1", "nan", "some"):
        with pytest.raises(InputError, match="--dev is"):
            parse_share(wrong, "--dev")


@pytest.mark.parametrize(
    ("dev", "test", "message"),
    [
        (Share(count=60), Share(count=40), "expected at least one to be left"),
        (Share(ratio=0.9), Share(count=50), "expected at least one to be left"),
        (Share(ratio=0.001), Share(), "rounds to none"),
    ],
)
def test_splits_without_records_are_refused(dev, test, message):
    with pytest.raises(InputError, match=message):
        record_order(Splits(dev=dev, test=test), 100)
