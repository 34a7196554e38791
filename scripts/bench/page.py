"""HTML page with charts, tables and the machine's description, without scripts."""

import html
from collections.abc import Sequence

from scripts.bench import charts
from scripts.bench.cases import CASES, GROWTH
from scripts.bench.machine import caption
from scripts.bench.report import Measure, Results
from scripts.bench.steps import SIDES
from scripts.bench.tables import MEGABYTE, Sheet, sheets

STYLE = """
:root { --ink: #1c2430; --soft: #667085; --line: #e3e7ee; --card: #ffffff;
  --page: #f5f7fa; --ours: #0f766e; --peft: #b9c2d0; --batched: #7cc4bb;
  --good: #0f766e; --bad: #b42318; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaf0; --soft: #98a2b3; --line: #2b3442; --card: #18202b;
    --page: #10161e; --ours: #2dd4bf; --peft: #526074; --batched: #1d7f75;
    --good: #2dd4bf; --bad: #f97066; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 28px; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 16px; margin: 0 0 14px; }
h2::first-letter { text-transform: uppercase; }
.lead { color: var(--soft); margin: 0 0 28px; max-width: 68ch; }
.cards { display: grid; gap: 20px; grid-template-columns: repeat(auto-fit,
  minmax(min(100%, 470px), 1fr)); align-items: start; }
section { background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; padding: 20px 22px; overflow-x: auto; }
.wide { grid-column: 1 / -1; }
.key { color: var(--soft); font-size: 13px; margin: -8px 0 12px; }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 2px;
  margin: 0 5px 0 14px; }
.key i:first-child { margin-left: 0; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif;
  fill: var(--ink); }
svg .soft { fill: var(--soft); } svg .strong { font-weight: 600; }
svg .end { text-anchor: end; } svg .middle { text-anchor: middle; }
svg .ours { fill: var(--ours); } svg .peft { fill: var(--peft); }
svg .batched { fill: var(--batched); } svg .rest { fill: var(--line); }
svg .limit { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 3 2; }
svg .axis { stroke: var(--line); } svg polyline { fill: none; stroke-width: 2.5; }
svg .line-ours { stroke: var(--ours); } svg .line-peft { stroke: var(--peft); }
table { border-collapse: collapse; width: 100%; font-size: 14px;
  font-variant-numeric: tabular-nums; }
th { text-align: right; color: var(--soft); font-weight: 500; }
td { text-align: right; border-top: 1px solid var(--line); }
th, td { padding: 7px 0 7px 16px; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0;
  white-space: normal; }
.note { color: var(--soft); font-size: 12px; margin: 10px 0 0; }
.yes { color: var(--good); font-weight: 600; }
.NO { color: var(--bad); font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px;
  margin: 0; font-size: 14px; }
dt { color: var(--soft); } dd { margin: 0; }
"""

KEY = '<p class="key"><i style="background:var(--ours)"></i>ours'
KEY_PEFT = f'{KEY}<i style="background:var(--peft)"></i>PEFT</p>'
KEY_SHARE = (
    f'{KEY.removesuffix("ours")}matrices<i style="background:var(--batched)"></i>'
    'batched products (attention)<i style="background:var(--line)"></i>'
    "everything else</p>"
)


def page(results: Results) -> str:
    """Returns the page as HTML."""
    # The table of limits is last on a terminal, where the end is seen first.
    tables = sheets(results)[::-1][:1] + sheets(results)[:-1]
    note = f'<p class="note">{html.escape(caption(results.machine))}</p>'
    parts = [
        *_charts(results),
        *(_section(sheet.title, _table(sheet) + note, wide=True) for sheet in tables),
        _section("the machine", _machine(results), wide=True),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>prompt_tuning: benchmark</title>\n<style>{STYLE}</style>\n</head>\n"
        "<body>\n<main>\n<h1>Prompt tuning: one training step compared</h1>\n"
        f'<p class="lead">{_lead(results)}</p>\n'
        f'<div class="cards">\n{"".join(parts)}</div>\n</main>\n</body>\n</html>\n'
    )


def _lead(results: Results) -> str:
    measures: Sequence[Measure] = results.measures()
    met = sum(measure.met for measure in measures)
    reached = f" {met} of {len(measures)} limits are met." if measures else ""
    return (
        "Both sides have the same random models, weights, batches and labels, and "
        "their losses agree. Their two processes take turns step by step on "
        f"{html.escape(results.machine.get('processor', 'one machine'))}."
        f"{reached}"
    )


def _charts(results: Results) -> list[str]:
    sections = []
    if results.steps:
        sections.append(
            _section(
                "time of a training step", KEY_PEFT + charts.pairs(_times(results))
            )
        )
        sections.append(
            _section(
                "peak memory, weights included",
                KEY_PEFT + charts.pairs(_sizes(results)),
            )
        )
    if growth := results.growth():
        lengths = [CASES[name].prompt for name in GROWTH]
        lines = {side: [1.0, *growth[side].values()] for side in SIDES}
        sections.append(
            _section(
                "growth of the step with the prompt",
                KEY_PEFT + charts.lines(lengths, lines),
            )
        )
    shares = [
        charts.Share(
            step.case,
            step.ideal["plain"] / step.ideal["step"],
            step.ideal["batched"] / step.ideal["step"],
            CASES[step.case].least_share,
        )
        for step in results.steps
        if step.ideal is not None
    ]
    if shares:
        sections.append(
            _section(
                "parts of our step's time",
                KEY_SHARE + charts.stacks(shares),
            )
        )
    return sections


def _times(results: Results) -> list[charts.Pair]:
    return [
        charts.Pair(
            step.case,
            tuple(step.median(side) for side in SIDES),
            tuple(f"{1e3 * step.median(side):,.0f} ms" for side in SIDES),
            f"{step.speedup:.1f}x",
        )
        for step in results.steps
    ]


def _sizes(results: Results) -> list[charts.Pair]:
    return [
        charts.Pair(
            step.case,
            tuple(step.peak_bytes[side] for side in SIDES),
            tuple(f"{step.peak_bytes[side] / MEGABYTE:,.0f} MB" for side in SIDES),
            f"{1 / step.memory:.1f}x",
        )
        for step in results.steps
    ]


def _section(title: str, body: str, *, wide: bool = False) -> str:
    kind = ' class="wide"' if wide else ""
    return f"<section{kind}>\n<h2>{html.escape(title)}</h2>\n{body}\n</section>\n"


def _table(sheet: Sheet) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in sheet.headings)
    rows = "".join(
        "<tr>" + "".join(_cell(text) for text in row) + "</tr>\n" for row in sheet.rows
    )
    return f"<table>\n<tr>{head}</tr>\n{rows}</table>"


def _cell(text: str) -> str:
    kind = f' class="{text}"' if text in ("yes", "NO") else ""
    return f"<td{kind}>{html.escape(text)}</td>"


def _machine(results: Results) -> str:
    rows = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>\n"
        for name, value in results.machine.items()
    )
    return f"<dl>\n{rows}</dl>"
