"""Runs the examples of the Python interface and the notebook."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from scripts import examples
from scripts.examples import (
    first_prompt,
    lora_with_prompt,
    own_loss,
    own_training_loop,
    rewards_alone,
    two_stage_backward,
    two_styles,
)

EXAMPLES = Path(examples.__file__).parent
CHECKOUT = EXAMPLES.parents[1]


@pytest.mark.exhaustive
def test_first_prompt_learns_to_drop_the_first_letter(capsys):
    first_prompt.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Model(bundled:skills-decoder: decoder_only, 4 layers")
    assert "640 trained parameters in 1 arrays, step 60" in lines[-3]
    assert lines[-2].endswith("'indow']")
    assert "'exact_match': " in lines[-1]


@pytest.mark.exhaustive
def test_lora_with_prompt_trains_both_and_merges(capsys):
    lora_with_prompt.main()
    lines = capsys.readouterr().out.splitlines()
    assert "decoder/prompt/prompt (5, 128)" in lines
    assert "decoder/layers/self_attention/query/adapters/lora/a (4, 128, 4)" in lines
    assert lines[-1].startswith("Model(")
    assert "/merged: decoder_only" in lines[-1]


@pytest.mark.exhaustive
def test_own_loss_learns_to_drop_the_first_letter(capsys):
    own_loss.main()
    assert capsys.readouterr().out.splitlines()[-1].endswith("'indow']")


@pytest.mark.exhaustive
def test_own_training_loop_reaches_full_accuracy(capsys):
    own_training_loop.main()
    *_, metrics, answer = capsys.readouterr().out.splitlines()
    assert metrics.startswith("60 {'accuracy': 1.0,")
    assert answer.startswith("ar")


@pytest.mark.exhaustive
def test_rewards_alone_teach_upper_case(capsys):
    rewards_alone.main()
    lines = capsys.readouterr().out.splitlines()
    rewards = [float(x.split()[3]) for x in lines if x.startswith("step ")]
    assert rewards[0] < 0.3
    assert float(lines[-1].removeprefix("mean reward: ")) > 0.9


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(3))
def test_preferences_decide_between_two_styles(capsys, seed):
    two_styles.main(seed)
    lines = capsys.readouterr().out.splitlines()
    shares = [float(x.split()[-1]) for x in lines if x.startswith("capitals ")]
    assert shares[0] < 0.3
    assert shares[1] > 0.9


@pytest.mark.exhaustive
def test_multiplied_jacobians_need_a_row_for_each_score(capsys):
    two_stage_backward.main()
    lines = capsys.readouterr().out.splitlines()
    passed, multiplied, averaged = (line.split()[-2:] for line in lines[-3:])
    # 2 * 256 examples * (64 * 32 + 32 * 32 + 32 * 10) weights
    assert float(passed[0]) == 1.74
    assert float(multiplied[0]) > 10 * float(passed[0])
    assert float(passed[1]) < 1e-6
    assert float(multiplied[1]) < 1e-6
    assert float(averaged[1]) > 0.1


NOTEBOOKS = sorted(file.stem for file in EXAMPLES.glob("*.ipynb"))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_notebook_stores_no_outputs(name):
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    assert notebook.metadata.kernelspec.name == "python3"
    assert not any(cell.get("outputs") for cell in notebook.cells)


def execute(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Runs a notebook and returns the outputs of its cells."""
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(CHECKOUT)}},
    )
    client.execute()
    return [x for cell in notebook.cells for x in cell.get("outputs", ())]


IGNORED = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:(nbclient|jupyter_client|jupyter_core|tornado|zmq).*",
    "ignore::ResourceWarning",
)


@pytest.mark.exhaustive
@IGNORED
def test_the_notebook_about_a_first_prompt_runs(tmp_path, monkeypatch):
    outputs = execute("first_prompt", tmp_path, monkeypatch)
    results = [x.data["text/plain"] for x in outputs if x.output_type != "stream"]
    answers, metrics = results[-2:]
    assert "indow" in answers
    assert "'exact_match': " in metrics
    bar = next(x for x in outputs if x.output_type == "display_data")
    assert "<progress value='60' max='60'>" in bar.data["text/html"]


@pytest.mark.documents
@IGNORED
def test_the_notebook_about_own_data_runs(tmp_path, monkeypatch):
    outputs = execute("own_data", tmp_path, monkeypatch)
    shown = [x.data for x in outputs if x.output_type != "stream"]
    printed = "".join(x.text for x in outputs if x.output_type == "stream")
    assert any("image/png" in data for data in shown)
    assert "adapter_model.safetensors" in printed
    assert shown[-1]["text/plain"] == "'OLLEH'"
