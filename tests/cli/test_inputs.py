"""Words of the command line become a model, a loss, a Config and a batch, or one clear error."""

import argparse
import json

import pytest
import torch

from fxrl.cli import inputs, main, parse
from fxrl.cli.inputs import make_batch
from fxrl.config import Config
from fxrl.errors import ConfigError
from fxrl.losses import FACTORIES
from fxrl.models import ModelError, Quantization

USER_LOSS = """
import torch

def nll(model, batch):
    logits = model(input_ids=batch["ids"]).logits[:, :-1]
    logp = torch.log_softmax(logits.float(), -1).gather(-1, batch["ids"][:, 1:, None])
    return -logp.mean()

def factory(*, scale=1.0):
    return lambda model, batch: scale * nll(model, batch)

def ids(batch, tokens, completion, vocab):
    return {"ids": torch.randint(0, vocab, (batch, tokens))}
"""


def arguments(*extra: str) -> argparse.Namespace:
    return parse(
        ["verify", "tiny:qwen3", "--loss", "grpo", "--tokens", "24", "--completion", "9", *extra]
    )


def test_config_values_and_types():
    pairs = ["gpu_memory=75GiB", "chunk_tokens=8", "compile_regions=false", "on_miss=error"]
    assert inputs.optimize_config(pairs) == Config(
        gpu_memory="75GiB", chunk_tokens=8, compile_regions=False, on_miss="error"
    )
    assert inputs.optimize_config(['passes=["recompute"]']).passes == ("recompute",)
    pairs = ["pass_options.fp8-lora.recipe=block", 'pass_options.fp8-lora.skip=["k_proj"]']
    assert inputs.optimize_config(pairs).pass_options == {
        "fp8-lora": {"recipe": "block", "skip": ["k_proj"]}
    }
    assert inputs.optimize_config([]) == Config()


def test_config_error_names_everything_wrong():
    with pytest.raises(ConfigError) as caught:
        inputs.optimize_config(["chunk_token=8", "min_saved_bytes=lots", "nonsense"])
    text = str(caught.value)
    assert "did you mean 'chunk_tokens'?" in text
    assert "min_saved_bytes='lots' is not a size" in text
    assert "'nonsense' is not an override" in text


QWEN3_8B = {
    **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936},
    **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 1, "head_dim": 128},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False},
}
LAYERS = 36


@pytest.mark.parametrize(
    ("quantization", "layers", "whole", "ends"),
    [
        ("fp8", 0.5004, 0.576, 0.5004),
        pytest.param("nf4", 0.2813, 0.3905, 0.2813, marks=pytest.mark.slow),
    ],
)
def test_bytes_of_a_quantised_qwen3_8b(tmp_path, quantization, layers, whole, ends):
    """Embeddings and head, 15 % of bf16, stay unless they are asked for."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    found = []
    asked = ("--quantization", quantization)
    for extra in ((), asked, (*asked, "--quantize-embeddings")):
        words = ["plan", str(tmp_path / "config.json"), "--lora", "16", *extra]
        model = inputs.empty_model(parse(words))
        base = {n: p.nbytes for n, p in model.named_parameters() if "lora_" not in n}
        layer = sum(size for name, size in base.items() if ".layers." in name)
        found.append((layer, sum(base.values()) + (LAYERS - 1) * layer))
    (layer, all_of_it), (small_layer, small), (_, smallest) = found
    assert small_layer / layer == pytest.approx(layers, abs=5e-4)
    assert small / all_of_it == pytest.approx(whole, abs=5e-4)
    assert smallest / all_of_it == pytest.approx(ends, abs=5e-4)


@pytest.mark.parametrize(
    "how",
    [
        Quantization("nf4", skip=("k_proj",)),
        Quantization("nf4", embeddings=True, head=True),
        Quantization("int4", head=True),
        Quantization("fp8", "block", embeddings=True),
        Quantization("fp8", "tensor", embeddings=True, head=True),
    ],
    ids=str,
)
def test_a_quantised_checkpoint_is_planned_as_it_is(tmp_path, how):
    """By its tensors' names; by the words of its configuration, where there is no more."""
    size = "tiny:qwen3:layers=1,hidden=128,vocab=512,tie=0"
    model, _ = inputs.load_model(size, "bf16", quantization=how)
    model.save_pretrained(tmp_path)
    held = {n: (p.shape, p.dtype) for n, p in model.named_parameters()}

    def planned(*words):
        made = inputs.empty_model(parse(["plan", *words, "--lora", "4"]))
        named = made.base_model.model.named_parameters()
        rest = [(n.replace(".base_layer", ""), p) for n, p in named if "lora_" not in n]
        return {n: (p.shape, p.dtype) for n, p in rest}

    assert planned(str(tmp_path)) == held
    by_words = planned(str(tmp_path / "config.json"))
    untold = {n for n in held if "embed_tokens" in n} if how.format == "nf4" else set()
    assert {n: v for n, v in by_words.items() if n not in untold} == {
        n: v for n, v in held.items() if n not in untold
    }
    other = "fp8" if how.format == "nf4" else "nf4"
    with pytest.raises(ModelError, match=f"is quantised already, as {how.format}"):
        planned(str(tmp_path), "--quantization", other)


# Those compare with a teacher and have another head.
@pytest.mark.parametrize("name", sorted(FACTORIES.keys() - {"distill", "reward_model"}))
def test_every_loss_runs_on_the_made_batch(name):
    args = arguments()
    model = inputs.real_model(args, print)
    loss, metrics = inputs.loss_function(name, [])(model, make_batch(args, model, on_policy=True))
    loss.backward()
    assert torch.isfinite(loss)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert sum(float(g.abs().sum()) for g in grads) > 0, "a batch without gradient tests nothing"
    assert metrics


def test_loss_arguments():
    inputs.loss_function("grpo", ["beta=0.04"])
    with pytest.raises(ConfigError, match="beat"):
        inputs.loss_function("grpo", ["beat=0.04"])
    with pytest.raises(ConfigError, match="not an override"):
        inputs.loss_function("grpo", ["beta"])
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        inputs.loss_function("grpoo", [])


def test_users_loss_from_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "my_cli_losses.py").write_text(USER_LOSS)
    monkeypatch.chdir(tmp_path)
    args = arguments("--make-batch", "my_cli_losses:ids")
    model = inputs.real_model(args, print)
    batch = make_batch(args, model)
    assert batch["ids"].shape == (2, 24)
    plain = inputs.loss_function("my_cli_losses:nll", [])(model, batch)
    scaled = inputs.loss_function("my_cli_losses.py:factory", ["scale=3"])(model, batch)
    torch.testing.assert_close(scaled, 3 * plain)


def test_batch_shapes_masks_and_seed():
    args = arguments("--batch", "5")
    model = inputs.empty_model(args)
    batch = make_batch(args, model)
    assert batch["input_ids"].shape == (5, 24)
    assert batch["completion_mask"].shape == batch["old_logps"].shape == (5, 9)
    assert batch["attention_mask"][:, -9:].all(), "padding stands left of the prompt"
    assert (batch["completion_mask"].sum(1) >= 1).all()
    assert int(batch["input_ids"].max()) < model.config.vocab_size
    torch.testing.assert_close(batch, make_batch(args, model))


def test_completion_must_leave_a_prompt():
    args = arguments("--completion", "24")
    with pytest.raises(ConfigError, match="--completion 24 must be below --tokens 24"):
        make_batch(args, inputs.empty_model(args))


def test_empty_model_has_no_weights_and_takes_lora(tmp_path):
    config = {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    for name in (tmp_path / "config.json", tmp_path):
        args = parse(["explain", str(name), "--loss", "grpo", "--lora", "8"])
        model = inputs.empty_model(args)
        assert {p.device.type for p in model.parameters()} == {"meta"}
        trainable = [n for n, p in model.named_parameters() if p.requires_grad]
        assert trainable
        assert all("lora_" in n for n in trainable)
        assert model.training


def test_an_empty_adapter_computes_as_under_autocast():
    args = parse(["plan", "tiny:qwen3", "--lora", "8"])
    adapters = [
        m for n, m in inputs.empty_model(args, as_trained=True).named_modules() if "lora_A." in n
    ]
    assert {adapter.weight.dtype for adapter in adapters} == {torch.float32}
    x = torch.empty(2, adapters[0].in_features, device="meta")
    assert adapters[0](x).dtype == torch.bfloat16
    batch = make_batch(args, inputs.empty_model(args), as_trained=True)
    assert batch["right_padded"]
    assert batch["attention_mask"][:, 0].all()


def test_unreachable_hub_says_that_a_config_is_enough(monkeypatch):
    monkeypatch.setattr(inputs, "why_no_hub", lambda: "the hub cannot be reached")
    args = parse(["explain", "someone/no-such-model", "--loss", "grpo"])
    with pytest.raises(
        ModelError, match=r"folder, and the hub cannot be reached; its config\.json is"
    ):
        inputs.empty_model(args)


def test_device_must_be_there(capsys):
    assert main(["verify", "tiny:qwen3", "--loss", "grpo", "--device", "cuda:63"]) == 2
    assert "--device cuda:63" in capsys.readouterr().err
    assert main(["verify", "tiny:qwen3", "--loss", "grpo", "--device", "gpu"]) == 2
