"""Parts of the benchmark; these tests time nothing and do not need torch."""

import dataclasses
import json
import re
import sys
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.bench import hlo, latent
from scripts.bench.__main__ import main
from scripts.bench.cases import CASES, HYBRIDS, IGNORED, make_prompt, make_rows, width
from scripts.bench.evaluation import check_agreement as check_metrics
from scripts.bench.ideal import (
    Work,
    distinct,
    looped,
    prepare_xla,
    size_of,
    stored_work,
    time_products,
)
from scripts.bench.machine import caption, describe_rates
from scripts.bench.matrix_products import (
    LAYOUTS,
    MatrixSize,
    prepare_numpy,
    stored_shapes,
)
from scripts.bench.ours import make_batch
from scripts.bench.page import page
from scripts.bench.report import Measure, Outcome, Results, as_json
from scripts.bench.steps import (
    DisagreementError,
    StepResult,
    check_agreement,
    median_ratio,
)
from scripts.bench.tables import markdown, sheets
from scripts.bench.traffic import traffic
from scripts.bench.workers import Worker, WorkerError, take_turns


@pytest.mark.slow
def test_compressed_keys_take_the_rank_and_one_rotated_head(monkeypatch, capsys):
    """576 numbers for each token of each layer, in float32."""
    command = ["latent", "--rows", "1", "--length", "1024", "--turns", "1"]
    monkeypatch.setattr(sys, "argv", command)
    latent.main()
    size = 2 * 1024 * 576 * 4 / 2**20
    assert re.search(rf"compressed: .* {size:.1f} MiB", capsys.readouterr().out)


def scanned_attention(query, kernels):
    """Compiles one batched product, and a plain product for each kernel."""
    scores = jnp.einsum("bqk,bsk->bqs", query, query)

    def block(x, kernel):
        return jnp.tanh(x @ kernel), None

    return jax.lax.scan(block, scores.reshape(-1, 8), kernels)[0]


@pytest.fixture(scope="module")
def compiled():
    arguments = jnp.ones((3, 8, 16)), jnp.ones((5, 8, 8))
    return jax.jit(scanned_attention).lower(*arguments).compile()


def test_products_are_read_with_their_dimensions(compiled):
    batched, plain = sorted(hlo.products(compiled), key=lambda p: not p.batched)
    assert (batched.runs, batched.flops) == (1, 2 * 3 * 8 * 8 * 16)
    assert (plain.runs, plain.flops) == (5, 2 * 24 * 8 * 8)
    assert batched.dimensions.batch == ((0,), (0,)) and plain.dimensions.batch[0] == ()
    assert plain.shapes == ((24, 8), (8, 8), (24, 8))
    for product in (batched, plain):
        left, right = product.operands[:2]
        summed = product.dimensions.contracting
        assert [left.shape[i] for i in summed[0]] == [right.shape[i] for i in summed[1]]


def test_a_layout_is_read_from_the_longest_stride():
    line = "f32[2,3]{0,1} dot(f32[2,4]{1,0} %a, f32[4,3]{0,1} %b)"
    text = f"""ENTRY main (a: f32[2,4], b: f32[4,3]) -> f32[2,3] {{
  ROOT d = {line}, lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}"""
    (product,) = hlo.products_of(text)
    assert [operand.order for operand in product.operands] == [(0, 1), (1, 0), (1, 0)]
    assert product.flops == 2 * 2 * 3 * 4


def test_a_timed_product_stays_in_its_loop_without_copies(compiled):
    for product in hlo.products(compiled):
        work = Work(product.operands, product.dimensions)
        arrays = [jnp.ones(shape) for shape in product.shapes]
        alone = looped(work, 7).lower(*arrays).compile()
        (single,) = hlo.products(alone)
        assert (single.runs, single.flops) == (7, product.flops)
        assert single.batched == product.batched
        copies = re.findall(r"= f32\[\S+ copy\(", alone.as_text() or "")
        assert not copies


def test_the_ideal_time_counts_each_run_by_the_fastest_library(compiled):
    products = hlo.products(compiled)
    doubled = [*products, *products]
    assert [runs for _, runs in distinct(doubled).values()] == [
        2 * product.runs for product in products
    ]
    steps = []
    times = time_products(products, lambda: steps.append(1) or 0.25, rounds=2)
    assert len(steps) == 2 and times["step"] == 0.25
    for row in times["products"]:
        assert row["library_seconds"].keys() == {"step", "xla", "numpy"}
        assert row["library_seconds"]["step"] == row["seconds"]
    for kind in (True, False):
        fastest = sum(
            row["runs"] * min(row["library_seconds"].values())
            for row in times["products"]
            if row["batched"] is kind
        )
        name = "batched" if kind else "plain"
        assert times[name] == pytest.approx(fastest)
        alone = times["libraries"]["step"][name]["seconds"]
        assert alone == pytest.approx(
            sum(
                row["runs"] * row["seconds"]
                for row in times["products"]
                if row["batched"] is kind
            )
        )
        for library in times["libraries"].values():
            assert times[name] <= library[name]["seconds"] * (1 + 1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_product_in_another_layout_is_the_same_product(layout):
    size = MatrixSize(batch=3, rows=4, depth=5, columns=6)
    work = stored_work(size, layout)
    random = np.random.default_rng(0)
    left, right = random.normal(size=(3, 4, 5)), random.normal(size=(3, 5, 6))
    arrays = [
        np.swapaxes(array, 1, 2) if exchanged else array
        for array, exchanged in zip((left, right), layout, strict=False)
    ]
    stored = arrays[::-1] if layout.result else arrays
    result = jax.lax.dot_general(stored[0], stored[1], work.dimensions)
    expected = np.swapaxes(left @ right, 1, 2) if layout.result else left @ right
    np.testing.assert_allclose(result, expected, rtol=1e-4)
    assert result.shape == stored_shapes(size, layout)[2]


def test_products_of_attention_have_one_size_in_every_library():
    order = (0, 1, 2, 3)
    work = Work(
        (
            hlo.Operand("f32", (2, 7, 3, 5), order),
            hlo.Operand("f32", (2, 9, 3, 5), order),
            hlo.Operand("f32", (2, 3, 7, 9), order),
        ),
        hlo.Dimensions(((3,), (3,)), ((0, 2), (0, 2))),
    )
    size = size_of(work)
    assert size == MatrixSize(batch=6, rows=7, depth=5, columns=9)
    assert size.flops == 2 * 6 * 7 * 5 * 9
    for prepare in (prepare_numpy, prepare_xla):
        prepare(size, LAYOUTS[0])()


def test_traffic_counts_the_slices_of_a_loop():
    kernels = jax.ShapeDtypeStruct((50, 64, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)

    def layers(x, kernels):
        return jax.lax.scan(lambda x, k: (x @ k, None), x, kernels)[0]

    program = jax.jit(layers).lower(x, kernels).compile()
    moved = traffic(program.as_text() or "")
    product = 4 * (64 * 64 + 2 * 8 * 64)  # its kernel, its input and its result
    assert moved.products == 50 * product
    # A loop may copy each layer's kernel, but must not read all kernels 50 times.
    assert moved.rest < 4 * kernels.size * 4


def test_traffic_of_an_operation_is_its_operands_and_its_result():
    text = """ENTRY main (a: f32[10,20], b: f32[10,20]) -> bf16[10,20] {
  %a = f32[10,20]{1,0} parameter(0)
  %b = f32[10,20]{1,0} parameter(1)
  %s = f32[10,20]{1,0} add(%a, /*index=1*/%b)
  ROOT %c = bf16[10,20]{1,0} convert(%s)
}"""
    assert traffic(text) == (0, 200 * (3 * 4) + 200 * (4 + 2))


@pytest.mark.parametrize("name", CASES)
def test_a_batch_has_the_labels_of_its_rows(name):
    case = CASES[name]
    rows, batch = make_rows(case), make_batch(make_rows(case))
    whole = name in HYBRIDS or name == "tiny"
    count = {"t5": 16, "gpt2": 64}.get(name, case.length if whole else 8)
    assert batch.loss_positions.shape == (case.batch, count)
    np.testing.assert_array_equal(batch.loss_weights, 1)
    picked = np.take_along_axis(batch.targets, batch.loss_positions, axis=1)
    np.testing.assert_array_equal(picked, rows.labels[:, -count:])
    assert not (picked == IGNORED).any()
    np.testing.assert_array_equal(batch.tokens, rows.tokens)
    assert make_prompt(case).shape == (case.prompt, width(case))


def test_the_first_token_is_not_predicted_without_a_prompt():
    bare = dataclasses.replace(CASES["tiny"], prompt=0)
    assert (make_rows(bare).labels[:, 0] == IGNORED).all()
    assert make_batch(make_rows(bare)).loss_positions[0].tolist() == [*range(1, 32)]


def make_rates(share: float) -> dict[str, dict[str, float]]:
    """Returns rates of a library whose products take `1 / share` milliseconds."""
    row = {"seconds": 1e-3 / share, "flops_per_second": share * 1e11}
    return {"plain": row, "batched": row}


def make_results(xla: float = 1.0) -> Results:
    """Returns plausible results.

    Args:
      xla: rate of XLA's large products relative to torch's.
    """

    def step(name: str, ours: float, peft: float) -> StepResult:
        return StepResult(
            case=name,
            losses={"ours": [9.0, 8.5, 8.0], "peft": [9.0, 8.5, 8.0]},
            seconds={"ours": [ours, 1.1 * ours, ours], "peft": [peft, peft, peft]},
            peak_bytes={"ours": 500_000_000, "peft": 2_000_000_000},
            ideal={
                "step": ours,
                "plain": 0.6 * ours,
                "batched": 0.1 * ours,
                "products": [],
                "libraries": {
                    "step": make_rates(0.9),
                    "xla": make_rates(0.95),
                    "torch": make_rates(1.0),
                },
                "traffic": {"products": 2_000_000, "rest": 500_000_000},
            },
        )

    steps = [
        step("llama_0", 0.2, 0.4),
        step("llama", 0.24, 2.4),
        step("llama_200", 0.28, 4.8),
        step("gpt2", 0.9, 4.1),
        step("t5", 2.0, 4.0),
        step("tiny", 0.012, 0.06),
    ]
    slow = Measure("first step of the second run", 6.0, 5.0, False, " s")
    startup = Outcome("startup", "from launch", {"second run, seconds": 6.0}, [slow])
    rates = {
        "libraries": {"xla": make_rates(xla), "torch": make_rates(1.0)},
        "memory_bytes_per_second": 1e10,
    }
    machine = {"processor": "a <fast> one", "cores": "2"} | describe_rates(rates)
    return Results(machine, steps, [startup], rates)


def test_measures_state_whether_their_limits_are_met():
    measures = {measure.name: measure for measure in make_results().measures()}
    assert measures["llama: PEFT's step / our step"].value == pytest.approx(10)
    assert measures["llama: our peak memory / PEFT's"].met
    assert measures["llama: our step / our step with P = 0"].value == pytest.approx(1.2)
    assert measures["t5: ideal time / our step"].value == pytest.approx(0.7)
    attention = measures["t5: rate of attention's products / torch's"]
    assert attention.value == pytest.approx(0.9) and attention.limit == 0.8
    assert [name for name, measure in measures.items() if not measure.met] == [
        "first step of the second run"
    ]


def test_limits_are_lower_where_the_compilers_products_are_slow():
    for xla, limit in ((0.79, 6.0), (0.81, 9.0)):
        measures = {x.name: x for x in make_results(xla).measures()}
        assert measures["llama: PEFT's step / our step"].limit == limit


def test_a_step_is_divided_into_products_traffic_and_the_rest():
    results = make_results()
    parts = results.roofline(results.steps[1])
    assert parts is not None
    # 0.24 s; 70 % of it products; 500 MB at 10 GB/s take 0.05 s.
    assert parts.products == pytest.approx(0.168)
    assert parts.traffic == pytest.approx(0.05)
    assert parts.rest == pytest.approx(0.022)
    assert dataclasses.replace(results, rates=None).roofline(results.steps[1]) is None


def test_every_table_names_the_processor_and_its_rates():
    results = make_results()
    line = caption(results.machine)
    assert line.startswith("a <fast> one; large products XLA 100, torch 100 GFLOP/s")
    assert markdown(results).count(line) == len(sheets(results))


def test_metrics_that_disagree_are_not_compared():
    check_metrics("loss", {"ours": 1.5004, "peft": 1.5})
    with pytest.raises(DisagreementError, match=r"our loss is 1\.6"):
        check_metrics("loss", {"ours": 1.6, "peft": 1.5})


def test_ratios_are_of_steps_of_the_same_turn():
    # The machine is three times as slow in the second turn; the ratio is unchanged.
    assert median_ratio([2.0, 6.0, 2.0], [1.0, 3.0, 1.0]) == 2.0


def test_growth_needs_all_lengths_in_one_run():
    results = make_results()
    assert results.growth()["peft"]["llama_200"] == pytest.approx(12)
    assert dataclasses.replace(results, steps=results.steps[1:]).growth() == {}


def test_json_and_markdown_contain_every_case_and_the_machine():
    results = make_results()
    written = json.loads(json.dumps(as_json(results)))
    assert [step["case"] for step in written["steps"]] == [
        step.case for step in results.steps
    ]
    assert written["steps"][1]["seconds"]["ours"][1] == pytest.approx(1.1 * 0.24)
    text = markdown(results)
    for sheet in sheets(results):
        for row in sheet.rows:
            assert "| " + " | ".join(row) + " |" in text
    assert "- processor: a <fast> one" in text


def test_the_page_is_well_formed_and_self_contained():
    text = page(make_results())
    body = text[text.index("<body>") : text.index("</html>")]
    root = ElementTree.fromstring(body)
    assert len(list(root.iter("svg"))) == 4
    assert "11 of 12 limits" in "".join(root.itertext())
    assert "a <fast> one" in "".join(root.itertext())
    assert "http" not in text and "<script" not in text and "src=" not in text


def test_sides_that_disagree_are_not_compared():
    check_agreement("llama", {"ours": [9.0, 8.0], "peft": [9.0005, 8.0]})
    with pytest.raises(DisagreementError, match=r"at step 2 our loss is 8\.0"):
        check_agreement("llama", {"ours": [9.0, 8.0], "peft": [9.0, 8.1]})
    with pytest.raises(DisagreementError):
        check_agreement("llama", {"ours": [float("nan")], "peft": [9.0]})


SERVER = """
from scripts.bench.workers import serve
steps = []
def step():
    steps.append(1)
    print("this is no answer")
    if len(steps) == 3:
        raise RuntimeError("out of steps")
    return {"seconds": len(steps), "loss": {loss}}
serve({"step": step})
"""


def test_workers_take_turns_and_report_their_errors():
    with (
        Worker("one", [sys.executable, "-c", SERVER.replace("{loss}", "1")]) as one,
        Worker("two", [sys.executable, "-c", SERVER.replace("{loss}", "2")]) as two,
    ):
        turns = take_turns({"one": one, "two": two}, rounds=2)
        assert [turn.seconds for turn in turns["one"]] == [1, 2]
        assert [turn.loss for turn in turns["two"]] == [2, 2]
        with pytest.raises(
            WorkerError, match=r"one exited at 'step'(.|\n)*out of steps"
        ):
            one.ask("step")


@pytest.mark.parametrize(
    "options",
    [("tiny",), ("--ideal_rounds", "0"), ("llama_0", "--ideal_rounds", "0")],
    ids=["ideal_time", "all_cases", "no_prompt"],
)
def test_several_devices_need_cases_with_a_prompt(options, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "--devices", "2", *options])
    with pytest.raises(SystemExit):
        main()
    assert "needs --ideal_rounds 0 and cases with a prompt" in capsys.readouterr().err


def test_random_rows_are_reproducible():
    for case in CASES.values():
        np.testing.assert_array_equal(make_rows(case).tokens, make_rows(case).tokens)
        assert make_rows(case).tokens.max() < case.config["vocab_size"]
