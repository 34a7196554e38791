"""Built-in rewards, and what a reward may not do."""

import math
import time

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.training.rollouts.reward_calls import Answer, RewardCalls
from prompt_tuning.training.rollouts.rewards import numeric_answer, open_rewards

ROW = {"prompt": "2+2=", "completion": "4", "level": 3}


def judge(reward, completion: str = "4", seconds: float = 10) -> float:
    """The reward of one answer to a question."""
    calls = RewardCalls(open_rewards([reward], "completion"), seconds)
    return float(calls([Answer("2+2=", completion, ROW, "file, line 1")])[0, 0])


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        # The answers of GSM8K end in "#### N" (Cobbe et al. 2021).
        ("She sold 48/2 = 24 clips.\n#### 72", "48+24 = 72\n#### 72", 1),
        ("#### 1,050", "#### 1050", 1),
        ("so $1,234.50 in all.", "#### 1234.5", 1),
        ("first 3, then -7", "#### -7", 1),
        ("#### 5 of 6", "#### 5", 1),
        ("first 72, then 71", "#### 72", 0),
        ("no number", "#### 72", 0),
        ("no number", "none either", 0),
    ],
)
def test_numbers_are_compared_as_in_gsm8k(completion, answer, expected):
    assert numeric_answer(completion, answer) == expected


def test_json_is_checked_against_a_schema(tmp_path):
    pytest.importorskip("jsonschema")
    file = tmp_path / "schema.json"
    file.write_text(
        '{"type": "object", "required": ["a"], "properties": {"a": {"maximum": 3}}}'
    )
    reward = f"json_schema={file}"
    texts = ('{"a": 3}', '{"a": 4}', "{}", "no JSON", '{"a": 3', "[" * 99_999)
    assert [judge(reward, text) for text in texts] == [1, 0, 0, 0, 0, 0]
    file.write_text('{"multipleOf": 0.5}')
    # Python reads NaN, and cannot divide the last number by 0.5.
    texts = "2", "NaN", "-Infinity", "1" + 400 * "0"
    assert [judge(reward, text) for text in texts] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"type": "nothing"}', "cannot be used"),
        # Nothing is fetched from elsewhere.
        ('{"$ref": "https://example.org/schema.json"}', r"example\.org"),
        ('{"properties": {"a": {"$ref": "#/nowhere"}}}', "'/nowhere' does not exist"),
        ('{"$ref": "#"}', "recursion"),
        ('{"$schema": []}', r"\$schema = \[\], expected a text"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_at_once(schema, message, tmp_path):
    pytest.importorskip("jsonschema")
    file = tmp_path / "schema.json"
    file.write_text(schema)
    with pytest.raises(InputError, match=message):
        open_rewards([f"json_schema={file}"], "completion")


@pytest.mark.parametrize(
    ("reward", "completion", "expected"),
    [
        ("exact_match", " 4\n", 1),
        ("exact_match", "44", 0),
        ("regex=[0-9]+", "44", 1),
        ("regex=[0-9]+", "44!", 0),
        ("regex=a=b", "a=b", 1),
        ("regex=(a+)+b", "a" * 40, 0),  # exponential for Python's re
        ("length=4", "abcd", 1),
        ("length=4", "abcdef", 0.5),
        ("length=4", "abcdefghij", 0),
        (lambda prompt, completion, row: row["level"] * (prompt == "2+2="), "", 3),
        ("operator:countOf", "4", None),
    ],
)
def test_built_in_rewards(reward, completion, expected):
    if expected is None:
        with pytest.raises(InputError, match="countOf raised TypeError"):
            judge(reward, completion)
    else:
        assert judge(reward, completion) == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact", "the reward 'exact' is unknown, expected exact_match"),
        ("exact_match=1", "has no value"),
        ("regex", "needs an expression"),
        ("regex=(", "missing \\)"),
        ("length=x", "expected a number of characters"),
        ("nowhere:judge", "cannot be imported: No module named 'nowhere'"),
        ("math:pi", "is 3.14.*not a function"),
        ("python:judge", "configured from Python with the reward judge"),
    ],
)
def test_unknown_rewards_are_refused(name, message):
    with pytest.raises(InputError, match=message):
        open_rewards([name], "completion")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "is nan, expected a finite number"),
        ("good", "is 'good', .*expected a finite number"),
        (None, "is None, .*expected a finite number"),
        (KeyError("level"), "raised KeyError: 'level'"),
    ],
)
def test_bad_rewards_are_reported_with_the_answer(value, message):
    def bad(prompt, completion, row):
        if isinstance(value, Exception):
            raise value
        return value

    with pytest.raises(InputError, match=message) as caught:
        judge(bad)
    assert "the answer '4' to '2+2=' (file, line 1)" in str(caught.value)


def test_a_reward_that_hangs_is_reported_in_time():
    def hang(prompt, completion, row):
        time.sleep(30)

    began = time.monotonic()
    with pytest.raises(InputError, match=r"hang took more than 0\.2 s for the answer"):
        judge(hang, seconds=0.2)
    assert time.monotonic() - began < 5
