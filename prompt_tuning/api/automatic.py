"""`tune` with the method "auto": short sweeps of some methods, whose winner is trained.

It is `train --method auto` for Python: the candidates, their steps and the choice are
the same.
"""

import functools
import json
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prompt_tuning.api.model import Model
from prompt_tuning.config.deferred_factories import Configured
from prompt_tuning.config.operative_config import operative_config
from prompt_tuning.config.python_runs import TuneRequest, remove
from prompt_tuning.core.atomic_files import replace_file
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_value
from prompt_tuning.core.number_ranges import PositiveNumber
from prompt_tuning.data.rows.python_rows import naming_rows
from prompt_tuning.sweep.candidates import (
    BUDGET,
    CHOICE_FILE,
    EVALUATIONS,
    FOLDER,
    METHODS,
    candidate_rates,
    candidate_steps,
    chosen_before,
    winner,
)
from prompt_tuning.sweep.sweep_run import Sweep, SweepMember, train_sweep
from prompt_tuning.sweep.sweep_summary import SweepSummary, summarize, write_summary
from prompt_tuning.training.epochs import steps_of_epochs
from prompt_tuning.training.member_checks import check_compatible
from prompt_tuning.training.opening import open_members
from prompt_tuning.training.progress import python_reporter
from prompt_tuning.training.run_directory import hold_run
from prompt_tuning.training.run_plan import plan_run

SETTINGS: Mapping[str, Configured] = {
    "soft": Configured("SoftPrompt", {"length": 20}),
    "prefix": Configured("KeyValuePrefix", {"length": 20}),
    "lora": Configured("LoRA"),
}


def choose(
    base: Model,
    make_request: "functools.partial[TuneRequest]",
    epochs: int | float | None,
    budget: float | int | None,
    progress: bool,
) -> TuneRequest:
    """Sweeps the candidates, unless that is done, and returns the request of the best.

    Each method gets an equal share of what is left of the budget. A sweep that its
    share cuts is compared by what it has reached.

    Args:
      base: the frozen model.
      make_request: `tune_request` with all arguments besides the methods.
      epochs: length of the run, if it is not given in steps.
      budget: seconds of all sweeps together; None for `BUDGET`.
      progress: whether to show a progress bar, and the choice.

    Raises:
      InputError: for settings that this chooses, without held-out data, if the model or
        the data cannot be used, or if the directory has the choice of other settings.
      NotFiniteError: if all candidates diverge.
      KeyboardInterrupt: if a signal stops a sweep, which has saved its state.
    """
    check_value("budget", budget, PositiveNumber | None)
    for name in ("learning_rate", "optimizer"):
        if make_request.keywords[name] is not None:
            raise InputError(
                f"{name} contradicts the method 'auto', which chooses it: name the "
                "method too, or leave both out"
            )
    request = make_request([SETTINGS[METHODS[0]]])
    fields = request.settings.parameters
    given = {k: repr(x) for k, x in sorted(fields.items()) if k != "directory"}
    given["epochs"] = repr(epochs)
    try:
        with naming_rows(request.arguments):
            run = request.read()
            if run.evaluation is None:
                raise InputError(
                    "the method 'auto' compares methods by held-out data: give "
                    "evaluation=..."
                )
            file = Path(run.directory, FOLDER, CHOICE_FILE)
            if file.exists():
                method, rate = chosen_before(file, given)
            else:
                steps = run.steps if epochs is None else steps_of_epochs(run, epochs)
                # Data in memory is written once, and the candidates read its files.
                files = {name: fields[name] for name in ("data", "evaluation")}
                candidates = functools.partial(make_request, **files)
                seconds = BUDGET if budget is None else budget
                method, rate = _compare(base, candidates, steps, seconds, progress)
                choice = {"method": method, "learning_rate": rate, "given": given}
                replace_file(file, json.dumps(choice, indent=1) + "\n")
    except InputError:
        remove(request.written)
        raise
    if progress:
        print(f"the method 'auto' chose {method} at the learning rate {rate:g}")
    return make_request([SETTINGS[method]], learning_rate=_schedule(rate))


def _compare(
    base: Model,
    make_request: "functools.partial[TuneRequest]",
    steps: int,
    budget: float | int,
    progress: bool,
) -> tuple[str, float]:
    """Sweeps the candidates, and returns the best method and learning rate."""
    deadline = time.monotonic() + budget
    summaries: dict[str, SweepSummary] = {}
    for number, method in enumerate(METHODS):
        left = (deadline - time.monotonic()) / (len(METHODS) - number)
        if number and left <= 0:
            break
        try:
            requests = _requests(method, make_request, candidate_steps(steps))
            summaries[method] = _sweep(base, requests, left, progress)
        except InputError as problem:
            if not number:  # every model can have the first method
                raise
            warnings.warn(f"{method} is left out: {problem}", stacklevel=5)
    return winner(summaries)


def _schedule(rate: float) -> Configured:
    return Configured("warmup_linear_decay", {"peak": rate})


def _requests(
    method: str, make_request: "functools.partial[TuneRequest]", steps: int
) -> dict[float, TuneRequest]:
    """Returns the request of each learning rate of a method."""
    given = make_request.keywords
    settings = {"steps": steps, "evaluate_every": max(1, steps // EVALUATIONS)}
    folder = given["directory"] / FOLDER / method
    return {
        rate: make_request(
            [SETTINGS[method]],
            learning_rate=_schedule(rate),
            directory=folder / f"learning_rate={rate:g}",
            settings=given["settings"] | settings,
        )
        for rate in candidate_rates(method)
    }


def _sweep(
    base: Model, requests: Mapping[float, TuneRequest], seconds: float, progress: bool
) -> SweepSummary:
    """Trains the candidates of a method for some time."""
    deadline = time.monotonic() + seconds
    runs = {f"{rate:g}": request.read() for rate, request in requests.items()}
    check_compatible(runs)
    plans, configs = {}, {}
    for name, request in zip(runs, requests.values(), strict=True):
        # Open each member while gin holds its config: gin builds its prompt.
        plans[name] = plan_run(request.read())
        configs[name] = operative_config()
    trainers = open_members(plans, reuse=base.loaded)
    base.share(trainers[0].frozen)
    members = [
        SweepMember(name, {"learning_rate": name}, trainer, configs[name])
        for name, trainer in zip(runs, trainers, strict=True)
    ]
    directories = [Path(run.directory) for run in runs.values()]
    sweep = Sweep(directories[0].parent, tuple(members))
    run = sweep.run

    def over(step: int, _: Any) -> bool:
        return step >= run.evaluate_every and time.monotonic() > deadline

    with hold_run(str(sweep.directory), *directories):
        result, _ = train_sweep(
            sweep,
            make_reporter=lambda done: python_reporter(run.steps, done, progress),
            callbacks=[over],
        )
        if result.interrupted:
            raise KeyboardInterrupt
        summary = summarize(sweep)
        write_summary(sweep.directory, summary)
    return summary
