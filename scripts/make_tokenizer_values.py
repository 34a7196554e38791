"""Writes what transformers reads of some folders of tokenizers, for the tests.

    python -m scripts.make_tokenizer_values

The folders are every third of `tests/support/tokenizer_folders.py`; the file is
`tests/fixtures/tokenizers/values.json`. It was made with transformers 5.24.0.
"""

# transformers is only in the `bench` extra.
# pyright: reportMissingImports=false

import json
import tempfile
from pathlib import Path

import transformers

from tests.support.tokenizer_folders import (
    COMBINATIONS,
    VALUES,
    transformers_values,
    write_folder,
)


def main() -> None:
    """Writes the file."""
    values = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, combination in enumerate(COMBINATIONS[::3]):
            path = write_folder(Path(folder) / str(number), combination)
            values[combination] = transformers_values(path)
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in values.items()]
    VALUES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{VALUES}: {len(values)} folders, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
