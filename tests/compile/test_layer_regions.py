"""Layers of real architectures as regions: which share a body, and that gradients are eager's."""

from __future__ import annotations

from dataclasses import replace

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
        pytest.param("gemma3", 2, 2, 2, False, marks=pytest.mark.slow),
        pytest.param("gpt2", 3, 3, 1, False, marks=pytest.mark.slow),
        ("mixtral", 2, 4, 3, False),
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
    model, ids = nn.ModuleDict(parts).double(), torch.randint(0, 61, (3, 7))

    def loss_fn(model: nn.ModuleDict, ids: Tensor) -> Tensor:
        hidden = model["embed"](ids)
        for layer in model["layers"]:
            hidden = layer(hidden)
        logps = torch.log_softmax(model["head"](hidden)[:, :-1], -1)
        return -logps.gather(-1, ids[:, 1:, None]).mean()

    wanted = gradients(model, loss_fn(model, ids))
    passes = ("fuse-linear-logprob", "recompute")  # no mask of numbers has factors
    step = optimize(model, loss_fn, replace(CONFIG, passes=passes))
    got = gradients(model, step(ids))
    assert "outline-layers" in {remark.pass_name for remark in step.report.of_kind("applied")}
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
