"""Layers of real architectures as regions: which share a body, and that gradients are eager's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("peft")


from fxrl import losses
from fxrl.config import Config
from fxrl.passes import REGISTRY
from fxrl.step import optimize
from tests.capture.mixer import fixed
from tests.compile.test_architectures import gradients, padded_batch, tiny_model

#: Naming the pass asks for it at every size; see ``Plan.from_config``.
CONFIG = Config(
    min_saved_bytes=0,
    chunk_tokens=8,
    compile_regions=False,
    on_miss="error",
    passes=tuple(REGISTRY),
)


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize(
    ("kind", "layers", "calls", "bodies", "checkpointed"),
    [
        pytest.param("qwen3", 3, 3, 1, False, marks=pytest.mark.slow),
        ("qwen3", 3, 3, 1, True),
        pytest.param("gemma3", 2, 2, 1, False, marks=pytest.mark.slow),
        pytest.param("gpt2", 3, 3, 1, False, marks=pytest.mark.slow),
        ("mixtral", 2, 2, 1, False),
    ],
)
def test_layers_become_regions(
    kind: str,
    layers: int,
    calls: int,
    bodies: int,
    checkpointed: bool,
) -> None:
    model, batch = tiny_model(kind, layers), fixed(padded_batch())
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    loss_fn = losses.grpo(beta=0.0)
    expected, _ = loss_fn(model, batch)
    wanted = gradients(model, expected)

    step = optimize(model, loss_fn, CONFIG)
    loss, _ = step(batch)
    got = gradients(model, loss)

    cuts = [r.reason for r in step.report.of_kind("applied") if r.pass_name == "recompute"]
    assert len(cuts) == layers
    assert all(cut.startswith("recompute: " if checkpointed else "keep: ") for cut in cuts)
    (remark,) = (r for r in step.report.of_kind("applied") if r.pass_name == "outline-layers")
    compiled = "body" if bodies == 1 else "bodies"
    assert f"in {calls} calls of {bodies} compiled {compiled}" in remark.reason
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        error = (got[name] - gradient).norm() / gradient.norm().clamp_min(1e-12)
        assert error < 1e-10, (name, float(error))


def token_loss(model: nn.ModuleDict, ids: Tensor) -> Tensor:
    hidden = model["embed"](ids)
    for layer in model["layers"]:
        hidden = layer(hidden)
    logps = torch.log_softmax(model["head"](hidden)[:, :-1], -1)
    return -logps.gather(-1, ids[:, 1:, None]).mean()


class LearnedMaskLayer(nn.Module):
    """As Doge's: what is added to the attention scores is learned, so it gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.decay = nn.LayerNorm(8), nn.Linear(8, 2)
        self.projections = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        *given, out = self.projections
        split = [p(self.norm(x)).view(rows, length, 2, 4).transpose(1, 2) for p in given]
        decay = self.decay(split[2].transpose(1, 2).reshape(rows, length, 8))
        bias = nn.functional.softplus(decay).mT[:, :, None].expand(-1, -1, length, length)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = nn.functional.scaled_dot_product_attention(*split, bias.masked_fill(later, -1e9))
        return x + out(mixed.transpose(1, 2).reshape(rows, length, 8))


def test_a_gradient_that_lies_otherwise_at_run_time() -> None:
    """The kernel of attention, and so the layout of the mask's gradient, is chosen at run time."""
    torch.manual_seed(0)
    parts = {"layers": nn.ModuleList([LearnedMaskLayer() for _ in range(2)])}
    parts |= {"embed": nn.Embedding(61, 8), "head": nn.Linear(8, 61, bias=False)}
    model, ids = nn.ModuleDict(parts).double(), fixed(torch.randint(0, 61, (3, 7)))

    wanted = gradients(model, token_loss(model, ids))
    passes = ("fuse-linear-logprob", "recompute")  # no mask of numbers has factors
    step = optimize(model, token_loss, replace(CONFIG, passes=passes))
    got = gradients(model, step(ids))
    assert "outline-layers" in {remark.pass_name for remark in step.report.of_kind("applied")}
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def by_groups(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    parts = x.tensor_split(ends[:-1].cpu())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def fake_by_groups(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return torch.empty(x.shape[0], weights.shape[2], dtype=x.dtype, device=x.device)


def keep_groups(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def gradient_by_groups(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weights, ends = ctx.saved_tensors
    found, of_weights, start = torch.zeros_like(x), torch.zeros_like(weights), 0
    for index, end in enumerate(ends.tolist()):
        if end > start:
            found[start:end] = grad[start:end] @ weights[index].mT
            of_weights[index] = x[start:end].mT @ grad[start:end]
        start = end
    return found, of_weights, None


NAME = "fxrl_test_regions::by_groups"
SCHEMA = "(Tensor x, Tensor weights, Tensor ends) -> Tensor"
torch.library.custom_op(NAME, by_groups, mutates_args=(), schema=SCHEMA)
torch.library.register_fake(NAME, fake_by_groups)
torch.library.register_autograd(NAME, gradient_by_groups, setup_context=keep_groups)


class Grouped(nn.Module):
    """A mixture of experts by an op whose backward asks how many tokens each has, as transformers'
    is where a device has no grouped product of the dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(8), nn.Linear(8, 3)
        self.up, self.down = (nn.Parameter(torch.randn(3, *s)) for s in ((8, 12), (12, 8)))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        share, chosen = self.gate(tokens).softmax(-1).max(-1)
        order = chosen.argsort()
        ends = (chosen[:, None] == torch.arange(3)).sum(0).cumsum(0)
        product = torch.ops.fxrl_test_regions.by_groups
        wide = nn.functional.silu(product(tokens[order], self.up, ends))
        mixed = product(wide, self.down, ends)[order.argsort()] * share[:, None]
        return x + mixed.view_as(x)


def test_an_op_whose_gradient_asks_what_tensors_hold() -> None:
    """It runs between the bodies of its layer, under autograd itself."""
    torch.manual_seed(0)
    parts = {"layers": nn.ModuleList([Grouped() for _ in range(2)])}
    parts |= {"embed": nn.Embedding(61, 8), "head": nn.Linear(8, 61, bias=False)}
    model = nn.ModuleDict(parts).double()
    step = optimize(model, token_loss, CONFIG)
    for length in (7, 9):
        ids = torch.randint(0, 61, (3, length))
        wanted = gradients(model, token_loss(model, ids))
        torch.testing.assert_close(gradients(model, step(ids)), wanted, rtol=1e-10, atol=1e-10)
    assert len(step.captures) == 1
    (remark,) = (r for r in step.report.of_kind("applied") if r.pass_name == "outline-layers")
    assert "in 4 calls of 2 compiled bodies" in remark.reason
