"""Run a capture by a plan that fits the batch, or by a tighter one if memory ran out.

    sizes seen before       the plan that they had
    shorter, or it fits     the first plan that was made and fits: the fastest
    longer                  planned anew
    another micro-batch     planned anew, too: there are gradients of an earlier one
    new sizes, little room  as above, after what PyTorch has cached for other sizes is given back
    memory runs out         in the forward: planned tighter, and run again from its beginning
                            in the backward: what waits is moved (``ops.out_of_memory``), and the
                            next step is planned tighter
    no host memory          planned without it, and run again

NOTE [Why plans are kept]: a plan for a long batch keeps less for the backward and is slower. Short
batches that come again need not pay for it.

NOTE [Why memory is given back between batches]: PyTorch's allocator serves small tensors from
blocks that were cached for larger ones, and keeps a block of which any part is in use. So batches
of other lengths leave fragments: 1.6 of 8 GiB with lengths drawn from 1024 to 12288. PyTorch itself
gives blocks back only when memory runs out, in the midst of a step, when few blocks are unused;
before a step nearly all are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import fx

from fxrl.capture.branches import random_state
from fxrl.capture.breaks import in_one_line
from fxrl.compile.planning import Batch, batches_of
from fxrl.errors import HostMemoryError, PlanError
from fxrl.ir.bodies import body_of
from fxrl.ir.capture_record import Capture
from fxrl.ir.graph import gpu_of, hint, is_loss_head, needs_grad
from fxrl.ir.plan import CutLayer, Plan
from fxrl.ir.region import region_at
from fxrl.ir.remark import format_bytes
from fxrl.ops.host_memory import drop_free_pages
from fxrl.ops.out_of_memory import MemoryWarning, Shortage, Watch, cached_bytes, give_back
from fxrl.planner.budget import FRAGMENTS, gpu_room, host_room

Run = Callable[..., Any]
#: Compiles a capture anew, as its planner says for a batch; the words say why.
Replan = Callable[[Capture, Sequence[Any], Batch, str], Run]
#: The share of a step's peak that fragments of blocks for other sizes may hold besides: 0.26 was
#: seen when memory ran out (see the note above).
_PIECES = 1 / 3
#: What ran on a device since its memory was given back, and so has blocks in the cache.
_CACHED_FOR: dict[torch.device, set[Any]] = {}


@dataclass(frozen=True, slots=True)
class _Planned:
    """A plan as predicted for some batch, what runs by it, and the layer of each op that autograd
    records, in order."""

    plan: Plan
    run: Run
    layers: tuple[int | None, ...]


class ByPlan:
    """Runs a capture by a plan that fits the batch.

    If it is not ``alone``, other ranks wait for what a run sends: then nothing may run again, and
    running out of memory is an error.
    """

    def __init__(
        self,
        replan: Replan,
        capture: Capture,
        run: Run,
        examples: Sequence[Any],
        *,
        alone: bool = True,
    ) -> None:
        self._replan, self._capture, self._alone = replan, capture, alone
        self._batch = batches_of(capture.found)
        self._device = gpu_of(examples) or torch.device("cpu")
        self._budget = capture.planner.budget
        self._plans = [self._planned(run)]
        self._known = {self._batch(examples, hint): self._plans[0]}
        self._short: _Planned | None = None

    def run(self, *args: Any) -> Any:
        """Run the capture by the plan for the sizes of ``args``."""
        batch = self._batch(args)
        if self._short is not None:
            self._tighten(self._short)
        if self._budget != self._capture.planner.budget:  # other ranks have less
            self._forget()
        if batch not in self._known:
            self._known[batch] = self._find(batch, args)
        planned, random, host = self._known[batch], random_state(), None
        self._make_way(planned, batch)
        if not self._alone:
            return planned.run(*args)
        try:
            return self._watched(planned, args)
        except torch.OutOfMemoryError as error:
            told = str(error)
        except HostMemoryError as error:
            told, host = str(error), 0
        # Behind the except blocks: until then the error's frames hold what the forward had made.
        give_back(self._device)
        random()
        self._tighten(planned, host_bytes=host)
        again = self._again(planned, batch, args, told)
        what = "without host memory" if host == 0 else "tighter"
        warnings.warn(f"{told}; planned {what}, and run again", MemoryWarning, stacklevel=2)
        return self._watched(again, args)

    def _watched(self, planned: _Planned, args: Sequence[Any]) -> Any:
        """Run a plan, and watch its backward too. An ``OutOfMemoryError`` says where memory ran
        out, and what had been predicted there."""
        watch = Watch(lambda shortage: self._ran_out(planned, shortage), host_room)
        try:
            with watch.running():
                return planned.run(*args)
        except torch.OutOfMemoryError as error:
            shortage = Shortage.of(error, self._device, watch.count)
            raise torch.OutOfMemoryError(_autopsy("forward", planned, shortage)) from None

    def _make_way(self, planned: _Planned, batch: Batch) -> None:
        """Give back memory cached for other sizes, if its fragments might leave too little."""
        ran, this = _CACHED_FOR.setdefault(self._device, set()), (id(planned.run), batch.sizes)
        if this not in ran and (cached := cached_bytes(self._device)):
            peak = planned.plan.peak_gpu_bytes or 0
            if min(cached, _PIECES * peak) > gpu_room(self._device) - peak:
                give_back(self._device)
                ran.clear()
        ran.add(this)

    def _planned(self, run: Run) -> _Planned:
        assert self._capture.rewritten is not None
        plan = self._capture.given
        return _Planned(plan, run, tuple(_layers(self._capture.rewritten.gm, plan)))

    def _find(self, batch: Batch, args: Sequence[Any]) -> _Planned:
        capture = self._capture
        for planned in self._plans:
            done = [known for known, its in self._known.items() if its.run is planned.run]
            if any(batch.within(known) for known in done):
                return planned
            foretold = capture.planner.foretold(capture.found, planned.plan, batch)
            if foretold is not None:
                if foretold.peak_gpu_bytes > (capture.given.peak_gpu_bytes or 0):
                    capture.given = foretold
                return replace(planned, plan=foretold)
        told = ", ".join(str(size) for _, size in batch.sizes)
        beside = ", beside gradients of another micro-batch" if batch.held else ""
        return self._plan(batch, args, f"planned for another batch: sizes {told}{beside}")

    def _plan(self, batch: Batch, args: Sequence[Any], why: str) -> _Planned:
        passes = self._capture.pipeline
        planned = self._planned(self._replan(self._capture, args, batch, why))
        if self._capture.pipeline is not passes:  # other plans know nothing of its layers
            self._forget()
        self._plans.append(planned)
        return planned

    def _ran_out(self, planned: _Planned, shortage: Shortage) -> str:
        """Remember for the next step that memory ran out, and report it."""
        self._short = planned
        moved = format_bytes(shortage.moved_bytes)
        told = _autopsy("backward", planned, shortage)
        told = f"{told}; {moved} that wait for their backward were moved to host memory"
        if not shortage.let_go_bytes:
            return told
        return f"{told}, and copies of {format_bytes(shortage.let_go_bytes)} let go"

    def _tighten(self, failed: _Planned, host_bytes: int | None = None) -> None:
        """From now on plan for less memory than was predicted for the plan that failed."""
        planner, self._short = self._capture.planner, None
        if host_bytes is None:
            heights = [moment.bytes for moment in failed.plan.timeline]
            budget = planner.budget.tighter(max(heights), min(heights), self._device)
        else:
            budget = replace(planner.budget, host_bytes=host_bytes)
            drop_free_pages()
        self._capture.planner = replace(planner, budget=budget)
        self._forget()

    def _forget(self) -> None:
        """Drop all plans: they were made for another budget, or without layers to choose for."""
        self._budget = self._capture.planner.budget
        self._plans.clear()
        self._known.clear()

    def _again(self, failed: _Planned, batch: Batch, args: Sequence[Any], told: str) -> _Planned:
        """A new plan for a batch whose plan failed. Raises ``OutOfMemoryError`` if no other plan
        needs less, ``HostMemoryError`` if the user's own choices need more host memory than there
        is."""
        capture = self._capture
        try:
            planned = self._plan(batch, args, told)
        except PlanError as error:
            raise HostMemoryError(f"{told}; {error}") from None
        except Exception as error:  # compiling takes memory, too
            why = in_one_line(str(error))
            raise torch.OutOfMemoryError(f"{told}; no other plan could be made: {why}") from error
        if planned.plan.choices == failed.plan.choices:
            why = capture.planner.step(capture.found, failed.plan, batch).too_large()
            raise torch.OutOfMemoryError(f"{told}; {why}")
        self._known[batch] = planned
        return planned


def _autopsy(phase: str, planned: _Planned, shortage: Shortage) -> str:
    """Say in words how much memory was predicted and how much was in use where it ran out."""
    layers, timeline, used = planned.layers, planned.plan.timeline, shortage.used_bytes
    layer = layers[shortage.op] if shortage.op < len(layers) else None
    found = [m for m in timeline if m.phase == phase and m.layer == layer]  # of each forward
    found = (found if phase == "forward" else found[::-1])[: _forward_of(shortage.op, layers)]
    moment = (found or [m for m in timeline if m.phase == "head"])[-1]
    actual = f", {format_bytes(used)} were in use" if used else ""
    if shortage.pieces_bytes > FRAGMENTS * used:
        actual += (
            f" and {format_bytes(shortage.pieces_bytes)} in pieces that were too small (cure: "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)"
        )
    first = shortage.error.splitlines()[0].partition(". GPU")[0]
    predicted = f"{format_bytes(moment.bytes)} were predicted there"
    return f"memory ran out in {moment.where}: {predicted}{actual}; {first}"


def _forward_of(op: int, layers: Sequence[int | None]) -> int:
    """The number of the forward of its layer that an op is in."""
    ran = [layer for layer, _ in groupby(layers[: op + 1])]
    return ran.count(ran[-1]) if ran else 0


def _layers(gm: fx.GraphModule, plan: Plan) -> Iterator[int | None]:
    """The layer number of each op that autograd records, in execution order; None for heads and
    other ops outside layers."""
    sites = [site for site, choice in plan.choices.items() if isinstance(choice, CutLayer)]
    number = {site: place for place, site in enumerate(sites)}
    for node in gm.graph.nodes:
        region = region_at(node)
        if (body := body_of(gm, node)) is not None:
            yield from _layers(body, plan)
        elif region is None and not is_loss_head(node):
            continue
        elif any(map(needs_grad, node.all_input_nodes)):
            yield None if region is None else number.get(region.layer)
