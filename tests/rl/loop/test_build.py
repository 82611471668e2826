"""Model and engine in the order that vLLM needs, with options that follow from the run."""

import json
from types import SimpleNamespace

import pytest
import torch

from fxrl.engines import EngineError, TorchEngine
from fxrl.models import load_model, lora
from fxrl.rl.config.tables import LoraConfig, ModelConfig
from fxrl.rl.loop.build import prompts_each
from fxrl.rl.loop.scoring import reference
from fxrl.rl.train import main

CALLS = []


class Report:
    def __str__(self):
        return "14 of 14 tensors shared with vLLM"


class FakeVllm(TorchEngine):
    """vLLM's place: it has the weights, and the trainer's model is made of them."""

    fails_at = ""

    def __init__(self, folder, options, *, eos_token_ids, seed):
        CALLS.append(("engine", options))
        model, _ = load_model(folder, options.dtype)
        super().__init__(model, eos_token_ids=eos_token_ids, pad_token_id=0, seed=seed)
        self.weight_sync = SimpleNamespace(way="fold", reason="no slots")

    def shared_model(self, dtype):
        CALLS.append(("shared_model", dtype))
        return self.model, Report()

    def attach(self, model):
        if self.fails_at == "attach":
            raise EngineError("no route")
        CALLS.append(("attach", model))
        self.model = model

    def update_lora(self, *, policy_version):
        CALLS.append(("update_lora", policy_version))
        super().update_lora(policy_version=policy_version)

    def update_weights(self, *, policy_version):
        CALLS.append(("update_weights", policy_version))
        super().update_weights(policy_version=policy_version)

    def close(self):
        CALLS.append(("close",))
        super().close()


@pytest.fixture
def fake(monkeypatch):
    CALLS.clear()
    monkeypatch.setattr("fxrl.engines.vllm.engine.VllmEngine", FakeVllm)
    monkeypatch.setattr("fxrl.engines.vllm.door.check_machine", lambda: None)
    monkeypatch.setattr(FakeVllm, "fails_at", "")
    return FakeVllm


def train(file, *overrides):
    return main(str(file), ["run_dir=out", "engine=vllm", "steps=2", *overrides], json=True)


def test_the_order_and_what_follows_from_the_run(config_file, fake, capsys):
    assert train(config_file, "eval.size=2") == 0
    names = [call[0] for call in CALLS]
    assert names == ["engine", "shared_model", "attach", *["update_lora"] * 3, "close"]
    assert [call[1] for call in CALLS if call[0] == "update_lora"] == [0, 1, 2]
    options = CALLS[0][1]
    prompt = len("<|im_start|>user\ncount to 0<|im_end|>\n<|im_start|>assistant\n")
    # special tokens are one token each: 12, 10 and 12 characters of markup
    assert options.max_model_len == prompt - 11 - 9 - 11 + 8
    assert (options.max_num_seqs, options.dtype) == (8, "float32")
    assert CALLS[1][1] == torch.float32
    assert any("lora" in name for name, _ in CALLS[2][1].named_parameters())
    out = capsys.readouterr().out
    assert "14 of 14 tensors shared" in out
    assert "by 'fold': no slots" in out


def test_given_options_stand(config_file, fake):
    extra = ("vllm.max_model_len=100", "vllm.max_num_seqs=3", "vllm.dtype=float32")
    assert train(config_file, *extra, "model.autocast=bfloat16") == 0
    options = CALLS[0][1]
    assert (options.max_model_len, options.max_num_seqs, options.dtype) == (100, 3, "float32")


def test_an_engine_that_is_not_here_is_refused_before_anything_is_loaded(
    config_file, monkeypatch, capsys
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(str(config_file), ["engine=vllm", "model.id=no/model"], json=True) == 2
    out = capsys.readouterr().out
    assert "engine='vllm'" in out
    assert "tokenizer" not in out


def test_the_engine_computes_as_the_trainer_does(config_file, fake):
    assert train(config_file, "model.autocast=bfloat16", "steps=1") == 0
    assert CALLS[0][1].dtype == "bfloat16"
    assert CALLS[1][1] == torch.float32


def test_all_weights_are_told_of_as_weights(config_file, fake):
    assert train(config_file, "model.lora=none", "optim.lr=1e-3") == 0
    assert [call[0] for call in CALLS][3:-1] == ["update_weights"] * 3


def test_an_engine_that_cannot_serve_is_closed(config_file, fake, capsys, monkeypatch):
    monkeypatch.setattr(fake, "fails_at", "attach")
    assert train(config_file) == 1
    assert "no route" in json.loads(capsys.readouterr().out.splitlines()[-1])["text"]
    assert CALLS[-1] == ("close",)


def test_float64_is_refused_before_anything_is_built(config_file, fake, capsys):
    assert train(config_file, "model.dtype=float64") == 2
    assert "vLLM has no float64" in capsys.readouterr().out
    assert CALLS == []


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"dtype": "bfloat16", "lora": LoraConfig()}, torch.bfloat16),  # the adapter is float32
        ({"dtype": "bfloat16"}, None),
        ({"dtype": "float32", "lora": LoraConfig()}, None),
        ({"dtype": "bfloat16", "lora": LoraConfig(), "autocast": None}, None),
        ({"dtype": "float32", "autocast": "bfloat16"}, torch.bfloat16),
    ],
)
def test_auto_is_autocast_where_adapters_are_wider_than_the_weights(options, dtype):
    assert ModelConfig(id="tiny:llama", **options).autocast_dtype is dtype


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_a_drift_is_told_of_an_engine_with_kernels_of_its_own(
    config_file, fake, engine, monkeypatch, capsys
):
    """The embedded engine's difference is rounding, and vLLM's advice would mislead."""
    monkeypatch.setattr("fxrl.rl.drift.DriftWatch.warning", lambda self, record: "drift: 0.05")
    extra = ["run_dir=out", "steps=1", f"engine={engine}"]
    assert main(str(config_file), extra, json=True) == 0
    assert ("step 1: drift: 0.05" in capsys.readouterr().out) is (engine == "vllm")


def trained_adapter():
    """An adapter as supervised training leaves it: not zero."""
    model = lora(load_model("tiny:llama:layers=1,hidden=32,heads=2,kv_heads=1")[0], 4, 8, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5)
    return model


@pytest.mark.parametrize("new_adapter", [False, True], ids=["given", "made here"])
def test_the_reference_is_the_policy_that_training_began_with(new_adapter):
    model, ids = trained_adapter(), torch.arange(5, 25)[None]
    trained = [p for p in model.parameters() if p.requires_grad]
    if new_adapter:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(0.0 if "lora_B" in name else 1.0)

    def logits(policy):
        with torch.no_grad():
            return policy(input_ids=ids).logits

    start = logits(model)
    assert reference(model, new_adapter, lasts=False)[0] is model, "which nobody asks later"
    policy, context = reference(model, new_adapter, lasts=True)
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.3)
    assert not torch.allclose(logits(model), start)
    with context():
        assert torch.equal(logits(policy), start)
    own = {id(p) for p in policy.parameters()} - {id(p) for p in model.parameters()}
    assert len(own) == (0 if new_adapter else len(trained)), "frozen weights are there once"


@pytest.mark.parametrize(
    ("adapter", "dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, None)]
)
def test_auto_is_autocast_for_such_a_model_itself(adapter, dtype):
    model = trained_adapter()
    for parameter in model.parameters():
        parameter.data = parameter.to(adapter if parameter.requires_grad else torch.bfloat16)
    assert ModelConfig(id=model, dtype="bfloat16").autocast_dtype is dtype


@pytest.mark.parametrize(("size", "prompts"), [(1, 5), (2, 3), (4, 2), (8, 1)])
def test_an_engine_is_as_large_as_its_ranks_share_of_a_step(size, prompts):
    config = SimpleNamespace(prompts_per_step=5)
    assert prompts_each(config, SimpleNamespace(size=size)) == prompts
