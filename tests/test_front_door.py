"""The public names as type checkers, editors and `help` see them."""

import json
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

import prompt_tuning as pt
from scripts import make_stub

ROOT = Path(__file__).parents[1]

MISTAKES = """
pt.SoftPrompt(lenght=5)
pt.SoftPrompt(length="5")
pt.SoftPrompt()
pt.SoftPrompt(length=5, initializer="hello")
pt.LoRA(rank=4, alfa=16)
pt.from_text(3)
pt.adamw(1e-3, weight_deccay=0.1)
pt.optax_chain(pt.adamw())
pt.warmup_linear_decay("fast")
pt.TokenObjective(label_smooting=0.1)
pt.ClassObjective(["a", "b"], loss=3)
pt.MeshShape(data="all")
pt.DataSource(files="a.jsonl", on_too_long="cut")
pt.Evaluation(data=[], metrics=3)
pt.Pipeline(schedule="1f1f")
pt.Prompting(placement=1)
pt.load("model", parameter_dtyp="bfloat16")
pt.tune("model", pt.adamw(), [])
pt.tune("model", pt.SoftPrompt(length=5), [], step=3)
pt.tune("model", pt.SoftPrompt(length=5), [], batch_sise=8)
pt.tune("model", pt.SoftPrompt(length=5), [], batch_size="8")
pt.tune("model", pt.SoftPrompt(length=5), [], optimizer=pt.warmup_constant(0.1))
pt.tune("model", pt.SoftPrompt(length=5), [], objective=pt.adafactor())
pt.tune("model", pt.SoftPrompt(length=5), [], steps="many")
pt.load("model").evaluate([], exact_matches=True)
pt.load("model").batches([], batchsize=3)
pt.load("model").attach(pt.uniform())
pt.SoftPrompts(length=5)
pt.load_tuned("run").trained.vectors
"""
"""Each line has a mistake."""

RIGHT = """
import functools

import optax


class Own(PromptModule):
    def __init__(self, key, vocabulary, *, length: int):
        print(length)


pt.SoftPrompt(length=5, initializer=pt.from_text("words", fallback=pt.uniform(0.1)))
pt.MLPPrompt(inner=pt.SoftPrompt(length=5), hidden_width=16)
pt.LoRA(regexes=[".*/query"], rank=4, alpha=8)
pt.ParameterGroup([".*/prompt/.*"], pt.adafactor(pt.warmup_cosine_decay(0.3)))
pt.optax_chain([pt.optax_transformation("clip_by_global_norm"), pt.adamw()])
pt.AxisRules(rules=[("vocab", None)])
data = pt.DataSource(files=[("a", "b")], batch_size=8, on_too_long="skip")
evaluation = pt.Evaluation(data=data, labels=["a", "b"])
model = pt.load("model", compute_dtype="bfloat16", config=pt.t5_config(
    width=8, feed_forward_width=8, layers=1, heads=1))
tuned = pt.tune(
    model,
    [pt.SoftPrompt(length=5), pt.LoRA()],
    [("a", "b")],
    evaluation=evaluation,
    learning_rate=pt.warmup_rsqrt_decay(0.3),
    objective=pt.TokenObjective(),
    mesh=pt.MeshShape(fsdp=2),
    prompting=pt.Prompting(placement="suffix"),
    batch_size=8,
    save_every=10,
)
pt.tune(model, functools.partial(Own, length=3), "train.jsonl", optimizer=optax.sgd(1))
metrics: dict[str, float] = tuned.evaluate("dev.jsonl", exact_match=True, batch_size=2)
step: int = tuned.result.step if tuned.result else 0
attached: pt.Model = model.attach(pt.IA3(), pt.SoftPrompt(length=2))
pt.SoftPrompt(length=3).build()
"""


def check(text: str, folder: Path) -> list[dict]:
    """Returns what pyright reports about a file of these lines."""
    file = folder / "checked.py"
    file.write_text(text)
    ended = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return json.loads(ended.stdout)["generalDiagnostics"]


HEAD = "import prompt_tuning as pt\n"


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[tuple[str, dict]]:
    """The lines of a file that pyright reports something about, with the report."""
    used = "from prompt_tuning.prompts.prompt_module import PromptModule\n" + RIGHT
    shown = "".join(f"reveal_type(pt.{name})\n" for name in pt.__all__)
    unknown = "".join(f"pt.{name}(misspelt=1)\n" for name in pt.CONFIGURABLE)
    text = HEAD + used + MISTAKES + shown + unknown
    lines = text.splitlines()
    reports = check(text, tmp_path_factory.mktemp("checked"))
    return [(lines[x["range"]["start"]["line"]], x) for x in reports]


def test_every_mistake_is_reported_and_nothing_else(found):
    wrong = {line for line, report in found if report["severity"] == "error"}
    unknown = {f"pt.{name}(misspelt=1)" for name in pt.CONFIGURABLE}
    assert wrong == {*MISTAKES.split("\n"), *unknown} - {""}


def test_no_public_name_is_any_to_an_editor(found):
    shown = {
        line: report["message"]
        for line, report in found
        if line.startswith("reveal_type")
    }
    assert len(shown) == len(pt.__all__)
    vague = re.compile(r'(is|->) "?(Any|Unknown)"')
    assert [line for line, message in shown.items() if vague.search(message)] == []


@pytest.mark.parametrize("file", make_stub.STUBS, ids=lambda file: file.name)
def test_the_stubs_are_up_to_date(file):
    current = "run `python -m scripts.make_stub`"
    assert file.read_text() == make_stub.STUBS[file](), current


def test_help_shows_signatures_and_examples():
    shown = pydoc.plain(pydoc.render_doc(pt.SoftPrompt))
    # Since Python 3.13, a long signature has a line for each parameter.
    signature = " ".join(shown.split()).replace("( ", "(")
    assert "SoftPrompt(*, length: int, initializer: Initializer | " in signature
    assert "Lester et al. 2021" in shown and ">>> " in shown
    assert "in module prompt_tuning\n" in shown
