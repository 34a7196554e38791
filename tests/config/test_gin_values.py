"""Values of a config are checked by type before any factory is called."""

import time

import pytest

from prompt_tuning.config.deferred_factories import parameter_names
from prompt_tuning.config.factories import FACTORIES
from prompt_tuning.config.gin_files import read_run, register_factories
from prompt_tuning.core.errors import InputError

MODEL = "Run.model = @Pretrained()"


def refused(*bindings: str) -> str:
    register_factories()
    start = time.process_time()
    with pytest.raises(InputError) as caught:
        read_run([], [MODEL, *bindings])
    assert time.process_time() - start < 10
    assert len(str(caught.value)) < 1500
    return str(caught.value)


@pytest.mark.parametrize(
    ("binding", "words"),
    [
        ("DataSource.files = 3", "DataSource.files is 3, an int; expected a list of"),
        ("DataSource.files = {'a': 1}", "DataSource.files is {'a': 1}, a dict"),
        ("DataSource.files = ['a', 2]", "DataSource.files is ['a', 2], a list"),
        ("Pretrained.assignment_map = 'a'", "assignment_map is 'a', a str"),
        ("Pretrained.assignment_map = [['a']]", "assignment_map is [['a']], a list"),
        ("Pretrained.assignment_map = {'a': 1}", "assignment_map is {'a': 1}, a dict"),
        ("Run.seed = 2147483648", "2147483648, expected one from -2,147,483,647"),
        ("SoftPrompt.length = '4'", "SoftPrompt.length is '4', a str; expected int"),
        ("SoftPrompt.initializer = 3", "SoftPrompt.initializer is 3, an int"),
        ("LoRA.rank = 1.5", "LoRA.rank is 1.5, a float; expected int"),
        ("LoRA.rank = None", "LoRA.rank is None, a NoneType; expected int"),
        ("a/b/LoRA.regexes = '.*'", "LoRA.regexes is '.*', a str; expected a list of"),
        ("normal.deviation = []", "normal.deviation is [], a list; expected float"),
        ("from_text.text = 3", "from_text.text is 3, an int; expected str"),
        ("warmup_linear_decay.steps = 'x'", "warmup_linear_decay.steps is 'x', a str"),
        ("t5_config.width = True", "t5_config.width is True, a bool; expected int"),
        ("IA3.regexes = [1]", "IA3.regexes is [1], a list; expected a list of strings"),
    ],
)
def test_a_value_with_another_type(binding, words):
    assert words in refused(binding)


@pytest.mark.parametrize(
    ("binding", "maximum"),
    [
        ("SoftPrompt.length", 100_000),
        ("InferenceOnlyPrompt.length", 100_000),
        ("AddMultiTaskPrompt.tasks", 100_000),
        ("LoRA.rank", 100_000),
        ("ProjectedKeyValuePrefix.hidden", 100_000),
        ("train/DataSource.batch_size", 1_000_000),
        ("Evaluation.new_tokens", 100_000),
        ("t5_config.layers", 10_000),
    ],
)
def test_sizes_that_would_exhaust_the_memory(binding, maximum):
    name = binding.rpartition("/")[2]
    message = refused(f"{binding} = {maximum + 1}")
    expected = f"expected a number from 1 to {maximum:,}"
    assert f"{name} is {maximum + 1:,}, {expected}" in message
    assert name not in refused(f"{binding} = {maximum}")


def test_every_factory_refuses_a_value_of_another_type():
    """None accepts a dictionary of lists, but one of variables of any type."""
    register_factories()
    unchecked = set()
    for factory in FACTORIES:
        if factory == "PolicyGradient":  # has no parameters
            continue
        for name in parameter_names(factory):
            label = f"{factory}.{name}"
            with pytest.raises(InputError) as caught:
                read_run([], [MODEL, f"{label} = {{'key': [1]}}"])
            if f"{label} is {{'key': [1]}}" not in str(caught.value):
                unchecked.add(label)
    assert unchecked == {"DataSource.chat_template_kwargs"}


def test_a_macro_is_checked_when_it_is_used():
    message = refused("SoftPrompt.length = %LENGTH", "LENGTH = %OTHER", "OTHER = '4'")
    assert "SoftPrompt.length is '4', a str" in message


def test_exponentially_many_macros():
    """Thirty macros of two references each would make a list of 2^30 values."""
    chain = [f"M{i} = [%M{i + 1}, %M{i + 1}]" for i in range(30)]
    message = refused("DataSource.files = %M0", *chain, "M30 = 'file'")
    assert "10,001 references" in message


def test_exponentially_long_lists():
    long = ", ".join(["%NAMES"] * 2000)
    names = f"NAMES = {['name'] * 2000}"
    assert "at most 500,000" in refused(f"DataSource.files = [{long}]", names)


def test_exponentially_many_factories():
    chain = [
        f"s{i}/optimizer_from_python.description = [@s{i + 1}/optimizer_from_python(), "
        f"@s{i + 1}/optimizer_from_python()]"
        for i in range(30)
    ]
    assert "10,001 references" in refused(*chain)


@pytest.mark.parametrize(
    "bindings",
    [
        ["A = %B", "B = %A", "Run.steps = %A"],
        ["A = [%A]", "Run.steps = %A"],
        ["MLPPrompt.inner = @MLPPrompt", "Run.prompt = @MLPPrompt"],
        ["Run.evaluation = @Run()"],
    ],
)
def test_circular_references(bindings):
    assert "in a circle" in refused(*bindings)


def test_the_same_factory_in_two_scopes_is_not_circular():
    run = read_run(
        [],
        [
            MODEL,
            "Pretrained.checkpoint = 'folder'",
            "Run.prompt = @outer/MLPPrompt",
            "outer/MLPPrompt.inner = @inner/ResidualPrompt",
            "inner/ResidualPrompt.inner = @SoftPrompt",
            "SoftPrompt.length = 3",
        ],
    )
    assert run.prompt is not None
