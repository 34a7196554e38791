"""The command `prompt-tuning`: one module per subcommand.

To add a command `example`:

1. Write `cli/example.py` with

   - `HELP`: one line for the list that `prompt-tuning --help` prints;
   - `HEADING`: the heading under which it is listed there, such as "Examine prompts";
   - `USES_JAX`: whether the command computes; if so, JAX's compilation cache and
     deterministic kernels are set up first;
   - `SEVERAL_PROCESSES = True`, if one command can be started as several processes: it
     then gets the options of `launch.py`;
   - `add_options(parser)`: adds its options; those that several commands have are in
     `shared_options.py`;
   - `check(options)`, if it can find mistakes without JAX: it is called before JAX is
     imported, and raises what `run` does;
   - `run(options) -> int`: does the work and returns the exit code. Input that cannot
     be used raises `core.errors.InputError`, which becomes exit code 2.

   Import nothing heavy (JAX, NumPy, gin, rich) at the top of the module: every command
   module is imported for `--help`. Import it inside `run`, or move the code to a module
   that `run` imports.
   A command with a dash in its name has an underscore in its module's name.
2. Test it in `tests/cli/test_example.py`; `main(["example", ...])` returns the exit
   code.
"""

import re
from pathlib import Path

_IN_ORDER = {
    "Tune": ("train", "sweep", "memory", "configs", "runs"),
    "Evaluate and use": (
        "evaluate",
        "predict",
        "generate",
        "chat",
        "serve",
        "convert",
        "quantize",
    ),
    "Examine prompts": ("inspect", "similar", "recycle", "diff"),
    "Prepare data": ("prepare", "token_types", "show"),
}


def _find_commands() -> dict[str, tuple[str, ...]]:
    """Returns the commands in order, followed by the modules with a heading."""
    commands = dict(_IN_ORDER)
    known = {name for names in commands.values() for name in names}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem in known:
            continue
        source = path.read_text("utf-8")
        heading = re.search(r'^HEADING = "(.+)"$', source, re.MULTILINE)
        if heading:
            commands[heading[1]] = (*commands.get(heading[1], ()), path.stem)
    return commands


COMMANDS = _find_commands()
"""Modules of the commands, by their heading in the help."""
