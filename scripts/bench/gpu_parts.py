"""Measures parts of the GPU benchmark in one process; each prints a line of JSON.

    python -m scripts.bench.gpu_parts rates checks llama_soft:flash:nf4 [--smoke]

`gpu` starts it for each part, so that a part that runs out of memory ends alone.
"""

import argparse
import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from prompt_tuning.core.rematerialization import Rematerialization
from prompt_tuning.models import attention_choice
from scripts.bench import gpu_checks, plain_kernel, streaming
from scripts.bench.gpu_decoding import measure_decoding
from scripts.bench.gpu_shapes import decoding_case, find_cases
from scripts.bench.gpu_step import GpuStep, model_config

POLICIES = {
    "none": Rematerialization(),
    "attention": Rematerialization(policy="attention"),
    "nothing": Rematerialization(policy="nothing"),
    "nothing, offload": Rematerialization(policy="nothing", offload=True),
}

Result = dict[str, Any]


def say(text: str) -> None:
    """Prints a progress line."""
    print(f"  {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Runs the named parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        attention_choice.KERNELS.setdefault("cpu", lambda: plain_kernel.KERNEL)
    for part in options.parts:
        begun = time.perf_counter()
        result = find_part(part)(smoke=options.smoke)
        seconds = time.perf_counter() - begun
        print(json.dumps({"part": part, "took": seconds, **result}), flush=True)
    return 0


def find_part(name: str) -> Callable[..., Result]:
    """Returns the function of a part."""
    if name in PARTS:
        return PARTS[name]
    return functools.partial(measure_case, *name.split(":"))


def measure_case(
    name: str, attention: str, weights: str | None = None, *, smoke: bool
) -> Result:
    """Measures the steps of a case with one method of attention and type of weights."""
    case = find_cases(smoke)[name]
    chosen = "auto" if case.shape.family == "t5" else attention
    say(f"{case.title}: making weights")
    choices = _choices(smoke)
    if weights:
        choices["parameter_dtype"] = weights
    step = GpuStep(case, chosen, **choices)
    say("compiling, then measuring steps")
    result = step.measure(3) if smoke else step.measure()
    method = str(attention_choice.choose_attention(step.config))
    method += f", weights in {weights}" if weights else ""
    return {"attention": method, **result}


def decode(weights: str, *, smoke: bool) -> Result:
    """Measures decoding with one type of weights."""
    compute = "float32" if smoke else "bfloat16"
    say(f"decoding with weights in {weights}")
    case = decoding_case(smoke)
    return {"weights": weights, **measure_decoding(case, weights, compute)}


def _choices(smoke: bool) -> dict[str, Any]:
    """Returns the dtypes of a smoke run: CPUs compute slowly in bfloat16."""
    names = ("compute_dtype", "parameter_dtype") if smoke else ()
    return dict.fromkeys(names, "float32")


def measure_rates(smoke: bool) -> Result:
    """Measures the device's rate of bfloat16 products and of copies."""
    size, elements = (256, 2**16) if smoke else (8192, 2**30)
    key = jax.random.key(0)
    matrix = jax.random.normal(key, (size, size), jnp.bfloat16)
    numbers = jax.random.normal(key, (elements,), jnp.bfloat16)
    product = _fastest(jax.jit(lambda x: x @ x), matrix)
    copy = _fastest(jax.jit(lambda x: x + 1), numbers)
    device = jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return {
        "device": device.device_kind,
        "platform": device.client.platform_version.splitlines()[0],
        "jax": jax.__version__,
        "memory_limit": limit,
        "tflops": 2 * size**3 / product / 1e12,
        "gigabytes_per_second": 2 * numbers.nbytes / copy / 1e9,
    }


def _fastest(function: Callable[[jax.Array], jax.Array], argument: jax.Array) -> float:
    """Returns the seconds of a call: the least mean of ten calls, of three such."""
    function(argument).block_until_ready()
    means = []
    for _ in range(3):
        begun = time.perf_counter()
        for _ in range(10):
            result = function(argument)
        result.block_until_ready()
        means.append((time.perf_counter() - begun) / 10)
    return min(means)


def run_checks(smoke: bool) -> Result:
    """Compares the fused kernel with plain products, and models with the reference."""
    shape = next(iter(gpu_checks.family_cases(smoke).values())).shape
    config = model_config(shape, **_choices(smoke))
    choice = attention_choice.choose_attention(config)
    checks = []
    if choice.kernel is None:
        checks.append({"name": str(choice), "error": 0.0, "ok": False})
    else:
        for group in (gpu_checks.kernel_checks, gpu_checks.attention_checks):
            checks += _reported(group(choice.kernel, smoke))
    checks += _reported(gpu_checks.family_checks(smoke))
    return {"kernel": str(choice), "checks": checks}


def _reported(checks: Any) -> list[Result]:
    results = []
    for result in checks:
        word = "ok" if result["ok"] else "WRONG"
        say(f"{result['name']}: {word} ({result['error']:.1e})")
        results.append(result)
    return results


def measure_memory(smoke: bool) -> Result:
    """Compiles a step under several policies and counts its temporary memory."""
    case = find_cases(smoke)["llama_soft"]
    rows = {}
    for attention in ("flash", "reference"):
        for policy, remat in POLICIES.items():
            if attention == "reference" and policy != "none":
                continue
            say(f"{attention}, {policy}: compiling")
            step = GpuStep(case, attention, remat, **_choices(smoke))
            rows[f"{attention}, {policy}"] = step.temporary_bytes()
            del step
    return {"title": case.title, "temporary_bytes": rows}


def measure_pinned(smoke: bool) -> Result:
    """Measures a step whose weights are in the host's pinned memory."""
    case = find_cases(smoke)["llama_soft"]
    say("weights in pinned host memory")
    step = GpuStep(case, "flash", pinned=True, **_choices(smoke))
    return step.measure(3)


def measure_streaming(smoke: bool) -> Result:
    """Measures training with weights streamed from files, and on the device."""
    sizes = {"layers": 8, "width": 1792, "steps": 3}
    if smoke:
        sizes = {"layers": 2, "width": 64, "steps": 2}
    options = argparse.Namespace(**sizes, micro_batches=1, rows=8, length=512)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        options.checkpoint = folder
        say("writing a model")
        config = streaming.llama(options.layers, options.width)
        written = streaming.write_model(Path(folder), config)
        for weights in ("streamed", "device"):
            say(f"weights: {weights}")
            measured = streaming.measure(options, weights)
            names = ("losses", "seconds", "resident", "device")
            results[weights] = {name: measured[name] for name in names}
    return {"model_bytes": written, "by_location": results}


PARTS: dict[str, Callable[..., Result]] = {
    "rates": measure_rates,
    "checks": run_checks,
    "memory": measure_memory,
    "pinned": measure_pinned,
    "streaming": measure_streaming,
    "decode:bfloat16": functools.partial(decode, "bfloat16"),
    "decode:nf4": functools.partial(decode, "nf4"),
}

if __name__ == "__main__":
    sys.exit(main())
