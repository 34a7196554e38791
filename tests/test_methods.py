"""Trains, saves, resumes, decodes and exports each method on each model.

Verifies the table of methods in prompt_tuning/prompts/README.md. With WRITE_METHODS=1
the table is written instead of compared.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from prompt_tuning.adapters.adapter import IA3, LORA, MULTITASK, Adapter
from prompt_tuning.adapters.peft.folder import write_folder
from prompt_tuning.adapters.peft.peft_conversion import to_peft
from prompt_tuning.checkpoints.run_store.checkpoint_files import (
    OPTIMIZER_FILE,
    STATE_FILE,
    file_name,
)
from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER
from prompt_tuning.config import gin_files
from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters, merge
from prompt_tuning.data.source_reading import token_template
from prompt_tuning.decoding.batch_decoding import continue_batch
from prompt_tuning.decoding.row_encoding import pad_rows
from prompt_tuning.decoding.row_progress import first_choices
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.text_encoding import encode_given
from prompt_tuning.pretrained.tuning import Tuning, rebuild_tuning
from prompt_tuning.prompts.adapter_files import (
    read_adapter,
    write_array,
    write_checkpoint,
)
from prompt_tuning.prompts.prompt_module import Attachment, InputDependentPrompt
from prompt_tuning.settings.pretrained import Pretrained
from prompt_tuning.training import loop
from prompt_tuning.training.metrics_log import METRICS_FILE
from prompt_tuning.training.opening import open_run
from prompt_tuning.training.progress import LineReporter
from prompt_tuning.training.trainer import Trainer
from prompt_tuning.tuned.export_adapters import convert_for_peft, export_adapters
from tests.support import methods
from tests.support.exhaustive import sample
from tests.support.methods import METHODS, MODELS, Method, Proof, Reason

STEPS, NEW = 6, 6
LINES = [("arc", 0), ("oinia", 1), ("cab", 1), ("digs", 0)]
TEXTS = ["copy: fun=", "upper: oiniaa=", "double: nioecxku="]
SIZES = [
    "BATCH_SIZE = 4",
    "PROMPT_LENGTH = 3",
    "DataSource.buckets = 1",
    "Run.evaluation = None",
    f"Run.steps = {STEPS}",
    f"Run.save_every = {STEPS // 2}",
    "Run.log_every = 1",
    "from_sampled_vocabulary.population_size = None",
    "LoRA.rank = 2",
]

proofs: dict[tuple[str, str], Proof] = {}


@dataclasses.dataclass(frozen=True)
class ModelData:
    """A model and its data.

    Attributes:
      model: name in `MODELS`.
      checkpoint: checkpoint of the model.
      lines: file of the examples.
      frozen: arrays of the model by path.
    """

    model: str
    checkpoint: str
    lines: Path
    frozen: dict[str, np.ndarray]


@pytest.fixture(scope="module", params=sample(2, ("decoder", "t5", "gpt2")))
def model_data(request, tmp_path_factory) -> ModelData:
    """Writes the data of one of the models, and the model if it is not bundled."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "gpt2":
        checkpoint = str(methods.write_gpt2(folder / "gpt2"))
    else:
        checkpoint = f"bundled:skills-{request.param}"
    return data_of(request.param, checkpoint, folder)


def data_of(model: str, checkpoint: str, folder: Path) -> ModelData:
    """Writes the data of a model."""
    lines = [
        {"prompt": f"{word}=", "completion": word.upper(), "prompt_ids": task}
        for word, task in LINES
    ]
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan = open_pretrained(Pretrained(checkpoint=checkpoint), key=key()).plan
    frozen = {path: np.array(x) for path, x in plan.read()}
    return ModelData(model, checkpoint, file, frozen)


def key() -> jax.Array:
    return jax.random.key(0)


def run_of(method: Method, model_data: ModelData) -> Run:
    """Reads the run of a config as users write it, with minimal sizes."""
    bindings = [
        f"MODEL = {model_data.checkpoint!r}",
        f"TRAIN_FILES = {str(model_data.lines)!r}",
        f"EVALUATION_FILES = {str(model_data.lines)!r}",
        "RUN_DIRECTORY = 'set later'",
    ]
    return gin_files.read_run(
        ["runs/first_prompt.gin", *method.files],
        [*SIZES, *bindings, *method.choices, *method.sizes],
        # The sizes are of all methods.
        allow_unused=True,
    )


def train(trainer: Trainer, directory: Path) -> Parameters:
    """Trains to the end, from a checkpoint if the directory has one."""
    outcome = loop.train(
        dataclasses.replace(
            trainer,
            run=dataclasses.replace(trainer.run, directory=str(directory)),
            start=jax.tree.map(jnp.copy, trainer.start),
        ),
        make_reporter=lambda done: LineReporter(Console(quiet=True), STEPS),
    )
    assert outcome.step == STEPS and outcome.finished
    return outcome.trained


def check_trained(
    trainer: Trainer, trained: Parameters, model_data: ModelData, log: Path
):
    """Checks that the loss on a repeated batch fell and only trained leaves changed."""
    orders = [trainer.batch_plan.batch(step).rows.tolist() for step in range(STEPS)]
    assert all(sorted(rows) == list(range(len(LINES))) for rows in orders)
    losses = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    assert trainer.frozen.keys() == model_data.frozen.keys()
    for path, leaf in trainer.frozen.items():
        assert np.asarray(leaf).tobytes() == model_data.frozen[path].tobytes(), path
    assert (
        trained.keys() == trainer.model.plan.abstract.keys() - model_data.frozen.keys()
    )
    for path, leaf in trained.items():
        assert "/prompt/" in path or "/adapters/" in path
        assert not np.array_equal(leaf, trainer.start.trained[path]), path


def check_saved(checkpoint: Path, trained: Parameters) -> None:
    """Checks that the checkpoint has the trained leaves, optimizer state and JSON."""
    leaves = {file_name(path): leaf for path, leaf in trained.items()}
    files = {file.name for file in checkpoint.iterdir()}
    assert files == {*leaves, OPTIMIZER_FILE, STATE_FILE}
    for name, leaf in leaves.items():
        assert np.load(checkpoint / name).tobytes() == np.asarray(leaf).tobytes()


def check_resumed(trainer: Trainer, whole: Path, half: Path) -> None:
    """Checks that a run restarted after half its steps writes the same files."""
    shutil.copytree(whole, half)
    shutil.rmtree(half / FOLDER / f"checkpoint_{STEPS}")
    train(trainer, half)
    ends = [folder / FOLDER / f"checkpoint_{STEPS}" for folder in (whole, half)]
    first, second = ({f.name: f.read_bytes() for f in x.iterdir()} for x in ends)
    assert first == second


class Decoder:
    """Greedy generation, compiled once for each model and shape of rows."""

    def __init__(self):
        self._programs: dict[Any, Any] = {}

    def __call__(
        self,
        graph: nnx.GraphDef,
        parameters: Parameters,
        rows: Sequence[Sequence[int]],
        tasks: Sequence[int] | None,
    ) -> list[list[int]]:
        """Returns the new token IDs of rows, which are padded to the longest."""
        length, choices = (
            max(map(len, rows)),
            first_choices(Sampling(), (), range(len(rows))),
        )
        ids = None if tasks is None else np.array(tasks, np.int32)
        arrays = (parameters, *pad_rows(rows, 0, length), choices, ids)
        shape = (graph, *(leaf.shape for leaf in jax.tree.leaves(arrays)))
        if shape not in self._programs:
            lowered = continue_batch.lower(
                *arrays, graph=graph, new_tokens=NEW, pad_id=0
            )
            self._programs[shape] = lowered.compile()
        return np.asarray(self._programs[shape](*arrays)).tolist()


@pytest.fixture(scope="module")
def decode() -> Decoder:
    return Decoder()


def check_decoded(
    decode: Decoder, trainer: Trainer, parameters: Parameters
) -> tuple[list[int], list[int]]:
    """Checks that a row's IDs do not depend on the other rows or their lengths.

    Returns:
      the shortest row and its continuation.
    """
    model = trainer.model
    template = token_template(trainer.run.source, model.interface)
    rows = [encode_given(model, text, template) for text in TEXTS]
    assert len({len(row) for row in rows}) == len(rows)
    tasks = None if model.prompt_count == 1 else [0, 1, 0]
    together = decode(model.graph, parameters, rows, tasks)
    assert len(set(map(tuple, together))) == len(rows)  # so that a swap is detected
    for index, row in enumerate(rows[:-1]):
        # With the shortest and the longest row, at another index, for another task.
        others = [rows[-1], row, rows[0]]
        ids = None if tasks is None else [1 - tasks[index], tasks[index], 1]
        continuations = decode(model.graph, parameters, others, ids)
        assert continuations[1] == together[index]
    return rows[0], together[0]


def model_of(graph: nnx.GraphDef, parameters: Parameters) -> LanguageModel:
    return cast(LanguageModel, merge(graph, parameters))


def check_exported(
    method: Method, reason: Reason | None, trainer: Trainer, parameters, folder: Path
) -> tuple[str, nnx.GraphDef, dict[str, np.ndarray]]:
    """Checks that exported files are read back unchanged and fit a model.

    Returns:
      the format, a model for it, and the arrays that were read.
    """
    model = model_of(trainer.model.graph, parameters)
    adapters, prompting = export_adapters(model), trainer.model.prompting
    if reason is not None:
        (adapter,) = adapters
        with pytest.raises(InputError, match=reason.message):
            to_peft(convert_for_peft(adapter, model, prompting), trainer.model.config)
        if len(adapter.parameters) > 1:
            return "checkpoint", *written_as_checkpoint(adapter, trainer, folder)
        return "array", *written_as_array(adapter, trainer, folder)
    forms = [convert_for_peft(adapter, model, prompting) for adapter in adapters]
    assert ", ".join(form.kind for form in forms) == method.peft
    shown = " ".join(f"`{form.kind}`" for form in forms)
    return shown, *written_for_peft(forms, trainer, folder)


def written_as_array(
    adapter: Adapter, trainer: Trainer, folder: Path
) -> tuple[nnx.GraphDef, dict[str, np.ndarray]]:
    """Exports one array; returns the run's model, or one for a folded prompt."""
    ((path, array),) = adapter.parameters.items()
    write_array(folder / file_name(path), adapter)
    back = read_adapter(folder / file_name(path), trainer.model.config)
    assert back.kind == adapter.kind and back.parameters.keys() == {path}
    np.testing.assert_array_equal(back.parameters[path], array)
    graph = trainer.model.graph
    if trainer.start.trained.keys() != {path}:
        graph = graph_for(rebuild_tuning(back, trainer.model.config), back, trainer.run)
    return graph, back.parameters


def written_as_checkpoint(
    adapter: Adapter, trainer: Trainer, folder: Path
) -> tuple[nnx.GraphDef, dict[str, np.ndarray]]:
    """Exports several arrays; returns a model that is described by them alone."""
    write_checkpoint(folder / "checkpoint", adapter, "a test")
    back = read_adapter(folder / "checkpoint", trainer.model.config)
    assert back.kind == adapter.kind
    assert back.parameters.keys() == adapter.parameters.keys()
    for path, array in adapter.parameters.items():
        np.testing.assert_array_equal(back.parameters[path], array)
    tuning = rebuild_tuning(back, trainer.model.config)
    return graph_for(tuning, back, trainer.run), back.parameters


def written_for_peft(
    forms: Sequence[Adapter], trainer: Trainer, folder: Path
) -> tuple[nnx.GraphDef, dict[str, np.ndarray]]:
    """Exports PEFT folders; returns a model that is described by them alone."""
    parameters, merged, config = {}, Tuning(), trainer.model.config
    for form in forms:
        exported = to_peft(form, config, base_model=trainer.run.model.checkpoint)
        write_folder(folder / form.kind, exported)
        back = read_adapter(folder / form.kind, config)
        check_same(form, back)
        parameters |= back.parameters
        fields = {
            name: x for name, x in vars(rebuild_tuning(back, config)).items() if x
        }
        merged = dataclasses.replace(merged, **fields)
    whole = Adapter(kind="", parameters=parameters)
    return graph_for(merged, whole, trainer.run), parameters


def graph_for(tuning: Tuning, adapter: Adapter, run: Run) -> nnx.GraphDef:
    """Opens the frozen model with parameters for exactly an adapter's arrays."""
    opened = open_pretrained(run.model, tuning, key=key())
    assert set(opened.plan.fresh) == adapter.parameters.keys()
    return opened.graph


def check_same(written: Adapter, read: Adapter) -> None:
    """Checks that both have the same effects, whatever the names and ranks are."""
    expected, actual = effects(written), effects(read)
    assert expected.keys() <= actual.keys()
    for name, effect in actual.items():
        # GPT-2 has one module for query, key and value; the unused parts do nothing.
        nothing = np.ones_like(effect) if written.kind == IA3 else np.zeros_like(effect)
        np.testing.assert_allclose(effect, expected.get(name, nothing), atol=1e-6)


def effects(adapter: Adapter) -> dict[str, np.ndarray]:
    """Returns the effects of an adapter by projection or stack."""
    arrays, effect_of = adapter.parameters, {}
    for path, array in arrays.items():
        model_data, _, leaf = path.rpartition("/")
        if adapter.kind == LORA and leaf == "a":
            scaling = adapter.scalings[model_data.removesuffix("/adapters/lora")]
            effect_of[model_data] = scaling * array @ arrays[f"{model_data}/b"]
        elif adapter.kind == MULTITASK and leaf == "shared":
            effect_of[model_data] = array * (
                arrays[f"{model_data}/columns"] @ arrays[f"{model_data}/rows"]
            )
        elif adapter.kind not in (LORA, MULTITASK):
            effect_of[path] = array
    return effect_of


def check_same_vectors(tuned: LanguageModel, exported: LanguageModel) -> None:
    """Checks that a reparameterized prompt is folded into the exported vectors."""
    prompts = exported.prompts()
    for stack, prompt in tuned.prompts().items():
        # Deep prompts may become keys and values, and some prompts need a text: those
        # are compared by decoding.
        fixed = not isinstance(prompt, InputDependentPrompt)
        if fixed and prompt.attachment is not Attachment.EVERY_BLOCK:
            actual = np.ravel(prompts[stack]())
            np.testing.assert_allclose(actual, np.ravel(prompt()), atol=1e-6)


COMMON = ("soft prompt", "key/value prefix", "LoRA and a soft prompt")


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    sample(1, [m for m in METHODS if m.name in COMMON]),
    ids=lambda method: method.name,
)
def test_a_common_method_on_a_model(method, model_data, decode, tmp_path):
    check_method(method, model_data, decode, tmp_path)


STATE = Method(
    name="state prefix",
    files=("prompts/state_prefix.gin",),
    arrays={
        "granite4": Reason("", "only as a key/value prefix, which needs attention")
    },
)


@pytest.mark.slow
def test_a_state_prefix_on_a_hybrid_model(decode, tmp_path):
    checkpoint = str(methods.write_granite4(tmp_path / "granite4"))
    model_data = data_of("granite4", checkpoint, tmp_path)
    assert check_method(STATE, model_data, decode, tmp_path).marks == 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_method_on_every_model(method, model_data, decode, tmp_path):
    proofs[method.name, model_data.model] = check_method(
        method, model_data, decode, tmp_path
    )


def check_method(
    method: Method, model_data: ModelData, decode: Any, tmp_path: Path
) -> Proof:
    """Trains, saves, resumes, decodes and exports, or checks that this is refused."""
    model = model_data.model
    run = run_of(method, model_data)
    if model in method.refused:
        with pytest.raises(InputError, match=method.refused[model].message):
            open_run(run)
        return Proof(0, "–", method.refused[model])
    trainer = open_run(run)
    whole, reason = tmp_path / "whole", method.arrays.get(model)

    trained = train(trainer, whole)
    check_trained(trainer, trained, model_data, whole / METRICS_FILE)
    check_saved(whole / FOLDER / f"checkpoint_{STEPS}", trained)
    check_resumed(trainer, whole, tmp_path / "half")
    parameters = trainer.parameters(trained)
    row, ids = check_decoded(decode, trainer, parameters)
    form, graph, arrays = check_exported(method, reason, trainer, parameters, tmp_path)
    exported = trainer.frozen | jax.tree.map(jnp.asarray, arrays)
    tuned = model_of(trainer.model.graph, parameters)
    check_same_vectors(tuned, model_of(graph, exported))
    tasks = None if trainer.model.prompt_count == 1 else [0]
    # Alone, unpadded, with the exported prompt in a model opened for it.
    assert decode(graph, exported, [row], tasks) == [ids]
    return Proof(4, form, reason)


@pytest.mark.exhaustive
def test_the_readme_has_the_table_of_tested_methods():
    if len(proofs) < len(METHODS) * len(MODELS):
        pytest.skip("cells were left out, or failed")
    text, table = methods.README.read_text(), methods.render(proofs)
    before, begin, rest = text.partition(methods.BEGIN)
    current, end, after = rest.partition(methods.END)
    assert begin and end
    if os.environ.get("WRITE_METHODS"):
        methods.README.write_text(before + table + after)
    else:
        assert begin + current + end == table, "WRITE_METHODS=1 writes the table"
