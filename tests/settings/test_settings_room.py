"""The settings are imported without anything heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import prompt_tuning

ROOM = Path(prompt_tuning.__file__).parent / "settings"
FILES = sorted(ROOM.glob("[!_]*.py"))


def test_the_room_imports_nothing_heavy_and_takes_little_time():
    imports = "".join(f"import prompt_tuning.settings.{x.stem}\n" for x in FILES)
    code = (
        "import sys, time, prompt_tuning\n"
        # The time of the processor: that of the clock depends on other programs.
        f"start = time.process_time()\n{imports}"
        "print(time.process_time() - start)\n"
        "print({'jax', 'numpy', 'flax', 'optax', 'gin', 're2'} & sys.modules.keys())"
    )
    shown = [subprocess.check_output([sys.executable, "-c", code]) for _ in range(3)]
    seconds, heavy = zip(*(text.decode().splitlines() for text in shown), strict=True)
    assert set(heavy) == {"set()"}
    # A tenth of a second on a busy machine, a tenth of what JAX takes.
    assert min(map(float, seconds)) < 0.2


def test_it_imports_no_room_but_core():
    rooms = {
        node.module.split(".")[1]
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module is not None
        if node.module.startswith("prompt_tuning.")
    }
    assert rooms == {"core", "settings"}
