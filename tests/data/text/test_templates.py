"""Templates: their parsed segments and the resulting IDs."""

import jax
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.text.templates import (
    Key,
    Soft,
    Template,
    Text,
    TokenTemplate,
    parse_template,
    soft_counts,
)
from prompt_tuning.data.text.tokenizers import load_tokenizer
from prompt_tuning.prompts.initializers import Vocabulary, from_array, from_template
from tests.support.dummies import LetterTokenizer
from tests.support.shared_data import FIXTURES

V = 31


def token_template(template, tokenizer=None, size=V, separate=False):
    tokenizer = tokenizer or LetterTokenizer()
    return TokenTemplate(parse_template(template), tokenizer, size, separate)


def test_the_segments_of_a_template():
    template = parse_template(
        '{soft:20} Review: {text}{soft:5:"so, \\"was it\\" {good}?"}'
    )
    assert template == Template(
        (
            Soft(20),
            Text(" Review: "),
            Key("text"),
            Soft(5, 'so, "was it" {good}?'),
        )
    )
    assert parse_template('{soft:"a b"}').parts == (Soft(None, "a b"),)
    assert parse_template("").parts == ()


def test_braces_of_the_text_are_doubled():
    template = parse_template("a{{b}} {{{text}}} c")
    assert template.parts == (Text("a{b} {"), Key("text"), Text("} c"))
    assert template.render({"text": "{x}"}) == ["a{b} {{x}} c"]


def test_keys_are_the_lines_keys():
    template = parse_template("{premise} {soft:2}{hypothesis of it}, {premise}")
    assert template.keys == ("premise", "hypothesis of it")
    texts = {"premise": "P", "hypothesis of it": "H"}
    assert template.render(texts) == ["P ", "H, P"]


@pytest.mark.parametrize(
    ("template", "character", "message"),
    [
        ("ab{text", 3, "expected {key}"),
        ("{}", 1, "expected {key}"),
        ("a }", 3, "no '{' before it"),
        ("{a}}", 4, "no '{' before it"),
        ("{a{b}", 1, "expected {key}"),
        ("a {soft}", 3, "expected {soft:5}, "),
        ("{soft:}", 1, "expected {soft:5}, "),
        ("{soft:-1}", 1, "expected {soft:5}, "),
        ("{soft:5:}", 1, "expected {soft:5}, "),
        ("{soft:words}", 1, "expected {soft:5}, "),
        ('{soft:"words}', 1, "expected {soft:5}, "),
        ("abc{soft:0}", 4, "expected at least one vector"),
        ('{soft:3:" "}', 1, "the words are empty"),
        (r'{soft:"\q"}', 1, "is not a JSON string"),
    ],
)
def test_templates_that_cannot_be_parsed_report_the_line(template, character, message):
    with pytest.raises(InputError) as caught:
        parse_template(template)
    assert f"DataSource.template, character {character}, " in str(caught.value)
    assert message in str(caught.value)


def test_soft_segments_have_one_vector_per_token_of_their_words():
    template = parse_template('{soft:2}{soft:"abc"} {soft:1:"abc"}')
    assert soft_counts(template, LetterTokenizer()) == [2, 3, 1]
    with pytest.raises(InputError, match="no tokenizer to count"):
        soft_counts(template, None)
    assert soft_counts(parse_template('{soft:2}{soft:3:"a"}'), None) == [2, 3]
    with pytest.raises(InputError, match=r"',,' has no tokens"):
        soft_counts(parse_template('{soft:",,"}'), Silent())


class Silent(LetterTokenizer):
    """Returns no token for a comma."""

    def encode(self, text):
        return super().encode(text.replace(",", ""))


def test_vectors_are_in_order_at_the_soft_segments():
    template = token_template('ab{soft:2}c{x}{soft:1}{soft:"dd"}')
    assert template.length == 5
    # a, b, vectors 0 and 1, c, the line's "e f", vectors 2, then 3 and 4.
    expected = [0, 1, V, V + 1, 2, 4, 5, V + 2, V + 3, V + 4]
    assert template.encode_prompt({"x": "e f"}) == expected
    assert template.encode_text("e f") == expected
    assert template.encode_pair({"x": "e f"}, "ba") == (expected, [1, 0])


@pytest.mark.parametrize("name", ["bpe", "byte_level", "unigram"])
def test_text_between_soft_segments_is_encoded_as_one_string(name):
    tokenizer = load_tokenizer(FIXTURES / "tokenizers" / name)
    size = tokenizer.vocabulary_size
    template = token_template(
        "{soft:3}Un{text}ly: they said.{soft:2} Sentiment:", tokenizer, size
    )
    line = {"text": "fortunate"}
    given, completion = template.encode_pair(line, " good")
    first, second = given.index(size), given.index(size + 3)
    assert (first, given[:3]) == (0, [size, size + 1, size + 2])
    joined = "Unfortunately: they said."
    assert given[3:second] == tokenizer.encode(joined)
    assert given[second : second + 2] == [size + 3, size + 4]
    rest = given[second + 2 :]
    assert tokenizer.decode([*given[3:second], *rest, *completion]) == (
        joined + " Sentiment: good"
    )
    # Not the IDs of the separately encoded parts.
    pieces = ("Un", "fortunate", "ly: they said.")
    assert given[3:second] != [id for piece in pieces for id in tokenizer.encode(piece)]


@pytest.mark.parametrize("name", ["bpe", "byte_level", "unigram"])
@pytest.mark.parametrize("template", ["{text}", "{text} {soft:2}", "{text}{soft:2} "])
def test_a_completion_continues_the_text_across_soft_segments(name, template):
    tokenizer = load_tokenizer(FIXTURES / "tokenizers" / name)
    template = token_template(template, tokenizer, tokenizer.vocabulary_size)
    given, completion = template.encode_pair({"text": "Once upon a"}, "time")
    text = [id for id in given if id < tokenizer.vocabulary_size]
    space = " " if any(isinstance(p, Text) for p in template.template.parts) else ""
    assert tokenizer.decode([*text, *completion]) == f"Once upon a{space}time"


def test_an_encoder_decoders_completion_is_a_separate_text():
    unigram = load_tokenizer(FIXTURES / "tokenizers/unigram")
    template = token_template("{soft:1} Review: {text}", unigram, 400, separate=True)
    given, completion = template.encode_pair({"text": "good movie"}, "positive")
    assert given == [400, *unigram.encode("Review: good movie")]
    assert completion == unigram.encode("positive")


def test_a_template_without_its_soft_segments_is_one_text():
    template = parse_template("a{soft:2}b{x}{soft:3}").without_soft()
    assert template.render({"x": "c"}) == ["abc"]


def test_the_prompt_must_have_the_templates_length():
    template = token_template('{soft:2}{soft:"abc"}')
    template.check_length(5)
    with pytest.raises(InputError, match=r"5 soft vectors \(2 \+ 3\).* prompt has 4"):
        template.check_length(4)
    with pytest.raises(InputError, match=r"0 soft vectors \(no soft part\)"):
        token_template("a{x}").check_length(4)


def test_tokens_are_never_read_as_vectors():
    # "z" is token 25, and so would be vector 5 of a model of 20 tokens.
    template = token_template("{x}{soft:9}", size=20)
    with pytest.raises(InputError, match="token 25, expected 0 to 19"):
        template.encode_prompt({"x": "az"})
    with pytest.raises(InputError, match="token 25, expected 0 to 19"):
        template.encode_pair({"x": "a"}, "z")


def test_a_single_text_needs_a_template_with_one_key():
    for template in ("a{soft:1}", "{x}{soft:1}{y}"):
        with pytest.raises(InputError, match="expected one, such as"):
            token_template(template).encode_text("a")


def test_vectors_of_words_start_from_their_embeddings():
    embeddings = np.arange(2.0 * V).reshape(V, 2).astype(np.float32)
    vocabulary = Vocabulary(embeddings, LetterTokenizer())
    template = 'x{soft:1}{soft:"bd"} {soft:2:"e"}{y}'
    start = from_template(template, fallback=from_array(-np.ones((5, 2), np.float32)))
    actual = np.asarray(start(jax.random.key(0), (5, 2), vocabulary))
    expected = -np.ones((5, 2), np.float32)
    expected[[1, 2, 3]] = embeddings[[1, 3, 4]]
    np.testing.assert_array_equal(actual, expected)
    with pytest.raises(InputError, match=r"5 soft vectors .* but the prompt has 4"):
        start(jax.random.key(0), (4, 2), vocabulary)
    long = from_template('{soft:1:"abc"}')
    with pytest.warns(UserWarning, match=r"3 tokens of 'abc' do not fit .* 1 vectors"):
        actual = long(jax.random.key(0), (1, 2), vocabulary)
    np.testing.assert_array_equal(actual, embeddings[:1])


def test_a_number_of_vectors_is_bounded():
    with pytest.raises(InputError, match="5,000 digits, expected at most 6"):
        parse_template("{soft:" + "9" * 5000 + "} {text}")
