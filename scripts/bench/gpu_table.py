"""The results of the GPU benchmark as Markdown."""

from collections.abc import Mapping
from typing import Any

from scripts.bench.markdown import markdown_table

GIB = 2**30


def markdown(results: Mapping[str, Any]) -> str:
    """Returns all results as Markdown tables."""
    parts = results["parts"]
    lines = ["# GPU benchmark", "", f"- date: {results['date']}"]
    lines.append(f"- python: {results['python']}")
    if results["smoke"]:
        lines.append("- smoke: tiny shapes, so the times mean nothing")
    rates = parts.get("rates", {})
    for name in ("device", "platform", "jax"):
        if name in rates:
            lines.append(f"- {name}: {rates[name]}")
    if rates:
        lines.append(
            f"- measured: {rates['tflops']:,.1f} TFLOP/s of bfloat16 products, "
            f"{rates['gigabytes_per_second']:,.0f} GB/s of copies"
        )
    lines += _checks(parts.get("checks"))
    lines += _steps(parts, rates.get("tflops"))
    lines += _decoding(parts)
    lines += _memory(parts)
    if results["failed"]:
        rows = [(name, why) for name, why in results["failed"].items()]
        lines += ["", "## Not measured", "", *markdown_table(("part", "reason"), rows)]
    return "\n".join(lines) + "\n"


def _checks(part: Mapping[str, Any] | None) -> list[str]:
    if part is None:
        return []
    rows = [
        (one["name"], f"{one['error']:.1e}", "yes" if one["ok"] else "NO")
        for one in part["checks"]
    ]
    return [
        "",
        f"## Checks of {part['kernel']}",
        "",
        *markdown_table(("check", "error", "ok"), rows),
    ]


def _steps(parts: Mapping[str, Any], rate: float | None) -> list[str]:
    rows = []
    for name, part in parts.items():
        case, _, method = name.partition(":")
        if "tflops" not in part or not method or name == "rates":
            continue
        share = f"{part['tflops'] / rate:.1%}" if rate else ""
        rows.append(
            (
                part["title"],
                "PEFT, " + part["attention"] if case == "peft" else part["attention"],
                f"{1e3 * part['seconds']:,.1f} ms",
                f"{part['tflops']:,.1f}",
                share,
                _size(part["peak_bytes"]),
            )
        )
    if not rows:
        return []
    headings = ("case", "attention", "step", "TFLOP/s", "share", "peak memory")
    return [
        "",
        "## One training step, medians",
        "",
        *markdown_table(headings, sorted(rows)),
    ]


def _decoding(parts: Mapping[str, Any]) -> list[str]:
    found = [part for name, part in parts.items() if name.endswith(":decode")]
    found += [part for name, part in parts.items() if name.startswith("decode:")]
    rows = []
    for part in found:
        for count, one in part["rows"].items():
            speed = f"{one['tokens_per_second']:,.0f}"
            rows.append((part["weights"], count, speed, _size(part["peak_bytes"])))
    if not rows:
        return []
    headings = ("weights", "rows", "new tokens/s", "peak memory")
    lines = ["", "## Decoding behind a soft prompt", "", found[0]["title"], ""]
    return [*lines, *markdown_table(headings, rows)]


def _memory(parts: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    if "memory" in parts:
        rows = [
            (name, _size(size))
            for name, size in parts["memory"]["temporary_bytes"].items()
        ]
        lines += ["", "## Temporary memory of a step", ""]
        lines += [
            parts["memory"]["title"],
            "",
            *markdown_table(("policy", "memory"), rows),
        ]
    rows = []
    if "pinned" in parts:
        one = parts["pinned"]
        cells = (f"{1e3 * one['seconds']:,.1f} ms", _size(one["peak_bytes"]))
        rows.append((one["title"], "pinned_host", *cells))
    for weights, one in parts.get("streaming", {}).get("by_location", {}).items():
        seconds = f"{1e3 * min(one['seconds'][1:]):,.1f} ms"
        rows.append(
            ("llama of 8 layers, float32", weights, seconds, _size(one["device"]))
        )
    if rows:
        headings = ("model", "weights", "step", "peak on the device")
        lines += ["", "## Weights elsewhere", "", *markdown_table(headings, rows)]
    return lines


def _size(size: int | None) -> str:
    return "" if size is None else f"{size / GIB:,.2f} GiB"
