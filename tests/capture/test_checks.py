"""Branches that only raise are checks: the rest is captured whole, and the error is the user's."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxrl.config import Config
from fxrl.errors import MissedRewriteError
from fxrl.models import load_model
from fxrl.step import optimize
from tests.capture.mixer import (
    CONFIG,
    QUIET,
    assert_matches_eager,
    asserted,
    captures,
    fixed,
    fused,
    make_batch,
    make_model,
    token_logps,
)
from tests.passes.layered import Block, ids_batch, make_stack, square_loss

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def rest(logits: Tensor, batch: Any) -> Tensor:
    return -(token_logps(logits, batch["ids"]) * batch["adv"] * batch["mask"]).sum()


def of_logits(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["ids"])
    if torch.isnan(logits).any():
        raise ValueError(f"NaN among {tuple(logits.shape)}, in all {logits.sum()}")
    return rest(logits, batch)


def of_several(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["ids"])
    if torch.isinf(logits).any() or not (logits == logits).all():
        culprits = "infinite or NaN"
        raise FloatingPointError(culprits)
    return rest(logits, batch)


def in_a_loop(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["ids"])
    for row in range(2):
        if (logits[row] != logits[row]).any():
            raise ValueError(row)
    return rest(logits, batch)


def of_a_number(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["ids"])
    if torch.isnan(logits).any().item():
        raise ValueError("NaN")
    loss = rest(logits, batch)
    if not loss.item() < 1e9:
        raise ValueError("a large loss")
    return loss


def under_a_context(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return of_logits(model, batch)


@pytest.mark.parametrize(
    ("loss_fn", "error", "words"),
    [
        (of_logits, ValueError, r"NaN among \(3, 7, 61\), in all nan"),
        (of_several, FloatingPointError, "infinite or NaN"),
        (in_a_loop, ValueError, "0"),
        (asserted, AssertionError, "are NaN"),
        (of_a_number, ValueError, "NaN"),
        (under_a_context, ValueError, "NaN among"),
    ],
)
def test_a_check_costs_no_rewrite_and_raises_what_it_says(loss_fn, error, words):
    model, batch = make_model(), fixed(make_batch())
    step = optimize(model, loss_fn, CONFIG)
    assert_matches_eager(step, loss_fn, model, batch)
    assert captures(step) == 1
    kept = model.mix.bias.detach().clone()
    with torch.no_grad():
        model.mix.bias[0] = float("nan")
    with pytest.raises(error, match=words):
        step(batch)
    with torch.no_grad():
        model.mix.bias.copy_(kept)
    assert_matches_eager(step, loss_fn, model, batch)
    assert captures(step) == 1


def test_who_handles_the_error_goes_on_as_in_eager():
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        try:
            return of_logits(model, batch)
        except ValueError:
            return model.mix.weight.sum()

    model, batch = make_model(), make_batch()
    step = optimize(model, loss_fn, CONFIG)
    assert_matches_eager(step, loss_fn, model, batch)
    with torch.no_grad():
        model.mix.bias[0] = float("nan")
    with pytest.raises(MissedRewriteError, match=r"test_checks.py:\d+\]: a check failed"):
        step(batch)
    assert_matches_eager(step, loss_fn, model, batch)  # told once
    assert captures(step) == 1


class _Described(type):
    """Of classes that say themselves which tensors are theirs, as annotations of shapes do."""

    holds: Any

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, Tensor) and bool(cls.holds(value))


class Logits(metaclass=_Described):
    holds = staticmethod(lambda x: x.is_floating_point() and x.shape[2:] == (61,))


class LongLogits(metaclass=_Described):
    holds = staticmethod(lambda x: x.shape[1] > 8)


class PlainLogits(metaclass=_Described):
    holds = staticmethod(lambda x: type(x) is Tensor)


class PositiveLogits(metaclass=_Described):
    holds = staticmethod(lambda x: x.sum() > -1e9)


@pytest.mark.parametrize(
    ("kind", "config"),
    [(Logits, CONFIG), (LongLogits, CONFIG), (PlainLogits, QUIET), (PositiveLogits, QUIET)],
)
def test_a_class_that_knows_its_instances_is_asked(kind, config):
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch["ids"])
        return rest(logits * 2 if isinstance(logits, kind) else logits, batch)

    model = make_model()
    step = optimize(model, loss_fn, config)
    for length in (7, 9, 11):
        assert_matches_eager(step, loss_fn, model, make_batch(length=length))


def test_a_class_is_asked_whatever_was_compiled_before():
    def doubled(x):
        return x * 2 if isinstance(x, Logits) else x

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return rest(doubled(model(batch["ids"])), batch)

    torch.compile(doubled, backend="eager")(torch.ones(2, 2, 2))
    model = make_model()
    assert_matches_eager(optimize(model, loss_fn, CONFIG), loss_fn, model, make_batch(length=7))


def one_body(step: Any) -> bool:
    (remark,) = (r for r in step.report.of_kind("applied") if r.pass_name == "outline-layers")
    return "3 calls of 1 compiled body" in remark.reason


PASSES = ("restore-causal-attention", "outline-layers", "recompute", "fuse-linear-logprob")


def test_layers_that_check_stay_one_body(monkeypatch):
    model, _ = load_model("tiny:qwen3:layers=3", "fp64")
    kind = type(model.model.layers[0].mlp)
    forward = kind.forward

    def checked(self: nn.Module, x: Tensor) -> Tensor:
        if not torch.isfinite(x).all():
            raise ValueError("the input is not finite")
        return forward(self, x)

    monkeypatch.setattr(kind, "forward", checked)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return rest(model(input_ids=batch["ids"]).logits, batch)

    config = dataclasses.replace(CONFIG, passes=PASSES)
    step, batch = optimize(model, loss_fn, config), fixed(make_batch())
    assert_matches_eager(step, loss_fn, model, batch)
    assert one_body(step)
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[0] = float("nan")
    with pytest.raises(ValueError, match="the input is not finite"):
        step(batch)


def measured(model: nn.Module, batch: Any) -> Any:
    loss = rest(model(batch["ids"]), batch)
    if not math.isfinite(loss.item()):
        raise ArithmeticError("no loss")
    number = (loss.detach() * batch["by"]).item()
    return loss, {"exp": math.exp(number), "log": math.log(number), "isnan": math.isnan(number)}


def test_numbers_that_are_read_off_tensors_are_computed_with_in_the_graph() -> None:
    model, batch = make_model(), fixed(make_batch())
    sign = rest(model(batch["ids"]), batch).sign().detach()
    step = optimize(model, measured, CONFIG)
    for by in (1.0, 0.5, 0.1):
        assert_matches_eager(step, measured, model, batch | {"by": by * sign})
    assert captures(step) == 1
    assert fused(step)
    assert not [one for one in step.report.remarks if "graph break" in one.reason]
    for by, error in ((1e9, OverflowError), (-1.0, ValueError)):
        for one in (step, partial(measured, model)):
            with pytest.raises(error):
                one(batch | {"by": by * sign})


class Checked(Block):
    """No attention: every further product is a few more kernels to compile."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.isfinite(x).all():
            raise ValueError("the input is not finite")
        return x + self.mlp(x)


@pytest.mark.slow  # as those that run op by op; compiled ones: tests/compile/test_regions.py
def test_compiled_layers_that_check_stay_one_body():
    model, batch = make_stack(3, block=Checked), fixed(ids_batch())
    step = optimize(model, square_loss, Config(passes=PASSES, on_miss="error"))
    assert_matches_eager(step, square_loss, model, batch)
    assert one_body(step)
    with torch.no_grad():
        model.blocks[0].down.weight[0] = float("nan")
    with pytest.raises(ValueError, match="the input is not finite"):
        step(batch)


def test_a_check_is_made_once_where_autograd_is_traced() -> None:
    """As where a hook is in the graph: in the backward it would draw anew what it is about."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logps = token_logps(model(batch["ids"]), batch["ids"])
        logps = logps + torch.randn_like(logps)
        if not torch.isfinite(logps).all():
            raise ValueError("not finite")
        logps.register_hook(lambda grad: grad * 1.5)
        return logps.mean()

    model, batch = make_model(), make_batch()
    drawn = []
    for step in (optimize(model, loss, QUIET), partial(loss, model)):
        torch.manual_seed(0)
        step(batch).backward()
        drawn.append(torch.rand(1))
    assert drawn[0] == drawn[1]
