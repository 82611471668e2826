"""``fxrl bench``: lists and runs the scripts of a checkout, and says so where there is none."""

import json
import subprocess
import sys
import threading

import pytest

from fxrl.cli import benchmarks, main
from fxrl.errors import ConfigError


@pytest.fixture
def checkout(tmp_path):
    bench = tmp_path / "bench"
    bench.mkdir()
    (bench / "__init__.py").write_text("")
    (bench / "another.py").write_text('"""Another."""\nif __name__ == "__main__":\n    pass\n')
    (tmp_path / "pyproject.toml").write_text("")
    (bench / "qwen.py").write_text('"""A helper without a main part."""')
    (bench / "head.py").write_text(
        '"""Times the head.\n\nMore."""\nimport sys\n'
        'if __name__ == "__main__":\n    sys.exit(int(sys.argv[1]))\n'
    )
    return tmp_path


def test_finds_scripts_with_a_main_part_suites_first(checkout):
    scripts = benchmarks.find_scripts(checkout)
    assert list(scripts) == ["head", "another"]
    assert benchmarks.summary_of(scripts["head"]) == "Times the head."


def test_runs_with_arguments(checkout):
    assert benchmarks.run_script("head", ["0"], checkout) == 0
    assert benchmarks.run_script("head", ["3"], checkout) == 3


def test_unknown_name(checkout):
    with pytest.raises(ConfigError, match="no benchmark 'heat'; there are head, another"):
        benchmarks.run_script("heat", [], checkout)


def test_no_checkout(tmp_path):
    with pytest.raises(benchmarks.NoCheckoutError, match="clone the repository"):
        benchmarks.find_scripts(tmp_path)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """fxrl as a wheel has it: no bench/ beside the package."""
    site = tmp_path / "site-packages"
    site.mkdir()
    monkeypatch.setattr(benchmarks.fxrl, "__file__", str(site / "fxrl" / "__init__.py"))


def test_installed_from_a_wheel(installed, checkout, tmp_path, monkeypatch, capsys):
    """Found around the current folder; elsewhere the error says how to get it."""
    below = checkout / "bench" / "results"
    below.mkdir()
    monkeypatch.chdir(below)
    assert benchmarks.find_scripts()["head"] == checkout / "bench" / "head.py"
    elsewhere = tmp_path.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    monkeypatch.chdir(elsewhere)
    assert main(["bench", "head"]) == 1
    said = capsys.readouterr().err
    assert "no bench/ beside" in said
    assert "clone the repository" in said


def test_runs_in_the_current_folder_with_its_exit_code(installed, checkout, tmp_path, monkeypatch):
    """Relative paths are the caller's; 0, 1 and 2 come through, anything else is 1."""
    (checkout / "bench" / "head.py").write_text(
        "import pathlib, sys\nif __name__ == '__main__':\n"
        "    pathlib.Path('made').write_text(' '.join(sys.argv[2:]))\n"
        "    sys.exit(int(sys.argv[1]))\n"
    )
    folder = checkout / "runs"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for given, code in ((0, 0), (1, 1), (2, 2), (7, 1)):
        assert main(["bench", "head", str(given), "--out", "x"]) == code
    assert (folder / "made").read_text() == "--out x"
    assert main(["bench", "--json", "head", "0"]) == 0
    assert (folder / "made").read_text() == "--json"


def test_rows_are_seen_when_they_are_measured(checkout):
    """Through a pipe too: the benchmark waits for an answer to its first row."""
    script = "if __name__ == '__main__':\n    print('first row')\n    print(input())\n"
    (checkout / "bench" / "head.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; from fxrl.cli import benchmarks; import pathlib;"
         "benchmarks.run_script('head', [], pathlib.Path(sys.argv[1]))", str(checkout)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    timer = threading.Timer(60, process.kill)
    timer.start()
    assert process.stdout.readline() == "first row\n"
    out, err = process.communicate("go on\n")
    timer.cancel()
    assert out == "go on\n"
    assert "running -m bench.head" in err


def test_public_names_have_help(capfd):
    for name in benchmarks.SUITES:
        assert main(["bench", name, "--help"]) == 0
        assert f"fxrl bench {name}" in capfd.readouterr().out
    assert main(["bench", "head", "--modes", "nonsense"]) == 2


def test_command(capsys):
    assert main(["bench", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out))[:3] == ["head", "step", "rollout"]
    assert main(["bench"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("head_memory ") for line in lines)
    assert lines == [line.rstrip() for line in lines]
    assert main(["bench", "nonsense"]) == 2
