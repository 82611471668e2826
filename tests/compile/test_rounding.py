"""Compiled layers round where eager rounds: in bf16 too, what is scored is what is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from fxrl import Config, TrainStep, optimize
from fxrl.models import load_model, lora
from tests.capture.mixer import fixed
from tests.passes.layered import Stack, ids_batch, make_stack, square_loss

PASSES = ("restore-causal-attention", "outline-layers", "recompute", "fuse-linear-logprob")
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def logps_of(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(input_ids=batch["ids"]).logits[:, :-1].float()
    logps = logits.log_softmax(-1).gather(-1, batch["ids"][:, 1:, None])
    return logps.sum(), {"logps": logps}


def policy(device: str, layers: int) -> nn.Module:
    """bf16, under an adapter in fp32; as wide as products must be for an operand of a few rows more
    to round otherwise."""
    sizes = f"layers={layers},hidden=1024,intermediate=2048"
    model, _ = load_model(f"tiny:qwen3:{sizes}", "bf16", device, seed=1)
    return lora(model, r=4, seed=2)


def step_of(model: nn.Module, compiled: bool) -> TrainStep:
    config = Config(min_saved_bytes=0, compile_regions=compiled, passes=PASSES, on_miss="error")
    return optimize(model, logps_of, config)


def logps(step: TrainStep, model: nn.Module, ids: Tensor) -> Iterator[Tensor]:
    """Of each token while it is trained, scored, and by the reference; what is not asked for is not
    computed."""
    for context in (nullcontext(), torch.no_grad(), model.disable_adapter()):
        with context, torch.autocast(ids.device.type, torch.bfloat16):
            found = step({"ids": ids})[1]["logps"].detach()
        yield found


@pytest.mark.usefixtures("fresh_dynamo")
def test_what_is_scored_has_the_bits_of_what_is_trained():
    torch.manual_seed(0)
    model, ids = policy("cpu", 1), fixed(torch.randint(3, 200, (4, 400)))
    step = step_of(model, False)
    for scale in (0.0, 1e-6):
        with torch.no_grad():
            for name, value in model.named_parameters():
                if "lora_B" in name:
                    value.normal_(0, scale)
        found = logps(step, model, ids)
        trained = next(found)
        assert torch.equal(trained, next(found))
        if scale == 0.0:
            assert torch.equal(trained, next(found))


class Residual(nn.Module):
    """Two sums in a row, which Inductor makes one kernel of."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tiny = nn.Parameter(torch.rand(width))
        self.wide = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x * self.wide + 1e-4 * self.tiny)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.skipif(TORCH < (2, 13), reason="its C++ kernels do not round where they are told")
def test_a_compiled_layer_has_the_bits_of_one_that_runs_op_by_op():
    """bf16 drops the tiny addend; kept until the second sum, it would decide that one's ties."""
    model, batch = make_stack(2, block=Residual, width=64).bfloat16(), ids_batch(8, 32)
    found = []
    for compiled in (False, True):
        config = Config(passes=("outline-layers", "recompute"), compile_regions=compiled)
        loss = optimize(model, lambda m, b: m(b["ids"]).double().square().sum(), config)(batch)
        found += [torch.autograd.grad(loss, list(model.parameters()))]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_dynamo")
def test_on_a_gpu():
    model, ids = policy("cuda", 4), torch.randint(3, 200, (4, 512), device="cuda")
    trained, scored, reference = logps(step_of(model, True), model, ids)
    assert torch.equal(trained, scored)
    assert torch.equal(trained, reference)


class Biased(nn.Module):
    """A layer with a bias that is learned by the distance of two tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 8)
        self.by_distance = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        bias = self.by_distance[(at[:, None] - at).abs().clamp(max=3)]
        return x + self.out(torch.tanh(bias @ self.norm(x) / 64))


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_dynamo")
def test_many_rows_that_are_added_to_one_place():
    """4 million terms in bf16, whose own sum of ones ends at 256: what comes out is the same each
    time, and within a fifth of what it is in fp32 throughout (they cancel for the most part)."""
    torch.manual_seed(0)
    exact = Stack([Biased(), Biased()]).cuda()
    model = deepcopy(exact).bfloat16()
    exact.load_state_dict(model.state_dict())
    config = Config(min_saved_bytes=0, passes=("outline-layers", "recompute"), on_miss="error")
    step, batch = optimize(model, square_loss, config), ids_batch(1, 2048)
    batch = {"ids": batch["ids"].cuda()}
    tables = [[block.by_distance for block in one.blocks] for one in (model, exact)]
    first, again = (torch.autograd.grad(step(batch), tables[0]) for _ in range(2))
    assert "outline-layers" in {remark.pass_name for remark in step.report.of_kind("applied")}
    wanted = torch.autograd.grad(square_loss(exact, batch), tables[1])
    for found, same, true in zip(first, again, wanted, strict=True):
        assert torch.equal(found, same)
        assert float((found - true).norm() / true.norm()) < 0.2
