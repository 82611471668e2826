"""The torch.compile backend: lower, run the passes, build the regions, run what is left.

One call per captured graph. What happened is kept in a ``Capture`` for report, dump and verify.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxrl import kernels
from fxrl.capture.checkpointing import (
    checkpoint_remarks,
    drop_unused_inputs,
    open_loss_checkpoints,
)
from fxrl.capture.lower import lower
from fxrl.compile.inductor import InductorOptions
from fxrl.compile.misses import judge_misses
from fxrl.compile.outer import restore_checkpoints, run_outer
from fxrl.compile.regions import build_region
from fxrl.config import Config
from fxrl.ir.capture_record import GraphBreak, Stage
from fxrl.ir.graph import HigherOrderOperator
from fxrl.ir.plan import Plan
from fxrl.ir.printer import print_graph
from fxrl.ir.region import Region, regions_of
from fxrl.ir.remark import Remark, RemarkKind, Report
from fxrl.ir.source import source_of_trace
from fxrl.passes import pipeline
from fxrl.passes.group_queries import group_queries
from fxrl.passes.recompute import Recompute


@dataclass(slots=True)
class Capture:
    """One captured graph and what became of it.

    Attributes:
        dynamo: the graph as Dynamo delivered it.
        stages: the passes in order, with the printed graph before and after.
        regions: region bodies by id.
        rewritten: the graph that runs; None where the user's own does.
    """

    index: int
    dynamo: fx.GraphModule
    stages: list[Stage] = field(default_factory=list)
    regions: dict[str, Region] = field(default_factory=dict)
    rewritten: fx.GraphModule | None = None
    report: Report = field(default_factory=Report)
    graph_breaks: list[GraphBreak] = field(default_factory=list)


class Backend:
    """A ``torch.compile`` backend bound to one configuration.

    Attributes:
        captures: what was captured so far, in order.
        only_explain: stop after the passes and run the graph as Dynamo delivered it (fake tensors).
    """

    def __init__(self, config: Config, plan: Plan, *, only_explain: bool = False) -> None:
        pipeline(config.passes)  # an unknown pass is an error now, not at the first batch
        self.config = config
        self.plan = plan
        self.only_explain = only_explain
        self.captures: list[Capture] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        capture = Capture(len(self.captures), gm)
        self.captures.append(capture)
        capture.graph_breaks = _graph_breaks(gm)
        capture.report += _break_remarks(capture.graph_breaks)
        rewritten = self._rewrite(gm, capture)
        if rewritten is None:
            restore_checkpoints(gm)  # Dynamo's own calls recompute nothing on torch 2.11
        if rewritten is None or self.only_explain or _better_left(capture):
            return gm.forward
        if any(isinstance(x, torch.Tensor) and x.is_cuda for x in example_inputs):
            capture.report += _attach_kernels()
        options = InductorOptions.of(self.config.inductor) if self.config.compile_regions else None
        for region in capture.regions.values():
            build_region(region, options)
        capture.rewritten = rewritten
        return run_outer(rewritten, example_inputs)

    def _rewrite(self, gm: fx.GraphModule, capture: Capture) -> fx.GraphModule | None:
        """The graph after lowering and all passes; None when it must run as it is."""
        capture.report += checkpoint_remarks(gm)
        open_loss_checkpoints(gm)
        try:
            lowered = lower(gm, grad_enabled=torch.is_grad_enabled())
        except Exception as error:
            # NOTE [Why lowering may fail softly]: the graph can hold anything that PyTorch can.
            # What cannot be lowered runs as the user wrote it, and the report says so.
            reason = f"the graph could not be lowered: {type(error).__name__}: {error}"
            text = reason.splitlines()[0][:500]
            capture.report += Report((Remark(RemarkKind.MISSED, "capture", "graph", "", text),))
            return None
        before = print_graph(lowered)
        for rewrite in pipeline(self.config.passes):
            if isinstance(rewrite, Recompute):  # it outlines what makes attention's operands
                capture.report += group_queries(lowered)
            report = rewrite.run(lowered, self.plan)
            after = print_graph(lowered)
            capture.stages.append(Stage(rewrite.name, before, after, report))
            capture.report += report
            before = after
        drop_unused_inputs(lowered)
        if not any(stage.name == Recompute.name for stage in capture.stages):
            capture.report += group_queries(lowered)
        capture.regions = dict(regions_of(lowered))
        judge_misses(capture.report, self.config.on_miss)
        return lowered


def _attach_kernels() -> Report:
    """Attach the GPU kernels of fxrl's ops; say so when they cannot be."""
    if kernels.register():
        return Report()
    reason = "the fused head runs as plain PyTorch on this GPU: Triton is not installed"
    cure = "pip install triton"
    return Report((Remark(RemarkKind.ANALYSIS, "kernels", "linear_logprob", "", reason, cure),))


def _better_left(capture: Capture) -> bool:
    """Whether the graph should run exactly as the user wrote it: no pass changed it.

    A checkpointed call must not run as Dynamo's stand-in, which recomputes nothing.
    """
    calls = capture.dynamo.graph.nodes
    return not capture.report.of_kind(RemarkKind.APPLIED) and not any(
        isinstance(node.target, HigherOrderOperator) for node in calls
    )


def _graph_breaks(gm: fx.GraphModule) -> list[GraphBreak]:
    """Why Dynamo ended this graph, if it was a break."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return []
    trace = "".join(
        f'File "{f.filename}", line {f.lineno}, in {f.name}\n' for f in reason.user_stack
    )
    return [GraphBreak(str(reason.reason).strip().splitlines()[0], source_of_trace(trace))]


def _break_remarks(breaks: Sequence[GraphBreak]) -> Report:
    return Report.of(
        Remark(
            RemarkKind.MISSED,
            "capture",
            "graph",
            found.source,
            f"graph break: {found.reason}",
            "move that code out of the loss, or write it with tensor ops",
        )
        for found in breaks
    )
