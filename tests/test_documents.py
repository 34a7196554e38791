"""Checks the documents' links and commands and, on request, runs their code."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from prompt_tuning.cli import main as command
from prompt_tuning.config.deferred_factories import factory_named
from prompt_tuning.config.factories import FACTORIES
from prompt_tuning.config.parameter_checks import parameter_hints
from prompt_tuning.core.private_parts import options_of
from tests.support.small_runs import COMPILATION_CACHE

ROOT = Path(__file__).parents[1]
FILES = sorted(
    file
    for file in [
        *ROOT.glob("*.md"),
        *ROOT.glob(".github/*.md"),
        *ROOT.glob("prompt_tuning/**/*.md"),
        *ROOT.glob("scripts/**/*.md"),
    ]
)
NAMES = [str(file.relative_to(ROOT)) for file in FILES]
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>.*?) -->\n)?"
    r"^```(?P<language>\w+)\n(?P<code>.*?)^```",
    re.MULTILINE | re.DOTALL,
)


def blocks(name: str) -> list[re.Match]:
    """Returns the blocks of code in a document, without outputs."""
    matches = BLOCK.finditer((ROOT / name).read_text())
    return [match for match in matches if match["language"] in ("bash", "python")]


def prose(name: str) -> str:
    """Returns a document without its blocks of code."""
    return re.sub(r"```.*?```", "", (ROOT / name).read_text(), flags=re.DOTALL)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_bytes()) <= 8192


def test_the_readme_names_every_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"]) - {"bench", "clients", "test"}
    text = (ROOT / "README.md").read_text()
    assert {name for name in extras if not re.search(rf"\b{name}\b", text)} == set()


def choices(setting: str) -> list[str]:
    """Returns the texts that a setting allows; empty if it allows others too."""
    factory, _, parameter = setting.partition(".")
    hint = (
        parameter_hints(factory_named(factory)).get(parameter)
        if factory in FACTORIES
        else 0
    )
    return [x for x in get_args(hint) if get_origin(hint) is Literal]


@pytest.mark.parametrize("name", NAMES)
def test_tables_name_every_choice_of_a_setting(name):
    rows = re.findall(r"^\| `(\w+\.\w+)` \|.*", (ROOT / name).read_text(), re.MULTILINE)
    lines = (ROOT / name).read_text().splitlines()
    for setting in rows:
        (line,) = (x for x in lines if x.startswith(f"| `{setting}` |"))
        assert [x for x in choices(setting) if f"{x}" not in line] == [], line


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_files(name):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose(name)):
        if "://" not in target:
            assert ((ROOT / name).parent / target).exists(), target


@pytest.mark.parametrize("name", NAMES)
def test_blocks_that_are_not_run_have_a_reason(name):
    for block in blocks(name):
        assert block["reason"] is None or block["reason"].strip()


def commands(name: str) -> list[list[str]]:
    """Returns the arguments of each `prompt-tuning` command in a document's blocks."""
    lines = []
    for block in blocks(name):
        if block["language"] == "bash":
            code = block["code"].replace("\\\n", " ")
            lines += [x for x in code.split("\n") if x.startswith("prompt-tuning ")]
    return [shlex.split(line.split(" | ")[0], comments=True)[1:] for line in lines]


@pytest.mark.parametrize("name", [name for name in NAMES if commands(name)])
def test_commands_have_the_options_that_documents_use(name):
    parser = command.build_parser(command.load_commands())
    for arguments in commands(name):
        arguments = [x for x in arguments if x not in (">", "2>&1")]
        plain, _ = command.split_bindings(arguments)
        if "--help" not in plain:
            parser.parse_args(plain)


def test_texts_name_options_that_exist():
    parser = command.build_parser(command.load_commands())
    parsers = [parser, *command.find_subparsers(parser).values()]
    known = {word for p in parsers for x in options_of(p) for word in x.option_strings}
    found = {
        option
        for name in NAMES
        if name.startswith(("README", "CHANGELOG", "prompt_tuning"))
        for option in re.findall(r"`(--[a-z]\w+)\b[^`]*`", prose(name))
    }
    others = {"--gin", "--signal", "--dtypes"}  # settings, of sbatch, and of a script
    assert found - known - others == set()


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The environment of commands that run in forks of one process."""
    folder = tmp_path_factory.mktemp("bin")
    listening = folder / "socket"
    server = [sys.executable, "-m", "tests.support.forked_python", str(listening)]
    client = ROOT / "tests/support/forked_client.py"
    # Not links: Python finds its environment by the path that it is started from.
    for name, arguments in (("prompt-tuning", "-m prompt_tuning"), ("python", "")):
        shim = folder / name
        command = f'"{sys.executable}" -IS "{client}" "{listening}" {arguments} "$@"'
        shim.write_text(f"#!/bin/sh\nexec {command}\n")
        shim.chmod(0o755)
    environment = os.environ | {"PYTHONPATH": str(ROOT), **COMPILATION_CACHE}
    with subprocess.Popen(
        server,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,  # whose end stops it
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield environment | {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.documents
@pytest.mark.parametrize("name", [name for name in NAMES if blocks(name)])
def test_blocks_run(name, programs, tmp_path):
    for block in blocks(name):
        if block["reason"] is None:
            shell = (
                ["bash", "-euc"] if block["language"] == "bash" else ["python", "-c"]
            )
            ended = subprocess.run(
                [*shell, block["code"]],
                cwd=tmp_path,
                env=programs,
                capture_output=True,
                text=True,
            )
            assert ended.returncode == 0, f"{block['code']}\n{ended.stderr[-2000:]}"


@pytest.mark.documents
def test_a_block_that_fails_is_noticed(programs):
    for code, program in ((3, "import sys; sys.exit(3)"), (1, "1 / 0")):
        shell = ["bash", "-euc", f"python -c '{program}'"]
        assert subprocess.run(shell, env=programs).returncode == code
