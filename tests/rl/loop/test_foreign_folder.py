"""A run's folder that somebody else has made: nothing outside of it is read or written."""

import json

import pytest

from fxrl.rl.train import main


def train(file, *overrides, resume=None):
    return main(str(file), ["run_dir=run", *overrides], resume=resume, json=True)


def told(capsys):
    return "\n".join(
        json.loads(line).get("text", "") for line in capsys.readouterr().out.split("\n") if line
    )


@pytest.fixture
def outside(tmp_path):
    """A file and a folder that no run may touch."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "file").write_text("mine")
    yield folder
    assert {p.name: p.read_text() for p in folder.iterdir()} == {"file": "mine"}


@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", ".metrics.jsonl.writing", "config.json", "run.html", "summary.json"],
)
def test_links_in_place_of_files_are_refused_before_anything_is_loaded(
    config_file, outside, capsys, name
):
    (config_file.parent / "run").mkdir()
    (config_file.parent / "run" / name).symlink_to(outside / "file")
    assert train(config_file) == 2
    assert f"run/{name} is a link to {outside}/file" in told(capsys)


@pytest.mark.parametrize("name", ["checkpoints", "final", "tensorboard", "model", ".final.writing"])
def test_links_in_place_of_folders_are_refused(config_file, outside, capsys, name):
    assert train(config_file, "steps=1") == 0
    found = config_file.parent / "run" / name
    if found.exists():
        found.rename(found.with_name("moved"))
    found.symlink_to(outside)
    assert train(config_file, "steps=2", resume="run") == 2
    assert f"run/{name} is a link to {outside}" in told(capsys)


def test_a_link_among_tensorboards_files_is_refused(config_file, outside, capsys):
    """Names of later files can be foreseen: time, host and process."""
    folder = config_file.parent / "run" / "tensorboard"
    folder.mkdir(parents=True)
    (folder / "events.out.tfevents.1").symlink_to(outside / "file")
    assert train(config_file, "tensorboard=true", "steps=1") == 1
    assert "tensorboard/events.out.tfevents.1 is a link to" in told(capsys)


def test_the_folder_itself_may_be_a_link(config_file):
    (config_file.parent / "big_disk").mkdir()
    (config_file.parent / "run").symlink_to("big_disk")
    assert train(config_file, "steps=1") == 0
    assert (config_file.parent / "big_disk" / "final").is_dir()


def test_a_link_that_appears_while_the_run_goes_on_is_not_followed(config_file, outside, capsys):
    (config_file.parent / "toy_rewards.py").write_text(
        "from pathlib import Path\n"
        "def even(completions, **columns):\n"
        "    link = Path('run/run.html')\n"
        f"    link.is_symlink() or link.symlink_to({str(outside / 'file')!r})\n"
        "    Path('run/final').mkdir(exist_ok=True)\n"
        "    link = Path('run/final/adapter_config.json')\n"
        f"    link.is_symlink() or link.symlink_to({str(outside / 'file')!r})\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    assert train(config_file, "steps=1") == 0
    assert "run.html is a link" in told(capsys)
    assert (config_file.parent / "run" / "final" / "adapter_config.json").is_file()


@pytest.mark.parametrize("name", ["run", "run/inner"])
def test_a_run_dir_that_is_a_file_is_named(config_file, capsys, name):
    (config_file.parent / "run").write_text("a file")
    assert train(config_file, f"run_dir={name}") in (1, 2)
    text = told(capsys)
    assert "run" in text
    assert "give another run_dir" in text or "is a file; name a folder" in text
    assert "space" not in text
