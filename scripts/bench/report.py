"""Results of the benchmark, the numbers that have limits, and JSON."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.bench.cases import CASES, GROWTH, MOST_GROWTH
from scripts.bench.steps import OURS, SIDES, StepResult, median_ratio

SLOW_PRODUCTS = 0.8
"""Share of torch's rate of large products below which XLA's are slow on a processor."""


@dataclasses.dataclass(frozen=True)
class Measure:
    """A measured number and its limit.

    Attributes:
      name: description of the number.
      value: measured value.
      limit: bound on the value.
      at_least: whether the limit is a lower bound, or else an upper bound.
      unit: unit after the numbers.
    """

    name: str
    value: float
    limit: float
    at_least: bool
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether the value is within the limit."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a case that is not a training step compared with PEFT's.

    Attributes:
      name: name of the case.
      title: description of the comparison.
      figures: measured numbers by description.
      measures: numbers with limits.
    """

    name: str
    title: str
    figures: Mapping[str, float]
    measures: Sequence[Measure]


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of a step by what bounds them.

    Attributes:
      step: the whole step.
      products: its matrix products at the ideal rate.
      traffic_bytes: bytes that all other operations read and write.
      traffic: seconds of this traffic at the rate of main memory. Negative `rest`
        means that part of the data stays in the processor's cache.
      rest: time that neither explains, including products slower than the ideal.
    """

    step: float
    products: float
    traffic_bytes: int
    traffic: float
    rest: float = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        rest = self.step - self.products - self.traffic
        object.__setattr__(self, "rest", rest)


@dataclasses.dataclass(frozen=True)
class Results:
    """All results of one run of the benchmark.

    Attributes:
      machine: description of the machine, the versions and the settings.
      steps: results of the cases compared step by step.
      outcomes: results of the other cases.
      rates: measured rates of the machine, see `rates.measure`; None if not measured.
    """

    machine: Mapping[str, str]
    steps: Sequence[StepResult]
    outcomes: Sequence[Outcome]
    rates: Mapping[str, Any] | None = None

    @property
    def slow_products(self) -> bool:
        """Whether XLA's large products are slow on this processor, next to torch's."""
        libraries = {} if self.rates is None else self.rates["libraries"]
        if "torch" not in libraries:
            return False
        xla, torch = (
            libraries[name]["plain"]["flops_per_second"] for name in ("xla", "torch")
        )
        return xla < SLOW_PRODUCTS * torch

    def growth(self) -> dict[str, dict[str, float]]:
        """Step time divided by the time without a prompt, by side and case.

        Empty unless the cases of `GROWTH` were measured in one rotation.
        """
        steps = {step.case: step for step in self.steps}
        if not set(GROWTH) <= steps.keys():
            return {}
        bare = steps[GROWTH[0]]
        return {
            side: {
                name: median_ratio(steps[name].seconds[side], bare.seconds[side])
                for name in GROWTH[1:]
            }
            for side in SIDES
        }

    def roofline(self, step: StepResult) -> "Roofline | None":
        """Divides the time of a step; None unless its products and memory were timed.

        The traffic is that of everything but the products, at the rate of a copy.
        """
        if step.ideal is None or self.rates is None:
            return None
        moved, rate = step.ideal["traffic"], self.rates["memory_bytes_per_second"]
        return Roofline(
            step=step.ideal["step"],
            products=step.ideal["plain"] + step.ideal["batched"],
            traffic_bytes=moved["rest"],
            traffic=moved["rest"] / rate,
        )

    def measures(self) -> list[Measure]:
        """Returns all measured numbers that have limits."""
        return [
            *(
                measure
                for step in self.steps
                for measure in step_measures(step, self.slow_products)
            ),
            *(
                Measure(
                    f"{name}: our step / our step with P = 0",
                    ratio,
                    limit.on(self.slow_products),
                    False,
                    "x",
                )
                for name, limit in MOST_GROWTH.items()
                if (ratio := self.growth().get(OURS, {}).get(name)) is not None
            ),
            *(measure for outcome in self.outcomes for measure in outcome.measures),
        ]


def step_measures(step: StepResult, slow_products: bool) -> list[Measure]:
    """Returns the measured numbers for which a case sets limits."""
    case = CASES[step.case]
    speedup, attention = (
        None if limit is None else limit.on(slow_products)
        for limit in (case.least_speedup, case.least_attention)
    )
    rows = (
        ("PEFT's step / our step", step.speedup, speedup, True, "x"),
        ("our peak memory / PEFT's", step.memory, case.most_memory, False, "x"),
        ("ideal time / our step", step.share, case.least_share, True, ""),
        (
            "rate of attention's products / torch's",
            step.attention_share,
            attention,
            True,
            "",
        ),
    )
    return [
        Measure(f"{step.case}: {name}", value, limit, at_least, unit)
        for name, value, limit, at_least, unit in rows
        if limit is not None and value is not None
    ]


def as_json(results: Results) -> dict[str, Any]:
    """Returns all results and derived values as plain data."""
    steps = [
        dataclasses.asdict(step)
        | {
            "title": CASES[step.case].title,
            "medians": {side: step.median(side) for side in SIDES},
            "speedup": step.speedup,
            "memory": step.memory,
            "share": step.share,
            "attention_share": step.attention_share,
            "roofline": None
            if (parts := results.roofline(step)) is None
            else dataclasses.asdict(parts),
        }
        for step in results.steps
    ]
    return {
        "machine": dict(results.machine),
        "rates": results.rates,
        "steps": steps,
        "growth": results.growth(),
        "outcomes": [dataclasses.asdict(outcome) for outcome in results.outcomes],
        "measures": [
            dataclasses.asdict(measure) | {"met": measure.met}
            for measure in results.measures()
        ],
    }
