import jax
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.prompts import initializers
from prompt_tuning.prompts.initializers import Vocabulary
from tests.support.dummies import LetterTokenizer

KEY = jax.random.key(0)
TABLE = np.arange(40, dtype=np.float32).reshape(10, 4)


WORDS = Vocabulary(TABLE, LetterTokenizer())
ZEROS = initializers.from_array(np.zeros((3, 4), np.float32))


def start(initializer, length=3, vocabulary=WORDS):
    return np.asarray(initializer(KEY, (length, vocabulary.width), vocabulary))


def test_uniform_is_not_symmetric():
    drawn = start(initializers.uniform(0.5), length=500)
    assert drawn.min() >= 0 and drawn.max() < 0.5
    assert drawn.mean() == pytest.approx(0.25, abs=0.02)
    assert drawn.std() == pytest.approx(0.5 / 12**0.5, abs=0.01)


def test_uniform_is_a_function_of_its_key():
    assert np.array_equal(start(initializers.uniform()), start(initializers.uniform()))
    other = initializers.uniform()(jax.random.key(1), (3, 4), WORDS)
    assert not np.array_equal(start(initializers.uniform()), other)


def test_an_array_initializes_the_prompt_unchanged():
    np.testing.assert_array_equal(start(initializers.from_array(TABLE[:3])), TABLE[:3])


@pytest.mark.parametrize("shape", [(2, 4), (4, 4), (3, 5), (4, 3), (12,), (1, 3, 4)])
def test_an_array_with_another_shape_is_refused(shape):
    with pytest.raises(InputError, match=r"expected \(3, 4\)") as error:
        start(initializers.from_array(np.zeros(shape, np.float32)))
    assert str(shape) in str(error.value)


@pytest.mark.parametrize("name", ["prompt.npy", "encoder.prompt.prompt.prompt"])
def test_a_file_initializes_the_prompt_with_or_without_extension(name, tmp_path):
    with (tmp_path / name).open("wb") as file:
        np.save(file, TABLE[:3])
    started = start(initializers.from_file(str(tmp_path / name)))
    np.testing.assert_array_equal(started, TABLE[:3])


def test_a_file_with_another_shape_is_refused_by_name(tmp_path):
    np.save(tmp_path / "wide.npy", np.zeros((3, 8), np.float32))
    with pytest.raises(InputError, match=r"wide\.npy has shape \(3, 8\).*\(3, 4\)"):
        start(initializers.from_file(tmp_path / "wide.npy"))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        start(initializers.from_file(tmp_path / "none.npy"))


@pytest.mark.parametrize(
    "initializer",
    [
        initializers.uniform(),
        initializers.from_array(TABLE[4:7]),
        initializers.from_sampled_vocabulary(6),
        initializers.from_class_labels(["c", "ad"]),
        initializers.from_text("ca"),
    ],
    ids=["uniform", "array", "sampled", "labels", "text"],
)
def test_initializers_give_the_same_vectors_in_a_compiled_function(initializer):
    vocabulary = Vocabulary(jax.numpy.asarray(TABLE), LetterTokenizer())

    def initialize(key, shape):
        return initializer(key, shape, vocabulary)

    compiled = jax.jit(initialize, static_argnames="shape")
    assert compiled.eval_shape(KEY, shape=(3, 4)).shape == (3, 4)
    np.testing.assert_array_equal(compiled(KEY, shape=(3, 4)), start(initializer))


def rows_drawn(drawn):
    """Returns the row of the table that each vector equals."""
    assert np.all(np.isin(drawn[:, 0], TABLE[:, 0]))
    rows = (drawn[:, 0] / 4).astype(int)
    np.testing.assert_array_equal(drawn, TABLE[rows])
    return rows.tolist()


def test_sampled_rows_are_distinct_and_from_the_first_rows():
    drawn = rows_drawn(start(initializers.from_sampled_vocabulary(6), length=6))
    assert sorted(drawn) == [0, 1, 2, 3, 4, 5]


def test_all_rows_can_be_sampled():
    drawn = rows_drawn(start(initializers.from_sampled_vocabulary(None), length=10))
    assert sorted(drawn) == list(range(10))


def test_a_population_beyond_the_table_is_the_whole_table_without_a_warning():
    drawn = rows_drawn(start(initializers.from_sampled_vocabulary(), length=10))
    assert sorted(drawn) == list(range(10))


def test_a_prompt_longer_than_the_population_repeats_rows_with_a_warning():
    with pytest.warns(UserWarning, match="12 vectors is longer than the population"):
        drawn = rows_drawn(start(initializers.from_sampled_vocabulary(2), length=12))
    assert set(drawn) == {0, 1}


@pytest.mark.parametrize("population", [0, -1])
def test_a_population_must_be_positive(population):
    with pytest.raises(InputError, match=f"is {population}, expected at least 1"):
        start(initializers.from_sampled_vocabulary(population))


def test_a_class_label_is_the_mean_of_its_tokens_and_other_vectors_use_the_fallback():
    started = start(initializers.from_class_labels(["c", "ad"], ZEROS))
    expected = [TABLE[2], (TABLE[0] + TABLE[3]) / 2, np.zeros(4)]
    np.testing.assert_allclose(started, expected)


def test_the_fallback_is_uniform():
    started = start(initializers.from_class_labels(["j"]), length=40)
    np.testing.assert_array_equal(started[0], TABLE[9])
    assert started[1:].min() >= 0 and 0.4 < started[1:].max() < 0.5


def test_class_labels_beyond_the_prompt_are_dropped_with_a_warning():
    labels = initializers.from_class_labels(["a", "b", "c", "d"], ZEROS)
    with pytest.warns(UserWarning, match=r"4 class labels do not fit .* last 1"):
        started = start(labels)
    np.testing.assert_array_equal(started, TABLE[:3])


@pytest.mark.parametrize("label", ["", "  "])
def test_a_class_label_without_tokens_is_refused(label):
    with pytest.raises(InputError, match=f"the text '{label}' has no tokens"):
        start(initializers.from_class_labels(["a", label]))


def test_each_token_of_a_text_gives_a_vector_and_the_rest_uses_the_fallback():
    started = start(initializers.from_text("ca", ZEROS))
    np.testing.assert_array_equal(started, [TABLE[2], TABLE[0], np.zeros(4)])


def test_a_text_longer_than_the_prompt_is_truncated_with_a_warning():
    with pytest.warns(UserWarning, match=r"5 tokens of the text do not fit .* last 2"):
        started = start(initializers.from_text("edcba", ZEROS))
    np.testing.assert_array_equal(started, TABLE[[4, 3, 2]])


def test_a_text_without_tokens_is_refused():
    with pytest.raises(InputError, match="has no tokens"):
        start(initializers.from_text(" "))


@pytest.mark.parametrize(
    "initializer",
    [initializers.from_text("a"), initializers.from_class_labels(["a"])],
)
def test_words_need_a_tokenizer(initializer):
    with pytest.raises(InputError, match="the model has no tokenizer"):
        start(initializer, vocabulary=Vocabulary(TABLE))
