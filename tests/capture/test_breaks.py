"""What could not be captured is always told: where, why, and the numbers stay eager's."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import time
import warnings
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from tqdm import tqdm

from fxrl.capture import captured_loss
from fxrl.errors import MissedRewriteError
from fxrl.step import optimize
from tests.capture.mixer import (
    CONFIG,
    QUIET,
    VOCAB,
    Mixer,
    assert_matches_eager,
    assert_same,
    captures,
    fixed,
    fused,
    grads,
    make_batch,
    make_model,
    policy_loss,
    token_logps,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def retained(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["ids"])
    logits.retain_grad()  # here
    return -token_logps(logits, batch["ids"]).mean()


def in_a_loop(model: nn.Module, batch: Any) -> Tensor:
    total = 0.0
    for _ in range(2):
        logits = model(batch["ids"])
        torch._dynamo.graph_break()  # here
        total = total - token_logps(logits, batch["ids"]).mean()
    return total


def counted_by_data(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["ids"])
    for row in batch["mask"].any(-1).nonzero():  # here
        logits = logits + row.sum() * 0
    return -token_logps(logits, batch["ids"]).mean()


class NormedGradient(torch.autograd.Function):
    """Its backward mixes tokens."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.norm()


def own_function(model: nn.Module, batch: Any) -> Tensor:
    logits = NormedGradient.apply(model(batch["ids"]))  # here
    return -token_logps(logits, batch["ids"]).mean()


class OfItsClass(NormedGradient):
    """Its forward is told its class, as those of Liger's losses are."""

    @classmethod
    def forward(cls, ctx: Any, logits: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ctx, logits)


def function_of_its_class(model: nn.Module, batch: Any) -> Tensor:
    logits = OfItsClass.apply(model(batch["ids"]))  # here
    return -token_logps(logits, batch["ids"]).mean()


def test_a_backward_hook_of_the_model_is_told_with_a_cure_that_helps() -> None:
    for module, lost in (("", True), ("mix", False)):
        model = make_model()
        model.get_submodule(module).register_full_backward_hook(lambda *_: None)
        step = optimize(model, policy_loss, QUIET)
        assert_matches_eager(step, policy_loss, model, fixed(make_batch()))
        missed = {(r.reason[:30], r.cure) for r in step.report.of_kind("missed")}
        cure = "register the hook on modules that return no logits, such as layers"
        assert (("graph break: a backward hook g", cure) in missed) == lost
        assert fused(step) != lost


class FoundRows(torch.autograd.Function):
    """Its forward counts rows by their values."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        rows = (logits.sum(-1) > 0).nonzero()  # here
        return logits + 0 * rows.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


def test_a_count_inside_of_a_function_costs_no_more_than_the_head() -> None:
    def counted(model: nn.Module, batch: Any) -> Tensor:
        return -token_logps(FoundRows.apply(model(batch["ids"])), batch["ids"]).mean()

    model = make_model()
    step = optimize(model, counted, QUIET)
    for rows in (3, 4):
        assert_matches_eager(step, counted, model, make_batch(rows))
    assert captures(step) > 0  # the model, and what reads its result
    if captures(step) == 1:  # torch 2.11 asks nothing of a function's inside
        return
    here = FoundRows.forward.__code__.co_firstlineno + 2
    told = [r.reason for r in step.report.of_kind("missed") if r.source.endswith(f".py:{here}")]
    assert any("output shape depends on" in reason for reason in told), step.report


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        pytest.param(retained, "retain_grad", marks=pytest.mark.slow),
        pytest.param(in_a_loop, "graph_break", marks=pytest.mark.slow),
        (counted_by_data, "cannot be traced"),
        (own_function, "autograd.Function"),
        (function_of_its_class, "classmethod"),
    ],
)
def test_a_head_that_is_lost_has_its_line_and_reason(loss_fn: Any, words: str) -> None:
    model = make_model()
    step = optimize(model, loss_fn, QUIET)
    assert_matches_eager(step, loss_fn, model, make_batch())
    code = loss_fn.__code__
    lines = Path(code.co_filename).read_text().splitlines()
    start = code.co_firstlineno
    here = next(n for n in range(start, start + 20) if lines[n - 1].endswith("# here"))
    reasons = [r for r in step.report.of_kind("missed") if r.source.endswith(f".py:{here}")]
    assert any(words in remark.reason for remark in reasons), step.report
    assert captures(step) > 0
    with pytest.raises(MissedRewriteError, match="missed"):
        optimize(model, loss_fn, CONFIG)(make_batch())


class OwnHead(torch.autograd.Function):
    """Multiplies by the head itself, and makes the gradients in its forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logps = (hidden @ weight.T).log_softmax(-1)
        grad = logps.exp().scatter_add(-1, target[:, None], -torch.ones_like(logps[:, :1]))
        ctx.save_for_backward(grad @ weight, grad.T @ hidden)
        return -logps.gather(-1, target[:, None]).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        of_hidden, of_weight = ctx.saved_tensors
        return grad * of_hidden, grad * of_weight, None


def own_head(model: nn.Module, batch: Any) -> Tensor:
    hidden = torch.tanh(model.mix(model.embed(batch["ids"])))[:, :-1].flatten(0, 1)
    return OwnHead.apply(hidden, model.head.weight, batch["ids"][:, 1:].flatten())


def test_a_head_inside_of_a_function_is_told_and_is_no_miss() -> None:
    model = make_model()
    step = optimize(model, own_head, CONFIG)
    assert_matches_eager(step, own_head, model, fixed(make_batch()))
    facts = [remark.reason for remark in step.report.of_kind("analysis")]
    assert any("multiplies by the head itself" in fact for fact in facts)


class Routed(nn.Module):
    """Experts that are called as often as tokens chose one; a graph ends ahead of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8, dtype=torch.float64)
        self.gate = nn.Linear(8, 3, dtype=torch.float64)
        self.experts = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))
        self.head = nn.Linear(8, VOCAB, bias=False, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).flatten(0, 1)
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        made = torch.zeros_like(x)
        for expert in chosen.unique():  # here
            at = torch.where(chosen == expert)[0]
            made = made.index_add(0, at, self.experts[int(expert)](x[at]) * weight[at, None])
        logits: Tensor = self.head(made).view(*ids.shape, VOCAB)
        return logits


def test_a_head_behind_a_loop_in_the_model_is_missed_there() -> None:
    """The graph ahead of the loop has a softmax of its own, and nothing to complain of."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return -token_logps(model(batch["ids"]), batch["ids"]).mean()

    torch.manual_seed(0)
    model = Routed()
    step = optimize(model, loss_fn, QUIET)
    assert_matches_eager(step, loss_fn, model, make_batch())
    code = Routed.forward.__code__
    here = code.co_firstlineno + 4
    missed = [r for r in step.report.of_kind("missed") if r.source.endswith(f".py:{here}")]
    assert any("no graph can end there" in one.reason for one in missed), step.report
    with pytest.raises(MissedRewriteError, match="missed"):
        optimize(model, loss_fn, CONFIG)(make_batch())


def printed(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["ids"])
    print("logits", logits.shape, flush=True)
    loss = -token_logps(logits, batch["ids"]).mean()
    print(f"loss {loss.detach():.6f}", loss.item())
    told = {"loss": loss.item()}
    print(told, [logits.dtype, None], sep="; ", end=".\n", file=sys.stderr)
    told["loss"] = 0.0
    return loss


def with_a_bar(model: nn.Module, batch: Any) -> Tensor:
    logits, total = model(batch["ids"]), 0.0
    for row, ids in tqdm(zip(logits, batch["ids"], strict=True), total=len(logits)):
        total = total - token_logps(row[None], ids[None]).mean()
    return total


@pytest.mark.parametrize("loss_fn", [printed, with_a_bar])
def test_what_is_printed_ends_no_graph(loss_fn: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model()
    step = optimize(model, loss_fn, CONFIG)
    assert_matches_eager(step, loss_fn, model, fixed(make_batch()))
    printed_to = capsys.readouterr()
    told = [printed_to.out, printed_to.err] if loss_fn is printed else [printed_to.out]
    for text, count in zip(told, (4, 2) if loss_fn is printed else (0,), strict=True):
        lines = text.splitlines()
        assert lines[: len(lines) // 2] == lines[len(lines) // 2 :]
        assert len(lines) == count
    assert fused(step)
    assert len(step.captures) == 1


def told(model: nn.Module, batch: Any) -> Any:
    ids, logits = batch["ids"], model(batch["ids"])
    logps = token_logps(logits, ids)
    print(f"{ids.size(1)} tokens of {len(ids):>3d}, {{{logps.mean().item():.3f}}}")
    means = logps.detach().mean(1)
    of_rows, of_three = means.tolist(), torch.stack([means.sum(), *logps[0, :2]]).tolist()
    means.zero_()
    lengths = batch["mask"].sum(1).tolist()
    numbers = {"rows": of_rows, "first": of_three[0], "lengths": lengths, "again": [of_rows]}
    print(str(len(ids)), "rows")
    return -logps.mean() * max(of_three), numbers


def test_what_is_told_of_rows_neither_ends_a_graph_nor_compiles_in_how_many_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = make_model()
    step = optimize(model, told, CONFIG)
    for rows, length in ((3, 7), (4, 9), (5, 8), (2, 6)):
        assert_matches_eager(step, told, model, make_batch(rows, length))
    lines = capsys.readouterr().out.splitlines()
    assert lines[::4] + lines[1::4] == lines[2::4] + lines[3::4]
    assert lines[0].startswith("7 tokens of   3, {")
    assert fused(step)
    assert captures(step) == 1


class OldWarning(FutureWarning):
    pass


def warned(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["ids"])
    warnings.warn("logits are old", OldWarning, 2)
    warnings.warn(f"{logits.size(-1)} columns", category=UserWarning, stacklevel=2)
    warnings.warn(OldWarning("they are"), stacklevel=2)
    warnings.warn(RuntimeWarning(f"of {logits.dtype}"), stacklevel=2)
    return -token_logps(logits, batch["ids"]).mean()


def test_a_warning_of_a_class_ends_no_graph() -> None:
    model = make_model()
    step = optimize(model, warned, CONFIG)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            step(fixed(make_batch()))
        told = [(one.category, str(one.message)) for one in heard]
        first = [(OldWarning, "logits are old"), (UserWarning, f"{VOCAB} columns")]
        assert told == [*first, (OldWarning, "they are"), (RuntimeWarning, "of torch.float64")]
    assert fused(step)
    assert captures(step) == 1


def timed(model: nn.Module, batch: Any) -> Any:
    begun, started = time.perf_counter(), time.time_ns()
    logits = model(batch["ids"])
    if time.perf_counter() - begun > 1000:
        raise TimeoutError("the forward hangs")
    loss = -token_logps(logits, batch["ids"]).mean()
    return loss, {"seconds": time.perf_counter() - begun, "ns": time.time_ns() - started}


def test_a_clock_tells_the_time_of_the_call() -> None:
    model = make_model()
    step = optimize(model, timed, CONFIG)
    found = []
    for seed in range(3):
        wanted, _ = timed(model, make_batch(seed=seed))
        begun = time.perf_counter()
        loss, told = step(fixed(make_batch(seed=seed)))
        assert_same(loss, wanted)
        assert 0 < told["seconds"] < time.perf_counter() - begun
        assert 0 < told["ns"] < 1e9 * (time.perf_counter() - begun)
        found.append(float(told["seconds"]))
    assert len(set(found)) == 3
    assert fused(step)
    assert captures(step) == 1


LOGGER = logging.getLogger("tests.capture.losses")
ADAPTER = logging.LoggerAdapter(LOGGER, {"rank": 0})


def logged(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["ids"])
    logging.debug("logits %s", logits.shape)
    logging.getLogger("tests.capture").debug("of %s", logits.mean())
    ADAPTER.debug("to %s", logits.max())
    loss = -token_logps(logits, batch["ids"]).mean()
    asked = [LOGGER, logging.getLogger("tests.capture")]
    return 2 * loss if all(one.isEnabledFor(logging.DEBUG) for one in asked) else loss


def test_logging_ends_no_graph_and_its_levels_count(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    step = optimize(model, logged, CONFIG)
    for level in (logging.INFO, logging.DEBUG, logging.INFO):
        caplog.set_level(level, "tests")
        assert_matches_eager(step, logged, model, fixed(make_batch()))
    assert fused(step)
    assert captures(step) == 2
    assert any("left out of the captured step: debug()" in r.reason for r in step.report.remarks)


def test_dynamo_logs_nothing_of_a_capture() -> None:
    """Torch 2.11 logs a traceback where its settings are nothing that JSON knows."""
    said: list[str] = []
    heard = logging.Handler(logging.WARNING)
    heard.emit = lambda record: said.append(record.getMessage())
    dynamo = logging.getLogger("torch._dynamo.metrics_context")
    dynamo.addHandler(heard)
    model = make_model()
    optimize(model, logged, CONFIG)(fixed(make_batch())).backward()
    dynamo.removeHandler(heard)
    assert said == []


def averaged(model: nn.Module, batch: Any) -> Any:
    losses = [-token_logps(model(ids), ids).mean() for ids in batch["ids"].split(2)]
    numbers = [loss.item() for loss in losses]
    return sum(losses), {"mean": float(np.mean(numbers)), "most": np.max(numbers).item()}


def picked_one_by_one(model: nn.Module, batch: Any) -> Tensor:
    logps = torch.log_softmax(model(batch["ids"]), -1)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(2):
        for at in range(3):
            total = total - logps[row, at][batch["ids"][row, at + 1] - VOCAB * (at == 1)]
    return total


def chunks_of_scalars(model: nn.Module, batch: Any) -> Any:
    logps = token_logps(model(batch["ids"]), batch["ids"])
    total, told = torch.zeros((), dtype=torch.float64), []
    for part in logps.split([1, 2]):
        total = total - part.sum()
        told.append(part.mean().unsqueeze(0))
    return total, torch.cat(told).mean()


def under_a_stack(model: nn.Module, batch: Any, ends: bool = False) -> Tensor:
    with ExitStack() as stack:
        policy = stack.enter_context(nullcontext(model))
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.no_grad())
        reference = token_logps(policy(batch["ids"]), batch["ids"])
        if ends:
            torch._dynamo.graph_break()
        reference = reference * model.head.weight.sum()
    return (token_logps(model(batch["ids"]), batch["ids"]) - reference).square().mean()


_NO_CLASS = pytest.mark.skipif(
    torch.__version__.startswith("2.11."), reason="Dynamo of 2.11 does not know a context's class"
)


@pytest.mark.parametrize(
    "loss_fn",
    [averaged, picked_one_by_one, chunks_of_scalars, pytest.param(under_a_stack, marks=_NO_CLASS)],
)
def test_what_losses_write_around_log_probs(loss_fn: Any) -> None:
    model = make_model()
    step = optimize(model, loss_fn, QUIET)
    for length in (7, 9):
        assert_matches_eager(step, loss_fn, model, make_batch(length=length))
    heads = {r.pass_name for r in step.report.of_kind("applied")}
    assert heads & {"fuse-linear-logprob", "chunk-vocab-region"}, step.report
    assert not [r for r in step.report.of_kind("missed") if r.pass_name == "capture"]


def test_a_break_under_a_stack_leaves_what_it_has_entered() -> None:
    model = make_model()
    loss_fn = partial(under_a_stack, ends=True)
    step = optimize(model, loss_fn, QUIET)
    assert_matches_eager(step, loss_fn, model, fixed(make_batch()))
    assert torch.is_grad_enabled()


class Broken(nn.Module):
    """A layer that no graph goes through, as a comprehension or a loop over modules meets it."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside, self.mix = inside, nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        if self.inside:
            return sum(_ended(part) for part in [self.mix(x), x])
        return _ended(self.mix(x))


def _ended(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x.tanh()


class Asked:
    """What its methods return is not what Python makes of it, but for an item."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = _ended(loss)

    def __contains__(self, number: int) -> bool:
        torch._dynamo.graph_break()
        return number == 3

    def __getitem__(self, number: int) -> Tensor:
        torch._dynamo.graph_break()
        return self.loss * number


def _last(number: int) -> int:
    torch._dynamo.graph_break()
    return -number


def made(loss: Tensor) -> Tensor:
    return Asked(loss).loss + loss


def not_among(loss: Tensor) -> Tensor:
    asked = Asked(loss)
    return asked.loss * (2 if 3 not in asked else 5)


def subscripted(loss: Tensor) -> Tensor:
    return Asked(loss)[2] + loss  # here it is what Python makes of it


def in_order(loss: Tensor) -> Tensor:
    numbers = [1, 3, 2]
    numbers.sort(key=_last)
    return loss * numbers[0] + sorted([1, 4, 2], key=_last)[0]


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(made, marks=pytest.mark.slow),
        pytest.param(not_among, marks=pytest.mark.slow),
        subscripted,
        in_order,
    ],
)
def test_a_break_where_python_makes_something_else_of_the_result(ask: Any) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return ask(policy_loss(model, batch))

    model = make_model()
    step = optimize(model, loss_fn, QUIET)
    assert_matches_eager(step, loss_fn, model, fixed(make_batch()))
    assert fused(step)


FACTOR, CALLS = 2.0, 0


def scaled(loss: Tensor) -> Tensor:
    names = globals()
    return loss * names["FACTOR"] * (3 if "MISSING" in names else 5)


def scaled_behind(loss: Tensor) -> Tensor:
    return scaled(_ended(loss)) + 1


def counted(loss: Tensor) -> Tensor:
    globals()["CALLS"] += 1
    return loss * CALLS


@pytest.mark.parametrize(
    "read", [pytest.param(scaled, marks=pytest.mark.slow), scaled_behind, counted]
)
def test_globals_are_those_of_the_function_that_asks(read: Any, monkeypatch: Any) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return read(policy_loss(model, batch)) + 1

    model, batch = make_model(), fixed(make_batch())
    step = optimize(model, loss_fn, QUIET)
    for number in (2.0, 3.0, 3.0):
        monkeypatch.setitem(globals(), "FACTOR", number)
        results = []
        for function in (partial(loss_fn, model), step):
            monkeypatch.setitem(globals(), "CALLS", number)
            results.append((function(batch), CALLS))
        assert_same(*results)
    assert fused(step)


class Stack(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8, dtype=torch.float64)
        self.layers = nn.ModuleList(Broken(inside) for _ in range(2))
        self.head = nn.Linear(8, VOCAB, bias=False, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.parametrize("inside", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_head_behind_layers_that_end_graphs_is_captured(inside: bool) -> None:
    torch.manual_seed(0)
    model = Stack(inside)
    step = optimize(model, policy_loss, QUIET)
    for batch in (make_batch(), make_batch(4, 9, seed=2)):
        assert_matches_eager(step, policy_loss, model, batch)
    assert fused(step)


class Counted(Stack):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, layer in enumerate(self.layers, 1):
            x = x + number * layer(x)
        logits: Tensor = self.head(x)
        return logits


class Zipped(Stack):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer, before in zip(self.layers, (x * 0.1, x * 0.2), strict=False):
            x = before + layer(x)
        logits: Tensor = self.head(x)
        return logits


class ZippedStrictly(Stack):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer, weight in zip(self.layers, (0.5, 0.25, 1.0), strict=True):
            x = x + weight * layer(x)
        logits: Tensor = self.head(x)
        return logits


class CountedAndZipped(Stack):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, (layer, weight) in enumerate(zip(self.layers, (0.5, 0.25), strict=False)):
            x = weight * x + number + layer(x)
        logits: Tensor = self.head(x)
        return logits


class CountedAhead(Stack):
    """Its loop has begun, and been read from, ahead of a graph's end."""

    def forward(self, ids: Tensor) -> Tensor:
        x, left = self.embed(ids), enumerate(self.layers, 3)
        number, layer = next(left)
        x = number * layer(x)
        for number, layer in left:
            x = x + number * layer(x)
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.parametrize("kind", [Counted, Zipped, ZippedStrictly, CountedAndZipped, CountedAhead])
def test_a_head_behind_a_loop_that_counts_layers_or_zips_them_is_captured(kind: Any) -> None:
    torch.manual_seed(0)
    model = kind(inside=True)
    model.layers.append(Broken(inside=True))
    step = optimize(model, policy_loss, QUIET)
    for batch in (make_batch(), make_batch(4, 9, seed=2)):
        assert_matches_eager(step, policy_loss, model, batch)
    assert fused(step)


class Restored(Stack):
    """What its layers are told is put back behind them."""

    factor = 1.0

    def forward(self, ids: Tensor) -> Tensor:
        before, self.factor = self.factor, 2.0
        try:
            x = self.mixed(self.embed(ids))
        finally:
            self.factor = before
        logits: Tensor = self.head(x * self.factor)
        return logits

    def mixed(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.factor * layer(x)
        return x


class RestoredAtOnce(Restored):
    """In a context, in a loop, returning from within."""

    def mixed(self, x: Tensor) -> Tensor:
        with torch.autograd.set_grad_enabled(torch.is_grad_enabled()):
            for layer in self.layers:
                try:
                    x = x + self.factor * layer(x)
                    self.factor *= 1.5
                finally:
                    if self.factor:
                        self.factor += 1.0
            return self.last(x)

    def last(self, x: Tensor) -> Tensor:
        try:
            return self.factor * _ended(x)
        finally:
            self.factor = 0.0


class Forgiving(Restored):
    """An ``except`` around it catches what is raised: the graph ends at the call of it."""

    def mixed(self, x: Tensor) -> Tensor:
        try:
            try:
                return _refused(super().mixed(x))
            finally:
                self.factor += 1.0
        except ValueError:
            return self.factor * x


def _refused(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    raise ValueError


@pytest.mark.parametrize("kind", [Restored, RestoredAtOnce, Forgiving])
def test_a_graph_may_end_where_something_is_put_back_behind(kind: Any) -> None:
    torch.manual_seed(0)
    model = kind(inside=True)
    step = optimize(model, policy_loss, QUIET)
    for batch in (make_batch(), make_batch(4, 9, seed=2)):
        assert_matches_eager(step, policy_loss, model, batch)
        assert model.factor == 1.0
    assert fused(step)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8, dtype=torch.float64)
        self.layer = nn.LSTM(8, 8, 2, batch_first=True, dtype=torch.float64)
        self.head = nn.Linear(8, VOCAB, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.embed(ids))[0])
        return logits


def test_a_head_behind_a_recurrent_layer_is_captured_once_for_all_lengths() -> None:
    torch.manual_seed(0)
    model = Recurrent()
    step = optimize(model, policy_loss, CONFIG)
    for batch in (make_batch(), make_batch(4, 9, seed=2), make_batch(2, 12, seed=3)):
        assert_matches_eager(step, policy_loss, model, batch)
    assert fused(step)
    assert len(step.captures) <= 3


def ended_within(depth: int, x: Tensor) -> Tensor:
    if depth:
        return ended_within(depth - 1, x) + 1
    torch._dynamo.graph_break()
    return 2 * x


def ended_ever_deeper(model: nn.Module, batch: Any) -> Tensor:
    loss = policy_loss(model, batch)
    loss = ended_within(2, ended_within(1, loss))
    return ended_within(5, ended_within(4, ended_within(3, loss)))


def test_breaks_within_functions_of_any_depth_cost_no_capture() -> None:
    """What waits behind a break in a list of Dynamo's is as long as the callers are many: no list
    of the user's that grows."""
    model = make_model()
    step = optimize(model, ended_ever_deeper, QUIET)
    for batch in (make_batch(), make_batch(4, 9, seed=2)):
        assert_matches_eager(step, ended_ever_deeper, model, batch)
    assert fused(step)


def discounted(model: nn.Module, batch: Any) -> Tensor:
    """Returns by a loop of Python over tokens, which is captured for each length."""
    logps, after, returns = token_logps(model(batch["ids"]), batch["ids"]), 0.0, []
    for reward in reversed(batch["mask"].unbind(1)):
        after = reward + 0.9 * after
        returns.insert(0, after)
    if not torch.compiler.is_compiling():
        batch["as written"].append(len(returns))
    return -(logps * torch.stack(returns, 1)).mean()


def test_a_loss_that_is_captured_at_each_call_is_told_with_reason_and_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ways = tuple(way | {"recompile_limit": 9} for way in captured_loss._WAYS)
    monkeypatch.setattr(captured_loss, "_WAYS", ways)
    model = make_model()
    step = optimize(model, discounted, QUIET)
    written: list[int] = []
    for tokens in (*range(4, 14), 6, 14):
        step({**make_batch(3, tokens), "as written": written})
        batch = {**make_batch(3, tokens), "as written": list[int]()}
        assert_matches_eager(step, discounted, model, batch)
    assert written == [12, 13], "what was captured before runs on"
    often, lost = (r for r in step.report.remarks if r.pass_name == "capture")
    assert (often.kind, lost.kind) == ("analysis", "missed")
    changed = "for tensor 'batch['ids']' size mismatch at index 1. expected"
    assert (
        f"captured 8 times, which takes seconds each; now {changed} 10, actual 11" in often.reason
    )
    assert f"captured 9 times, and now {changed} 12, actual 13" in lost.reason
    for remark in (often, lost):
        assert "pad batches to a few sizes" in remark.cure
        assert remark.source.endswith(f"test_breaks.py:{discounted.__code__.co_firstlineno}")


class Widened(nn.Module):
    """A layer that another graph goes on with behind a product that widens."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 24, dtype=torch.float64)
        self.down = nn.Linear(24, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(x.tanh()).chunk(3, -1)
        torch._dynamo.graph_break()
        return x + self.down(torch.cat(wide, -1).tanh())


class Looped(Stack):
    """Its layers are graphs of their own: no graph can end in the loop over them."""

    def __init__(self) -> None:
        super().__init__(inside=False)
        self.layers = nn.ModuleList(Widened() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.mixed(self.embed(ids)))
        return logits

    def mixed(self, x: Tensor) -> Tensor:
        for layer in (one for one in self.layers):
            x = layer(x)
            assert os.getloadavg()[0] >= 0
        return x


def test_layers_that_are_graphs_of_their_own_are_known_for_layers() -> None:
    torch.manual_seed(0)
    model = Looped()
    config = replace(QUIET, passes=("outline-layers", "recompute", "chunk-vocab-region"))
    step = optimize(model, policy_loss, config)
    assert_matches_eager(step, policy_loss, model, fixed(make_batch()))
    done = {(r.pass_name, r.site.partition(":")[2]) for r in step.report.of_kind("applied")}
    head = ("chunk-vocab-region", "head/mm")
    assert done == {("outline-layers", "layers.0-0"), ("recompute", "layers.0"), head}


class Wrapped(nn.Module):
    """A layer whose work is in a module of its own, which is called behind a graph's end."""

    def __init__(self) -> None:
        super().__init__()
        mix = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))
        self.inner = nn.Sequential(next(mix), nn.Tanh(), next(mix))

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        made: Tensor = self.inner(x)
        return made


def test_what_a_layer_calls_behind_a_break_is_known_for_that_layers() -> None:
    torch.manual_seed(0)
    model = Stack(inside=False)
    model.layers = nn.ModuleList(Wrapped() for _ in range(2))
    config = replace(QUIET, passes=("outline-layers", "recompute", "chunk-vocab-region"))
    step = optimize(model, policy_loss, config)
    assert_matches_eager(step, policy_loss, model, fixed(make_batch()))
    applied = {r.site.partition(":")[2] for r in step.report.of_kind("applied")}
    assert {"layers.0", "layers.1"} <= applied


def test_a_break_that_costs_nothing_is_a_fact() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        torch._dynamo.graph_break()
        return policy_loss(model, batch)

    model = make_model()
    step = optimize(model, loss_fn, CONFIG)
    assert_matches_eager(step, loss_fn, model, fixed(make_batch()))
    assert fused(step)
    (fact,) = [r for r in step.report.of_kind("analysis") if r.pass_name == "capture"]
    assert "graph_break" in fact.reason


SIGNATURE = inspect.signature(policy_loss)


def test_arguments_that_python_binds_behind_a_write_into_a_dictionary() -> None:
    """By parameters behind a proxy, which might be of the dictionary: the graph ends, but where
    what is left can be captured."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        batch["more"] = 1
        given = SIGNATURE.bind(model, batch)
        return policy_loss(*given.args)

    model = make_model()
    step = optimize(model, loss_fn, CONFIG)
    assert_matches_eager(step, loss_fn, model, fixed(make_batch()))
    assert fused(step)


def test_a_builtin_that_breaks_is_a_fact_and_no_warning(
    recwarn: pytest.WarningsRecorder,
) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        assert os.getloadavg()[0] >= 0
        return policy_loss(model, batch)

    model = make_model()
    step = optimize(model, loss_fn, CONFIG)
    assert_matches_eager(step, loss_fn, model, fixed(make_batch()))
    assert fused(step)
    assert any("getloadavg" in r.reason for r in step.report.of_kind("analysis"))
    assert not [one for one in recwarn if "Dynamo" in str(one.message)]


# ---------------------------------------------------------------- what Dynamo fails at altogether
class SizesFromData(Mixer):
    """Sizes are read off a tensor and decide shapes, as an image's grid does in Qwen-VL."""

    def forward(self, ids: Tensor, grid: Tensor) -> Tensor:
        places = [torch.arange(h)[:, None] * torch.arange(w) for h, w in grid.tolist()]
        flat = torch.cat([p.reshape(h // 2, 2, -1).sum(1).flatten() for p, (h, _) in zip(
            places, grid.tolist(), strict=True)])  # fmt: skip
        return super().forward((ids + flat.sum()) % VOCAB)


def grid_loss(model: nn.Module, batch: Any) -> Tensor:
    return -token_logps(model(batch["ids"], batch["grid"]), batch["ids"]).mean()


def test_sizes_read_off_tensors_never_crash() -> None:
    torch.manual_seed(0)
    model = SizesFromData()
    step = optimize(model, grid_loss, QUIET)
    for grid in ([[4, 6]], [[2, 3], [8, 5]], [[4, 6]]):
        assert_matches_eager(step, grid_loss, model, make_batch(grid=torch.tensor(grid)))
    assert step.report.remarks
    assert len(step.report.remarks) < 20


def nested_values(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["ids"]).flatten(0, 1)
    nested = torch.nested.nested_tensor_from_jagged(logits, batch["offsets"])
    return -nested.values().log_softmax(-1)[:, 0].mean()


def nested_batch(model: nn.Module, batch: Any) -> Tensor:
    ids = batch["nested"].values()
    logps = model(ids[None])[0].log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    return -torch.nested.nested_tensor_from_jagged(logps, batch["nested"].offsets()).values().mean()


@pytest.mark.parametrize("loss_fn", [nested_values, nested_batch])
def test_nested_tensors_run_as_written_with_a_remark(loss_fn: Any) -> None:
    rows = [torch.arange(1, 6), torch.arange(2, 9)]
    batch = make_batch(
        offsets=torch.tensor([0, 5, 12, 21]),
        nested=torch.nested.nested_tensor(rows, layout=torch.jagged),
    )
    model = make_model()
    step = optimize(model, loss_fn, QUIET)
    value = loss_fn(model, batch)
    value.backward()
    wanted = grads(model)
    found = step(batch)
    found.backward()
    assert_same(found.detach(), value.detach())
    assert_same(grads(model), wanted)
    (remark,) = step.report.of_kind("missed")
    assert "nested" in remark.reason
    assert remark.cure
    assert "test_breaks.py" in remark.source


def logps_by(logits: Tensor, ids: Tensor) -> Tensor:
    """A library's helper, which tries a package for the job first."""
    try:
        from no_such_package.of_anyone import logps  # type: ignore[import-not-found]
    except ImportError:
        logps = token_logps
    return logps(logits, ids)


def logps_scaled(logits: Tensor, ids: Tensor) -> Tensor:
    scale = 1.0
    try:
        import no_such_package

        scale = no_such_package.scale
    except ModuleNotFoundError as error:
        scale = 2.0 if "no_such_package" in str(error) else 3.0
    return scale * token_logps(logits, ids)


def logps_if_installed(logits: Tensor, ids: Tensor) -> Tensor:
    """As accelerate asks, each time that a model is unwrapped."""
    scale = 1.0
    try:
        metadata("torch")
        metadata("no-such-package")
    except PackageNotFoundError as error:
        scale = 2.0 if "no-such-package" in error.args else 3.0
    return scale * token_logps(logits, ids)


ASKED = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="importlib.metadata is traced, and does what cannot be"
)


@pytest.mark.parametrize(
    "helper", [logps_by, logps_scaled, pytest.param(logps_if_installed, marks=ASKED)]
)
def test_a_package_that_is_missing_ends_no_graph(helper: Any) -> None:
    model, batch = make_model(), fixed(make_batch())

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return -helper(model(batch["ids"]), batch["ids"]).mean()

    step = optimize(model, loss, CONFIG)
    assert_matches_eager(step, loss, model, batch)
    assert len(step.captures) == 1
    assert fused(step)


def test_an_import_that_nobody_catches_is_the_users_error() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        import no_such_package

        return no_such_package.loss(model, batch)

    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        optimize(make_model(), loss, QUIET)(make_batch())


def test_a_number_of_data_that_a_function_inside_holds() -> None:
    """In a cell, which a graph that begins behind the number writes: as a comprehension has it."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        longest = int(batch["mask"].sum(1).max()) + 1

        def cut(value: Tensor, end: int) -> Tensor:
            return value[:, end - 1 : longest - 1]

        ids = cut(batch["ids"], 1)
        torch._dynamo.graph_break()  # which values as long as data says cannot leave
        return policy_loss(model, batch | {"ids": ids, "mask": cut(batch["mask"], 2)})

    model = make_model()
    step = optimize(model, loss, QUIET)
    for batch in (make_batch(), make_batch(4, 9, seed=2)):
        assert_matches_eager(step, loss, model, batch)
    assert fused(step)


def test_rows_that_are_trimmed_to_the_longest_keep_the_head() -> None:
    """By a number that data says: of [batch, longest] logits, whose sizes were not seen."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        longest = int(batch["mask"].sum(1).max()) + 1
        ids, mask = batch["ids"][:, :longest], batch["mask"][:, : longest - 1]
        return policy_loss(model, batch | {"ids": ids, "mask": mask})

    model = make_model()
    step = optimize(model, loss, CONFIG)
    for batch in (make_batch(), make_batch(4, 9, seed=2), make_batch(2, 12, seed=3)):
        assert_matches_eager(step, loss, model, batch)
    assert fused(step)
    assert captures(step) == 1


_KIND = "k1"


def test_a_text_of_a_module_is_none_of_the_batchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_a_kind(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch["ids"])
        torch._dynamo.graph_break()
        weight = {"k1": 1.0, "k2": 0.5}.get(_KIND, 0.1)
        return -weight * token_logps(logits, batch["ids"]).mean()

    model = make_model()
    step = optimize(model, of_a_kind, QUIET)
    for kind in range(1, 8):
        monkeypatch.setattr(f"{__name__}._KIND", f"k{kind}")
        assert_matches_eager(step, of_a_kind, model, make_batch())
    assert not [one for one in step.report.remarks if "what the batch says" in one.reason]


def test_what_is_ahead_of_a_part_that_fails_draws_once() -> None:
    """The part is given up with its numbers, as the loss then runs as it is written."""

    def noisy(model: nn.Module, batch: Any) -> Tensor:
        logps = token_logps(model(batch["ids"]), batch["ids"])
        logps = logps + torch.randn_like(logps)
        torch._dynamo.graph_break()
        with torch.compiler.set_stance("default"):  # which Dynamo forbids
            return -logps.mean()

    model, batch = make_model(), fixed(make_batch())
    step = optimize(model, noisy, QUIET)
    torch.manual_seed(0)
    wanted = noisy(model, batch), torch.rand(1)
    torch.manual_seed(0)
    assert_same((step(batch), torch.rand(1)), wanted)
    assert any("run as written" in missed.reason for missed in step.report.of_kind("missed"))


class Counting(Mixer):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.register_buffer("hits", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        self.seen.append(ids.shape[1])
        self.hits.add_(1)
        return super().forward(ids)


def test_what_is_ahead_of_a_part_that_fails_runs_once() -> None:
    """The part runs as it is written, where it stands: what is ahead has written what it writes,
    and stays captured."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logps = token_logps(model(batch["ids"]), batch["ids"])
        torch._dynamo.graph_break()
        model.seen.append(0)
        torch._dynamo.mark_static_address(torch.zeros(1))  # which Dynamo forbids
        return -logps.mean()

    model = Counting()
    step = optimize(model, loss, QUIET)
    for call, length in enumerate((6, 7, 8, 6), 1):
        batch = make_batch(3, length)
        assert_same(step(batch), loss(model, batch))
        assert (int(model.hits), model.seen) == (2 * call, 2 * [length, 0])
        model.seen.clear()
    assert fused(step)
    missed = [one.reason for one in step.report.of_kind("missed")]
    assert ["run as written" in reason for reason in missed] == [True]


def test_a_check_behind_a_break_tells_what_is_written_twice() -> None:
    """The call begins anew, as the loss is written, and cannot take back what Python has done."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logps = token_logps(model(batch["ids"]), batch["ids"])
        torch._dynamo.graph_break()
        try:
            if logps.mean() < batch["least"]:
                raise ValueError
        except ValueError:
            return -logps.sum()
        return -logps.mean()

    model, batch = make_model(), fixed(make_batch())
    step = optimize(model, loss, QUIET)
    for least, told in ((-100.0, 0), (100.0, 1)):
        batch["least"] = torch.tensor(least)
        assert_same(step(batch), loss(model, batch))
        missed = [one for one in step.report.of_kind("missed") if "a check failed" in one.reason]
        assert len(missed) == told
    assert missed[0].reason.endswith("written twice")


def test_what_goes_on_behind_a_break_is_captured_once_for_all_sizes() -> None:
    """Also of what code between graphs has computed, and of what an object holds."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        held = SimpleNamespace(logits=model(batch["ids"]))
        torch._dynamo.graph_break()
        logps = token_logps(held.logits, batch["ids"])
        return -(logps * batch["mask"] * batch["adv"]).sum()

    model = make_model()
    step = optimize(model, loss, QUIET)
    for rows, length in ((3, 7), (2, 9), (4, 12)):
        assert_matches_eager(step, loss, model, make_batch(rows, length))
    assert captures(step) == 2
