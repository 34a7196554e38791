"""Gradients of pipelines against those of one device, for each trained parameter."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.rematerialization import Rematerialization
from prompt_tuning.losses.token_objective import NATS_PER_WEIGHT
from prompt_tuning.pipeline import driver
from prompt_tuning.pipeline.driver import PipelinedGradients
from prompt_tuning.pipeline.schedules import stage_orders
from prompt_tuning.pipeline.simulation import peak_held
from prompt_tuning.pipeline.stage_devices import StageDevices
from prompt_tuning.pipeline.stage_worker import StageWorker
from prompt_tuning.pipeline.staged_model import StagedModel
from prompt_tuning.pipeline.stages import stage_blocks
from prompt_tuning.pipeline.transport import Mailbox
from prompt_tuning.training.gradients import gradients
from scripts.bench.hlo import matmul_flops, products_of
from tests.support import dummies, meshes, methods
from tests.support.exhaustive import sample

# Rows of different length and loss weight.
SIZES = [(4, 3), (1, 5), (6, 1), (3, 3), (2, 2), (5, 2), (1, 1), (4, 4)]
METHODS = {
    method.name: method
    for method in (*methods.METHODS, methods.BIASES, methods.INVOKED)
}
COLLECTIVES = re.compile("all-(reduce|gather|to-all)|collective-|reduce-scatter")
ALL, PROMPT = ".*", ".*/prompt/.*"


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, what is trained, and the pipeline that computes the gradient."""

    family: str
    trained: str
    layers: tuple[int, ...]
    schedule: str = "1f1b"
    two_stage: bool = True
    dropout: float = 0.0
    method: str | None = None
    micro_batches: int = 4
    joined_p2: bool = False
    policy: str = "none"
    virtual: int = 1

    @property
    def stages(self):
        return len(self.layers) // self.virtual

    def orders(self, micro_batches, prefix=False):
        return stage_orders(
            self.schedule,
            self.stages,
            micro_batches,
            self.two_stage,
            prefix=prefix,
            virtual=self.virtual,
        )


def config_of(case):
    config = dummies.FAMILIES[case.family]
    if config.architecture == "decoder_only":
        config = dataclasses.replace(config, layers=sum(case.layers))
    policy, _, offload = case.policy.partition("+")
    again = Rematerialization(policy=policy, offload=bool(offload))
    config = dataclasses.replace(config, rematerialization=again)
    return dummies.with_dropout(config, case.dropout) if case.dropout else config


def model_of(case, config):
    if case.method is not None:
        graph, parameters, _ = meshes.tuned(config, METHODS[case.method])
    else:
        graph, parameters = dummies.prompted(config)
    trained = {p: x for p, x in parameters.items() if re.fullmatch(case.trained, p)}
    frozen = {p: x for p, x in parameters.items() if p not in trained}
    return graph, trained, frozen


def batch_of(config, micro_batches):
    batch = dummies.make_batch(config, dummies.random_rows(SIZES))
    return jax.tree.map(lambda x: x.reshape(micro_batches, -1, *x.shape[1:]), batch)


def pipeline_of(case, graph, stages=None):
    own = [StageDevices(device) for device in jax.devices()[: case.stages]]
    return PipelinedGradients(
        graph, stages or own, case.layers, case.orders, joined_p2=case.joined_p2
    )


def assert_equal(case, stages=None):
    """Compares a pipeline with one device: loss to 1e-7, gradients to 1e-6."""
    config = config_of(case)
    graph, trained, frozen = model_of(case, config)
    batch = batch_of(config, case.micro_batches)
    key = jax.random.key(3) if case.dropout else None
    usual = jax.jit(functools.partial(gradients, graph))
    usual = usual.lower(trained, frozen, batch, key).compile()
    expected, expected_sums = usual(trained, frozen, batch, key)
    pipeline = pipeline_of(case, graph, stages)
    actual, sums = pipeline(trained, frozen, batch, key)
    np.testing.assert_allclose(sums.loss, expected_sums.loss, rtol=2e-7)
    np.testing.assert_allclose(sums.weight, expected_sums.weight, rtol=1e-6)
    np.testing.assert_allclose(sums.accuracy, expected_sums.accuracy, rtol=1e-6)
    assert actual.keys() == trained.keys()
    for path, gradient in expected.items():
        largest = np.abs(gradient).max()
        if re.fullmatch(".*attention/key/(.*/)?bias", path):
            largest = 1  # it shifts all scores of a query alike: the gradient is 0
        assert largest > 1e-4, path
        np.testing.assert_allclose(
            actual[path], gradient, rtol=0, atol=1e-6 * largest, err_msg=path
        )
    assert_bytes(case, pipeline, trained, frozen, batch, key)
    if stages is None and not case.joined_p2:
        staged = pipeline.traced(trained, frozen, batch, key)
        assert_flops(case, staged, matmul_flops(usual))


def assert_flops(case, staged, usual):
    """Compares the products of all compiled programs with those of one device.

    Nothing is computed twice, except T5's position bias, which each stage computes for
    itself. If only some weights are trained, the program of one device may compute a
    few gradients that nothing needs.
    """
    allowed = 1.03 if case.family.startswith("t5") else 1.01
    total = 0
    for programs in staged.programs:
        total += case.micro_batches * sum(
            map(flops, programs_run(case, programs).values())
        )
    for programs in staged.prefix_programs:
        total += flops(programs.forward) + flops(programs.backward)
    assert total <= allowed * usual
    if case.trained == ALL:
        assert total >= 0.99 * usual


def flops(program):
    return sum(each.flops * each.runs for each in products_of(program.as_text()))


def assert_bytes(case, pipeline, *arguments):
    """Compares the arrays that each stage held with what is planned."""
    staged = pipeline.traced(*arguments)
    planned = []
    for stage, order in enumerate(case.orders(case.micro_batches)):
        own = staged.programs[stage :: case.stages]
        kept = [programs.kept_bytes for programs in own]
        postponed = [programs.postponed_bytes for programs in own]
        planned.append(peak_held(order, kept, postponed))
    assert pipeline.peak_bytes == planned
    for stage, programs in enumerate(staged.programs):
        assert_own_work(case, stage, programs, arguments[0] | arguments[1])


def programs_run(case, programs):
    """Returns the programs of a stage that a step runs, by name."""
    names = ["forward", "backward"]
    if case.two_stage:
        names = ["forward", "input_gradient", "weight_gradient"]
        if case.joined_p2 or not programs.weights:
            names.remove("weight_gradient")
    return {name: getattr(programs, name) for name in names}


def assert_own_work(case, stage, programs, parameters):
    """Checks the compiled programs of a stage.

    On one device they exchange nothing, and they have no array of all blocks' weights.
    p2 has products only if weights are trained, or where the prompt of an encoder is
    joined to its rows: no stage waits for the gradients of the first one.
    """
    up = next(x for path, x in parameters.items() if path.endswith("mlp/up/kernel"))
    whole = f"[{','.join(map(str, up.shape))}]"
    for name, program in programs_run(case, programs).items():
        text = program.as_text()
        assert not COLLECTIVES.search(text), name
        assert case.layers[stage] >= up.shape[0] or whole not in text, name
        prompt_only = case.trained == PROMPT and case.method is None
        prompt_only &= not case.family.startswith("t5")
        if name == "weight_gradient" and prompt_only:
            assert " dot(" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    sample(
        1,
        [
            # A prompt that crosses the stages once; the table on both stages.
            Case("gpt2", ALL, (1, 1), dropout=0.3),
            Case("gpt2", ALL, (1, 1, 1, 1), "zb-h1"),
            Case("gpt2", PROMPT, (1, 2)),
            Case("llama", ALL, (2, 1), "none", two_stage=False, micro_batches=1),
            Case("llama", ALL, (1, 1, 1), "gpipe", joined_p2=True),
            Case("t5_gated", ALL, (1, 3), joined_p2=True),
            Case("llama", ALL, (1, 1), "1f1b-2"),
            Case("llama", ALL, (2, 1), "zb-h1", policy="nothing"),
            Case("llama", ALL, (1, 2), policy="nothing+offload"),
            Case("t5_gated", ALL, (3, 1), policy="attention"),
            Case("gpt2", ALL, (1, 1), "gpipe", joined_p2=True, dropout=0.3),
            Case("t5_original", ALL, (1, 2, 1), dropout=0.3),
            Case("t5_gated", PROMPT, (2, 2), "zb-h1", dropout=0.3),
            Case("llama", ".*/adapters/.*", (1, 1), method="LoRA and a soft prompt"),
            Case("gpt2", ".*/adapters/.*", (1, 2), method="LoRA and biases"),
            Case("llama", ".*/adapters/.*", (1, 1), method="aLoRA"),
            Case("gpt2", PROMPT, (1, 1), method="deep prompt, added"),
            Case("t5_gated", PROMPT, (2, 2), method="key/value prefix"),
            Case("t5_gated", PROMPT, (3, 1), method="prompts in encoder and decoder"),
        ],
    ),
    ids=str,
)
def test_gradients_equal_those_of_one_device(case):
    assert_equal(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    sample(
        1,
        [
            Case("gpt2", ALL, (1,) * 4, virtual=2),
            Case("gpt2", PROMPT, (1,) * 8, two_stage=False, virtual=2),
            Case("gpt2", ALL, (1,) * 8, virtual=2, dropout=0.3),
            Case("llama", ALL, (1,) * 8, two_stage=False, virtual=4),
            Case("t5_gated", ALL, (1,) * 4, two_stage=False, virtual=2),
            Case("llama", ALL, (1,) * 16, virtual=4),
        ],
    ),
    ids=str,
)
def test_gradients_of_interleaved_chunks_equal_those_of_one_device(case):
    assert_equal(case)


@pytest.mark.exhaustive
def test_random_numbers_of_each_microbatch_are_not_joined():
    """Here p2 draws dropout masks again, from one key for each micro-batch."""
    case = Case("t5_gated", ALL, (2, 2), "gpipe", joined_p2=True, dropout=0.3)
    with pytest.raises(InputError, match="which cannot be joined: set it to False"):
        assert_equal(case)


@pytest.mark.exhaustive
def test_recomputed_activations_are_held_for_p2():
    """What p1 computes again waits for p2: more than the forward pass had kept."""
    kept, postponed = {}, {}
    for policy in ("none", "nothing", "nothing+offload"):
        case = Case("llama", ALL, (1, 1), policy=policy)
        config = config_of(case)
        graph, trained, frozen = model_of(case, config)
        batch = batch_of(config, case.micro_batches)
        staged = pipeline_of(case, graph).traced(trained, frozen, batch, None)
        kept[policy] = staged.programs[1].kept_bytes
        postponed[policy] = staged.programs[1].postponed_bytes
    assert kept["nothing+offload"] < kept["nothing"] < kept["none"]
    assert postponed["nothing"] >= postponed["none"]


@pytest.mark.exhaustive
def test_gradients_in_float64():
    case = Case("llama", ALL, (1, 1), "zb-h1")
    jax.config.update("jax_enable_x64", True)
    try:
        config = config_of(case)
        graph, trained, frozen = model_of(case, config)
        trained = {path: x.astype(np.float64) for path, x in trained.items()}
        batch = batch_of(config, case.micro_batches)
        usual = jax.jit(functools.partial(gradients, graph))
        expected, _ = usual(trained, frozen, batch, None)
        actual, _ = pipeline_of(case, graph)(trained, frozen, batch, None)
        for path, gradient in expected.items():
            assert actual[path].dtype == np.float64
            largest = np.abs(gradient).max()
            np.testing.assert_allclose(
                actual[path], gradient, rtol=0, atol=1e-12 * largest, err_msg=path
            )
    finally:
        jax.config.update("jax_enable_x64", False)


class Worker(StageWorker):
    """A stage whose operations fail, or wait for a message that never arrives."""

    def __init__(self, devices, *, fails):
        self._fails, self._mailbox = fails, Mailbox(devices)
        self.stop = self._mailbox.stop

    def run(self, kind, index):
        if self._fails:
            raise InputError("stage 1 failed")
        self._mailbox.receive((kind, index))

    def wait(self):
        pass


def test_an_exception_of_one_stage_ends_the_others():
    devices = StageDevices(jax.devices()[0])
    workers = [Worker(devices, fails=stage == 1) for stage in range(3)]
    with pytest.raises(InputError, match="stage 1 failed"):
        driver.run_in_threads(workers, stage_orders("1f1b", 3, 3, False))


def test_each_stage_has_only_the_parameters_that_it_reads():
    config = dummies.T5_ORIGINAL
    graph, parameters = dummies.prompted(config)
    batch = jax.tree.map(lambda x: x[0], batch_of(config, 4))
    others = (batch, None, None)
    staged = StagedModel(graph, NATS_PER_WEIGHT, parameters, others, (1, 2, 1))
    # Encoder and decoder have two blocks each; the tied table embeds tokens for both
    # and is the head.
    assert staged.blocks == (
        {"encoder": range(0, 1)},
        {"encoder": range(1, 2), "decoder": range(0, 1)},
        {"decoder": range(1, 2)},
    )
    owners = {
        path: [stage for stage in range(3) if path in staged.paths(stage)]
        for path in parameters
    }
    assert owners["encoder/prompt/prompt"] == [0]
    assert owners["token_embedder/embedding"] == [0, 1, 2]
    assert owners["encoder/relative_position_bias/embedding"] == [0, 1]
    assert owners["decoder/relative_position_bias/embedding"] == [1, 2]
    assert owners["encoder/final_norm/scale"] == [1]
    assert owners["decoder/final_norm/scale"] == [2]
    for path in parameters:
        if "/layers/" in path:
            assert owners[path] == ([0, 1] if path.startswith("encoder") else [1, 2])
            assert path in staged.sliced


@pytest.mark.parametrize("layers", [(2, 3), (0, 4), (4,)])
def test_blocks_that_do_not_add_up_are_refused(layers):
    if layers == (4,):
        assert stage_blocks({"encoder": 2, "decoder": 2}, layers) == (
            {"encoder": range(0, 2), "decoder": range(0, 2)},
        )
        return
    with pytest.raises(InputError, match=r"2 \(encoder\) \+ 2 \(decoder\)"):
        stage_blocks({"encoder": 2, "decoder": 2}, layers)
