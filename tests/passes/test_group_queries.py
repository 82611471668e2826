"""Attention in a captured model: masks, grouped queries, and checkpointing taken over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxrl.config import Config
from fxrl.ir.graph import is_call, tensor_val
from fxrl.ir.region import regions_of
from fxrl.step import TrainStep, optimize
from tests.capture.mixer import assert_matches_eager, fixed

CONFIG = Config(min_saved_bytes=0, chunk_tokens=8, compile_regions=False, on_miss="error")


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def tiny(kind: str, **sizes: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    from fxrl.models import tiny_config

    sizes = {"layers": 1, "hidden": 16, "intermediate": 24, "head_dim": 4} | sizes
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(tiny_config(kind, **sizes))
    return model.double()


def log_prob_loss(model: nn.Module, batch: Any) -> Tensor:
    logps = torch.log_softmax(model(**batch, use_cache=False).logits[:, :-1], -1)
    return -logps.gather(-1, batch["input_ids"][:, 1:, None]).mean()


def masks_of(step: TrainStep) -> list[str]:
    return [r.reason for r in step.report.remarks if "attention calls" in r.reason]


def attention_of(step: TrainStep) -> list[dict[str, Any]]:
    """The options of the attention calls that the first capture's final graph makes."""
    graph = step.captures[0].rewritten.gm.graph
    return [n.kwargs for n in graph.nodes if "scaled_dot_product" in str(n.target)]


def ids(rows: int = 3, length: int = 9) -> Tensor:
    return torch.randint(3, 250, (rows, length), generator=torch.Generator().manual_seed(1))


def test_no_mask_given_and_grouped_queries_are_not_repeated() -> None:
    model = tiny("qwen3")
    step = optimize(model, log_prob_loss, CONFIG)
    assert_matches_eager(step, log_prob_loss, model, {"input_ids": ids()})
    assert not any("another mask" in reason for reason in masks_of(step))
    (call,) = attention_of(step)
    assert call["enable_gqa"] is True
    assert call["is_causal"] is True


def test_padding_stays_exact_and_says_so() -> None:
    model = tiny("qwen3")
    step = optimize(model, log_prob_loss, CONFIG)
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[0, :4] = 0
    assert_matches_eager(step, log_prob_loss, model, {"input_ids": ids(), "attention_mask": mask})
    (reason,) = masks_of(step)
    assert "attention_mask" in reason


def test_packed_positions_stay_exact() -> None:
    model = tiny("qwen3")
    step = optimize(model, log_prob_loss, CONFIG)
    for cut in (4, 6):
        positions = torch.cat([torch.arange(cut), torch.arange(9 - cut)])[None]
        assert_matches_eager(
            step, log_prob_loss, model, {"input_ids": ids(1), "position_ids": positions}
        )
    assert "position_ids" in masks_of(step)[0]


PADDED = torch.ones(3, 9, dtype=torch.int64)
PADDED[0, :4] = 0
RESTART = torch.cat([torch.arange(4), torch.arange(5)]).expand(3, -1)


@pytest.mark.parametrize(
    ("given", "checkpointed"),
    [
        pytest.param({"attention_mask": PADDED}, False, marks=pytest.mark.slow),
        ({"position_ids": RESTART}, True),
    ],
)
def test_no_dense_mask_where_it_is_computed(given: Any, checkpointed: bool) -> None:
    """Inside the layers' regions; blocks are found once, and groups of queries share their keys."""
    model = tiny("qwen3", layers=2)
    if checkpointed:
        model.gradient_checkpointing_enable()
        model.train()
    passes = ("factor-masks", "outline-layers", "recompute", "fuse-linear-logprob")
    step = optimize(model, log_prob_loss, replace(CONFIG, passes=passes))
    batch = {"input_ids": ids()} | given
    assert_matches_eager(step, log_prob_loss, model, batch if checkpointed else fixed(batch))
    gm = step.captures[0].rewritten.gm
    graphs = [gm.graph, *(region.forward.graph for region in regions_of(gm).values())]
    nodes = [node for graph in graphs for node in graph.nodes]
    assert not any(
        val.dtype == torch.bool and val.dim() > 3 and val.shape[-2:] == (9, 9)
        for n in nodes
        if (val := tensor_val(n)) is not None
    )
    assert sum(is_call(n, torch.ops.fxrl.mask_blocks.default) for n in nodes) == 1
    (call,) = [n for n in nodes if is_call(n, torch.ops.fxrl.masked_attention.default)]
    query, key = (tensor_val(arg) for arg in call.args[:2])
    assert query.shape[1] > key.shape[1]


@pytest.mark.parametrize("reentrant", [pytest.param(False, marks=pytest.mark.slow), True])
def test_checkpointing_switched_on_by_the_user_is_taken_over(reentrant: bool) -> None:
    """One graph, the head fused, only layer inputs saved, no mask: hooks and flags put back."""
    pytest.importorskip("peft")
    from fxrl.models import lora

    model = lora(tiny("qwen3", layers=2, intermediate=24), r=2, fp32_adapter=False, seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.train()
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    batch = {"input_ids": ids()}

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        logps = torch.log_softmax(model(**batch).logits[:, :-1], -1)
        return -logps.gather(-1, batch["input_ids"][:, 1:, None]).mean()

    found, saved = [], []
    step = optimize(model, loss_fn, CONFIG)
    for run in (lambda b: loss_fn(model, b), step):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            loss = run(batch)
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append((loss.detach(), grads))
        model.zero_grad()
        if run is not step:
            saved.clear()
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=1e-9)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-7, atol=1e-9)
    assert [dict(module._forward_hooks) for module in model.modules()] == hooks

    assert len(step.captures) == 1
    assert "fuse-linear-logprob" in [r.pass_name for r in step.report.of_kind("applied")]
    reasons = " ".join(r.reason for r in step.report.of_kind("analysis"))
    for part in ("2 checkpointed calls taken over", "requires_grad_()", "warning_once()"):
        assert part in reasons
    inside = [t.shape for t in saved if t.dim() == 4 or (t.dim() == 3 and t.shape[-1] == 24)]
    assert not inside, inside  # no heads, no MLP: only what goes into a layer was saved
