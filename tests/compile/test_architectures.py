"""Every architecture, as LoRA and in full: the head is fused and all gradients are eager's.

GRPO with a KL term, left padding and masked tokens, in float64. Models are random and have one
layer; what differs between architectures (norms, caps, scales, biases, experts, tied heads) is
all in it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("peft")

import transformers

from fxrl import losses
from fxrl.config import Config
from fxrl.models import TINY_KINDS, lora, tiny_config
from fxrl.step import optimize
from tests.capture.mixer import fixed
from tests.rows import rows

CONFIG = Config(min_saved_bytes=0, chunk_tokens=8, compile_regions=False, on_miss="error")
#: Captured with a symbolic batch and length; fixed sizes compile five times faster.
DYNAMIC = ("gemma3", "gpt2", "gpt-oss")


def tiny_model(kind: str, layers: int = 1, *, full: bool = False) -> nn.Module:
    config = tiny_config(kind, layers=layers, hidden=16, intermediate=24, head_dim=4, experts=2)
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).double()
    if full:
        return model
    model = lora(model, r=2, fp32_adapter=False)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero to begin with, which would hide A's gradient
            nn.init.normal_(parameter, std=0.1)
    return model


def padded_batch(
    rows: int = 3, prompt: int = 4, completion: int = 5, *, left: bool = True
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def logps() -> Tensor:
        return -4 - torch.rand(rows, completion, generator=generator, dtype=torch.float64)

    length = prompt + completion
    attention_mask = torch.ones(rows, length, dtype=torch.int64)
    attention_mask[0, :2] = 0 if left else 1
    attention_mask[0, -2:] = 1 if left else 0
    return {
        "input_ids": torch.randint(3, 250, (rows, length), generator=generator),
        "attention_mask": attention_mask,
        "completion_mask": torch.rand(rows, completion, generator=generator) > 0.3,
        "old_logps": logps(),
        "ref_logps": logps(),
        "advantages": torch.randn(rows, generator=generator, dtype=torch.float64),
    }


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    named = model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


#: As LoRA all but Llama's twins; in full one of each way of biases, norms, heads and experts.
TRAINED = [(how, kind) for how in ("lora", "full") for kind in TINY_KINDS]
ALIKE = ("qwen3", "mistral", "gemma2", "granite", "phi3", "olmo2", "smollm3")


#: What is theirs alone is in their row that trains all.
SEEN = ("mistral", "smollm3", "gpt-oss", "mixtral", "llama", "qwen2", "olmo2")
#: Granite's scaled logits are cohere's, phi3's one product for queries, keys and values is gpt2's,
#: and qwen3 is what most other tests are of.
SEEN += ("granite", "phi3", "qwen3")


@pytest.mark.parametrize(
    "case",
    rows(
        TRAINED,
        [("full", k) for k in (*ALIKE, "gemma3", "qwen2", "cohere", "gpt2", "llama")]
        + [("lora", k) for k in SEEN],
    ),
    ids="-".join,
)
def test_head_fused_and_gradients_are_eagers(case: tuple[str, str]) -> None:
    full, kind = case[0] == "full", case[1]
    # Newer transformers runs gemma2's attention eagerly, with a float32 softmax: the float64
    # minimum of a left-padding token's row is -inf there, and eager itself gives NaN.
    model, batch = tiny_model(kind, full=full), padded_batch(left=kind != "gemma2")
    if full or kind not in DYNAMIC:
        fixed(batch)
    loss_fn = losses.grpo(beta=0.1)
    expected, expected_metrics = loss_fn(model, batch)
    wanted = gradients(model, expected)

    step = optimize(model, loss_fn, CONFIG)
    loss, metrics = step(batch)
    got = gradients(model, loss)

    applied = step.report.of_kind("applied")
    assert [remark.pass_name for remark in applied] == ["fuse-linear-logprob"]
    assert "never exist" in applied[0].reason
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-9)
    for name, value in expected_metrics.items():
        torch.testing.assert_close(metrics[name], value, rtol=1e-7, atol=1e-9)
    assert got.keys() == wanted.keys()
    assert any(gradient.abs().max() > 1e-6 for gradient in wanted.values())
    for name, gradient in wanted.items():
        error = (got[name] - gradient).norm() / gradient.norm().clamp_min(1e-12)
        assert error < 1e-9, (name, float(error))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_attention_whose_kernel_lays_out_its_result_otherwise(checkpointed: bool) -> None:
    """T5's position bias requires grad: attention takes another kernel than over fake tensors.
    Where layers are checkpointed even one of zeros is told to."""
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).double()
    if checkpointed:
        model.gradient_checkpointing_enable()
    generator = torch.Generator().manual_seed(1)
    ids = {"input_ids": (2, 7), "decoder_input_ids": (2, 5)}
    batch = {n: torch.randint(1, 64, size, generator=generator) for n, size in ids.items()}
    fixed(batch)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        logps = torch.log_softmax(model(**batch, use_cache=False).logits[:, :-1], -1)
        return -logps.gather(-1, batch["decoder_input_ids"][:, 1:, None]).mean()

    wanted = gradients(model, loss_fn(model, batch))
    step = optimize(model, loss_fn, CONFIG)
    got = gradients(model, step(batch))
    assert [r.pass_name for r in step.report.of_kind("applied")] == ["fuse-linear-logprob"]
    assert len(step.captures) == 1
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-8, atol=1e-10)
