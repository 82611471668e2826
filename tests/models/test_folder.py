"""A model as a folder: written where there is none, and only once."""

import json

import pytest
import torch

from fxrl.models import ModelError, load_model
from fxrl.models.load import model_folder

TINY = "tiny:llama:layers=1"


def test_a_tiny_model_is_written_once(tmp_path):
    made = tmp_path / "run" / "model"
    made.parent.mkdir()
    folder, tokenizer = model_folder(TINY, made, dtype="float32", seed=3)
    assert folder == made
    written = {file.name: file.stat().st_mtime_ns for file in made.iterdir()}
    again, _ = model_folder(TINY, made, dtype="float32", seed=3)
    assert {file.name: file.stat().st_mtime_ns for file in again.iterdir()} == written
    assert [path.name for path in made.parent.iterdir()] == ["model"], (
        "nothing half-written is left"
    )
    loaded, _ = load_model(folder, "float32")
    expected, _ = load_model(TINY, "float32", seed=3)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, rtol=0, atol=0)
    assert tokenizer.padding_side == "left"
    assert tokenizer.decode(tokenizer("a b")["input_ids"]) == "a b"


def test_a_folder_is_taken_as_it_is(tmp_path):
    place, _ = model_folder(TINY, tmp_path / "checkpoint")
    assert model_folder(str(place), tmp_path / "unused")[0] == place
    assert not (tmp_path / "unused").exists()


def test_a_shape_needs_a_tokenizer(tmp_path):
    place, _ = model_folder(TINY, tmp_path / "checkpoint")
    shape = tmp_path / "shape" / "config.json"
    shape.parent.mkdir()
    shape.write_text((place / "config.json").read_text())
    with pytest.raises(ModelError, match=r"no tokenizer files beside it; add tokenizer_config"):
        model_folder(shape, tmp_path / "made")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (shape.parent / name).write_text((place / name).read_text())
    made, _ = model_folder(shape, tmp_path / "made")
    assert json.loads((made / "config.json").read_text())["model_type"] == "llama"


def test_an_adapter_alone_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"adapter alone; merge it .* or use engine='torch'"):
        model_folder(tmp_path, tmp_path / "made")


def test_what_the_hub_does_not_have_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("fxrl.models.load.why_no_hub", lambda: "the hub is far away")
    with pytest.raises(ModelError, match=r"'no/where': .*not in .* cache, and the hub is far away"):
        model_folder("no/where", tmp_path / "made")
