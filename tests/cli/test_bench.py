"""``fxrl bench``: lists and runs the scripts of a checkout, and says so where there is none."""

import json

import pytest

from fxrl.cli import benchmarks, main
from fxrl.errors import ConfigError


@pytest.fixture
def checkout(tmp_path):
    bench = tmp_path / "bench"
    bench.mkdir()
    (bench / "__init__.py").write_text("")
    (tmp_path / "pyproject.toml").write_text("")
    (bench / "common.py").write_text('"""Shared, with a __main__ in words."""')
    (bench / "qwen.py").write_text('"""A helper without a main part."""')
    (bench / "head.py").write_text(
        '"""Times the head.\n\nMore."""\nimport sys\n'
        'if __name__ == "__main__":\n    sys.exit(int(sys.argv[1]))\n'
    )
    return tmp_path


def test_finds_scripts_with_a_main_part(checkout):
    scripts = benchmarks.find_scripts(checkout)
    assert list(scripts) == ["head"]
    assert benchmarks.first_line(scripts["head"]) == "Times the head."


def test_runs_with_arguments(checkout):
    assert benchmarks.run_script("head", ["0"], checkout) == 0
    assert benchmarks.run_script("head", ["3"], checkout) == 3


def test_unknown_name(checkout):
    with pytest.raises(ConfigError, match="no benchmark 'heat'; there are head"):
        benchmarks.run_script("heat", [], checkout)


def test_no_checkout(tmp_path):
    with pytest.raises(benchmarks.NoCheckoutError, match="clone the repository"):
        benchmarks.find_scripts(tmp_path)


def test_command(capsys):
    assert main(["bench", "--json"]) == 0
    assert "head_memory" in json.loads(capsys.readouterr().out)
    assert main(["bench"]) == 0
    assert "head_memory" in capsys.readouterr().out
    assert main(["bench", "nonsense"]) == 2
