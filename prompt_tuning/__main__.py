"""`python -m prompt_tuning`, the same as the command `prompt-tuning`."""

import sys

from prompt_tuning.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
