"""Our side of the GPU benchmark's decoding: rows behind one soft prompt."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import describe, split
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.request import Request
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.families.hf_folder import find_recipes
from prompt_tuning.families.llama import llama_settings
from prompt_tuning.models.build import build_model
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.settings.pretrained import Pretrained
from scripts.bench.gpu_shapes import DecodingCase
from scripts.bench.gpu_step import model_config, peak_bytes, random_parameters
from scripts.bench.gpu_timing import time_rows


def measure_decoding(case: DecodingCase, weights: str, compute: str) -> dict[str, Any]:
    """Measures how fast a random model continues one row, and many.

    Args:
      case: the shape and the sizes.
      weights: dtype of the frozen weights.
      compute: dtype of the computation.
    """
    config = model_config(case.shape, compute_dtype=compute)
    with tempfile.TemporaryDirectory() as folder:
        write_hollow(Path(folder), config)
        source = Pretrained(
            checkpoint=folder, compute_dtype=compute, parameter_dtype=weights
        )
        prompt = functools.partial(SoftPrompt, length=case.prompt)
        model = open_pretrained(source, Tuning(prompt=prompt), key=jax.random.key(0))
        parameters = random_parameters(model.plan.abstract)
    random = np.random.default_rng(0)
    results = {}
    for rows in case.rows:
        shape = (rows, case.length)
        ids = random.integers(3, case.shape.vocabulary, shape).tolist()
        engine = DecodingEngine(
            model,
            parameters,
            slots=rows,
            length=case.length + case.new_tokens,
            chunk=case.length,
            together=min(rows, case.together),
        )
        sampling = Sampling(new_tokens=case.new_tokens, ignores_end=True)
        requests = [Request(ids=row, sampling=sampling) for row in ids]
        results[str(rows)] = time_rows(
            case, rows, functools.partial(engine.run, requests)
        )
    return {"title": case.title, "rows": results, "peak_bytes": peak_bytes()}


def write_hollow(folder: Path, config: ModelConfig) -> None:
    """Writes a Llama folder whose file has names and shapes, and a hole for numbers.

    It takes no room on the disk, however large the model is.
    """
    _, abstract = describe(
        lambda key: split(build_model(key, config)), jax.random.key(0)
    )
    header, end = {}, 0
    for path, recipe in find_recipes(config).items():
        leaf = abstract[path]
        # Files have one array per layer; a kernel's axes are reversed.
        shape = leaf.shape[:0:-1] if recipe.stacked else leaf.shape
        for name in recipe.sources:
            begin, end = end, end + 2 * int(np.prod(shape))
            offsets = {"data_offsets": [begin, end]}
            header[name] = {"dtype": "BF16", "shape": list(shape), **offsets}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(llama_settings(config)))
