"""Mixtures of experts: the head is rewritten and all numbers are eager's, adapted or not.

A mixture is a row of ``MIXTURES``: how its experts are written. Each is run as it is, and under
LoRA on attention and on its experts: on parameters that hold all of them, or on each one's own. One
of either kind is run under LoRA on attention alone, where no expert has a gradient; and one whose
tokens leave experts out, so that branches in the layers turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxrl.step import optimize
from tests.capture.mixer import (
    CONFIG,
    VOCAB,
    assert_matches_eager,
    fixed,
    fused,
    make_batch,
    token_logps,
)
from tests.rows import rows

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WIDTH, EXPERTS, TOP = 16, 4, 2
Loop = Callable[[nn.ModuleList, Tensor, Tensor, Tensor], Tensor]


# ---------------------------------------------------------------------------- loops in Python
def where(experts: nn.ModuleList, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """As Mixtral's was for two years, and remote code still is."""
    out = torch.zeros_like(x)
    for index, expert in enumerate(experts):
        token, place = torch.where(chosen == index)
        out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
    return out


def unless_empty(experts: nn.ModuleList, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for index, expert in enumerate(experts):
        token, place = torch.where(chosen == index)
        if token.numel() > 0:
            out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
    return out


def each_hit(experts: nn.ModuleList, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Data say which module is called, so graphs end in each layer: the head is captured still."""
    out = torch.zeros_like(x)
    for index in chosen.unique().tolist():
        token, place = torch.where(chosen == index)
        out = out.index_add(0, token, experts[index](x[token]) * weights[token, place, None])
    return out


def each_in_place(experts: nn.ModuleList, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Graphs end inside of the sum that they add to, and begin inside of experts."""
    out = torch.zeros_like(x)
    for hit in nn.functional.one_hot(chosen, EXPERTS).sum((0, 1)).nonzero():
        index = int(hit)
        token, place = torch.where(chosen == index)
        out.index_add_(0, token, experts[index](x[token]) * weights[token, place, None])
    return out


def dense(experts: nn.ModuleList, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    share = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, chosen, weights)
    return sum(expert(x) * share[:, i, None] for i, expert in enumerate(experts))


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.loop = loop
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x)[:, None]
        mixed = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        x = x + self.o_proj(mixed[:, 0])
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(TOP)
        return x + self.loop(self.experts, flat, chosen, weights).view_as(x)


class Loops(nn.Module):
    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(loop) for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return transformers.modeling_outputs.CausalLMOutput(logits=self.lm_head(x))


# ---------------------------------------------------------------------------- experts in one tensor
def fused_experts(
    kind: str, implementation: str = "batched_mm", layers: int = 2, **sizes: Any
) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=2, num_experts_per_tok=TOP,
        max_position_embeddings=32, pad_token_id=0, **sizes,
    )  # fmt: skip
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation=implementation
    )
    return model


QWEN = {"head_dim": 8, "moe_intermediate_size": 24, "num_experts": EXPERTS}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
DEEPSEEK = LATENT | {
    "v_head_dim": 8, "n_routed_experts": EXPERTS, "moe_intermediate_size": 24, "n_group": 2,
    "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 0,
}  # fmt: skip
GPT = {
    "head_dim": 8, "num_local_experts": EXPERTS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip

#: The model, and whether all of the step is one graph.
MIXTURES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "qwen3": (lambda: fused_experts("Qwen3Moe", **QWEN), True),
    "gpt-oss": (lambda: fused_experts("GptOss", **GPT), True),
    "deepseek": (lambda: fused_experts("DeepseekV3", **DEEPSEEK), True),
    "mixtral-loop": (lambda: fused_experts("Mixtral", "eager", 1, num_local_experts=EXPERTS), True),
    "where": (lambda: Loops(where), True),
    "unless-empty": (lambda: Loops(unless_empty), True),
    "each-hit": (lambda: Loops(each_hit), False),
    "each-in-place": (lambda: Loops(each_in_place), False),
    "dense": (lambda: Loops(dense), True),
}
FROZEN = ("qwen3", "where", "unless-empty")
FUSED = ["experts.gate_up_proj", "experts.down_proj"]


def adapted(model: nn.Module, adapter: str) -> nn.Module:
    targets: dict[str, Any] = {"target_modules": ["o_proj"]}
    if adapter == "experts" and isinstance(model, Loops):
        targets = {"target_modules": ["o_proj", "up", "down"]}
    elif adapter == "experts":
        targets |= {"target_parameters": FUSED}
    if adapter != "none":
        lora = peft.LoraConfig(r=2, init_lora_weights=False, **targets)
        model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    for parameter in model.parameters():  # experts that are one tensor begin as they were allocated
        nn.init.normal_(parameter, std=0.3)
    return model.double()


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    logps = token_logps(model(input_ids=batch["ids"]).logits, batch["ids"])
    ratio = torch.exp(logps - logps.detach() + batch["adv"] / 8)
    gain = torch.minimum(ratio * batch["adv"], ratio.clamp(0.8, 1.2) * batch["adv"])
    return -(gain * batch["mask"]).sum() / batch["mask"].sum()


CASES = [(kind, adapter) for kind in MIXTURES for adapter in ("none", "experts")]
CASES += [(kind, "attention") for kind in FROZEN]
#: Without adapters all is trained and sizes vary: one of each way of writing experts.
SELDOM = [(kind, "none") for kind in ("gpt-oss", "deepseek", "mixtral-loop", "where", "dense")]
SELDOM += [("where", "attention"), ("unless-empty", "attention"), ("each-hit", "none")]
SELDOM += [("unless-empty", "none"), ("deepseek", "experts"), ("qwen3", "attention")]
SELDOM += [("where", "experts")]  # as unless-empty, without a branch


@pytest.mark.parametrize("case", rows(CASES, SELDOM), ids="-".join)
def test_a_mixture(case: tuple[str, str]) -> None:
    torch.manual_seed(0)
    kind, adapter = case
    make, whole = MIXTURES[kind]
    model = adapted(make(), adapter)
    step = optimize(model, loss_fn, CONFIG)
    sizes_vary = adapter == "none"  # adapters read no sizes
    batches = [make_batch(), make_batch(4, 9, seed=2)] if sizes_vary else [fixed(make_batch())]
    for batch in batches:
        assert_matches_eager(step, loss_fn, model, batch)
    assert fused(step)
    assert not step.report.of_kind("missed")
    assert (len(step.captures) == 1) is whole
    assert not any("forward" in vars(part) for part in model.modules())


def test_adapted_experts_are_multiplied_as_two_products() -> None:
    """By grouped products, which eager code has in float32 at most."""
    torch.manual_seed(0)
    if not hasattr(torch.ops.transformers, "grouped_mm_fallback_backward"):  # up to 5.17
        pytest.skip("the gradient of such a product reads numbers, so it stays one call")
    model = adapted(fused_experts("Qwen3Moe", "grouped_mm", **QWEN), "experts").float()
    batch = fixed(make_batch())
    batch = {k: x.float() if x.is_floating_point() else x for k, x in batch.items()}
    step = optimize(model, loss_fn, CONFIG)
    assert_matches_eager(step, loss_fn, model, batch, 1e-4)
    split = [r for r in step.report.of_kind("applied") if r.pass_name == "split-adapted-weights"]
    assert len(split) == 4, "two parameters in each of two layers"
