"""Runs the examples in the docstrings of the public names."""

import dataclasses
import doctest
import functools
import inspect
import json
from pathlib import Path

import jax
import numpy
import optax
import pytest

import prompt_tuning as pt

PAIRS = [
    (f"{word}=", word[1:])
    for word in ["apple", "bread", "chair", "dance", "eagle", "flame", "grape", "house"]
]
METHODS = ("attach", "batches", "embed", "generate", "load_adapter", "loglikelihood")
METHODS += ("partition", "prompt_vectors", "stream", "with_parameters")
DOCUMENTED = {name: getattr(pt, name) for name in pt.__all__ if name != "__version__"}
DOCUMENTED |= {f"Model.{name}": getattr(pt.Model, name) for name in METHODS}


@pytest.fixture(scope="module")
def known():
    """What the examples take for granted, besides `train.jsonl`."""
    model = pt.load("bundled:skills-decoder")
    tuned = pt.tune(model, pt.SoftPrompt(length=5), PAIRS, steps=2, progress=False)
    run = pt.Run(
        directory="run",
        model=model.run.model,
        prompt=functools.partial(pt.SoftPrompt(length=5).factory, length=5),
        groups=[pt.ParameterGroup([".*/prompt/.*"], pt.adafactor()).build()],
        data=pt.DataSource(files="train.jsonl").build(),
        steps=2,
    )
    modules = {m.__name__: m for m in (dataclasses, functools, jax, numpy, optax)}
    names = {"pt": pt, "model": model, "tuned": tuned, "run": run, "pairs": PAIRS}
    return names | modules


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_the_example_of_a_docstring_runs(name, known, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"prompt": p, "completion": c}) for p, c in PAIRS]
    Path("train.jsonl").write_text("\n".join(rows))
    text = inspect.getdoc(DOCUMENTED[name]) or ""
    test = doctest.DocTestParser().get_doctest(text, dict(known), name, None, 0)
    assert test.examples
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
    assert report == [], "".join(report)
