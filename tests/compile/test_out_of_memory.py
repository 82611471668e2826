"""Memory runs out somewhere in a step: the step goes on with the same numbers, or says what it had.

An allocator that fails is planted where it hurts: in the kernels of regions, at the n-th that runs.
"""

import gc
import re
import warnings
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

import fxrl
from fxrl.compile import backend, by_plan, planning
from fxrl.compile.backend import Backend
from fxrl.compile.bodies.variants import CompiledRegion
from fxrl.compile.by_plan import ByPlan
from fxrl.errors import HostMemoryError
from fxrl.ir.plan import CutLayer, Plan, in_segment
from fxrl.ops import host_memory
from fxrl.ops.host_memory import drop_free_pages
from fxrl.ops.out_of_memory import MemoryWarning
from fxrl.planner.budget import Limits
from fxrl.planner.target import TARGETS
from fxrl.step import TrainStep
from tests.capture.mixer import fixed
from tests.passes.layered import make_stack, square_loss

LAYERS = 3
DRAWN = torch.randint(0, 11, (2, 256), generator=torch.Generator().manual_seed(0))
IDS = fixed({"ids": DRAWN.clone()})


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


class Allocator:
    """Runs out of memory when the regions' halves named ``half`` run for the n-th time."""

    def __init__(self, monkeypatch):
        self.half, self.fails, self.calls = "forward", frozenset(), 0
        body = CompiledRegion.body

        def planted(region, sizes):
            found = body(region, sizes)
            if (half := getattr(found, self.half)) is None:
                return found
            failing = (
                self._failing(half)
                if self.half == "forward"
                else replace(half, function=self._failing(half.function))
            )
            return replace(found, **{self.half: failing})

        monkeypatch.setattr(CompiledRegion, "body", planted)

    def _failing(self, run):
        def half(*args):
            self.calls += 1
            if self.calls - 1 in self.fails:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU")
            return run(*args)

        return half

    def fail(self, half, *calls):
        self.half, self.fails, self.calls = half, frozenset(calls), 0


@pytest.fixture
def allocator(monkeypatch):
    return Allocator(monkeypatch)


def make_step(plan=None, *, layers=LAYERS, link=None, **options):
    options = {"gpu_memory": "1GiB", "host_memory": "1GiB"} | options
    passes = ("recompute", "offload", "tile-tokens", "group-heads")
    config = fxrl.Config(passes=passes, compile_regions=False, on_miss="error", **options)
    model = make_stack(layers, width=32, heads=4)
    if link is None:
        return fxrl.optimize(model, square_loss, config, plan=plan)
    target = replace(TARGETS["h200"], link=link)
    backend = Backend(config, Plan(), target=target)
    return TrainStep(model, square_loss, config, backend=backend)


def gradients(step, batch=IDS):
    """The loss and every gradient of one step."""
    step.model.zero_grad()
    loss = step(batch)
    loss.backward()
    found = {name: p.grad for name, p in step.model.named_parameters() if p.requires_grad}
    return {"loss": loss.detach()} | {name: grad.clone() for name, grad in found.items()}


def assert_equal(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14, msg=name)


def kept(step):
    return {choice.kept for choice in step.plan.choices.values() if isinstance(choice, CutLayer)}


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_a_forward_is_planned_tighter_and_run_again(allocator, layer):
    step = make_step()
    expected = gradients(step)
    before = step.plan
    allocator.fail("forward", layer)
    with pytest.warns(MemoryWarning, match=f"ran out in forward of layer {layer}: .* predicted"):
        found = gradients(step)
    assert_equal(found, expected)
    assert step.plan.peak_gpu_bytes < before.peak_gpu_bytes
    assert any("memory ran out" in r.reason for r in step.report.remarks if r.pass_name == "plan")
    with warnings.catch_warnings(action="error"):
        assert_equal(gradients(step), expected)


def test_ranks_plan_alike_also_when_memory_has_run_out_on_one(allocator):
    mine, other = make_step(), make_step(gpu_memory="70MiB", host_memory="1MiB")
    for step in (mine, other):
        step.plan_within([one.limits() for one in (mine, other)])
    least = Limits.common([mine.limits(), other.limits()])
    assert mine.limits() == other.limits() == least
    assert least.budget.host_bytes == 2**20
    expected = gradients(mine)
    assert_equal(gradients(other), expected)
    assert mine.plan.choices == other.plan.choices
    assert mine.plan_for(IDS).choices == mine.plan.choices
    allocator.fail("forward", 0)
    with pytest.warns(MemoryWarning):
        gradients(other)
    assert other.plan.choices != mine.plan.choices
    for step in (mine, other):
        step.plan_within([one.limits() for one in (mine, other)])
    assert_equal(gradients(mine), expected)
    assert mine.plan.choices == other.plan.choices


@pytest.mark.parametrize("place", ["gpu", "host"])
def test_a_backward_runs_again_with_what_waits_on_the_host(allocator, place):
    chosen = CutLayer("products", place, place)
    step = make_step(Plan({f"0:blocks.{i}": chosen for i in range(LAYERS)}))
    expected = gradients(step)
    for layer in range(LAYERS):
        allocator.fail("backward", LAYERS - 1 - layer)
        with pytest.warns(MemoryWarning, match=f"ran out in backward of layer {layer}: ") as told:
            found = gradients(step)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        moved = re.search(r"MiB; (.*) that wait .* were moved to host", str(told[0].message))[1]
        assert (moved == "0 B") == (layer == 0 or place == "host"), moved


@pytest.mark.parametrize(
    ("kept_on", "half", "runs"), [("again", "forward", LAYERS), ("gpu", "again", 0)]
)
def test_a_segment_that_runs_short_runs_once_more(allocator, kept_on, half, runs):
    """Of three layers the first two make the next one's input, at the third one's backward."""
    way = CutLayer("attention", "host", kept_on)
    choices = [in_segment(way, first=i == 0, last=i == LAYERS - 1) for i in range(LAYERS)]
    step = make_step(Plan({f"0:blocks.{i}": choice for i, choice in enumerate(choices)}))
    expected = gradients(step)
    places = [(half, runs + call, LAYERS - 1) for call in range(LAYERS - 1)]
    places += [("backward", LAYERS - 1 - layer, layer) for layer in range(LAYERS)]
    for name, call, layer in places:
        allocator.fail(name, call)
        with pytest.warns(MemoryWarning, match=f"ran out in backward of layer {layer}: "):
            found = gradients(step)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_layer_that_runs_again_for_itself_runs_once_more(allocator):
    again = CutLayer("attention", "gpu", "again")
    step = make_step(Plan({f"0:blocks.{i}": again for i in range(LAYERS)}))
    expected = gradients(step)
    for layer in range(LAYERS):
        allocator.fail("forward", 2 * LAYERS - 1 - layer)
        with pytest.warns(MemoryWarning, match=f"ran out in backward of layer {layer}: "):
            found = gradients(step)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_step_behind_a_short_backward_is_planned_tighter(allocator):
    step = make_step()
    expected = gradients(step)
    before = step.plan
    assert kept(step) == {"products"}
    allocator.fail("backward", 0)
    with pytest.warns(MemoryWarning):
        assert_equal(gradients(step), expected)
    assert step.plan.choices == before.choices
    assert_equal(gradients(step), expected)
    assert step.plan.peak_gpu_bytes < before.peak_gpu_bytes
    assert kept(step) != {"products"}


def test_micro_batches_that_wait_are_moved_too(allocator):
    """Two forwards before their backwards, as DPO has them."""
    step = make_step()
    expected = gradients(step)
    step.model.zero_grad()
    losses = [step(IDS), step(IDS)]
    allocator.fail("backward", 0)
    with pytest.warns(MemoryWarning, match="were moved"):
        sum(losses).backward()
    for name, p in step.model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad, 2 * expected[name], rtol=1e-12, atol=1e-14)


def test_a_forward_that_nothing_helps_says_what_it_had_and_loses_nothing(allocator):
    step = make_step()
    expected = gradients(step)
    step.model.zero_grad()
    allocator.fail("forward", *range(1000))
    with (
        pytest.raises(torch.OutOfMemoryError, match="memory ran out"),
        warnings.catch_warnings(action="ignore"),
    ):
        step(IDS)
    assert all(p.grad is None for p in step.model.parameters())
    allocator.fail("forward")
    assert_equal(gradients(step), expected)


def test_ranks_that_share_sequences_run_nothing_again(allocator, monkeypatch):
    """What runs again sends again, and the others do not: the error is the user's."""
    monkeypatch.setattr(backend, "ByPlan", lambda *parts, alone: ByPlan(*parts, alone=False))
    step = make_step()
    expected, before = gradients(step), step.plan
    allocator.fail("forward", 0)
    with (
        warnings.catch_warnings(action="error"),
        pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"),
    ):
        step(IDS)
    assert step.plan.choices == before.choices
    allocator.fail("forward")
    assert_equal(gradients(step), expected)


def test_a_plan_that_leaves_no_choice_names_the_largest_part(allocator):
    given = Plan({f"0:blocks.{i}": CutLayer("inputs") for i in range(LAYERS)})
    step = make_step(given)
    allocator.fail("forward", 2)
    with pytest.raises(torch.OutOfMemoryError, match=r"layer 2: .* most of it, in .* would fit"):
        step({"ids": DRAWN})  # of another length


def test_a_backward_that_nothing_helps_says_so(allocator):
    step = make_step()
    allocator.fail("backward", 1, 2)
    with pytest.raises(torch.OutOfMemoryError, match=r"backward of layer 1: .* not enough: CUDA"):
        step(IDS).backward()


class Refusing:
    """PyTorch, of a driver that pins no more pages."""

    empty = Mock(side_effect=RuntimeError("CUDA error: OS call failed or not supported on this OS"))

    def __getattr__(self, name):
        return getattr(torch, name)


def refuse(monkeypatch):
    drop_free_pages()
    monkeypatch.setattr(host_memory, "torch", Refusing())


def test_where_the_host_gives_no_memory_the_plan_takes_none(monkeypatch):
    monkeypatch.setattr(host_memory, "PAGE", 2**14)  # these layers are small
    monkeypatch.setattr(planning, "PAGE", 2**14)
    free = make_step(layers=8)
    expected = gradients(free)
    heights = [moment.bytes for moment in free.plan.timeline]
    budget = int((max(heights) - 0.3 * (max(heights) - min(heights))) / 0.97)
    step = make_step(layers=8, link=1e18, gpu_memory=budget)
    refuse(monkeypatch)
    with pytest.warns(MemoryWarning, match=r"refused \(CUDA error: .*planned without host memory"):
        found = gradients(step)
    assert_equal(found, expected)
    assert step.plan.peak_host_bytes == 0


def test_a_plan_that_asks_for_host_memory_says_what_is_missing(monkeypatch):
    step = make_step(Plan({"0:blocks.1": CutLayer("inputs", "host")}))
    refuse(monkeypatch)
    with pytest.raises(HostMemoryError, match=r"16 MiB were refused .* choices that are given"):
        step(IDS)


def test_who_keeps_a_loss_keeps_no_pages():
    away = CutLayer("products", "host", "host")
    step = make_step(Plan({f"0:blocks.{i}": away for i in range(LAYERS)}))
    expected = gradients(step)
    gc.collect()  # errors of other tests may hold some
    before = pages_in_use()
    losses = []
    for again in (False, True):
        step.model.zero_grad()
        losses.append(step(IDS))
        losses[-1].backward(retain_graph=again)
        assert (pages_in_use() > before) == again
    step.model.zero_grad()
    losses[-1].backward()
    assert pages_in_use() == before
    named = step.model.named_parameters()
    assert_equal({name: p.grad for name, p in named} | {"loss": losses[-1].detach()}, expected)


def pages_in_use():
    """Bytes."""
    drop_free_pages()
    return host_memory.bytes_held()


def test_copies_that_came_ahead_are_let_go_and_copied_again(allocator):
    """The first backward runs out of memory when the layers before have set out."""
    step = make_step(
        Plan({f"0:blocks.{i}": CutLayer("products", "host", "host") for i in range(3)})
    )
    expected = gradients(step)
    assert step.plan.choices["0:blocks.2"].fetching == 2
    allocator.fail("backward", 0)
    with pytest.warns(MemoryWarning, match="backward of layer 2: .* and copies of .* let go"):
        found = gradients(step)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert_equal(gradients(step), expected)


@pytest.mark.parametrize(
    ("room", "cached", "lengths", "given_back"),
    [
        pytest.param(1.3, 1.0, (256, 64, 256, 248, 248, 256), [248, 256], id="near_the_limit"),
        pytest.param(1.1, 0.05, (256, 64, 256), [], id="what_is_cached_fits_beside"),
        pytest.param(1.5, 9.0, (256, 64, 256), [], id="pieces_fit_beside"),
        pytest.param(1.1, 1.0, (256, 256, 256), [], id="one_length"),
    ],
)
def test_what_other_lengths_cached_is_given_back(monkeypatch, room, cached, lengths, given_back):
    """Before a step that comes near what the GPU has, when no block of it is in use."""
    step, longest = make_step(), {"ids": DRAWN}
    expected, found, now = gradients(step, longest), [], []
    peak = step.plan.peak_gpu_bytes
    monkeypatch.setattr(by_plan, "cached_bytes", lambda device: int(cached * peak))
    monkeypatch.setattr(by_plan, "gpu_room", lambda device: int(room * peak))
    monkeypatch.setattr(by_plan, "give_back", lambda device: found.extend(now))
    for length in lengths:
        now[:] = [length]
        step({"ids": DRAWN[:, :length]}).backward()
    assert found == given_back
    assert_equal(gradients(step, longest), expected)
