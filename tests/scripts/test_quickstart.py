import subprocess
import sys

import pytest

from scripts import quickstart


def test_an_unknown_skill_is_refused_with_all_names(monkeypatch, capsys, tmp_path):
    runs = tmp_path / "runs"
    given = ["quickstart", "--skills", "upper", "foo", "--runs", str(runs)]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit) as ended:
        quickstart.main()
    assert ended.value.code == 2
    assert "no skill 'foo'; expected copy, reverse," in capsys.readouterr().err
    assert not runs.exists()


def test_compositions_are_skills(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["quickstart", "--skills", "reverse upper"])
    assert quickstart.parse_arguments().skills == ["reverse upper"]


def test_options_that_a_memory_does_not_read_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quickstart", "--memory", "--model", "t5"])
    with pytest.raises(SystemExit):
        quickstart.parse_arguments()
    assert "leave out --model and --skills" in capsys.readouterr().err


def test_help_lists_the_skills_without_jax():
    script = "import sys, scripts.quickstart; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
    command = [sys.executable, "-m", "scripts.quickstart", "--help"]
    assert "rot2" in subprocess.run(command, capture_output=True, text=True).stdout
