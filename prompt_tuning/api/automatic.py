"""The method "auto" of `tune`: sweep a few methods briefly, then train the best one.

`train --method auto` does the same on the command line, with the same candidates, steps
and choice.
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
from prompt_tuning.training.epochs import steps_of_epochs
from prompt_tuning.training.member_checks import check_compatible
from prompt_tuning.training.opening import open_members
from prompt_tuning.training.progress import python_reporter
from prompt_tuning.training.run_directory import hold_run
from prompt_tuning.training.run_plan import plan_run
from prompt_tuning.training.sweep.candidates import (
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
from prompt_tuning.training.sweep.sweep_run import Sweep, SweepMember, train_sweep
from prompt_tuning.training.sweep.sweep_summary import (
    SweepSummary,
    summarize,
    write_summary,
)

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
    """Sweeps the candidates, unless done before, and returns the best one's request.

    Each method gets an equal share of the remaining budget. If its time runs out, a
    sweep is judged by the results so far.

    Args:
      base: the frozen model.
      make_request: `tune_request` with all arguments but the methods.
      epochs: length of the run, unless the request gives it in steps.
      budget: seconds for all sweeps together; None for `BUDGET`.
      progress: whether to show a progress bar and the choice.

    Raises:
      InputError: if a setting is given that "auto" chooses, there are no held-out data,
        the model or the data cannot be used, or the directory has a choice made with
        other settings.
      NotFiniteError: if all candidates diverge.
      KeyboardInterrupt: if a signal stops a sweep; its state is saved.
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
    settings = {k: repr(x) for k, x in sorted(fields.items()) if k != "directory"}
    settings["epochs"] = repr(epochs)
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
                method, rate = chosen_before(file, settings)
            else:
                steps = run.steps if epochs is None else steps_of_epochs(run, epochs)
                # Data in memory is written once, and the candidates read its files.
                files = {name: fields[name] for name in ("data", "evaluation")}
                candidates = functools.partial(make_request, **files)
                seconds = BUDGET if budget is None else budget
                method, rate = _compare(base, candidates, steps, seconds, progress)
                choice = {"method": method, "learning_rate": rate, "given": settings}
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
    """Sweeps the candidates and returns the best method and its learning rate."""
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
    """Returns a method's request for each learning rate."""
    arguments = make_request.keywords
    settings = {"steps": steps, "evaluate_every": max(1, steps // EVALUATIONS)}
    folder = arguments["directory"] / FOLDER / method
    return {
        rate: make_request(
            [SETTINGS[method]],
            learning_rate=_schedule(rate),
            directory=folder / f"learning_rate={rate:g}",
            settings=arguments["settings"] | settings,
        )
        for rate in candidate_rates(method)
    }


def _sweep(
    base: Model, requests: Mapping[float, TuneRequest], seconds: float, progress: bool
) -> SweepSummary:
    """Trains one method's candidates until their time is up."""
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
