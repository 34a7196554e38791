"""Check whether a page's runs were trained and measured on the same data."""

from collections.abc import Sequence

from prompt_tuning.report.recorded_run import RecordedRun

HELD_OUT, TRAINING = "evaluation", "train"


def differences_of_data(runs: Sequence[tuple[str, RecordedRun]]) -> list[str]:
    """Returns a warning for each kind of data that differs between runs.

    Files are the same if their contents are, whatever their names.
    """
    warnings = []
    for scope, what, effect in (
        (HELD_OUT, "measured on different held-out data", "cannot be compared"),
        (TRAINING, "trained on different data", "may differ for that reason"),
    ):
        groups: dict[tuple[str, ...], list[str]] = {}
        for name, run in runs:
            if run.data.get(scope):
                # A file without a checksum is known by its name alone.
                files = run.data[scope].items()
                key = tuple(sorted(x if len(x) == 64 else path for path, x in files))
                groups.setdefault(key, []).append(name)
        if len(groups) > 1:
            parts = " / ".join(", ".join(names) for names in groups.values())
            warnings.append(
                f"These runs were {what}, so their numbers {effect}: {parts}."
            )
    return warnings
