"""Branches on tensors' values inside of a loss: followed as they go, and numbers stay eager's."""

from __future__ import annotations

import copy
import dataclasses
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxrl.ir.on_miss import open_misses
from fxrl.step import optimize
from tests.capture.mixer import (
    CONFIG,
    QUIET,
    Mixer,
    assert_matches_eager,
    captures,
    fixed,
    fused,
    make_batch,
    token_logps,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Deciding(Mixer):
    """Writes a buffer, draws, and goes by what the batch asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, ids: Tensor, high: Tensor) -> Tensor:
        self.seen += 1
        logits = super().forward(ids) * (1 + 0.1 * self.seen)
        noise = torch.rand(1, dtype=torch.float64)
        if high.any():
            logits = logits * (2 + noise)
        return logits


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    logps = token_logps(model(batch["ids"], batch["high"]), batch["ids"])
    return -(logps * batch["adv"] * batch["mask"]).sum()


def early(model: nn.Module, batch: Any) -> Tensor:
    loss = loss_fn(model, batch)
    if batch["high"].all() or loss > 1e9:
        return loss * 0.0
    return loss


def entries(model: nn.Module, batch: Any) -> Tensor:
    """Python's own any() and all() go through a tensor entry by entry."""
    loss = loss_fn(model, batch)
    logps = token_logps(model(batch["ids"], batch["high"]), batch["ids"])
    if any(torch.isinf(logps).view(-1)) or not all(logps.view(-1) <= 0):
        return loss * 0.0
    return loss - logps.mean() * (2.0 if any(batch["high"]) else 1.0)


def rows(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["ids"], batch["high"])
    total = logits.new_zeros(())
    for row in range(3):
        if batch["adv"][row].item() < -1e9:
            continue
        total = total - token_logps(logits[row : row + 1], batch["ids"][row : row + 1]).sum()
    return total


def kinds(model: nn.Module, batch: Any) -> Tensor:
    """As a mixture goes through the experts that some token has chosen: four, or two."""
    logps = token_logps(model(batch["ids"], batch["high"]), batch["ids"])
    chosen = torch.arange(4) % (4 - 2 * batch["high"][0].long())
    total = logps.new_zeros(())
    for kind in (nn.functional.one_hot(chosen, 4).sum(0) > 0).nonzero():
        total = total - (1 + kind[0]) * (logps * batch["mask"]).sum()
    return total


def chunks(model: nn.Module, batch: Any) -> Tensor:
    """Of the tokens that count, so many at a time: of two in each row, or of all."""
    logits, ids = model(batch["ids"], batch["high"])[:, :-1], batch["ids"][:, 1:]
    counts = batch["high"].any() | (torch.arange(ids.shape[1]) < 2).expand(ids.shape)
    rows, ids = logits[counts], ids[counts]
    total = logits.new_zeros(())
    for start in range(0, len(rows), 8):
        part = rows[start : start + 8], ids[start : start + 8]
        total = total + nn.functional.cross_entropy(*part, reduction="sum")
    return total / len(rows)


def parts(model: nn.Module, batch: Any) -> Tensor:
    """The same tokens in parts of eight, their ids too, and in three parts: of two or of four."""
    logits, ids = model(batch["ids"], batch["high"])[:, :-1], batch["ids"][:, 1:]
    counts = batch["high"].any() | (torch.arange(ids.shape[1]) < 2).expand(ids.shape)
    rows, ids = logits[counts], ids[counts]
    pairs = zip(torch.split(rows, 8), ids.split(8), strict=True)
    losses = [nn.functional.cross_entropy(*pair, reduction="none") for pair in pairs]
    sums = [part.logsumexp(-1) for part in rows.chunk(3)]
    return torch.cat(losses).mean() + torch.cat(sums).square().mean()


def assert_runs_as_eager(
    loss: Any, wanted: list[bool], config: Any = CONFIG, lengths: tuple[int, ...] = (7,)
) -> Any:
    """Call by call: the batches differ in what they ask for, and take turns with ``lengths``."""
    torch.manual_seed(0)
    model = Deciding()
    eager = copy.deepcopy(model)
    step = optimize(model, loss, config)
    for number, high in enumerate(wanted):
        length = lengths[number % len(lengths)]
        batch = make_batch(length=length, high=torch.tensor([high, high]))
        if len(lengths) == 1:
            fixed(batch)
        got = []
        for run, one in ((step, model), (lambda b: loss(eager, b), eager)):
            torch.manual_seed(number)
            one.zero_grad()
            value = run(batch)
            value.backward()
            grads = [p.grad for p in one.parameters()]
            got.append((value.detach(), one.seen, *grads, torch.rand(1)))
        torch.testing.assert_close(got[0], got[1], rtol=1e-10, atol=1e-12)
    return step


sized_slices = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="slices of rows that data counts have sizes of their own"
)


@pytest.mark.parametrize(
    ("loss", "lengths"),
    [
        (early, (7, 8)),
        pytest.param(entries, (4,), marks=pytest.mark.slow),
        pytest.param(rows, (7,), marks=pytest.mark.slow),
        pytest.param(kinds, (7,), marks=pytest.mark.slow),
        pytest.param(chunks, (7, 8), marks=[sized_slices, pytest.mark.slow]),
        (parts, (7,)),
    ],
)
def test_a_branch_costs_no_rewrite_and_goes_each_way_once(loss, lengths):
    step = assert_runs_as_eager(loss, [False, False, True, False], lengths=lengths)
    assert captures(step) == 2
    facts = [r.reason for r in step.report.of_kind("analysis") if r.pass_name == "capture"]
    assert any("captured the way that it goes: `if high.any():`" in fact for fact in facts)


def test_a_branch_that_turns_at_each_call_ends_the_graph_there():
    step = assert_runs_as_eager(loss_fn, [False, True] * 3, QUIET)
    (told,) = [r for r in step.report.remarks if "if high.any():" in r.reason]
    assert told.kind == "missed"
    assert "data-dependent branching" in told.reason


def split_as_told(model: nn.Module, batch: Any) -> Tensor:
    """A batch of three rows is told to have them, and those of two parts are four."""
    sizes = [2, 2] if batch["high"].any() else [3]
    ids = torch.cat(batch["ids"].split(sizes))
    return -token_logps(model(ids, batch["high"]), ids).sum()


def test_a_branch_whose_likely_way_cannot_be_captured_ends_the_graph_there():
    step = assert_runs_as_eager(split_as_told, [False, False], QUIET)
    assert captures(step) > 0
    assert not [r for r in step.report.remarks if "run as written" in r.reason]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, hidden):
        return torch.tanh(self.mix(hidden))


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def by_row(scores, good):
    total = 0.0
    for i in range(len(scores)):
        total = total + torch.sigmoid(scores[i] if good[i] else -scores[i])
    return total / len(scores)


def by_index(scores, good):
    chosen = [i for i in range(len(scores)) if good[i]]
    left = [i for i in range(len(scores)) if not good[i]]
    return torch.cat((torch.sigmoid(scores[chosen]), torch.sigmoid(-scores[left]))).mean()


@pytest.mark.parametrize(
    ("objective", "told"),
    [
        (by_row, Tensor.clone),
        (by_index, Tensor.tolist),
        pytest.param(by_row, Tensor.tolist, marks=pytest.mark.slow),
        pytest.param(by_index, Tensor.clone, marks=pytest.mark.slow),
    ],
)
def test_a_branch_of_each_row_loses_nothing(objective, told):
    """Once the graph ends at the first row, what the others lead to is small code behind it, of
    which Dynamo gives up some in the end. Each batch tells its rows otherwise, so a capture of the
    model for each would be one at every step."""

    def loss(model, batch):
        logps = model(batch["ids"]).log_softmax(-1).gather(-1, batch["ids"][..., None])
        return objective(logps.sum((1, 2)), batch["good"])

    torch.manual_seed(0)
    model = Layered().double()
    step = optimize(model, loss, CONFIG)
    good = torch.rand(8, 6, generator=torch.Generator().manual_seed(0)) > 0.5
    for row in good:
        batch = fixed({"ids": torch.randint(0, 11, (6, 5)), "good": told(row)})
        torch.testing.assert_close(step(batch), loss(model, batch), rtol=1e-12, atol=0)
    assert not step.report.of_kind("missed")
    heads = [one for one in step.captures if one.report.of_kind("applied")]
    assert len(heads) <= 4


class Recurring(Layered):
    """Goes through its layers as often as chance has it."""

    def forward(self, ids):
        hidden = self.embed(ids)
        for _ in range(random.randint(1, 3)):
            for layer in self.layers:
                hidden = layer(hidden)
        return self.head(hidden)


def test_a_head_behind_a_loop_of_random_length_is_captured():
    def loss(model, batch):
        return -token_logps(model(batch["ids"]), batch["ids"]).mean()

    torch.manual_seed(0)
    model = Recurring().double()
    step = optimize(model, loss, CONFIG)
    for seed in range(4):
        batch, results = fixed({"ids": torch.randint(0, 11, (3, 5))}), []
        for call in (partial(loss, model), step):
            random.seed(seed)
            results.append((call(batch).item(), random.random()))
        assert results[1] == pytest.approx(results[0], rel=1e-12)
    assert fused(step)
    assert captures(step) <= 4  # what is ahead of it, and one for each length


def test_a_loop_over_a_range_of_the_batch_goes_as_far_as_that_does():
    def loss(model, batch):
        logps = token_logps(model(batch["ids"]), batch["ids"])
        weighted = sum(logps[:, column] for column in batch["columns"])
        return -(weighted + (3 in batch["columns"])).mean() / len(batch["columns"])

    torch.manual_seed(0)
    model = Mixer()
    step = optimize(model, loss, CONFIG)
    for columns in (range(2), range(4), range(1, 4), range(4)):
        assert_matches_eager(step, loss, model, fixed(make_batch(columns=columns)))
    assert captures(step) == 3
    assert fused(step)


class Torchs(nn.Module):
    """Layers of torch's own, which find out themselves whether a mask is causal."""

    def __init__(self, decodes: bool) -> None:
        super().__init__()
        kind = nn.TransformerDecoderLayer if decodes else nn.TransformerEncoderLayer
        layers = nn.TransformerDecoder if decodes else nn.TransformerEncoder
        self.embed, self.head = nn.Embedding(61, 12), nn.Linear(12, 61)
        self.layers = layers(kind(12, 2, 16, dropout=0.0, batch_first=True), 2)
        self.decodes = decodes

    def forward(self, ids: Tensor, window: Tensor) -> Tensor:
        x, place = self.embed(ids), torch.arange(ids.shape[1])
        before = place[:, None] - place
        hidden = torch.zeros(before.shape, dtype=x.dtype)
        hidden = hidden.masked_fill((before < 0) | (before >= window), -torch.inf)
        given = {"memory": x[:, :3], "tgt_mask": hidden} if self.decodes else {"mask": hidden}
        logits: Tensor = self.head(self.layers(x, **given))
        return logits


@pytest.mark.parametrize("decodes", [True, False])
def test_an_op_that_is_told_a_tensors_value_is_captured_with_it(decodes):
    def loss(model, batch):
        return -token_logps(model(batch["ids"], batch["window"]), batch["ids"]).mean()

    torch.manual_seed(0)
    model = Torchs(decodes).double()
    step = optimize(model, loss, CONFIG)
    for count, window in ((1, torch.tensor(100)), (2, torch.tensor(2))):
        for rows, length in ((3, 7), (2, 9)):
            assert_matches_eager(step, loss, model, make_batch(rows, length, window=window))
        assert captures(step) == count
    assert fused(step)


def test_a_truth_that_is_computed_with_is_the_graphs():
    """One that turns from call to call costs no capture where no Python asks for it."""

    def loss(model, batch):
        logps = token_logps(model(batch["ids"]), batch["ids"])
        high = batch["adv"].mean().item() > 0
        return -(logps * torch.tensor(high)).mean() - torch.full((2,), high).double().mean()

    torch.manual_seed(0)
    model = Mixer()
    step = optimize(model, loss, CONFIG)
    for sign in (1, -1, 1, -1):
        adv = sign * torch.ones(3, 1, dtype=torch.float64)
        assert_matches_eager(step, loss, model, fixed(make_batch(adv=adv)))
    assert captures(step) == 1
    assert fused(step)


@pytest.mark.parametrize("options", [{"passes": ()}, {"min_saved_bytes": "1GiB"}])
def test_a_branch_is_followed_where_nothing_is_rewritten_too(options):
    step = assert_runs_as_eager(loss_fn, [False, True], dataclasses.replace(QUIET, **options))
    assert not step.report.of_kind("applied")
    (told,) = [r for r in step.report.remarks if "if high.any():" in r.reason]
    assert told.kind == "analysis"
    missed = [remark.reason for remark in open_misses(step.report)]
    assert all("below min_saved_bytes=1.00 GiB" in reason for reason in missed)
    assert bool(missed) == bool(step.config.min_saved_bytes)


def test_explain_follows_the_way_that_goes_further():
    torch.manual_seed(0)
    report = optimize(Deciding(), early, CONFIG).explain(
        make_batch(high=torch.tensor([True, True]))
    )
    assert report.of_kind("applied")


@pytest.mark.parametrize(
    "doubled",
    [
        pytest.param(lambda logps: logps * 2, marks=pytest.mark.slow),
        pytest.param(lambda logps: logps.t() * 2, marks=pytest.mark.slow),
        lambda logps: logps.reshape(-1, 1, logps.size(1)).transpose(0, 2) * 2,
    ],
)
def test_a_branch_of_torch_cond_gets_what_a_rewritten_head_gives(doubled):
    """Of sizes that vary: one of rows that are one token shorter than what they are made of."""

    def of_cond(model, batch):
        logps = token_logps(model(batch["ids"]), batch["ids"])
        longest = batch["mask"].sum() > 18
        return torch.cond(longest, doubled, lambda logps: doubled(logps) - 1, (logps,)).mean()

    torch.manual_seed(0)
    model = Mixer()
    step = optimize(model, of_cond, CONFIG)
    for batch in (make_batch(), make_batch(4, 9, seed=2)):
        assert_matches_eager(step, of_cond, model, batch)
    assert fused(step)
    assert captures(step) == 1
