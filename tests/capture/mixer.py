"""A small model whose steps compile fast, and the comparison with eager that tests share.

One mixing layer and a tied head stand in for a transformer where a feature does not depend on one.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fxrl.config import Config
from fxrl.step import TrainStep

CONFIG = Config(min_saved_bytes=0, chunk_tokens=8, compile_regions=False, on_miss="error")
QUIET = Config(min_saved_bytes=0, chunk_tokens=8, compile_regions=False, on_miss="ignore")
VOCAB, WIDTH = 61, 12


class Mixer(nn.Module):
    """Token embedding, one causal mixing layer, dropout, a head tied to the embedding."""

    def __init__(self, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, dtype=dtype)
        self.mix = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        hidden = hidden + self.dropout(torch.tanh(self.mix(hidden.cumsum(1) / 3)))
        return self.head(hidden)


def make_model(seed: int = 0, **options: Any) -> Mixer:
    torch.manual_seed(seed)
    return Mixer(**options)


def make_batch(rows: int = 3, length: int = 7, seed: int = 1, **extra: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, VOCAB, (rows, length), generator=generator),
        "mask": torch.rand(rows, length - 1, generator=generator) > 0.2,
        "adv": torch.randn(rows, 1, generator=generator, dtype=torch.float64),
    } | extra


def fixed(batch: Any) -> Any:
    """A batch whose sizes do not vary, which is captured faster: where sizes are not the matter."""
    for value in tree_leaves(batch):
        if isinstance(value, Tensor):
            torch._dynamo.mark_static(value)
    return batch


#: What reads sizes, or is told some.
SIZES = re.compile(
    r"\b(size|shape|numel|len|arange|(un)?flatten|view|reshape|expand|(new_)?(zeros|ones|full))\b"
)


def sized(function: Callable[..., Any], make: Callable[[], Any]) -> Callable[[], Any]:
    """``make``, its batches ``fixed`` where the decorated ``function`` computes with no size."""
    computes = SIZES.search(inspect.getsource(function).partition("\n")[2])
    return make if computes else lambda: fixed(make())


def token_logps(logits: Tensor, ids: Tensor) -> Tensor:
    logps = torch.log_softmax(logits[:, :-1], -1)
    return logps.gather(-1, ids[:, 1:, None])[..., 0]


def policy_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    logps = token_logps(model(batch["ids"]), batch["ids"])
    mask = batch["mask"]
    return -(logps * batch["adv"] * mask).sum() / mask.sum().clamp_min(1)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def grads(model: nn.Module) -> dict[str, Tensor]:
    """The gradients, which are none then."""
    found = gradients(model)
    model.zero_grad(set_to_none=True)
    return found


def assert_same(got: Any, wanted: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def outcome(function: Callable[[Any], Any], model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """What a step returns, its loss first or alone, and the gradient of every weight."""
    model.zero_grad(set_to_none=True)
    result = function(batch)
    loss, *_ = result if isinstance(result, tuple) else (result,)
    loss.backward()
    return tree_map_only(Tensor, Tensor.detach, result), gradients(model)


def assert_matches_eager(
    step: TrainStep, loss_fn: Callable[..., Any], model: nn.Module, batch: Any, tol: float = 1e-10
) -> tuple[Any, Any]:
    """The outcome of one batch: loss, metrics and all gradients."""
    wanted = outcome(partial(loss_fn, model), model, batch)
    got = outcome(step, model, batch)
    model.zero_grad(set_to_none=True)
    assert_same(got, wanted, tol)
    return got


def fused(step: TrainStep) -> bool:
    return any(r.pass_name == "fuse-linear-logprob" for r in step.report.of_kind("applied"))


def captures(step: TrainStep) -> int:
    return len(step.captures)


def asserted(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Written here, as pytest writes the assertions of a test's file anew."""
    logits = model(batch["ids"])
    assert torch.isfinite(logits).all(), f"{logits.isnan().sum()} are NaN"
    return -(token_logps(logits, batch["ids"]) * batch["adv"]).sum()
