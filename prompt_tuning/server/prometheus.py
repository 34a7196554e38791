"""Metrics in Prometheus' text format."""

from collections.abc import Mapping

from prompt_tuning.decoding.engine_metrics import EngineMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
HELP = {
    "slots": ("gauge", "number of slots"),
    "active": ("gauge", "rows that generate"),
    "queued": ("gauge", "rows that wait for a slot"),
    "requests": ("counter", "requests submitted to the engine"),
    "finished": ("counter", "rows that ended by themselves"),
    "cancelled": ("counter", "rows whose client went away"),
    "given_tokens": ("counter", "tokens of submitted texts"),
    "new_tokens": ("counter", "generated tokens"),
    "tokens_per_second": ("gauge", "generated tokens per second, latest steps"),
    "first_token_seconds": ("gauge", "mean time to the first token, latest rows"),
    "key_value_bytes": ("gauge", "bytes of keys and values, used or not"),
}


def prometheus_text(metrics: EngineMetrics, statuses: Mapping[int, int]) -> str:
    """Returns the metrics of an engine and the counts of answers by status."""
    lines = []
    for name, (kind, text) in HELP.items():
        label = f"prompt_tuning_{name}" + ("_total" if kind == "counter" else "")
        lines += [f"# HELP {label} {text}", f"# TYPE {label} {kind}"]
        lines.append(f"{label} {getattr(metrics, name)}")
    label = "prompt_tuning_answers_total"
    lines += [f"# HELP {label} HTTP answers by status", f"# TYPE {label} counter"]
    lines += [f'{label}{{status="{x}"}} {n}' for x, n in sorted(statuses.items())]
    return "\n".join(lines) + "\n"
