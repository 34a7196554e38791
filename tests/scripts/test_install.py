"""Which Python `scripts/install` chooses, with interpreters that only pretend."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = (
    *("awk", "bash", "cat", "cmp", "cp", "cut", "dirname", "env", "grep", "mkdir"),
    *("paste", "rm", "sed", "sort"),
)
FAKE = """#!/usr/bin/env bash
# Answers as a Python of one version would, and writes down what pip is asked to do.
if [ "$1" = -c ]; then
  {refusal}
  printf '%s\\t%s\\t%s\\t%s\\n' {version} {kind} {path} {path}
elif [ "$2" = venv ]; then
  shift 2; if [ "$1" = --clear ]; then rm -rf "$2"; shift; fi
  mkdir -p "$1/bin"; cp "$0" "$1/bin/python"
else
  echo "{version} $*" >> {log}
  case "$*" in *--editable*) {editable} ;; esac
fi
"""


@pytest.fixture
def checkout(tmp_path):
    """A folder with the script, and the only folder of the PATH."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/install", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / "bin" / tool).symlink_to(found)
    return tmp_path


def add(checkout, name, version, *, works=True, wheels=True, kind="final"):
    """Adds an interpreter that can be found."""
    path = checkout / name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = FAKE.format(
        version=version,
        kind=kind,
        path=path,
        log=checkout / "log",
        refusal="true" if works else "echo 'pyenv: not found' >&2; exit 127",
        editable="true" if wheels else "exit 1",
    )
    path.write_text(text)
    path.chmod(0o755)


def install(checkout, *options, **environment):
    done = subprocess.run(
        [checkout / "scripts/install", *options],
        env={"PATH": str(checkout / "bin"), "HOME": str(checkout)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    log = checkout / "log"
    asked = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return done, [line.split()[0] for line in asked if "--editable" in line]


def test_the_newest_python_that_works_is_taken_and_kept(checkout):
    add(checkout, "bin/python3", "3.11.7")
    add(checkout, "bin/python3.9", "3.9.1", works=False)
    add(checkout, "bin/python3.12", "3.12.1")
    add(checkout, "bin/python3.14", "3.14.0", works=False)  # a shim that leads nowhere
    add(checkout, "bin/python3.15", "3.15.0", kind="beta")
    add(checkout, "bin/python3.13", "3.13.0", kind="finalt")
    done, used = install(checkout)
    assert (done.returncode, used) == (0, ["3.12.1"])
    lines = done.stdout.splitlines()
    assert lines[1] == "Next:" and "source .venv/bin/activate" in lines[2]
    assert "scripts/test" not in done.stdout
    # The environment keeps its Python when extras are added.
    add(checkout, "bin/python3.13", "3.13.0")
    done, used = install(checkout, "--dev", "plots")
    assert (done.returncode, used) == (0, ["3.12.1"])
    assert "./scripts/test" in done.stdout
    done, used = install(checkout)
    assert (done.returncode, used) == (0, [])
    assert "Next:" in done.stdout


def test_pythons_of_pyenv_are_found(checkout):
    add(checkout, "bin/python3", "3.9.1", works=False)
    add(checkout, ".pyenv/versions/3.11.9/bin/python3", "3.11.9")
    add(checkout, ".pyenv/versions/3.11.10/bin/python3", "3.11.10")
    assert install(checkout)[1] == ["3.11.10"]


def test_without_packages_for_the_newest_the_next_older_one_is_taken(checkout):
    add(checkout, "bin/python3", "3.11.7")
    add(checkout, "bin/python3.13", "3.13.0", wheels=False)
    done, used = install(checkout)
    assert (done.returncode, used) == (0, ["3.13.0", "3.11.7"])
    assert "do not install with Python 3.13.0" in done.stderr
    assert "installed into .venv with Python 3.11.7" in done.stdout


@pytest.mark.parametrize("variable", [False, True])
def test_python_chooses_and_replaces(variable, checkout):
    add(checkout, "bin/python3", "3.11.7")
    add(checkout, "bin/python3.13", "3.13.0")
    install(checkout, "plots")
    old = str(checkout / "bin/python3")
    options, environment = (
        ([], {"PYTHON": old}) if variable else (["--python", old], {})
    )
    done, used = install(checkout, *options, **environment)
    assert (done.returncode, used) == (0, ["3.11.7"])
    assert (checkout / ".venv/.installed-plots").exists()
    assert install(checkout, *options, **environment)[1] == []


def test_torch_begins_with_python3(checkout):
    add(checkout, "bin/python3", "3.11.7")
    add(checkout, "bin/python3.13", "3.13.0")
    done, used = install(checkout, "--torch")
    assert (done.returncode, used) == (0, ["3.11.7"])
    assert "pytest -m torch" in done.stdout


def test_without_a_python_nothing_is_made(checkout):
    add(checkout, "bin/python3", "3.10.1", works=False)
    done, used = install(checkout)
    assert done.returncode == 1 and not used
    assert "no Python of version 3.11 or later" in done.stderr
    done, _ = install(checkout, "--python", "python3")
    assert done.returncode == 1 and "python3 is not a Python of" in done.stderr
    assert not (checkout / ".venv").exists()
    assert install(checkout, "--unknown")[0].returncode == 2
