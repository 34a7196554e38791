"""Config files in an order in which one silently undoes another."""

import pytest

from prompt_tuning.config.gin_files import read_run
from prompt_tuning.core.errors import InputError

RUN = "runs/first_prompt.gin"
BINDINGS = [
    "MODEL = 'model'",
    "TRAIN_FILES = 'train.jsonl'",
    "EVALUATION_FILES = 'held_out.jsonl'",
    "RUN_DIRECTORY = 'run'",
]


@pytest.mark.parametrize(
    ("first", "undone"),
    [
        ("adapters/lora.gin", r"Run\.prompt = None"),
        ("prompts/prefix.gin", r"Run\.prompt = @KeyValuePrefix"),
        ("prompts/text.gin", r"SoftPrompt\.initializer = @from_text\(\)"),
    ],
)
def test_the_run_after_overriding_files_is_refused(first, undone):
    message = f"undoes {undone} of '{first}'.* give '{first}' after '{RUN}'"
    with pytest.raises(InputError, match=message):
        read_run([first, RUN], [*BINDINGS, "PROMPT_TEXT = 'text'"])


def test_a_prompt_after_the_run_is_trained():
    run = read_run([RUN, "prompts/prefix.gin"], [*BINDINGS, "Run.steps = 3"])
    assert vars(run.prompt)["factory"].__name__ == "KeyValuePrefix"


def test_two_files_that_exclude_each_other_are_refused():
    files = [RUN, "adapters/lora.gin", "adapters/ia3.gin"]
    with pytest.raises(InputError, match=r"or set --gin\.Run\.adapters"):
        read_run(files, BINDINGS)
    both = "Run.adapters = [@LoRA(), @IA3()]"
    assert len(read_run(files, [*BINDINGS, both]).adapters) == 2


def test_files_that_agree_are_accepted_in_any_order():
    for name in ("models/checkpoint.gin", "data/packed.gin"):
        assert read_run([name, RUN], BINDINGS).directory == "run"


def test_a_misspelt_config_is_answered_with_the_nearest():
    with pytest.raises(InputError, match=r"missing; did you mean adapters/lora\.gin\?"):
        read_run([RUN, "adapters/lore.gin"], BINDINGS)
