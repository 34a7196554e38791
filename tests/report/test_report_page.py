"""The page: its numbers, its size, and that foreign text stays text."""

import dataclasses
import errno
import io
import json
import os
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import prompt_tuning as pt
from prompt_tuning.cli.finished_page import REPORT_FILE, write_finished_page
from prompt_tuning.cli.main import main
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.evaluation.token_outcomes import TokenOutcomes
from prompt_tuning.report.page import render_page
from prompt_tuning.report.recorded_run import RecordedRun
from prompt_tuning.report.token_marks import TokenMarks
from prompt_tuning.report.visible_text import visible
from prompt_tuning.settings.data_source import DataSource
from prompt_tuning.training.metrics_log import METRICS_FILE
from tests.support.headless_browser import HeadlessBrowser, find_browser
from tests.support.small_runs import clean_process, files, tune, write_pairs
from tests.support.staged_reports import (
    log_of,
    measurement,
    recorded,
    reported,
    result,
)

__all__ = ["clean_process", "files"]

NASTY = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>"
NASTY += "\"'`{{7*7}}\0\x1b[31m\u202eevil\u2066&amp;\ud800"
LARGEST = 2_000_000


class Cells(HTMLParser):
    """Texts of all cells of tables, row by row."""

    def __init__(self, html: str):
        super().__init__()
        self.rows: list[list[str]] = []
        self._open = False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
            self._open = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._open = False

    def handle_data(self, data):
        if self._open:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def run(files, tmp_path_factory) -> Path:
    """A finished run that holds eight pairs out."""
    folder = tmp_path_factory.mktemp("report")
    choices = {"Evaluation.exact_match": True, "Evaluation.new_tokens": 8}
    arguments = files.arguments(folder / "run", **choices, Run__evaluate_every=2)
    assert main(["train", *arguments]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def page(run) -> str:
    """The page of the run."""
    file = run.parent / "page.html"
    assert main(["report", str(run), "--output", str(file)]) == 0
    return file.read_text("utf-8")


@pytest.mark.slow
def test_training_ends_with_a_page_of_its_log(run, page):
    html = (run / REPORT_FILE).read_text("utf-8")
    assert f"prompt-tuning report {run}" in html and "alone" in html
    curves = [row for row in Cells(page).rows if row[0].isdigit() and len(row) == 2]
    own = Cells(html).rows
    assert curves and all(row in own for row in curves)


def test_a_run_has_succeeded_even_if_its_page_does_not_fit(run, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    shown = io.StringIO()
    monkeypatch.setattr(os, "fsync", full)
    write_finished_page(Console(file=shown, width=1000), run)
    assert "no page was written" in shown.getvalue()


def test_numbers_are_those_of_evaluate(run, page, capsys):
    capsys.readouterr()
    assert main(["evaluate", "--run", str(run), "--baseline"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [x.strip("│").split("│") for x in lines if x.startswith("│")]
    expected = {
        name.strip(): [" ".join(cell.split()) for cell in cells]
        for name, *cells in rows
    }
    assert expected.keys() == {"loss", "perplexity", "accuracy", "exact_match"}
    found = {
        row[0]: [" ".join(cell.split()) for cell in row[1:3]]
        for row in Cells(page).rows
        if len(row) == 4 and row[0] in expected
    }
    assert found == expected
    values = pt.load_tuned(run).evaluate()
    for name in ("loss", "accuracy", "exact_match"):
        assert found[name][0].split()[0] == f"{values[name]:.4f}"


def test_the_page_needs_no_network_and_is_valid(page, run):
    assert "http://" not in page and "https://" not in page
    assert page.startswith("<!doctype html>")
    assert page.index('class="verdict') < page.index("<svg")
    assert "best " in page and str(run) in page


def test_samples_pair_both_systems(run, page):
    predictions = run.parent / "predictions.jsonl"
    options = ["--baseline", "--predictions", str(predictions)]
    assert main(["evaluate", "--run", str(run), *options]) == 0
    lines = [json.loads(line) for line in predictions.read_text().splitlines()]
    both = {name: {} for name in ("tuned", "no prompt")}
    for line in lines:
        both[line["system"]][line["example"]] = line
    rows = {row[0]: row for row in Cells(page).rows if len(row) == 7}
    for number, tuned in both["tuned"].items():
        bare = both["no prompt"][number]
        gain = bare["scores"]["loss"] - tuned["scores"]["loss"]
        texts = [tuned["input"], tuned["target"], tuned["output"], bare["output"]]
        shown = [*map(visible, texts), f"{tuned['scores']['loss']:.4f}", f"{gain:.4f}"]
        assert rows[str(number)][1:] == shown


def test_tokens_have_the_losses_of_their_sample(page):
    content = page.partition('id="data">')[2].partition("</script>")[0]
    tokens = json.loads(content)["tokens"][0]
    rows = {row[0]: row for row in Cells(page).rows if len(row) == 7}
    assert tokens.keys() <= rows.keys() and len(tokens) == 8
    for number, (given, wanted) in tokens.items():
        assert "".join(x[0] for x in given) == f"<bos>{rows[number][1]}"
        assert "".join(x[0] for x in wanted) == f"{rows[number][2]}<eos>"
        assert {x[2] for x in given} == {0.0} and {x[3] for x in given} == {None}
        loss = np.mean([x[3] for x in wanted])
        gain = np.mean([x[4] for x in wanted]) - loss
        np.testing.assert_allclose(loss, float(rows[number][5]), atol=2e-4)
        np.testing.assert_allclose(gain, float(rows[number][6]), atol=2e-4)


def test_tokens_have_the_objective_if_it_is_a_number_of_json(files):
    model, data = (
        pt.load("bundled:skills-decoder").prompted,
        DataSource(files=str(files.held_out)),
    )
    examples = load_examples(data, model.interface)
    learned = np.flatnonzero(examples[0].weights)
    losses = np.full(len(learned), np.nan)
    losses[0] = 1.5
    zeros = np.zeros(len(learned), int)
    ones = np.ones(len(learned))
    outcomes = TokenOutcomes(1, zeros, ones, ones, zeros > 0, objective=losses)
    marks = TokenMarks(examples, model.needed_tokenizer(), outcomes, None)[0]
    found = [token.nats for token in marks.wanted]
    assert found == [1.5] + [None] * (len(found) - 1)


def test_python_writes_the_same_page(run, page, tmp_path):
    file = pt.load_tuned(run).write_report(tmp_path / "page.html")
    again = Cells(file.read_text("utf-8")).rows
    seconds = "seconds to evaluate"
    assert [x for x in again if not x[0].startswith(seconds)] == [
        x for x in Cells(page).rows if not x[0].startswith(seconds)
    ]


def test_an_existing_page_is_kept(run, tmp_path, capsys):
    file = tmp_path / "page.html"
    file.write_text("mine")
    assert main(["report", str(run), "--output", str(file)]) == 2
    assert file.read_text() == "mine"
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "a")]) == 2
    assert "no run in" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_without_evaluation_says_how_to_add_it(files, tmp_path, capsys):
    choices = {"Run.evaluation": None, "Run.steps": 2}
    assert tune(files, tmp_path / "run", **choices) == 0
    arguments = ["report", str(tmp_path / "run"), "--output", str(tmp_path / "a.html")]
    assert main(arguments) == 0
    html = (tmp_path / "a.html").read_text("utf-8")
    assert "no held-out data" in html and "--eval FILE" in html
    held_out = write_pairs(tmp_path / "eval.jsonl", [("a=", "A"), ("b=", "B")])
    assert main([*arguments, "--force", "--eval", str(held_out)]) == 0
    assert "n = 2" in (tmp_path / "a.html").read_text("utf-8")


def test_a_damaged_log_is_read_as_far_as_it_goes(run, tmp_path):
    shutil.copy(run / "config.gin", tmp_path)
    lines = (run / METRICS_FILE).read_text().splitlines()
    broken = [*lines[:4], '{"step": 4, "lo', "[1]", '{"step": 5, "loss": "x"}']
    (tmp_path / METRICS_FILE).write_text("\n".join(broken))
    found = RecordedRun.read(tmp_path)
    assert found.curve("loss")[0] == RecordedRun.read(run).curve("loss")[0][:3]
    (damage, checkpoint) = found.damage
    assert "3 damaged lines" in damage and "line 5 of" in damage
    assert "no checkpoint" in checkpoint
    html = render_page([reported(found)])
    assert "3 damaged lines" in html and "the run has no checkpoint" in html


def test_different_data_are_a_warning_on_the_first_line():
    runs = [
        reported(recorded(directory=name, data={"evaluation": {"a": 64 * name}}))
        for name in "ab"
    ]
    html = render_page(runs)
    warning = html.index("measured on different held-out data")
    assert warning < html.index("<h1>")
    assert "different" not in render_page([runs[0], runs[0]])


def long_run():
    """A run of 30,000 logged steps, with a peak at one of them."""
    random, names = np.random.default_rng(0), ("accuracy", "gradient_norm")
    names += ("prompt_norm", "tokens_per_second", "padding_share", "data_wait_share")
    losses = random.random(30_000) + 1
    losses[17_321] = 977.125
    others = {name: random.random(30_000) for name in names}
    return recorded(log_of(losses.tolist(), **others), steps=30_000)


def nasty_page() -> str:
    """A page in which every foreign text is an attack."""
    lines = [
        {
            "system": system,
            "example": number,
            **dict.fromkeys(("input", "target", "output", "category"), NASTY),
            "scores": {"loss": 1.0, "exact_match": 0.0},
        }
        for system in ("tuned", "no prompt")
        for number in range(3)
    ]
    one = result(np.ones(3, bool))
    measured = measurement(one, one, lines, token=NASTY)
    data = {"train": {NASTY: NASTY}}
    log = log_of([3, 2], **{NASTY: [1, 2]})
    run = recorded(log, NASTY.replace("\0", "\x01"), NASTY, data, steps=5)
    run = dataclasses.replace(run, damage=[NASTY])
    return render_page([reported(run, measured), reported(run)])


def test_foreign_text_is_text():
    html = nasty_page()
    assert "<script>window" not in html and "<img" not in html
    assert "[U+0000]" in html and "[U+202E]" in html and "[U+D800]" in html
    assert not {*map(ord, html)} & {0, 0x1B, 0x202E, 0x2066, 0xD800}
    assert "{{7*7}}" in html.replace("&#39;", "'")
    html.encode()


def test_a_long_run_is_small_and_keeps_its_peak():
    html = render_page([reported(long_run())])
    assert len(html.encode()) < LARGEST
    assert "977.125" in html


@pytest.mark.skipif(find_browser() is None, reason="Chromium is not installed")
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_in_a_browser(page, tmp_path, width):
    program = find_browser()
    assert program is not None
    browser = HeadlessBrowser(program, tmp_path / "profile")
    try:
        for domain in ("Page", "Runtime", "Log", "Network"):
            browser.send(f"{domain}.enable")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.send("Emulation.setDeviceMetricsOverride", **size)
        for name, html in (("page", page), ("nasty", nasty_page())):
            file = tmp_path / f"{name}.html"
            file.write_text(html, "utf-8")
            browser.send("Page.navigate", url=file.as_uri())
            browser.wait("document.querySelector('th button') !== null")
            assert browser.evaluate("window.hacked === undefined")
            wide = "document.documentElement.scrollWidth"
            assert browser.evaluate(wide) <= width
            if name == "page":
                check_controls(browser)
        urls = [
            event["params"]["request"]["url"]
            for event in browser.events
            if event["method"] == "Network.requestWillBeSent"
        ]
        assert urls and all(url.startswith("file://") for url in urls)
        bad = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        assert [x for x in browser.events if x["method"] in bad] == []
    finally:
        browser.close()


def check_controls(browser: HeadlessBrowser) -> None:
    """Reads a value by the keyboard, sorts the samples and filters them."""
    browser.evaluate(
        "const p = document.querySelector('svg.panel');"
        "p.dispatchEvent(new KeyboardEvent('keydown', {key: 'Home'}))"
    )
    text = browser.evaluate("document.querySelector('.values').textContent")
    assert "at step 1" in text
    column = (
        "[...document.querySelectorAll('.samples tbody tr:not([hidden])')]"
        ".map(row => +row.cells[5].textContent)"
    )
    button = "[...document.querySelectorAll('.samples th button')][5].click()"
    browser.evaluate(button)
    losses = browser.evaluate(column)
    assert losses == sorted(losses) and len(losses) == 8
    browser.evaluate(button)
    assert browser.evaluate(column) == losses[::-1]
    browser.evaluate(
        "const c = document.querySelector('select.color'); c.value = 'loss';"
        "c.dispatchEvent(new Event('change', {bubbles: true}))"
    )
    mark = "document.querySelector('.samples .by-loss').title"
    assert browser.evaluate(mark) == "special, weight 0, no loss"
    browser.evaluate(
        "const s = document.querySelector('.filter input'); s.value = 'no such text';"
        "s.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    assert browser.evaluate(column) == []
