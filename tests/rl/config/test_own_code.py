"""What a configuration may import: what it names, and nothing that merely lies about."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fxrl.cli import main
from fxrl.errors import ConfigError, MissingPackageError, optional
from fxrl.losses import loss_info
from fxrl.losses.own_code import importable_from, load_function
from fxrl.rl.config.load import load_config
from fxrl.rl.config.named import build_loss, keyword

ROOT = Path(__file__).parents[3]
EVEN = "def even(completions, **columns):\n    return [1.0 for _ in completions]\n"
PLANTED = "raise SystemExit('planted code was run')\n"


@pytest.fixture
def project(config_file, tmp_path, monkeypatch):
    """The configuration in a folder of its own; the working folder is another one."""
    folder, here = tmp_path / "project", tmp_path / "here"
    folder.mkdir()
    here.mkdir()
    (tmp_path / "toy_rewards.py").rename(folder / "toy_rewards.py")
    (tmp_path / "questions.jsonl").rename(here / "questions.jsonl")
    config_file.rename(folder / "run.toml")
    monkeypatch.chdir(here)
    return folder


def train(folder, *overrides):
    return main(["train", str(folder / "run.toml"), "steps=1", "run_dir=run", "--json", *overrides])


@pytest.mark.parametrize(
    "name", ["mine.py:even", "inner/mine.py:even", "mine:even", "inner.mine:even"]
)
def test_a_reward_beside_the_configuration(project, name):
    for folder in (project, project / "inner"):
        folder.mkdir(exist_ok=True)
        (folder / "mine.py").write_text("from helper import one\n" + EVEN.replace("1.0", "one()"))
    (project / "helper.py").write_text("def one():\n    import late\n    return late.ONE\n")
    (project / "late.py").write_text("ONE = 1.0\n")
    assert train(project, f"reward.functions=['{name}']", "reward.params={}") == 0
    line = json.loads(Path("run/metrics.jsonl").read_text())
    assert line["rewards/even/mean"] == 1.0


def test_a_file_is_looked_for_beside_the_configuration_first_then_here(project):
    (project / "mine.py").write_text("def f(completions): return 'beside'")
    Path("mine.py").write_text("def f(completions): return 'here'")
    Path("other.py").write_text("def f(completions): return 'other'")
    with importable_from(project, Path.cwd()):
        assert load_function("mine.py:f")([]) == "beside"
        assert load_function("other.py:f")([]) == "other"
        with pytest.raises(
            ConfigError, match=rf"'no.py' is not a file; .* {project} or {Path.cwd()}"
        ):
            load_function("no.py:f")


def test_a_file_is_run_once_and_again_when_it_has_changed(project):
    file = project / "mine.py"
    file.write_text("import itertools\ncount = itertools.count()\ndef f(): return next(count)\n")
    with importable_from(project):
        assert [load_function("mine.py:f")() for _ in range(3)] == [0, 1, 2]
        file.write_text(file.read_text().replace("count()", "count(7)"))
        assert load_function("mine.py:f")() == 7


def test_a_module_of_the_same_name_in_another_folder_is_another_module(project):
    for folder, value in ((project, 1), (Path.cwd(), 2)):
        (folder / "my_module.py").write_text(f"def f(): return {value}")
        with importable_from(folder):
            assert load_function("my_module:f")() == value


NAMES = ["kernels", "safetensors", "accelerate", "wandb", "flash_attn", "reasoning_gym", "peft"]


def test_what_merely_lies_about_is_not_imported(project):
    """In a process of its own: here most of these packages are imported already."""
    for folder in (project, Path.cwd()):
        for name in [*NAMES, "transformers", "torchao", "tensorboard", "matplotlib", "tqdm"]:
            (folder / f"{name}.py").write_text(PLANTED)
    (project / "toy_rewards.py").write_text(
        "import importlib.util, transformers\n"
        "from transformers.utils import is_kernels_available\n"
        "assert not is_kernels_available() and not importlib.util.find_spec('tokenizers') is None\n"
        + EVEN
    )
    command = [sys.executable, "-m", "fxrl", "train", str(project / "run.toml")]
    done = subprocess.run(
        [*command, "steps=1", "run_dir=run", "reward.params={}", "--json"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "planted" not in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["kernels:even", "kernels.py:even", "transformers.py:even"])
def test_your_own_module_may_be_called_as_a_package(project, name):
    (project / f"{name.partition(':')[0].removesuffix('.py')}.py").write_text(EVEN)
    assert train(project, f"reward.functions=['{name}']", "reward.params={}") == 0


def test_a_library_does_not_find_what_a_configuration_has_named_by_path(project):
    (project / "wandb.py").write_text(EVEN)
    with importable_from(project):
        load_function("wandb.py:even")
        assert importlib.util.find_spec("wandb") is None
        with pytest.raises(MissingPackageError):
            optional("wandb", "a test")


def test_an_installed_module_that_hides_your_file_is_told(project):
    (project / "rich.py").write_text(EVEN)
    with importable_from(project), pytest.raises(ConfigError) as told:
        load_function("rich:even")
    assert f"comes before {project / 'rich.py'}: write 'rich.py:even'" in str(told.value)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import sys\nsys.exit(0)", "SystemExit(0) ({file}:2)"),
        ("\n\n1 / 0", "ZeroDivisionError('division by zero') ({file}:3)"),
        ("even = 3", "'mine.py:even' is int, not a function"),
        ("import sys\ndef odd(): pass", "has no function 'even'; known: odd"),
    ],
)
def test_code_that_fails_while_it_is_imported_is_a_mistake_with_its_line(project, source, said):
    (project / "mine.py").write_text(source)
    with pytest.raises(ConfigError) as told:
        load_config(project / "run.toml", ["reward.functions=['mine.py:even']"])
    assert said.format(file=project / "mine.py") in str(told.value)


def test_losses_by_path(project):
    (project / "losses.py").write_text(
        "from fxrl import losses\ndef mine(**kwargs): return losses.grpo(**kwargs)\n"
    )
    assert train(project, "loss.name=losses.py:mine", "loss.beta=0.0") == 0


OWN_LOSSES = """
from fxrl import losses

def of_fxrl(beta=0.2):
    return losses.bnpo(beta=beta)

def factory(temperature=1.0, beta=0.1):
    def loss(model, batch):
        return temperature
    return loss

def direct(model, batch, temperature=1.0, max_completion_length=1):
    return temperature, max_completion_length

def plain(model, batch):
    return None
"""


def test_an_own_loss_gets_what_it_names_and_tells_its_beta(tmp_path):
    path = tmp_path / "own_losses.py"
    path.write_text(OWN_LOSSES)

    def built(name, **options):
        return build_loss(f"{path}:{name}", options, temperature=0.7, max_tokens=99)

    assert built("factory")(None, None) == 0.7
    assert built("factory", temperature=0.5)(None, None) == 0.5
    assert built("direct")(None, None) == (0.7, 99)
    assert built("plain")(None, None) is None
    info = loss_info(built("of_fxrl"))
    assert info.options is not None
    assert (info.mean_over, info.options.beta) == ("tokens", 0.2)
    for name, options, beta in (
        ("factory", {}, 0.1),
        ("factory", {"beta": 0}, 0),
        ("plain", {}, 0.0),
    ):
        assert keyword(f"{path}:{name}", options, "beta", 0.0) == beta
