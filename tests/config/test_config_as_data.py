"""A config sets values: it cannot run code, and reading it has limits.

Every payload would create the file `MARKER`, which
`test_a_payload_runs_if_imports_are_allowed` verifies.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from prompt_tuning.cli.main import main
from prompt_tuning.config import gin_sources
from prompt_tuning.config.gin_files import read_run
from prompt_tuning.core.errors import InputError

DYNAMIC = """from __gin__ import dynamic_registration
import subprocess
from prompt_tuning.config import run
"""
CALL = "subprocess.getoutput.cmd = 'touch MARKER'\n"
Write = Callable[[Path], str]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory, with a module whose import leaves a mark."""
    monkeypatch.delitem(sys.modules, "payload", raising=False)
    (tmp_path / "payload.py").write_text("open('MARKER', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def included(folder: Path, content: str, name: str = "inner.gin") -> str:
    (folder / name).write_text(content)
    return f"include '{folder / name}'\n"


def through_a_link(folder: Path) -> str:
    (folder / "hidden.txt").write_text(DYNAMIC + CALL)
    (folder / "models.gin").symlink_to(folder / "hidden.txt")
    return f"include '{folder / 'models.gin'}'\nRun.model = @getoutput()\n"


VARIANTS: dict[str, Write] = {
    "a call": lambda _: DYNAMIC + CALL + "run.Run.model = @subprocess.getoutput()\n",
    "a module": lambda _: "import payload\n",
    "include": lambda f: included(f, "import payload\n"),
    "nested include": lambda f: included(
        f, included(f, "import payload\n", "deep.gin")
    ),
    "symlink": through_a_link,
    "macro": lambda _: (
        DYNAMIC + CALL + "M = @subprocess.getoutput()\nrun.Run.model = %M\n"
    ),
    "scope": lambda _: (
        DYNAMIC
        + "import subprocess\na/b/subprocess.getoutput.cmd = 'touch MARKER'\n"
        + "run.Run.model = @a/b/subprocess.getoutput()\n"
    ),
    "singleton": lambda _: (
        DYNAMIC
        + CALL
        + "x/gin.singleton.constructor = @subprocess.getoutput\n"
        + "run.Run.model = @x/gin.singleton()\n"
    ),
    "from": lambda _: DYNAMIC + "from os import path\nrun.Run.model = @path.exists()\n",
    "alias": lambda _: "import payload as p\n",
    "from with alias": lambda _: "from payload import x as y\n",
    "byte order mark": lambda _: "\ufeffimport payload\n",
    "carriage returns": lambda _: "Run.steps = 3\rimport payload\r",
    "spaces": lambda _: "  import \\\n payload\n",
    "form feed": lambda _: "\fimport payload\n",
    "after a block": lambda _: "Run:\n  steps = 3\nimport payload\n",
    "a feature of gin": lambda _: "from __gin__ import anything\n",
    "registration alone": lambda _: "from __gin__ import dynamic_registration\n",
    "after a value": lambda _: "Run.steps = 3 ; import payload\n",
    "tests of gin": lambda _: "import gin.testdata.import_test_configurables\n",
}
COMMANDS = (
    ["inspect", "--run", "run"],
    ["evaluate", "--run", "run"],
    ["generate", "--run", "run", "text"],
    ["convert", "run", "out"],
    ["train", "--gin_file", "run/config.gin"],
    ["memory", "run/config.gin"],
)


def write_run(folder: Path, config: str) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "config.gin").write_text(config, newline="")


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_is_executed(folder, variant):
    write_run(folder, VARIANTS[variant](folder))
    before = sorted(folder.rglob("*"))
    with pytest.raises(InputError):
        read_run(["run/config.gin"], [])
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_every_command_refuses_to_execute_code(folder, capsys, command):
    write_run(folder, VARIANTS["a call"](folder))
    before = sorted(folder.rglob("*"))
    assert main(command) == 2
    printed = capsys.readouterr().err
    assert "line 1 of run/config.gin is an import statement" in printed
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    "variant", ["a call", "include", "macro", "scope", "singleton", "symlink"]
)
def test_a_payload_runs_if_imports_are_allowed(folder, variant):
    write_run(folder, VARIANTS[variant](folder))
    with pytest.raises(InputError):
        read_run(["run/config.gin"], [], allow_imports=True)
    assert (folder / "MARKER").exists()


@pytest.mark.parametrize(
    "binding",
    ["Run.steps = 3\nimport payload", "Run.steps = 3\n" + DYNAMIC, "A = 1\rimport x"],
)
def test_a_binding_cannot_import(folder, binding):
    with pytest.raises(InputError):
        read_run([], [binding])
    assert not (folder / "MARKER").exists()


def test_nothing_is_applied_before_a_refusal(folder):
    import gin

    gin.clear_config()
    write_run(folder, "Run.steps = 3\nimport payload\n")
    with pytest.raises(InputError):
        read_run(["run/config.gin"], [])
    assert gin.config_str() == ""


def test_the_option_of_the_command(folder, capsys):
    write_run(folder, "import payload\n")
    assert main(["inspect", "--run", "run", "--allow_gin_imports"]) == 2
    assert "does not set Run.model" in capsys.readouterr().err
    assert (folder / "MARKER").exists()


def test_an_included_file_is_not_printed(folder, capsys):
    for content in ("root:x:0:0:secret\n", "secret\n", "A = secret\n", "A = 'secret\n"):
        (folder / "passwd").write_text(content)
        (folder / "mine.gin").write_text("include 'passwd'\n")
        assert main(["train", "--gin_file", "mine.gin"]) == 2
        printed = capsys.readouterr().err
        assert "secret" not in printed
        assert "passwd" in printed or "is not closed" in printed


def refused(config: str, folder: Path) -> str:
    """Returns the message about a config, which must be fast, including beartype."""
    (folder / "mine.gin").write_text(config)
    start = time.process_time()
    with pytest.raises(InputError) as caught:
        read_run(["mine.gin"], [])
    assert time.process_time() - start < 10
    assert len(str(caught.value)) < 1500
    return str(caught.value)


def test_a_file_that_includes_itself(folder):
    assert "includes itself" in refused("include 'mine.gin'\n", folder)
    (folder / "other.gin").symlink_to(folder / "mine.gin")
    assert "includes itself" in refused("include 'other.gin'\n", folder)


def test_too_many_includes(folder):
    # Each file includes the next twice: 2^9 files.
    for i in range(9):
        (folder / f"{i}.gin").write_text(f"include '{i + 1}.gin'\n" * 2)
    (folder / "9.gin").write_text("")
    message = refused("include '0.gin'\n", folder)
    assert "101 include statements" in message and "at most 100" in message


def test_includes_that_are_too_deep(folder):
    for i in range(30):
        (folder / f"{i}.gin").write_text(f"include '{i + 1}.gin'\n")
    message = refused("include '0.gin'\n", folder)
    assert "11 levels deep" in message and "at most 10" in message


def test_a_large_file(folder):
    large = "#" * (gin_sources.MAXIMUM_BYTES + 1)
    assert "1,048,577 bytes, expected at most 1,048,576" in refused(large, folder)
    (folder / "half.gin").write_text("#" * (gin_sources.MAXIMUM_BYTES // 2 + 1))
    message = refused("include 'half.gin'\n" * 2, folder)
    assert "expected at most 1,048,576" in message


@pytest.mark.parametrize("brackets", ["[]", "()", "{}"])
@pytest.mark.parametrize("depth", [51, 100_000])
def test_values_that_are_nested_too_deeply(folder, brackets, depth):
    opened, closed = brackets
    opened = "{1: " if opened == "{" else opened
    message = refused(f"A = {opened * depth}1{closed * depth}\n", folder)
    assert "more than 50 levels" in message or "not closed" in message


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("9" * 24, "from -2,147,483,647 to 2,147,483,647"),
        ("-2147483648", "from -2,147,483,647 to 2,147,483,647"),
        ("9" * 5000, "cannot be parsed"),
        ("0x" + "f" * 500_000, "from -2,147,483,647 to 2,147,483,647"),
        ("1e999", "a finite number"),
        ("-1e999", "a finite number"),
        ("b'bytes'", "type bytes"),
        ("3j", "type complex"),
        (r"'a\0b'", "a zero byte"),
        (r"'\ud800'", "half a surrogate pair"),
    ],
)
def test_unsupported_literals(folder, value, words):
    assert words in refused(f"Run.seed = {value}\n", folder)


def test_a_text_of_many_parts_is_parsed_in_linear_time(folder):
    parts = "'a' " * 50_000
    (folder / "mine.gin").write_text(f"Run.directory = {parts}\n")
    with pytest.raises(InputError, match=r"does not set Run\.model"):
        read_run(["mine.gin"], [])


def test_lines_keep_their_numbers_after_a_text_of_many_parts(folder):
    text = (
        "Run.directory = ('a'  # one\n\n  'b'\n  'c')\nRun.loss = \\\n 'd' \\\n 'e'\n"
    )
    assert "line 8 of mine.gin" in refused(f"{text}Run.seed = 3j\n", folder)


def test_an_unknown_name_in_an_included_file_does_not_print_its_lines(folder, capsys):
    (folder / "other.gin").write_text("Run.data = [@secret,\n 'hidden']\n")
    (folder / "mine.gin").write_text("include 'other.gin'\n")
    assert main(["train", "--gin_file", "mine.gin"]) == 2
    printed = capsys.readouterr().err
    assert "hidden" not in printed and "other.gin" in printed


def test_a_folder_and_a_missing_file(folder):
    (folder / "sub").mkdir()
    assert "sub is a folder, expected a gin file" in refused("include 'sub'\n", folder)
    assert len(refused(f"include '{'a' * 5000}'\n", folder)) < 1000


def test_bytes_that_are_not_utf8(folder):
    (folder / "bytes.gin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not text in UTF-8"):
        read_run(["bytes.gin"], [])
