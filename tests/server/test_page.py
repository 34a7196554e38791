"""The page in a headless Chromium, served by the command."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.decoding.sampling_settings import Sampling
from tests.support.headless_browser import HeadlessBrowser, find_browser

TEXT = "reverse: abc="
WIDTH = 128
pytestmark = [
    pytest.mark.skipif(find_browser() is None, reason="Chromium is not installed"),
    pytest.mark.skipif(
        importlib.util.find_spec("uvicorn") is None,
        reason="the extra serve is not installed",
    ),
]


@pytest.fixture
def prompt(tmp_path):
    file = tmp_path / "prompt.npy"
    np.save(file, np.random.default_rng(1).normal(size=(3, WIDTH)).astype("f4"))
    return file


@pytest.fixture
def address(prompt):
    command = [sys.executable, "-m", "prompt_tuning", "serve", "--port=0"]
    command += ["--model=bundled:skills-decoder", f"--adapter=tuned={prompt}"]
    command += ["--slots=4"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    with process:
        line = next((line for line in process.stdout if "http://" in line), "")
        yield line[line.index("http://") :].split()[0]
        process.terminate()


@pytest.mark.slow
def test_both_answers_stream_and_show_probabilities(address, prompt, tmp_path):
    program = find_browser()
    assert program is not None
    model = pt.load("bundled:skills-decoder")
    model.load_adapter("tuned", prompt)
    browser = HeadlessBrowser(program, tmp_path / "profile")
    try:
        browser.send("Page.navigate", url=address)
        browser.wait("document.querySelectorAll('#adapter option').length === 1")
        browser.evaluate(
            f"document.getElementById('text').value = '{TEXT}';"
            "document.getElementById('tokens').value = 6;"
            "document.getElementById('go').click()"
        )
        for column in (0, 1):
            note = f"document.getElementById('note{column}').textContent"
            browser.wait(f"{note}.includes('ended by')")
        sampling = Sampling(new_tokens=6)
        for column, adapter in enumerate((None, "tuned")):
            element = f"document.getElementById('text{column}')"
            text = browser.evaluate(f"{element}.textContent")
            (expected,) = model.generate(TEXT, adapters=[adapter], sampling=sampling)
            assert text == expected.text
        tip = browser.evaluate("document.querySelector('#text0 span').dataset.tip")
        assert '%  "c"  <' in tip
    finally:
        browser.close()
