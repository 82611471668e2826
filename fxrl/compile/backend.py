"""The torch.compile backend: lower, run the passes, build the regions, run what is left.

It is called once for each captured graph. What happened is kept in a ``Capture`` for report, dump
and verify.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fxrl import kernels
from fxrl.capture._dynamo import is_first_graph, owner_of_graph
from fxrl.capture._torch import RestartAnalysis, enable_python_dispatcher
from fxrl.capture.branches import (
    CannotBeginAnewError,
    follows_branches,
    has_checks,
    talks_to_ranks,
)
from fxrl.capture.breaks import SizesFromDataError, break_of, break_remarks
from fxrl.capture.lower import lower
from fxrl.capture.retries import may_pass
from fxrl.capture.shared_bodies import share_bodies
from fxrl.compile._torch import without_autocast
from fxrl.compile.bodies.inductor import InductorOptions
from fxrl.compile.bodies.variants import CompiledRegion, build_region
from fxrl.compile.by_plan import ByPlan
from fxrl.compile.guarded import Guarded, as_written
from fxrl.compile.heads_ahead import begin_heads
from fxrl.compile.outer import calls_higher_order, run_outer
from fxrl.compile.planning import Batch, Planner, batches_of
from fxrl.compile.region_costs import known_profiles, shares_seen
from fxrl.config import Config
from fxrl.errors import FxrlError, PlanError, did_you_mean, first_line
from fxrl.ir.bodies import CHECKPOINT, body_of, clone, modules_of, written_inputs
from fxrl.ir.capture_record import Capture
from fxrl.ir.derived import DerivedInputs, derived_inputs
from fxrl.ir.graph import IS_PART, gpu_of, has_hint, hint, tensor_val
from fxrl.ir.on_miss import Judge, illegal_misses
from fxrl.ir.pipeline import Rewritten
from fxrl.ir.plan import Plan
from fxrl.ir.region import Region, region_calls, regions_of, text_on_any_gpu
from fxrl.ir.remark import Refusal, Remark, RemarkKind, Report
from fxrl.ir.site import name_held, name_modules, name_sites
from fxrl.ir.source import source_of_trace, user_source
from fxrl.ops.context_parallel import told_by_first, told_by_ranks
from fxrl.ops.host_memory import pool_of
from fxrl.passes import pipeline
from fxrl.passes.recompute import outlined_layers
from fxrl.planner.budget import Budget, Limits
from fxrl.planner.target import Target, target_of

Run = Callable[..., Any]
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Backend:
    """A ``torch.compile`` backend bound to one configuration."""

    config: Config
    plan: Plan
    _: KW_ONLY
    # Stop after the passes and run the graph as Dynamo delivered it (fake tensors).
    only_explain: bool = False
    # Run the lowered graph even where no pass rewrote anything, so that ``verify`` tells what
    # lowering does from what the passes do.
    always_rewritten: bool = False
    always_planned: bool = False  # predict, also where nothing bounds the memory
    accumulated: bool = False  # predict a micro-batch that is not the first of its update
    target: Target | None = None  # what to plan for; None for the GPU that the model is on
    limits: Limits | None = None  # to plan from; None for those of ``target``, and of the moment
    # The captured graph is called many times, each time for a part of the step.
    alone: bool = field(default=False, init=False)
    model: torch.nn.Module | None = field(default=None, init=False)  # whose sites are named
    held: Mapping[str, str] = field(default_factory=dict, init=False)  # see ``names_held``
    captures: list[Capture] = field(default_factory=list, init=False)  # so far, in order
    judge: Judge = field(init=False)  # is asked about misses

    def __post_init__(self) -> None:
        self.judge = Judge(self.config.on_miss)
        self._derived = DerivedInputs()
        # An unknown pass or option is an error now.
        self._pipeline = pipeline(self.config)
        self._inductor = InductorOptions.of(self.config.inductor)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Run:
        name_held(gm, self.held)
        if self.model is not None:
            names = {str(id(module)): name for name, module in self.model.named_modules()}
            name_modules(gm, names, str(id(owner_of_graph())))
        gm, lifted = share_bodies(gm)
        capture = Capture(len(self.captures), gm)
        self.captures.append(capture)
        try:
            run = self._capture(capture, [*example_inputs, *(one.tensor for one in lifted)])
            if follows_branches(gm) and not self.only_explain:
                alone = self.config.context_parallel == 1
                if not capture.running or not alone or talks_to_ranks(capture.lowered):
                    raise CannotBeginAnewError
        except FxrlError:
            raise
        except BaseException:
            self.captures.remove(capture)
            raise
        return run if not lifted else lambda *args: run(*args, *(one.tensor for one in lifted))

    def _capture(self, capture: Capture, example_inputs: Sequence[Any]) -> Run:
        log.info("lowering the step: graph %d", capture.index)
        gm = capture.dynamo
        capture.graph_breaks += break_of(gm)
        _note_checkpoints(capture)
        rewritten = self._rewrite(capture, example_inputs)
        if capture.graph_breaks and is_first_graph() and _hands_on_sizes(capture):
            raise SizesFromDataError(capture.graph_breaks[0].source)
        made = capture.rewritten
        lost = made is None or illegal_misses(capture.report, made.plan)
        kind = RemarkKind.MISSED if lost else RemarkKind.ANALYSIS  # where it costs no head
        capture.remarks += break_remarks(capture.graph_breaks, f"{capture.index}:graph", kind)
        if rewritten is None:
            return as_written(gm)
        self.judge(capture.report)
        # Also where no pass won anything: a checkpointed call would run as Dynamo's stand-in, which
        # recomputes nothing, and a branch can be followed in a functional graph alone.
        must = calls_higher_order(capture.dynamo) or has_checks(gm)
        wanted = self.always_rewritten or must or capture.report.of_kind(RemarkKind.APPLIED)
        if self.only_explain or not wanted:
            return as_written(gm)
        try:
            run = self._compile(capture, rewritten, example_inputs)
            if capture.planner is not None:
                alone = self.config.context_parallel == 1
                run = ByPlan(self._planned_anew, capture, run, example_inputs, alone=alone).run
        except (FxrlError, RestartAnalysis):  # which wants a number written in: asked again
            raise
        except Exception as error:
            if may_pass(error):
                raise
            why = f"the rewritten graph could not be compiled: {first_line(error)}"
            self._fall_back(capture, Refusal(why))
            return as_written(gm)
        capture.running = True
        assert capture.lowered is not None
        written = written_inputs(capture.lowered)
        early = written if any(map(written_inputs, modules_of(capture.lowered)[1:])) else ()

        def fall_back(why: str) -> None:
            self._fall_back(capture, Refusal(why))

        return Guarded(run, gm, written, early, fall_back).first

    def _rewrite(self, capture: Capture, inputs: Sequence[Any]) -> fx.GraphModule | None:
        """The graph after lowering and all passes; None when it must run as it is.

        NOTE [Why lowering may fail softly]: the graph can hold anything that PyTorch can. What
        cannot be lowered, or fails later, runs as the user wrote it, and the report says so.
        """
        try:
            lowered = self._lowered(capture.dynamo)
        except Exception as error:
            if may_pass(error):
                raise
            refusal = error if isinstance(error, Refusal) else Refusal(first_line(error))
            refusal.reason = f"the graph could not be lowered: {refusal.reason}"
            self._fall_back(capture, refusal, source_of_trace(str(error)))  # fx tells the node's
            return None
        name_sites(lowered, str(capture.index))
        if capture.graph_breaks or not is_first_graph():
            lowered.meta[IS_PART] = True
        if gpu_of(inputs) is not None:
            _attach_kernels(capture)  # before passes measure them
        capture.lowered, capture.pipeline = lowered, self._pipeline.measured(inputs)
        with _as_lowered():
            planner = self._planner(capture, inputs)
            capture.rewritten = self._fitting(capture, planner)
        capture.given = capture.rewritten.given
        _note_not_found(capture, self.plan)
        return capture.rewritten.gm

    def _fitting(
        self, capture: Capture, planner: Callable[[fx.GraphModule, Plan], Plan] | None
    ) -> Rewritten:
        """The graph after all passes. If no plan fits, the passes run again in their sparing
        variants, which also rewrite what is faster op by op. Raises ``PlanError`` if even then
        nothing fits the budget that the user gave."""
        assert capture.lowered is not None
        assert capture.pipeline is not None
        fast, sparing = capture.pipeline, capture.pipeline.sparing()
        try:
            made = fast.run(clone(capture.lowered), self.plan, planner=planner)
        except PlanError:
            if fast == sparing or any(outlined_layers(capture.found)):
                raise
        else:
            if fast == sparing or not _overflows(capture, made.given):
                return made
        why = "no plan fits them op by op, so layers become regions though they are small"
        capture.note(RemarkKind.ANALYSIS, "plan", why)
        capture.pipeline = sparing
        return sparing.run(clone(capture.lowered), self.plan, planner=planner)

    def _lowered(self, gm: fx.GraphModule) -> fx.GraphModule:
        return lower(gm, grad_enabled=torch.is_grad_enabled())

    def _planner(
        self, capture: Capture, inputs: Sequence[Any]
    ) -> Callable[[fx.GraphModule, Plan], Plan] | None:
        """A function that makes the plan; None if memory is unbounded and no prediction is asked
        for, or if it is unknown here what else the step keeps. Layers then follow the user's
        checkpointing."""
        if self.alone:
            if self.config.gpu_memory is not None:
                why = "gpu_memory is not planned for: the step's layers are not in one graph"
                cure = "checkpoint layers, which is honoured"
                capture.note(RemarkKind.ANALYSIS, "plan", why, cure)
            return None
        device = gpu_of(inputs)
        if device is None and self.config.gpu_memory is None and not self.always_planned:
            return None
        limits = self.limits_on(device)

        def planned(gm: fx.GraphModule, plan: Plan) -> Plan:
            log.info("planning the step's memory")
            if capture.planner is None and not self.only_explain:
                capture.heads_called = begin_heads(gm, inputs)
            try:
                held = frozenset() if self.only_explain else batches_of(gm)(inputs, hint).held
                capture.planner = Planner(
                    known_profiles(self._options, self.plan, shares_seen(gm, inputs)),
                    *limits,
                    with_context=self.always_planned,
                    accumulated=self.accumulated,
                    passes=frozenset(one.name for one in self._pipeline.passes),
                )
                return self._made(capture, gm, plan, Batch(held=held))
            except FxrlError:
                raise
            except Exception as error:
                if may_pass(error):
                    raise
                why = "no plan was made, every layer does what it does by itself"
                capture.note(RemarkKind.MISSED, "plan", f"{why}: {first_line(error)}")
                capture.planner = None
                return plan

        return planned

    def limits_on(self, device: torch.device | None) -> Limits:
        """``limits``, or where there are none those of a GPU (None: of the target)."""
        if self.limits is not None:
            return self.limits
        target, ranks = self.target or target_of(device), self.config.context_parallel
        limits = Limits(target, Budget.of(self.config, target, device))
        if ranks == 1 or self.only_explain:
            return limits
        return Limits.common(told_by_ranks(limits, ranks))

    def _made(self, capture: Capture, gm: fx.GraphModule, plan: Plan, batch: Batch) -> Plan:
        """The planner's plan for a batch. Ranks that share sequences all take the first rank's:
        whatever runs again also communicates again, so ranks with different plans would wait for
        each other forever.

        Raises ``PlanError`` if nothing fits the user's budget, ``FxrlError`` if the ranks have
        captured different graphs.
        """
        capture.found = clone(gm)  # what acts on it next changes it
        planner: Planner = capture.planner
        make, ranks = partial(planner, gm, plan, batch), self.config.context_parallel
        if ranks == 1 or self.only_explain:
            return make()
        return told_by_first(make, text_on_any_gpu(gm), ranks)

    @property
    def _options(self) -> InductorOptions | None:
        return self._inductor if self.config.compile_regions else None

    def _planned_anew(
        self, capture: Capture, examples: Sequence[Any], batch: Batch, why: str
    ) -> Run:
        """The capture compiled again, by a plan for a batch."""
        with _as_lowered():
            made = partial(self._made, capture, batch=batch)
            capture.rewritten = self._fitting(capture, made)
        capture.given = capture.rewritten.given
        capture.note(RemarkKind.ANALYSIS, "plan", why)
        return self._compile(capture, capture.rewritten.gm, examples)

    def _compile(self, capture: Capture, gm: fx.GraphModule, examples: Sequence[Any]) -> Run:
        if (device := gpu_of(examples)) is not None:
            pool_of(device).reserve(capture.given.peak_host_bytes or 0)
        calls = region_calls(gm)
        owned = self._built(capture, regions_of(gm))
        for call in calls:
            call.update_arg(1, owned[call.meta["region"].id].key)
        capture.kernels |= owned  # those of another plan run, too
        for one in owned.values():
            if one.attention:
                told = f"attention: {one.attention}"
                capture.note(RemarkKind.ANALYSIS, "kernels", told, site=one.region.layer or "graph")
        capture.body_rewrites = [pair for one in owned.values() for pair in one.traced.rewrites]
        capture.heads_called()
        log.info("running the step for the first time")
        asked, values = derived_inputs(gm), self._derived.of
        run = run_outer(gm, [*examples, *values(asked, examples)])
        return run if not asked else lambda *args: run(*args, *values(asked, args))

    def _built(self, capture: Capture, regions: Mapping[str, Region]) -> dict[str, CompiledRegion]:
        """Kernels of regions by id: all bodies are lowered before any kernel is waited for."""
        built: dict[str, CompiledRegion] = {}
        for number, (id, region) in enumerate(regions.items()):
            log.info("compiling the step: body %d of %d", number + 1, len(regions))
            kernels = build_region(region, self._options, self.plan)
            built[id] = self._or_op_by_op(capture, kernels, CompiledRegion.begin)
        if built:
            log.info("compiling the step: kernels of %d bodies", len(built))
        for id, kernels in built.items():
            built[id] = self._or_op_by_op(capture, kernels, CompiledRegion.compile)
        return built

    def _or_op_by_op(
        self, capture: Capture, built: CompiledRegion, step: Callable[[CompiledRegion], None]
    ) -> CompiledRegion:
        """A region after a step of its compilation, or its graph op by op if that fails."""
        try:
            step(built)
        except Exception as error:
            why = f"a body of it runs op by op, as it could not be compiled: {first_line(error)}"
            site = built.region.layer or "graph"
            missed = capture.note(RemarkKind.MISSED, "kernels", why, site=site)
            self.judge(missed)
            return build_region(built.region, None, self.plan)
        return built

    def _fall_back(self, capture: Capture, refusal: Refusal, source: str = "") -> None:
        """Say that the user's own graph runs, as ``on_miss`` wants it said."""
        capture.running = False
        why = refusal.reason
        if refusal.at is not None:
            source = user_source(refusal.at)
        missed = capture.note(RemarkKind.MISSED, "capture", why, refusal.cure, source=source)
        if capture.rewritten is not None:  # what was applied does not run
            rewritten = tuple(_taken_back(r, why) for r in capture.rewritten.report.remarks)
            capture.rewritten = replace(
                capture.rewritten, report=Report(rewritten), plan=Plan(), rewrites=()
            )
        self.judge(missed)


@contextmanager
def _as_lowered() -> Iterator[None]:
    """Passes compute fake values as the trace did: without autocast, for the graph already holds
    its casts, and with composite ops over symbols decomposed in Python, since C++ would specialise
    attention's sizes on ``meta`` (2.11)."""
    with without_autocast(), enable_python_dispatcher():
        yield


def _hands_on_sizes(capture: Capture) -> bool:
    """Whether no loss head was rewritten, and a returned value has a data-dependent size."""
    if capture.lowered is None or capture.report.of_kind(RemarkKind.APPLIED):
        return False
    returned = map(tensor_val, capture.lowered.graph.output_node().all_input_nodes)
    return any(not has_hint(*value.shape) for value in returned if value is not None)


def _overflows(capture: Capture, plan: Plan) -> bool:
    """Whether a plan exceeds the budget, and there are no layers for which to choose otherwise."""
    if capture.planner is None or any(outlined_layers(capture.found)):
        return False
    return bool((plan.peak_gpu_bytes or 0) > capture.planner.budget.gpu_bytes)


def _taken_back(remark: Remark, why: str) -> Remark:
    if remark.kind != RemarkKind.APPLIED:
        return remark
    return replace(remark, kind=RemarkKind.MISSED, reason=why, saved_bytes=0)


def _note_not_found(capture: Capture, given: Plan) -> None:
    """Note the sites of a given plan that this graph does not have: it was made for another
    graph."""
    known = {} if capture.rewritten is None else capture.rewritten.plan.choices
    here = [s for s in given.choices if s.startswith(f"{capture.index}:") and s not in known]
    for site in here:
        reason = f"the plan names this site, and there is none{did_you_mean(site, known)}"
        cure = "print(step.plan) shows the sites that there are"
        capture.note(RemarkKind.MISSED, "plan", reason, cure, site=site)


def _attach_kernels(capture: Capture) -> None:
    """Attach the GPU kernels of fxrl's ops; say so when they cannot be."""
    if not kernels.register():
        reason = "the fused head runs as plain PyTorch on this GPU: Triton is not installed"
        capture.note(
            RemarkKind.ANALYSIS, "kernels", reason, "pip install triton", site="linear_logprob"
        )


def _checkpoints(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """The checkpointed calls, as often as the model makes them."""
    for node in gm.graph.nodes:
        if node.target is CHECKPOINT:
            yield node
        elif (body := body_of(gm, node)) is not None:
            yield from _checkpoints(body)


def _note_checkpoints(capture: Capture) -> None:
    """Activation checkpointing that the user switched on is honoured, and said so."""
    calls = list(_checkpoints(capture.dynamo))
    if calls:
        reason = f"{len(calls)} checkpointed calls taken over: run again in the captured backward"
        source = user_source(calls[0])
        capture.note(RemarkKind.ANALYSIS, "capture", reason, site="checkpoints", source=source)
