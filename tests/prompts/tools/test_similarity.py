from pathlib import Path

import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.prompts.tools.similarity import (
    average_similarity,
    nearest,
    pairwise_similarity,
    short_names,
)

RANDOM = np.random.default_rng(0)
# Along one axis, along another, and halfway between them, with different lengths.
ALONG = np.array([[2.0, 0, 0], [2.0, 0, 0]], "f4")
ACROSS = np.array([[0, 5.0, 0]], "f4")
BETWEEN = np.array([[1.0, 0, 0], [0, 1.0, 0], [1.0, 1.0, 0]], "f4")


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def test_mean_vectors_are_compared_by_angle():
    similarity = average_similarity([ALONG, ACROSS, BETWEEN])
    half = 2**-0.5
    expected = [[1, 0, half], [0, 1, half], [half, half, 1]]
    np.testing.assert_allclose(similarity, expected, atol=1e-7)


def test_all_pairs_of_vectors_are_compared():
    prompts = [RANDOM.standard_normal((p, 5)).astype("f4") for p in (2, 3, 4)]
    similarity = pairwise_similarity(prompts)
    for i, one in enumerate(prompts):
        for j, other in enumerate(prompts):
            pairs = [cosine(a, b) for a in one for b in other]
            assert similarity[i, j] == pytest.approx(np.mean(pairs), rel=1e-5)


def test_the_measures_differ_if_long_vectors_hide_short_ones():
    long = np.array([[100.0, 0], [0, 1.0]], "f4")
    axis = np.array([[1.0, 0]], "f4")
    assert average_similarity([long, axis])[0, 1] == pytest.approx(1, abs=1e-3)
    assert pairwise_similarity([long, axis])[0, 1] == pytest.approx(0.5)


def test_a_prompt_of_zeros_changes_nothing():
    zeros = np.zeros((2, 3), "f4")
    for measure in (average_similarity, pairwise_similarity):
        assert not measure([zeros, ALONG]).any(where=[[True, True], [True, False]])


def test_the_nearest_come_first_and_a_prompt_is_not_its_own_neighbor():
    actual = np.array([[1, 0.2, 0.9], [0.2, 1, 0.2], [0.9, 0.2, 1]])
    assert nearest(actual, 0) == [(2, 0.9), (1, 0.2)]
    assert nearest(actual, 1) == [(0, 0.2), (2, 0.2)]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/x.npy", "b/y.npy"], ["x", "y"]),
        (["one/prompt.npy", "two/prompt.npy"], ["one", "two"]),
        (["r/a/p.npy", "r/b/p.npy", "b/q.npy"], ["a/p", "b/p", "q"]),
        (["x.npy", "x"], ["x.npy", "x"]),
        (["run_1", "run_2/"], ["run_1", "run_2"]),
    ],
)
def test_names_distinguish_paths(paths, names):
    assert short_names([Path(path) for path in paths]) == names


def test_a_path_given_twice_is_refused():
    with pytest.raises(InputError, match="a/x is given twice"):
        short_names([Path("a/x"), Path("a/../a/x")])
