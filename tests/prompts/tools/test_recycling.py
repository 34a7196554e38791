import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.tools.recycling import (
    linear_combination,
    share_tokens,
    v2v_linear,
    v2v_mlp,
)
from tests.support.dummies import LetterTokenizer

RANDOM = np.random.default_rng(0)
D, E, P = 6, 9, 3


def draw(*shape):
    return RANDOM.standard_normal(shape).astype("f4")


SOURCE = draw(40, D)
PROMPT = draw(P, D)
MAP = draw(D, E)


@pytest.mark.parametrize("method", [v2v_linear, linear_combination])
def test_a_linear_relation_of_the_embeddings_is_recovered(method):
    recycled = method(PROMPT, SOURCE, SOURCE @ MAP)
    assert recycled.dtype == np.float32
    np.testing.assert_allclose(recycled, PROMPT @ MAP, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", [v2v_linear, linear_combination])
def test_the_same_model_returns_the_same_prompt(method):
    np.testing.assert_allclose(method(PROMPT, SOURCE, SOURCE), PROMPT, atol=1e-5)


def test_a_linear_map_is_the_least_squares_solution():
    target = draw(40, E)
    kernel = np.linalg.solve(SOURCE.T @ SOURCE, SOURCE.T @ target)
    actual = v2v_linear(PROMPT, SOURCE, target)
    np.testing.assert_allclose(actual, PROMPT @ kernel, rtol=1e-3, atol=1e-4)


def test_a_combination_has_least_squares_weights():
    # With fewer tokens than dimensions, the prompt is projected onto their span.
    source, target = SOURCE[:4], draw(4, E)
    weights = np.linalg.solve(source @ source.T, source @ PROMPT.T)
    actual = linear_combination(PROMPT, source, target)
    np.testing.assert_allclose(actual, weights.T @ target, rtol=1e-3, atol=1e-4)


def test_too_few_tokens_for_every_direction_give_a_warning():
    with pytest.warns(UserWarning, match="4 shared tokens span 4 of the source's 6"):
        actual = v2v_linear(PROMPT, SOURCE[:4], SOURCE[:4])
    projector = np.linalg.pinv(SOURCE[:4]) @ SOURCE[:4]
    np.testing.assert_allclose(actual, PROMPT @ projector, atol=1e-4)


def test_a_network_learns_the_relation():
    source = draw(1000, D)
    target = source @ MAP / 3
    inside, errors = draw(200, D), []
    actual = v2v_mlp(
        inside, source, target, epochs=200, on_epoch=lambda e, x: errors.append((e, x))
    )
    assert [epoch for epoch, _ in errors] == list(range(1, 201))
    assert errors[-1][1] < 0.02 * errors[0][1]
    away = np.square(actual - inside @ MAP / 3).mean()
    assert away < 0.05 * np.square(inside @ MAP / 3).mean()


def test_a_network_is_a_function_of_its_seed():
    def taught(seed):
        return v2v_mlp(PROMPT, SOURCE, SOURCE @ MAP, seed=seed, epochs=1)

    assert np.array_equal(taught(0), taught(0))
    assert not np.array_equal(taught(0), taught(1))


class ListedTokenizer(LetterTokenizer):
    """A tokenizer of a list of tokens, of which the first two are special."""

    bos_id: int | None = 0
    eos_id: int | None = 1
    pad_id = 1

    def __init__(self, pieces):
        self.pieces = ["^", "$", *pieces]
        self.vocabulary_size = len(self.pieces)

    def token(self, id):
        return self.pieces[id]


def vocabulary_of(pieces, rows=20, width=2):
    """Returns a vocabulary whose row `i` contains `i` everywhere."""
    table = np.repeat(np.arange(rows, dtype="f4")[:, None], width, axis=1)
    return Vocabulary(table, ListedTokenizer(pieces))


def ids(shared):
    return [
        tuple(map(int, pair)) for pair in zip(*(t[:, 0] for t in shared), strict=True)
    ]


def test_tokens_are_matched_by_text_in_the_order_of_the_source():
    source = vocabulary_of(["\u2581the", "a", "<0x0A>", "b", "only", "<"])
    target = vocabulary_of(["b", "x", "\u0120the", "<0x0A>", "<", "a", "b"], width=3)
    with pytest.warns(UserWarning, match=r"share 4 tokens.*4 are used and 0 skipped"):
        shared = share_tokens(source, target)
    assert ids(shared) == [(2, 4), (3, 7), (5, 2), (7, 6)]
    assert shared.source.shape == (4, 2) and shared.target.shape == (4, 3)


def test_the_first_shared_tokens_are_skipped():
    letters = vocabulary_of("abcdefgh")
    shared = share_tokens(letters, letters, skip_first=2, words=5)
    assert ids(shared) == [(i, i) for i in range(4, 9)]
    with pytest.warns(UserWarning, match="8 tokens, .* 6 are used and 2 skipped"):
        shared = share_tokens(letters, letters, skip_first=5, words=6)
    assert ids(shared) == [(i, i) for i in range(4, 10)]


def test_tokens_without_an_embedding_are_dropped():
    source, target = vocabulary_of("abcd"), vocabulary_of("abcd", rows=4)
    assert ids(share_tokens(source, target, skip_first=0, words=2)) == [(2, 2), (3, 3)]


def test_models_must_share_tokens_and_have_them():
    with pytest.raises(InputError, match="no token in common"):
        share_tokens(vocabulary_of("ab"), vocabulary_of("cd"))
    with pytest.raises(InputError, match="target model has no tokenizer"):
        share_tokens(vocabulary_of("ab"), Vocabulary(SOURCE))
    with pytest.raises(InputError, match="skip_first is -1 and words 3"):
        share_tokens(vocabulary_of("ab"), vocabulary_of("ab"), skip_first=-1, words=3)
