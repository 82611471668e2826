"""Engines by name: each makes the model and itself in the order that it needs."""

import sys
import typing
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fxrl.engines import (
    ENGINES,
    EngineError,
    EngineSpec,
    TorchEngine,
    VllmOptions,
    build_engine,
    check_engine,
)
from fxrl.errors import ConfigError
from fxrl.models import load_model
from fxrl.rl.config.tables import TrainConfig


def spec(calls, **changes):
    model, tokenizer = load_model("tiny:qwen3", "fp32")

    def trainable(model):
        calls.append("trainable")
        return model.train()

    given = {
        "load": lambda: calls.append("load") or (model, tokenizer),
        "folder": lambda: calls.append("folder") or (Path("tiny"), tokenizer),
        "trainable": trainable,
        "longest_prompt": 12,
        "max_tokens": 30,
        "num_sequences": 2000,
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "autocast": None,
        "seed": 3,
        "tell": calls.append,
        "stage": lambda text: nullcontext(calls.append(text)),
    }
    return EngineSpec(**given | changes)


class FakeVllm:
    def __init__(self, folder, options, *, eos_token_ids, seed):
        self.calls, self.weight_sync = [], SimpleNamespace(way="fold", reason="no slots")
        self.options, self.eos_token_ids, self.seed = options, eos_token_ids, seed
        FakeVllm.last = self

    def shared_model(self, dtype):
        return load_model("tiny:qwen3", "fp32")[0].to(dtype), "all shared"

    def attach(self, model):
        self.calls.append("attach")

    def close(self):
        self.calls.append("close")


@pytest.mark.parametrize(
    ("version", "gpu", "words"),
    [
        (None, False, "vLLM is not installed, and PyTorch sees no GPU; set engine='torch'"),
        (None, True, "is not installed; `fxrl doctor` says how to"),
        ("0.25.1", False, "vLLM 0.25.1 is built for GPUs, and PyTorch sees no GPU"),
        ("0.25.1", True, None),
        ("0.25.1+cpu", False, None),
    ],
)
def test_an_engine_that_a_machine_cannot_have(tmp_path, monkeypatch, version, gpu, words):
    """The packages are folders here, for this machine has one vLLM or none."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    if version is not None:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").touch()
        (tmp_path / "vllm-1.dist-info").mkdir()
        about = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        (tmp_path / "vllm-1.dist-info" / "METADATA").write_text(about)
    with nullcontext() if words is None else pytest.raises(EngineError, match=words):
        check_engine("vllm")
    check_engine("torch")


@pytest.fixture
def vllm(monkeypatch):
    monkeypatch.setattr("fxrl.engines.vllm.engine.VllmEngine", FakeVllm)


def test_the_engines_are_those_that_a_configuration_may_name():
    hints = typing.get_type_hints(TrainConfig)
    assert set(typing.get_args(hints["engine"])) == ENGINES.keys()


def test_the_embedded_engine_samples_with_the_trainers_model():
    calls = []
    model, _, engine = build_engine("torch", spec(calls))
    assert calls == ["load", "trainable"]
    assert isinstance(engine, TorchEngine)
    assert engine.model is model
    assert model.training


def test_vllm_comes_before_the_model_and_is_told_of_it(vllm):
    calls = []
    _, tokenizer, engine = build_engine("vllm", spec(calls, autocast=torch.bfloat16))
    assert [call for call in calls if " " not in call] == ["folder", "trainable"]
    assert calls[-1] == "rollouts take the trained weights by 'fold': no slots"
    assert engine.calls == ["attach"]
    assert (engine.options.max_model_len, engine.options.dtype) == (42, "bfloat16")
    assert (engine.eos_token_ids, engine.seed) == ([tokenizer.eos_token_id], 3)


def test_options_that_are_given_stand(vllm):
    options = VllmOptions(max_model_len=99, dtype="float16", max_num_seqs=5)
    _, _, engine = build_engine("vllm", spec([], options=options))
    assert engine.options == options


@pytest.mark.parametrize(("grow", "longest"), [(True, 1024), (False, 4126)])
def test_prompts_that_may_grow_ask_for_no_more_than_the_models_positions(
    grow, longest, vllm, tmp_path
):
    """Else vLLM would refuse a model of 1024 positions before any prompt was too long for it."""
    model, tokenizer = load_model("tiny:qwen3", "fp32")
    model.config.save_pretrained(tmp_path)
    told = {"folder": lambda: (tmp_path, tokenizer), "longest_prompt": 4096}
    _, _, engine = build_engine("vllm", spec([], prompts_grow=grow, **told))
    assert engine.options.max_model_len == longest


def test_an_engine_that_cannot_serve_the_device_is_closed(vllm):
    with pytest.raises(
        ConfigError, match=r"model.device is cuda, but vLLM .* are on cpu; use auto"
    ):
        build_engine("vllm", spec([], device=torch.device("cuda")))
    assert FakeVllm.last.calls == ["close"]


def test_an_unknown_engine_names_the_known_ones():
    with pytest.raises(EngineError, match="'sglang' is unknown; use one of torch, vllm"):
        build_engine("sglang", spec([]))


@pytest.mark.parametrize(
    ("given", "num_sequences", "most"), [(None, 8, 8), (None, 4000, 1024), (4, 4000, 4)]
)
def test_vllm_decodes_a_step_at_once_unless_told_otherwise(vllm, given, num_sequences, most):
    options = VllmOptions(max_num_seqs=given)
    _, _, engine = build_engine("vllm", spec([], options=options, num_sequences=num_sequences))
    assert engine.options.max_num_seqs == engine.options.num_sequences == most
    assert VllmOptions().num_sequences == 256, "outside of a run"


@pytest.mark.parametrize(
    ("options", "rank", "slots"),
    [
        ({}, 12, None),
        ({"quantization": "fp8"}, None, None),
        ({"quantization": "fp8"}, 12, 16),
        ({"quantization": "fp8"}, 2, 8),
        ({"quantization": "fp8", "max_lora_rank": 64}, 12, 64),
    ],
)
def test_quantized_weights_have_slots_for_the_adapter(vllm, options, rank, slots):
    calls = []
    given = spec(calls, options=VllmOptions(**options), lora_rank=rank)
    engine = build_engine("vllm", given).engine
    assert engine.options.max_lora_rank == slots
    told = [call for call in calls if "LoRA slots of rank" in str(call)]
    assert len(told) == (slots is not None and "max_lora_rank" not in options)
