"""Runs `prompt-tuning` with stages that fetch what other processes sent only late."""

import sys
import time

from prompt_tuning.cli.main import main
from prompt_tuning.pipeline.transport import StepLinks

DELAY = 0.05
"""Seconds."""

fetch = StepLinks.fetch


def fetch_late(*arguments, **named):
    time.sleep(DELAY)
    return fetch(*arguments, **named)


if __name__ == "__main__":
    StepLinks.fetch = fetch_late
    sys.exit(main(sys.argv[1:]))
